"""Divides a step: requests with many query tokens become prompt chunks, with their own work items, and the others rows
of tiles.
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.config import Capacity
from trunkattn.planner.planner import StepTables
from trunkattn.planner.split_schedule import MAX_ITEMS_PER_WORKER, weight
from trunkattn.planner.splitting import SplitRule
from trunkattn.planner.work_list import DIRECT, ChunkLimits, ChunkList, TileList, WorkList

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class Division:
    """A batch in two halves. rest: the batch with the chunks' rows as padding. chunks: a batch of only their rows.
    rest_tokens, chunk_tokens: the step's query tokens that each half has, ascending."""

    rest: StepTables
    chunks: StepTables
    rest_tokens: Int32Array
    chunk_tokens: Int32Array


class _Split(NamedTuple):
    """Rows that are chunks, their longest sequence, and query starts and tokens of each half."""

    rows: NDArray[np.int64]
    longest: int
    rest_starts: Int32Array
    chunk_starts: Int32Array
    rest_tokens: Int32Array
    chunk_tokens: Int32Array


def divide(batch: StepTables, above: int, page_size: int) -> Division | None:
    """Takes out the requests with more than `above` query tokens; None: there are none."""
    table, lens = batch.block_table, batch.seq_lens
    split = _split_rows(lens, batch.query_start_loc, above)
    if not len(split.rows):
        return None
    columns = -(-split.longest // page_size)
    return Division(
        rest=StepTables(table, lens, split.rest_starts, batch.window),
        chunks=StepTables(table[split.rows, :columns], lens[split.rows], split.chunk_starts, batch.window),
        rest_tokens=split.rest_tokens,
        chunk_tokens=split.chunk_tokens,
    )


@njit
def _split_rows(seq_lens, query_start_loc, above):
    num_rows, num_chunks, num_tokens, longest = len(seq_lens), 0, 0, 0
    for row in range(num_rows):
        queries = query_start_loc[row + 1] - query_start_loc[row]
        if queries > above:
            num_chunks += 1
            num_tokens += queries
            longest = max(longest, seq_lens[row])
    rows = np.empty(num_chunks, np.int64)
    rest_starts, chunk_starts = np.zeros(num_rows + 1, np.int32), np.zeros(num_chunks + 1, np.int32)
    rest_tokens = np.empty(query_start_loc[-1] - num_tokens, np.int32)
    chunk_tokens = np.empty(num_tokens, np.int32)
    chunk = 0
    for row in range(num_rows):
        first, last = query_start_loc[row], query_start_loc[row + 1]
        begin, taken = rest_starts[row], 0
        if last - first > above:
            rows[chunk] = row
            for i in range(last - first):
                chunk_tokens[chunk_starts[chunk] + i] = first + i
            chunk_starts[chunk + 1] = chunk_starts[chunk] + last - first
            chunk += 1
        else:
            taken = last - first
            for i in range(taken):
                rest_tokens[begin + i] = first + i
        rest_starts[row + 1] = begin + taken
    return _Split(
        rows=rows,
        longest=longest,
        rest_starts=rest_starts,
        chunk_starts=chunk_starts,
        rest_tokens=rest_tokens,
        chunk_tokens=chunk_tokens,
    )


def whole_chunks(chunks: StepTables, queries_per_tile: int, rule: SplitRule) -> WorkList:
    """The work list of chunks that share nothing and are not cut, with the bits that the planner gives them. In NumPy:
    nothing is compiled for a plan that is made on a GPU."""
    starts, ends = chunks.query_start_loc[:-1].astype(np.int64), chunks.query_start_loc[1:].astype(np.int64)
    tiles = -(-(ends - starts) // queries_per_tile)  # of each row
    row = np.repeat(np.arange(len(tiles)), tiles)
    nth = np.arange(len(row)) - (np.cumsum(tiles) - tiles)[row]
    first = starts[row] + nth * queries_per_tile
    last = np.minimum(first + queries_per_tile, ends[row])
    before = chunks.seq_lens[row] - ends[row]  # a token's place in its sequence, less its place in the step
    kv_start, kv_end = np.maximum(before + first + 1 - chunks.window, 0), before + last
    items = np.stack((row, kv_start, kv_end, first, last), axis=1).astype(np.int32)
    heaviest_first = np.argsort(-weight(rule, kv_end - kv_start, last - first), kind="stable")
    queries, none = np.arange(chunks.query_start_loc[-1], dtype=np.int32), np.empty(0, np.int32)
    return WorkList(items[heaviest_first], queries, np.full_like(queries, DIRECT), none, np.zeros(1, np.int32))


def join(tiles: TileList, work: WorkList, division: Division) -> tuple[TileList, ChunkList]:
    """The lists of both halves, renumbered for the whole step. The tile list also merges the chunks' partials."""
    rest_tokens, chunk_tokens = division.rest_tokens, division.chunk_tokens
    begins = work.merge_indptr + np.int32(tiles.num_slots)  # the chunks' partial slots come after the tiles'
    chunk_ranges = np.stack((begins[:-1], begins[1:]), axis=1)
    slots = np.where(work.partial_slots == DIRECT, work.partial_slots, work.partial_slots + np.int32(tiles.num_slots))
    whole = replace(
        tiles,
        queries=rest_tokens[tiles.queries],
        merge_queries=np.concatenate((rest_tokens[tiles.merge_queries], chunk_tokens[work.merge_queries])),
        merge_ranges=np.concatenate((tiles.merge_ranges, chunk_ranges)),
        num_slots=tiles.num_slots + work.num_slots,
    )
    return whole, ChunkList(work.items, chunk_tokens[work.queries], slots, division.chunks.block_table)


def chunk_limits(rule: SplitRule, queries_per_tile: int, above: int, capacity: Capacity) -> ChunkLimits | None:
    """Upper bounds for the chunks of any batch within the capacity, if they share nothing and are not cut, with room
    for cutting them. None if no batch can have chunks."""
    longest = capacity.max_query_len or capacity.max_query_tokens
    rows = min(capacity.max_requests, capacity.max_query_tokens // (above + 1)) if longest > above else 0
    items = 0
    if rows:
        uncut = rows + capacity.max_query_tokens // queries_per_tile
        items = 2 * uncut + MAX_ITEMS_PER_WORKER * rule.num_workers // rule.num_kv_heads + 1
    if capacity.max_chunk_tokens:  # chunks that the host lists for the device may be short, and are never cut
        rows = capacity.max_requests
        items = max(items, rows + capacity.max_chunk_tokens // queries_per_tile)
    return ChunkLimits(items, items * queries_per_tile, rows, capacity.max_pages_per_request) if rows else None


def limits_broken(work: WorkList, limits: ChunkLimits, free_slots: int) -> list[str]:
    """The sizes of a chunks' work list that exceed their limits; empty if it fits. free_slots: partial slots that the
    tiles leave."""
    sizes = (
        (len(work.items), limits.items, "prefill items"),
        (len(work.queries), limits.queries, "prefill queries"),
        (work.num_slots, free_slots, "prefill slots"),
    )
    return [f"{size} {name} of {most}" for size, most, name in sizes if size > most]
