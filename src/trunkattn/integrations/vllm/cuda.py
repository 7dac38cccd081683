"""The back end on NVIDIA GPUs.

Kernels plan each step into fixed buffers. So the full CUDA graphs that vLLM captures for decoding serve every batch,
and no step waits for its plan. (The counts of KV reads are fetched without a wait too, unless 256 steps pass before a
fetch arrives.)

vLLM puts the rows that decode, or verify drafts, first in a step. Our kernels plan and run them; in a step without a
full graph each layer has its own graph, unless `enforce_eager` is set. The rows after them, prompts, run in
FlashAttention, or in one kernel of ours together with the decodes where that is sooner (H100 and H200, 16-bit caches,
head_dim 128). For layers that FlashAttention does not support (8-bit caches, float32) our kernels run the prompts too
(`own_prompts`).

With VLLM_BATCH_INVARIANT=1 our kernels run all rows: decodes are planned on the device, prompts on the host.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from trunkattn import BatchAttention, Capacity, Plan, PromptChunks
from trunkattn.integrations.captured_run import CapturedRun
from trunkattn.integrations.device_traffic import DeviceTraffic, count_arrivals
from trunkattn.integrations.layer_spec import LayerSpec
from trunkattn.integrations.prompt_plans import room_for
from trunkattn.integrations.vllm import versions
from trunkattn.integrations.vllm.backend import TrunkAttentionBackend
from trunkattn.integrations.vllm.context_parallel import context_ranks
from trunkattn.integrations.vllm.cuda_impl import TrunkAttentionCudaImpl
from trunkattn.integrations.vllm.decode_graphs import DecodeGraphs, DecodeRows
from trunkattn.integrations.vllm.flash import PrefillRows
from trunkattn.integrations.vllm.impl import check_supported
from trunkattn.integrations.vllm.metadata import GroupBuilder, StepPlans, check_causal
from trunkattn.integrations.vllm.own_prompts import OwnPrompts
from trunkattn.integrations.warm_up import run_zeros, warm_up

logger = init_logger("vllm.trunkattn")
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
        return [*reasons, versions.instead(options)] if reasons else []


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

    plans: dict[LayerSpec, tuple[Callable[..., Any], Plan]]
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


class TrunkAttentionCudaBuilder(DecodeGraphs, GroupBuilder):
    """Plans the steps of one attention group on a GPU. Each layer spec has one plan, which every step refills."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._decode_query_len = int(self.reorder_batch_threshold or 1)
        self._ranks = context_ranks(self.modules.values(), vllm_config)
        self._nothing_local: torch.Tensor | None = None
        self._local_lens: torch.Tensor | None = None
        if self._ranks is not None and self.attends_in_chunks:
            check_supported(["decode context parallelism with attention within chunks"])
        # On one rank a plan depends on nothing but tensors that stay where they are, and is made on the device. Rows of
        # chunks are new tensors in each step.
        self.supports_draft_decode_metadata_update = self._ranks is None and not self.attends_in_chunks
        # The first step makes the tensors on the device. That is before any graph is captured and after the KV cache,
        # whose size they need. It is also outside the memory pool in which vLLM makes builders and which its sleep mode
        # discards.
        self.attentions: dict[LayerSpec, BatchAttention] = {}
        self._own_prompts: OwnPrompts | None = None
        self._device_traffic: DeviceTraffic | None = None
        self._plans: dict[LayerSpec, Plan] = {}
        self._decode_plans: dict[LayerSpec, Plan] = {}  # the same without the launch for prompt chunks
        self._may_overlap = False
        self._runs: dict[LayerSpec, Callable[..., Any]] = {}
        self._last: CudaStep | None = None
        for spec, count in self.layers.items():
            impl = next(layer.impl for layer in self.modules.values() if layer.impl.layer_spec == spec)
            prefill = impl.flash_note if impl.flash else f"TrunkAttention too, since {impl.flash_note}"
            logger.info(
                "TrunkAttention runs the decoding in %d layers (%s; blocks of %d tokens; up to %d query tokens a "
                "request); prompts run in %s.",
                *(count, spec, kv_cache_spec.block_size, self._decode_query_len, prefill),
            )

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> CudaStep | StepPlans:
        """Plans a step; see TrunkAttentionBuilder.build. For a full CUDA graph the step has padding at its end: rows
        without query tokens, which the graph does not compute."""
        if not self.is_run(fast_build):
            return StepPlans({})
        step = self._step(common_attn_metadata)
        assert self._device_traffic is not None
        self._count(step, self._device_traffic)
        return step

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> CudaStep | StepPlans:
        """Plans a step of arbitrary rows into the plans that every graph reads. The step is not counted."""
        return self._step(common_attn_metadata) if self.is_run(fast_build=False) else StepPlans({})

    def update_draft_decode_metadata(self, metadata: CudaStep) -> None:
        """Plans a step again from its tensors, which hold the next token of each request. vLLM from 0.33 on calls it
        between the tokens of a draft, and records it in the CUDA graph that drafts all of them."""
        self._plan(metadata.planned)

    def _step(self, batch: Any) -> CudaStep:
        check_causal(batch)
        decodes, prefills, decode_tokens, prefill_tokens = split_decodes_and_prefills(
            batch, decode_threshold=self._decode_query_len
        )
        if not self.attentions:
            self._allocate(batch.block_table_tensor.shape[1])
        requests = int((batch.query_start_loc_cpu[: decodes + 1].diff() > 0).sum())
        chunks = self._chunks(batch, decodes, decode_tokens) if decodes and prefills and self._may_overlap else None
        if chunks is not None:
            planned = self._decode_rows(batch, decodes + prefills)
            plans = self._plan(planned, chunks)
            return CudaStep(
                plans=plans,
                planned=planned,
                decodes=decodes,
                requests=requests,
                decode_tokens=decode_tokens + prefill_tokens,
                prefill=None,
                chunks=True,
            )
        planned = self._decode_rows(batch, decodes)
        plans = self._plan(planned) if decodes else {}
        prefill = None
        if prefills:
            prefill = self._prefill_rows(batch, decodes, slice(decode_tokens, decode_tokens + prefill_tokens))
        return CudaStep(
            plans=plans,
            planned=planned,
            decodes=decodes,
            requests=requests,
            decode_tokens=decode_tokens,
            prefill=prefill,
            nothing_local=self._nothing_local,
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
        """Makes the attentions, for the largest step. A row of the block table is as wide as the longest request."""
        self.find_layers()
        rows = int(self.vllm_config.scheduler_config.max_num_seqs)
        if self.attends_in_chunks:  # the tokens of a request that decodes may lie in two chunks
            rows *= 2
        capacity = Capacity(
            max_requests=rows,
            max_query_tokens=rows * self._decode_query_len,
            max_pages_per_request=max_pages_per_request,
            num_pages=versions.num_blocks(self.modules.values()),
            max_query_len=self._decode_query_len,
            max_chunk_tokens=self._most_chunk_tokens(),
        )
        self._make_attentions(capacity)
        self._may_overlap = self._find_overlap(capacity)
        if not self._may_overlap:  # room for prompt chunks would lie idle, and each plan would empty it
            capacity = replace(capacity, max_chunk_tokens=0)
            self._make_attentions(capacity)
        eager = getattr(self.vllm_config.model_config, "enforce_eager", False)
        direct = eager or self._ranks is not None  # a graph of a layer's own would not return the log-sum-exps
        chunk_tokens = min(_CAPTURED_CHUNK_TOKENS, capacity.max_chunk_tokens)
        attentions = {*self.attentions.values()}
        runs = {each: each.run if direct else CapturedRun(each, chunk_tokens) for each in attentions}
        self._runs = {spec: runs[attention] for spec, attention in self.attentions.items()}
        if self._ranks is not None:
            self._nothing_local = torch.zeros(rows, 1, dtype=torch.bool, device=self.device)
            self._local_lens = torch.zeros(rows, dtype=torch.int32, device=self.device)
        own = {layer.impl.layer_spec for layer in self.modules.values() if layer.impl.flash is None}
        if own:
            tokens = int(self.vllm_config.scheduler_config.max_num_batched_tokens)
            configs = {spec: self.configs[spec] for spec in own}
            self._own_prompts = OwnPrompts(configs, self.device, capacity, room_for(rows, tokens))
        if self.device.type == "cuda":
            self._warm_up(capacity.max_pages_per_request)
        errors = [attention.errors for attention in attentions if attention.errors is not None]
        self._device_traffic = DeviceTraffic(len(self.layers), self.device, errors)

    def _make_attentions(self, capacity: Capacity) -> None:
        """One attention serves all windows of a configuration, so that they share the workspace."""
        self.attentions = {}  # frees the memory of the earlier ones first
        shared = {config: BatchAttention(config, self.device, capacity) for config in self.configs.values()}
        self.attentions = {spec: shared[config] for spec, config in self.configs.items()}

    def _most_chunk_tokens(self) -> int:
        """Most tokens of prompts that our kernels may compute with the decodes of a step; 0: they never do."""
        return 0 if self._ranks is not None else int(self.vllm_config.scheduler_config.max_num_batched_tokens)

    def _find_overlap(self, capacity: Capacity) -> bool:
        """Whether one kernel may ever compute prompts and decodes together."""
        longest = min(capacity.max_chunk_tokens, capacity.max_pages_per_request * self.kv_cache_spec.block_size)
        whole = torch.tensor([longest], dtype=torch.int32, device="cpu")
        attentions = {*self.attentions.values()}
        may_mix = longest > 0 and capacity.max_requests > 1  # a prompt and a request that decodes
        return may_mix and all(each.overlaps(PromptChunks(1, whole, whole)) for each in attentions)

    def _warm_up(self, max_pages_per_request: int) -> None:
        """Compiles the kernels that steps run, before any request waits for them."""
        rows = DecodeRows(
            torch.zeros(2, max_pages_per_request, dtype=torch.int32, device=self.device),
            torch.ones(2, dtype=torch.int32, device=self.device),
            torch.arange(3, dtype=torch.int32, device=self.device),
        )
        decode = DecodeRows(rows.block_table[:1], rows.seq_lens[:1], rows.query_start_loc[:2])
        one = torch.ones(1, dtype=torch.int32, device="cpu")
        caches = {layer.impl.layer_spec: layer.impl.caches_of(layer.kv_cache) for layer in self.modules.values()}

        def plan_and_run(rows: DecodeRows, chunks: PromptChunks | None = None) -> None:
            for spec, (_, plan) in self._plan(rows, chunks).items():
                queries, return_lse = len(rows.seq_lens), self._ranks is not None
                run_zeros(self.attentions[spec], plan, caches[spec], queries, return_lse=return_lse)

        def work() -> None:
            plan_and_run(decode)
            if self._may_overlap:
                plan_and_run(rows, PromptChunks(1, one, one))
            if self._own_prompts is not None:
                self._own_prompts.run_once(caches, self.kv_cache_spec.block_size)

        warm_up(work)

    def _decode_rows(self, batch: Any, decodes: int) -> DecodeRows:
        lens = batch.seq_lens[:decodes]
        if self._ranks is not None and self._nothing_local is not None and self._local_lens is not None:
            # This step's token is among the keys already, on one of the ranks. A row without any on this rank reads one
            # that is not its own; its log-sum-exp becomes -inf, so that the merge leaves it out. The lengths have a
            # place of their own, since the planner's graph is bound to it.
            local, lens = self._ranks.local_lens(lens), self._local_lens[:decodes]
            self._nothing_local[:decodes, 0] = local == 0
            lens.copy_(local.clamp(min=1))
        return DecodeRows(batch.block_table_tensor[:decodes], lens, batch.query_start_loc[: decodes + 1])

    def _plan(
        self, rows: DecodeRows, chunks: PromptChunks | None = None
    ) -> dict[LayerSpec, tuple[Callable[..., Any], Plan]]:
        """Plans of rows that decode, and behind them of prompt chunks."""
        for spec, attention in self.attentions.items():
            options: dict[str, Any] = {"sliding_window": spec.sliding_window, "into": self._plans.get(spec)}
            options |= {"chunks": chunks} if chunks is not None else {}
            plan = self._plans[spec] = attention.plan(*rows, **options)
            if chunks is None and spec not in self._decode_plans:
                self._decode_plans[spec] = plan.only("decodes")
        plans = self._decode_plans if chunks is None else self._plans
        return {spec: (self._runs[spec], plan) for spec, plan in plans.items()}

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

    def _count(self, step: CudaStep, traffic: DeviceTraffic) -> None:
        """Counts the path of the last step, which has run by now, and the traffic of earlier steps that has arrived."""
        last, self._last = self._last, step
        if last is not None:
            self.stats.count_step(last.path)
        plans = [plan for _, plan in step.plans.values()]
        if not plans:
            self.stats.count_unshared("no_decode")
        else:
            traffic.note([counted for plan in plans if (counted := plan.counters.kv_tokens) is not None], step.requests)
        count_arrivals(self.stats, traffic, self.kv_token_bytes(), logger.error)


def _any_context(batch: Any, rows: slice) -> bool:
    """Whether a row has tokens before this step's, as far as the host knows; the same on every rank."""
    bounds = getattr(batch, "seq_lens_cpu_upper_bound", None)
    if bounds is None:
        return True
    query_lens = batch.query_start_loc_cpu[rows.start : rows.stop + 1].diff()
    return bool((bounds[rows] > query_lens).any())
