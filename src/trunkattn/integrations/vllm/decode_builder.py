"""Decoding on a GPU: what the builders of keys and values and of latent attention have in common.

Kernels plan each step into fixed buffers. So the full CUDA graphs that vLLM captures for decoding serve every batch,
and no step waits for its plan. (The counts of KV reads are fetched without a wait too, unless 256 steps pass before a
fetch arrives.)
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import torch
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionCGSupport

from trunkattn import BatchAttention, Capacity, Plan, PromptChunks
from trunkattn.integrations.captured_run import CapturedRun
from trunkattn.integrations.device_traffic import DeviceTraffic, count_arrivals
from trunkattn.integrations.kv_traffic import tokens_of
from trunkattn.integrations.layer_spec import LayerSpec
from trunkattn.integrations.vllm import versions
from trunkattn.integrations.vllm.metadata import LayerGroup, StepPlans
from trunkattn.integrations.warm_up import run_zeros, warm_up

logger = init_logger("vllm.trunkattn")
# Of each layer spec its plan, and the function that runs it, called as `BatchAttention.run`
PlansToRun = dict[LayerSpec, tuple[Callable[..., Any], Plan]]


class DecodeRows(NamedTuple):
    """The rows that decode; see `BatchAttention.plan`."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


class RowsOfRank:
    """How long rows are on one of several ranks that share each request.

    A row of which this rank holds no key reads one that is not its own. Its log-sum-exp then becomes -inf, so that the
    merge of the ranks leaves it out.

    Args:
        max_rows: most rows of a step.
        device: of the tensors.
    """

    def __init__(self, max_rows: int, device: torch.device) -> None:
        # They stay where they are: the planner's graph is bound to their place.
        self._lens = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._nothing_local = torch.zeros(max_rows, 1, dtype=torch.bool, device=device)

    def place(self, local_lens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The lengths [rows] to plan with, and [rows, 1] bool, whether this rank holds none of a row's keys.

        Args:
            local_lens: [rows] int32, keys that this rank holds.
        """
        rows = slice(len(local_lens))
        self._nothing_local[rows, 0] = local_lens == 0
        return self._lens[rows].copy_(local_lens.clamp(min=1)), self._nothing_local[rows]


class DecodeBuilder(LayerGroup, ABC):
    """Base of the builders for GPUs. Each layer spec has one plan of the rows that decode, which every step refills.

    A builder calls `init_decodes` when it is made. Its first step calls its `_allocate`.
    """

    vllm_config: Any  # vLLM's classes set these two
    device: torch.device
    reorder_batch_threshold: int | None
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Rows that verify drafts are in full graphs too, unless ranks share each request: then they are prompts."""
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """Returns the most query tokens of a request in a full graph. Rows may have any number up to it, since plans
        tell kernels how many there are. vLLM from 0.33 on asks."""
        if cls.get_cudagraph_support(vllm_config, kv_cache_spec) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE:
            return 1
        return versions.decode_query_len(vllm_config)

    def init_decodes(self, block_size: int, runs_prompts: Callable[[LayerSpec], str]) -> None:
        """Reads what vLLM's class was made with, and says in the log what runs where.

        Args:
            block_size: tokens.
            runs_prompts: what runs the prompts of a layer, in words.
        """
        self._decode_query_len = int(self.reorder_batch_threshold or 1)
        # On one rank a plan depends on nothing but tensors that stay where they are, and is made on the device. Rows of
        # chunks are new tensors in each step.
        self.supports_draft_decode_metadata_update = not self.shares_requests and not self.attends_in_chunks
        # The first step makes the tensors on the device. That is before any graph is captured and after the KV cache,
        # whose size they need. It is also outside the memory pool in which vLLM makes builders and which its sleep mode
        # discards.
        self.attentions: dict[LayerSpec, BatchAttention] = {}
        self._plans: dict[LayerSpec, Plan] = {}
        self._runs: dict[LayerSpec, Callable[..., Any]] = {}
        self._rows_of_rank: RowsOfRank | None = None
        self._device_traffic: DeviceTraffic | None = None
        self._last: Any = None
        for spec, count in self.layers.items():
            logger.info(
                "TrunkAttention runs the decoding in %d layers (%s; blocks of %d tokens; up to %d query tokens a "
                "request); prompts run in %s.",
                *(count, spec, block_size, self._decode_query_len, runs_prompts(spec)),
            )

    @property
    @abstractmethod
    def shares_requests(self) -> bool:
        """Whether several ranks hold a part of each request's keys."""

    @abstractmethod
    def decodes_of(self, step: Any) -> Any:
        """The part of a step that decodes, with its `plans`, `planned` rows and number of `requests`; None: there is
        none."""

    @abstractmethod
    def path_of(self, step: Any) -> str:
        """The path of a step for the counters, once it has run."""

    @abstractmethod
    def _step(self, batch: Any) -> Any:
        """Plans a step. batch: vLLM's `CommonAttentionMetadata`."""

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """Plans a step; see TrunkAttentionBuilder.build. For a full CUDA graph the step has padding at its end: rows
        without query tokens, which the graph does not compute."""
        if not self.is_run(fast_build):
            return StepPlans({})
        step = self._step(common_attn_metadata)
        self._count(step)
        return step

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> Any:
        """Plans a step of arbitrary rows into the plans that every graph reads. The step is not counted."""
        return self._step(common_attn_metadata) if self.is_run(fast_build=False) else StepPlans({})

    def update_draft_decode_metadata(self, metadata: Any) -> None:
        """Plans a step again from its tensors, which hold the next token of each request. vLLM from 0.33 on calls it
        between the tokens of a draft, and records it in the CUDA graph that drafts all of them."""
        self._plan(self.decodes_of(metadata).planned)

    def _capacity(self, max_pages_per_request: int, max_chunk_tokens: int = 0) -> Capacity:
        """The largest step. A row of the block table is as wide as the longest request."""
        rows = int(self.vllm_config.scheduler_config.max_num_seqs)
        if self.attends_in_chunks:  # the tokens of a request that decodes may lie in two chunks
            rows *= 2
        return Capacity(
            max_requests=rows,
            max_query_tokens=rows * self._decode_query_len,
            max_pages_per_request=max_pages_per_request,
            num_pages=versions.num_blocks(self.modules.values()),
            max_query_len=self._decode_query_len,
            max_chunk_tokens=max_chunk_tokens,
        )

    def _make_attentions(self, capacity: Capacity) -> None:
        """One attention serves all windows of a configuration, so that they share the workspace."""
        self.attentions = {}  # frees the memory of the earlier ones first
        shared = {config: BatchAttention(config, self.device, capacity) for config in self.configs.values()}
        self.attentions = {spec: shared[config] for spec, config in self.configs.items()}

    def _make_ready(self, capacity: Capacity, captured_chunk_tokens: int = 0) -> None:
        """Settles how layers run the attentions, and compiles and runs the kernels once.

        Args:
            capacity: of the attentions.
            captured_chunk_tokens: see `CapturedRun`.
        """
        eager = getattr(self.vllm_config.model_config, "enforce_eager", False)
        direct = eager or self.shares_requests  # a graph of a layer's own would not return the log-sum-exps
        attentions = {*self.attentions.values()}
        runs = {each: each.run if direct else CapturedRun(each, captured_chunk_tokens) for each in attentions}
        self._runs = {spec: runs[attention] for spec, attention in self.attentions.items()}
        if self.shares_requests:
            self._rows_of_rank = RowsOfRank(capacity.max_requests, self.device)
        if self.device.type == "cuda":
            self._warm_up(capacity.max_pages_per_request)
        errors = [attention.errors for attention in attentions if attention.errors is not None]
        self._device_traffic = DeviceTraffic(len(self.layers), self.device, errors)

    def _warm_up(self, max_pages_per_request: int) -> None:
        """Compiles the kernels that steps run, before any request waits for them."""
        warm_up(lambda: self._plan_and_run(self._rows_of_zeros(1, max_pages_per_request)))

    def _rows_of_zeros(self, count: int, max_pages_per_request: int) -> DecodeRows:
        """Rows of one token, in page 0."""
        return DecodeRows(
            torch.zeros(count, max_pages_per_request, dtype=torch.int32, device=self.device),
            torch.ones(count, dtype=torch.int32, device=self.device),
            torch.arange(count + 1, dtype=torch.int32, device=self.device),
        )

    def _caches(self) -> dict[LayerSpec, tuple[torch.Tensor, torch.Tensor | None]]:
        """The caches of a layer of each spec."""
        return {layer.impl.layer_spec: layer.impl.caches_of(layer.kv_cache) for layer in self.modules.values()}

    def _plan_and_run(self, rows: DecodeRows, chunks: PromptChunks | None = None) -> None:
        """Plans rows of one token, and runs a layer of each spec on them."""
        caches = self._caches()
        for spec, (_, plan) in self._plan(rows, chunks).items():
            queries, attention = len(rows.seq_lens), self.attentions[spec]
            run_zeros(attention, plan, caches[spec], queries, return_lse=self.shares_requests)

    def _plan(self, rows: DecodeRows, chunks: PromptChunks | None = None) -> PlansToRun:
        """Plans of rows that decode, and after them of prompt chunks."""
        for spec, attention in self.attentions.items():
            window, into = spec.sliding_window, self._plans.get(spec)
            self._plans[spec] = attention.plan(*rows, sliding_window=window, into=into, chunks=chunks)
        return {spec: (self._runs[spec], plan) for spec, plan in self._plans.items()}

    def _count(self, step: Any) -> None:
        """Counts the path of the last step, which has run by now, and what this one reads, once that is known."""
        last, self._last = self._last, step
        if last is not None:
            self.stats.count_step(self.path_of(last))
        decodes, traffic = self.decodes_of(step), self._device_traffic
        plans = [plan for _, plan in decodes.plans.values()] if decodes is not None else []
        counted = [found for plan in plans if (found := plan.counters.kv_tokens) is not None]
        if not plans:
            self.stats.count_unshared("no_decode")
        elif not counted:  # the host made the plans
            self.stats.count_tokens(map(tokens_of, plans), self.kv_token_bytes(), decodes.requests)
        elif traffic is not None:
            traffic.note(counted, decodes.requests)
        if traffic is not None:
            count_arrivals(self.stats, traffic, self.kv_token_bytes(), logger.error)
