"""The CPU side of `BatchAttention`: a work list, a workspace that grows with the plans, and the run."""

from dataclasses import dataclass

import numpy as np
import torch

from trunkattn.config import AttentionConfig
from trunkattn.cpu import parallel
from trunkattn.cpu.block import Shape, workspace_sizes
from trunkattn.cpu.tuning import cpu_device
from trunkattn.dtypes import KV_KINDS
from trunkattn.inputs import LayerInputs, scale_array
from trunkattn.planner.from_config import make_planner
from trunkattn.planner.invariants import check_plan
from trunkattn.planner.planner import Batch, Planned
from trunkattn.planner.work_list import PlanStats


@dataclass(frozen=True)
class CpuStep:
    """A planned step."""

    planned: Planned
    prepared: parallel.CpuPlan

    @property
    def num_query_tokens(self) -> int:
        """Rows of q and out."""
        return len(self.prepared.positions)

    @property
    def traffic(self) -> None:
        """Nothing is planned on a device."""

    @property
    def has_chunks(self) -> bool:
        """One kernel computes everything."""
        return False

    @property
    def launches_chunks(self) -> bool:
        """One kernel computes everything."""
        return False

    def without_chunks(self) -> "CpuStep":
        """The step itself."""
        return self

    def stats(self) -> PlanStats:
        """See PlanStats."""
        return self.planned.stats()

    def check(self) -> None:
        """Raises AssertionError if the work list breaks an invariant."""
        check_plan(self.planned)


class CpuExecutor:
    """Plans and runs on a CPU."""

    def __init__(self, config: AttentionConfig) -> None:
        self.config = config
        self._threads = torch.get_num_threads()
        self._planner = make_planner(config, cpu_device(self._threads))
        self._workspace = parallel.Workspace(
            floats=np.empty((self._threads, 0), np.float32),
            ints=np.empty((self._threads, 0), np.int64),
            partial=np.empty((0, config.num_qo_heads, config.value_dim), np.float32),
            partial_lse=np.empty((0, config.num_qo_heads), np.float32),
        )

    def plan(self, batch: Batch, into: CpuStep | None = None) -> CpuStep:
        """Plans a checked batch; a step has nothing fixed that `into` would have to keep."""
        planned = self._planner.plan(batch)
        config = self.config
        dims = (config.num_qo_heads, config.num_kv_heads, config.head_dim, config.value_dim, config.page_size)
        shape = Shape(*dims, KV_KINDS[config.cache_dtype][0], batch.window, config.batch_invariant)
        table, seq_lens, starts = planned.batch.block_table, planned.batch.seq_lens, planned.batch.query_start_loc
        prepared = parallel.prepare(planned.work, table, seq_lens, starts, shape, self._threads)
        self._reserve(prepared, shape)
        return CpuStep(planned, prepared)

    @property
    def plans_on_device(self) -> bool:
        """The tables lie in host memory."""
        return False

    @property
    def errors(self) -> None:
        """Bad values are refused when a step is planned."""

    def plan_on_device(self, tables: tuple, window: int, into: CpuStep | None = None) -> CpuStep:
        """Not for this backend, see `plans_on_device`."""
        raise AssertionError("a CPU has no device to plan on")

    def check(self) -> None:
        """Bad values are refused when a step is planned."""

    def _reserve(self, prepared: parallel.CpuPlan, shape: Shape) -> None:
        """Grows the workspace so that `run` does not allocate."""
        floats, ints = workspace_sizes(prepared.max_lanes, shape)
        space, slots, config = self._workspace, prepared.work.num_slots, self.config
        if floats > space.floats.shape[1]:
            aligned = torch.empty(self._threads, -(-floats // 16) * 16).numpy()  # torch aligns to cache lines
            space = space._replace(floats=aligned)
        if ints > space.ints.shape[1]:
            space = space._replace(ints=np.empty((self._threads, ints), np.int64))
        if slots > len(space.partial):
            partial = np.empty((slots, config.num_qo_heads, config.value_dim), np.float32)
            space = space._replace(partial=partial, partial_lse=np.empty((slots, config.num_qo_heads), np.float32))
        self._workspace = space

    def run(self, step: CpuStep, inputs: LayerInputs, out: torch.Tensor) -> torch.Tensor:
        """Writes out; returns lse [num_query_tokens, num_qo_heads]."""
        lse = torch.empty(out.shape[:2])
        out = out[: step.num_query_tokens]  # with a capacity, q and out may be longer
        in_place = out.dtype == torch.float32 and out.is_contiguous()
        computed = out if in_place else torch.empty(out.shape, dtype=torch.float32)
        queries = inputs.q[: step.num_query_tokens].to(torch.float32).contiguous()
        bits = KV_KINDS[self.config.cache_dtype][1]
        layer = parallel.Layer(queries, inputs.k_cache, inputs.v_cache, bits, computed, lse)
        parallel.execute(step.prepared, layer, self._options(inputs), self._workspace)
        if not in_place:
            out.copy_(computed)
        return lse

    def _options(self, inputs: LayerInputs) -> parallel.Options:
        config = self.config
        heads = config.num_kv_heads
        q_scale, k_scale = scale_array(inputs.q_scale, heads), scale_array(inputs.k_scale, heads)
        logit_scale = (q_scale.astype(np.float64) * k_scale * config.logit_scale).astype(np.float32)
        v_scale, sinks = scale_array(inputs.v_scale, heads), inputs.sinks
        extra = np.empty(0, np.float32) if sinks is None else sinks.detach().to(torch.float32).contiguous().numpy()
        return parallel.Options(logit_scale, v_scale, config.logits_soft_cap or 0.0, extra)
