"""Batch-invariant row tiles: how a request is computed does not depend on the other requests of the batch.

A sequence is cut into spans of SPAN_TOKENS tokens from its first token on. An item holds query tokens that see one
span: tokens of one request, or of neighbours in the prefix forest whose sequences share the whole span. A key of the
span is always at the same place of the same block, whatever else is in the item, and each span that a query sees leaves
one partial. So every query adds up the same numbers in the same order in any batch.

`gpu.device_planner.batch_invariant` gives the same lists on a GPU.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.planner.planner import StepTables
from trunkattn.planner.prefix_forest import Forest
from trunkattn.planner.tiles.candidates import TilingRule
from trunkattn.planner.tiles.cost import EVERY, shared_tokens
from trunkattn.planner.tiles.layout import make_entries
from trunkattn.planner.work_list import (
    DIRECT,
    ITEM_COLUMNS,
    QUERY_END,
    QUERY_START,
    SEGMENT_COLUMNS,
    SEGMENT_END,
    SEGMENT_PLACE,
    SEGMENT_POSITION,
    SEGMENT_QUERIES,
    SEGMENT_SHARED_END,
    SEGMENT_START,
    TileLimits,
    TileList,
)

# Longer spans leave fewer partials, but a prefix is shared only in whole spans.
SPAN_TOKENS: Final = 512


class SpanEntries(NamedTuple):
    """Query tokens in the order of the forest's rows, [E] int32 each. shared: tokens in common with the entry
    before."""

    query: NDArray[np.int32]
    position: NDArray[np.int32]
    row: NDArray[np.int32]
    shared: NDArray[np.int32]


class _Sizes(NamedTuple):
    """Sizes that a tile list depends on."""

    height: int  # the most query tokens of an item
    window: int
    segment_size: int  # tokens
    page_size: int  # tokens
    block_segments: int  # segments of a block


class _Arrays(NamedTuple):
    """Fields of a TileList, in a form that compiled functions return."""

    items: NDArray[np.int32]
    segments: NDArray[np.int32]
    queries: NDArray[np.int32]
    partial_slots: NDArray[np.int32]
    merge_queries: NDArray[np.int32]
    merge_ranges: NDArray[np.int32]
    num_slots: int


def invariant_list(rule: TilingRule, forest: Forest, batch: StepTables) -> TileList:
    """The tile list of a step: first the items that reach the end of their span, by span and by entry; then the
    others."""
    entries = _entries(forest, batch.seq_lens, batch.query_start_loc)
    (tile,) = rule.tiles
    sizes = _Sizes(
        height=tile.entries(rule.group_size),
        window=batch.window,
        segment_size=rule.segment_size,
        page_size=rule.page_size,
        block_segments=tile.block_tokens // rule.segment_size,
    )
    arrays: _Arrays = _emit(entries, batch.seq_lens, batch.block_table, sizes)
    return TileList(
        **arrays._asdict(),
        merge_slots=np.zeros((len(arrays.queries), 2), np.int32),
        counts=np.array([0, len(arrays.items), len(arrays.items)], np.int32),
        merges_taller=True,
    )


def invariant_limits(max_query_tokens: int, max_tokens: int, segment_size: int) -> TileLimits:
    """Upper bounds for the tile list of any batch. max_tokens: the most tokens of a sequence."""
    num_partials = max_query_tokens * -(-max_tokens // SPAN_TOKENS)
    segments = num_partials * (SPAN_TOKENS // segment_size)
    return TileLimits(
        items=num_partials,
        segments=segments,
        queries=num_partials,
        merged=max_query_tokens,
        slots=num_partials,
        query_tokens=max_query_tokens,
    )


@njit
def _entries(forest, seq_lens, query_start_loc):
    """The entries of all rows, in depth-first order."""
    entries = make_entries(forest, seq_lens, query_start_loc)
    row = np.empty(len(entries.query), np.int32)
    at = 0
    for each in forest.order:
        count = query_start_loc[each + 1] - query_start_loc[each]
        row[at : at + count] = each
        at += count
    shared, _ = shared_tokens(forest, entries, EVERY)
    return SpanEntries(entries.query, entries.position, row, shared.astype(np.int32))


@njit(inner=True)
def _sees(entries, entry, span, window):
    """Whether an entry sees a token of a span."""
    position, begin = np.int64(entries.position[entry]), span * SPAN_TOKENS
    return position >= begin and position + 1 - window < begin + SPAN_TOKENS


@njit(inner=True)
def _starts(entries, span, height, window):
    """[entries] 0 if an entry does not see the span, 1 if it is in the item of the entry before it, 2 if it begins
    one."""
    found = np.zeros(len(entries.query), np.int8)
    run = 0  # first of the consecutive entries that can be in one item
    for entry in range(len(found)):
        if not _sees(entries, entry, span, window):
            continue
        follows = entry > 0 and found[entry - 1] > 0
        if follows and entries.row[entry] != entries.row[entry - 1]:
            follows = entries.shared[entry] >= (span + 1) * SPAN_TOKENS
        if not follows:
            run = entry
        found[entry] = 2 if (entry - run) % height == 0 else 1
    return found


@njit(inner=True)
def _num_segments(entries, first, last, span, segment_size):
    """Number of the span's segments that an item of entries [first, last] lists. If they are of one request, the item
    ends with the last token that they see. If they are of several, these share the whole span, and all are listed."""
    tokens = np.int64(SPAN_TOKENS)
    if entries.row[first] == entries.row[last]:
        tokens = min(tokens, np.int64(entries.position[last]) + 1 - span * SPAN_TOKENS)
    return (tokens + segment_size - 1) // segment_size


@njit(inner=True)
def _first_seen(entries, first, last, window):
    """The first token that any of the entries [first, last] sees. At most 0 if one sees its sequence from the start."""
    lowest = np.int64(entries.position[first])
    for entry in range(first + 1, last + 1):
        lowest = min(lowest, np.int64(entries.position[entry]))
    return lowest + 1 - window


@njit(inner=True)
def _list_segments(segments, row, begin, first_seen, count, seq_lens, table, sizes):
    """Lists the segments of a span from token `begin` on, for an item of `count` entries. A segment that is outside the
    windows of all entries stays empty, so that all others keep their places."""
    segment_size, page_size = sizes.segment_size, sizes.page_size
    for i in range(len(segments)):
        token = begin + i * segment_size
        if token + segment_size > first_seen:
            tokens = min(segment_size, seq_lens[row] - token)
            segments[i, SEGMENT_PLACE] = table[row, token // page_size] * page_size + token % page_size
            segments[i, SEGMENT_QUERIES] = count << 8 | tokens << 16
            segments[i, SEGMENT_POSITION] = token


@njit
def _count_items(entries, num_spans, height, window, segment_size):
    """(number of items that end with their span, number of others). height: the most query tokens of an item."""
    count, per_item = len(entries.query), SPAN_TOKENS // segment_size
    num_ending, num_others = 0, 0
    for span in range(num_spans):
        starts = _starts(entries, span, height, window)
        first = 0
        for entry in range(count):
            first = entry if starts[entry] == 2 else first
            if starts[entry] > 0 and (entry + 1 == count or starts[entry + 1] != 1):
                ends = _num_segments(entries, first, entry, span, segment_size) == per_item
                num_ending, num_others = num_ending + ends, num_others + (not ends)
    return num_ending, num_others


class _Partials(NamedTuple):
    """The spans that each entry sees, and its partials, [entries] each: the first span, the number of spans, whether
    these are several, and the first partial slot then. num_spans: spans that some entry reaches."""

    first_span: NDArray[np.int64]
    num_partials: NDArray[np.int64]
    split: NDArray[np.bool_]
    first_slot: NDArray[np.int64]
    num_spans: int


@njit(inner=True)
def _partials_of(positions, window):
    """The partials of entries at these positions of their sequences."""
    first_span, num_partials = np.zeros(len(positions), np.int64), np.zeros(len(positions), np.int64)
    num_spans = np.int64(0)
    for entry in range(len(positions)):
        position = np.int64(positions[entry])
        first_span[entry] = max(0, position + 1 - window) // SPAN_TOKENS
        num_partials[entry] = position // SPAN_TOKENS + 1 - first_span[entry]
        num_spans = max(num_spans, position // SPAN_TOKENS + 1)
    split = num_partials > 1
    first_slot = np.cumsum(num_partials * split) - num_partials * split
    return _Partials(first_span, num_partials, split, first_slot, num_spans)


@njit
def _emit(entries, seq_lens, table, sizes):
    """Returns the arrays of a tile list."""
    height, window, segment_size = sizes.height, sizes.window, sizes.segment_size
    count, per_item = len(entries.query), SPAN_TOKENS // segment_size
    first_span, num_partials, split, first_slot, num_spans = _partials_of(entries.position, window)
    merge_ranges = np.empty((split.sum(), 2), np.int32)
    merge_ranges[:, 0], merge_ranges[:, 1] = first_slot[split], (first_slot + num_partials)[split]

    num_ending, num_others = _count_items(entries, num_spans, height, window, segment_size)
    items = np.zeros((num_ending + num_others, ITEM_COLUMNS), np.int32)
    segments = np.zeros((len(items) * per_item, SEGMENT_COLUMNS), np.int32)
    queries, slots = np.empty(num_partials.sum(), np.int32), np.full(num_partials.sum(), DIRECT, np.int32)
    ending, other, at = 0, num_ending, 0
    for span in range(num_spans):
        starts = _starts(entries, span, height, window)
        first = 0
        for entry in range(count):
            if starts[entry] == 0:
                continue
            first = entry if starts[entry] == 2 else first
            queries[at] = entries.query[entry]
            if split[entry]:
                slots[at] = first_slot[entry] + span - first_span[entry]
            at += 1
            if entry + 1 < count and starts[entry + 1] == 1:
                continue
            used = _num_segments(entries, first, entry, span, segment_size)
            item = ending if used == per_item else other
            ending, other = ending + (item < num_ending), other + (item >= num_ending)
            begin, first_seen = item * per_item, _first_seen(entries, first, entry, window)
            # Leading blocks that nobody sees are not computed. All other keys keep their place in their block.
            hidden = max(0, first_seen - span * SPAN_TOKENS) // (sizes.block_segments * segment_size)
            hidden *= sizes.block_segments
            items[item, SEGMENT_START], items[item, SEGMENT_SHARED_END] = begin + hidden, begin + hidden
            items[item, SEGMENT_END] = begin + used
            items[item, QUERY_START], items[item, QUERY_END] = at - (entry + 1 - first), at
            listed, row = segments[begin : begin + used], entries.row[first]
            _list_segments(listed, row, span * SPAN_TOKENS, first_seen, entry + 1 - first, seq_lens, table, sizes)
    merge_queries = entries.query[split]
    return _Arrays(
        items=items,
        segments=segments,
        queries=queries,
        partial_slots=slots,
        merge_queries=merge_queries,
        merge_ranges=merge_ranges,
        num_slots=int((num_partials * split).sum()),
    )
