"""Planning on the device, fifth step: the arrays of a plan, from its items (`planner.work_list.TileList`).

One CTA an item counts what stands before it: segments and queries in the order of emission, items in the order of
weight. Stores beyond an array are left out and flagged; an item whose segments or queries do not fit is empty.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trunkattn.gpu.device_planner.common import (
    BIG,
    DIRECT,
    ITEM_COLUMNS,
    MANY_QUERIES,
    MANY_SEGMENTS,
    MANY_SLOTS,
    NUMBERS,
    QUERY_END,
    QUERY_START,
    SEGMENT_COLUMNS,
    SEGMENT_END,
    SEGMENT_PLACE,
    SEGMENT_POSITION,
    SEGMENT_QUERIES,
    SEGMENT_SHARED_END,
    SEGMENT_START,
    counts_of,
    flag,
    trigger_and_wait,
)
from trunkattn.gpu.device_planner.cost import load_launch
from trunkattn.gpu.device_planner.items import count_partials, item_arrays, load_item, partial_arrays, touches
from trunkattn.gpu.device_planner.layout import load_nodes, node_arrays

# What a CTA of `lists_kernel` does
_LIST_SEGMENTS = tl.constexpr(0)
_LIST_QUERIES = tl.constexpr(1)
_LIST_MERGES = tl.constexpr(2)
_COUNT_BUCKETS = tl.constexpr(3)


class PlanArrays(NamedTuple):
    """The plan's arrays, which `planner.work_list.TileList` describes."""

    counts: Any
    items: Any
    queries: Any
    partial_slots: Any
    merge_slots: Any
    merge_queries: Any
    merge_ranges: Any
    segments: Any


class Place(NamedTuple):
    """Where an item's lists begin, and its place in the order of buckets and weight."""

    segment: Any
    query: Any
    item: Any


class SegmentRange(NamedTuple):
    """The segments [begin, end) of a tile, which are to be listed. `low` is the item's first entry."""

    begin: Any
    end: Any
    low: Any


class Subtile(NamedTuple):
    """Entries of a tile that read keys of their own. `number` is that of the subtile, and each subtile has `entries` of
    them."""

    number: Any
    entries: Any


class Deal(NamedTuple):
    """How segments are dealt to subtiles, which read them side by side: each subtile gets a block of segments in
    turn."""

    subtiles: Any
    block_segments: Any
    places: Any  # to fill, for each subtile


class Worker(NamedTuple):
    """One of `count` workers that list segments together: it lists every count-th block from its number on."""

    number: Any
    count: Any


class Pages(NamedTuple):
    """Where a tile's tokens are. `rows` are rows of the block table, by entry of the tile."""

    block_table: Any
    row_stride: Any
    num_pages: Any
    rows: Any


@triton.jit
def store_segments(to, is_listed, row, token, packed, pages, mask, SIZES: tl.constexpr):
    """Stores segments that begin with `token` of a row of the block table. Those that are not listed are empty.

    Args:
        to: pointer of each.
        packed: their queries and tokens, as in SEGMENT_QUERIES.
        mask: which are stored.
    """
    at = pages.block_table + row.to(tl.int64) * pages.row_stride + token // SIZES.page_size
    page = tl.minimum(tl.maximum(tl.load(at, mask=is_listed, other=0), 0), pages.num_pages - 1)
    place = page * SIZES.page_size + token % SIZES.page_size
    tl.store(to + SEGMENT_PLACE, tl.where(is_listed, place, 0), mask=mask)
    tl.store(to + SEGMENT_QUERIES, tl.where(is_listed, packed, 0), mask=mask)
    tl.store(to + SEGMENT_POSITION, tl.where(is_listed, token, 0), mask=mask)


@triton.jit
def _place_of(item, number, items, num_items, BLOCK: tl.constexpr):
    """Returns the place of item `number`, which follows from what comes before it."""
    segments, queries = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    place = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_items, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        used, before = other < num_items, other < number
        size = tl.load(items.size + other, mask=used, other=0)
        low = tl.load(items.low + other, mask=used, other=0)
        high = tl.load(items.high + other, mask=used, other=0)
        bucket = tl.load(items.bucket + other, mask=used, other=BIG)
        is_heavier = (size > item.size) | ((size == item.size) & before)
        segments += tl.where(before, size, 0)
        queries += tl.where(before, high - low, 0)
        place += ((bucket < item.bucket) | ((bucket == item.bucket) & is_heavier)).to(tl.int32)
    return Place(tl.sum(segments, 0), tl.sum(queries, 0), tl.sum(place, 0))


@triton.jit
def _slots_before(token, num_tokens, partials, BLOCK: tl.constexpr):
    """Returns the first slot of each query token, which is the number of partials of those before it."""
    before = tl.zeros([token.shape[0], BLOCK], tl.int32)
    for begin in range(0, num_tokens, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        count = count_partials(partials, other, other < num_tokens)
        before += tl.where(other[None, :] < token[:, None], count[None, :], 0)
    return tl.sum(before, 1)


@triton.jit
def _list_queries(item, number, at, count, num_tokens, entries, items, partials, plan, limits, SIZES: tl.constexpr):
    """Lists an item's queries from `at` on, and where each of them leaves its partial result or its output."""
    ENTRIES: tl.constexpr = SIZES.nodes // 2  # of a tile
    i = tl.arange(0, ENTRIES)
    used = i < count
    entry = item.low + i  # of the tile
    token = tl.load(entries.token + item.entry + entry, mask=used, other=0)
    num_partials = count_partials(partials, token, used)
    first = _slots_before(token, num_tokens, partials, 128)
    merges = item.bucket >= SIZES.heights
    earlier = tl.zeros([ENTRIES], tl.int32)
    if item.launch_number % 2 == 1:
        earlier = tl.load(partials.tall + token, mask=used, other=0)
    for begin in range(item.tile_item, number, 32):  # splits of the same tile
        split = begin + tl.arange(0, 32)
        low = tl.load(items.low + split, mask=split < number, other=BIG)
        high = tl.load(items.high + split, mask=split < number, other=0)
        holds = (low[None, :] <= entry[:, None]) & (entry[:, None] < high[None, :])
        earlier += tl.sum(holds.to(tl.int32), 1)
    slot = tl.minimum(first + earlier, limits.slots - 1)
    is_direct = (num_partials == 0) | merges
    is_fused = (num_partials > 0) & merges
    tl.store(plan.queries + at + i, token, mask=used)
    tl.store(plan.partial_slots + at + i, tl.where(is_direct, DIRECT, slot), mask=used)
    tl.store(plan.merge_slots + 2 * (at + i), tl.where(is_fused, tl.minimum(first, slot), 0), mask=used)
    tl.store(plan.merge_slots + 2 * (at + i) + 1, tl.where(is_fused, slot, 0), mask=used)


@triton.jit
def _taken(k, nodes, rows, wanted, subtile):
    """Returns which segments of a range are of nodes k and concern a subtile: the first one, and how many they are."""
    node = load_nodes(nodes, k, k < 2 * rows)
    first = tl.maximum(node.offset, wanted.begin)
    count = tl.maximum(tl.minimum(node.offset + node.segments, wanted.end) - first, 0)
    return first, tl.where(touches(node, wanted.low, subtile.number, subtile.entries), count, 0)


@triton.jit
def _list_segments(to, wanted, subtile, deal, worker, nodes, rows, pages, SIZES: tl.constexpr, DEALT: tl.constexpr):
    """Lists a worker's share of the segments of a range that concern a subtile.

    Args:
        to: where the item's segments are listed.
        nodes, rows: of the tile.
        DEALT: whether the segments are dealt to subtiles, the places that are left over filled with empty segments.
            Otherwise there is one subtile, and all of the tile concerns it.
    """
    NODES: tl.constexpr = SIZES.nodes
    k = tl.arange(0, NODES)
    a, count = _taken(k, nodes, rows, wanted, subtile)
    ahead, total = a - wanted.begin, wanted.end - wanted.begin
    if DEALT:
        ahead, total = tl.zeros([NODES], tl.int32), tl.sum(count, 0)
        for others in range(0, 2 * rows, 16):
            its_a, its_count = _taken(others + tl.arange(0, 16), nodes, rows, wanted, subtile)
            ahead += tl.sum(tl.where(its_a[None, :] < a[:, None], its_count[None, :], 0), 1)
    for first in range(worker.number * SIZES.segment_block, deal.places, worker.count * SIZES.segment_block):
        x = first + tl.arange(0, SIZES.segment_block)
        match = (ahead[:, None] <= x[None, :]) & (x[None, :] < (ahead + count)[:, None])
        node_number = tl.sum(tl.where(match, k[:, None], 0), 0)  # over the first axis, which lies in registers
        segment = wanted.begin + x  # of the tile
        if DEALT:
            segment = x + tl.sum(tl.where(match, (a - ahead)[:, None], 0), 0)
        is_listed = x < total
        node = load_nodes(nodes, node_number, is_listed)
        segment -= node.offset  # of the node
        token = tl.where(segment == 0, node.start, (node.start // SIZES.segment_size + segment) * SIZES.segment_size)
        num_tokens = tl.minimum((token // SIZES.segment_size + 1) * SIZES.segment_size, node.end) - token
        row = tl.load(pages.rows + node.first, mask=is_listed, other=0)
        its_rows = (node.first - wanted.low) | (node.stop - wanted.low) << 8
        at = (x // deal.block_segments * deal.subtiles + subtile.number) * deal.block_segments + x % deal.block_segments
        queries = its_rows | num_tokens << 16
        store_segments(to + SEGMENT_COLUMNS * at, is_listed, row, token, queries, pages, x < deal.places, SIZES)


@triton.jit
def _list_item_segments(item, to, worker, nodes, launches, pages, SIZES: tl.constexpr):
    """Lists a worker's share of an item's segments. The leading ones are in the order of the tile. If the tile has
    subtiles, the others are dealt out to them."""
    whole = tl.where(item.subtiles == 1, item.size, item.full)
    every = Subtile(0, BIG)
    wanted = SegmentRange(item.begin, item.begin + whole, item.low)
    _list_segments(to, wanted, every, Deal(1, 1, whole), worker, nodes, item.rows, pages, SIZES, False)
    if item.size > whole:
        one = load_launch(launches, item.launch_number)
        wanted = SegmentRange(item.begin + item.full, item.end, item.low)
        deal = Deal(item.subtiles, one.private_segments, (item.size - item.full) // item.subtiles)
        sharers = tl.maximum(worker.count // item.subtiles, 1)  # workers of a subtile
        for task in range(worker.number, item.subtiles * sharers, worker.count):
            subtile = Subtile(task % item.subtiles, one.subtile_entries)
            helper = Worker(task // item.subtiles, sharers)
            _list_segments(
                to + SEGMENT_COLUMNS * item.full,
                wanted,
                subtile,
                deal,
                helper,
                nodes,
                item.rows,
                pages,
                SIZES,
                True,
            )


@triton.jit
def _list_merges(num_tokens, partials, status, plan, limits, SIZES: tl.constexpr):
    """Lists the query tokens whose partials no item merges, and stores how many they are."""
    total, num_slots = 0, 0
    for begin in range(0, num_tokens, SIZES.block):
        token = begin + tl.arange(0, SIZES.block)
        count = count_partials(partials, token, token < num_tokens)
        is_fused = tl.load(partials.fused + token, mask=token < num_tokens, other=1)
        first = num_slots + tl.cumsum(count, 0) - count
        is_left = ((count > 0) & (is_fused == 0)).to(tl.int32)
        at = total + tl.cumsum(is_left, 0) - is_left
        used = (is_left > 0) & (at < limits.merged)
        tl.store(plan.merge_queries + at, token, mask=used)
        tl.store(plan.merge_ranges + 2 * at, tl.minimum(first, limits.slots), mask=used)
        tl.store(plan.merge_ranges + 2 * at + 1, tl.minimum(first + count, limits.slots), mask=used)
        total += tl.sum(is_left, 0)
        num_slots += tl.sum(count, 0)
    flag(status, tl.where(num_slots > limits.slots, MANY_SLOTS, 0))
    tl.store(plan.counts + 2 * SIZES.heights + 1, tl.minimum(total, limits.merged))


@triton.jit
def _count_buckets(items, num_items, counts, SIZES: tl.constexpr, BLOCK: tl.constexpr):
    LANES: tl.constexpr = SIZES.bucket_lanes
    lane = tl.arange(0, LANES)
    total = tl.zeros([LANES], tl.int32)
    for begin in range(0, num_items, BLOCK):
        item = begin + tl.arange(0, BLOCK)
        bucket = tl.load(items.bucket + item, mask=item < num_items, other=BIG)
        total += tl.sum((bucket[None, :] < lane[:, None]).to(tl.int32), 1)
    tl.store(counts + lane, total, mask=lane <= 2 * SIZES.heights)


@triton.jit
def _store_plan_item(items, place, fits, size):
    """Stores an item of the plan, which is empty unless it fits. `size` counts its leading segments, its segments and
    its queries."""
    full, segments, queries = size
    row = items + place.item * ITEM_COLUMNS
    tl.store(row + SEGMENT_START, tl.where(fits, place.segment, 0))
    tl.store(row + SEGMENT_SHARED_END, tl.where(fits, place.segment + full, 0))
    tl.store(row + SEGMENT_END, tl.where(fits, place.segment + segments, 0))
    tl.store(row + QUERY_START, tl.where(fits, place.query, 0))
    tl.store(row + QUERY_END, tl.where(fits, place.query + queries, 0))


@triton.jit
def _assign_role(num_items):
    """Returns the role of this CTA, its number as a worker, and the number of workers of its role. The last two CTAs
    list merges and count. Of the others, one for each item, but at most half of them, list queries, and the rest list
    segments."""
    cta, others = tl.program_id(0), tl.num_programs(0) - 2
    query_workers = tl.minimum(num_items, others // 2)
    segment_workers = others - query_workers
    role = tl.where(cta < segment_workers, _LIST_SEGMENTS, _LIST_QUERIES)
    role = tl.where(cta == others, _LIST_MERGES, role)
    role = tl.where(cta == others + 1, _COUNT_BUCKETS, role)
    lists_segments = role == _LIST_SEGMENTS
    worker = tl.where(lists_segments, cta, cta - segment_workers)
    return role, worker, tl.where(lists_segments, segment_workers, tl.maximum(query_workers, 1))


@triton.jit(do_not_specialize=NUMBERS)
def lists_kernel(tables, row_stride, tiled, work, plan, limits, SIZES: tl.constexpr, PDL: tl.constexpr):
    """Writes the plan's arrays. Where there are fewer items than CTAs, several CTAs list the segments of one item in
    turn."""
    trigger_and_wait(PDL)
    entries, status, layout, choice = tiled
    counts = counts_of(status)
    num_items, num_tokens = tl.load(counts.num_items), tl.load(counts.num_tokens)
    arrays, of_token = item_arrays(work.items, limits.items), partial_arrays(work.partials, SIZES.tokens)
    role, worker, workers = _assign_role(num_items)
    if role == _LIST_MERGES:
        _list_merges(num_tokens, of_token, status, plan, limits, SIZES)
    if role == _COUNT_BUCKETS:
        _count_buckets(arrays, num_items, plan.counts, SIZES, 128)
    sharers = tl.where(role == _LIST_SEGMENTS, tl.maximum(workers // tl.maximum(num_items, 1), 1), 1)  # of an item
    tasks = tl.where(role <= _LIST_QUERIES, num_items * sharers, 0)
    for task in range(worker, tasks, workers):
        number = task // sharers
        item = load_item(arrays, number)
        place = _place_of(item, number, arrays, num_items, SIZES.block)
        num_queries = item.high - item.low
        segments_fit = place.segment + item.size <= limits.segments
        queries_fit = place.query + num_queries <= limits.queries
        fits = segments_fit & queries_fit
        if role == _LIST_QUERIES:
            flag(status, tl.where(segments_fit, 0, MANY_SEGMENTS) | tl.where(queries_fit, 0, MANY_QUERIES))
            _store_plan_item(plan.items, place, fits, (item.full, item.size, num_queries))
            _list_queries(
                item,
                number,
                place.query,
                tl.where(fits, num_queries, 0),
                num_tokens,
                entries,
                arrays,
                of_token,
                plan,
                limits,
                SIZES,
            )
        elif fits:
            pages = Pages(tables.block_table, row_stride, limits.num_pages, entries.row + item.entry)
            its_nodes = node_arrays(layout.nodes + item.nodes, SIZES.tokens)
            helper = Worker(task % sharers, sharers)
            to = plan.segments + SEGMENT_COLUMNS * place.segment
            _list_item_segments(item, to, helper, its_nodes, choice.launches, pages, SIZES)
