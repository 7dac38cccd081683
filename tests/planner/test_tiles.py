"""Invariants of every tile list, and the choice among tilings."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import parse_tree, tree_batch
from trunkattn.config import POLICIES, Capacity
from trunkattn.gpu.cards import GpuFacts, card_of
from trunkattn.gpu.portable.spec import DECODE_TILES, without_subtiles
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles
from trunkattn.gpu.tiles import GpuTile, tile_config
from trunkattn.planner.check import check_tiles
from trunkattn.planner.planner import Planner, StepTables
from trunkattn.planner.tiles import cost as tile_costs
from trunkattn.planner.tiles import layout
from trunkattn.planner.tiles.candidates import (
    Tiling,
    TilingRule,
    candidates,
    stages_of,
    tile_limits,
    tiling_limits,
)
from trunkattn.planner.tiles.pack_items import tile_work
from trunkattn.planner.tiles.tile_list import nest
from trunkattn.planner.work_list import (
    DIRECT,
    QUERY_END,
    QUERY_START,
    SEGMENT_END,
    SEGMENT_SHARED_END,
    SEGMENT_START,
    UNLIMITED,
    TileList,
)

from .specs import MODEL, UNCUT, as_batch, forest_of, make_spec
from .tile_cases import cases, make_rule, predicted, tile, tiled, tree_tiles, unnested


def assert_runnable(tile_list: TileList, batch: StepTables, rule: TilingRule) -> None:
    """What `check_tiles` asserts, and what the kernels rely on besides: whole blocks of full segments and whole rounds
    of subtiles, no partial written by an item of the launches that merge, nothing merged by the others, consecutive
    slots."""
    check_tiles(tile_list, batch, rule)
    num_heights = len(rule.tiles)
    assert len(tile_list.counts) == 2 * num_heights + 1
    assert (tile_list.counts[0], tile_list.counts[-1]) == (0, len(tile_list.items))
    bucket = np.repeat(np.arange(2 * num_heights), np.diff(tile_list.counts))
    writer = np.full(tile_list.num_slots, -1)  # bucket of the item that writes each partial slot
    for item, of in zip(tile_list.items, bucket, strict=True):
        own = tile_list.partial_slots[item[QUERY_START] : item[QUERY_END]]
        writer[own[own != DIRECT]] = of
    for item, of in zip(tile_list.items, bucket, strict=True):
        shape = rule.tiles[of % num_heights]
        block_segments = shape.block_tokens // rule.segment_size
        private_segments = shape.private_tokens // rule.segment_size
        assert item[SEGMENT_START] <= item[SEGMENT_SHARED_END] <= item[SEGMENT_END] > item[SEGMENT_START]
        assert (item[SEGMENT_SHARED_END] - item[SEGMENT_START]) % block_segments == 0
        if shape.subtiles > 1 and item[SEGMENT_END] > item[SEGMENT_SHARED_END]:
            masked = tile_list.segments[item[SEGMENT_SHARED_END] : item[SEGMENT_END], 1]
            rounds = masked.reshape(-1, shape.subtiles * private_segments)
            assert (rounds > 0).any(axis=1).all(), "a round in which no subtile reads anything"
        assert item[QUERY_END] > item[QUERY_START]
        rows = tile_list.segments[item[SEGMENT_START] : item[SEGMENT_END], 1]
        assert (rows & 255)[rows > 0].min() == 0 and (rows >> 8 & 255).max() == item[QUERY_END] - item[QUERY_START]
        if shape.subtiles == 1:  # else the first subtile may have segments of this kind, too
            whole = block_segments * (shape.blocks_at_once if tile_list.merges_taller else 1)
            full = 0 if rule.batch_invariant else num_full(tile_list, item, batch, rule) // whole * whole
            assert item[SEGMENT_SHARED_END] - item[SEGMENT_START] == full
        slots, merged = (
            x[item[QUERY_START] : item[QUERY_END]] for x in (tile_list.partial_slots, tile_list.merge_slots)
        )
        if of < num_heights:
            assert (merged[:, 0] == merged[:, 1]).all()
        else:
            assert (slots == DIRECT).all()
            assert (merged[:, 1] >= merged[:, 0]).all() and (merged[:, 1] > merged[:, 0]).any()
        assert (merged[:, 1] - merged[:, 0] <= rule.fuse_up_to).all()
        if tile_list.merges_taller:  # in the same launch, or a later one
            assert all((writer[first:last] % num_heights > of % num_heights).all() for first, last in merged)
    written = np.sort(tile_list.partial_slots[tile_list.partial_slots != DIRECT])
    assert len(written) == 0 or written[-1] < tile_list.num_slots


def num_full(tile_list: TileList, item: np.ndarray, batch: StepTables, rule: TilingRule) -> int:
    """Leading segments of an item that are whole and that each of its queries sees entirely."""
    queries = tile_list.queries[item[QUERY_START] : item[QUERY_END]]
    positions = batch.query_positions[queries]
    for number, (_, rows, token) in enumerate(tile_list.segments[item[SEGMENT_START] : item[SEGMENT_END]].tolist()):
        last = token + rule.segment_size - 1
        is_whole = rows == len(queries) << 8 | rule.segment_size << 16
        if not is_whole or last > positions.min() or token + batch.window <= positions.max():
            return number
    return int(item[SEGMENT_END] - item[SEGMENT_START])


@pytest.mark.property
@given(case=cases())
def test_every_tiling_of_a_forest_keeps_the_invariants(case: tuple[TilingRule, StepTables]) -> None:
    rule, batch = case
    step = tiled(rule, batch)
    for tiling in candidates(rule):
        tile_list = step.emit(tiling)
        assert_runnable(tile_list, batch, rule)
        assert tile_list.items.dtype == tile_list.segments.dtype == tile_list.queries.dtype == np.int32


@pytest.mark.property
@given(case=cases(), policy=st.sampled_from(POLICIES), invariant=st.booleans(), above_mean=st.booleans())
def test_every_work_list_becomes_a_tile_list_that_keeps_them(
    case: tuple[TilingRule, StepTables], policy: str, invariant: bool, above_mean: bool
) -> None:
    batch, rule = case[1], replace(unnested(case[0]), batch_invariant=invariant)
    columns = 2 if invariant else 1
    tallest = max(tile.rows for tile in rule.tiles)
    model = MODEL._replace(queries_per_tile=tallest // rule.group_size, group_size=rule.group_size)
    split = UNCUT._replace(
        num_workers=min(tile.ctas_at_once for tile in rule.tiles),
        num_kv_heads=rule.num_kv_heads,
        grid=64,
        above_mean=above_mean,
        fixed_chunk=columns * rule.page_size if invariant else 0,
        group_size=rule.group_size,
    )
    planner = Planner(make_spec(policy, rule.page_size, model=model, rule=split, share_columns=columns))
    work = planner.plan(batch).work
    tile_list = tile_work(rule, work, batch)
    assert_runnable(tile_list, batch, rule)
    assert not invariant or (tile_list.items[:, SEGMENT_SHARED_END] == tile_list.items[:, SEGMENT_START]).all()


@pytest.mark.property
@given(case=cases())
def test_every_candidate_has_a_time_of_at_least_that_of_its_bytes(case: tuple[TilingRule, StepTables]) -> None:
    rule, batch = case
    forest = forest_of(batch, rule.page_size)
    times = predicted(rule, batch)
    read = int((forest.token_end.astype(np.int64) - forest.token_start).sum())
    assert min(times.values()) >= read * rule.token_bytes * 1000 // rule.bytes_per_us


@pytest.mark.property
@given(case=cases(listed=True))
def test_low_tiles_that_are_not_cut_fit_the_least_capacity(case: tuple[TilingRule, StepTables]) -> None:
    rule, batch = case
    limits = tile_limits(rule, capacity_of(batch, rule))
    assert limits.broken_by(tile(rule, Tiling(rule.usable()[0], waves=0), batch)) == []


def capacity_of(batch: StepTables, rule: TilingRule) -> Capacity:
    """The least one."""
    rows, pages = max(1, len(batch.seq_lens)), max(1, -(-int(max(batch.seq_lens, default=0)) // rule.page_size))
    return Capacity(rows, max(1, int(batch.query_start_loc[-1])), pages, pages * rows)


@pytest.mark.property
@given(case=cases())
def test_no_candidate_needs_more_partial_slots_than_it_is_given(case: tuple[TilingRule, StepTables]) -> None:
    """With tiles of one height. So those that fit are the same as with all slots."""
    rule, batch = case
    for only in rule.tiles:
        one = replace(rule, tiles=(only,))
        if not one.usable():
            continue
        capacity = capacity_of(batch, one)
        limits, roomy = tiling_limits(one, capacity), tile_limits(one, capacity)
        assert replace(limits, slots=roomy.slots) == roomy and limits.slots <= roomy.slots
        assert (tiled(one, batch, limits).fits() == tiled(one, batch, roomy).fits()).all()
        for tiling in candidates(one):
            ((_, stage),) = stages_of(one, tiling)
            cuts = 2 * stage.num_splits if stage.item_segments else 4 * stage.num_splits // 3
            most = cuts * min(stage.height, capacity.max_query_tokens)
            assert tile(one, tiling, batch).num_slots <= most


def test_some_batch_needs_nearly_all_partial_slots() -> None:
    """31 of 48 requests, a tile each, are cut into two items, for the other ones have four tokens."""
    rule = make_rule(16, 64, 6, shapes=(GpuTile(64, 64, 4, 2, 1, (1800, 2000), (1600, 1600)),))
    fine = Tiling(0, waves=4)
    ((_, stage),) = stages_of(rule, fine)
    assert fine in candidates(rule) and (stage.num_splits, stage.height) == (48, 4)
    lens = np.array([64 * 300] * 31 + [4] * 17, np.int32)
    table = np.arange(48 * 300, dtype=np.int32).reshape(48, 300)
    batch = StepTables(table, lens, 4 * np.arange(49, dtype=np.int32))
    capacity = Capacity(48, 8192, 300, table.size)
    limits = tiling_limits(rule, capacity)
    assert limits.slots == 4 * 48 // 3 * 4 < tile_limits(rule, capacity).slots
    assert tile(rule, fine, batch).num_slots == 31 * 2 * 4 > 0.95 * limits.slots


def test_items_are_cut_between_blocks_that_are_computed_together() -> None:
    shape = GpuTile(64, 64, 4, 2, 1, (1800, 2000), (1600, 1600), private_n=64, one_launch=True)
    batch = StepTables(np.arange(29, dtype=np.int32)[None], np.array([64 * 29], np.int32), np.array([0, 1], np.int32))
    for together, sizes in ((1, [1] * 29), (2, [2] * 14 + [1])):
        rule = make_rule(16, 64, 132, shapes=(replace(shape, blocks_at_once=together),))
        items = tile(rule, Tiling(0, per_query=True), batch).items
        found = items[:, SEGMENT_END] - items[:, SEGMENT_START]
        assert sorted(found.tolist(), reverse=True) == sizes
        full_ns, masked_ns = rule.priced.costs.tiles[0][:2]
        assert (full_ns, masked_ns) == (1800 * together, 2000 * together)


def test_pairs_of_tiles_keep_all_partial_slots() -> None:
    """A query whose path is in both tiles has two partial results even where nothing is cut."""
    rule, capacity = make_rule(4, 16, 132), Capacity(256, 8192, 64, 4096)
    assert tiling_limits(rule, capacity) == tile_limits(rule, capacity)
    pair = next(each for each in candidates(rule) if each.tall is not None and not each.waves)
    batch = as_batch(tree_batch(parse_tree("1,64_256,32"), 16, row_seed=0, page_seed=1))
    assert tile(rule, pair, batch).num_slots == 2 * 64
    too_few = replace(tile_limits(rule, capacity), slots=2 * 64 - 1)
    assert not tiled(rule, batch, too_few).fits()[candidates(rule).index(pair)]


@pytest.mark.parametrize("rows", [[], [5, 3]], ids=["no_request", "no_query"])
def test_without_a_query_the_tile_list_is_empty(rows: list[int]) -> None:
    lens = np.array(rows, np.int32)
    batch = StepTables(np.zeros((len(rows), 5), np.int32), lens, np.zeros(len(rows) + 1, np.int32))
    rule = make_rule(4, 1, 16)
    work = Planner(make_spec("cascade")).plan(batch).work
    for tile_list in [
        *(tile(rule, tiling, batch) for tiling in candidates(rule)),
        tile_work(unnested(rule), work, batch),
    ]:
        assert_runnable(tile_list, batch, rule)
        assert (len(tile_list.items), len(tile_list.segments), tile_list.num_slots) == (0, 0, 0)
    times = predicted(rule, batch)
    assert set(times.values()) == {0}


def test_candidates_hold_at_least_one_query_token() -> None:
    """Groups of 20 heads do not fit 16 rows."""
    low, tall = without_subtiles(DECODE_TILES)
    rule = make_rule(20, 16, 8, shapes=(low, tall, replace(tall, block_m=128)))
    names = [tiling.name(rule) for tiling in candidates(rule) if tiling.waves == 1]
    assert names == ["64x64 per query", "64x64", "128x64", "128x64+64x64"]
    assert [tiling.name(rule) for tiling in candidates(rule) if tiling.waves == 4] == [f"{name} fine" for name in names]
    uncut = [replace(tiling, waves=1) for tiling in candidates(rule) if tiling.waves == 0]
    assert uncut == candidates(rule)[1:4], "one query token a tile is always cut: nothing else fills the device"


@pytest.mark.parametrize(
    ("cache", "tree"), [((2, 128), "1,256_2048,32"), ((2, 256), "1,256_2048,32"), ((1, 128), "1,1024_2048,32")]
)
def test_a_card_that_was_not_timed_reads_a_trunk_in_tall_tiles(cache: tuple[int, int], tree: str) -> None:
    tiles = tuple(tile_config(tile, 108) for tile in decode_tiles(*cache, 4, capability=80))
    rule = replace(
        make_rule(4, 16, 108, num_kv_heads=8),
        tiles=tiles,
        card_times=card_of(GpuFacts("NVIDIA A100", 108, 80, 40 << 20)).model.times,
    )
    batch = as_batch(tree_batch(parse_tree(tree), 16, row_seed=0, page_seed=1))
    times = predicted(rule, batch)
    best = min(times, key=lambda tiling: times[tiling])
    assert 1 in (best.tall, best.low), best.name(rule)


def test_a_segment_divides_the_page_and_every_block() -> None:
    pages = (1, 2, 3, 12, 16, 48, 64, 128)
    assert [make_rule(1, page, 8).segment_size for page in pages] == [1, 2, 1, 4, 16, 16, 32, 32]
    wide = decode_tiles(2, 256, 1)
    assert [make_rule(1, page, 8, shapes=wide).segment_size for page in pages] == [1, 2, 1, 4, 16, 16, 16, 16]


def test_the_runs_of_a_tile_are_dealt_to_its_subtiles() -> None:
    """Subtiles of 2 queries and 2 segments a block; a list of one item of a plain tile comes first."""

    def segment(place: int, low: int, high: int) -> list[int]:
        return [place, low | high << 8 | 16 << 16, place % 100]

    plain, full, empty = [segment(900, 0, 1), segment(916, 0, 1)], segment(100, 0, 4), [0, 0, 0]
    both, long_one, long_two, long_three, short = (
        segment(200, 0, 4), segment(300, 0, 2), segment(316, 0, 2), segment(332, 1, 2), segment(400, 3, 4),
    )  # fmt: skip
    listed = [*plain, full, long_one, both, long_two, long_three, short]
    emitted = layout.Items(
        np.array([[0, 0, 2, 0, 1], [2, 3, 8, 1, 5]], np.int32),
        np.array(listed, np.int32),
        np.arange(5, dtype=np.int32),
        np.ones(2, np.bool_),
    )
    nested = nest(emitted, np.array([0, 1], np.int32), np.array([[1, 5, 4], [2, 2, 2]], np.int64))
    first = [long_one, both, both, short]  # a block of the first subtile, and one of the second
    second = [long_two, long_three, empty, empty]
    assert nested.segments.tolist() == [*plain, full, *first, *second]
    assert nested.items.tolist() == [[0, 0, 2, 0, 1], [2, 3, 11, 1, 5]]
    assert emitted.segments.tolist() == listed
    assert nested.queries is emitted.queries and nested.uncut is emitted.uncut


@pytest.mark.property
@given(case=cases())
def test_a_list_has_the_blocks_that_were_predicted(case: tuple[TilingRule, StepTables]) -> None:
    """Of tiles that are not cut. Full segments that some query sees in part move to the masked blocks, so that only the
    number of keys is the same. A stage that leaves out some queries of a tile has the others stand elsewhere in it."""
    rule, batch = case
    forest, lens, starts = forest_of(batch, rule.page_size), batch.seq_lens, batch.query_start_loc
    entries = layout.make_entries(forest, lens, starts)
    seen_whole = batch.window == UNLIMITED and (np.diff(starts) <= 1).all() and (lens % rule.segment_size == 0).all()
    for tile_index, stage in {stage for tiling in candidates(rule) for stage in stages_of(rule, tiling)}:
        shape, uncut = rule.tiles[tile_index], stage._replace(num_splits=1)
        counted = tile_costs.stage_blocks(forest, entries, uncut, batch.window, rule.segment_size)
        emitted = layout.emit_stage(
            forest, entries, batch.block_table, uncut, batch.window, rule.segment_size, rule.page_size
        )
        height = shape.entries(rule.group_size) // shape.subtiles
        of_kind = np.array([[shape.subtiles, height, stage.private_segments]], np.int64)
        items = nest(emitted, np.zeros(len(emitted.items), np.int32), of_kind).items.tolist()
        step = stage.block_segments if shape.subtiles == 1 else stage.private_segments
        for (whole, private, _, held), (start, full, end, first, last) in zip(counted.tolist(), items, strict=True):
            blocks = (full - start) // stage.block_segments
            masked = -(-(end - full) // (step * shape.subtiles))
            place = entries.query.tolist().index(emitted.queries[first]) // stage.height * stage.height
            assert held == min(stage.height, len(entries.query) - place)
            complete = last - first == held
            if complete or shape.subtiles == 1:
                assert blocks * stage.block_segments + masked * step == whole * stage.block_segments + private * step
            assert blocks <= whole or not complete
            assert blocks == whole or not (complete and seen_whole)


def test_one_tile_reads_each_token_of_the_tree_once() -> None:
    tile_list, rule = tree_tiles("64x64", num_sms=1, nested=False)
    assert rule.segment_size == 16
    assert tile_list.items.tolist() == [[0, 4, 4 + 2 * 2 + 12 * 2, 0, 12]]
    assert tile_list.segment_tokens.sum() == 64 + 2 * 32 + 12 * 20
    assert tile_list.num_slots == 0


def test_a_nested_tile_reads_a_branch_once_for_each_subtile() -> None:
    """Subtiles of 4 queries read 10, 12, 10 and 0 private segments, two at a time: each branch concerns two of them."""
    tile_list, _ = tree_tiles("64x64", num_sms=1)
    assert tile_list.items.tolist() == [[0, 4, 4 + 6 * 4 * 2, 0, 12]]
    private = tile_list.segment_tokens[4:].reshape(6, 4, 2)
    assert np.count_nonzero(private, axis=(0, 2)).tolist() == [10, 12, 10, 0]
    assert tile_list.segment_tokens.sum() == 64 + 2 * 2 * 32 + 12 * 20
    assert tile_list.num_slots == 0


def test_two_heights_leave_the_trunk_to_the_tall_tile() -> None:
    """Nodes of at least 16 queries are tall: none of this tree's 12, all of three times as many."""
    rule = make_rule(4, 16, 1, num_kv_heads=2)
    batch = as_batch(tree_batch(parse_tree("1,2,36_64,32,20"), 16, row_seed=0, page_seed=1))
    tiling = next(tiling for tiling in candidates(rule) if tiling.name(rule) == "64x64+16x64")
    tile_list = tile(rule, tiling, batch)
    assert_runnable(tile_list, batch, rule)
    assert tile_list.counts.tolist() == [0, 0, 3, 12, 12]  # the low tiles merge what the tall ones leave
    read = [tile_list.segments[item[SEGMENT_START] : item[SEGMENT_END]] for item in tile_list.items[:3]]
    assert all(set(segments[segments[:, 1] > 0, 2]) == set(range(0, 96, 16)) for segments in read)
    assert len(tile_list.merge_queries) == 0
    counts = [tile(replace(rule, fuse_up_to=most), tiling, batch).counts.tolist() for most in (0, 1)]
    assert counts == [[0, 9, 12, 12, 12], [0, 0, 3, 12, 12]], "each query has one partial of a tall tile"
