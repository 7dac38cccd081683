"""One step as row tiles: its query entries are made once, and answer what each candidate tiling costs and emits."""

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.planner.planner import Batch
from trunkattn.planner.prefix_forest import Forest
from trunkattn.planner.row_tiles.choice import TileStage, Tiling, TilingRule, launches_of, stage_of_row
from trunkattn.planner.row_tiles.cost import StageLoads, stage_loads, ways_fit, ways_ns
from trunkattn.planner.row_tiles.layout import (
    Entries,
    TileArrays,
    emit_stage,
    finish,
    heaviest_first,
    join_stages,
    make_entries,
    nest,
    outline_stage,
)
from trunkattn.planner.row_tiles.overlap import ChunkTimes, OverlapCosts, Overlapped, choose_overlap
from trunkattn.planner.work_list import TileLimits, TileList


class _Measures(NamedTuple):
    """What a step's entries are, and what its candidates cost."""

    entries: Entries
    loads: StageLoads
    times_ns: NDArray[np.int64]  # [candidates]


class TiledStep:
    """The requests of a step whose query tokens are rows of tiles.

    The candidates are those of `rule.priced`, in its order. The entries, the loads of every stage and the predicted
    times are found together, once.
    """

    def __init__(self, rule: TilingRule, forest: Forest, batch: Batch) -> None:
        """forest: the prefix forest of the batch."""
        self.rule, self.forest, self.batch = rule, forest, batch

    @cached_property
    def _measures(self) -> _Measures:
        batch, priced = self.batch, self.rule.priced
        tables = batch.seq_lens, batch.query_start_loc, batch.window
        return _measure(self.forest, tables, priced.stages, priced.uses, priced.costs)

    @property
    def entries(self) -> Entries:
        """The query tokens in the order of the forest's rows."""
        return self._measures.entries

    @property
    def num_queries(self) -> int:
        """Query tokens that are rows of tiles."""
        return int(self.batch.query_start_loc[-1])

    def predict(self) -> NDArray[np.int64]:
        """[candidates] predicted ns."""
        return self._measures.times_ns

    def fits(self, limits: TileLimits) -> NDArray[np.bool_]:
        """[candidates] whether each surely keeps within limits, as the planner on the device knows it."""
        priced = self.rule.priced
        most = np.array([limits.items, limits.runs, limits.slots], np.int64)
        return ways_fit(self._measures.loads, priced.stages, priced.uses, most)

    def emit(self, tiling: Tiling) -> TileList:
        """The tile list of a tiling, which need not be a candidate."""
        launches = launches_of(self.rule, tiling)
        table, window = self.batch.block_table, self.batch.window
        arrays: TileArrays = _emit(self.forest, self.entries, table, launches, self.rule.list_rule, window)
        return TileList(*arrays, merges_taller=True)

    def overlap(
        self, tilings: list[Tiling], chunks: ChunkTimes, costs: OverlapCosts, leftover: TileStage
    ) -> list[Overlapped]:
        """What `choose_overlap` finds for tilings of low tiles without subtiles. leftover: computes the other items."""
        assert all(tiling.tall is None and self.rule.kinds[tiling.low].subtiles == 1 for tiling in tilings)
        rule = self.rule
        launches = np.concatenate([launches_of(rule, tiling) for tiling in tilings])
        source = self.forest, self.entries, self.batch.window
        found = _overlap(source, launches, chunks, costs, leftover, rule.priced.costs)
        return [Overlapped(*row) for row in found.tolist()]


@njit
def _measure(forest, tables, stages, uses, costs):
    """tables: seq_lens, query_start_loc and window."""
    seq_lens, query_start_loc, window = tables
    entries = make_entries(forest, seq_lens, query_start_loc)
    loads = stage_loads(forest, entries, stages, costs.l2_tokens, window, costs.run_tokens)
    return _Measures(entries, loads, ways_ns(loads, stages, uses, costs))


@njit
def _emit(forest, entries, table, launches, rule, window):
    """The arrays of a tile list. launches: as of `launches_of`."""
    run, page_size = rule.run_tokens, rule.page_size
    emitted = emit_stage(forest, entries, table, stage_of_row(launches[0]), window, run, page_size)
    bucket = np.full(len(emitted.items), launches[0, 0], np.int32)
    if len(launches) > 1:
        low = emit_stage(forest, entries, table, stage_of_row(launches[1]), window, run, page_size)
        emitted = join_stages(emitted, low)
        bucket = np.concatenate((bucket, np.full(len(low.items), launches[1, 0], np.int32)))
    if rule.is_nested:
        emitted = nest(emitted, bucket, rule.subtiles)
    return finish(emitted, bucket, len(rule.subtiles), len(entries.query), rule.fuse_up_to)


@njit
def _overlap(source, launches, chunks, overlap, leftover, costs):
    """[launches, fields of Overlapped]. source: forest, entries and window."""
    forest, entries, window = source
    found = np.empty((len(launches), 2), np.int64)
    for i in range(len(launches)):
        outline = outline_stage(forest, entries, stage_of_row(launches[i]), window, costs.run_tokens)
        items, num_slots = heaviest_first(outline, len(entries.query))
        best = choose_overlap(items, num_slots, chunks, overlap, leftover.stage, leftover.kind, costs)
        found[i, 0], found[i, 1] = best.items, best.total_ns
    return found
