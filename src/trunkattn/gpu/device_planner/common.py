"""Constants and records that the kernels of the device planner share, and how one launch waits for another."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trunkattn.planner import work_list

BIG = tl.constexpr(1 << 30)  # more than any row, entry, token or segment

# What the numbers in a plan's arrays mean is defined in `planner.work_list`.
DIRECT = tl.constexpr(work_list.DIRECT)
ITEM_COLUMNS = tl.constexpr(work_list.ITEM_COLUMNS)
QUERY_START, QUERY_END = tl.constexpr(work_list.QUERY_START), tl.constexpr(work_list.QUERY_END)
SEGMENT_START = tl.constexpr(work_list.SEGMENT_START)
SEGMENT_SHARED_END = tl.constexpr(work_list.SEGMENT_SHARED_END)
SEGMENT_END = tl.constexpr(work_list.SEGMENT_END)
SEGMENT_PLACE = tl.constexpr(work_list.SEGMENT_PLACE)
SEGMENT_QUERIES = tl.constexpr(work_list.SEGMENT_QUERIES)
SEGMENT_POSITION = tl.constexpr(work_list.SEGMENT_POSITION)
SEGMENT_COLUMNS = tl.constexpr(work_list.SEGMENT_COLUMNS)

# These are the bits of the sticky error word.
BAD_QUERIES = tl.constexpr(1)  # query_start_loc is not ascending from 0, or a request has too many query tokens
LONG_SEQUENCE = tl.constexpr(2)  # a sequence is longer than the block table
BAD_PAGE = tl.constexpr(4)  # a page that a query sees is outside the cache
MANY_ITEMS = tl.constexpr(8)
MANY_SEGMENTS = tl.constexpr(16)
MANY_QUERIES = tl.constexpr(32)
MANY_SLOTS = tl.constexpr(64)

# What `GpuPlan.summary` holds
SUMMARY_CANDIDATE = tl.constexpr(0)  # the number of the chosen one
SUMMARY_READ = tl.constexpr(1)  # KV tokens that the tiles read
SUMMARY_UNSHARED = tl.constexpr(2)  # KV tokens that are read if every request reads its own

NUM_PARTIALS = tl.constexpr(3)  # arrays of `partials`; see `items.PartialArrays`

# Parameters that change from batch to batch. Triton does not specialize on their values (`do_not_specialize`), which
# works only for numbers that are not in a tuple.
NUMBERS = ("num_rows", "num_columns", "row_stride", "window")


class Tables(NamedTuple):
    """The caller's tensors, all int32."""

    block_table: Any
    seq_lens: Any
    query_start_loc: Any


class Limits(NamedTuple):
    """Sizes of the cache, of a request and of a plan's arrays."""

    num_pages: Any
    max_query_len: Any
    items: Any
    segments: Any
    queries: Any
    merged: Any  # query tokens whose partial results no item merges
    slots: Any


class Sizes(NamedTuple):
    """Constants of the kernels. Sizes of vectors are powers of two."""

    rows: int
    tokens: int  # query tokens, and entries
    page_size: int
    segment_size: int  # tokens
    totals: int  # elements of the sums over tiles
    stages: int
    stage_lanes: int  # vector of all stages
    candidates: int
    candidate_lanes: int
    heights: int
    bucket_lanes: int
    fuse_up_to: int  # the most partials that an item merges
    nodes: int  # nodes of a tile: two for each entry
    most_least: int  # the largest `Stage.least`
    windows: int  # groups of `most_least` entries that overlap a tile
    subtiles: int  # the most subtiles of a tile
    rounds: int  # rounds of a search over the columns
    radix: int  # parts into which a round divides the columns
    hashed: int  # columns that a CTA hashes at once; below are other numbers that it handles at once
    pairs: int  # other rows that it compares with its row
    row_block: int  # rows
    column_block: int  # columns of two rows that it compares
    candidate_block: int  # tiles of a candidate
    block: int  # tiles, items or tokens
    segment_block: int  # segments that it lists


class Status(NamedTuple):
    """Status of a planner on the device. counts: see `Counts`. errors: the sticky error word."""

    counts: Any
    errors: Any


class Counts(NamedTuple):
    """Numbers that one launch computes for later ones."""

    num_entries: Any
    num_tokens: Any  # one past the last query token
    num_items: Any


class EntryArrays(NamedTuple):
    """Query tokens in the order of the forest's rows."""

    token: Any  # query token of the step
    position: Any  # place in its sequence
    row: Any  # row of the block table
    length: Any  # tokens of its sequence
    shared: Any  # tokens in common with the entry before


@triton.jit
def fields_at(first, distance, COUNT: tl.constexpr):
    """Returns COUNT pointers, each `distance` behind the one before: those to the fields of a record."""
    pointers: tl.tuple = ()
    for field in tl.static_range(COUNT):
        pointers += (first + field * distance,)
    return pointers


@triton.jit
def load_fields(pointers, i):
    """Returns element i behind each pointer. The loads of fields that a kernel does not use are not compiled."""
    values: tl.tuple = ()
    for field in tl.static_range(len(pointers)):
        values += (tl.load(pointers[field] + i),)
    return values


@triton.jit
def load_row(row, COUNT: tl.constexpr):
    """Returns the COUNT columns of a row, those of a table whose rows are records."""
    values: tl.tuple = ()
    for field in tl.static_range(COUNT):
        values += (tl.load(row + field),)
    return values


@triton.jit
def trigger_and_wait(PDL: tl.constexpr):
    """Lets the next launch start. Then it waits for the launch ahead, and so for all before it, if `layer.Pdl` says
    so."""
    if PDL.trigger:
        tl.extra.cuda.gdc_launch_dependents()
    if PDL.wait:
        tl.extra.cuda.gdc_wait()


@triton.jit
def counts_of(status):
    """Returns pointers to the counts."""
    return Counts(status.counts, status.counts + 1, status.counts + 2)


@triton.jit
def flag(status, bits):
    """Sets bits of the sticky error word."""
    if bits != 0:
        tl.atomic_or(status.errors, bits)
