"""The back end on NVIDIA GPUs: plans are made by kernels, into buffers that stay where they are, so that the full CUDA
graphs which vLLM captures for decoding serve every batch, and no step waits for the device to be planned. (What was
read is fetched without waiting too, unless 256 steps have passed and the last fetch is still under way.)

A step's rows that decode, or verify drafts, are planned and run by our kernels; in steps that no full graph runs, each
layer by a graph of its own, unless `enforce_eager` is set. vLLM puts them first; the rows behind, prompts, run in
FlashAttention. For layers that it does not serve (8-bit caches, float32) our kernels run the prompts too, planned on
the host: that waits for the device, in steps that have prompts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from trunkattn import BatchAttention, Capacity, Plan
from trunkattn.attention_captured import CapturedRun
from trunkattn.plugins.vllm import versions
from trunkattn.plugins.vllm.backend import TrunkAttentionBackend
from trunkattn.plugins.vllm.cuda_impl import TrunkAttentionCudaImpl
from trunkattn.plugins.vllm.flash import PrefillRows
from trunkattn.plugins.vllm.impl import LayerKind
from trunkattn.plugins.vllm.metadata import GroupBuilder, check_causal, features
from trunkattn.plugins.vllm.metrics import DeviceTraffic

logger = init_logger("vllm.trunkattn")


class TrunkAttentionCudaBackend(TrunkAttentionBackend):
    """See TrunkAttentionBackend."""

    @staticmethod
    def get_impl_cls() -> type[TrunkAttentionCudaImpl]:
        """What a layer runs."""
        return TrunkAttentionCudaImpl

    @staticmethod
    def get_builder_cls() -> "type[TrunkAttentionCudaBuilder]":
        """What a step plans with."""
        return TrunkAttentionCudaBuilder

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """Asked for up to 0.28: the layout that vLLM chose, which KV connectors rely on. Our kernels take any."""
        return versions.kv_cache_stride_order(include_num_layers_dimension)

    @classmethod
    def validate_configuration(cls, *args: Any, **options: Any) -> list[str]:
        """Why not, for the error that vLLM raises, and what to do."""
        reasons: list[str] = super().validate_configuration(*args, **options)
        return [*reasons, "turn this off, or leave attention_backend out"] if reasons else []


@dataclass
class CudaStep(AttentionMetadata):
    """What the layers of a group need of a step. plans: of the rows that decode, each behind what is to run it, called
    as `BatchAttention.run`. requests: of those rows, the ones that are no padding. launched: whether a layer has run it
    from the host; a full CUDA graph does not."""

    plans: dict[LayerKind, tuple[Callable[..., object], Plan]]
    decodes: int
    requests: int
    decode_tokens: int
    prefill: PrefillRows | None
    launched: bool = False

    @property
    def path(self) -> str:
        """For the counters, once the step is over."""
        if not self.launched:
            return "full_graph"
        if self.prefill is None:
            return "decode"
        return "mixed" if self.decodes else "prefill"


class TrunkAttentionCudaBuilder(GroupBuilder):
    """Plans the steps of one attention group on a GPU; each kind of layer has one plan, filled anew by every step."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)
        self._decode_query_len = int(self.reorder_batch_threshold or 1)
        # What is on the device is made by the first step: before any graph is captured, but after the KV cache, whose
        # size it needs, and outside of the memory pool that vLLM makes builders in, which is lost in its sleep mode.
        self.attentions: dict[LayerKind, BatchAttention] = {}
        self._prefill_attentions: dict[LayerKind, BatchAttention] = {}
        self._device_traffic: DeviceTraffic | None = None
        self._plans: dict[LayerKind, Plan] = {}
        self._runs: dict[LayerKind, Callable[..., object]] = {}
        self._widths = self.widths()
        self._reported = 0
        self._last: CudaStep | None = None
        for kind, count in self.layers.items():
            impl = next(layer.impl for layer in self.modules.values() if layer.impl.kind == kind)
            prefill = impl.flash_note if impl.flash else f"TrunkAttention too, since {impl.flash_note}"
            logger.info(
                "TrunkAttention runs the decoding of %d layers (%s; blocks of %d tokens; up to %d query tokens a "
                "request); prompts run in %s.",
                *(count, features(kind), kv_cache_spec.block_size, self._decode_query_len, prefill),
            )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> CudaStep:
        """Plans a step; see TrunkAttentionBuilder.build. Where a full CUDA graph runs it, rows and tokens are padded:
        rows without query tokens at the end, of which the graph computes nothing."""
        step = self._step(common_attn_metadata)
        assert self._device_traffic is not None
        self._count(step, self._device_traffic)
        return step

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> CudaStep:
        """The same for rows that mean nothing; it fills the plans that every graph reads, and is not counted."""
        return self._step(common_attn_metadata)

    def _step(self, batch: Any) -> CudaStep:
        check_causal(batch)
        decodes, prefills, decode_tokens, prefill_tokens = split_decodes_and_prefills(
            batch, decode_threshold=self._decode_query_len
        )
        if not self.attentions:
            self._allocate(batch.block_table_tensor.shape[1])
        plans = self._plan(batch, decodes) if decodes else {}
        prefill = None
        if prefills:
            prefill = self._prefill_rows(batch, decodes, slice(decode_tokens, decode_tokens + prefill_tokens))
        requests = int((batch.query_start_loc_cpu[: decodes + 1].diff() > 0).sum())
        return CudaStep(plans, decodes, requests, decode_tokens, prefill)

    def _allocate(self, max_pages_per_request: int) -> None:
        """For the most that a step can decode: rows of the block table are as wide as the longest request."""
        rows = int(self.vllm_config.scheduler_config.max_num_seqs)
        capacity = Capacity(
            max_requests=rows,
            max_query_tokens=rows * self._decode_query_len,
            max_pages_per_request=max_pages_per_request,
            num_pages=versions.num_blocks(self.modules.values()),
            max_query_len=self._decode_query_len,
        )
        # one for all windows of an attention: they share the workspace
        shared = {config: BatchAttention(config, self.device, capacity) for config in self.configs.values()}
        self.attentions = {kind: shared[config] for kind, config in self.configs.items()}
        eager = getattr(self.vllm_config.model_config, "enforce_eager", False)
        runs = {config: each.run if eager else CapturedRun(each) for config, each in shared.items()}
        self._runs = {kind: runs[config] for kind, config in self.configs.items()}
        own = {layer.impl.kind for layer in self.modules.values() if layer.impl.flash is None}
        shared = {self.configs[kind]: BatchAttention(self.configs[kind], self.device) for kind in own}
        self._prefill_attentions = {kind: shared[self.configs[kind]] for kind in own}
        errors = [attention.errors for attention in {*self.attentions.values()} if attention.errors is not None]
        self._device_traffic = DeviceTraffic(len(self.layers), self.device, errors)

    def _plan(self, batch: Any, decodes: int) -> dict[LayerKind, tuple[Callable[..., object], Plan]]:
        rows = (
            batch.block_table_tensor[:decodes], batch.seq_lens[:decodes], batch.query_start_loc[: decodes + 1],
        )  # fmt: skip
        for kind, attention in self.attentions.items():
            self._plans[kind] = attention.plan(*rows, sliding_window=kind.sliding_window, into=self._plans.get(kind))
        return {kind: (self._runs[kind], plan) for kind, plan in self._plans.items()}

    def _prefill_rows(self, batch: Any, first: int, tokens: slice) -> PrefillRows:
        rows = slice(first, batch.num_reqs)
        starts = batch.query_start_loc[first : batch.num_reqs + 1]
        if tokens.start:
            starts = starts - tokens.start
        table, lens = batch.block_table_tensor[rows], batch.seq_lens[rows]
        plans = {
            kind: (attention, attention.plan(table, lens, starts, sliding_window=kind.sliding_window))
            for kind, attention in self._prefill_attentions.items()
        }
        return PrefillRows(tokens, starts, lens, table, batch.max_query_len, batch.max_seq_len, plans)

    def _count(self, step: CudaStep, traffic: DeviceTraffic) -> None:
        """Counts the path of the last step, which is over, and what has arrived of the traffic of earlier ones."""
        last, self._last = self._last, step
        if last is not None:
            self.ledger.step(last.path)
        if step.plans:
            traffic.note([plan.traffic for _, plan in step.plans.values()], step.requests)
        else:
            self.ledger.unshared("no_decode")
        full = traffic.full
        for requests, tokens in traffic.take(wait=full):
            totals = [(read * width, alone * width) for (read, alone), width in zip(tokens, self._widths, strict=True)]
            self.ledger.read(sum(read for read, _ in totals), sum(alone for _, alone in totals), requests)
        if traffic.errors != self._reported:
            from trunkattn.kernels.device_plan import errors_of  # with Triton, which tests without a GPU do not have

            self._reported = traffic.errors
            logger.error("TrunkAttention met a batch that was out of bounds: %s", "; ".join(errors_of(self._reported)))
        if self.ledger.log() or full:
            traffic.send()
