"""Plans of the steps of latent attention. vLLM's builder prepares prompts; the rows that decode are planned here.

On a GPU kernels plan into fixed buffers, so that full CUDA graphs serve every batch and no step waits for its plan. On
a CPU the host plans.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.logger import init_logger
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonDecodeMetadata,
    MLACommonMetadataBuilder,
    QueryLenSupport,
)

from trunkattn import BatchAttention, Capacity, Plan
from trunkattn.integrations.captured_run import CapturedRun
from trunkattn.integrations.device_traffic import DeviceTraffic, count_arrivals
from trunkattn.integrations.kv_traffic import tokens_of
from trunkattn.integrations.layer_spec import LayerSpec
from trunkattn.integrations.vllm import latent_name, versions
from trunkattn.integrations.vllm.decode_graphs import DecodeGraphs, DecodeRows
from trunkattn.integrations.vllm.impl import check_supported
from trunkattn.integrations.vllm.metadata import LayerGroup, StepPlans, check_causal
from trunkattn.integrations.warm_up import run_zeros, warm_up

logger = init_logger("vllm.trunkattn")


@dataclass
class LatentDecodes(MLACommonDecodeMetadata):
    """The rows of a step that decode.

    Attributes:
        plans: their plans, each with the function that runs it, called as `BatchAttention.run`.
        planned: what they were planned from.
        requests: rows without padding.
        nothing_local: [rows, 1] bool, of each row whether this rank holds none of its keys; None: each request is on
            one rank.
        launched: whether a layer has run the step from the host. A full CUDA graph does not.
    """

    plans: dict[LayerSpec, tuple[Callable[..., Any], Plan]]
    planned: DecodeRows
    requests: int
    nothing_local: torch.Tensor | None = None
    launched: bool = False


class TrunkMlaBuilder(DecodeGraphs, LayerGroup, MLACommonMetadataBuilder[Any]):
    """Plans the steps of one attention group of latent attention. Each layer spec has one plan, which every step
    refills.

    Raises:
        ValueError: with one line, if the group's KV cache holds anything else than latent rows.
    """

    supported_specs = versions.LATENT_SPECS
    query_len_support: ClassVar[QueryLenSupport] = QueryLenSupport.VARLEN  # of drafts; 1 without

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.init_group(kv_cache_spec, layer_names, vllm_config)
        if any(getattr(layer, "non_causal_multi_token_decode", False) for layer in self.modules.values()):
            check_supported(["drafts that are not causal"], self.backend_name())
        self._decode_query_len = int(self.reorder_batch_threshold or 1)
        # On one rank a plan depends on nothing but tensors that stay where they are, and is made on the device.
        self.supports_draft_decode_metadata_update = self.dcp_world_size == 1
        # The first step makes the tensors on the device, once the caches are there, whose size they need.
        self.attentions: dict[LayerSpec, BatchAttention] = {}
        self._plans: dict[LayerSpec, Plan] = {}
        self._runs: dict[LayerSpec, Callable[..., Any]] = {}
        self._local: tuple[torch.Tensor, torch.Tensor] | None = None  # lengths on this rank, and whether that is none
        self._device_traffic: DeviceTraffic | None = None
        self._last: Any = None
        for spec, count in self.layers.items():
            logger.info(
                "TrunkAttention runs the decoding in %d layers (%s; blocks of %d tokens; up to %d query tokens a "
                "request); prompts run in vLLM's own.",
                *(count, spec, kv_cache_spec.block_size, self._decode_query_len),
            )

    @classmethod
    def backend_name(cls) -> str:
        """The back end's name in vLLM, for messages."""
        return latent_name()

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Plans a step, with vLLM's arguments and result; its `decode` is a `LatentDecodes`."""
        if not self.is_run(fast_build):
            return StepPlans({})
        metadata = self._step(common_attn_metadata)
        self._count(metadata)
        return metadata

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Plans a step of arbitrary rows into the plans that every graph reads. The step is not counted."""
        return self._step(common_attn_metadata) if self.is_run(fast_build=False) else StepPlans({})

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Plans a step again from its tensors, which hold the next token of each request. vLLM from 0.33 on calls it
        between the tokens of a draft, and records it in the CUDA graph that drafts all of them."""
        self._plan(metadata.decode.planned)

    def _step(self, batch: Any) -> Any:
        check_causal(batch, self.backend_name())
        return super().build(0, batch)

    def _build_decode(self, **step: Any) -> LatentDecodes:
        """Plans the rows that decode. vLLM up to 0.26 passes no max_query_len, which is not needed."""
        table, lens = step["block_table_tensor"], step["seq_lens_device"]
        if not self.attentions:
            self._allocate(table.shape[1])
        nothing_local = None
        if self._local is not None:
            # A row of which this rank holds nothing reads a key that is not its own: its log-sum-exp becomes -inf, so
            # that the merge leaves it out. The lengths have a place of their own: the planner's graph is bound to it.
            own_lens, nothing = self._local
            nothing_local = nothing[: len(lens)]
            nothing_local[:, 0] = lens == 0
            lens = own_lens[: len(lens)].copy_(lens.clamp(min=1))
        rows = DecodeRows(table, lens, step["query_start_loc_device"])
        requests = int((step["query_start_loc_cpu"].diff() > 0).sum())
        return LatentDecodes(
            block_table=table,
            seq_lens=step["seq_lens_device"],
            dcp_tot_seq_lens=step["dcp_tot_seq_lens_device"],
            plans=self._plan(rows),
            planned=rows,
            requests=requests,
            nothing_local=nothing_local,
        )

    def _allocate(self, max_pages_per_request: int) -> None:
        """Makes the attentions, for the largest step. A row of the block table is as wide as the longest request."""
        self.find_layers()
        rows = int(self.vllm_config.scheduler_config.max_num_seqs)
        capacity = Capacity(
            max_requests=rows,
            max_query_tokens=rows * self._decode_query_len,
            max_pages_per_request=max_pages_per_request,
            num_pages=versions.num_blocks(self.modules.values()),
            max_query_len=self._decode_query_len,
        )
        if self.dcp_world_size > 1:
            nothing = torch.zeros(rows, 1, dtype=torch.bool, device=self.device)
            self._local = torch.zeros(rows, dtype=torch.int32, device=self.device), nothing
        self.attentions = {spec: BatchAttention(each, self.device, capacity) for spec, each in self.configs.items()}
        eager = getattr(self.vllm_config.model_config, "enforce_eager", False)
        direct = eager or self._local is not None  # a graph of a layer's own would not return the log-sum-exps
        self._runs = {spec: each.run if direct else CapturedRun(each) for spec, each in self.attentions.items()}
        if self.device.type == "cuda":
            self._warm_up(max_pages_per_request)
        errors = [each.errors for each in self.attentions.values() if each.errors is not None]
        self._device_traffic = DeviceTraffic(len(self.layers), self.device, errors)

    def _warm_up(self, max_pages_per_request: int) -> None:
        """Compiles the kernels that steps run, before any request waits for them."""
        row = DecodeRows(
            torch.zeros(1, max_pages_per_request, dtype=torch.int32, device=self.device),
            torch.ones(1, dtype=torch.int32, device=self.device),
            torch.arange(2, dtype=torch.int32, device=self.device),
        )
        caches = {layer.impl.layer_spec: layer.impl.caches_of(layer.kv_cache) for layer in self.modules.values()}

        def work() -> None:
            for spec, (_, plan) in self._plan(row).items():
                run_zeros(self.attentions[spec], plan, caches[spec], 1, return_lse=self._local is not None)

        warm_up(work)

    def _plan(self, rows: DecodeRows) -> dict[LayerSpec, tuple[Callable[..., Any], Plan]]:
        for spec, attention in self.attentions.items():
            self._plans[spec] = attention.plan(*rows, into=self._plans.get(spec))
        return {spec: (self._runs[spec], plan) for spec, plan in self._plans.items()}

    def _count(self, metadata: Any) -> None:
        """Counts the path of the last step, which has run by now, and what this one reads, once that is known."""
        last, self._last = self._last, metadata
        if last is not None:
            self.stats.count_step(_path(last))
        decode, traffic = metadata.decode, self._device_traffic
        counted = [found for plan in self._plans.values() if (found := plan.counters.kv_tokens) is not None]
        if decode is None:
            self.stats.count_unshared("no_decode")
        elif not counted:
            self.stats.count_tokens(map(tokens_of, self._plans.values()), self.kv_token_bytes(), decode.requests)
        elif traffic is not None:
            traffic.note(counted, decode.requests)
        if traffic is not None:
            count_arrivals(self.stats, traffic, self.kv_token_bytes(), logger.error)


def _path(metadata: Any) -> str:
    """The path of a step for the counters, once it has run."""
    if metadata.decode is None:
        return "prefill"
    if not metadata.decode.launched:
        return "full_graph"
    return "mixed" if metadata.prefill is not None else "decode"
