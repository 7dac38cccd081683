"""Plans that are made on the device, from tables that never leave it, so that nothing is copied and nobody waits."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from trunkattn.backend import DeviceTables
from trunkattn.config import Capacity
from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.cards import Card
from trunkattn.gpu.compiling import is_compiling
from trunkattn.gpu.device_planner.batch_invariant import InvariantPlanner
from trunkattn.gpu.device_planner.candidates import candidates_of
from trunkattn.gpu.device_planner.common import SUMMARY_CANDIDATE, SUMMARY_READ, Tables
from trunkattn.gpu.device_planner.planner import MOST_COLUMNS, MOST_ROWS, DevicePlanner, errors_of
from trunkattn.gpu.device_planner.prompt_chunks import ListedChunks, place_chunks
from trunkattn.gpu.graphs import GraphCache
from trunkattn.gpu.step_choice import BATCH_INVARIANT
from trunkattn.numerics import MAX_INT32
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.candidates import TilingRule
from trunkattn.planner.work_list import ITEM_COLUMNS, QUERY_END, SEGMENT_COLUMNS, SEGMENT_END, TileLimits, TileList


@dataclass(frozen=True)
class DeviceTiles:
    """Rows of tiles that were planned on the device.

    Attributes:
        tables: the caller's tables without the prompt chunks. `stats` and `check` read them when they are called.
        num_query_tokens: a lower bound of the step's query tokens, whose number only the device knows.
    """

    tables: Tables
    window: int
    rule: TilingRule
    gpu_plan: GpuPlan
    num_query_tokens: int
    has_chunks: bool

    @property
    def in_spans(self) -> bool:
        """Whether items are cut at spans of sequences that no batch changes."""
        return self.rule.batch_invariant

    @property
    def kv_tokens(self) -> torch.Tensor:
        """The KV tokens that are read, and those that would be read without sharing: int64 [2] on the device."""
        assert self.gpu_plan.summary is not None
        return self.gpu_plan.summary[SUMMARY_READ.value :]

    def tile_list(self) -> TileList:
        """Returns a copy of the plan's arrays. It waits for the device."""
        host = {name: array.cpu().numpy() for name, array in self.gpu_plan.arrays.items()}
        heights = len(self.rule.tiles)
        *counts, merged = host["counts"][: 2 * heights + 2].tolist()
        if self.has_chunks:
            counts[0] = int(host["overlapped"][0])  # co-scheduled items are in no bucket
        items = host["items"][: ITEM_COLUMNS * counts[-1]].reshape(-1, ITEM_COLUMNS)
        queries, segments = (int(items[:, column].max(initial=0)) for column in (QUERY_END, SEGMENT_END))
        slots = host["partial_slots"][:queries]
        return TileList(
            items=items,
            segments=host["segments"][: SEGMENT_COLUMNS * segments].reshape(-1, SEGMENT_COLUMNS),
            queries=host["queries"][:queries],
            partial_slots=slots,
            merge_slots=host["merge_slots"][: 2 * queries].reshape(-1, 2),
            counts=np.array(counts, np.int32),
            merge_queries=host["merge_queries"][:merged],
            merge_ranges=host["merge_ranges"][: 2 * merged].reshape(-1, 2),
            num_slots=int(slots.max(initial=-1)) + 1,
            merges_taller=True,
        )

    def batch(self) -> StepTables:
        """Returns the tables as they are now. It waits for the device."""
        table, lens, starts = (table.cpu().numpy() for table in self.tables)
        return StepTables(table, lens, starts, self.window)

    def described(self) -> tuple[str, str]:
        """Returns the tiling that was chosen, and why. It waits for the device."""
        assert self.gpu_plan.summary is not None
        if self.rule.batch_invariant:
            return BATCH_INVARIANT.policy, BATCH_INVARIANT.reason
        tiling = self.rule.priced.tilings[int(self.gpu_plan.summary[SUMMARY_CANDIDATE.value])]
        return tiling.name(self.rule), "least predicted time, found on the device"


class OnDevice:
    """Plans steps within a capacity on the device. One object serves all windows."""

    @torch.inference_mode(False)
    def __init__(
        self,
        rule: TilingRule,
        capacity: Capacity,
        limits: TileLimits,
        card: Card,
        device: torch.device,
    ) -> None:
        most = {  # places in the cache are int32, and the sort key of a request is one int64
            "num_pages": MAX_INT32 // rule.page_size,
            "max_requests": MOST_ROWS,
            "max_pages_per_request": MOST_COLUMNS,
        }
        for name, bound in most.items():
            if (value := getattr(capacity, name)) > bound:
                raise ValueError(f"{name}={value}: expected at most {bound} to plan on the device")
        self._rule, self._device = rule, device
        planner = InvariantPlanner if rule.batch_invariant else DevicePlanner
        self._planner = planner(candidates_of(rule), capacity, limits, card, device)
        self._starts = torch.arange(capacity.max_requests + 1, dtype=torch.int32, device=device)
        if device.type == "cuda":
            # An engine pads a step to some numbers of rows, and may have one plan for each window.
            self._graphs = GraphCache(device, 256 + 2 * capacity.max_requests)

    def plan(
        self,
        tables: DeviceTables,
        window: int,
        plan: GpuPlan,
        chunks: ListedChunks | None = None,
    ) -> DeviceTiles:
        """Fills a reserved plan. `query_start_loc` may be None if each request has one query token. `chunks` says that
        the last requests are prompt chunks."""
        table, lens, starts = tables
        if starts is None:
            starts = self._starts[: table.shape[0] + 1]
            known = table.shape[0]
        else:
            known = chunks.end_token if chunks else 0
        kept = Tables(table, lens, starts)
        if chunks:
            rows = len(table) - chunks.num_requests
            kept = Tables(table[:rows], lens[:rows], starts[: rows + 1])
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            if len(kept.block_table):
                self._fill(plan, kept, window, chunks is not None and chunks.overlaps)
            else:
                self._planner.check(*kept)
                plan.forget_tiles()
            if chunks:
                place_chunks(plan, chunks, table, self._planner.num_pages)
        return DeviceTiles(kept, window, self._rule, plan, known, has_chunks=chunks is not None)

    def _fill(self, plan: GpuPlan, tables: Tables, window: int, lowest_tile: bool) -> None:
        """Launches the planner. If the same tensors come again, it is replayed as a CUDA graph, because launches from
        Python take several times as long as the kernels."""
        if self._device.type != "cuda" or is_compiling() or torch.cuda.is_current_stream_capturing():
            return self._planner.fill(plan, *tables, window, lowest_tile)
        assert plan.summary is not None
        places = [value for table in tables for value in (table.dtype, table.data_ptr(), *table.shape, *table.stride())]
        key = (plan.flat.data_ptr(), plan.summary.data_ptr(), window, lowest_tile, *places)
        self._graphs.run(key, partial(self._planner.fill, plan, *tables, window, lowest_tile))

    @property
    def errors(self) -> torch.Tensor:
        """The error word, [1] int32 on the device. `errors_of` says what it means."""
        return self._planner.errors

    @torch.inference_mode(False)
    def check(self) -> None:
        """Raises ValueError if a batch since the last check held values that are wrong. It waits for the device."""
        bits = int(self._planner.errors)
        if bits:
            self._planner.errors.zero_()
            raise ValueError(f"plans made on the device: {'; '.join(errors_of(bits))}")
