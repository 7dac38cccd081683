"""Invariants of every tile list, the choice among tilings, and that `check_tiles` finds a broken list."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkattn.kernels.tile_table import DECODE_TILES
from trunkattn.plan_format import DIRECT, QUERY_END, QUERY_START, RUN_END, RUN_FULL, RUN_START, TileList
from trunkattn.planner.build import POLICIES, Batch, Planner
from trunkattn.planner.check import check_tiles
from trunkattn.planner.splitting import UNLIMITED
from trunkattn.planner.tiling import TileKind, Tiling, TilingRule, candidates, choose, tile_forest, tile_work
from trunkattn.workloads import parse_tree, random_forest, tree_batch

from .specs import MODEL, UNCUT, as_batch, forest_of, make_batch, make_spec

SEEDS = st.integers(0, 2**32 - 1)
PAGE_SIZES = st.one_of(st.integers(1, 64), st.sampled_from([1, 2, 16, 32, 64]))
WINDOWS = st.one_of(st.just(UNLIMITED), st.integers(1, 150))
GROUP_SIZES = st.one_of(st.integers(1, 16), st.sampled_from([24, 64, 128]))
PROCESSORS = st.sampled_from([1, 3, 16, 132])
SHAPES = tuple((tile.block_m, tile.block_n) for tile in DECODE_TILES)


def make_rule(
    group_size: int,
    page_size: int,
    processors: int,
    *,
    shapes: tuple[tuple[int, int], ...] = SHAPES,
    num_kv_heads: int = 1,
    fuse_up_to: int = 8,
) -> TilingRule:
    """The tile table's times where a shape has one."""
    times = {(tile.block_m, tile.block_n): (tile.block_ns, tile.chain_ns) for tile in DECODE_TILES}
    kinds = (TileKind(*shape, 2 * processors, *times.get(shape, ((2000, 3000), (1500, 2500)))) for shape in shapes)
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
def rules(draw: st.DrawFn, page_size: int) -> TilingRule:
    """Tiles of the table, or such low ones that a small batch fills many of each height."""
    group_size = draw(GROUP_SIZES)
    low = tuple((queries * group_size, keys) for queries, keys in ((1, 4), (1, 16), (3, 8), (8, 8)))
    return make_rule(
        group_size,
        page_size,
        draw(PROCESSORS),
        shapes=draw(st.sampled_from([SHAPES, low])),
        num_kv_heads=draw(st.sampled_from([1, 2, 8])),
        fuse_up_to=draw(st.sampled_from([0, 1, 8])),
    )


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
    """What `check_tiles` asserts, and what the kernels rely on besides: whole blocks of full runs, no partial written
    by an item of the launches that merge, nothing merged by the others, consecutive slots."""
    check_tiles(tile_list, batch, rule)
    num_kinds = len(rule.kinds)
    assert len(tile_list.counts) == 2 * num_kinds + 1
    assert (tile_list.counts[0], tile_list.counts[-1]) == (0, len(tile_list.items))
    bucket = np.repeat(np.arange(2 * num_kinds), np.diff(tile_list.counts))
    for item, of in zip(tile_list.items, bucket, strict=True):
        block_runs = rule.kinds[of % num_kinds].block_tokens // rule.run
        assert item[RUN_START] <= item[RUN_FULL] <= item[RUN_END] > item[RUN_START]
        assert (item[RUN_FULL] - item[RUN_START]) % block_runs == 0
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
    batch, rule = case[1], replace(case[0], uniform=invariant)
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
        tile_work(rule, work, arrays(batch), UNLIMITED),
    ]:
        assert_runnable(tile_list, batch, rule)
        assert (len(tile_list.items), len(tile_list.runs), tile_list.num_slots) == (0, 0, 0)
    best, times = choose(rule, forest_of(batch), (batch.seq_lens, batch.query_start_loc), UNLIMITED)
    assert set(times.values()) == {0}
    assert best == candidates(rule)[0]


def test_candidates_hold_at_least_one_query_token() -> None:
    """Groups of 20 heads do not fit 16 rows."""
    rule = make_rule(20, 16, 8)
    names = [tiling.name(rule) for tiling in candidates(rule) if tiling.cut]
    assert names == ["64x64 per query", "64x64", "128x64", "128x64+64x64"]
    uncut = [replace(tiling, cut=True) for tiling in candidates(rule) if not tiling.cut]
    assert uncut == candidates(rule)[1:4], "one query token a tile is always cut: nothing else fills the device"


def test_a_run_divides_the_page_and_every_block() -> None:
    assert [make_rule(1, page, 8).run for page in (1, 2, 3, 12, 16, 48, 64, 128)] == [1, 2, 1, 4, 16, 16, 32, 32]


TREE = tree_batch(parse_tree("1,2,12_64,32,20"), 16, row_seed=0, page_seed=1)
TREE_BATCH = as_batch(TREE)


def tree_tiles(name: str, processors: int) -> tuple[TileList, TilingRule]:
    """12 requests of 4 heads: 64 tokens for all, 32 for six, 20 each (the last 4 of them in a run that is not full)."""
    rule = make_rule(4, 16, processors, num_kv_heads=2)
    tiling = next(tiling for tiling in candidates(rule) if tiling.name(rule) == name)
    tile_list = tile(rule, tiling, TREE_BATCH)
    check_tiles(tile_list, TREE_BATCH, rule)
    return tile_list, rule


def test_one_tile_reads_each_token_of_the_tree_once() -> None:
    tile_list, rule = tree_tiles("64x64", processors=1)
    assert rule.run == 16
    assert tile_list.items.tolist() == [[0, 4, 4 + 2 * 2 + 12 * 2, 0, 12]]
    assert (tile_list.runs[:, 1] >> 16).sum() == 64 + 2 * 32 + 12 * 20
    assert tile_list.num_slots == 0


def test_two_heights_leave_the_trunk_to_the_tall_tile() -> None:
    """Nodes of at least 16 queries are tall: none of this tree's 12, all of three times as many."""
    rule = make_rule(4, 16, 1, num_kv_heads=2)
    batch = as_batch(tree_batch(parse_tree("1,2,36_64,32,20"), 16, row_seed=0, page_seed=1))
    tiling = next(tiling for tiling in candidates(rule) if tiling.name(rule) == "64x64+16x32")
    tile_list = tile(rule, tiling, batch)
    assert_runnable(tile_list, batch, rule)
    tall = tile_list.items[tile_list.counts[3] : tile_list.counts[4]]
    read = [(tile_list.runs[item[RUN_START] : item[RUN_END], 2]).tolist() for item in tall]
    assert {start for starts in read for start in starts} == set(range(0, 96, 16))
    assert tile_list.counts[5:].tolist()[0] < len(tile_list.items)  # the low tiles merge what the tall ones leave
    assert len(tile_list.merge_queries) == 0


Change = Callable[[TileList], TileList]


def changed(name: str, index: tuple[int, ...] | int, delta: int) -> Change:
    """Adds `delta` to one number of one array."""

    def change(tile_list: TileList) -> TileList:
        array = getattr(tile_list, name).copy()
        array[index] += delta
        return replace(tile_list, **{name: array})

    return change


def without_the_last_run(tile_list: TileList) -> TileList:
    return changed("items", (0, RUN_END), -1)(tile_list)


ONE_TILE = [
    (without_the_last_run, "a token is missed or read twice"),
    (changed("items", (0, RUN_START), 1), "a token is missed or read twice"),
    (changed("items", (0, RUN_FULL), 1), "item 0: a full run is not for all"),
    (changed("items", (0, RUN_FULL), 28), "item 0: a full run is not for all|needs a mask"),
    (changed("items", (0, QUERY_END), -1), "item 0: a full run is not for all"),
    (changed("runs", (0, 0), 1), "item 0: query .* has other pages"),
    (changed("runs", (0, 1), 1), "item 0: a full run is not for all"),
    (changed("runs", (0, 1), -(1 << 8)), "item 0: a full run is not for all"),
    (changed("runs", (-1, 1), -(1 << 16)), "a token is missed or read twice"),
    (changed("runs", (0, 1), -(1 << 16)), "item 0: query .* needs a mask"),
    (changed("runs", (-1, 2), -1), "item 0: query .* has other pages"),
    (changed("queries", 0, 1), "has other pages|a token is missed or read twice"),
    (changed("counts", 3, 1), "item 0 exceeds its tile"),
    (changed("slots", 0, 1), "a partial is written and not merged"),
]


@pytest.mark.parametrize(("break_it", "message"), ONE_TILE)
def test_a_broken_tile_is_found(break_it: Change, message: str) -> None:
    tile_list, rule = tree_tiles("64x64", processors=1)
    with pytest.raises(AssertionError, match=message):
        check_tiles(break_it(tile_list), TREE_BATCH, rule)


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
def test_a_dropped_run_and_a_moved_mark_are_found_anywhere(case: tuple[TilingRule, Batch], draw: st.DataObject) -> None:
    rule, batch = case
    tile_list = tile(rule, draw.draw(st.sampled_from(candidates(rule))), batch)
    if len(tile_list.items) == 0:
        return
    at = draw.draw(st.integers(0, len(tile_list.items) - 1))
    shorter = changed("items", (at, RUN_END), -1)(tile_list)
    with pytest.raises(AssertionError):
        check_tiles(shorter, batch, rule)
    _, full, end, begin, stop = tile_list.items[at]
    rows, count = tile_list.runs[full:end, 1], stop - begin
    masked = (rows >> 16 < rule.run) | (rows & 255 > 0) | (rows >> 8 & 255 < count)
    if masked.any():
        everything = changed("items", (at, RUN_FULL), end - full)(tile_list)
        with pytest.raises(AssertionError, match=r"a full run is not for all|needs a mask"):
            check_tiles(everything, batch, rule)
