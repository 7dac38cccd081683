"""`BatchAttention`: plan once per step, run once per layer, on any paged KV cache."""

import math

import numpy as np
import torch

from trunkattn.attention_config import AttentionConfig
from trunkattn.checks import StepInputs, check_run, check_step
from trunkattn.kernels import cpu
from trunkattn.kernels.cpu_math import KV_KINDS
from trunkattn.kernels.tile_table import INVARIANT_CHUNK_TOKENS, cpu_device
from trunkattn.plan_format import Capacity, PlanStats
from trunkattn.planner.build import Batch, Planned, Planner, PlannerSpec
from trunkattn.planner.check import check_plan
from trunkattn.planner.cost_model import cost_model
from trunkattn.planner.splitting import UNLIMITED, split_rule

Scale = float | torch.Tensor | None


class Plan:
    """One step's plan for one window; owns its arrays, any number may be alive. Made by `BatchAttention.plan`."""

    def __init__(
        self, planned: Planned, prepared: cpu.CpuPlan, shape: cpu.Shape, owner: "BatchAttention", last_page: int
    ) -> None:
        self.planned, self.prepared, self.shape, self.owner, self.last_page = planned, prepared, shape, owner, last_page

    @property
    def num_query_tokens(self) -> int:
        """Rows of q and out that `run` expects."""
        return len(self.prepared.positions)

    @property
    def stats(self) -> PlanStats:
        """What this plan reads, and what one pack per request would read."""
        return self.planned.stats()

    def check(self) -> None:
        """Verifies the invariants of the work list (every visible pair covered once, slots distinct, order, tiles).

        Raises:
            AssertionError: naming the invariant and the item or query that breaks it.
        """
        check_plan(self.planned)


class BatchAttention:
    """Attention of a batch over a paged KV cache that reads what requests share once.

    `plan` is called once per step (and window), `run` once per layer. Not for use by several threads at once: the
    workspace is shared by all plans.

    Args:
        config: shape and options.
        device: where q and the caches live.
        capacity: upper bounds of a step, or None to take what comes.

    Raises:
        ValueError: with the reasons, if the device cannot run the configuration.
    """

    def __init__(
        self, config: AttentionConfig, device: torch.device | str = "cuda", capacity: Capacity | None = None
    ) -> None:
        if not isinstance(config, AttentionConfig):
            raise TypeError(f"config is a {type(config).__name__}: expected an AttentionConfig")
        if capacity is not None and not isinstance(capacity, Capacity):
            raise TypeError(f"capacity is a {type(capacity).__name__}: expected a Capacity or None")
        reasons = config.supports(device)
        if reasons:
            raise ValueError("; ".join(reasons))
        self.config, self.device, self.capacity = config, torch.device(device), capacity
        self._threads = torch.get_num_threads()
        machine = cpu_device(self._threads)
        dims = (config.num_qo_heads, config.num_kv_heads, config.head_dim, config.value_dim)
        model = cost_model(machine, *dims, config.cache_dtype.itemsize)
        columns = -(-INVARIANT_CHUNK_TOKENS // config.page_size) if config.batch_invariant else 1
        chunk = columns * config.page_size if config.batch_invariant else 0
        rule = split_rule(machine, model, config.num_kv_heads, config.head_dim + config.value_dim, chunk)
        self._planner = Planner(PlannerSpec(config.page_size, config.policy, model, rule, columns, machine.name))
        self._floats = np.empty((self._threads, 0), np.float32)
        self._ints = np.empty((self._threads, 0), np.int64)
        self._partial = np.empty((0, config.num_qo_heads, config.value_dim), np.float32)
        self._partial_lse = np.empty((0, config.num_qo_heads), np.float32)

    def plan(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor | None = None,
        sliding_window: int | None = None,
        *,
        num_pages: int | None = None,
        changed_rows: torch.Tensor | None = None,
    ) -> Plan:
        """The work list of one step.

        Args:
            block_table: [num_requests, max_pages] int32; entries past a request's pages are never looked at.
            seq_lens: [num_requests] int32, KV length including this step's query tokens.
            query_start_loc: [num_requests + 1] int32; None: one query token each. Rows of query length 0 are padding.
            sliding_window: tokens a query sees, itself included; None: all.
            num_pages: pages in the cache, to check page ids against; None: the capacity's; without either only `run`
                checks.
            changed_rows: int32 rows whose earlier pages may differ from the last plan; None: compare all rows.

        Raises:
            ValueError, TypeError: naming the argument, the value and what was expected; no plan is made or changed.
        """
        inputs = StepInputs(block_table, seq_lens, query_start_loc, sliding_window, num_pages, changed_rows)
        (table, lens, starts), rows, last_page = check_step(inputs, self.config.page_size, self.capacity)
        window = UNLIMITED if sliding_window is None else min(sliding_window, UNLIMITED)
        planned = self._planner.plan(Batch(table, lens, starts, window), rows)
        config = self.config
        dims = (config.num_qo_heads, config.num_kv_heads, config.head_dim, config.value_dim, config.page_size)
        shape = cpu.Shape(*dims, KV_KINDS[config.cache_dtype][0], window, config.batch_invariant)
        batch = (planned.batch.seq_lens, planned.batch.query_start_loc)
        prepared = cpu.prepare(planned.work, planned.batch.block_table, batch, shape, self._threads)
        self._reserve(prepared, shape)
        return Plan(planned, prepared, shape, self, last_page)

    def _reserve(self, prepared: cpu.CpuPlan, shape: cpu.Shape) -> None:
        """Grows the workspace so that `run` does not allocate."""
        floats, ints = cpu.workspace_sizes(prepared, shape)
        if floats > self._floats.shape[1]:
            self._floats = torch.empty(self._threads, -(-floats // 16) * 16).numpy()  # torch aligns to cache lines
        if ints > self._ints.shape[1]:
            self._ints = np.empty((self._threads, ints), np.int64)
        slots = prepared.work.num_slots
        if slots > len(self._partial):
            self._partial = np.empty((slots, *self._partial.shape[1:]), np.float32)
            self._partial_lse = np.empty((slots, self._partial_lse.shape[1]), np.float32)

    def run(
        self,
        plan: Plan,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
        *,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of one layer.

        Args:
            plan: of this object.
            q: [num_query_tokens, num_qo_heads, head_dim] in the configured dtype.
            k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim / head_dim_v] in the cache dtype, any
                strides with a contiguous last dimension.
            out: [num_query_tokens, num_qo_heads, head_dim_v] to write into, any strides; None: a new tensor.
            return_lse: also return lse [num_query_tokens, num_qo_heads] float32 (natural log, sinks not included).
            q_scale, k_scale, v_scale: what stored q, k, v are to be multiplied by: a number, or a tensor of one element
                or [num_kv_heads].
            sinks: [num_qo_heads] extra logits, given iff the configuration says so.

        Raises:
            ValueError, TypeError: naming the argument, the value and what was expected; nothing is computed then.
        """
        config = self.config
        if not isinstance(plan, Plan):
            raise TypeError(f"plan is a {type(plan).__name__}: expected a Plan")
        if plan.owner is not self:
            raise ValueError("plan belongs to another BatchAttention: expected a plan made by this one")
        scales = check_run(
            config, plan.num_query_tokens, (q, k_cache, v_cache, out), (q_scale, k_scale, v_scale), sinks
        )
        if plan.last_page >= k_cache.shape[0]:
            raise ValueError(
                f"k_cache has {k_cache.shape[0]} pages: expected more than the plan's page {plan.last_page}"
            )
        num_tokens = plan.num_query_tokens
        shape = (num_tokens, config.num_qo_heads, config.value_dim)
        result = torch.empty(shape, dtype=config.dtype) if out is None else out
        in_place = result.dtype == torch.float32 and result.is_contiguous()
        computed = result if in_place else torch.empty(result.shape, dtype=torch.float32)
        lse = torch.empty(num_tokens, config.num_qo_heads)
        k_flat, k_strides = cpu.flat(k_cache, KV_KINDS[config.cache_dtype][1])
        v_flat, v_strides = cpu.flat(v_cache, KV_KINDS[config.cache_dtype][1])
        queries = q.to(torch.float32).contiguous().view(-1).numpy()
        outputs = (computed.view(-1).numpy(), lse.numpy(), self._partial, self._partial_lse)
        options = self._options(scales, sinks)
        workspace, inputs = (self._floats, self._ints), (queries, k_flat, v_flat, k_strides, v_strides)
        cpu.execute(plan.prepared, plan.shape, inputs, options, outputs, workspace)
        if not in_place:
            result.copy_(computed)
        return (result, lse) if return_lse else result

    def _options(self, scales: tuple[np.ndarray, np.ndarray, np.ndarray], sinks: torch.Tensor | None) -> cpu.Options:
        config = self.config
        q_scale, k_scale, v_scale = scales
        scale = 1 / math.sqrt(config.head_dim) if config.sm_scale is None else config.sm_scale
        base = 1.0 if config.logits_soft_cap else math.log2(math.e)  # a soft cap changes the base itself
        logit_scale = (q_scale * k_scale * np.float32(scale * base)).astype(np.float32)
        extra = np.empty(0, np.float32) if sinks is None else sinks.detach().to(torch.float32).contiguous().numpy()
        return cpu.Options(logit_scale, v_scale, np.float32(config.logits_soft_cap or 0.0), extra)
