"""vLLM's own FlashAttention kernel, for the prompts of a step on a GPU. Each row reads its own KV. Arithmetic bounds
prompts, so sharing would save little."""

from dataclasses import dataclass, field
from typing import Any, Final

import torch

from trunkattn import BatchAttention, Plan
from trunkattn.integrations.layer_spec import LayerSpec
from trunkattn.integrations.vllm import versions
from trunkattn.integrations.vllm.context_parallel import ContextGroup
from trunkattn.integrations.vllm.impl import StepTensors

WITH_SINKS: Final = (3, 4)  # versions of FlashAttention that support sinks


@dataclass(frozen=True)
class PrefillRows:
    """The rows of a step after those that decode.

    Attributes:
        tokens: where their query tokens are among the step's.
        query_start_loc: [rows + 1], begins with 0.
        seq_lens, block_table: see `BatchAttention.plan`.
        max_query_len: most query tokens of a row.
        max_seq_len: an upper bound of `seq_lens`.
        plans: for layers that only our own kernels can compute.
        context_lens: where ranks share each request, the tokens before these rows that this rank holds; None: none of
            the rows has any before it, on any rank.
        max_context_len: an upper bound of `context_lens`, the same on every rank.
    """

    tokens: slice
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    plans: dict[LayerSpec, tuple[BatchAttention, Plan]] = field(default_factory=dict)
    context_lens: torch.Tensor | None = None
    max_context_len: int = 0


def with_regular_strides(cache: torch.Tensor) -> torch.Tensor:
    """Returns a view of a cache with the regular stride on every axis of size 1.

    Any stride is valid on such an axis, for example that of a single KV head. But FlashAttention passes it to the TMA,
    which needs multiples of 16 bytes.
    """
    strides = list(cache.stride())
    for axis in reversed(range(cache.dim() - 1)):
        if cache.shape[axis] == 1:
            strides[axis] = strides[axis + 1] * cache.shape[axis + 1]
    return cache if tuple(strides) == cache.stride() else cache.as_strided(cache.shape, strides)


@dataclass(frozen=True)
class FlashPrefill:
    """FlashAttention for the layers of one spec.

    Attributes:
        spec: the layers' attention.
        version: 2, 3 or 4.
        varlen: vLLM's `flash_attn_varlen_func`.
    """

    spec: LayerSpec
    version: int
    varlen: Any

    def run(
        self,
        rows: PrefillRows,
        query: torch.Tensor,
        caches: tuple[torch.Tensor, torch.Tensor],
        output: torch.Tensor,
        sinks: torch.Tensor | None,
    ) -> None:
        """Writes output [tokens of the rows, num_qo_heads, head_dim]. `sinks` have the model's own dtype."""
        keys, values = map(with_regular_strides, caches)
        window = self.spec.sliding_window
        self.varlen(
            q=query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=rows.query_start_loc,
            max_seqlen_q=rows.max_query_len,
            seqused_k=rows.seq_lens,
            max_seqlen_k=rows.max_seq_len,
            softmax_scale=self.spec.sm_scale,
            causal=True,
            window_size=[-1, -1] if window is None else [window - 1, 0],
            block_table=rows.block_table,
            softcap=self.spec.logits_soft_cap or 0.0,
            fa_version=self.version,
            s_aux=sinks,
        )

    def run_on_ranks(
        self, rows: PrefillRows, tensors: StepTensors, caches: tuple[torch.Tensor, torch.Tensor], group: ContextGroup
    ) -> None:
        """Writes `tensors.output` where each rank holds a part of every request. The keys of the rows themselves are at
        hand. Earlier keys are spread over the ranks: each rank attends to its own with the heads of all ranks, and
        the results are merged."""
        common = {
            "cu_seqlens_q": rows.query_start_loc,
            "max_seqlen_q": rows.max_query_len,
            "softmax_scale": self.spec.sm_scale,
            "softcap": self.spec.logits_soft_cap or 0.0,
            "fa_version": self.version,
            "return_softmax_lse": True,
        }
        _, lse = self.varlen(
            q=tensors.query.contiguous(),
            k=tensors.key,
            v=tensors.value,
            out=tensors.output,
            cu_seqlens_k=rows.query_start_loc,
            max_seqlen_k=rows.max_query_len,
            causal=True,
            **common,
        )
        if rows.context_lens is None:
            return
        query = group.gather_heads(tensors.query)
        keys, values = map(with_regular_strides, caches)
        part, part_lse = self.varlen(
            q=query,
            k=keys,
            v=values,
            out=torch.empty_like(query),
            seqused_k=rows.context_lens,
            max_seqlen_k=rows.max_context_len,
            causal=False,
            block_table=rows.block_table,
            **common,
        )
        context, context_lse = group.merge(part, part_lse.transpose(0, 1))
        merge = versions.merge_attention_states()
        merge(tensors.output, context, context_lse.transpose(0, 1).contiguous(), tensors.output, lse)


def find_flash(spec: LayerSpec) -> tuple[FlashPrefill | None, str]:
    """Finds vLLM's FlashAttention for layers of this spec.

    To be called while a layer is made: then vLLM's configuration is set, which can select a version.

    Returns:
        (FlashAttention, its name), or (None, the reason why it cannot compute these layers).
    """
    if spec.batch_invariant:
        # Its own bits would not depend on the batch. But where a prompt is cut, what is cached and what is computed
        # again decide which tokens count as decoding, and those have the bits of our kernels.
        return None, "FlashAttention gives a token other bits than decoding does"
    if spec.dtype not in (torch.float16, torch.bfloat16):
        return None, f"FlashAttention does not support {spec.dtype}"
    if spec.kv_dtype not in (None, spec.dtype):
        return None, f"FlashAttention needs queries of the type of a {spec.kv_dtype} cache"
    if spec.head_dim % 8:
        return None, f"FlashAttention needs a head_dim that is a multiple of 8, not {spec.head_dim}"
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
    except ImportError as error:
        return None, f"vLLM's FlashAttention cannot be imported: {error}"
    wanted = {"head_size": spec.head_dim, "has_sinks": spec.sinks, "requires_softcap": spec.logits_soft_cap is not None}
    version = versions.call_with_known(get_flash_attn_version, **wanted)
    if version is None:
        return None, "vLLM has no FlashAttention for this GPU"
    if spec.sinks and version not in WITH_SINKS:
        return None, f"FlashAttention {version} does not support sinks"
    return FlashPrefill(spec, version, flash_attn_varlen_func), f"FlashAttention {version}"
