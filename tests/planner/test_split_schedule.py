"""Cuts by a simulated schedule: against the same schedule in plain Python, and what they are for."""

import heapq

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trunkattn.planner.split_schedule import (
    MAX_ITEMS_PER_WORKER,
    _schedule_time,
    scheduled_splits,
    weight_of,
    work_time,
)
from trunkattn.planner.splitting import SplitRule

RULE = SplitRule(
    num_workers=132, num_kv_heads=8, grid=128, above_mean=False, fixed_chunk=0, head_bytes=512, row_bytes=3,
    row_unit=128, group_size=4, by_schedule=True, item_bytes=120_000, partial_bytes=1032, merge_bytes=240_000,
)  # fmt: skip
LENGTHS = st.lists(st.integers(1, 40_000), min_size=1, max_size=60)


def tiles_of(lengths: list[int], queries: int = 32) -> NDArray[np.int32]:
    return np.array([(0, 7, 7 + length, 0, queries) for length in lengths], np.int32).reshape(-1, 5)


def end_of_schedule(rule: SplitRule, items: list[int]) -> int:
    """Heaviest first, each to the slot that ends first."""
    slots = [0] * rule.num_workers
    for item in sorted(items, reverse=True):
        for _ in range(rule.num_kv_heads):
            heapq.heappush(slots, heapq.heappop(slots) + item)
    return max(slots)


@given(lengths=LENGTHS, slots=st.sampled_from([1, 2, 3, 7, 132]), heads=st.sampled_from([1, 8]))
def test_the_time_of_a_schedule_is_that_of_a_simulation(lengths: list[int], slots: int, heads: int) -> None:
    rule, tiles = RULE._replace(num_workers=slots, num_kv_heads=heads, partial_bytes=0), tiles_of(lengths)
    weights = np.array([weight_of(rule, length, 32) for length in lengths])
    items = [int(weight) + rule.item_bytes for weight in weights]
    assert _schedule_time(rule, tiles, weights, np.array(lengths, np.int32)) == end_of_schedule(rule, items)


def test_the_time_of_a_schedule_of_a_very_long_tile() -> None:
    """Its weight times the tokens of a split is more than an int64 holds."""
    length, split = 2**30, 2**27
    rule, tiles = RULE._replace(num_workers=8, num_kv_heads=1, partial_bytes=0), tiles_of([length])
    weight = int(weight_of(rule, length, 32))
    assert weight * split > 2**63
    found = _schedule_time(rule, tiles, np.array([weight]), np.array([split], np.int32))
    assert found == split * (512 + 128 * 3) + rule.item_bytes


@given(lengths=LENGTHS, slots=st.sampled_from([1, 7, 132, 264]))
def test_splits_lie_on_the_grid_and_end_sooner(lengths: list[int], slots: int) -> None:
    rule, tiles = RULE._replace(num_workers=slots), tiles_of(lengths)
    splits = scheduled_splits(rule, tiles)
    cut = splits < np.array(lengths)
    assert (splits[~cut] == np.array(lengths)[~cut]).all()
    assert (splits[cut] % rule.grid == 0).all() and (splits > 0).all()
    whole = [int(weight_of(rule, length, 32)) + rule.item_bytes for length in lengths]
    items = [
        int(weight_of(rule, min(split, length - begin), 32)) + rule.item_bytes
        for length, split in zip(lengths, splits.tolist(), strict=True)
        for begin in range(0, length, split)
    ]
    assert len(items) <= len(lengths) + MAX_ITEMS_PER_WORKER * slots // rule.num_kv_heads + 1
    if cut.any():
        assert end_of_schedule(rule, items) < end_of_schedule(rule, whole)


@pytest.mark.parametrize(
    "lengths, num_splits",
    [
        ([8192 + 32 * i for i in range(16)], 1),  # 128 programs of 132
        ([32 * i for i in range(1, 513)], 1),  # a long chunk: heaviest first leaves little at the end
        ([32_768], 16),  # 8 programs
        ([32_768] * 4, 4),
        ([100] * 3, 1),  # shorter than the grid
    ],
)
def test_how_many_splits_the_longest_has(lengths: list[int], num_splits: int) -> None:
    assert -(-lengths[0] // scheduled_splits(RULE, tiles_of(lengths))[0]) == num_splits


def test_partials_that_cost_more_than_they_save_are_not_made() -> None:
    tiles = tiles_of([4096] * 4)
    assert (scheduled_splits(RULE, tiles) < 4096).all()
    assert (scheduled_splits(RULE._replace(partial_bytes=10**6), tiles) == 4096).all()
    assert (scheduled_splits(RULE._replace(merge_bytes=10**9), tiles) == 4096).all()


def test_partials_of_split_tiles_take_time() -> None:
    """Of 32 queries of 4 heads, for each of 3 splits: of the tile that is split, and for each of 8 KV heads."""
    tiles, splits = tiles_of([1000, 100]), np.array([384, 100], np.int32)
    weights = np.array([weight_of(RULE, length, 32) for length in (1000, 100)])
    without, found = (_schedule_time(RULE._replace(partial_bytes=size), tiles, weights, splits) for size in (0, 1032))
    assert found - without == 3 * 32 * 4 * 1032 * 8 // 132


def test_work_of_which_no_worker_has_a_whole_byte() -> None:
    rule = RULE._replace(num_workers=10**6, num_kv_heads=1, item_bytes=0, partial_bytes=0, merge_bytes=0)
    assert scheduled_splits(rule, tiles_of([3])).tolist() == [3]


@given(lengths=LENGTHS, partials=st.sampled_from([0, 64]))
def test_the_time_of_a_work_list(lengths: list[int], partials: int) -> None:
    items = np.array([(0, 7, 7 + length, 32 * i, 32 * i + 32) for i, length in enumerate(lengths)], np.int32)
    whole = end_of_schedule(RULE, [int(weight_of(RULE, length, 32)) + RULE.item_bytes for length in lengths])
    merge = 2 * RULE.item_bytes + partials * 4 * RULE.partial_bytes * 8 // 132 if partials else 0
    assert work_time(RULE, items, partials) == whole + merge


def test_one_slot_or_no_tile_is_not_split() -> None:
    assert scheduled_splits(RULE._replace(num_workers=1), tiles_of([50_000, 3])).tolist() == [50_000, 3]
    assert scheduled_splits(RULE, tiles_of([])).tolist() == []
