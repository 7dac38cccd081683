"""Planning on the device: the arrays of a plan, from its items (`plan_format.TileList`).

One program an item counts what stands before it: runs and queries in the order of emission, items in the order of
weight. Stores beyond an array are left out and flagged; an item whose runs or queries do not fit is empty.
"""

import triton
import triton.language as tl

from trunkattn.kernels.device_choice import USE_COLUMNS, USE_SHAPE, USE_SUBTILE_ENTRIES
from trunkattn.kernels.device_items import (
    FUSED,
    ITEM_BEGIN,
    ITEM_BUCKET,
    ITEM_END,
    ITEM_ENTRY,
    ITEM_FULL,
    ITEM_HIGH,
    ITEM_LOW,
    ITEM_NODES,
    ITEM_ROWS,
    ITEM_SIZE,
    ITEM_SUBTILES,
    ITEM_TILE,
    ITEM_USE,
    TALL_PIECES,
    several_pieces,
    touching,
)
from trunkattn.kernels.device_order import (
    BIG,
    MANY_QUERIES,
    MANY_RUNS,
    MANY_SLOTS,
    NUM_ITEMS,
    NUM_TOKENS,
    NUMBERS,
    flag,
    in_turn,
)
from trunkattn.kernels.device_tiles import (
    NODE_END,
    NODE_OFFSET,
    NODE_ROWS,
    NODE_RUNS,
    NODE_START,
    PRIVATE_RUNS,
)
from trunkattn.plan_format import DIRECT, ITEM_COLUMNS

_DIRECT = tl.constexpr(DIRECT)
_ITEM = tl.constexpr(ITEM_COLUMNS)


@triton.jit
def _place(item, size, bucket, items, num_items, max_items, BLOCK: tl.constexpr):
    """Of an item: runs and queries of the items before it, and its place in the order of buckets and weight."""
    runs, queries = tl.zeros([BLOCK], tl.int32), tl.zeros([BLOCK], tl.int32)
    place = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_items, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        used, before = other < num_items, other < item
        its_size = tl.load(items + ITEM_SIZE * max_items + other, mask=used, other=0)
        low = tl.load(items + ITEM_LOW * max_items + other, mask=used, other=0)
        high = tl.load(items + ITEM_HIGH * max_items + other, mask=used, other=0)
        its_bucket = tl.load(items + ITEM_BUCKET * max_items + other, mask=used, other=BIG)
        heavier = (its_size > size) | ((its_size == size) & before)
        runs += tl.where(before, its_size, 0)
        queries += tl.where(before, high - low, 0)
        place += ((its_bucket < bucket) | ((its_bucket == bucket) & heavier)).to(tl.int32)
    return tl.sum(runs, 0), tl.sum(queries, 0), tl.sum(place, 0)


@triton.jit
def _slots_before(token, num_tokens, pieces, ENTRIES: tl.constexpr, BLOCK: tl.constexpr):
    """The first slot of each query token: pieces of those before it."""
    before = tl.zeros([token.shape[0], BLOCK], tl.int32)
    for begin in range(0, num_tokens, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        count = several_pieces(pieces, other, other < num_tokens, ENTRIES)
        before += tl.where(other[None, :] < token[:, None], count[None, :], 0)
    return tl.sum(before, 1)


@triton.jit
def _list_queries(
    item, at, count, num_tokens, entry_token, items, pieces, queries, slots, parts, num_kinds, max_items, max_slots,
    ENTRIES: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """An item's queries, from `at` on, and where each leaves its piece."""
    of = items + item
    i = tl.arange(0, NODES // 2)
    used = i < count
    entry = tl.load(of + ITEM_LOW * max_items) + i  # of the tile
    token = tl.load(entry_token + tl.load(of + ITEM_ENTRY * max_items) + entry, mask=used, other=0)
    several = several_pieces(pieces, token, used, ENTRIES)
    first = _slots_before(token, num_tokens, pieces, ENTRIES, 128)
    merges = tl.load(of + ITEM_BUCKET * max_items) >= num_kinds
    earlier = tl.zeros([NODES // 2], tl.int32)
    if tl.load(of + ITEM_USE * max_items) % 2 == 1:
        earlier = tl.load(pieces + TALL_PIECES * ENTRIES + token, mask=used, other=0)
    for begin in range(tl.load(of + ITEM_TILE * max_items), item, 32):  # parts of the same tile
        part = begin + tl.arange(0, 32)
        low = tl.load(items + ITEM_LOW * max_items + part, mask=part < item, other=BIG)
        high = tl.load(items + ITEM_HIGH * max_items + part, mask=part < item, other=0)
        holds = (low[None, :] <= entry[:, None]) & (entry[:, None] < high[None, :])
        earlier += tl.sum(holds.to(tl.int32), 1)
    slot = tl.minimum(first + earlier, max_slots - 1)
    direct = (several == 0) | merges
    fused = (several > 0) & merges
    tl.store(queries + at + i, token, mask=used)
    tl.store(slots + at + i, tl.where(direct, _DIRECT, slot), mask=used)
    tl.store(parts + 2 * (at + i), tl.where(fused, tl.minimum(first, slot), 0), mask=used)
    tl.store(parts + 2 * (at + i) + 1, tl.where(fused, slot, 0), mask=used)


@triton.jit
def _taken(k, nodes, rows, begin, end, low, source, ENTRIES: tl.constexpr):
    """Of nodes k, which of the runs [begin, end) are theirs and concern `source`: the first one, and how many."""
    subtile, subtile_entries = source
    used = k < 2 * rows
    packed = tl.load(nodes + NODE_ROWS * 2 * ENTRIES + k, mask=used, other=0)
    offset = tl.load(nodes + NODE_OFFSET * 2 * ENTRIES + k, mask=used, other=0)
    length = tl.load(nodes + NODE_RUNS * 2 * ENTRIES + k, mask=used, other=0)
    first = tl.maximum(offset, begin)
    count = tl.maximum(tl.minimum(offset + length, end) - first, 0)
    return first, tl.where(touching(packed & 255, packed >> 8, low, subtile, subtile_entries), count, 0)


@triton.jit
def _list_runs(
    at, source, begin, end, low, deal, lane, lanes, nodes, rows, entry_rows, table, runs, num_pages, table_stride,
    ENTRIES: tl.constexpr, NODES: tl.constexpr, RUN: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
    DEALT: tl.constexpr,
):  # fmt: skip
    """The runs [begin, end) of a tile that `source` = (subtile, entries of one) concern, every lanes-th block of them,
    to `at`. DEALT: out as deal = (subtiles, runs of a block, places to fill), the places left over with empty runs;
    without, all of the tile concern the source."""
    subtiles, block_runs, places = deal
    k = tl.arange(0, NODES)
    a, count = _taken(k, nodes, rows, begin, end, low, source, ENTRIES)
    ahead, total = a - begin, end - begin
    if DEALT:
        ahead, total = tl.zeros([NODES], tl.int32), tl.sum(count, 0)
        for others in range(0, 2 * rows, 16):
            its_a, its_count = _taken(others + tl.arange(0, 16), nodes, rows, begin, end, low, source, ENTRIES)
            ahead += tl.sum(tl.where(its_a[None, :] < a[:, None], its_count[None, :], 0), 1)
    for first in range(lane * BLOCK, places, lanes * BLOCK):
        x = first + tl.arange(0, BLOCK)
        match = (ahead[:, None] <= x[None, :]) & (x[None, :] < (ahead + count)[:, None])
        node = tl.sum(tl.where(match, k[:, None], 0), 0)  # over the first axis, which lies in registers
        run = begin + x  # of the tile
        if DEALT:
            run = x + tl.sum(tl.where(match, (a - ahead)[:, None], 0), 0)
        some = x < total
        its_rows = tl.load(nodes + NODE_ROWS * 2 * ENTRIES + node, mask=some, other=0)
        start = tl.load(nodes + NODE_START * 2 * ENTRIES + node, mask=some, other=0)
        stop = tl.load(nodes + NODE_END * 2 * ENTRIES + node, mask=some, other=0)
        run -= tl.load(nodes + NODE_OFFSET * 2 * ENTRIES + node, mask=some, other=0)  # of the node
        token = tl.where(run == 0, start, (start // RUN + run) * RUN)
        tokens = tl.minimum((token // RUN + 1) * RUN, stop) - token
        row = tl.load(entry_rows + (its_rows & 255), mask=some, other=0)
        page = tl.load(table + row.to(tl.int64) * table_stride + token // PAGE_SIZE, mask=some, other=0)
        page = tl.minimum(tl.maximum(page, 0), num_pages - 1)
        to = runs + 3 * (at + (x // block_runs * subtiles + source[0]) * block_runs + x % block_runs)
        write = x < places
        tl.store(to, tl.where(some, page * PAGE_SIZE + token % PAGE_SIZE, 0), mask=write)
        tl.store(to + 1, tl.where(some, its_rows - (low | low << 8) | tokens << 16, 0), mask=write)
        tl.store(to + 2, tl.where(some, token, 0), mask=write)


@triton.jit
def _list_merges(
    num_tokens, pieces, merge_queries, merge_ranges, counts, errors, max_merged, max_slots, num_kinds,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The query tokens whose pieces no item merges, and how many they are."""
    total, num_slots = 0, 0
    for begin in range(0, num_tokens, BLOCK):
        token = begin + tl.arange(0, BLOCK)
        count = several_pieces(pieces, token, token < num_tokens, ENTRIES)
        fused = tl.load(pieces + FUSED * ENTRIES + token, mask=token < num_tokens, other=1)
        first = num_slots + tl.cumsum(count, 0) - count
        left = ((count > 0) & (fused == 0)).to(tl.int32)
        at = total + tl.cumsum(left, 0) - left
        used = (left > 0) & (at < max_merged)
        tl.store(merge_queries + at, token, mask=used)
        tl.store(merge_ranges + 2 * at, tl.minimum(first, max_slots), mask=used)
        tl.store(merge_ranges + 2 * at + 1, tl.minimum(first + count, max_slots), mask=used)
        total += tl.sum(left, 0)
        num_slots += tl.sum(count, 0)
    flag(errors, tl.where(num_slots > max_slots, MANY_SLOTS, 0))
    tl.store(counts + 2 * num_kinds + 1, tl.minimum(total, max_merged))


@triton.jit
def _count_buckets(items, num_items, max_items, num_kinds, counts, BUCKETS: tl.constexpr, BLOCK: tl.constexpr):
    bucket = tl.arange(0, BUCKETS)
    total = tl.zeros([BUCKETS], tl.int32)
    for begin in range(0, num_items, BLOCK):
        item = begin + tl.arange(0, BLOCK)
        its_bucket = tl.load(items + ITEM_BUCKET * max_items + item, mask=item < num_items, other=BIG)
        total += tl.sum((its_bucket[None, :] < bucket[:, None]).to(tl.int32), 1)
    tl.store(counts + bucket, total, mask=bucket <= 2 * num_kinds)


@triton.jit(do_not_specialize=NUMBERS)
def lists_kernel(
    table, entry_token, entry_row, state, uses, nodes, items, pieces, errors,
    counts, plan_items, queries, slots, parts, merge_queries, merge_ranges, runs,  # the plan
    table_stride, num_pages, num_kinds, max_items, max_runs, max_queries, max_merged, max_slots,
    ENTRIES: tl.constexpr, NODES: tl.constexpr, BUCKETS: tl.constexpr, RUN: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr, RUN_BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """The plan's arrays. The last two programs list merges, and count. Of the others one an item, half of them at most,
    list queries; the rest list runs, where there are fewer items than programs several those of an item in turn."""
    in_turn(FOLLOWS, LEADS)
    num_items, num_tokens = tl.load(state + NUM_ITEMS), tl.load(state + NUM_TOKENS)
    program, both = tl.program_id(0), tl.num_programs(0) - 2
    if program == both:
        _list_merges(
            num_tokens, pieces, merge_queries, merge_ranges, counts, errors, max_merged, max_slots, num_kinds,
            ENTRIES, BLOCK,
        )  # fmt: skip
    if program == both + 1:
        _count_buckets(items, num_items, max_items, num_kinds, counts, BUCKETS, 128)
    list_queries = tl.minimum(num_items, both // 2)
    lists_runs = program < both - list_queries
    programs = tl.where(lists_runs, both - list_queries, tl.maximum(list_queries, 1))
    first = tl.where(lists_runs, program, program - (both - list_queries))
    lanes = tl.where(lists_runs, tl.maximum(programs // tl.maximum(num_items, 1), 1), 1)
    for task in range(first, tl.where(program < both, num_items * lanes, 0), programs):
        item, lane = task // lanes, task % lanes
        of = items + item
        low, high = tl.load(of + ITEM_LOW * max_items), tl.load(of + ITEM_HIGH * max_items)
        full, size = tl.load(of + ITEM_FULL * max_items), tl.load(of + ITEM_SIZE * max_items)
        bucket = tl.load(of + ITEM_BUCKET * max_items)
        at, query_at, place = _place(item, size, bucket, items, num_items, max_items, BLOCK)
        fits = (at + size <= max_runs) & (query_at + high - low <= max_queries)
        if not lists_runs:
            bits = tl.where(at + size > max_runs, MANY_RUNS, 0)
            flag(errors, bits | tl.where(query_at + high - low > max_queries, MANY_QUERIES, 0))
            to = plan_items + place * _ITEM
            tl.store(to, tl.where(fits, at, 0))
            tl.store(to + 1, tl.where(fits, at + full, 0))
            tl.store(to + 2, tl.where(fits, at + size, 0))
            tl.store(to + 3, tl.where(fits, query_at, 0))
            tl.store(to + 4, tl.where(fits, query_at + high - low, 0))
            _list_queries(
                item, query_at, tl.where(fits, high - low, 0), num_tokens, entry_token, items, pieces, queries, slots,
                parts, num_kinds, max_items, max_slots, ENTRIES, NODES,
            )  # fmt: skip
        elif fits:
            entry = tl.load(of + ITEM_ENTRY * max_items)
            its_nodes, rows = nodes + tl.load(of + ITEM_NODES * max_items), tl.load(of + ITEM_ROWS * max_items)
            begin, end = tl.load(of + ITEM_BEGIN * max_items), tl.load(of + ITEM_END * max_items)
            subtiles = tl.load(of + ITEM_SUBTILES * max_items)
            whole = tl.where(subtiles == 1, size, full)  # runs in the order of the tile
            _list_runs(
                at, (0, BIG), begin, begin + whole, low, (1, 1, whole), lane, lanes, its_nodes, rows,
                entry_row + entry, table, runs, num_pages, table_stride, ENTRIES, NODES, RUN, PAGE_SIZE, RUN_BLOCK,
                False,
            )  # fmt: skip
            if size > whole:
                use = uses + tl.load(of + ITEM_USE * max_items) * USE_COLUMNS
                entries = tl.load(use + USE_SUBTILE_ENTRIES)
                deal = (subtiles, tl.load(use + USE_SHAPE + PRIVATE_RUNS), (size - full) // subtiles)
                sharers = tl.maximum(lanes // subtiles, 1)  # of a subtile
                for share in range(lane, subtiles * sharers, lanes):
                    _list_runs(
                        at + full, (share % subtiles, entries), begin + full, end, low, deal, share // subtiles,
                        sharers, its_nodes, rows, entry_row + entry, table, runs, num_pages, table_stride,
                        ENTRIES, NODES, RUN, PAGE_SIZE, RUN_BLOCK, True,
                    )  # fmt: skip
