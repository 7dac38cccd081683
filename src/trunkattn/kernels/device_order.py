"""Planning on the device, first half: the order of the requests in the prefix forest, and the entries of their tokens.

Five launches give what `planner.forest` and `planner.tiles.make_entries` give. A cumulative hash of each row's pages
makes the number of columns that two rows share a search; from those numbers each row counts the rows that stand before
it. What neighbours share is then compared page by page: no KV is read for a hash's sake.
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

NUM_ENTRIES = tl.constexpr(0)  # places in `state`
NUM_TOKENS = tl.constexpr(1)  # one past the last query token


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


@triton.jit(do_not_specialize=NUMBERS)
def hash_kernel(
    table, seq_lens, query_start_loc, hashes, errors,
    num_rows, width, table_stride, max_tokens, max_query_len, num_pages, window,
    PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """hashes [rows, WIDTH] int64: equal where two rows have equal pages up to a column. One program a row, which also
    looks for values that break a bound."""
    in_turn(FOLLOWS, LEADS)
    row = tl.program_id(0)
    batch = (seq_lens, query_start_loc, num_rows, width * PAGE_SIZE, max_tokens, max_query_len)
    length, queries, end = lengths_of(row, batch)
    if row < num_rows:
        first = tl.load(query_start_loc + row)
        asked = end - first
        bits = tl.where((asked != queries) | ((row == 0) & (first != 0)), BAD_QUERIES, 0)
        too_long = (asked > 0) & (tl.load(seq_lens + row) > width * PAGE_SIZE)
        bad_page = 0
        if queries > 0:
            seen_from = length - queries + 1 - window  # the first token that its first query sees
            carry = tl.zeros([], tl.int64)
            for begin in range(0, tl.cdiv(length, PAGE_SIZE), BLOCK):
                column = begin + tl.arange(0, BLOCK)
                used = column < tl.cdiv(length, PAGE_SIZE)
                page = tl.load(table + row.to(tl.int64) * table_stride + column, mask=used, other=0)
                outside = used & ((page < 0) | (page >= num_pages)) & ((column + 1) * PAGE_SIZE > seen_from)
                bad_page = tl.maximum(bad_page, tl.max(outside.to(tl.int32), 0))
                mixed = page.to(tl.uint32).to(tl.uint64) | column.to(tl.uint64) << 32  # splitmix64's last steps
                mixed += 0x9E3779B97F4A7C15
                mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9
                mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB
                mixed = (mixed ^ mixed >> 31).to(tl.int64)
                tl.store(hashes + row.to(tl.int64) * WIDTH + column, tl.cumsum(mixed, 0) + carry, mask=used)
                carry += tl.sum(mixed, 0)
        flag(errors, bits | tl.where(too_long, LONG_SEQUENCE, 0) | tl.where(bad_page > 0, BAD_PAGE, 0))


@triton.jit(do_not_specialize=NUMBERS)
def shared_kernel(
    seq_lens, query_start_loc, hashes, shared,
    num_rows, width, max_tokens, max_query_len,
    PAGE_SIZE: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, ROUNDS: tl.constexpr, BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """shared [rows, ROWS]: columns that a row shares with each other; -1 for rows without queries. One program for a
    row and a block of others, for those that are not before it; a search that looks at three columns at once."""
    in_turn(FOLLOWS, LEADS)
    row = tl.program_id(0)
    batch = (seq_lens, query_start_loc, num_rows, width * PAGE_SIZE, max_tokens, max_query_len)
    other = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if (row < num_rows) & ((tl.program_id(1) + 1) * BLOCK > row):
        length, queries, _end = lengths_of(row, batch)
        other_length, other_queries, _other_end = lengths_of(other, batch)
        used_rows = (queries > 0) & (other_queries > 0) & (other > row)
        mine = row.to(tl.int64)
        bound = tl.where(used_rows, tl.minimum(length, other_length) // PAGE_SIZE, 0)
        same = tl.zeros([BLOCK], tl.int32)
        stride = 4 ** (ROUNDS - 1)
        for _round in tl.static_range(ROUNDS):
            probe = same[:, None] + (1 + tl.arange(0, 4))[None, :] * stride
            used = (probe <= bound[:, None]) & (tl.arange(0, 4) < 3)[None, :]
            a = tl.load(hashes + mine * WIDTH + probe - 1, mask=used, other=0)
            b = tl.load(hashes + other.to(tl.int64)[:, None] * WIDTH + probe - 1, mask=used, other=1)
            same += tl.sum((used & (a == b)).to(tl.int32), 1) * stride
            stride = stride // 4
        same = tl.where((queries > 0) & (other_queries > 0), tl.where(other == row, BIG, same), -1)
        later = (other >= row) & (other < num_rows)
        tl.store(shared + mine * ROWS + other, same, mask=later)
        tl.store(shared + other.to(tl.int64) * ROWS + row, same, mask=later)


@triton.jit(do_not_specialize=NUMBERS)
def branch_kernel(
    seq_lens, query_start_loc, shared, branch,
    num_rows, width, max_tokens, max_query_len,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, OTHERS: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """branch [rows, ROWS]: the lowest row of the branch that holds a row, where it parts from the other. One program
    for a row and a block of others."""
    in_turn(FOLLOWS, LEADS)
    row = tl.program_id(0)
    batch = (seq_lens, query_start_loc, num_rows, width * PAGE_SIZE, max_tokens, max_query_len)
    _length, queries, _end = lengths_of(row, batch)
    if queries > 0:
        own = row.to(tl.int64) * ROWS
        other = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        common = tl.load(shared + own + other, mask=other < num_rows, other=BIG)
        lowest = tl.full([BLOCK], BIG, tl.int32)
        for begin in range(0, num_rows, OTHERS):
            third = begin + tl.arange(0, OTHERS)
            near = tl.load(shared + own + third, mask=third < num_rows, other=-1)
            closer = near[:, None] > common[None, :]  # reduced over the first axis, which lies in registers
            lowest = tl.minimum(lowest, tl.min(tl.where(closer, third[:, None], BIG), 0))
        tl.store(branch + own + other, tl.minimum(lowest, row), mask=other < num_rows)


@triton.jit(do_not_specialize=NUMBERS)
def rank_kernel(
    seq_lens, query_start_loc, shared, branch, rank, order,
    num_rows, width, max_tokens, max_query_len,
    PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """One program a row: its place among the rows with queries, BIG without; order: the row of each place."""
    in_turn(FOLLOWS, LEADS)
    row = tl.program_id(0)
    batch = (seq_lens, query_start_loc, num_rows, width * PAGE_SIZE, max_tokens, max_query_len)
    _, queries, _ = lengths_of(row, batch)
    mine = row.to(tl.int64)
    before = BIG
    if queries > 0:
        before = 0
        for begin in range(0, num_rows, BLOCK):
            other = begin + tl.arange(0, BLOCK)
            common = tl.load(shared + mine * ROWS + other, mask=other < num_rows, other=-1)
            used = (common >= 0) & (other != row)
            theirs = tl.load(branch + other.to(tl.int64) * ROWS + mine, mask=used, other=BIG)
            own = tl.load(branch + mine * ROWS + other, mask=used, other=0)
            before += tl.sum((theirs < own).to(tl.int32), 0)
        tl.store(order + before, row)
    tl.store(rank + row, before)


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
    table, seq_lens, query_start_loc, rank, order,
    entry_token, entry_position, entry_row, entry_length, entry_shared, positions, pieces, state,
    num_rows, width, table_stride, max_tokens, max_query_len,
    PAGE_SIZE: tl.constexpr, ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """One program a place in the order: the entries of its row. entry_shared: tokens shared with the entry before;
    entry_length: of the sequence. positions [tokens] is the plan's; pieces [3, ENTRIES] is set to zero."""
    in_turn(FOLLOWS, LEADS)
    place = tl.program_id(0)
    batch = (seq_lens, query_start_loc, num_rows, width * PAGE_SIZE, max_tokens, max_query_len)
    for begin in range(place * BLOCK, 3 * ENTRIES, tl.num_programs(0) * BLOCK):
        at = begin + tl.arange(0, BLOCK)
        tl.store(pieces + at, tl.zeros([BLOCK], tl.int32), mask=at < 3 * ENTRIES)
    first, total, num_active, num_tokens = 0, 0, 0, 0
    for begin in range(0, num_rows, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        _length, its_queries, its_end = lengths_of(other, batch)
        ahead = tl.load(rank + other, mask=other < num_rows, other=BIG) < place
        first += tl.sum(tl.where(ahead, its_queries, 0), 0)
        total += tl.sum(its_queries, 0)
        num_active += tl.sum((its_queries > 0).to(tl.int32), 0)
        num_tokens = tl.maximum(num_tokens, tl.max(tl.where(its_queries > 0, its_end, 0), 0))
    if place == 0:
        tl.store(state + NUM_ENTRIES, tl.minimum(total, ENTRIES))
        tl.store(state + NUM_TOKENS, num_tokens)
    if place < num_active:
        row = tl.load(order + place)
        length, queries, end = lengths_of(row, batch)
        shared = 0
        if place > 0:
            previous = tl.load(order + place - 1)
            previous_length, _, _ = lengths_of(previous, batch)
            bound = tl.minimum(length, previous_length) // PAGE_SIZE
            shared = _shared_columns(table, previous, row, bound, table_stride, BLOCK) * PAGE_SIZE
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
