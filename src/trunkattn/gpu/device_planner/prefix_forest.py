"""Planning on the device, first step: the order of the requests in the prefix forest, and the entries of their tokens.

Three launches give what `planner.prefix_forest` and `planner.tiles.layout.make_entries` give. A cumulative hash of
each row's pages makes the number of columns that two rows share a search. A row's parent is the lowest row of those
before it that share the most columns with it. In the order of the forest a row is followed by its children, those that
share more columns first, of equals the lower; so what stands before a row is found on its path to the root. What
neighbours share is compared page by page: no KV is read for a hash's sake.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trunkattn.gpu.device_planner.common import (
    BAD_PAGE,
    BAD_QUERIES,
    BIG,
    LONG_SEQUENCE,
    NUM_PARTIALS,
    NUMBERS,
    counts_of,
    flag,
    trigger_and_wait,
)

# A row's link is one int64, in the order of siblings: parent | columns not shared with it | row
PARENT_SHIFT = tl.constexpr(43)
ROW_BITS = tl.constexpr(19)
ALL_ROWS = tl.constexpr((1 << 19) - 1)
ALL_COLUMNS = tl.constexpr((1 << 24) - 1)
ROOT = tl.constexpr(1 << 62)  # the link of the first row, which has no parent


class Bounds(NamedTuple):
    """The bounds that a batch must keep."""

    num_rows: Any
    num_columns: Any  # of the block table that are looked at
    max_query_len: Any


class Links(NamedTuple):
    """Arrays by row. `link` is int64, and -1 for a row without queries. `subtree_queries` counts the query tokens of a
    row and of those below it."""

    link: Any
    subtree_queries: Any


class Request(NamedTuple):
    """A row, or a vector of rows."""

    length: Any  # tokens
    queries: Any  # query tokens
    end: Any  # one past its last query token


@triton.jit
def load_request(row, tables, bounds, SIZES: tl.constexpr):
    """A row that breaks a bound, or is none, has no query token."""
    inside = row < bounds.num_rows
    length = tl.load(tables.seq_lens + row, mask=inside, other=0)
    length = tl.minimum(tl.maximum(length, 0), bounds.num_columns * SIZES.page_size)
    first = tl.load(tables.query_start_loc + row, mask=inside, other=0)
    end = tl.load(tables.query_start_loc + row + 1, mask=inside, other=0)
    queries = end - first
    valid = (first >= 0) & (first <= end) & (end <= SIZES.tokens) & ((row > 0) | (first == 0))
    valid = valid & (queries <= length) & (queries <= bounds.max_query_len)
    return Request(length, tl.where(valid, queries, 0), end)


@triton.jit
def _count_batch(tables, bounds, status, SIZES: tl.constexpr):
    total, num_tokens = 0, 0
    for begin in range(0, bounds.num_rows, SIZES.hashed):
        request = load_request(begin + tl.arange(0, SIZES.hashed), tables, bounds, SIZES)
        total += tl.sum(request.queries, 0)
        num_tokens = tl.maximum(num_tokens, tl.max(tl.where(request.queries > 0, request.end, 0), 0))
    counts = counts_of(status)
    tl.store(counts.num_entries, tl.minimum(total, SIZES.tokens))
    tl.store(counts.num_tokens, num_tokens)


@triton.jit
def _mixed(page, column):
    """Returns a page and its column as a random int64, by the last steps of splitmix64."""
    mixed = page.to(tl.uint32).to(tl.uint64) | column.to(tl.uint64) << 32
    mixed += 0x9E3779B97F4A7C15
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB
    return (mixed ^ mixed >> 31).to(tl.int64)


@triton.jit(do_not_specialize=NUMBERS)
def hash_kernel(
    tables,
    num_rows,
    num_columns,
    row_stride,
    window,
    hashes,
    partials,
    totals,
    status,
    limits,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Stores hashes [columns, rows] int64, which are equal where two rows have equal pages up to a column. One CTA
    hashes each row and also looks for values that break a bound. The last CTA counts the batch. The kernel sets
    `partials` and `totals` to zero."""
    trigger_and_wait(PDL)
    row = tl.program_id(0)
    HASHED: tl.constexpr = SIZES.hashed
    bounds = Bounds(num_rows, num_columns, limits.max_query_len)
    pages, column = tables.block_table + row.to(tl.int64) * row_stride, tl.arange(0, HASHED)
    # The first pages are loaded before the length is there.
    page = tl.load(pages + column, mask=column < tl.where(row < num_rows, num_columns, 0), other=0)
    for begin in range(row * HASHED, NUM_PARTIALS * SIZES.tokens, tl.num_programs(0) * HASHED):
        at = begin + tl.arange(0, HASHED)
        tl.store(partials + at, tl.zeros([HASHED], tl.int32), mask=at < NUM_PARTIALS * SIZES.tokens)
    if row == SIZES.rows:
        _count_batch(tables, bounds, status, SIZES)
        for begin in range(0, SIZES.totals, HASHED):
            at = begin + tl.arange(0, HASHED)
            tl.store(totals + at, tl.zeros([HASHED], tl.int64), mask=at < SIZES.totals)
    request = load_request(row, tables, bounds, SIZES)
    if row < num_rows:
        first = tl.load(tables.query_start_loc + row)
        asked = request.end - first
        bits = tl.where((asked != request.queries) | ((row == 0) & (first != 0)), BAD_QUERIES, 0)
        too_long = (asked > 0) & (tl.load(tables.seq_lens + row) > num_columns * SIZES.page_size)
        outside = tl.zeros([HASHED], tl.int32)
        if request.queries > 0:
            seen_from = request.length - request.queries + 1 - window  # first token that its first query sees
            carry = tl.zeros([], tl.int64)
            columns = tl.cdiv(request.length, SIZES.page_size)
            for begin in range(0, columns, HASHED):
                used = column < columns
                page = tl.where(used, page, 0)
                seen = used & ((column + 1) * SIZES.page_size > seen_from)
                outside |= (seen & ((page < 0) | (page >= limits.num_pages))).to(tl.int32)
                mixed = _mixed(page, column)
                to, column = hashes + column.to(tl.int64) * SIZES.rows + row, column + HASHED
                page = tl.load(pages + column, mask=column < columns, other=0)
                tl.store(to, tl.cumsum(mixed, 0) + carry, mask=used)
                if begin + HASHED < columns:
                    carry += tl.sum(mixed, 0)
        bad_page = tl.max(outside, 0) > 0
        flag(status, bits | tl.where(too_long, LONG_SEQUENCE, 0) | tl.where(bad_page, BAD_PAGE, 0))


@triton.jit
def _columns_shared(row, other, bound, hashes, SIZES: tl.constexpr):
    """Returns how many leading columns, at most `bound`, a row shares with others. Each round of the search leaves one
    of `radix` parts, and looks at all of their ends at once."""
    RADIX: tl.constexpr = SIZES.radix
    ROUNDS: tl.constexpr = SIZES.rounds
    same = tl.zeros_like(bound)
    stride = RADIX ** (ROUNDS - 1)
    for _round in tl.static_range(ROUNDS):
        matches = tl.zeros_like(bound)
        for nth in tl.static_range(1, RADIX):
            probe = same + nth * stride
            column = hashes + (probe - 1).to(tl.int64) * SIZES.rows
            mine = tl.load(column + row, mask=probe <= bound, other=0)
            theirs = tl.load(column + other, mask=probe <= bound, other=1)
            matches += ((probe <= bound) & (mine == theirs)).to(tl.int32)
        same += matches * stride
        stride = stride // RADIX
    return same


@triton.jit(do_not_specialize=NUMBERS)
def links_kernel(tables, num_rows, num_columns, hashes, links, limits, SIZES: tl.constexpr, PDL: tl.constexpr):
    """Finds the links of the rows, with one CTA for each. The rows below a row are those that share more columns with
    it than it shares with its parent."""
    row = tl.program_id(0)
    bounds = Bounds(num_rows, num_columns, limits.max_query_len)
    request = load_request(row, tables, bounds, SIZES)
    other = tl.arange(0, SIZES.pairs)
    others = load_request(other, tables, bounds, SIZES)
    trigger_and_wait(PDL)  # the batch was there before
    if request.queries > 0:
        common, parent, tokens = tl.full([], -1, tl.int32), tl.full([], BIG, tl.int32), request.queries
        for begin in range(0, num_rows, SIZES.pairs):
            bound = tl.minimum(request.length, others.length) // SIZES.page_size
            bound = tl.where(others.queries > 0, bound, -1)
            if begin < row:
                before = tl.where(other < row, bound, -1)
                same = _columns_shared(row, other, before, hashes, SIZES)
                same = tl.where(before >= 0, same, -1)
                most = tl.max(same, 0)
                parent = tl.where(most > common, tl.min(tl.where(same == most, other, BIG), 0), parent)
                common = tl.maximum(most, common)
            maybe_below = (other > row) & (tl.where(common < 0, -1, bound) > common)
            column = hashes + tl.maximum(common, 0).to(tl.int64) * SIZES.rows
            mine = tl.load(column + row, mask=common < request.length // SIZES.page_size, other=0)
            theirs = tl.load(column + other, mask=maybe_below, other=1)
            tokens += tl.sum(tl.where(maybe_below & (mine == theirs), others.queries, 0), 0)
            other += SIZES.pairs
            others = load_request(other, tables, bounds, SIZES)
        link = parent.to(tl.int64) << PARENT_SHIFT | (common ^ ALL_COLUMNS).to(tl.int64) << ROW_BITS | row
        tl.store(links.link + row, tl.where(common < 0, ROOT, link))
        tl.store(links.subtree_queries + row, tokens)
    elif row < num_rows:
        tl.store(links.link + row, tl.full([], -1, tl.int64))


@triton.jit
def _sum_and_maximum(sum_a, most_a, sum_b, most_b):
    """Combines two sums and two maxima, so that one reduction finds both and waits for the CTA's warps only once."""
    return sum_a + sum_b, tl.maximum(most_a, most_b)


@triton.jit
def _siblings(link, links, num_rows, BLOCK: tl.constexpr):
    """Returns what is known of the siblings that stand before a row: the query tokens of their subtrees, and the last
    one's link. They are 0 and -1 if there are no such siblings."""
    tokens, last = tl.zeros([BLOCK], tl.int32), tl.full([BLOCK], -1, tl.int64)
    for begin in range(0, num_rows, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        its_link = tl.load(links.link + other, mask=other < num_rows, other=-1)
        its_queries = tl.load(links.subtree_queries + other, mask=other < num_rows, other=0)
        ahead = (its_link >= link >> PARENT_SHIFT << PARENT_SHIFT) & (its_link < link)
        tokens += tl.where(ahead, its_queries, 0)
        last = tl.maximum(last, tl.where(ahead, its_link, -1))
    return tl.reduce((tokens, last), 0, _sum_and_maximum)


@triton.jit
def place_of(link, query_start_loc, links, num_rows, BLOCK: tl.constexpr):
    """Returns how many query tokens the rows before a row have in the order of the forest, and the row right before
    it."""
    first, last, up = 0, tl.full([], -1, tl.int64), link
    while up < ROOT:  # to the first row
        parent = up >> PARENT_SHIFT
        then = tl.load(links.link + parent)  # under way while the siblings are
        own = tl.load(query_start_loc + parent + 1) - tl.load(query_start_loc + parent)
        tokens, its_last = _siblings(up, links, num_rows, BLOCK)
        first += tokens + own
        last = tl.where(up == link, its_last, last)
        up = then
    previous = link >> PARENT_SHIFT
    while last >= 0:  # to the last row below it
        previous = last & ALL_ROWS
        _, last = _siblings((previous + 1 << PARENT_SHIFT) - 1, links, num_rows, BLOCK)
    return first, previous


@triton.jit
def _equal_columns(tables, row_a, row_b, bound, row_stride, BLOCK: tl.constexpr):
    """Returns in how many leading columns, at most `bound`, two rows have equal pages."""
    same = bound
    for begin in range(0, bound, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        a = tl.load(tables.block_table + row_a.to(tl.int64) * row_stride + column, mask=column < bound, other=0)
        b = tl.load(tables.block_table + row_b.to(tl.int64) * row_stride + column, mask=column < bound, other=0)
        same = tl.minimum(same, tl.min(tl.where(a != b, column, BIG), 0))
    return same


@triton.jit(do_not_specialize=NUMBERS)
def entries_kernel(
    tables,
    num_rows,
    num_columns,
    row_stride,
    links,
    entries,
    positions,
    limits,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes the entries of the rows, with one CTA for each. `positions` [tokens] is the plan's array."""
    row = tl.program_id(0)
    bounds = Bounds(num_rows, num_columns, limits.max_query_len)
    request = load_request(row, tables, bounds, SIZES)
    trigger_and_wait(PDL)
    ROW_BLOCK: tl.constexpr = SIZES.row_block
    if request.queries > 0:
        link = tl.load(links.link + row)
        first, previous = place_of(link, tables.query_start_loc, links, num_rows, ROW_BLOCK)
        common = tl.where(link < ROOT, ~link >> ROW_BITS & ALL_COLUMNS, 0).to(tl.int32)
        before = load_request(previous, tables, bounds, SIZES)
        shared = _equal_columns(tables, previous, row, common, row_stride, SIZES.column_block)
        shared = tl.minimum(shared, before.length // SIZES.page_size) * SIZES.page_size
        for begin in range(0, request.queries, ROW_BLOCK):
            i = begin + tl.arange(0, ROW_BLOCK)
            token, at = request.end - request.queries + i, first + i
            position = request.length - request.queries + i
            used = (i < request.queries) & (at < SIZES.tokens)
            tl.store(entries.token + at, token, mask=used)
            tl.store(entries.position + at, position, mask=used)
            tl.store(entries.row + at, tl.full([ROW_BLOCK], 0, tl.int32) + row, mask=used)
            tl.store(entries.length + at, tl.full([ROW_BLOCK], 0, tl.int32) + request.length, mask=used)
            tl.store(entries.shared + at, tl.where(i == 0, shared, request.length), mask=used)
            tl.store(positions + token, position, mask=used)
