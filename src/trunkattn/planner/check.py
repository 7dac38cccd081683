"""`plan.check()`: verifies a work list token by token, independently of how it was made.

Every query token must read each KV token that it sees exactly once, in its own request's pages. If several items
compute parts of a query, they must write to distinct partial slots, and all of these must be merged.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.planner.planner import Planned, StepTables
from trunkattn.planner.tiles.batch_invariant import SPAN_TOKENS
from trunkattn.planner.tiles.candidates import TilingRule
from trunkattn.planner.work_list import (
    DIRECT,
    KV_END,
    KV_ROW,
    KV_START,
    QUERY_END,
    QUERY_START,
    SEGMENT_END,
    SEGMENT_PLACE,
    SEGMENT_POSITION,
    SEGMENT_QUERIES,
    SEGMENT_SHARED_END,
    SEGMENT_START,
    TileList,
)


def check_plan(planned: Planned) -> None:
    """Raises AssertionError, which says what is wrong, unless a work list keeps its invariants.

    Every (query token, visible KV token) pair is covered once, by the request's own page. Partial slots are distinct
    and in the order of the tokens. Items fit their tile, and are listed heaviest first.
    """
    work, spec = planned.work, planned.spec
    reads = _Reads(planned.batch)
    items_of: list[list[_Written]] = [[] for _ in reads.row_of]
    for i, item in enumerate(work.items):
        begin, end = item[QUERY_START], item[QUERY_END]
        holds = spec.model.queries_per_tile
        assert end > begin, f"item {i} has no query"
        assert end - begin <= holds, f"item {i} has {end - begin} queries, but its tile holds {holds}"
        tokens = np.arange(item[KV_START], item[KV_END])
        assert len(tokens), f"item {i} has no KV token"
        for query, slot in zip(work.queries[begin:end], work.partial_slots[begin:end], strict=True):
            visible = reads.add(query, tokens)
            assert len(visible), f"item {i} has query {query}, which sees none of the item's tokens"
            columns = np.unique(visible // spec.page_size)
            row, table = reads.row_of[query], planned.batch.block_table
            same = table[item[KV_ROW], columns] == table[row, columns]
            assert same.all(), (
                f"item {i} reads the pages of row {item[KV_ROW]}, but query {query} of row {row} has others"
            )
            items_of[query].append(_Written(int(item[KV_START]), int(slot)))
    reads.check()
    _check_slots(planned, items_of)
    _check_order(planned)


class _Written(NamedTuple):
    """What an item writes for one of its queries."""

    kv_start: int  # of the item
    slot: int


class _Reads:
    """Counts how often each query token of a batch reads each KV token."""

    def __init__(self, batch: StepTables) -> None:
        query_lens = np.diff(batch.query_start_loc)
        self.row_of = np.repeat(np.arange(len(query_lens)), query_lens)
        end = batch.seq_lens[self.row_of] - batch.query_start_loc[self.row_of + 1]
        self.position: NDArray[np.int64] = end + np.arange(len(self.row_of))
        self._window = batch.window
        self._times = [
            np.zeros(batch.seq_lens[row], np.uint8) for row in self.row_of
        ]  # small: a chunk has many queries

    def _sees(self, query: int, tokens: NDArray[np.integer]) -> NDArray[np.bool_]:
        position = int(self.position[query])
        return (tokens <= position) & (tokens > position - self._window)

    def add(self, query: int, tokens: NDArray[np.integer]) -> NDArray[np.integer]:
        """Counts the tokens that the query sees, and returns these."""
        visible = tokens[self._sees(query, tokens)]
        self._times[query][visible] += 1
        return visible

    def check(self) -> None:
        """Raises AssertionError unless every query read what it sees exactly once."""
        for query, times in enumerate(self._times):
            expected = self._sees(query, np.arange(len(times)))
            wrong = np.flatnonzero(times != expected)
            assert len(wrong) == 0, (
                f"query {query} of row {self.row_of[query]} must read token {wrong[0]} "
                f"{_times(int(expected[wrong[0]]))}, but reads it {_times(int(times[wrong[0]]))}"
            )


def _times(count: int) -> str:
    return {0: "never", 1: "once"}.get(count, f"{count} times")


def _check_slots(planned: Planned, items_of: list[list[_Written]]) -> None:
    work = planned.work
    merged: dict[int, list[int]] = {
        int(q): list(range(work.merge_indptr[i], work.merge_indptr[i + 1])) for i, q in enumerate(work.merge_queries)
    }
    for query, written in enumerate(items_of):
        slots = [slot for _, slot in sorted(written)]
        expected = merged.get(query, [DIRECT])
        assert slots == expected, f"query {query} is written to the slots {slots}, but {expected} are read"


def _check_order(planned: Planned) -> None:
    rule, items = planned.spec.rule, planned.work.items
    rows: NDArray[np.int64] = (items[:, QUERY_END].astype(np.int64) - items[:, QUERY_START]) * rule.group_size
    padded = -(-rows // rule.row_unit) * rule.row_unit
    weight = (items[:, KV_END] - items[:, KV_START]) * (rule.head_bytes + padded * rule.row_bytes)
    late = np.flatnonzero(np.diff(weight) > 0)
    assert len(late) == 0, f"item {late[0] + 1} is heavier than the item before it"


class _Segment(NamedTuple):
    """A row of TileList.segments, unpacked."""

    place: int  # place of its first token in the cache: page * page_size + offset
    first_query: int  # counted from the item's first
    end_query: int
    num_tokens: int
    position: int  # position of its first token in the sequence


def _unpack(segment: NDArray[np.int32]) -> _Segment:
    packed = int(segment[SEGMENT_QUERIES])
    first_query, end_query, num_tokens = packed & 255, packed >> 8 & 255, packed >> 16
    return _Segment(int(segment[SEGMENT_PLACE]), first_query, end_query, num_tokens, int(segment[SEGMENT_POSITION]))


def check_tiles(tiles: TileList, batch: StepTables, rule: TilingRule, in_spans: bool = False) -> None:
    """Raises AssertionError, which says what is wrong, unless a tile list keeps its invariants.

    Every (query token, visible KV token) pair is covered once, by the request's own page. Each partial slot is written
    once and merged once; only items of the lowest tile merge. Items fit their tile, and each bucket is listed longest
    first. in_spans: the items are in the order of `tiles.batch_invariant` instead.
    """
    reads = _Reads(batch)
    buckets = np.repeat(np.arange(len(tiles.counts) - 1), np.diff(tiles.counts))
    for item in range(len(tiles.items)):
        _check_tile(tiles, item, int(buckets[item]) % len(rule.tiles), batch, rule, reads)
    reads.check()
    _check_tile_slots(tiles)
    assert tiles.counts[-1] == tiles.counts[len(rule.tiles) + 1], "an item of a taller tile than the lowest merges"
    final = np.concatenate([tiles.queries[tiles.partial_slots == DIRECT], tiles.merge_queries])
    assert np.array_equal(np.sort(final), np.arange(len(reads.row_of))), "a query's output is not written exactly once"
    if in_spans:
        _check_spans(tiles, rule)
        return
    size = (tiles.items[:, SEGMENT_END] - tiles.items[:, SEGMENT_START]).astype(np.int64)
    for first, last in zip(tiles.counts, tiles.counts[1:], strict=False):
        late = np.flatnonzero(np.diff(size[first:last]) > 0)
        assert len(late) == 0, f"item {first + late[0] + 1} is longer than the item before it in its bucket"


def _check_spans(tiles: TileList, rule: TilingRule) -> None:
    """Checks that each item lies in one span, begins with a block, and comes before all others if it ends its span."""
    per_span, block_segments = SPAN_TOKENS // rule.segment_size, rule.tiles[0].block_tokens // rule.segment_size
    start, end = tiles.items[:, SEGMENT_START], tiles.items[:, SEGMENT_END]
    across = np.flatnonzero(start // per_span != (end - 1) // per_span)
    assert len(across) == 0, f"item {across[0]} has segments of several spans"
    within = np.flatnonzero(start % per_span % block_segments)
    assert len(within) == 0, f"item {within[0]} begins within a block of its span"
    late = np.flatnonzero(np.diff((end % per_span == 0).astype(np.int64)) > 0)
    assert len(late) == 0, f"item {late[0] + 1} ends with its span, and the item before it does not"


def _check_tile(
    tiles: TileList, item: int, tile_index: int, batch: StepTables, rule: TilingRule, reads: _Reads
) -> None:
    """Counts what one item reads. tile_index: index of its tile in the rule."""
    tile = rule.tiles[tile_index]
    start, shared_end, end = tiles.items[item, [SEGMENT_START, SEGMENT_SHARED_END, SEGMENT_END]].tolist()
    queries = tiles.queries[tiles.items[item, QUERY_START] : tiles.items[item, QUERY_END]]
    holds = tile.entries(rule.group_size)
    assert len(queries) <= holds, f"item {item} has {len(queries)} queries, but its tile holds {holds}"
    per_subtile, per_block = holds // tile.subtiles, tile.private_tokens // rule.segment_size
    for at in range(start, end):
        segment = _unpack(tiles.segments[at])
        first, last = segment.first_query, segment.end_query
        if at < shared_end:
            assert (first, last) == (0, len(queries)), (
                f"item {item} has a full segment that is not for all of its queries"
            )
        elif tile.subtiles > 1:  # the segment is one subtile's: see `tile_list.nest`
            subtile = (at - shared_end) // per_block % tile.subtiles
            first, last = max(first, subtile * per_subtile), min(last, (subtile + 1) * per_subtile)
        tokens = np.arange(segment.position, segment.position + segment.num_tokens)
        for query in queries[first:last]:
            visible = reads.add(query, tokens)
            pages = batch.block_table[reads.row_of[query], visible // rule.page_size].astype(np.int64)
            places = pages * rule.page_size + visible % rule.page_size
            own = (places == segment.place + visible - segment.position).all()
            assert own, f"item {item} reads pages that its query {query} does not have"
            whole = at >= shared_end or len(visible) == rule.segment_size
            assert whole, f"item {item} has a full segment of which query {query} sees only a part"


def _check_tile_slots(tiles: TileList) -> None:
    written = np.sort(tiles.partial_slots[tiles.partial_slots != DIRECT])
    ranges = np.concatenate([tiles.merge_slots[tiles.partial_slots == DIRECT], tiles.merge_ranges])
    merged = np.sort(np.concatenate([np.arange(first, last) for first, last in ranges] or [np.empty(0, np.int64)]))
    twice = written[1:][np.diff(written) == 0]
    assert len(twice) == 0, f"partial slot {twice[0]} is written twice"
    assert np.array_equal(merged, written), "a partial slot is written and not merged once, or merged and not written"
    last = int(written.max(initial=-1))
    assert last < tiles.num_slots, f"partial slot {last} is written, but there is memory for {tiles.num_slots}"
