"""A step divided into prompt chunks and the rest, and put together again."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import random_forest
from trunkattn.config import Capacity
from trunkattn.planner.check import check_plan
from trunkattn.planner.device import DeviceModel
from trunkattn.planner.packs.cost import cost_model
from trunkattn.planner.planner import Planner, PlannerSpec, StepTables
from trunkattn.planner.prompt_chunks import chunk_limits, divide, join, limits_broken, whole_chunks
from trunkattn.planner.splitting import split_rule
from trunkattn.planner.work_list import DIRECT, UNLIMITED, ChunkLimits, TileList

from .specs import as_batch, make_batch

DEVICE = DeviceModel("test", 32, 32, 6, 2000, 25, False, 16, by_schedule=True, merge_bytes=4000)


def spec_of(policy: str, page_size: int, device: DeviceModel = DEVICE) -> PlannerSpec:
    """8 query heads, 2 KV heads."""
    model = cost_model(device, 8, 2, 128, 64, 2)
    return PlannerSpec(page_size, policy, model, split_rule(device, model, 2, 128, 0))


@given(seed=st.integers(0, 2**32 - 1), window=st.sampled_from([1, 5, 40, UNLIMITED]), row_unit=st.sampled_from([8, 32]))
def test_whole_chunks_have_the_bits_of_the_planner(seed: int, window: int, row_unit: int) -> None:
    """Of one worker, for which nothing is cut, on requests that share no page. A tile that is not full may take as long
    as a full one, or less."""
    rng, page_size = np.random.default_rng(seed), 16
    query_lens = rng.integers(1, 90, rng.integers(1, 9))
    seq_lens = (query_lens + rng.integers(0, 200, len(query_lens))).astype(np.int32)
    columns = -(-int(seq_lens.max()) // page_size)
    table = np.arange(len(seq_lens) * columns, dtype=np.int32).reshape(-1, columns)
    batch = StepTables(table, seq_lens, np.append(0, query_lens.cumsum()).astype(np.int32), window)
    spec = spec_of("per_query", page_size, replace(DEVICE, num_workers=1, row_unit=row_unit))
    planned = Planner(spec).plan(batch)
    work = whole_chunks(batch, spec.model.queries_per_tile, spec.rule)
    assert work.equals(planned.work)
    assert {array.dtype for array in vars(work).values()} == {np.dtype(np.int32)}
    assert planned.num_packs == len(seq_lens)


def empty_tiles() -> TileList:
    none, pairs = np.empty(0, np.int32), np.empty((0, 2), np.int32)
    items, segments = np.empty((0, 5), np.int32), np.empty((0, 3), np.int32)
    return TileList(items, segments, none, none, pairs, np.zeros(5, np.int32), none, pairs, 3, True)


@given(seed=st.integers(0, 2**32 - 1), above=st.sampled_from([0, 1, 8, 30]))
def test_every_query_token_is_in_one_half(seed: int, above: int) -> None:
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 16]))
    batch = as_batch(random_forest(rng, page_size=page_size), int(rng.choice([5, UNLIMITED])))
    query_lens = np.diff(batch.query_start_loc)
    division = divide(batch, above, page_size)
    if division is None:
        assert not (query_lens > above).any()
        return
    rows = np.flatnonzero(query_lens > above)
    chunks, rest = division.chunks, division.rest
    assert np.array_equal(np.diff(rest.query_start_loc), np.where(query_lens > above, 0, query_lens))
    assert np.array_equal(np.diff(chunks.query_start_loc), query_lens[rows])
    assert np.array_equal(chunks.seq_lens, batch.seq_lens[rows])
    assert np.array_equal(rest.seq_lens, batch.seq_lens) and np.array_equal(rest.block_table, batch.block_table)
    assert chunks.block_table.shape == (len(rows), -(-chunks.seq_lens.max() // page_size))
    row_of = np.repeat(np.arange(len(query_lens)), query_lens)
    assert (query_lens[row_of[division.chunk_tokens]] > above).all()
    assert (query_lens[row_of[division.rest_tokens]] <= above).all()
    tokens = np.concatenate([division.rest_tokens, division.chunk_tokens])
    assert np.array_equal(np.sort(tokens), np.arange(len(row_of)))
    for row, length in enumerate(chunks.seq_lens):
        pages = -(-length // page_size)
        assert np.array_equal(chunks.block_table[row, :pages], batch.block_table[rows[row], :pages])


@given(seed=st.integers(0, 2**32 - 1), policy=st.sampled_from(["auto", "cascade", "pat", "relay", "per_query"]))
def test_chunks_are_planned_and_joined(seed: int, policy: str) -> None:
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([1, 16]))
    batch = as_batch(random_forest(rng, page_size=page_size, max_own_tokens=400), int(rng.choice([5, 90, UNLIMITED])))
    division = divide(batch, 4, page_size)
    if division is None:
        return
    planned = Planner(spec_of(policy, page_size)).plan(division.chunks)
    check_plan(planned)
    work = planned.work
    rest = np.arange(len(division.rest_tokens), dtype=np.int32)
    joined, listed = join(replace(empty_tiles(), queries=rest), work, division)
    assert np.array_equal(joined.queries, division.rest_tokens)
    assert joined.num_slots == 3 + work.num_slots
    assert np.array_equal(listed.partial_slots == DIRECT, work.partial_slots == DIRECT)
    assert np.array_equal(np.sort(listed.partial_slots[listed.partial_slots != DIRECT]), 3 + np.arange(work.num_slots))
    for query, (first, last) in zip(joined.merge_queries, joined.merge_ranges, strict=True):
        assert np.array_equal(np.sort(listed.partial_slots[listed.queries == query]), np.arange(first, last))
    finished = np.concatenate([listed.queries[listed.partial_slots == DIRECT], joined.merge_queries])
    assert np.array_equal(np.sort(finished), division.chunk_tokens)


@given(seed=st.integers(0, 2**32 - 1), above=st.sampled_from([1, 8]))
def test_what_shares_nothing_and_is_not_cut_fits_every_capacity(seed: int, above: int) -> None:
    rng = np.random.default_rng(seed)
    batch = as_batch(random_forest(rng, page_size=4))
    division = divide(batch, above, 4)
    if division is None:
        return
    one_slot = DeviceModel("test", 32, 32, 1, 2000, 25, False, 16, by_schedule=True, merge_bytes=4000)
    spec = spec_of("per_query", 4, one_slot)
    requests, pages = batch.block_table.shape
    capacity = Capacity(requests, int(batch.query_start_loc[-1]), pages, 10_000)
    limits = chunk_limits(spec.rule, spec.model.queries_per_tile, above, capacity)
    assert limits_broken(Planner(spec).plan(division.chunks).work, limits, free_slots=0) == []
    assert len(division.chunks.seq_lens) <= limits.rows
    assert division.chunks.block_table.shape[1] <= limits.columns


@pytest.mark.parametrize(
    ("changes", "limits"),
    [
        # 64 tokens are at most 7 chunks of 9 or more: 7 + 64 / 8 items of 8 tokens, twice as many where they are cut,
        # and 3 for each of 6 workers of 2 heads, and 1
        ({}, ChunkLimits(items=2 * 15 + 9 + 1, queries=40 * 8, rows=7, columns=13)),
        ({"max_requests": 3}, ChunkLimits(items=2 * 11 + 10, queries=32 * 8, rows=3, columns=13)),
        ({"max_query_len": 9}, ChunkLimits(items=40, queries=320, rows=7, columns=13)),
        ({"max_query_len": 8}, None),
        ({"max_query_tokens": 8}, None),
        # those that the host lists for the device may have one token
        ({"max_query_len": 1, "max_chunk_tokens": 80}, ChunkLimits(items=30, queries=240, rows=20, columns=13)),
        ({"max_chunk_tokens": 80}, ChunkLimits(items=40, queries=320, rows=20, columns=13)),
        ({"max_chunk_tokens": 800}, ChunkLimits(items=120, queries=960, rows=20, columns=13)),
    ],
)
def test_the_room_for_chunks(changes: dict[str, int], limits: ChunkLimits | None) -> None:
    capacity = replace(
        Capacity(max_requests=20, max_query_tokens=64, max_pages_per_request=13, num_pages=99), **changes
    )
    assert chunk_limits(spec_of("auto", 16).rule, 8, 8, capacity) == limits


@pytest.mark.parametrize("lens, above", [([], 0), ([3, 3, 3], 3), ([0, 0, 0], 0)])
def test_short_requests_are_no_chunks(lens: list[int], above: int) -> None:
    assert divide(make_batch([[0, 1, 2, 3]] * len(lens), query_lens=lens), above, 1) is None


def test_what_is_over_its_limit_is_named() -> None:
    batch = make_batch([list(range(100))], query_lens=[8])
    division = divide(batch, 0, 1)
    assert division is not None
    spec = spec_of("per_query", 1)
    work = Planner(spec).plan(division.chunks).work
    limits = chunk_limits(spec.rule, 8, 0, Capacity(1, 20, 100, 100))
    assert work.num_slots > 0
    broken = limits_broken(work, limits, free_slots=work.num_slots - 1)
    assert broken == [f"{work.num_slots} prefill slots of {work.num_slots - 1}"]
