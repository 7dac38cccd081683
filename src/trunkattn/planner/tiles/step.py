"""One step as row tiles: the query entries, made once, the predicted time of each candidate tiling, and its tile
list."""

from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.planner.planner import StepTables
from trunkattn.planner.prefix_forest import Forest
from trunkattn.planner.tiles.candidates import TileStage, Tiling, TilingRule, stage_of_row, stage_rows_of
from trunkattn.planner.tiles.cost import LAUNCH_STAGE, launched_stage, stage_loads, tilings_fit, tilings_ns
from trunkattn.planner.tiles.layout import Entries, emit_stage, make_entries, ordered_items, outline_stage
from trunkattn.planner.tiles.overlap import ChunkTimes, OverlapCosts, Overlapped, choose_overlap
from trunkattn.planner.tiles.tile_list import TileArrays, finish, join_stages, nest
from trunkattn.planner.work_list import TileLimits, TileList

_NO_LIMITS: Final = np.full(3, np.iinfo(np.int64).max)


class _Measures(NamedTuple):
    """The entries of a step, and the times of its candidates."""

    entries: Entries
    times_ns: NDArray[np.int64]  # [candidates]
    fits: NDArray[np.bool_]  # [candidates]


class TiledStep:
    """The requests of a step whose query tokens are rows of tiles.

    The candidates are those of `rule.priced`, in its order. The entries, the loads of every stage and the predicted
    times are computed together, when one of them is first needed.
    """

    def __init__(self, rule: TilingRule, forest: Forest, batch: StepTables, limits: TileLimits | None = None) -> None:
        """Keeps a batch. forest: its prefix forest. limits: sizes of the plan's arrays; None: any size."""
        self.rule, self.forest, self.batch, self._limits = rule, forest, batch, limits

    @cached_property
    def _measures(self) -> _Measures:
        batch, priced, limits = self.batch, self.rule.priced, self._limits
        most = _NO_LIMITS if limits is None else np.array([limits.items, limits.segments, limits.slots], np.int64)
        measures: _Measures = _measure(
            self.forest,
            batch.seq_lens,
            batch.query_start_loc,
            batch.window,
            priced.stages,
            priced.launches,
            priced.costs,
            most,
        )
        return measures

    @property
    def entries(self) -> Entries:
        """The query tokens in the order of the forest's rows."""
        return self._measures.entries

    @property
    def num_queries(self) -> int:
        """Query tokens that are rows of tiles."""
        return int(self.batch.query_start_loc[-1])

    def predict(self) -> NDArray[np.int64]:
        """[candidates] int64: predicted time of each candidate in ns."""
        return self._measures.times_ns

    def fits(self) -> NDArray[np.bool_]:
        """[candidates] bool: whether each surely keeps within the limits. The device planner uses the same bound."""
        return self._measures.fits

    def emit(self, tiling: Tiling) -> TileList:
        """The tile list of a tiling, which need not be a candidate."""
        stages = stage_rows_of(self.rule, tiling)
        table, window = self.batch.block_table, self.batch.window
        arrays: TileArrays = _emit(self.forest, self.entries, table, stages, self.rule.list_rule, window)
        return TileList(*arrays, merges_taller=True)

    def overlap(
        self, numbers: list[int], chunks: ChunkTimes, costs: OverlapCosts, leftover: TileStage
    ) -> tuple[int, Overlapped]:
        """(number of the candidate whose step ends first, the result of `choose_overlap` for it). numbers: the
        candidates to try, each with one low tile without subtiles. leftover: the stage of items that are not
        co-scheduled."""
        priced = self.rule.priced
        launches, tried, window = priced.launches, np.array(numbers, np.int64), self.batch.window
        number, items, total_ns = _overlap(
            self.forest, self.entries, window, priced.stages, launches, tried, chunks, costs, leftover, priced.costs
        )
        return number, Overlapped(items, total_ns)


@njit
def _measure(forest, seq_lens, query_start_loc, window, stages, launches, costs, limits):
    """The entries, times and fits of a batch."""
    entries = make_entries(forest, seq_lens, query_start_loc)
    loads = stage_loads(forest, entries, stages, costs.l2_tokens, window, costs.segment_size)
    return _Measures(entries, tilings_ns(loads, stages, launches, costs), tilings_fit(loads, stages, launches, limits))


@njit
def _emit(forest, entries, table, stages, rule, window):
    """The arrays of a tile list. stages: see `stage_rows_of`."""
    segment_size, page_size = rule.segment_size, rule.page_size
    emitted = emit_stage(forest, entries, table, stage_of_row(stages[0]), window, segment_size, page_size)
    bucket = np.full(len(emitted.items), stages[0, 0], np.int32)
    if len(stages) > 1:
        low = emit_stage(forest, entries, table, stage_of_row(stages[1]), window, segment_size, page_size)
        emitted = join_stages(emitted, low)
        bucket = np.concatenate((bucket, np.full(len(low.items), stages[1, 0], np.int32)))
    if rule.is_nested:
        emitted = nest(emitted, bucket, rule.subtiles)
    return finish(emitted, bucket, len(rule.subtiles), len(entries.query), rule.fuse_up_to)


@njit
def _overlap(forest, entries, window, stages, launches, numbers, chunks, overlap, leftover, costs):
    """(number, items, total_ns) of the best candidate. numbers: those to try."""
    best_number, best = np.int64(-1), Overlapped(np.int64(0), np.int64(0))
    for number in numbers:
        stage = launched_stage(stages, launches[number, 0])
        assert stage.subtiles == 1 and launches[number, 1, LAUNCH_STAGE] < 0
        outline = outline_stage(forest, entries, stage, window, costs.segment_size)
        items, num_slots = ordered_items(outline, len(entries.query))
        found = choose_overlap(items, num_slots, chunks, overlap, leftover.stage, leftover.tile_index, costs)
        if best_number < 0 or found.total_ns < best.total_ns:
            best_number, best = number, found
    return best_number, best.items, best.total_ns
