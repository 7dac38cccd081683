"""The CPU side of `BatchAttention`: plans work lists, keeps a workspace that grows with them, and runs them."""

from typing import NamedTuple

import numpy as np
import torch

from trunkattn.backend import Counters, DeviceTables, Part, no_partials, write_back
from trunkattn.config import AttentionConfig, Capacity
from trunkattn.cpu import parallel
from trunkattn.cpu.block import Shape
from trunkattn.cpu.tuning import cpu_device
from trunkattn.dtypes import KV_KINDS
from trunkattn.layer_inputs import LayerInputs, Scale, scale_array
from trunkattn.memory import memory_for
from trunkattn.planner.check import check_plan
from trunkattn.planner.from_config import make_planner
from trunkattn.planner.planner import Planned, StepTables, too_large
from trunkattn.planner.work_list import UNLIMITED, PlanStats, WorkList
from trunkattn.step_inputs import PromptChunks


class CpuStep(NamedTuple):
    """A planned step."""

    planned: Planned
    prepared: parallel.CpuPlan

    @property
    def num_query_tokens(self) -> int:
        """Rows of q and out."""
        return len(self.prepared.positions)

    @property
    def num_chunks(self) -> int:
        """Always 0: one kernel computes everything, prompt chunks included."""
        return 0

    @property
    def counters(self) -> Counters:
        """Empty counters: on a CPU `stats` never waits."""
        return Counters(None, None)

    def only(self, part: Part) -> "CpuStep | None":
        """The step itself for "decodes", None for "chunks": no separate kernel computes prompt chunks."""
        return self if part == "decodes" else None

    def stats(self) -> PlanStats:
        """Statistics of what the plan reads."""
        return self.planned.stats()

    def check(self) -> None:
        """Raises AssertionError if the work list breaks an invariant."""
        check_plan(self.planned)


def _float32(tensor: torch.Tensor, rows: int) -> torch.Tensor:
    """The first rows of a tensor, contiguous."""
    return tensor[:rows].to(torch.float32).contiguous()


def make(config: AttentionConfig, device: torch.device, capacity: Capacity | None) -> "CpuBackend":
    """The back end of a CPU, whose plans have no fixed size."""
    return CpuBackend(config)


class CpuBackend:
    """Plans and runs on a CPU."""

    def __init__(self, config: AttentionConfig) -> None:
        self.config = config
        self._threads = torch.get_num_threads()
        self._planner = make_planner(config, cpu_device(self._threads))
        self._shape = Shape(
            num_qo_heads=config.num_qo_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            head_dim_v=config.value_dim,
            page_size=config.page_size,
            kv_kind=KV_KINDS[config.cache_dtype][0],
            window=UNLIMITED,
            aligned_blocks=config.batch_invariant,
        )
        self._plain_options = self._make_options(None, None, None, None)
        widths = f"head_dim={config.head_dim} and head_dim_v={config.value_dim}"
        with memory_for(lambda asked: f"{widths}: expected heads of which memory holds a tile, not {asked}"):
            self._workspace = parallel.Workspace(self._threads, 0, 0, self._shape)

    def plan(self, batch: StepTables, into: CpuStep | None = None) -> CpuStep:
        """Plans a checked batch. `into` is ignored, because a step on a CPU has no arrays of fixed size."""
        planned = self._planner.plan(batch)
        shape = self._shape if batch.window == UNLIMITED else self._shape._replace(window=batch.window)
        with memory_for(lambda _: self._no_memory(planned.work)):
            prepared = parallel.prepare(planned.work, planned.batch, shape, self._threads)
            self._reserve(prepared)
        return CpuStep(planned, prepared)

    @property
    def plans_on_device(self) -> bool:
        """Always False: the tables lie in host memory."""
        return False

    @property
    def errors(self) -> None:
        """Bad values are refused when a step is planned."""

    def overlaps(self, chunks: PromptChunks) -> bool:
        """A CPU computes all rows by the same code."""
        return False

    def plan_on_device(
        self, tables: DeviceTables, window: int, into: CpuStep | None = None, chunks: PromptChunks | None = None
    ) -> CpuStep:
        """Raises an error: this backend plans on the host, see `plans_on_device`."""
        raise AssertionError("a CPU has no device to plan on")

    def check(self) -> None:
        """Bad values are refused when a step is planned."""

    def _reserve(self, prepared: parallel.CpuPlan) -> None:
        """Grows the workspace so that `run` does not allocate."""
        space = self._workspace
        lanes, slots = max(prepared.max_lanes, space.lanes), max(prepared.work.num_slots, space.num_slots)
        if (lanes, slots) != (space.lanes, space.num_slots):
            self._workspace = parallel.Workspace(self._threads, lanes, slots, self._shape)

    def _no_memory(self, work: WorkList) -> str:
        """The message for a work list whose partial results, or else items, take more memory than there is."""
        config = self.config
        if work.num_slots:
            return no_partials(config, work.num_slots)
        tiles = f"{len(work.items)} items of {config.num_qo_heads} heads × {config.head_dim} numbers"
        return too_large(config.policy, f"{tiles}, for which there is no memory")

    def run(self, step: CpuStep, inputs: LayerInputs, out: torch.Tensor) -> torch.Tensor:
        """Writes out; returns lse [num_query_tokens, num_qo_heads]."""
        lse = torch.empty(out.shape[:2], dtype=torch.float32, device="cpu")
        out = out[: step.num_query_tokens]  # with a capacity, q and out may be longer
        in_place = out.dtype == torch.float32 and out.is_contiguous()
        computed = out if in_place else torch.empty(out.shape, dtype=torch.float32, device="cpu")
        queries = _float32(inputs.q, step.num_query_tokens)
        if inputs.q_rope is not None:  # joined in float32: torch.autocast has no torch.cat of float16 on a CPU
            queries = torch.cat((queries, _float32(inputs.q_rope, step.num_query_tokens)), dim=-1)
        bits = KV_KINDS[self.config.cache_dtype][1]
        layer = parallel.Layer(
            q=queries, k_cache=inputs.k_cache, v_cache=inputs.v_cache, kv_bits=bits, out=computed, lse=lse
        )
        parallel.execute(step.prepared, layer, self._options(inputs), self._workspace)
        if not in_place:
            write_back(computed, out)
        return lse

    def _options(self, inputs: LayerInputs) -> parallel.Options:
        given = (inputs.q_scale, inputs.k_scale, inputs.v_scale, inputs.sinks)
        return self._plain_options if all(value is None for value in given) else self._make_options(*given)

    def _make_options(
        self, q_scale: Scale, k_scale: Scale, v_scale: Scale, sinks: torch.Tensor | None
    ) -> parallel.Options:
        config, heads = self.config, self.config.num_kv_heads
        of_logits = scale_array(q_scale, heads).astype(np.float64) * scale_array(k_scale, heads) * config.logit_scale
        extra = np.empty(0, np.float32) if sinks is None else sinks.detach().to(torch.float32).contiguous().numpy()
        return parallel.Options(
            of_logits.astype(np.float32), scale_array(v_scale, heads), config.logits_soft_cap or 0.0, extra
        )
