"""Invariants of every work list, and that `check_plan` finds each of them broken."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import random_forest
from trunkattn.config import POLICIES
from trunkattn.planner.check import check_plan
from trunkattn.planner.planner import Planned, Planner
from trunkattn.planner.work_list import KV_END, KV_ROW, KV_START, QUERY_END, QUERY_START, UNLIMITED, WorkList

from .specs import MODEL, UNCUT, as_batch, make_batch, make_spec, random_spec

WINDOWS = st.one_of(st.just(UNLIMITED), st.integers(1, 300))


@pytest.mark.property
@given(
    seed=st.integers(0, 2**32 - 1),
    policy=st.sampled_from(POLICIES),
    page_size=st.integers(1, 128),
    max_own_tokens=st.integers(1, 150),
    max_query_len=st.integers(1, 40),
    window=WINDOWS,
)
def test_every_work_list_keeps_the_invariants(
    seed: int, policy: str, page_size: int, max_own_tokens: int, max_query_len: int, window: int
) -> None:
    rng = np.random.default_rng(seed)
    paged = random_forest(
        rng, page_size=page_size, max_requests=10, max_own_tokens=max_own_tokens, max_query_len=max_query_len
    )
    batch = as_batch(paged, window)
    planned = Planner(random_spec(rng, policy, page_size)).plan(batch)
    check_plan(planned)
    assert planned.num_packs <= len(planned.work.items)
    positions = batch.query_positions[planned.work.queries]
    for item in planned.work.items:
        of_item = positions[item[QUERY_START] : item[QUERY_END]]
        assert of_item.min() - window < item[KV_START] and item[KV_END] <= of_item.max() + 1, "nobody sees an end of it"
    assert planned.work.items.dtype == planned.work.queries.dtype == planned.work.partial_slots.dtype == np.int32


@pytest.mark.property
@given(seed=st.integers(0, 2**32 - 1), page_size=st.integers(1, 64), window=WINDOWS)
def test_one_pack_per_request_reads_what_the_stats_compare_with(seed: int, page_size: int, window: int) -> None:
    rng = np.random.default_rng(seed)
    batch = as_batch(random_forest(rng, page_size=page_size), window)
    stats = Planner(random_spec(rng, "per_query", page_size)).plan(batch).stats()
    assert stats.kv_tokens_read == stats.kv_tokens_per_query


def work_list() -> Planned:
    """Two rows of 14 tokens share 8, a third has 5 alone; two queries each, two to a tile.

    Items: tokens 0 to 8 of row 0 for queries 0, 1 and again for 2, 3; the leaves; row 2.
    """
    rows = [[*range(8), *range(20, 26)], [*range(8), *range(30, 36)], [*range(40, 45)]]
    spec = make_spec("cascade", model=MODEL._replace(queries_per_tile=2), rule=UNCUT)
    planned = Planner(spec).plan(make_batch(rows, query_lens=[2, 2, 2]))
    assert planned.work.items[:, :3].tolist() == [[0, 0, 8], [0, 0, 8], [0, 8, 14], [1, 8, 14], [2, 0, 5]]
    check_plan(planned)
    return planned


def set_item(item: int, column: int, value: int) -> Callable[[WorkList], None]:
    def change(work: WorkList) -> None:
        work.items[item, column] = value

    return change


def set_slots(*slots: int) -> Callable[[WorkList], None]:
    def change(work: WorkList) -> None:
        work.partial_slots[:] = slots

    return change


def swap_first_and_last(work: WorkList) -> None:
    work.items[[0, -1]] = work.items[[-1, 0]]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (set_item(4, KV_END, 4), "query 5 of row 2 must read token 4 once, but reads it never"),
        (set_item(4, KV_START, 1), "query 4 of row 2 must read token 0 once, but reads it never"),
        (set_item(2, KV_START, 7), "query 0 of row 0 must read token 7 once, but reads it 2 times"),
        (set_item(3, KV_ROW, 2), "item 3 reads the pages of row 2, but query 2 of row 1 has others"),
        (set_item(2, KV_END, 8), "item 2 has no KV token"),
        (set_item(2, KV_START, 13), "item 2 has query 0, which sees none of the item's tokens"),
        (set_item(1, QUERY_END, 2), "item 1 has no query"),
        (set_item(0, QUERY_END, 3), "item 0 has 3 queries, but its tile holds 2"),
        (set_item(1, QUERY_START, 3), "query 2 of row 1 must read token 0 once, but reads it never"),
        (set_slots(0, 2, 4, 6, 0, 3, 5, 7, -1, -1), r"query 0 is written to the slots \[0, 0\]"),
        (set_slots(2, 2, 4, 6, 1, 3, 5, 7, -1, -1), r"query 0 is written to the slots \[2, 1\]"),
        (set_slots(1, 2, 4, 6, 0, 3, 5, 7, -1, -1), r"query 0 is written to the slots \[1, 0\]"),
        (set_slots(-1, 2, 4, 6, -1, 3, 5, 7, -1, -1), r"query 0 is written to the slots \[-1, -1\]"),
        (set_slots(0, 2, 4, 6, 1, 3, 5, 7, 8, -1), r"query 4 is written to the slots \[8\]"),
        (swap_first_and_last, "item 1 is heavier than the item before it"),
    ],
)
def test_a_broken_work_list_is_found(break_it: Callable[[WorkList], None], message: str) -> None:
    planned = work_list()
    break_it(planned.work)
    with pytest.raises(AssertionError, match=message):
        check_plan(planned)


def test_an_item_that_has_only_some_of_a_query_s_pages_is_found() -> None:
    planned = work_list()
    planned.work.items[3, [KV_ROW, KV_START]] = 0, 6  # the last two tokens that rows 0 and 1 share, and six of row 0
    with pytest.raises(AssertionError, match="item 3 reads the pages of row 0, but query 2 of row 1 has others"):
        check_plan(planned)


def test_a_query_that_is_not_merged_is_found() -> None:
    planned = work_list()
    work = replace(planned.work, merge_queries=planned.work.merge_queries[:-1])
    with pytest.raises(AssertionError, match="query 3 is written to the slots"):
        check_plan(replace(planned, work=work))


def test_a_token_outside_the_window_is_found() -> None:
    planned = work_list()
    with pytest.raises(AssertionError, match="item 0 has query 0, which sees none of the item's tokens"):
        check_plan(replace(planned, batch=replace(planned.batch, window=3)))
