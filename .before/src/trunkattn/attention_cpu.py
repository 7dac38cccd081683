"""The CPU side of `BatchAttention`: a work list, a workspace that grows with the plans, and the run."""

import math
from dataclasses import dataclass

import numpy as np
import torch

from trunkattn.attention_config import AttentionConfig
from trunkattn.attention_planner import make_planner
from trunkattn.checks import LayerInputs, scale_array
from trunkattn.kernels import cpu
from trunkattn.kernels.cpu_math import KV_KINDS
from trunkattn.kernels.tile_table import cpu_device
from trunkattn.plan_format import PlanStats
from trunkattn.planner.build import Batch, Planned
from trunkattn.planner.check import check_plan


@dataclass(frozen=True)
class CpuStep:
    """A planned step."""

    planned: Planned
    prepared: cpu.CpuPlan
    shape: cpu.Shape

    @property
    def num_query_tokens(self) -> int:
        """Rows of q and out."""
        return len(self.prepared.positions)

    def stats(self) -> PlanStats:
        """See PlanStats."""
        return self.planned.stats()

    def check(self) -> None:
        """Raises AssertionError if the work list breaks an invariant."""
        check_plan(self.planned)


class CpuExecutor:
    """Plans and runs on a CPU."""

    plans_on_device = False
    errors = None

    def __init__(self, config: AttentionConfig) -> None:
        self.config = config
        self._threads = torch.get_num_threads()
        self._planner = make_planner(config, cpu_device(self._threads))
        self._floats = np.empty((self._threads, 0), np.float32)
        self._ints = np.empty((self._threads, 0), np.int64)
        self._partial = np.empty((0, config.num_qo_heads, config.value_dim), np.float32)
        self._partial_lse = np.empty((0, config.num_qo_heads), np.float32)

    def plan(self, batch: Batch, changed_rows: np.ndarray | None, into: CpuStep | None = None) -> CpuStep:
        """Plans a checked batch; a step has nothing fixed that `into` would have to keep."""
        planned = self._planner.plan(batch, changed_rows)
        config = self.config
        dims = (config.num_qo_heads, config.num_kv_heads, config.head_dim, config.value_dim, config.page_size)
        shape = cpu.Shape(*dims, KV_KINDS[config.cache_dtype][0], batch.window, config.batch_invariant)
        lens_and_starts = (planned.batch.seq_lens, planned.batch.query_start_loc)
        prepared = cpu.prepare(planned.work, planned.batch.block_table, lens_and_starts, shape, self._threads)
        self._reserve(prepared, shape)
        return CpuStep(planned, prepared, shape)

    def check(self) -> None:
        """Everything was checked when it was planned."""

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

    def run(self, step: CpuStep, inputs: LayerInputs, out: torch.Tensor) -> torch.Tensor:
        """Writes out; returns lse [num_query_tokens, num_qo_heads]."""
        lse = torch.empty(out.shape[:2])
        out = out[: step.num_query_tokens]  # with a capacity, q and out may be longer
        in_place = out.dtype == torch.float32 and out.is_contiguous()
        computed = out if in_place else torch.empty(out.shape, dtype=torch.float32)
        bits = KV_KINDS[self.config.cache_dtype][1]
        k_flat, k_strides = cpu.flat(inputs.k_cache, bits)
        v_flat, v_strides = cpu.flat(inputs.v_cache, bits)
        queries = inputs.q[: step.num_query_tokens].to(torch.float32).contiguous().view(-1).numpy()
        outputs = (computed.view(-1).numpy(), lse.numpy(), self._partial, self._partial_lse)
        arrays, workspace = (queries, k_flat, v_flat, k_strides, v_strides), (self._floats, self._ints)
        cpu.execute(step.prepared, step.shape, arrays, self._options(inputs), outputs, workspace)
        if not in_place:
            out.copy_(computed)
        return lse

    def _options(self, inputs: LayerInputs) -> cpu.Options:
        config = self.config
        heads = config.num_kv_heads
        scale = 1 / math.sqrt(config.head_dim) if config.sm_scale is None else config.sm_scale
        base = 1.0 if config.logits_soft_cap else math.log2(math.e)  # a soft cap changes the base itself
        q_scale, k_scale = scale_array(inputs.q_scale, heads), scale_array(inputs.k_scale, heads)
        logit_scale = (q_scale.astype(np.float64) * k_scale * (scale * base)).astype(np.float32)
        v_scale, sinks = scale_array(inputs.v_scale, heads), inputs.sinks
        extra = np.empty(0, np.float32) if sinks is None else sinks.detach().to(torch.float32).contiguous().numpy()
        return cpu.Options(logit_scale, v_scale, np.float32(config.logits_soft_cap or 0.0), extra)
