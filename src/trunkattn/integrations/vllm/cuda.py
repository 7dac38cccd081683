"""The back end on NVIDIA GPUs. `decode_builder` says how decodes are planned.

vLLM puts the rows that decode, or verify drafts, first in a step. Our kernels plan and run them; in a step without a
full graph each layer has its own graph, unless `enforce_eager` is set. The rows after them, prompts, run in
FlashAttention, or in one kernel of ours together with the decodes where that is sooner (H100 and H200, 16-bit caches,
head_dim 128). For layers that FlashAttention does not support (8-bit caches, float32) our kernels run the prompts too
(`own_prompts`).

With VLLM_BATCH_INVARIANT=1 our kernels run all rows: decodes are planned on the device, prompts on the host.
"""

import threading
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from trunkattn import BatchAttention, Capacity, Plan, PromptChunks
from trunkattn.integrations.layer_spec import LayerSpec
from trunkattn.integrations.prompt_plans import room_for
from trunkattn.integrations.vllm import versions
from trunkattn.integrations.vllm.backend import TrunkAttentionBackend
from trunkattn.integrations.vllm.context_parallel import context_ranks
from trunkattn.integrations.vllm.cuda_impl import TrunkAttentionCudaImpl
from trunkattn.integrations.vllm.decode_builder import DecodeBuilder, DecodeRows, PlansToRun
from trunkattn.integrations.vllm.flash import PrefillRows
from trunkattn.integrations.vllm.impl import check_supported
from trunkattn.integrations.vllm.metadata import GroupBuilder, check_causal
from trunkattn.integrations.vllm.own_prompts import OwnPrompts
from trunkattn.integrations.warm_up import warm_up

# Of prompts beside decodes, up to which a layer has a graph of its own: longer ones keep the GPU busy while the host
# launches the next layer
_CAPTURED_CHUNK_TOKENS: Final = 2048


class TrunkAttentionCudaBackend(TrunkAttentionBackend):
    """Decoder self-attention over vLLM's paged KV cache on a GPU, with CUDA graphs; see `TrunkAttentionBackend`."""

    @staticmethod
    def get_impl_cls() -> type[TrunkAttentionCudaImpl]:
        """The class of a layer's attention."""
        return TrunkAttentionCudaImpl

    @staticmethod
    def get_builder_cls() -> "type[TrunkAttentionCudaBuilder]":
        """The class that plans a step."""
        return TrunkAttentionCudaBuilder

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The layout that vLLM chose and that KV connectors rely on; vLLM up to 0.28 asks for it. Our kernels accept
        any layout."""
        return versions.kv_cache_stride_order(include_num_layers_dimension)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Plans are made from the query lengths on the device."""
        return True

    @classmethod
    def validate_configuration(cls, *args: Any, **options: Any) -> list[str]:
        """The reasons why not, for vLLM's error, and what to do. Weights may have a scale for each head that a cache of
        16 bits does not need."""
        if "use_per_head_quant_scales" in options and not versions.has_scales(options.get("kv_cache_dtype")):
            options["use_per_head_quant_scales"] = False
        reasons: list[str] = super().validate_configuration(*args, **options)
        return [*reasons, versions.instead_of_separate(options)] if reasons else []


@dataclass
class CudaStep(AttentionMetadata):
    """A step for the layers of a group.

    Attributes:
        plans: plans of the rows that decode, each with the function that runs it, called as `BatchAttention.run`.
        planned: what they were planned from.
        decodes: rows that decode, padding included.
        requests: rows that decode, without padding.
        decode_tokens: their query tokens; with `chunks` those of all rows.
        prefill: the other rows; None: there are none, or `chunks`.
        nothing_local: [rows, 1] bool, of each row that decodes, whether this rank holds none of its keys; None: each
            request is on one rank.
        chunks: whether the plans hold the other rows too, as prompt chunks.
        launched: whether a layer has run the step from the host, which a full CUDA graph does not. vLLM copies the
            steps of layers with fast prefill, and all copies have this one object.
    """

    plans: PlansToRun
    planned: DecodeRows
    decodes: int
    requests: int
    decode_tokens: int
    prefill: PrefillRows | None
    nothing_local: torch.Tensor | None = None
    chunks: bool = False
    launched: threading.Event = field(default_factory=threading.Event)

    @property
    def path(self) -> str:
        """The path for the counters, valid after the step."""
        if not self.launched.is_set():
            return "full_graph"
        if self.prefill is None and not self.chunks:
            return "decode"
        return "mixed" if self.decodes else "prefill"


class TrunkAttentionCudaBuilder(DecodeBuilder, GroupBuilder):
    """Plans the steps of one attention group on a GPU."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._ranks = context_ranks(self.modules.values(), vllm_config)
        if self.shares_requests and self.attends_in_chunks:
            check_supported(["decode context parallelism with attention within chunks"])
        self._own_prompts: OwnPrompts | None = None
        self._decode_plans: dict[LayerSpec, Plan] = {}  # the plans without the launch for prompt chunks
        self._may_overlap = False
        self.init_decodes(kv_cache_spec.block_size, self._runs_prompts)

    def _runs_prompts(self, spec: LayerSpec) -> str:
        impl = next(layer.impl for layer in self.modules.values() if layer.impl.layer_spec == spec)
        return impl.flash_note if impl.flash else f"TrunkAttention too, since {impl.flash_note}"

    @property
    def shares_requests(self) -> bool:
        """Whether several ranks hold a part of each request's keys."""
        return self._ranks is not None

    def decodes_of(self, step: CudaStep) -> CudaStep:
        """The step itself, whose plans are those of the rows that decode."""
        return step

    def path_of(self, step: CudaStep) -> str:
        """The path of a step for the counters, once it has run."""
        return step.path

    def _step(self, batch: Any) -> CudaStep:
        check_causal(batch)
        decodes, prefills, decode_tokens, prefill_tokens = split_decodes_and_prefills(
            batch, decode_threshold=self._decode_query_len
        )
        if not self.attentions:
            self._allocate(batch.block_table_tensor.shape[1])
        chunks = self._chunks(batch, decodes, decode_tokens) if decodes and prefills and self._may_overlap else None
        planned, nothing_local = self._decode_rows(batch, decodes if chunks is None else decodes + prefills)
        prefill = None
        if prefills and chunks is None:
            prefill = self._prefill_rows(batch, decodes, slice(decode_tokens, decode_tokens + prefill_tokens))
        return CudaStep(
            plans=self._plan(planned, chunks) if decodes else {},
            planned=planned,
            decodes=decodes,
            requests=int((batch.query_start_loc_cpu[: decodes + 1].diff() > 0).sum()),
            decode_tokens=decode_tokens if chunks is None else decode_tokens + prefill_tokens,
            prefill=prefill,
            nothing_local=nothing_local,
            chunks=chunks is not None,
        )

    def _chunks(self, batch: Any, decodes: int, first_token: int) -> PromptChunks | None:
        """What the host knows of the prompts, if the decodes are to be computed together with them."""
        lens = getattr(batch, "seq_lens_cpu_upper_bound", None)  # of prompts, the lengths themselves
        query_lens = batch.query_start_loc_cpu[decodes : batch.num_reqs + 1].diff().to(torch.int32)
        if lens is None or int(query_lens.min()) < 1:
            return None
        rows = lens[decodes : batch.num_reqs].to(torch.int32)
        chunks = PromptChunks(first_token, query_lens, rows, int(lens[:decodes].sum()))
        return chunks if all(attention.overlaps(chunks) for attention in self.attentions.values()) else None

    def _allocate(self, max_pages_per_request: int) -> None:
        """Makes the attentions, for the largest step."""
        self.find_layers()
        capacity = self._capacity(max_pages_per_request, self._most_chunk_tokens())
        self._make_attentions(capacity)
        self._may_overlap = self._find_overlap(capacity)
        if not self._may_overlap:  # room for prompt chunks would lie idle, and each plan would empty it
            capacity = replace(capacity, max_chunk_tokens=0)
            self._make_attentions(capacity)
        own = {layer.impl.layer_spec for layer in self.modules.values() if layer.impl.flash is None}
        if own:
            tokens = int(self.vllm_config.scheduler_config.max_num_batched_tokens)
            configs = {spec: self.configs[spec] for spec in own}
            self._own_prompts = OwnPrompts(configs, self.device, capacity, room_for(capacity.max_requests, tokens))
        self._make_ready(capacity, min(_CAPTURED_CHUNK_TOKENS, capacity.max_chunk_tokens))

    def _most_chunk_tokens(self) -> int:
        """Most tokens of prompts that our kernels may compute with the decodes of a step; 0: they never do."""
        return 0 if self.shares_requests else int(self.vllm_config.scheduler_config.max_num_batched_tokens)

    def _find_overlap(self, capacity: Capacity) -> bool:
        """Whether one kernel may ever compute prompts and decodes together."""
        longest = min(capacity.max_chunk_tokens, capacity.max_pages_per_request * self.kv_cache_spec.block_size)
        whole = torch.tensor([longest], dtype=torch.int32, device="cpu")
        attentions = {*self.attentions.values()}
        may_mix = longest > 0 and capacity.max_requests > 1  # a prompt and a request that decodes
        return may_mix and all(each.overlaps(PromptChunks(1, whole, whole)) for each in attentions)

    def _warm_up(self, max_pages_per_request: int) -> None:
        """Compiles the kernels that steps run, before any request waits for them."""
        decode, rows = (self._rows_of_zeros(count, max_pages_per_request) for count in (1, 2))
        one = torch.ones(1, dtype=torch.int32, device="cpu")

        def work() -> None:
            self._plan_and_run(decode)
            if self._may_overlap:
                self._plan_and_run(rows, PromptChunks(1, one, one))
            if self._own_prompts is not None:
                self._own_prompts.run_once(self._caches(), self.kv_cache_spec.block_size)

        warm_up(work)

    def _decode_rows(self, batch: Any, count: int) -> tuple[DecodeRows, torch.Tensor | None]:
        """The first rows of a step, and of each whether this rank holds none of its keys; see `CudaStep`."""
        lens, nothing_local = batch.seq_lens[:count], None
        if self._ranks is not None and self._rows_of_rank is not None:
            # This step's token is among the keys already, on one of the ranks.
            lens, nothing_local = self._rows_of_rank.place(self._ranks.local_lens(lens))
        return DecodeRows(batch.block_table_tensor[:count], lens, batch.query_start_loc[: count + 1]), nothing_local

    def _plan(self, rows: DecodeRows, chunks: PromptChunks | None = None) -> PlansToRun:
        """Plans of rows that decode, and after them of prompt chunks."""
        found = super()._plan(rows, chunks)
        if chunks is not None:
            return found
        for spec, (_, plan) in found.items():
            if spec not in self._decode_plans:
                self._decode_plans[spec] = plan.only("decodes")
        return {spec: (run, self._decode_plans[spec]) for spec, (run, _) in found.items()}

    def _prefill_rows(self, batch: Any, first: int, tokens: slice) -> PrefillRows:
        rows = slice(first, batch.num_reqs)
        starts = batch.query_start_loc[first : batch.num_reqs + 1]
        if tokens.start:
            starts = starts - tokens.start
        table, lens = batch.block_table_tensor[rows], batch.seq_lens[rows]
        plans: dict[LayerSpec, tuple[BatchAttention, Plan]] = {}
        if self._own_prompts is not None:
            bounds = getattr(batch, "seq_lens_cpu_upper_bound", None)  # of prompts, the lengths themselves
            query_lens = batch.query_start_loc_cpu[first : batch.num_reqs + 1].diff()
            known = self._own_prompts.known(query_lens, None if bounds is None else bounds[rows])
            plans = self._own_prompts.plan(table, lens, starts, known)
        context_lens, most = None, 0
        if self._ranks is not None and _any_context(batch, rows):
            context_lens = self._ranks.local_lens(lens - starts.diff())
            most = self._ranks.most_local(batch.max_seq_len)
        return PrefillRows(
            tokens=tokens,
            query_start_loc=starts,
            seq_lens=lens,
            block_table=table,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.max_seq_len,
            plans=plans,
            context_lens=context_lens,
            max_context_len=most,
        )


def _any_context(batch: Any, rows: slice) -> bool:
    """Whether a row has tokens before this step's, as far as the host knows; the same on every rank."""
    bounds = getattr(batch, "seq_lens_cpu_upper_bound", None)
    if bounds is None:
        return True
    query_lens = batch.query_start_loc_cpu[rows.start : rows.stop + 1].diff()
    return bool((bounds[rows] > query_lens).any())
