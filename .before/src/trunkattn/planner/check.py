"""`plan.check()`: the invariants of a work list, verified the slow way."""

import numpy as np
from numpy.typing import NDArray

from trunkattn.plan_format import (
    DIRECT,
    KV_END,
    KV_ROW,
    KV_START,
    QUERY_END,
    QUERY_START,
    RUN_END,
    RUN_START,
    TileList,
)
from trunkattn.planner.build import Batch, Planned
from trunkattn.planner.tiling import TilingRule


def check_plan(planned: Planned) -> None:
    """Raises AssertionError unless every (query token, visible KV token) pair is covered exactly once, by its own page;
    slots are distinct and in token order; items fit their tile; the heaviest item comes first."""
    work, batch, spec = planned.work, planned.batch, planned.spec
    query_lens = np.diff(batch.query_start_loc)
    row_of = np.repeat(np.arange(len(query_lens)), query_lens)
    position = np.concatenate(
        [np.arange(n - q, n) for n, q in zip(batch.seq_lens, query_lens, strict=True)] or [np.empty(0, np.int64)]
    )
    covered = [np.zeros(batch.seq_lens[row], np.uint8) for row in row_of]  # of a long chunk they are many
    pieces: list[list[tuple[int, int]]] = [[] for _ in row_of]
    for i, item in enumerate(work.items):
        begin, end = item[QUERY_START], item[QUERY_END]
        assert end > begin, f"item {i} has no query"
        assert end - begin <= spec.model.queries_per_tile, f"item {i}: {end - begin} queries exceed the tile"
        tokens = np.arange(item[KV_START], item[KV_END])
        assert len(tokens), f"item {i} has no token"
        for query, slot in zip(work.queries[begin:end], work.slots[begin:end], strict=True):
            row = row_of[query]
            visible = tokens[(tokens <= position[query]) & (tokens > position[query] - batch.window)]
            assert len(visible), f"item {i}: query {query} sees none of its tokens"
            columns = np.unique(visible // spec.page_size)
            same = batch.block_table[item[KV_ROW], columns] == batch.block_table[row, columns]
            assert same.all(), f"item {i}: query {query} of row {row} has other pages than row {item[KV_ROW]}"
            covered[query][visible] += 1
            pieces[query].append((int(item[KV_START]), int(slot)))
    for query, row in enumerate(row_of):
        seen = np.arange(batch.seq_lens[row])
        wanted = (seen <= position[query]) & (seen > position[query] - batch.window)
        assert (covered[query] == wanted).all(), f"query {query} of row {row}: a token is missed or read twice"
    _check_slots(planned, pieces)
    _check_order(planned)


def _check_slots(planned: Planned, pieces: list[list[tuple[int, int]]]) -> None:
    work = planned.work
    expected: dict[int, list[int]] = {
        int(q): list(range(work.merge_indptr[i], work.merge_indptr[i + 1])) for i, q in enumerate(work.merge_queries)
    }
    for query, found in enumerate(pieces):
        slots = [slot for _, slot in sorted(found)]
        assert slots == expected.get(query, [DIRECT]), f"query {query}: slots {slots}"


def _check_order(planned: Planned) -> None:
    rule, items = planned.spec.rule, planned.work.items
    rows: NDArray[np.int64] = (items[:, QUERY_END].astype(np.int64) - items[:, QUERY_START]) * rule.group_size
    padded = -(-rows // rule.row_unit) * rule.row_unit
    weight = (items[:, KV_END] - items[:, KV_START]) * (rule.head_bytes + padded * rule.row_bytes)
    assert (np.diff(weight) <= 0).all(), "items are not ordered by weight"


def check_tiles(tiles: TileList, batch: Batch, rule: TilingRule) -> None:
    """Raises AssertionError unless every (query token, visible KV token) pair is covered exactly once, by its own page;
    partial slots are written once and merged once, by items of the lowest tile only; items fit their tile and each
    bucket's heaviest comes first."""
    query_lens = np.diff(batch.query_start_loc)
    row_of = np.repeat(np.arange(len(query_lens)), query_lens)
    position = batch.seq_lens[row_of] - batch.query_start_loc[row_of + 1] + np.arange(len(row_of))
    covered = [np.zeros(batch.seq_lens[row], np.uint8) for row in row_of]  # of a long chunk they are many
    bucket = np.repeat(np.arange(len(tiles.counts) - 1), np.diff(tiles.counts)) % len(rule.kinds)
    for i, (start, full, end, begin, stop) in enumerate(tiles.items):
        kind = rule.kinds[bucket[i]]
        assert stop - begin <= kind.entries(rule.group_size), f"item {i} exceeds its tile"
        height, block = kind.entries(rule.group_size) // kind.subtiles, kind.private_tokens // rule.run
        queries = tiles.queries[begin:stop]
        for at, (place, rows, first) in enumerate(tiles.runs[start:end]):
            low, high, count = rows & 255, rows >> 8 & 255, rows >> 16
            if kind.subtiles > 1 and start + at >= full:  # the run is one subtile's, see `tiles.nest`
                subtile = (start + at - full) // block % kind.subtiles
                low, high = max(low, subtile * height), min(high, (subtile + 1) * height)
            tokens = np.arange(first, first + count)
            for query in queries[low:high]:
                visible = tokens[(tokens <= position[query]) & (tokens > position[query] - batch.window)]
                pages = batch.block_table[row_of[query], visible // rule.page_size].astype(np.int64)
                places = pages * rule.page_size + visible % rule.page_size
                assert (places == place + visible - first).all(), f"item {i}: query {query} has other pages"
                covered[query][visible] += 1
                assert start + at >= full or len(visible) == rule.run, f"item {i}: query {query} needs a mask"
            assert start + at >= full or (low == 0 and high == len(queries)), f"item {i}: a full run is not for all"
    for query, row in enumerate(row_of):
        seen = np.arange(batch.seq_lens[row])
        wanted = (seen <= position[query]) & (seen > position[query] - batch.window)
        assert (covered[query] == wanted).all(), f"query {query} of row {row}: a token is missed or read twice"
    written = np.sort(tiles.slots[tiles.slots != DIRECT])
    ranges = np.concatenate([tiles.parts[tiles.slots == DIRECT], tiles.merge_ranges])
    merged = np.concatenate([np.arange(first, last) for first, last in ranges] or [np.empty(0, np.int64)])
    assert (np.diff(written) > 0).all(), "a partial slot is written twice"
    assert np.array_equal(np.sort(merged), written), "a partial is written and not merged, or merged and not written"
    assert tiles.counts[-1] == tiles.counts[len(rule.kinds) + 1], "an item of a taller tile merges"
    final = np.concatenate([tiles.queries[tiles.slots == DIRECT], tiles.merge_queries])
    assert np.array_equal(np.sort(final), np.arange(len(row_of))), "a query's output is not written exactly once"
    size = (tiles.items[:, RUN_END] - tiles.items[:, RUN_START]).astype(np.int64)
    for first, last in zip(tiles.counts, tiles.counts[1:], strict=False):
        assert (np.diff(size[first:last]) <= 0).all(), "a bucket's items are not ordered by length"
