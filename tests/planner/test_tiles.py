"""Invariants of every tile list, the choice among tilings, and that `check_tiles` finds a broken list."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkattn.kernels.tile_table import DECODE_TILES, GpuTile, decode_tiles, without_subtiles
from trunkattn.plan_format import DIRECT, QUERY_END, QUERY_START, RUN_END, RUN_FULL, RUN_START, TileList
from trunkattn.planner import tiles
from trunkattn.planner.build import POLICIES, Batch, Planner
from trunkattn.planner.check import check_tiles
from trunkattn.planner.splitting import UNLIMITED
from trunkattn.planner.tiling import (
    TileKind,
    Tiling,
    TilingRule,
    candidates,
    choose,
    query_positions,
    stages_of,
    tile_forest,
    tile_work,
)
from trunkattn.workloads import parse_tree, random_forest, tree_batch

from .specs import MODEL, UNCUT, as_batch, forest_of, make_batch, make_spec

SEEDS = st.integers(0, 2**32 - 1)
PAGE_SIZES = st.one_of(st.integers(1, 64), st.sampled_from([1, 2, 16, 32, 64]))
WINDOWS = st.one_of(st.just(UNLIMITED), st.integers(1, 150))
GROUP_SIZES = st.one_of(st.integers(1, 16), st.sampled_from([5, 7, 12, 16, 24, 32]))
PROCESSORS = st.sampled_from([1, 3, 16, 132])
CACHES = ((2, 128), (1, 128), (2, 256))  # bytes of an element and head_dim: the table has tiles for each of them


def make_rule(
    group_size: int,
    page_size: int,
    processors: int,
    *,
    shapes: tuple[GpuTile, ...] = (),
    num_kv_heads: int = 1,
    fuse_up_to: int = 8,
) -> TilingRule:
    """By default of the tiles for a 16-bit cache."""
    kinds = (
        TileKind(it.block_m, it.block_n, 2 * processors, it.block_ns, it.chain_ns, it.subtiles, it.private_n)
        for it in shapes or decode_tiles(2, 128, group_size)
    )
    return TilingRule(
        kinds=tuple(kinds),
        group_size=group_size,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        launch_ns=2340,
        bytes_per_us=4_540_000,
        head_bytes=512,
        partial_bytes=group_size * num_kv_heads * 129 * 8,
        fuse_up_to=fuse_up_to,
    )


@st.composite
def low_tiles(draw: st.DrawFn, group_size: int) -> tuple[GpuTile, ...]:
    """So low that a small batch fills many of each height; rows of a subtile that hold no whole group stay unused."""
    shapes = []
    for _ in range(draw(st.integers(1, 4))):
        subtiles, private = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([4, 8, 16, 32]))
        rows = subtiles * (draw(st.integers(1, 3)) * group_size + draw(st.integers(0, group_size - 1)))
        keys = private * draw(st.sampled_from([1, 2, 4]))
        shapes.append(GpuTile(rows, keys, 1, 1, 2, (2000, 3000), (1500, 2500), subtiles, private))
    return tuple(sorted(shapes, key=lambda shape: shape.block_m))


@st.composite
def rules(draw: st.DrawFn, page_size: int) -> TilingRule:
    group_size = draw(GROUP_SIZES)
    listed = st.sampled_from([decode_tiles(*cache, group_size) for cache in CACHES])
    return make_rule(
        group_size,
        page_size,
        draw(PROCESSORS),
        shapes=draw(st.one_of(listed, low_tiles(group_size))),
        num_kv_heads=draw(st.sampled_from([1, 2, 8])),
        fuse_up_to=draw(st.sampled_from([0, 1, 8])),
    )


def unnested(rule: TilingRule) -> TilingRule:
    """As the packing policies take the tiles."""
    return replace(rule, kinds=tuple(replace(kind, subtiles=1) for kind in rule.kinds))


@st.composite
def cases(draw: st.DrawFn) -> tuple[TilingRule, Batch]:
    page_size = draw(PAGE_SIZES)
    paged = random_forest(
        np.random.default_rng(draw(SEEDS)),
        page_size=page_size,
        max_requests=draw(st.sampled_from([3, 6, 12])),
        max_own_tokens=draw(st.sampled_from([8, 60])),
        max_query_len=draw(st.sampled_from([1, 12, 40])),
    )
    return draw(rules(page_size)), as_batch(paged, draw(WINDOWS))


def arrays(batch: Batch) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return batch.block_table, batch.seq_lens, batch.query_start_loc


def tile(rule: TilingRule, tiling: Tiling, batch: Batch) -> TileList:
    return tile_forest(rule, tiling, forest_of(batch, rule.page_size), arrays(batch), batch.window)


def assert_runnable(tile_list: TileList, batch: Batch, rule: TilingRule) -> None:
    """What `check_tiles` asserts, and what the kernels rely on besides: whole blocks of full runs and whole rounds of
    subtiles, no partial written by an item of the launches that merge, nothing merged by the others, consecutive
    slots."""
    check_tiles(tile_list, batch, rule)
    num_kinds = len(rule.kinds)
    assert len(tile_list.counts) == 2 * num_kinds + 1
    assert (tile_list.counts[0], tile_list.counts[-1]) == (0, len(tile_list.items))
    bucket = np.repeat(np.arange(2 * num_kinds), np.diff(tile_list.counts))
    for item, of in zip(tile_list.items, bucket, strict=True):
        kind = rule.kinds[of % num_kinds]
        block_runs, private_runs = kind.block_tokens // rule.run, kind.private_tokens // rule.run
        assert item[RUN_START] <= item[RUN_FULL] <= item[RUN_END] > item[RUN_START]
        assert (item[RUN_FULL] - item[RUN_START]) % block_runs == 0
        if kind.subtiles > 1 and item[RUN_END] > item[RUN_FULL]:
            rounds = tile_list.runs[item[RUN_FULL] : item[RUN_END], 1].reshape(-1, kind.subtiles * private_runs)
            assert (rounds > 0).any(axis=1).all(), "a round in which no subtile reads anything"
        assert item[QUERY_END] > item[QUERY_START]
        slots, parts = (x[item[QUERY_START] : item[QUERY_END]] for x in (tile_list.slots, tile_list.parts))
        if of < num_kinds:
            assert (parts[:, 0] == parts[:, 1]).all()
        else:
            assert (slots == DIRECT).all()
            assert (parts[:, 1] > parts[:, 0]).any()
        assert (parts[:, 1] - parts[:, 0] <= rule.fuse_up_to).all()
    written = np.sort(tile_list.slots[tile_list.slots != DIRECT])
    assert len(written) == 0 or written[-1] < tile_list.num_slots


@pytest.mark.property
@given(case=cases())
def test_every_tiling_of_a_forest_keeps_the_invariants(case: tuple[TilingRule, Batch]) -> None:
    rule, batch = case
    forest = forest_of(batch, rule.page_size)
    for tiling in candidates(rule):
        tile_list = tile_forest(rule, tiling, forest, arrays(batch), batch.window)
        assert_runnable(tile_list, batch, rule)
        assert tile_list.items.dtype == tile_list.runs.dtype == tile_list.queries.dtype == np.int32


@pytest.mark.property
@given(case=cases(), policy=st.sampled_from(POLICIES), invariant=st.booleans(), above_mean=st.booleans())
def test_every_work_list_becomes_a_tile_list_that_keeps_them(
    case: tuple[TilingRule, Batch], policy: str, invariant: bool, above_mean: bool
) -> None:
    batch, rule = case[1], replace(unnested(case[0]), uniform=invariant)
    columns = 2 if invariant else 1
    tallest = max(kind.rows for kind in rule.kinds)
    model = MODEL._replace(queries_per_tile=tallest // rule.group_size, group_size=rule.group_size)
    split = UNCUT._replace(
        num_slots=min(kind.programs for kind in rule.kinds),
        num_kv_heads=rule.num_kv_heads,
        grid=64,
        above_mean=above_mean,
        fixed_chunk=columns * rule.page_size if invariant else 0,
        group_size=rule.group_size,
    )
    planner = Planner(make_spec(policy, rule.page_size, model=model, rule=split, share_columns=columns))
    work = planner.plan(batch).work
    tile_list = tile_work(rule, work, arrays(batch), batch.window)
    assert_runnable(tile_list, batch, rule)
    assert not invariant or (tile_list.items[:, RUN_FULL] == tile_list.items[:, RUN_START]).all()


@pytest.mark.property
@given(case=cases())
def test_the_choice_is_the_candidate_of_least_listed_time(case: tuple[TilingRule, Batch]) -> None:
    rule, batch = case
    forest = forest_of(batch, rule.page_size)
    best, times = choose(rule, forest, (batch.seq_lens, batch.query_start_loc), batch.window)
    tilings = candidates(rule)
    assert best in tilings
    assert list(times) == [tiling.name(rule) for tiling in tilings]
    assert times[best.name(rule)] == min(times.values())


@pytest.mark.parametrize("rows", [[], [5, 3]], ids=["no_request", "no_query"])
def test_without_a_query_the_tile_list_is_empty(rows: list[int]) -> None:
    lens = np.array(rows, np.int32)
    batch = Batch(np.zeros((len(rows), 5), np.int32), lens, np.zeros(len(rows) + 1, np.int32))
    rule = make_rule(4, 1, 16)
    work = Planner(make_spec("cascade")).plan(batch).work
    for tile_list in [
        *(tile(rule, tiling, batch) for tiling in candidates(rule)),
        tile_work(unnested(rule), work, arrays(batch), UNLIMITED),
    ]:
        assert_runnable(tile_list, batch, rule)
        assert (len(tile_list.items), len(tile_list.runs), tile_list.num_slots) == (0, 0, 0)
    best, times = choose(rule, forest_of(batch), (batch.seq_lens, batch.query_start_loc), UNLIMITED)
    assert set(times.values()) == {0}
    assert best == candidates(rule)[0]


def test_candidates_hold_at_least_one_query_token() -> None:
    """Groups of 20 heads do not fit 16 rows."""
    low, tall = without_subtiles(DECODE_TILES)
    rule = make_rule(20, 16, 8, shapes=(low, tall, replace(tall, block_m=128)))
    names = [tiling.name(rule) for tiling in candidates(rule) if tiling.cut]
    assert names == ["64x64 per query", "64x64", "128x64", "128x64+64x64"]
    uncut = [replace(tiling, cut=True) for tiling in candidates(rule) if not tiling.cut]
    assert uncut == candidates(rule)[1:4], "one query token a tile is always cut: nothing else fills the device"


def test_a_run_divides_the_page_and_every_block() -> None:
    pages = (1, 2, 3, 12, 16, 48, 64, 128)
    assert [make_rule(1, page, 8).run for page in pages] == [1, 2, 1, 4, 16, 16, 32, 32]
    wide = decode_tiles(2, 256, 1)
    assert [make_rule(1, page, 8, shapes=wide).run for page in pages] == [1, 2, 1, 4, 16, 16, 16, 16]


def test_the_runs_of_a_tile_are_dealt_to_its_subtiles() -> None:
    """Subtiles of 2 queries and 2 runs a block; a list of one item of a plain kind comes first."""

    def run(place: int, low: int, high: int) -> list[int]:
        return [place, low | high << 8 | 16 << 16, place % 100]

    plain, full, empty = [run(900, 0, 1), run(916, 0, 1)], run(100, 0, 4), [0, 0, 0]
    both, long_one, long_two, long_three, short = (
        run(200, 0, 4), run(300, 0, 2), run(316, 0, 2), run(332, 1, 2), run(400, 3, 4),
    )  # fmt: skip
    listed = [*plain, full, long_one, both, long_two, long_three, short]
    emitted = tiles.Items(
        np.array([[0, 0, 2, 0, 1], [2, 3, 8, 1, 5]], np.int32),
        np.array(listed, np.int32),
        np.arange(5, dtype=np.int32),
        np.ones(2, np.bool_),
    )
    nested = tiles.nest(emitted, np.array([0, 1], np.int32), np.array([[1, 5, 4], [2, 2, 2]], np.int64))
    first = [long_one, both, both, short]  # a block of the first subtile, and one of the second
    second = [long_two, long_three, empty, empty]
    assert nested.runs.tolist() == [*plain, full, *first, *second]
    assert nested.items.tolist() == [[0, 0, 2, 0, 1], [2, 3, 11, 1, 5]]
    assert emitted.runs.tolist() == listed
    assert nested.queries is emitted.queries and nested.uncut is emitted.uncut


@pytest.mark.property
@given(case=cases())
def test_a_list_has_the_blocks_that_were_predicted(case: tuple[TilingRule, Batch]) -> None:
    """Of tiles that are not cut. Full runs that some query sees in part move to the masked blocks, so that only the
    number of keys is the same. A stage that leaves out some queries of a tile has the others stand elsewhere in it."""
    rule, batch = case
    forest, lens, starts = forest_of(batch, rule.page_size), batch.seq_lens, batch.query_start_loc
    entries = tiles.make_entries(forest, lens, starts)
    seen_whole = batch.window == UNLIMITED and (np.diff(starts) <= 1).all() and (lens % rule.run == 0).all()
    for kind, stage in {stage for tiling in candidates(rule) for stage in stages_of(rule, tiling)}:
        shape, uncut = rule.kinds[kind], stage._replace(num_parts=1)
        predicted = tiles.stage_blocks(forest, entries, uncut, batch.window, rule.run)
        emitted = tiles.emit_stage(forest, entries, batch.block_table, uncut, batch.window, rule.run, rule.page_size)
        height = shape.entries(rule.group_size) // shape.subtiles
        of_kind = np.array([[shape.subtiles, height, stage.private_runs]], np.int64)
        items = tiles.nest(emitted, np.zeros(len(emitted.items), np.int32), of_kind).items.tolist()
        step = stage.block_runs if shape.subtiles == 1 else stage.private_runs
        for (whole, private), (start, full, end, first, last) in zip(predicted.tolist(), items, strict=True):
            blocks = (full - start) // stage.block_runs
            masked = -(-(end - full) // (step * shape.subtiles))
            place = entries.query.tolist().index(emitted.queries[first]) // stage.height * stage.height
            complete = last - first == min(stage.height, len(entries.query) - place)
            if complete or shape.subtiles == 1:
                assert blocks * stage.block_runs + masked * step == whole * stage.block_runs + private * step
            assert blocks <= whole or not complete
            assert blocks == whole or not (complete and seen_whole)


TREE = tree_batch(parse_tree("1,2,12_64,32,20"), 16, row_seed=0, page_seed=1)
TREE_BATCH = as_batch(TREE)


def tree_tiles(name: str, processors: int, nested: bool = True) -> tuple[TileList, TilingRule]:
    """12 requests of 4 heads: 64 tokens for all, 32 for six, 20 each (the last 4 of them in a run that is not full)."""
    rule = make_rule(4, 16, processors, num_kv_heads=2)
    rule = rule if nested else unnested(rule)
    tiling = next(tiling for tiling in candidates(rule) if tiling.name(rule) == name)
    tile_list = tile(rule, tiling, TREE_BATCH)
    check_tiles(tile_list, TREE_BATCH, rule)
    return tile_list, rule


def test_one_tile_reads_each_token_of_the_tree_once() -> None:
    tile_list, rule = tree_tiles("64x64", processors=1, nested=False)
    assert rule.run == 16
    assert tile_list.items.tolist() == [[0, 4, 4 + 2 * 2 + 12 * 2, 0, 12]]
    assert (tile_list.runs[:, 1] >> 16).sum() == 64 + 2 * 32 + 12 * 20
    assert tile_list.num_slots == 0


def test_a_nested_tile_reads_a_branch_once_for_each_subtile() -> None:
    """Subtiles of 4 queries read 10, 12, 10 and 0 private runs, two at a time: each branch concerns two of them."""
    tile_list, _ = tree_tiles("64x64", processors=1)
    assert tile_list.items.tolist() == [[0, 4, 4 + 6 * 4 * 2, 0, 12]]
    private = (tile_list.runs[4:, 1] >> 16).reshape(6, 4, 2)
    assert np.count_nonzero(private, axis=(0, 2)).tolist() == [10, 12, 10, 0]
    assert (tile_list.runs[:, 1] >> 16).sum() == 64 + 2 * 2 * 32 + 12 * 20
    assert tile_list.num_slots == 0


def test_two_heights_leave_the_trunk_to_the_tall_tile() -> None:
    """Nodes of at least 16 queries are tall: none of this tree's 12, all of three times as many."""
    rule = make_rule(4, 16, 1, num_kv_heads=2)
    batch = as_batch(tree_batch(parse_tree("1,2,36_64,32,20"), 16, row_seed=0, page_seed=1))
    tiling = next(tiling for tiling in candidates(rule) if tiling.name(rule) == "64x64+16x64")
    tile_list = tile(rule, tiling, batch)
    assert_runnable(tile_list, batch, rule)
    assert tile_list.counts.tolist() == [0, 0, 3, 12, 12]  # the low tiles merge what the tall ones leave
    read = [tile_list.runs[item[RUN_START] : item[RUN_END]] for item in tile_list.items[:3]]
    assert all(set(runs[runs[:, 1] > 0, 2]) == set(range(0, 96, 16)) for runs in read)
    assert len(tile_list.merge_queries) == 0


Change = Callable[[TileList], TileList]


def changed(name: str, index: tuple[int, ...] | int, delta: int) -> Change:
    """Adds `delta` to one number of one array."""

    def change(tile_list: TileList) -> TileList:
        array = getattr(tile_list, name).copy()
        array[index] += delta
        return replace(tile_list, **{name: array})

    return change


def last_run(column: int, delta: int) -> Change:
    """Adds `delta` to one number of the last run that has tokens."""
    return lambda tile_list: changed("runs", (np.flatnonzero(tile_list.runs[:, 1])[-1], column), delta)(tile_list)


def swapped_runs(one: int, other: int) -> Change:
    def change(tile_list: TileList) -> TileList:
        runs = tile_list.runs.copy()
        runs[[one, other]] = runs[[other, one]]
        return replace(tile_list, runs=runs)

    return change


def without_runs(*places: int) -> Change:
    """As those that fill up a block."""

    def change(tile_list: TileList) -> TileList:
        runs = tile_list.runs.copy()
        runs[list(places)] = 0
        return replace(tile_list, runs=runs)

    return change


MISSED, NOT_FOR_ALL = "a token is missed or read twice", "item 0: a full run is not for all"
ONE_TILE = [
    (changed("items", (0, RUN_END), -5), MISSED),
    (changed("items", (0, RUN_START), 1), MISSED),
    (changed("items", (0, RUN_FULL), 1), NOT_FOR_ALL),
    (changed("items", (0, RUN_FULL), 24), NOT_FOR_ALL + "|needs a mask"),
    (changed("items", (0, QUERY_END), -1), NOT_FOR_ALL),
    (changed("runs", (0, 0), 1), "item 0: query .* has other pages"),
    (changed("runs", (0, 1), 1), NOT_FOR_ALL),
    (changed("runs", (0, 1), -(1 << 8)), NOT_FOR_ALL),
    (last_run(1, -(1 << 16)), MISSED),
    (changed("runs", (0, 1), -(1 << 16)), "item 0: query .* needs a mask"),
    (last_run(2, -1), "item 0: query .* has other pages"),
    (changed("queries", 0, 1), "has other pages|" + MISSED),
    (changed("counts", 1, 1), "item 0 exceeds its tile"),
    (changed("slots", 0, 1), "a partial is written and not merged"),
]


@pytest.mark.parametrize("nested", [False, True], ids=["plain", "nested"])
@pytest.mark.parametrize(("break_it", "message"), ONE_TILE)
def test_a_broken_tile_is_found(break_it: Change, message: str, nested: bool) -> None:
    tile_list, rule = tree_tiles("64x64", processors=1, nested=nested)
    with pytest.raises(AssertionError, match=message):
        check_tiles(break_it(tile_list), TREE_BATCH, rule)


# Of the tree's tile, runs 4 to 11 are the first blocks of the four subtiles: 4, 5 and 6, 7 the first branch for two of
# them, 8, 9 the second branch for the third, 10, 11 empty. Runs 12, 13 are leaves of the first.
NESTED = {
    "in_the_block_of_another_subtile": swapped_runs(12, 11),
    "of_two_subtiles_exchanged": swapped_runs(12, 14),
    "missing_for_the_first_subtile": without_runs(4),
    "missing_for_the_second_subtile": without_runs(6),
    "a_block_early": changed("items", (0, RUN_FULL), -1),
}


@pytest.mark.parametrize("name", NESTED)
def test_a_run_that_the_wrong_subtile_reads_is_found(name: str) -> None:
    tile_list, rule = tree_tiles("64x64", processors=1)
    assert tile_list.runs[4:6].tolist() == tile_list.runs[6:8].tolist() != tile_list.runs[8:10].tolist()
    with pytest.raises(AssertionError, match=MISSED):
        check_tiles(NESTED[name](tile_list), TREE_BATCH, rule)


CUT = [
    (lambda tiles: replace(tiles, slots=np.where(tiles.slots == 1, 0, tiles.slots)), "a partial slot is written twice"),
    (lambda tiles: replace(tiles, slots=np.where(tiles.slots == 1, 999, tiles.slots)), "written and not merged"),
    (changed("merge_ranges", (0, 1), -1), "written and not merged"),
    (changed("merge_ranges", (0, 0), 1), "written and not merged"),
    (lambda tiles: replace(tiles, merge_queries=tiles.merge_queries[[0, *range(len(tiles.merge_queries) - 1)]]),
     "a query's output is not written exactly once"),
]  # fmt: skip


@pytest.mark.parametrize(("break_it", "message"), CUT)
def test_broken_slots_merges_and_order_are_found(break_it: Change, message: str) -> None:
    tile_list, rule = tree_tiles("64x64", processors=2)
    assert len(tile_list.merge_queries) > 1
    with pytest.raises(AssertionError, match=message):
        check_tiles(break_it(tile_list), TREE_BATCH, rule)


def test_a_bucket_out_of_order_is_found() -> None:
    batch, rule = make_batch([[1, 2, 3], [4, 5, 6, 7, 8]]), make_rule(4, 1, 1, num_kv_heads=2)
    tile_list = tile(rule, Tiling(0, alone=True), batch)
    check_tiles(tile_list, batch, rule)
    with pytest.raises(AssertionError, match="a bucket's items are not ordered by length"):
        check_tiles(replace(tile_list, items=tile_list.items[::-1].copy()), batch, rule)


@pytest.mark.property
@given(case=cases(), draw=st.data())
def test_a_missing_run_and_a_moved_mark_are_found_anywhere(case: tuple[TilingRule, Batch], draw: st.DataObject) -> None:
    rule, batch = case
    tile_list = tile(rule, draw.draw(st.sampled_from(candidates(rule))), batch)
    if len(tile_list.items) == 0:
        return
    at = draw.draw(st.integers(0, len(tile_list.items) - 1))
    start, full, end, begin, stop = tile_list.items[at].tolist()
    missing = draw.draw(st.sampled_from(needed_runs(tile_list, start, end, begin, batch)))
    same = (tile_list.runs[start:end] == tile_list.runs[missing]).all(axis=1)  # for several subtiles
    with pytest.raises(AssertionError):
        check_tiles(without_runs(*(start + np.flatnonzero(same)).tolist())(tile_list), batch, rule)
    rows, count = tile_list.runs[full:end, 1], stop - begin
    masked = (rows >> 16 < rule.run) | (rows & 255 > 0) | (rows >> 8 & 255 < count)
    if masked.any():
        everything = changed("items", (at, RUN_FULL), end - full)(tile_list)
        with pytest.raises(AssertionError, match=r"a full run is not for all|needs a mask"):
            check_tiles(everything, batch, rule)


def needed_runs(tile_list: TileList, start: int, end: int, begin: int, batch: Batch) -> list[int]:
    """Those of runs [start, end) that at least one query of theirs sees a token of."""
    positions = query_positions(batch.seq_lens, batch.query_start_loc)[tile_list.queries[begin:]]
    needed = []
    for i in range(start, end):
        _, rows, first = tile_list.runs[i].tolist()
        place, last = positions[rows & 255 : rows >> 8 & 255], first + (rows >> 16) - 1
        if ((place >= first) & (last > place - batch.window)).any():
            needed.append(i)
    return needed
