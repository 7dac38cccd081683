"""Planning on the device, first half: the order of the requests in the prefix forest, and the entries of their tokens.

Three launches give what `planner.forest` and `planner.tiles.make_entries` give. A cumulative hash of each row's pages
makes the number of columns that two rows share a search. Each row then hangs on the lowest row of those before it that
share the most columns with it. In the order of the forest a row is followed by the rows that hang on it, those that
share more columns first, of equals the lower; so what stands before a row is found on its path to the root. What
neighbours share is compared page by page: no KV is read for a hash's sake.
"""

import triton
import triton.language as tl

# Numbers of a batch, by argument: a launch is not compiled anew for them
NUMBERS = ("num_rows", "width", "table_stride", "row_tokens", "max_tokens", "max_query_len", "window")

BIG = tl.constexpr(1 << 30)  # more than any row, entry, token or run

# Bits of the sticky error word
BAD_QUERIES = tl.constexpr(1)  # query_start_loc is not ascending from 0, or a request has too many query tokens
LONG_SEQUENCE = tl.constexpr(2)  # a sequence is longer than the block table
BAD_PAGE = tl.constexpr(4)  # a page that a query sees is outside the cache
MANY_ITEMS = tl.constexpr(8)
MANY_RUNS = tl.constexpr(16)
MANY_QUERIES = tl.constexpr(32)
MANY_SLOTS = tl.constexpr(64)

# What a row hangs on, int64 in the order of siblings: row above | columns not shared with it | row
ABOVE = tl.constexpr(43)  # bits below
ROW_BITS = tl.constexpr(19)
ALL_ROWS = tl.constexpr((1 << 19) - 1)
ALL_COLUMNS = tl.constexpr((1 << 24) - 1)
ROOT = tl.constexpr(1 << 62)  # of the first row, which hangs on none

NUM_ENTRIES = tl.constexpr(0)  # places in `state`
NUM_TOKENS = tl.constexpr(1)  # one past the last query token
NUM_ITEMS = tl.constexpr(2)
STATE_FIELDS = tl.constexpr(3)


@triton.jit
def in_turn(FOLLOWS: tl.constexpr, LEADS: tl.constexpr):
    """LEADS: lets the next launch start early. FOLLOWS: waits until the one ahead, and so all before it, is over."""
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()


@triton.jit
def flag(errors, bits):
    """Sets bits of the sticky error word."""
    if bits != 0:
        tl.atomic_or(errors, bits)


@triton.jit
def lengths_of(row, batch):
    """(tokens, query tokens, one past its last query token) of a row or a vector of rows; a row that breaks a bound,
    or is none, has no query token. batch: seq_lens, query_start_loc, rows, tokens of a table row, most query tokens of
    the step and of a row."""
    seq_lens, query_start_loc, num_rows, row_tokens, max_tokens, max_query_len = batch
    inside = row < num_rows
    length = tl.load(seq_lens + row, mask=inside, other=0)
    length = tl.minimum(tl.maximum(length, 0), row_tokens)
    first = tl.load(query_start_loc + row, mask=inside, other=0)
    end = tl.load(query_start_loc + row + 1, mask=inside, other=0)
    queries = end - first
    valid = (first >= 0) & (first <= end) & (end <= max_tokens) & ((row > 0) | (first == 0))
    valid = valid & (queries <= length) & (queries <= max_query_len)
    return length, tl.where(valid, queries, 0), end


@triton.jit
def _count_batch(batch, state, ENTRIES: tl.constexpr, BLOCK: tl.constexpr):
    total, num_tokens = 0, 0
    for begin in range(0, batch[2], BLOCK):
        _length, queries, end = lengths_of(begin + tl.arange(0, BLOCK), batch)
        total += tl.sum(queries, 0)
        num_tokens = tl.maximum(num_tokens, tl.max(tl.where(queries > 0, end, 0), 0))
    tl.store(state + NUM_ENTRIES, tl.minimum(total, ENTRIES))
    tl.store(state + NUM_TOKENS, num_tokens)


@triton.jit(do_not_specialize=NUMBERS)
def hash_kernel(
    table, seq_lens, query_start_loc, hashes, pieces, totals, state, errors,
    num_rows, width, table_stride, max_tokens, max_query_len, num_pages, window,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, ENTRIES: tl.constexpr, TOTALS: tl.constexpr, BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """hashes [columns, ROWS] int64: equal where two rows have equal pages up to a column. One program a row, which also
    looks for values that break a bound; the last one counts the batch. pieces [3, ENTRIES] and
    totals [TOTALS] are set to zero."""
    in_turn(FOLLOWS, LEADS)
    row = tl.program_id(0)
    pages, column = table + row.to(tl.int64) * table_stride, tl.arange(0, BLOCK)
    page = tl.load(pages + column, mask=column < tl.where(row < num_rows, width, 0), other=0)  # as yet without a length
    batch = (seq_lens, query_start_loc, num_rows, width * PAGE_SIZE, max_tokens, max_query_len)
    for begin in range(row * BLOCK, 3 * ENTRIES, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(pieces + at, tl.zeros([BLOCK], tl.int32), mask=at < 3 * ENTRIES)
    if row == ROWS:
        _count_batch(batch, state, ENTRIES, BLOCK)
        for begin in range(0, TOTALS, BLOCK):
            at = begin + tl.arange(0, BLOCK)
            tl.store(totals + at, tl.zeros([BLOCK], tl.int64), mask=at < TOTALS)
    length, queries, end = lengths_of(row, batch)
    if row < num_rows:
        first = tl.load(query_start_loc + row)
        asked = end - first
        bits = tl.where((asked != queries) | ((row == 0) & (first != 0)), BAD_QUERIES, 0)
        too_long = (asked > 0) & (tl.load(seq_lens + row) > width * PAGE_SIZE)
        outside = tl.zeros([BLOCK], tl.int32)
        if queries > 0:
            seen_from = length - queries + 1 - window  # the first token that its first query sees
            carry = tl.zeros([], tl.int64)
            columns = tl.cdiv(length, PAGE_SIZE)
            for begin in range(0, columns, BLOCK):
                used = column < columns
                page = tl.where(used, page, 0)
                seen = used & ((column + 1) * PAGE_SIZE > seen_from)
                outside |= (seen & ((page < 0) | (page >= num_pages))).to(tl.int32)
                mixed = page.to(tl.uint32).to(tl.uint64) | column.to(tl.uint64) << 32  # splitmix64's last steps
                mixed += 0x9E3779B97F4A7C15
                mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9
                mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB
                mixed = (mixed ^ mixed >> 31).to(tl.int64)
                to, column = hashes + column.to(tl.int64) * ROWS + row, column + BLOCK
                page = tl.load(pages + column, mask=column < columns, other=0)
                tl.store(to, tl.cumsum(mixed, 0) + carry, mask=used)
                if begin + BLOCK < columns:
                    carry += tl.sum(mixed, 0)
        bad_page = tl.max(outside, 0) > 0
        flag(errors, bits | tl.where(too_long, LONG_SEQUENCE, 0) | tl.where(bad_page, BAD_PAGE, 0))


@triton.jit
def _columns_shared(row, other, bound, hashes, ROWS: tl.constexpr, ROUNDS: tl.constexpr, RADIX: tl.constexpr):
    """Leading columns, at most `bound`, that a row shares with others; each round of the search leaves one part of
    RADIX, and looks at all of their ends at once."""
    same = tl.zeros_like(bound)
    stride = RADIX ** (ROUNDS - 1)
    for _round in tl.static_range(ROUNDS):
        matches = tl.zeros_like(bound)
        for nth in tl.static_range(1, RADIX):
            probe = same + nth * stride
            column = hashes + (probe - 1).to(tl.int64) * ROWS
            mine = tl.load(column + row, mask=probe <= bound, other=0)
            theirs = tl.load(column + other, mask=probe <= bound, other=1)
            matches += ((probe <= bound) & (mine == theirs)).to(tl.int32)
        same += matches * stride
        stride = stride // RADIX
    return same


@triton.jit(do_not_specialize=NUMBERS)
def hang_kernel(
    seq_lens, query_start_loc, hashes, hangs, family,
    num_rows, width, max_tokens, max_query_len,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr, RADIX: tl.constexpr, BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """One program a row. hangs [rows] int64: what it hangs on, -1 without queries. family [rows] int32: query tokens of
    the rows below it and its own; they are the rows that share more columns with it than the row above."""
    row = tl.program_id(0)
    batch = (seq_lens, query_start_loc, num_rows, width * PAGE_SIZE, max_tokens, max_query_len)
    length, queries, _end = lengths_of(row, batch)
    other = tl.arange(0, BLOCK)
    other_length, other_queries, _other_end = lengths_of(other, batch)
    in_turn(FOLLOWS, LEADS)  # the batch was there before
    if queries > 0:
        common, above, tokens = tl.full([], -1, tl.int32), tl.full([], BIG, tl.int32), queries
        for begin in range(0, num_rows, BLOCK):
            bound = tl.where(other_queries > 0, tl.minimum(length, other_length) // PAGE_SIZE, -1)
            if begin < row:
                before = tl.where(other < row, bound, -1)
                same = _columns_shared(row, other, before, hashes, ROWS, ROUNDS, RADIX)
                same = tl.where(before >= 0, same, -1)
                most = tl.max(same, 0)
                above = tl.where(most > common, tl.min(tl.where(same == most, other, BIG), 0), above)
                common = tl.maximum(most, common)
            below = (other > row) & (tl.where(common < 0, -1, bound) > common)  # may be
            column = hashes + tl.maximum(common, 0).to(tl.int64) * ROWS
            mine = tl.load(column + row, mask=common < length // PAGE_SIZE, other=0)
            theirs = tl.load(column + other, mask=below, other=1)
            tokens += tl.sum(tl.where(below & (mine == theirs), other_queries, 0), 0)
            other += BLOCK
            other_length, other_queries, _other_end = lengths_of(other, batch)
        hang = above.to(tl.int64) << ABOVE | (common ^ ALL_COLUMNS).to(tl.int64) << ROW_BITS | row
        tl.store(hangs + row, tl.where(common < 0, ROOT, hang))
        tl.store(family + row, tokens)
    elif row < num_rows:
        tl.store(hangs + row, tl.full([], -1, tl.int64))


@triton.jit
def _sum_and_maximum(sum_a, most_a, sum_b, most_b):
    """One reduction waits for the program's warps once."""
    return sum_a + sum_b, tl.maximum(most_a, most_b)


@triton.jit
def _siblings(hang, hangs, family, num_rows, BLOCK: tl.constexpr):
    """Of the rows that hang on the same row and stand before one: query tokens of their families, and what the last one
    hangs on; 0 and -1 if there is none."""
    tokens, last = tl.zeros([BLOCK], tl.int32), tl.full([BLOCK], -1, tl.int64)
    for begin in range(0, num_rows, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        its_hang = tl.load(hangs + other, mask=other < num_rows, other=-1)
        its_family = tl.load(family + other, mask=other < num_rows, other=0)
        ahead = (its_hang >= hang >> ABOVE << ABOVE) & (its_hang < hang)
        tokens += tl.where(ahead, its_family, 0)
        last = tl.maximum(last, tl.where(ahead, its_hang, -1))
    return tl.reduce((tokens, last), 0, _sum_and_maximum)


@triton.jit
def place_of(hang, query_start_loc, hangs, family, num_rows, BLOCK: tl.constexpr):
    """(query tokens of the rows before a row in the order of the forest, the row right before it)."""
    first, last, up = 0, tl.full([], -1, tl.int64), hang
    while up < ROOT:  # to the first row
        above = up >> ABOVE
        then = tl.load(hangs + above)  # under way while the siblings are
        own = tl.load(query_start_loc + above + 1) - tl.load(query_start_loc + above)
        tokens, its_last = _siblings(up, hangs, family, num_rows, BLOCK)
        first += tokens + own
        last = tl.where(up == hang, its_last, last)
        up = then
    previous = hang >> ABOVE
    while last >= 0:  # to the last row below it
        previous = last & ALL_ROWS
        _, last = _siblings((previous + 1 << ABOVE) - 1, hangs, family, num_rows, BLOCK)
    return first, previous


@triton.jit
def _shared_columns(table, row_a, row_b, bound, table_stride, BLOCK: tl.constexpr):
    """Leading columns in which two rows have equal pages, at most `bound`."""
    same = bound
    for begin in range(0, bound, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        a = tl.load(table + row_a.to(tl.int64) * table_stride + column, mask=column < bound, other=0)
        b = tl.load(table + row_b.to(tl.int64) * table_stride + column, mask=column < bound, other=0)
        same = tl.minimum(same, tl.min(tl.where(a != b, column, BIG), 0))
    return same


@triton.jit(do_not_specialize=NUMBERS)
def entries_kernel(
    table, seq_lens, query_start_loc, hangs, family,
    entry_token, entry_position, entry_row, entry_length, entry_shared, positions,
    num_rows, width, table_stride, max_tokens, max_query_len,
    PAGE_SIZE: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """One program a row: its entries. entry_shared: tokens shared with the entry before; entry_length: of the sequence.
    positions [tokens] is the plan's."""
    row = tl.program_id(0)
    batch = (seq_lens, query_start_loc, num_rows, width * PAGE_SIZE, max_tokens, max_query_len)
    length, queries, end = lengths_of(row, batch)
    in_turn(FOLLOWS, LEADS)
    if queries > 0:
        hang = tl.load(hangs + row)
        first, previous = place_of(hang, query_start_loc, hangs, family, num_rows, BLOCK)
        common = tl.where(hang < ROOT, ~hang >> ROW_BITS & ALL_COLUMNS, 0).to(tl.int32)
        previous_length, _, _ = lengths_of(previous, batch)
        shared = _shared_columns(table, previous, row, common, table_stride, COLUMNS)
        shared = tl.minimum(shared, previous_length // PAGE_SIZE) * PAGE_SIZE
        for begin in range(0, queries, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            token, at = end - queries + i, first + i
            used = (i < queries) & (at < ENTRIES)
            tl.store(entry_token + at, token, mask=used)
            tl.store(entry_position + at, length - queries + i, mask=used)
            tl.store(entry_row + at, tl.full([BLOCK], 0, tl.int32) + row, mask=used)
            tl.store(entry_length + at, tl.full([BLOCK], 0, tl.int32) + length, mask=used)
            tl.store(entry_shared + at, tl.where(i == 0, shared, length), mask=used)
            tl.store(positions + token, length - queries + i, mask=used)
