"""Plans made on the device, from tables that never leave it: no copy, no wait."""

from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from trunkattn.config import Capacity
from trunkattn.gpu.compiling import is_compiling
from trunkattn.gpu.device_planner.choice import candidates_of
from trunkattn.gpu.device_planner.chunks import ListedChunks, place_chunks
from trunkattn.gpu.device_planner.invariant import InvariantPlanner
from trunkattn.gpu.device_planner.planner import MOST_COLUMNS, MOST_ROWS, DevicePlanner, errors_of
from trunkattn.gpu.graphs import GraphCache
from trunkattn.gpu.plan import DeviceInfo, GpuPlan
from trunkattn.gpu.step_choice import BATCH_INVARIANT
from trunkattn.gpu.tuning.choice import WhyPortable, told
from trunkattn.planner.invariants import check_plan, check_tiles
from trunkattn.planner.planner import StepTables, tokens_per_query
from trunkattn.planner.row_tiles.choice import TilingRule
from trunkattn.planner.work_list import PlanStats, TileLimits, TileList

Tables = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # block_table, seq_lens, query_start_loc


@dataclass(frozen=True)
class DeviceStep:
    """A step planned on the device. tables: the caller's without prompt chunks; `stats` and `check` read them when
    they are asked."""

    tables: Tables
    window: int
    rule: TilingRule
    gpu_plan: GpuPlan
    why_portable: WhyPortable
    num_query_tokens: int = 0  # at least; the number is on the device
    chunks: ListedChunks | None = None  # the last requests

    @property
    def traffic(self) -> torch.Tensor:
        """int64 [2] on the device: KV tokens read, and KV tokens had every request read its own."""
        assert self.gpu_plan.summary is not None
        return self.gpu_plan.summary[1:]

    @property
    def has_chunks(self) -> bool:
        """Whether the host listed prompt chunks. All other requests are rows of tiles."""
        return self.chunks is not None

    @property
    def launches_chunks(self) -> bool:
        """Whether the arrays are those of a plan that may hold prompt chunks."""
        return self.gpu_plan.prefill is not None

    def without_chunks(self) -> "DeviceStep":
        """The same arrays without the launch for prompt chunks."""
        return replace(self, gpu_plan=self.gpu_plan.without_chunks())

    def of_chunks_alone(self) -> "DeviceStep | None":
        """The same arrays with that launch alone, if all requests are prompt chunks, which are never cut."""
        if self.chunks is None or len(self.tables[0]):
            return None
        return replace(self, gpu_plan=self.gpu_plan.of_chunks_alone)

    def tile_list(self) -> TileList:
        """What the plan's arrays hold. Waits for the device."""
        host = {name: array.cpu().numpy() for name, array in self.gpu_plan.arrays.items()}
        heights = len(self.rule.kinds)
        *counts, merged = host["counts"][: 2 * heights + 2].tolist()
        if self.chunks:
            counts[0] = int(host["overlapped"][0])  # items that overlap chunks are in no bucket
        items = host["items"][: 5 * counts[-1]].reshape(-1, 5)
        queries, segments = (int(items[:, column].max(initial=0)) for column in (4, 2))
        slots = host["slots"][:queries]
        return TileList(
            items=items,
            segments=host["segments"][: 3 * segments].reshape(-1, 3),
            queries=host["queries"][:queries],
            slots=slots,
            parts=host["parts"][: 2 * queries].reshape(-1, 2),
            counts=np.array(counts, np.int32),
            merge_queries=host["merge_queries"][:merged],
            merge_ranges=host["merge_ranges"][: 2 * merged].reshape(-1, 2),
            num_slots=int(slots.max(initial=-1)) + 1,
            merges_taller=True,
        )

    def batch(self) -> StepTables:
        """The tables as they are now. Waits for the device."""
        table, lens, starts = (table.cpu().numpy() for table in self.tables)
        return StepTables(table, lens, starts, self.window)

    def stats(self) -> PlanStats:
        """See PlanStats. Waits for the device."""
        assert self.gpu_plan.summary is not None
        if self.rule.uniform:
            described = BATCH_INVARIANT.policy, BATCH_INVARIANT.reason
        else:
            tiling = self.rule.priced.tilings[int(self.gpu_plan.summary[0])]
            described = tiling.name(self.rule), "least predicted time, found on the device"
        stats = told(tile_stats(self.tile_list(), self.batch(), self.rule, *described), self.why_portable.decodes)
        of_chunks = self.chunk_stats()
        return stats.with_chunks(of_chunks) if of_chunks else stats

    def chunk_stats(self) -> PlanStats | None:
        """Of the prompt chunks alone, without a wait; None: there are none."""
        return told(self.chunks.stats(), self.why_portable.prompts) if self.chunks else None

    def check(self) -> None:
        """Raises AssertionError if the tile list breaks an invariant."""
        check_tiles(self.tile_list(), self.batch(), self.rule, in_chunks=self.rule.uniform)
        if self.chunks:
            check_plan(self.chunks.planned)


def tile_stats(tile_list: TileList, batch: StepTables, rule: TilingRule, policy: str, reason: str) -> PlanStats:
    """See PlanStats. A trunk that several tiles read leaves memory once; the others find it in the L2 cache."""
    kinds, counts = rule.kinds, np.diff(tile_list.counts)
    tiles = {
        f"{kind.rows}x{kind.block_tokens}": int(counts[i] + counts[i + len(kinds)]) for i, kind in enumerate(kinds)
    }
    read = int((tile_list.segments[:, 1] >> 16).sum())
    tallest = kinds[-1].entries(rule.group_size)
    alone = int(tokens_per_query(batch.seq_lens, batch.query_start_loc, batch.window, tallest))
    items = len(tile_list.items)
    return PlanStats(read, alone, items, items, tiles, policy, reason)


class OnDevice:
    """Plans steps within a capacity on the device; one for all windows."""

    @torch.inference_mode(False)
    def __init__(
        self,
        rule: TilingRule,
        capacity: Capacity,
        limits: TileLimits,
        device_info: DeviceInfo,
        device: torch.device,
        why_portable: WhyPortable,
    ) -> None:
        most = {  # places in the cache are int32, and what orders the requests is one int64
            "num_pages": int(np.iinfo(np.int32).max) // rule.page_size,
            "max_requests": MOST_ROWS,
            "max_pages_per_request": MOST_COLUMNS,
        }
        for name, bound in most.items():
            if (value := getattr(capacity, name)) > bound:
                raise ValueError(f"{name}={value}: expected at most {bound} to plan on the device")
        self._rule, self._device, self._why_portable = rule, device, why_portable
        planner = InvariantPlanner if rule.uniform else DevicePlanner
        self._planner = planner(candidates_of(rule), capacity, limits, device_info, device)
        self._starts = torch.arange(capacity.max_requests + 1, dtype=torch.int32, device=device)
        if device.type == "cuda":
            # An engine pads a step to some numbers of rows, and may have one plan for each window.
            self._graphs = GraphCache(device, 256 + 2 * capacity.max_requests)

    def plan(
        self,
        tables: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None],
        window: int,
        plan: GpuPlan,
        chunks: ListedChunks | None = None,
    ) -> DeviceStep:
        """Fills a reserved plan; query_start_loc None: one query token each. chunks: the last requests."""
        table, lens, starts = tables
        if starts is None:
            starts = self._starts[: table.shape[0] + 1]
            known = table.shape[0]
        else:
            known = chunks.end_token if chunks else 0
        kept = (table, lens, starts)
        if chunks:
            rows = len(table) - chunks.num_requests
            kept = (table[:rows], lens[:rows], starts[: rows + 1])
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            if len(kept[0]):
                self._fill(plan, kept, window, chunks is not None and chunks.overlaps)
            else:
                self._planner.check(*kept)
                plan.forget_tiles()
            if chunks:
                place_chunks(plan, chunks, table, self._planner.num_pages)
        return DeviceStep(kept, window, self._rule, plan, self._why_portable, known, chunks)

    def _fill(self, plan: GpuPlan, tables: Tables, window: int, lowest_tile: bool) -> None:
        """Launches the planner; from the second time that the same tensors come, as a CUDA graph: its launches
        from Python take five times as long as what they launch."""
        if self._device.type != "cuda" or is_compiling() or torch.cuda.is_current_stream_capturing():
            return self._planner.fill(plan, *tables, window, lowest_tile)
        assert plan.summary is not None
        places = [value for table in tables for value in (table.dtype, table.data_ptr(), *table.shape, *table.stride())]
        key = (plan.flat.data_ptr(), plan.summary.data_ptr(), window, lowest_tile, *places)
        self._graphs.run(key, partial(self._planner.fill, plan, *tables, window, lowest_tile))

    @property
    def errors(self) -> torch.Tensor:
        """[1] int32, on the device: `errors_of` says what it means."""
        return self._planner.errors

    @torch.inference_mode(False)
    def check(self) -> None:
        """Raises ValueError if a batch since the last check held values that are wrong. Waits for the device."""
        bits = int(self._planner.errors)
        if bits:
            self._planner.errors.zero_()
            raise ValueError(f"plans made on the device: {'; '.join(errors_of(bits))}")
