"""Packs -> work items: pack tiles, where long KV is cut, order and partial slots."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkattn.planner.device import DeviceModel
from trunkattn.planner.packs.cost import cost_model
from trunkattn.planner.packs.policies import Packs
from trunkattn.planner.planner import Planned, Planner, StepTables
from trunkattn.planner.splitting import SplitRule, cut_packs, split_rule, split_tiles
from trunkattn.planner.work_list import DIRECT, UNLIMITED

from .specs import MODEL, UNCUT, make_batch, make_spec

MEAN = UNCUT._replace(grid=10, above_mean=True)


def one_request(length: int, queries: int = 1, window: int = UNLIMITED) -> StepTables:
    return make_batch([list(range(length))], query_lens=[queries], window=window)


def plan(batch: StepTables, rule: SplitRule = UNCUT, policy: str = "per_query", queries_per_tile: int = 64) -> Planned:
    return Planner(make_spec(policy, model=MODEL._replace(queries_per_tile=queries_per_tile), rule=rule)).plan(batch)


def spans(planned: Planned) -> list[tuple[int, int]]:
    """KV ranges of the items, in token order."""
    return sorted(zip(planned.work.items[:, 1].tolist(), planned.work.items[:, 2].tolist(), strict=True))


def tiles_of_lengths(lengths: list[int]) -> np.ndarray:
    """One tile of one query for each length."""
    return np.array([[p, 0, n, p, p + 1] for p, n in enumerate(lengths)], np.int32).reshape(-1, 5)


def test_the_rule_follows_from_attention_and_device() -> None:
    device = DeviceModel("test", 512, 16, 4, 16_384, 25, True, 256)
    rule = split_rule(device, cost_model(device, 32, 8, 192, 64, 2), 8, 192, 512)
    assert rule == SplitRule(
        num_workers=4, num_kv_heads=8, grid=256, above_mean=True, fixed_chunk=512, head_bytes=384, row_bytes=15,
        row_unit=16, group_size=4, by_schedule=None, item_bytes=16_384, partial_bytes=(64 + 1) * 4 * 2,
    )  # fmt: skip
    narrow, slow = cost_model(device, 1, 1, 32, 16, 1), replace(device, flops_per_byte=170, partial_factor=3)
    found = split_rule(slow, narrow, 1, 32, 0)
    assert found.row_bytes == 1, "arithmetic is never free"
    assert found.partial_bytes == 3 * (16 + 1) * 4 * 2
    scheduled = split_rule(replace(device, by_schedule=True, merge_bytes=240_000), narrow, 1, 32, 0)
    assert (scheduled.by_schedule, scheduled.merge_bytes) == (True, 240_000)


def test_no_split_is_longer_than_the_mean() -> None:
    # mean 400: 1000 needs 3 splits of 334, on the grid 340; nothing else is longer than the mean
    assert split_tiles(MEAN, tiles_of_lengths([1000, 100, 100])).tolist() == [340, 100, 100]


def test_the_mean_is_rounded_up_to_the_grid() -> None:
    assert split_tiles(MEAN, tiles_of_lengths([106, 100])).tolist() == [106, 100]
    assert split_tiles(MEAN, tiles_of_lengths([112, 100])).tolist() == [60, 100]


def test_without_the_rule_of_the_mean_a_long_tile_stays_whole() -> None:
    assert split_tiles(MEAN._replace(above_mean=False), tiles_of_lengths([1000, 100, 100])).tolist() == [1000, 100, 100]


def test_what_is_shorter_than_the_grid_stays_whole_however_many_workers_wait() -> None:
    """A worker's share of this work is less than a byte."""
    assert split_tiles(UNCUT._replace(num_workers=10**6, num_kv_heads=1), tiles_of_lengths([3, 16])).tolist() == [3, 16]


def test_no_tile_no_split() -> None:
    assert split_tiles(MEAN, tiles_of_lengths([])).tolist() == []


@pytest.mark.property
@given(
    lengths=st.lists(st.integers(1, 5000), min_size=1, max_size=20),
    grid=st.sampled_from([1, 16, 256]),
    slots=st.integers(1, 200),
    heads=st.sampled_from([1, 8, 1000]),
    above_mean=st.booleans(),
)
def test_splits_keep_to_the_limit_and_the_grid(
    lengths: list[int], grid: int, slots: int, heads: int, above_mean: bool
) -> None:
    rule = UNCUT._replace(grid=grid, num_workers=slots, num_kv_heads=heads, above_mean=above_mean)
    splits = split_tiles(rule, tiles_of_lengths(lengths)).tolist()
    mean = -(-sum(lengths) // len(lengths))
    share = sum(lengths) * heads / (2 * slots)
    for length, split in zip(lengths, splits, strict=True):
        assert split == length or split % grid == 0
        if above_mean:
            assert split <= max(grid, -(-mean // grid) * grid)
        if split < length:
            assert length > share or (above_mean and length > mean), "cut without need"
        assert split < share + grid or split == length <= share


def test_one_long_request_fills_the_slots() -> None:
    found = plan(one_request(131_072), UNCUT._replace(num_workers=132, num_kv_heads=8))
    assert len(found.work.items) * 8 >= 132
    assert found.work.num_slots == len(found.work.items)


def test_a_batch_that_fills_the_slots_is_not_cut() -> None:
    rows = [list(range(2000 * i, 2000 * i + 2000)) for i in range(8)]
    assert len(plan(make_batch(rows), UNCUT._replace(num_workers=2, num_kv_heads=8)).work.items) == 8


def test_a_fixed_chunk_cuts_at_its_multiples_and_nowhere_else() -> None:
    rule = MEAN._replace(fixed_chunk=100, num_workers=132, num_kv_heads=1)
    assert spans(plan(one_request(250), rule)) == [(0, 100), (100, 200), (200, 250)]
    assert spans(plan(one_request(100), rule)) == [(0, 100)]
    assert spans(plan(one_request(250, window=120), rule)) == [(130, 200), (200, 250)]


def test_a_chunk_is_cut_from_the_start_of_the_sequence_not_of_the_pack() -> None:
    rows = [[*range(150), 200 + i] for i in range(2)]
    found = plan(make_batch(rows), UNCUT._replace(fixed_chunk=100), policy="cascade")
    assert spans(found) == [(0, 100), (100, 150), (150, 151), (150, 151)]


def test_a_tile_reads_what_its_queries_see() -> None:
    # 5 queries at positions 15 to 19, two to a tile
    assert spans(plan(one_request(20, 5), queries_per_tile=2)) == [(0, 17), (0, 19), (0, 20)]
    assert spans(plan(one_request(20, 5, window=4), queries_per_tile=2)) == [(12, 17), (14, 19), (16, 20)]


def test_tiles_that_see_nothing_are_left_out() -> None:
    packs = Packs(*(np.array(a, np.int32) for a in ([0, 0], [0, 4], [4, 6], [0, 1, 2], [0, 0])))
    starts, lens = np.array([0, 4], np.int32), np.array([6], np.int32)
    tiles, query, position = cut_packs(packs, starts, lens, UNLIMITED, 2)
    # positions 2 to 5: the first tile ends before token 4, where the second pack begins
    assert tiles.tolist() == [[0, 0, 4, 0, 2], [0, 0, 4, 2, 4], [1, 4, 6, 6, 8]]
    assert query.tolist() == [0, 1, 2, 3] * 2
    assert position.tolist() == [2, 3, 4, 5] * 2
    # under a window of 3 tokens, the second tile sees nothing before token 2
    assert cut_packs(packs, starts, lens, 3, 2)[0].tolist() == [[0, 0, 4, 0, 2], [0, 2, 4, 2, 4], [1, 4, 6, 6, 8]]


def test_a_split_holds_the_queries_that_see_some_of_it() -> None:
    """Positions 10 to 19 see four tokens each; that of 19 begins where the second split does."""
    work = plan(one_request(20, 10, window=4), UNCUT._replace(fixed_chunk=16)).work
    assert work.items.tolist() == [[0, 7, 16, 0, 9], [0, 16, 20, 9, 13]]
    assert work.queries.tolist() == [*range(9), *range(6, 10)]


def test_a_split_reads_what_its_own_queries_see() -> None:
    """One tile holds the last two queries of a request, at 48 and 49, and the first three of another one, from 4 on."""
    batch = make_batch([[*range(40), *range(100, 110)], [*range(40)]], query_lens=[32, 36], window=20)
    work = plan(batch, UNCUT._replace(fixed_chunk=16), policy="cascade", queries_per_tile=5).work
    found = {}
    for _, start, end, first, last in work.items.tolist():
        found[start, end] = work.queries[first:last].tolist()
    assert found[0, 7] == [32, 33, 34]
    assert found[29, 32] == [30, 31]


def test_the_work_list_of_two_requests_with_a_trunk() -> None:
    rows = [[*range(8), 20, 21], [*range(8), 30]]
    work = plan(make_batch(rows), policy="cascade").work
    assert work.items.tolist() == [[0, 0, 8, 0, 2], [0, 8, 10, 2, 3], [1, 8, 9, 3, 4]]
    assert work.queries.tolist() == [0, 1, 0, 1]
    assert work.partial_slots.tolist() == [0, 2, 1, 3]
    assert work.merge_queries.tolist() == [0, 1]
    assert work.merge_indptr.tolist() == [0, 2, 4]
    assert work.num_slots == 4


def test_a_query_in_one_item_needs_no_slot() -> None:
    rows = [[*range(8), 20, 21], [*range(8)], [40]]
    work = plan(make_batch(rows), policy="cascade").work
    assert work.items.tolist() == [[0, 0, 8, 0, 2], [0, 8, 10, 2, 3], [2, 0, 1, 3, 4]]
    assert work.partial_slots.tolist() == [0, DIRECT, 1, DIRECT]
    assert work.merge_queries.tolist() == [0]


def test_equally_heavy_items_stay_in_the_order_of_the_rows() -> None:
    rows = [[10 * i, 10 * i + 1][: 1 + i % 2] for i in range(200)]
    work = plan(make_batch(rows)).work
    assert work.items[:, 0].tolist() == [*range(1, 200, 2), *range(0, 200, 2)]


def test_an_empty_batch_has_no_work() -> None:
    work = plan(make_batch([])).work
    assert (work.items.shape, work.num_slots) == ((0, 5), 0)
    assert work.merge_indptr.tolist() == [0]
