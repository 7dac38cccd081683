"""`check_tiles` finds a broken tile list."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import parse_tree, tree_batch
from trunkattn.planner.check import check_tiles
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.candidates import Tiling, TilingRule, candidates
from trunkattn.planner.work_list import QUERY_END, SEGMENT_END, SEGMENT_SHARED_END, SEGMENT_START, TileList

from .specs import as_batch, make_batch
from .tile_cases import TREE_BATCH, cases, make_rule, tile, tree_tiles, unnested

Change = Callable[[TileList], TileList]


def changed(name: str, index: tuple[int, ...] | int, delta: int) -> Change:
    """Adds `delta` to one number of one array."""

    def change(tile_list: TileList) -> TileList:
        array = getattr(tile_list, name).copy()
        array[index] += delta
        return replace(tile_list, **{name: array})

    return change


def last_segment(column: int, delta: int) -> Change:
    """Adds `delta` to one number of the last segment that has tokens."""

    def change(tile_list: TileList) -> TileList:
        last = np.flatnonzero(tile_list.segments[:, 1])[-1]
        return changed("segments", (last, column), delta)(tile_list)

    return change


def swapped_segments(one: int, other: int) -> Change:
    def change(tile_list: TileList) -> TileList:
        segments = tile_list.segments.copy()
        segments[[one, other]] = segments[[other, one]]
        return replace(tile_list, segments=segments)

    return change


def without_segments(*places: int) -> Change:
    """As those that fill up a block."""

    def change(tile_list: TileList) -> TileList:
        segments = tile_list.segments.copy()
        segments[list(places)] = 0
        return replace(tile_list, segments=segments)

    return change


MISSED = r"query \d+ of row \d+ must read token \d+ once, but reads it (never|\d+ times)"
NOT_FOR_ALL = "item 0 has a full segment that is not for all"
NOT_MERGED = "a partial slot is written and not merged"
ONE_TILE = [
    (changed("items", (0, SEGMENT_END), -5), MISSED),
    (changed("items", (0, SEGMENT_START), 1), MISSED),
    (changed("items", (0, SEGMENT_SHARED_END), 1), NOT_FOR_ALL),
    (changed("items", (0, SEGMENT_SHARED_END), 24), NOT_FOR_ALL + "|sees only a part"),
    (changed("items", (0, QUERY_END), -1), NOT_FOR_ALL),
    (changed("segments", (0, 0), 1), "item 0 reads pages that its query .* does not have"),
    (changed("segments", (0, 1), 1), NOT_FOR_ALL),
    (changed("segments", (0, 1), -(1 << 8)), NOT_FOR_ALL),
    (last_segment(1, -(1 << 16)), MISSED),
    (changed("segments", (0, 1), -(1 << 16)), "item 0 has a full segment of which query .* sees only a part"),
    (last_segment(2, -1), "item 0 reads pages that its query .* does not have"),
    (changed("queries", 0, 1), "reads pages that|" + MISSED),
    (changed("counts", 1, 1), "item 0 has .* queries, but its tile holds"),
    (changed("partial_slots", 0, 1), NOT_MERGED),
]


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize(("break_it", "message"), ONE_TILE)
def test_a_broken_tile_is_found(break_it: Change, message: str, nested: bool) -> None:
    tile_list, rule = tree_tiles("64x64", num_sms=1, nested=nested)
    with pytest.raises(AssertionError, match=message):
        check_tiles(break_it(tile_list), TREE_BATCH, rule)


# Of the tree's tile, segments 4 to 11 are the first blocks of the four subtiles: 4, 5 and 6, 7 the first branch for two
# of them, 8, 9 the second branch for the third, 10, 11 empty. Segments 12, 13 are leaves of the first.
NESTED = {
    "in_the_block_of_another_subtile": swapped_segments(12, 11),
    "of_two_subtiles_exchanged": swapped_segments(12, 14),
    "missing_for_the_first_subtile": without_segments(4),
    "missing_for_the_second_subtile": without_segments(6),
    "a_block_early": changed("items", (0, SEGMENT_SHARED_END), -1),
}


@pytest.mark.parametrize("name", NESTED)
def test_a_segment_that_the_wrong_subtile_reads_is_found(name: str) -> None:
    tile_list, rule = tree_tiles("64x64", num_sms=1)
    assert tile_list.segments[4:6].tolist() == tile_list.segments[6:8].tolist() != tile_list.segments[8:10].tolist()
    with pytest.raises(AssertionError, match=MISSED):
        check_tiles(NESTED[name](tile_list), TREE_BATCH, rule)


def slot_1_becomes(slot: int) -> Callable[[TileList], TileList]:
    return lambda tiles: replace(tiles, partial_slots=np.where(tiles.partial_slots == 1, slot, tiles.partial_slots))


CUT = [
    (slot_1_becomes(0), "partial slot 0 is written twice"),
    (slot_1_becomes(999), NOT_MERGED),
    (changed("merge_ranges", (0, 1), -1), NOT_MERGED),
    (changed("merge_ranges", (0, 0), 1), NOT_MERGED),
    (lambda tiles: replace(tiles, merge_queries=tiles.merge_queries[[0, *range(len(tiles.merge_queries) - 1)]]),
     "a query's output is not written exactly once"),
    (lambda tiles: replace(tiles, num_slots=tiles.num_slots - 1), r"partial slot \d+ is written, but there is"),
]  # fmt: skip


@pytest.mark.parametrize(("break_it", "message"), CUT)
def test_broken_slots_merges_and_order_are_found(break_it: Change, message: str) -> None:
    tile_list, rule = tree_tiles("64x64", num_sms=2)
    assert len(tile_list.merge_queries) > 1
    with pytest.raises(AssertionError, match=message):
        check_tiles(break_it(tile_list), TREE_BATCH, rule)


def test_an_item_of_a_taller_tile_that_merges_is_found() -> None:
    """A trunk of 16 requests is one tall item, which four low ones merge."""
    batch, rule = as_batch(tree_batch(parse_tree("1,16_512,20"), 16)), unnested(make_rule(4, 16, 1, num_kv_heads=2))
    tiling = next(tiling for tiling in candidates(rule) if tiling.name(rule) == "64x64+16x64")
    tile_list = tile(rule, tiling, batch)
    assert tile_list.counts.tolist() == [0, 0, 1, 5, 5]
    check_tiles(tile_list, batch, rule)
    with pytest.raises(AssertionError, match="an item of a taller tile than the lowest merges"):
        check_tiles(changed("counts", 3, -1)(tile_list), batch, rule)


def test_a_bucket_out_of_order_is_found() -> None:
    batch, rule = make_batch([[1, 2, 3], [4, 5, 6, 7, 8]]), make_rule(4, 1, 1, num_kv_heads=2)
    tile_list = tile(rule, Tiling(0, per_query=True), batch)
    check_tiles(tile_list, batch, rule)
    with pytest.raises(AssertionError, match="item 1 is longer than the item before it in its bucket"):
        check_tiles(replace(tile_list, items=tile_list.items[::-1].copy()), batch, rule)


@pytest.mark.property
@given(case=cases(), draw=st.data())
def test_a_missing_segment_and_a_moved_mark_are_found_anywhere(
    case: tuple[TilingRule, StepTables], draw: st.DataObject
) -> None:
    rule, batch = case
    tile_list = tile(rule, draw.draw(st.sampled_from(candidates(rule))), batch)
    if len(tile_list.items) == 0:
        return
    at = draw.draw(st.integers(0, len(tile_list.items) - 1))
    start, shared_end, end, begin, stop = tile_list.items[at].tolist()
    missing = draw.draw(st.sampled_from(needed_segments(tile_list, start, end, begin, batch)))
    same = (tile_list.segments[start:end] == tile_list.segments[missing]).all(axis=1)  # for several subtiles
    with pytest.raises(AssertionError):
        check_tiles(without_segments(*(start + np.flatnonzero(same)).tolist())(tile_list), batch, rule)
    rows, count = tile_list.segments[shared_end:end, 1], stop - begin
    masked = (rows >> 16 < rule.segment_size) | (rows & 255 > 0) | (rows >> 8 & 255 < count)
    if masked.any():
        everything = changed("items", (at, SEGMENT_SHARED_END), end - shared_end)(tile_list)
        with pytest.raises(AssertionError, match=r"a full segment that is not for all|sees only a part"):
            check_tiles(everything, batch, rule)


def needed_segments(tile_list: TileList, start: int, end: int, begin: int, batch: StepTables) -> list[int]:
    """Those of segments [start, end) that at least one query of theirs sees a token of."""
    positions = batch.query_positions[tile_list.queries[begin:]]
    needed = []
    for i in range(start, end):
        _, rows, first = tile_list.segments[i].tolist()
        place, last = positions[rows & 255 : rows >> 8 & 255], first + (rows >> 16) - 1
        if ((place >= first) & (last > place - batch.window)).any():
            needed.append(i)
    return needed
