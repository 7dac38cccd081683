"""A step divided: requests with many query tokens become work items of prompt chunks, the others row tiles."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from trunkattn.plan_format import DIRECT, Capacity, PrefillLimits, PrefillList, TileList, WorkList
from trunkattn.planner.build import Batch
from trunkattn.planner.schedule import FINEST
from trunkattn.planner.splitting import SplitRule

Int32Array = NDArray[np.int32]


@dataclass(frozen=True)
class Division:
    """rest: the batch with the chunks' rows as padding. chunks: a batch of their rows alone. *_tokens: the query tokens
    of the step that each half's query tokens are, ascending."""

    rest: Batch
    chunks: Batch
    rest_tokens: Int32Array
    chunk_tokens: Int32Array


def divide(batch: Batch, above: int, page_size: int) -> Division | None:
    """Takes out the requests with more than `above` query tokens; None: there are none."""
    table, lens, starts = batch.block_table, batch.seq_lens, batch.query_start_loc
    query_lens = np.diff(starts)
    if query_lens.max(initial=0) <= above:
        return None
    of_chunk = query_lens > above
    rows = np.flatnonzero(of_chunk)
    columns = -(-int(lens[rows].max()) // page_size)
    in_chunk = np.repeat(of_chunk, query_lens)
    return Division(
        Batch(table, lens, _starts(np.where(of_chunk, 0, query_lens)), batch.window),
        Batch(table[rows, :columns], lens[rows], _starts(query_lens[rows]), batch.window),
        np.flatnonzero(~in_chunk).astype(np.int32),
        np.flatnonzero(in_chunk).astype(np.int32),
    )


def _starts(query_lens: NDArray[np.integer]) -> Int32Array:
    return np.append(0, np.cumsum(query_lens)).astype(np.int32)


def join(tiles: TileList, work: WorkList, division: Division) -> tuple[TileList, PrefillList]:
    """Both halves' lists in query tokens and partial slots of the whole step; the tile list merges for both."""
    ranges = np.column_stack([work.merge_indptr[:-1], work.merge_indptr[1:]]) + np.int32(tiles.num_slots)
    merges = division.rest_tokens[tiles.merge_queries], division.chunk_tokens[work.merge_queries]
    joined = replace(
        tiles,
        queries=division.rest_tokens[tiles.queries],
        merge_queries=np.concatenate(merges),
        merge_ranges=np.concatenate([tiles.merge_ranges, ranges]),
        num_slots=tiles.num_slots + work.num_slots,
    )
    slots = np.where(work.slots == DIRECT, np.int32(DIRECT), work.slots + np.int32(tiles.num_slots))
    queries = division.chunk_tokens[work.queries]
    return joined, PrefillList(work.items, queries, slots, division.chunks.block_table)


def prefill_limits(rule: SplitRule, queries_per_tile: int, above: int, capacity: Capacity) -> PrefillLimits:
    """What every batch of a capacity keeps in chunks that share nothing and are not cut, and room for more."""
    rows = min(capacity.max_requests, capacity.max_query_tokens // (above + 1))
    uncut = rows + capacity.max_query_tokens // queries_per_tile
    items = 2 * uncut + FINEST * rule.num_slots // rule.num_kv_heads + 1
    return PrefillLimits(items, items * queries_per_tile, rows, capacity.max_pages_per_request)


def limits_broken(work: WorkList, limits: PrefillLimits, free_slots: int) -> list[str]:
    """What of a chunks' work list is over its limits; empty: it fits. free_slots: partial slots that are left."""
    sizes = (
        (len(work.items), limits.items, "prefill items"),
        (len(work.queries), limits.queries, "prefill queries"),
        (work.num_slots, free_slots, "prefill slots"),
    )
    return [f"{size} {name} of {most}" for size, most, name in sizes if size > most]
