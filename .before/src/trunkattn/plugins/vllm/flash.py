"""The FlashAttention kernel that vLLM ships, for the prompts of a step on a GPU: each row reads its own KV there, and
is bound by arithmetic, so that sharing has little to give."""

from dataclasses import dataclass, field
from typing import Any, Final

import torch

from trunkattn import BatchAttention, Plan
from trunkattn.plugins.vllm import versions
from trunkattn.plugins.vllm.impl import LayerKind

WITH_SINKS: Final = (3, 4)  # versions of it that take them


@dataclass(frozen=True)
class PrefillRows:
    """The rows of a step behind those that decode.

    tokens: where their query tokens are in the step's. query_start_loc [rows + 1] begins with 0. max_seq_len: an upper
    bound. plans: for the kinds of layers that FlashAttention does not serve.
    """

    tokens: slice
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int
    plans: dict[LayerKind, tuple[BatchAttention, Plan]] = field(default_factory=dict)


@dataclass(frozen=True)
class FlashPrefill:
    """FlashAttention for one kind of layer."""

    kind: LayerKind
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
        """Writes output [tokens of rows, num_qo_heads, head_dim]; sinks as the model has them."""
        keys, values = map(with_regular_strides, caches)
        window = self.kind.sliding_window
        self.varlen(
            q=query,
            k=keys,
            v=values,
            out=output,
            cu_seqlens_q=rows.query_start_loc,
            max_seqlen_q=rows.max_query_len,
            seqused_k=rows.seq_lens,
            max_seqlen_k=rows.max_seq_len,
            softmax_scale=self.kind.sm_scale,
            causal=True,
            window_size=[-1, -1] if window is None else [window - 1, 0],
            block_table=rows.block_table,
            softcap=self.kind.logits_soft_cap or 0.0,
            fa_version=self.version,
            s_aux=sinks,
        )


def with_regular_strides(cache: torch.Tensor) -> torch.Tensor:
    """The same elements. The stride of an axis of size 1, as that of a single KV head, may be anything; FlashAttention
    describes it to the hardware (TMA) all the same, which wants multiples of 16 bytes."""
    strides = list(cache.stride())
    for axis in reversed(range(cache.dim() - 1)):
        if cache.shape[axis] == 1:
            strides[axis] = strides[axis + 1] * cache.shape[axis + 1]
    return cache if tuple(strides) == cache.stride() else cache.as_strided(cache.shape, strides)


def find_flash(kind: LayerKind) -> tuple[FlashPrefill | None, str]:
    """(FlashAttention, its name) if it can serve layers of this kind, else (None, why not). Called while a layer is
    made, when vLLM's configuration is set, which may name a version."""
    if kind.dtype not in (torch.float16, torch.bfloat16):
        return None, f"FlashAttention has no {kind.dtype}"
    if kind.kv_dtype not in (None, kind.dtype):
        return None, f"FlashAttention would take {kind.kv_dtype} caches with queries of that type only"
    if kind.head_dim % 8:
        return None, f"FlashAttention takes heads of a multiple of 8, not {kind.head_dim}"
    try:
        from vllm.v1.attention.backends.fa_utils import flash_attn_varlen_func, get_flash_attn_version
    except ImportError as error:
        return None, f"vLLM's FlashAttention cannot be imported: {error}"
    wanted = {"head_size": kind.head_dim, "has_sinks": kind.sinks, "requires_softcap": kind.logits_soft_cap is not None}
    version = versions.call_with_known(get_flash_attn_version, **wanted)
    if version is None:
        return None, "vLLM has no FlashAttention for this GPU"
    if kind.sinks and version not in WITH_SINKS:
        return None, f"FlashAttention {version} has no sinks"
    return FlashPrefill(kind, version, flash_attn_varlen_func), f"FlashAttention {version}"
