"""The order in which programs take prompt chunks: each item once for every head, groups of heads, even rounds."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from trunkattn.kernels.prefill_plan import FIRST_HEAD, heads_in_turn, order_items
from trunkattn.plan_format import ITEM_COLUMNS, KV_END, KV_ROW, KV_START

OVERHEAD = 128  # tokens that an item counts for besides its own


def items_of(lengths: list[int], rows: list[int] | None = None) -> NDArray[np.int32]:
    """One query token each, heaviest first."""
    items = np.zeros((len(lengths), ITEM_COLUMNS), np.int32)
    items[:, KV_END] = sorted(lengths, reverse=True)
    items[:, KV_ROW] = rows or 0
    items[:, 3], items[:, 4] = np.arange(len(lengths)), np.arange(len(lengths)) + 1
    return items


def chunk(tokens: int, context: int, queries: int) -> NDArray[np.int32]:
    """Items of so many query tokens each, of a chunk that ends at `context`."""
    return items_of([context - start for start in range(0, tokens, queries)])


def ordered(items: NDArray[np.int32], heads: int, programs: int, beside: bool = False) -> list[tuple[int, int, int]]:
    """(first query, KV head, program) of all tasks, round after round, as the kernels take them."""
    in_turn = heads_in_turn(heads)
    listed = order_items(items, heads, in_turn, programs, beside)
    assert listed.dtype == np.int32 and listed.shape[1] == ITEM_COLUMNS + (heads > in_turn)
    found, tasks = [], len(listed) * in_turn
    for turn in range(tasks):
        first = turn // programs * programs
        backwards = first // programs % 2 == 1 and first + programs <= tasks
        task = first + programs - 1 - turn % programs if backwards else turn
        item = listed[task // in_turn]
        head = task % in_turn + (int(item[FIRST_HEAD]) if heads > in_turn else 0)
        found.append((int(item[3]), head, turn % programs))
    return found


def most(items: NDArray[np.int32], tasks: list[tuple[int, int, int]], programs: int) -> int:
    """Tokens of the program that has most."""
    load = np.zeros(programs, np.int64)
    for item, _, program in tasks:
        load[program] += items[item, KV_END] - items[item, KV_START] + OVERHEAD
    return int(load.max())


@pytest.mark.property
@given(
    lengths=st.lists(st.integers(1, 5000), max_size=40),
    heads=st.sampled_from([1, 2, 8, 9, 12, 13, 32]),
    programs=st.integers(1, 140),
    beside=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_item_once_for_every_head(lengths: list[int], heads: int, programs: int, beside: bool, seed: int) -> None:
    items = items_of(lengths, np.random.default_rng(seed).integers(0, 3, len(lengths)).tolist())
    tasks = [(item, head) for item, head, _ in ordered(items, heads, programs, beside)]
    assert sorted(tasks) == [(item, head) for item in range(len(items)) for head in range(heads)]


@pytest.mark.parametrize("heads, in_turn", [(1, 1), (4, 4), (8, 8), (9, 3), (12, 6), (13, 1), (16, 8), (32, 8)])
def test_heads_of_a_group(heads: int, in_turn: int) -> None:
    assert heads_in_turn(heads) == in_turn


def test_one_round_is_heaviest_first() -> None:
    items = chunk(512, 9000, 32)
    assert [task[:2] for task in ordered(items, 8, 132)] == [(item, head) for item in range(16) for head in range(8)]


@pytest.mark.parametrize("heads, queries", [(4, 16), (8, 32)])
@pytest.mark.parametrize("tokens, context", [(1024, 1024), (1024, 4096), (2048, 2048), (2048, 4096)])
def test_what_begins_in_a_last_round_is_taken_lightest_first(
    heads: int, queries: int, tokens: int, context: int
) -> None:
    """By the programs that have the heaviest: in the order that items come in they would end up to 36 % later. 256
    tasks or 512 are 2 or 4 rounds of 132 but for 8 or 16."""
    items = chunk(tokens, context, queries)
    mean = int((items[:, KV_END] + OVERHEAD).mean())
    assert most(items, ordered(items, heads, 132), 132) <= 1.06 * mean * tokens // 512


def test_groups_of_eight_heads_take_turns() -> None:
    """32 heads of 16 items each: a round of 128 programs reads the keys of 8 heads, and those of no other round."""
    tasks = ordered(chunk(2048, 12000, 128), 32, 128, True)
    rounds = [sorted({head for _, head, _ in tasks[first : first + 128]}) for first in range(0, 512, 128)]
    assert rounds == [list(range(first, first + 8)) for first in (0, 8, 16, 24)]


def test_all_groups_take_turns_where_one_after_the_other_ends_later() -> None:
    """48 items of a short prompt, of which the heaviest is 48 times the lightest, on 100 programs."""
    tasks = ordered(chunk(6000, 6000, 125), 16, 100)
    assert {head for _, head, _ in tasks[:100]} == set(range(16))


def test_items_of_the_same_keys_come_together() -> None:
    """Two requests of 8 items each and as long: a round reads the keys of one of them."""
    items = items_of([9000] * 16, [0, 1] * 8)
    tasks = ordered(items, 16, 64, True)
    assert [{int(items[item, KV_ROW]) for item, _, _ in tasks[first : first + 64]} for first in (0, 64)] == [{0}, {1}]
