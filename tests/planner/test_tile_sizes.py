"""How row tiles are cut into items, in which order these stand, and which lists fit arrays of a fixed size."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkattn.gpu.tiles import GpuTile
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles import cost as tile_costs
from trunkattn.planner.tiles import layout
from trunkattn.planner.tiles.candidates import Tiling, TilingRule, candidates
from trunkattn.planner.tiles.pack_items import KeyGrid, items_of_work
from trunkattn.planner.work_list import QUERY_START

from .specs import forest_of, make_batch
from .tile_cases import cases, make_rule, tile


@pytest.mark.parametrize(
    ("total", "num_tiles", "num_splits", "block_segments", "target"),
    [
        (100, 3, 10, 4, 12),  # 9 items, 3 of each tile
        (100, 10, 10, 4, 10),
        (100, 12, 10, 4, 10),  # more tiles than items are asked for
        (100, 1, 1000, 8, 8),  # a whole block
        (0, 0, 10, 4, 4),
        (100, 3, 0, 4, 101),  # no tile is cut
    ],
)
def test_the_segments_that_an_item_should_have(
    total: int, num_tiles: int, num_splits: int, block_segments: int, target: int
) -> None:
    assert layout.target_of(total, num_tiles, num_splits, block_segments, 0) == target


@pytest.mark.parametrize(
    ("size", "target", "step"),
    [(14, 10, 16), (15, 10, 8), (24, 10, 12), (25, 10, 12), (26, 10, 12), (10, 101, 12), (0, 10, 1)],
)
def test_a_tile_is_cut_into_the_nearest_number_of_targets(size: int, target: int, step: int) -> None:
    """In blocks of 4 segments."""
    assert layout.step_of(size, target, 4, 0) == step


def portions_of(sizes: list[int], num_splits: int, block: int, own: int) -> tuple[list[list[int]], int]:
    """(the first segments of each tile's items, and its size; the segments that a portion should have)."""
    target, before, found = layout.target_of(sum(sizes), len(sizes), num_splits, block, own), 0, []
    for size in sizes:
        step = layout.step_of(size, target, block, own)
        lead = layout.lead_of(step, before, own)
        found.append([0, *(lead + split * step for split in range(layout.splits_of(size, lead, step) - 1)), size])
        before += layout.pitch_of(size, block, own)
    return found, target


def test_tiles_of_different_lengths_are_cut_into_portions_of_one_length() -> None:
    """Five portions of 12 segments for tiles of 30, 4 and 10, with 2 between two tiles. Equal items of the same tiles
    would have 10, 4 and 10."""
    assert portions_of([30, 4, 10], 5, 2, 2) == ([[0, 12, 24, 30], [0, 4], [0, 10]], 12)


@pytest.mark.property
@given(
    sizes=st.lists(st.integers(1, 300), min_size=1, max_size=40),
    num_splits=st.integers(1, 140),
    block=st.sampled_from([1, 2, 4]),
    own=st.integers(1, 9),
)
def test_portions_are_equal_whatever_tiles_they_lie_in(sizes: list[int], num_splits: int, block: int, own: int) -> None:
    """A portion has its segments, what each of its tiles takes to begin and end, and once more that for the tile in
    which it begins. Items are cut between blocks only."""
    found, target = portions_of(sizes, num_splits, block, own)
    begin, load = 0, np.zeros(num_splits, np.int64)
    for edges in found:
        assert edges == sorted(set(edges)) and not any(edge % block for edge in edges[:-1])
        for first, last in pairwise(edges):
            load[(begin + first) // target] += last - first + own
        begin += layout.pitch_of(edges[-1], block, own)
    assert load.max() <= target + own


def test_equally_long_items_stay_in_the_order_of_the_requests() -> None:
    batch = make_batch([[10 * i, 10 * i + 1][: 1 + i % 2] for i in range(200)])
    rule = make_rule(4, 1, 1)
    tile_list = tile(rule, Tiling(0, per_query=True, waves=0), batch)
    order = tile_list.queries[tile_list.items[:, QUERY_START]].tolist()
    assert order == [*range(1, 200, 2), *range(0, 200, 2)]


@pytest.mark.parametrize(("start", "end", "full"), [(2, 10, 0), (3, 10, 7), (3, 13, 9)])
def test_full_segments_of_a_pack_are_those_that_all_queries_see(start: int, end: int, full: int) -> None:
    """Segments of one token, and queries at 11 and 12 with a window of 10: they see 2 to 11 and 3 to 12."""
    work = np.array([[0, start, end, 0, 2]], np.int32), np.arange(2, dtype=np.int32)
    table, positions = np.arange(13, dtype=np.int32)[None], np.array([11, 12], np.int32)
    emitted = items_of_work(work, table, positions, 10, 1, 1, np.ones(1, np.int32), KeyGrid(1, 1))
    assert emitted.items.tolist() == [[0, full, end - start, 0, 2]]


def test_full_segments_behind_one_that_a_window_cuts_are_masked() -> None:
    """Tokens 5 to 15 in segments of 4: the first of the trunk's is cut, and all of a request's own are whole."""
    rule = make_rule(1, 4, 1, shapes=(GpuTile(1, 4, 1, 1, 1, (1, 1), (1, 1), private_n=4),))
    batch = make_batch([[1, 2, 3, 4], [1, 2, 5, 6]], seq_lens=[16, 16], window=11)
    assert tile(rule, Tiling(0, per_query=True, waves=0), batch).items.tolist() == [[0, 0, 3, 0, 1], [3, 3, 6, 1, 2]]


def test_an_item_holds_only_queries_that_read_some_of_it() -> None:
    """Four requests in one tile of 8 segments, cut into 3 items. Their window hides what they target two by two."""
    batch = make_batch([[1, 3, 4], [1, 5, 6], [2, 7, 8], [2, 9, 10]], seq_lens=[12] * 4, window=6)
    forest = forest_of(batch, 4)
    entries = layout.make_entries(forest, batch.seq_lens, batch.query_start_loc)
    stage = layout.Stage(height=4, least=1, below=tile_costs.EVERY, block_segments=1, num_splits=3)
    emitted = layout.emit_stage(forest, entries, batch.block_table, stage, 6, 4, 4)
    assert emitted.items.tolist() == [[0, 0, 3, 0, 2], [3, 3, 6, 2, 4], [6, 6, 8, 4, 5]]
    assert emitted.queries.tolist() == [0, 1, 1, 2, 3]


@pytest.mark.property
@settings(max_examples=30)
@given(case=cases())
def test_a_list_that_is_longer_than_a_limit_does_not_fit_it(case: tuple[TilingRule, StepTables]) -> None:
    rule, batch = case
    forest, priced = forest_of(batch, rule.page_size), rule.priced
    entries = layout.make_entries(forest, batch.seq_lens, batch.query_start_loc)
    loads = tile_costs.stage_loads(
        forest, entries, priced.stages, priced.costs.l2_tokens, batch.window, rule.segment_size
    )
    for number, tiling in enumerate(candidates(rule)):
        tile_list = tile(rule, tiling, batch)
        sizes = np.array([len(tile_list.items), len(tile_list.segments), tile_list.num_slots])
        for each in np.flatnonzero(sizes):
            limits = np.full(3, 1 << 40)
            limits[each] = sizes[each] - 1
            assert not tile_costs.tilings_fit(loads, priced.stages, priced.launches, limits)[number]
