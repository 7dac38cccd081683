"""Batch-invariant plans: the host's lists and the device's, under Triton's interpreter.

On a card tests/on_gpu compares the bits of outputs.
"""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import tree_batch
from trunkattn.analysis.trees import TreeLevels
from trunkattn.config import Capacity
from trunkattn.gpu.device_planner import batch_invariant as device_planner
from trunkattn.gpu.tiles import GpuTile
from trunkattn.planner.check import _check_spans, check_tiles
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.batch_invariant import SPAN_TOKENS, invariant_limits, invariant_list
from trunkattn.planner.tiles.candidates import TilingRule
from trunkattn.planner.work_list import (
    QUERY_START,
    SEGMENT_SHARED_END,
    SEGMENT_START,
    UNLIMITED,
    TileLimits,
    TileList,
)

from ..planner.specs import forest_of
from ..planner.tile_cases import SEEDS, make_rule
from .device_cases import prepare

pytestmark = pytest.mark.slow


def invariant_rule(group_size: int, page_size: int, rows: int = 32) -> TilingRule:
    tile = GpuTile(max(rows, group_size), 64, 2, 2, 4, (2000, 3000), (1500, 2500))
    return replace(make_rule(group_size, page_size, 1, shapes=(tile,), num_kv_heads=2), batch_invariant=True)


def random_batch(seed: int, page_size: int, window: int) -> StepTables:
    """A ragged tree of up to 12 requests, whose levels may end within spans; some have several query tokens."""
    rng = np.random.default_rng(seed)
    requests = int(rng.integers(1, 13))
    pages = rng.integers(0, 1 + 1400 // page_size, 2) * rng.integers(0, 2, 2)
    last = int(rng.integers(8, 1500))
    levels = [(1, int(pages[0]) * page_size), (min(requests, int(rng.integers(1, 4))), int(pages[1]) * page_size)]
    levels = [level for level in levels if level[1]] + [(requests, last)]
    nodes, tokens = (tuple(each) for each in zip(*levels, strict=True))
    batch = tree_batch(TreeLevels(nodes, tokens), page_size, row_seed=seed, page_seed=seed)
    lens = (batch.seq_lens - rng.integers(0, last - 4, requests)).astype(np.int32)
    query_lens = np.where(rng.random(requests) < 0.3, rng.integers(0, 5, requests), 1)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    return StepTables(batch.block_table, lens, starts, window)


def host_list(rule: TilingRule, batch: StepTables) -> TileList:
    return invariant_list(rule, forest_of(batch, rule.page_size), batch)


@pytest.mark.parametrize("window", [1, 511, 512, 513, UNLIMITED])
def test_positions_and_windows_at_the_ends_of_spans(window: int) -> None:
    """One request of each length, with one query token or two; those of one length share a whole span, or nearly."""
    lens = np.array([511, 512, 513, 514, 1024, 1025, 1025], np.int32)
    table = np.arange(7 * 1025, dtype=np.int32).reshape(7, 1025)
    table[:6, :512], table[6, :511] = table[0, :512], table[0, :511]
    for queries in (1, 2):
        batch = StepTables(table, lens, queries * np.arange(8, dtype=np.int32), window)
        rule = invariant_rule(4, 1)
        check_tiles(host_list(rule, batch), batch, rule, in_spans=True)


CASES = given(
    seed=SEEDS,
    group=st.sampled_from([1, 4, 7, 32]),
    page_size=st.sampled_from([1, 16, 48, 64]),
    window=st.one_of(st.just(UNLIMITED), st.integers(1, 1600)),
)


@pytest.mark.property
@settings(max_examples=12)
@CASES
def test_the_device_gives_the_bits_of_the_host(seed: int, group: int, page_size: int, window: int) -> None:
    rule, batch = invariant_rule(group, page_size), random_batch(seed, page_size, window)
    host = host_list(rule, batch)
    check_tiles(host, batch, rule, in_spans=True)
    requests, pages = batch.block_table.shape
    tokens = max(1, int(batch.query_start_loc[-1]))
    capacity = Capacity(requests + 1, tokens + 2, pages + 1, 1 << 20)
    limits = invariant_limits(capacity.max_query_tokens, capacity.max_pages_per_request * page_size, rule.segment_size)
    assert not limits.broken_by(host)
    planned = prepare(rule, capacity, limits=limits)
    for _ in range(2):  # the second time into arrays that hold something
        planned.fill(batch)
        planned.assert_holds(host, batch)
    assert planned.errors == [] and planned.plan.summary is not None
    assert int(planned.plan.summary[1]) == int(host.segment_tokens.sum())


def pieces(tiles: TileList, query: int, rule: TilingRule) -> list[tuple[int, list[list[int]]]]:
    """What a query's partials are of, in the order in which they are merged: the places in blocks of all tokens, from
    the first of a span on. An item begins with a block, before which nothing is listed."""
    found, block_segments = [], rule.tiles[0].block_tokens // rule.segment_size
    for start, full, end, begin, stop in tiles.items.tolist():
        hidden = start % (SPAN_TOKENS // rule.segment_size)
        assert start == full < end and hidden % block_segments == 0
        for entry in range(begin, stop):
            if tiles.queries[entry] == query:
                segments = [
                    [int(place), int(packed) >> 16] for place, packed, _ in tiles.segments[start - hidden : end]
                ]
                assert segments[:hidden] == [[0, 0]] * hidden
                found.append((int(tiles.partial_slots[entry]), segments))
    first = min(slot for slot, _ in found)
    return sorted((slot - first, segments) for slot, segments in found)


def seen_by(segments: list[list[int]], position: int, window: int, span: int, size: int) -> list[list[int]]:
    """Without the segments that a query sees nothing of, whose place in a block is kept."""
    kept = []
    for i, segment in enumerate(segments):
        token = span * SPAN_TOKENS + i * size
        is_seen = token <= position and token + size > position + 1 - window
        kept.append([segment[0], min(segment[1], position + 1 - token)] if is_seen else [0, 0])
    while kept and kept[-1] == [0, 0]:
        kept.pop()
    return kept


@pytest.mark.property
@settings(max_examples=60)
@CASES
def test_a_query_is_computed_alike_in_any_batch(seed: int, group: int, page_size: int, window: int) -> None:
    rule, batch = invariant_rule(group, page_size), random_batch(seed, page_size, window)
    together = host_list(rule, batch)
    rng = np.random.default_rng(seed)
    for row in rng.permutation(len(batch.seq_lens))[:3]:
        first, count = int(batch.query_start_loc[row]), int(np.diff(batch.query_start_loc)[row])
        if count == 0:
            continue
        some = slice(int(row), int(row) + 1)
        starts = np.array([0, count], np.int32)
        alone = host_list(rule, StepTables(batch.block_table[some], batch.seq_lens[some], starts, window))
        for query in range(count):
            position = int(batch.seq_lens[row]) - count + query
            first_span = max(0, position + 1 - window) // SPAN_TOKENS
            here, there = pieces(together, first + query, rule), pieces(alone, query, rule)
            assert [slot for slot, _ in here] == [slot for slot, _ in there]
            for nth, ((_, a), (_, b)) in enumerate(zip(here, there, strict=True)):
                args = position, window, first_span + nth, rule.segment_size
                assert seen_by(a, *args) == seen_by(b, *args)


def test_whole_spans_are_read_once() -> None:
    rule = invariant_rule(4, 16)
    tree = tree_batch(TreeLevels((1, 8), (2 * SPAN_TOKENS + 16, 40)), 16)
    batch = StepTables(tree.block_table, tree.seq_lens, np.arange(9, dtype=np.int32), UNLIMITED)
    tiles = host_list(rule, batch)
    assert int(tiles.segment_tokens.sum()) == 2 * SPAN_TOKENS + 8 * 56
    assert len(tiles.items) == 2 + 8 and tiles.num_slots == 8 * 3


def test_a_span_that_ends_within_its_last_segment_comes_first() -> None:
    rule = invariant_rule(4, 16)
    table = np.arange(64, dtype=np.int32).reshape(2, 32)
    lens = np.array([100, SPAN_TOKENS - 7], np.int32)
    batch = StepTables(table, lens, np.arange(3, dtype=np.int32), UNLIMITED)
    tiles = host_list(rule, batch)
    check_tiles(tiles, batch, rule, in_spans=True)
    assert tiles.queries[tiles.items[:, QUERY_START]].tolist() == [1, 0]


def test_what_breaks_the_order_of_spans_is_found() -> None:
    rule = invariant_rule(4, 16)
    table, lens = np.arange(96, dtype=np.int32).reshape(2, 48), np.array([SPAN_TOKENS, 200], np.int32)
    batch = StepTables(table, lens, np.arange(3, dtype=np.int32), 128)
    tiles = host_list(rule, batch)
    for change, message in (
        (lambda items: items[:, [SEGMENT_START, SEGMENT_SHARED_END]] + 1, "item 0 begins within a block of its span"),
        (lambda items: items[::-1, [SEGMENT_START, SEGMENT_SHARED_END]], "item 0 has segments of several spans"),
    ):
        items = tiles.items.copy()
        items[:, [SEGMENT_START, SEGMENT_SHARED_END]] = change(tiles.items)
        with pytest.raises(AssertionError, match=message):
            _check_spans(replace(tiles, items=items), rule)
    with pytest.raises(AssertionError, match="item 1 ends with its span, and the item before it does not"):
        check_tiles(replace(tiles, items=tiles.items[::-1].copy()), batch, rule, in_spans=True)


def test_blocks_that_a_window_hides_are_left_out() -> None:
    rule = invariant_rule(4, 16)
    lens = np.array([SPAN_TOKENS - 8, SPAN_TOKENS + 200], np.int32)
    table = np.arange(96, dtype=np.int32).reshape(2, 48)
    batch = StepTables(table, lens, np.arange(3, dtype=np.int32), 128)
    tiles = host_list(rule, batch)
    check_tiles(tiles, batch, rule, in_spans=True)
    per_span, block = SPAN_TOKENS // rule.segment_size, 64 // rule.segment_size
    # From token 376 on, and from 584, in blocks of 64 tokens
    assert (tiles.items[:, SEGMENT_START] % per_span).tolist() == [5 * block, 1 * block]
    assert [int(tiles.segment_tokens[begin:end].sum()) for begin, _, end, *_ in tiles.items] == [
        SPAN_TOKENS - 8 - 368,
        200 - 64,
    ]


def test_a_full_plan_of_more_query_tokens_than_a_cta_handles_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Items and runs of entries begin and end anywhere in a CTA's block of them, and the arrays have room for no more
    than the batch has."""
    monkeypatch.setattr(device_planner, "_BLOCK", 4)
    rule = invariant_rule(4, 16)
    tree = tree_batch(TreeLevels((1, 2, 14), (SPAN_TOKENS, SPAN_TOKENS, 40)), 16)
    starts = np.cumsum([0, 1, 3, *[1] * 8, 2, 1, 1, 1], dtype=np.int32)
    batch = StepTables(tree.block_table, tree.seq_lens, starts, UNLIMITED)
    host = host_list(rule, batch)
    segments = len(host.items) * (SPAN_TOKENS // rule.segment_size)
    limits = TileLimits(len(host.items), segments, len(host.queries), len(host.merge_queries), host.num_slots, 17)
    planned = prepare(rule, Capacity(14, 17, tree.block_table.shape[1], 1 << 20), limits=limits)
    planned.fill(batch)
    assert planned.errors == [] and planned.plan.summary is not None
    planned.assert_holds(host, batch)
    read = int(host.segment_tokens.sum())
    assert planned.plan.summary.tolist() == [0, read, int(batch.seq_lens.sum())]


def test_limits_are_flagged() -> None:
    rule = invariant_rule(4, 16)
    tree = tree_batch(TreeLevels((1, 4), (SPAN_TOKENS, 40)), 16)
    batch = StepTables(tree.block_table, tree.seq_lens, np.arange(5, dtype=np.int32), UNLIMITED)
    roomy = invariant_limits(6, 2 * SPAN_TOKENS, rule.segment_size)
    messages = {"items": "items", "segments": "segments", "queries": "queries", "slots": "partial results"}
    for name in (*messages, "merged"):
        limits = replace(roomy, **{name: 3})
        planned = prepare(rule, Capacity(5, 6, 40, 1 << 20), limits=limits)
        planned.fill(batch)
        assert name == "merged" or any(messages[name] in error for error in planned.errors), name
        planned.assert_guarded()
        arrays = planned.plan.arrays
        assert (arrays["partial_slots"] < limits.slots).all() and (arrays["merge_ranges"] <= limits.slots).all()
        assert arrays["counts"][3] <= limits.merged
