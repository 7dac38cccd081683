"""Batch-invariant plans made on the device: the lists of `planner.tiles.batch_invariant`, bit for bit.

Three launches follow those that order the requests: what each span has, the items, and their segments.
"""

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl

from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.compiling import launch
from trunkattn.gpu.device_planner.candidates import power_of_two
from trunkattn.gpu.device_planner.common import (
    DIRECT,
    ITEM_COLUMNS,
    MANY_ITEMS,
    MANY_QUERIES,
    MANY_SEGMENTS,
    MANY_SLOTS,
    NUMBERS,
    QUERY_END,
    QUERY_START,
    SEGMENT_COLUMNS,
    SEGMENT_END,
    SEGMENT_SHARED_END,
    SEGMENT_START,
    SUMMARY_CANDIDATE,
    SUMMARY_READ,
    SUMMARY_UNSHARED,
    EntryArrays,
    Tables,
    counts_of,
    flag,
    trigger_and_wait,
)
from trunkattn.gpu.device_planner.planner import DevicePlanner
from trunkattn.gpu.device_planner.prefix_forest import Bounds
from trunkattn.gpu.device_planner.stats import tokens_unshared
from trunkattn.gpu.device_planner.tile_list import Pages, PlanArrays, store_segments
from trunkattn.gpu.workspace import counted_zeros
from trunkattn.planner.tiles.batch_invariant import SPAN_TOKENS

_SPAN = tl.constexpr(SPAN_TOKENS)
_CTAS_PER_SM: Final = 8  # CTAs per SM that list segments
_BLOCK: Final = 512


class SpanSizes(NamedTuple):
    """Constants of the kernels. `tokens` is the most query tokens, and `height` is the query tokens of an item.
    `height_lanes` and `lanes` are the sizes of vectors of an item's query tokens and of all spans. A tile computes
    `key_block` keys at once, and a CTA handles `block` entries at once."""

    tokens: int
    height: int
    height_lanes: int
    page_size: int
    segment_size: int
    key_block: int
    lanes: int
    block: int


class SpanArrays(NamedTuple):
    """Arrays of counts. `ending`, `others` and `queries` say for each span how many of its items reach its end, how
    many do not, and how many query tokens it has. `first_slot` is the first partial slot of each entry. `item_entry`
    and `item_span` are the first entry and the span of each item."""

    ending: Any
    others: Any
    queries: Any
    first_slot: Any
    item_entry: Any
    item_span: Any


class _Scan(NamedTuple):
    """What is known of a block of entries and a span. `sees` says whether an entry sees the span. `run` is the first of
    the entries that may be in one item with it. `is_last` says whether it is the last of an item. If it is, the other
    fields describe the item: its first entry, the segments up to its last one, and whether the span ends there."""

    sees: Any
    run: Any
    is_last: Any
    first: Any
    segments: Any
    ends: Any


@triton.jit
def _maximum(a, b):
    return tl.maximum(a, b)


@triton.jit
def _sees(position, span, window):
    return (position >= span * _SPAN) & (position + 1 - window < (span + 1) * _SPAN)


@triton.jit
def _follows(at, entries, span, num_entries, window):
    """Returns whether entries see a span, and whether they may be in one item with the entry before them."""
    used, before = at < num_entries, (at > 0) & (at < num_entries)
    sees = used & _sees(tl.load(entries.position + at, mask=used, other=0), span, window)
    saw = before & _sees(tl.load(entries.position + at - 1, mask=before, other=0), span, window)
    row = tl.load(entries.row + at, mask=before, other=0)
    is_same = row == tl.load(entries.row + at - 1, mask=before, other=-1)
    shared = tl.load(entries.shared + at, mask=before, other=0)
    return sees, sees & saw & (is_same | (shared >= (span + 1) * _SPAN))


@triton.jit
def _scan(at, run, entries, span, num_entries, window, SIZES: tl.constexpr):
    """Returns the `_Scan` of a block of entries. `run` is the first entry of the run that reaches into the block."""
    sees, follows = _follows(at, entries, span, num_entries, window)
    _, goes_on = _follows(at + 1, entries, span, num_entries, window)
    runs = tl.maximum(tl.associative_scan(tl.where(follows, -1, at), 0, _maximum), run)
    is_last = sees & ((goes_on == 0) | ((at + 1 - runs) % SIZES.height == 0))
    first = at - (at - runs) % SIZES.height
    row = tl.load(entries.row + at, mask=is_last, other=0)
    is_one = row == tl.load(entries.row + first, mask=is_last, other=0)
    seen = tl.load(entries.position + at, mask=is_last, other=0) + 1 - span * _SPAN
    tokens = tl.where(is_one, tl.minimum(seen, _SPAN), _SPAN)
    segments = tl.cdiv(tokens, SIZES.segment_size)
    return _Scan(
        sees=sees,
        run=runs,
        is_last=is_last,
        first=first,
        segments=segments,
        ends=segments == _SPAN // SIZES.segment_size,
    )


@triton.jit
def _count_items(span, entries, num_entries, window, spans, SIZES: tl.constexpr):
    """Stores how many items end with a span, how many others it has, and how many query tokens."""
    run, ending, others, queries = 0, 0, 0, 0
    for begin in range(0, num_entries, SIZES.block):
        scan = _scan(begin + tl.arange(0, SIZES.block), run, entries, span, num_entries, window, SIZES)
        run = tl.max(scan.run, 0)
        ending += tl.sum((scan.is_last & scan.ends).to(tl.int32), 0)
        others += tl.sum((scan.is_last & (scan.ends == 0)).to(tl.int32), 0)
        queries += tl.sum(scan.sees.to(tl.int32), 0)
    tl.store(spans.ending + span, ending)
    tl.store(spans.others + span, others)
    tl.store(spans.queries + span, queries)


@triton.jit
def _first_span(position, window):
    return tl.maximum(position + 1 - window, 0) // _SPAN


@triton.jit
def _num_partials(position, window):
    """Returns how many spans a query token sees."""
    return position // _SPAN + 1 - _first_span(position, window)


@triton.jit
def _list_merges(entries, num_entries, window, status, spans, plan, limits, SIZES: tl.constexpr):
    """Lists the query tokens that see several spans, and the first partial slot of each."""
    merged, num_slots = 0, 0
    for begin in range(0, num_entries, SIZES.block):
        at = begin + tl.arange(0, SIZES.block)
        used = at < num_entries
        partials = _num_partials(tl.load(entries.position + at, mask=used, other=0), window)
        partials = tl.where(used & (partials > 1), partials, 0)
        is_split = (partials > 0).to(tl.int32)
        first = num_slots + tl.cumsum(partials, 0) - partials
        place = merged + tl.cumsum(is_split, 0) - is_split
        write = (partials > 0) & (place < limits.merged)
        tl.store(spans.first_slot + at, first, mask=used)
        tl.store(plan.merge_queries + place, tl.load(entries.token + at, mask=used, other=0), mask=write)
        tl.store(plan.merge_ranges + 2 * place, tl.minimum(first, limits.slots), mask=write)
        tl.store(plan.merge_ranges + 2 * place + 1, tl.minimum(first + partials, limits.slots), mask=write)
        merged += tl.sum(is_split, 0)
        num_slots += tl.sum(partials, 0)
    flag(status, tl.where(num_slots > limits.slots, MANY_SLOTS, 0))
    tl.store(plan.counts + 3, tl.minimum(merged, limits.merged))


@triton.jit
def _summarize(tables, bounds, window, summary, SIZES: tl.constexpr):
    """Stores how many tokens are read if every request reads its own. The tokens that are read are added up later, so
    their number begins with 0."""
    tl.store(summary + SUMMARY_CANDIDATE, tl.zeros([], tl.int64))
    tl.store(summary + SUMMARY_READ, tl.zeros([], tl.int64))
    tl.store(summary + SUMMARY_UNSHARED, tokens_unshared(tables, bounds, window, SIZES))


@triton.jit(do_not_specialize=NUMBERS)
def spans_kernel(
    tables,
    num_rows,
    num_columns,
    window,
    entries,
    status,
    spans,
    plan,
    summary,
    limits,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Finds what each span has, with one CTA for each span. The last two CTAs list merges and count tokens."""
    trigger_and_wait(PDL)
    num_entries = tl.load(counts_of(status).num_entries)
    others = tl.num_programs(0) - 2
    if tl.program_id(0) < others:
        _count_items(tl.program_id(0), entries, num_entries, window, spans, SIZES)
    elif tl.program_id(0) == others:
        _list_merges(entries, num_entries, window, status, spans, plan, limits, SIZES)
    else:
        _summarize(tables, Bounds(num_rows, num_columns, limits.max_query_len), window, summary, SIZES)


@triton.jit
def _store_counts(total, queries, status, plan, limits, PER_ITEM: tl.constexpr):
    """Stores how many items the plan has: `total`, or as many as there is room for. Flags what there is no room for.
    An item has PER_ITEM segments."""
    most = tl.minimum(limits.items, limits.segments // PER_ITEM)
    flag(status, tl.where(total > limits.items, MANY_ITEMS, 0))
    flag(status, tl.where(total > limits.segments // PER_ITEM, MANY_SEGMENTS, 0))
    flag(status, tl.where(queries > limits.queries, MANY_QUERIES, 0))
    tl.store(plan.counts, 0)
    tl.store(plan.counts + 1, tl.minimum(total, most))
    tl.store(plan.counts + 2, tl.minimum(total, most))


@triton.jit
def _list_queries(at, place, scan, span, entries, num_entries, window, spans, plan, limits):
    """Lists the entries `at` that see a span at their places, each with its partial slot; nothing is merged."""
    used = at < num_entries
    position = tl.load(entries.position + at, mask=used, other=0)
    listed = scan.sees & (place < limits.queries)
    slot = tl.load(spans.first_slot + at, mask=used, other=0) + span - _first_span(position, window)
    slot = tl.where(_num_partials(position, window) > 1, tl.minimum(slot, limits.slots - 1), DIRECT)
    tl.store(plan.queries + place, tl.load(entries.token + at, mask=used, other=0), mask=listed)
    tl.store(plan.partial_slots + place, slot, mask=listed)
    tl.store(plan.merge_slots + 2 * place, 0, mask=listed)
    tl.store(plan.merge_slots + 2 * place + 1, 0, mask=listed)


@triton.jit(do_not_specialize=NUMBERS)
def span_items_kernel(num_spans, window, entries, status, spans, plan, limits, SIZES: tl.constexpr, PDL: tl.constexpr):
    """Writes the items of each span and their query tokens, with one CTA for each span."""
    trigger_and_wait(PDL)
    PER_ITEM: tl.constexpr = _SPAN // SIZES.segment_size
    BLOCK: tl.constexpr = SIZES.block
    span = tl.program_id(0)
    num_entries = tl.load(counts_of(status).num_entries)
    each = tl.arange(0, SIZES.lanes)
    is_before, is_span = each < span, each < num_spans
    num_ending = tl.load(spans.ending + each, mask=is_span, other=0)
    num_others = tl.load(spans.others + each, mask=is_span, other=0)
    num_queries = tl.load(spans.queries + each, mask=is_span, other=0)
    ending = tl.sum(tl.where(is_before, num_ending, 0), 0)
    other = tl.sum(num_ending, 0) + tl.sum(tl.where(is_before, num_others, 0), 0)
    query = tl.sum(tl.where(is_before, num_queries, 0), 0)
    if span == 0:
        total, queries = tl.sum(num_ending + num_others, 0), tl.sum(num_queries, 0)
        _store_counts(total, queries, status, plan, limits, PER_ITEM)
    run = 0
    for begin in range(0, num_entries, SIZES.block):
        at = begin + tl.arange(0, SIZES.block)
        scan = _scan(at, run, entries, span, num_entries, window, SIZES)
        is_ending = (scan.is_last & scan.ends).to(tl.int32)
        is_other = (scan.is_last & (scan.ends == 0)).to(tl.int32)
        sees = scan.sees.to(tl.int32)
        place = query + tl.cumsum(sees, 0) - 1
        _list_queries(at, place, scan, span, entries, num_entries, window, spans, plan, limits)
        item = tl.where(scan.ends, ending + tl.cumsum(is_ending, 0), other + tl.cumsum(is_other, 0)) - 1
        fits = (item < limits.items) & ((item + 1) * PER_ITEM <= limits.segments) & (place < limits.queries)
        fits = fits & scan.is_last
        row, begins = plan.items + item * ITEM_COLUMNS, item * PER_ITEM
        tl.store(row + SEGMENT_END, begins + scan.segments, mask=fits)
        tl.store(row + QUERY_START, place - (at - scan.first), mask=fits)
        tl.store(row + QUERY_END, place + 1, mask=fits)
        tl.store(spans.item_entry + item, scan.first, mask=fits)
        tl.store(spans.item_span + item, tl.zeros([BLOCK], tl.int32) + span, mask=fits)
        run = tl.max(scan.run, 0)
        ending += tl.sum(is_ending, 0)
        other += tl.sum(is_other, 0)
        query += tl.sum(sees, 0)


@triton.jit(do_not_specialize=NUMBERS)
def span_segments_kernel(
    tables, row_stride, window, entries, spans, plan, summary, limits, SIZES: tl.constexpr, PDL: tl.constexpr
):
    """Lists the segments of the items, and the segment with which an item begins: blocks before the first one that is
    seen are not computed. Another segment that none of the item's query tokens sees, because of a window, is empty,
    and so are the segments that are left of the span."""
    trigger_and_wait(PDL)
    PER_ITEM: tl.constexpr = _SPAN // SIZES.segment_size
    read = tl.zeros([], tl.int64)
    i = tl.arange(0, PER_ITEM)
    pages = Pages(tables.block_table, row_stride, limits.num_pages, entries.row)
    for item in range(tl.program_id(0), tl.load(plan.counts + 1), tl.num_programs(0)):
        entry, span = tl.load(spans.item_entry + item), tl.load(spans.item_span + item)
        columns = plan.items + item * ITEM_COLUMNS
        count = tl.load(columns + QUERY_END) - tl.load(columns + QUERY_START)
        used = tl.load(columns + SEGMENT_END) - item * PER_ITEM
        row, length = tl.load(entries.row + entry), tl.load(entries.length + entry)
        member = tl.arange(0, SIZES.height_lanes)
        position = tl.load(entries.position + entry + member, mask=member < count, other=2**30)
        lowest = tl.min(position, 0) + 1 - window
        hidden = tl.maximum(lowest - span * _SPAN, 0) // SIZES.key_block * (SIZES.key_block // SIZES.segment_size)
        begins = hidden + item * PER_ITEM
        tl.store(columns + SEGMENT_START, begins)
        tl.store(columns + SEGMENT_SHARED_END, begins)
        token = span * _SPAN + i * SIZES.segment_size
        tokens = tl.minimum(tl.maximum(length - token, 0), SIZES.segment_size)
        listed = (i < used) & (token + SIZES.segment_size > lowest)
        to = plan.segments + (i + item * PER_ITEM) * SEGMENT_COLUMNS
        store_segments(to, listed, row, token, count << 8 | tokens << 16, pages, i < PER_ITEM, SIZES)
        read += tl.sum(tl.where(listed, tokens, 0), 0)
    tl.atomic_add(summary + SUMMARY_READ, read, sem="relaxed")


class InvariantPlanner(DevicePlanner):
    """A `DevicePlanner` of batch-invariant plans, which have one tiling."""

    def _allocate(self) -> dict[str, torch.Tensor]:
        capacity = self._capacity
        self._num_spans = -(-capacity.max_pages_per_request * self._sizes.page_size // SPAN_TOKENS)
        self._span_sizes = SpanSizes(
            tokens=capacity.max_query_tokens,
            height=self._tallest.height,
            height_lanes=power_of_two(self._tallest.height),
            page_size=self._sizes.page_size,
            segment_size=self._sizes.segment_size,
            key_block=self._tallest.block_segments * self._sizes.segment_size,
            lanes=power_of_two(self._num_spans),
            block=min(power_of_two(capacity.max_query_tokens), _BLOCK),
        )
        spans, tokens, items = self._num_spans, capacity.max_query_tokens, self._limits.items
        lengths = SpanArrays(
            ending=spans, others=spans, queries=spans, first_slot=tokens, item_entry=items, item_span=items
        )
        arrays = {
            f"span_{name}": counted_zeros((length,), torch.int32, self._device)
            for name, length in lengths._asdict().items()
        }
        return super()._allocate() | arrays

    def _choose(self, window: int, lowest_tile: bool) -> None:
        """Launches nothing, because there is one tiling."""

    def _emit(self, plan: GpuPlan, tables: Tables, window: int) -> None:
        arrays, sizes, limits = self._arrays, self._span_sizes, self._limits
        spans = SpanArrays(*(self._buffers[f"span_{name}"] for name in SpanArrays._fields))
        lists = PlanArrays(*(plan.arrays[name] for name in PlanArrays._fields))
        entries: EntryArrays = arrays.entries
        launch(spans_kernel, (self._num_spans + 2,))(
            *(tables, len(tables.block_table), self._columns(tables), window, entries, arrays.status, spans),
            *(lists, plan.summary, limits),
            SIZES=sizes,
            **self._pdl(),
        )
        launch(span_items_kernel, (self._num_spans,))(
            *(self._num_spans, window, entries, arrays.status, spans, lists, limits),
            SIZES=sizes,
            **self._pdl(),
        )
        num_ctas = min(limits.items, self._card.num_sms * _CTAS_PER_SM)
        launch(span_segments_kernel, (num_ctas,))(
            *(tables, tables.block_table.stride(0), window, entries, spans, lists, plan.summary, limits),
            SIZES=sizes,
            num_warps=1,
            **self._pdl(trigger=False),
        )
