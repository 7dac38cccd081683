"""Packs -> work items: row tiles, long-KV split, order, partial slots (PAT §5.2 round-up, §6 "Long KV Split", §7)."""

from typing import NamedTuple

import numpy as np

from trunkattn.compiled import njit
from trunkattn.planner.packing.cost import CostModel
from trunkattn.planner.split_schedule import heaviest_first, scheduled_parts, weight_of
from trunkattn.planner.work_list import (
    DIRECT,
    ITEM_COLUMNS,
    KV_END,
    KV_ROW,
    KV_START,
    QUERY_END,
    QUERY_START,
    UNLIMITED,
    DeviceModel,
)


class SplitRule(NamedTuple):
    """Integers only. `fixed_chunk` > 0 cuts at its multiples from the sequence's start and nowhere else."""

    num_slots: int  # programs that run at once
    num_kv_heads: int  # programs per work item
    grid: int  # cut points are multiples of this many tokens from the pack's start
    above_mean: bool  # PAT §6: no item longer than the mean
    fixed_chunk: int
    head_bytes: int  # KV bytes of one token and head
    row_bytes: int  # one row × one key, in the same unit
    row_unit: int  # a power of two
    group_size: int
    by_schedule: bool | None = None  # True: see `planner.split_schedule`; None: not, and it is not compiled either
    item_bytes: int = 0  # fixed cost of an item of one head
    partial_bytes: int = 0  # one row's partial output and lse, written and read


def split_rule(device: DeviceModel, model: CostModel, num_kv_heads: int, head_dims: int, fixed_chunk: int) -> SplitRule:
    """The rule for one attention shape on one device. `head_dims`: head_dim + head_dim_v."""
    return SplitRule(
        num_slots=device.num_slots,
        num_kv_heads=num_kv_heads,
        grid=device.split_grid,
        above_mean=device.split_above_mean,
        fixed_chunk=fixed_chunk,
        head_bytes=model.kv_bytes // num_kv_heads,
        row_bytes=max(1, 2 * head_dims // device.flops_per_byte),
        row_unit=device.row_unit,
        group_size=model.group_size,
        by_schedule=True if device.by_schedule else None,
        item_bytes=device.item_bytes,
        partial_bytes=model.partial_bytes // (num_kv_heads * model.group_size),
    )


@njit(inline="always")
def row_tiles(packs, query_start_loc, seq_lens, window, queries_per_tile):
    """Cuts each pack's query tokens into tiles.

    Returns (pack, kv_start, kv_end, query_start, query_end) [T] and the query tokens and their positions [...]. The KV
    range of a tile is what at least one of its queries sees (causal, window); tiles that see nothing are left out.
    """
    starts, ends, indptr, rows = packs.token_start, packs.token_end, packs.row_indptr, packs.rows
    total, most = 0, 0
    for p in range(len(indptr) - 1):
        pack_queries = 0
        for i in range(indptr[p], indptr[p + 1]):
            pack_queries += query_start_loc[rows[i] + 1] - query_start_loc[rows[i]]
        total += pack_queries
        most += 1 if pack_queries <= queries_per_tile else (pack_queries - 1) // queries_per_tile + 1
    tiles = np.empty((most, 5), np.int32)
    query = np.empty(total, np.int32)
    position = np.empty(total, np.int32)
    filled, count = 0, 0
    for p in range(len(indptr) - 1):
        begin = filled
        for i in range(indptr[p], indptr[p + 1]):
            first, last = query_start_loc[rows[i]], query_start_loc[rows[i] + 1]
            for token in range(first, last):
                query[filled] = token
                position[filled] = seq_lens[rows[i]] - last + token
                filled += 1
        for tile in range(begin, filled, queries_per_tile):
            stop = min(tile + queries_per_tile, filled)
            low, high = UNLIMITED, 0
            for i in range(tile, stop):
                low = min(low, position[i])
                high = max(high, position[i] + 1)
            kv_start = max(starts[p], low + 1 - window)
            kv_end = min(ends[p], high)
            if kv_end > kv_start:
                tiles[count, 0], tiles[count, 1], tiles[count, 2] = p, kv_start, kv_end
                tiles[count, 3], tiles[count, 4] = tile, stop
                count += 1
    return tiles[:count], query, position


@njit(inline="always")
def part_length(rule, tiles):
    """[T] int32: tokens of each part a tile is cut into; the cut points lie on the grid."""
    return _part_length(rule, rule.by_schedule, tiles)


@njit(cached=False)
def _part_length(rule, by_schedule, tiles):
    if by_schedule is not None:  # of an argument, Numba compiles the one branch that its type takes
        return scheduled_parts(rule, tiles)
    num_tiles = len(tiles)
    tokens, work = np.int64(0), np.int64(0)
    for t in range(num_tiles):
        length = tiles[t, 2] - tiles[t, 1]
        tokens += length
        work += weight_of(rule, length, tiles[t, 4] - tiles[t, 3])
    parts = np.empty(num_tiles, np.int32)
    if num_tiles == 0:
        return parts
    mean = (tokens + num_tiles - 1) // num_tiles
    longest = (mean + rule.grid - 1) // rule.grid * rule.grid if rule.above_mean else np.int64(UNLIMITED)
    # half of a slot's share: coarse enough to keep partials few, fine enough that the slots end together
    share = max(np.int64(1), work * rule.num_kv_heads // (2 * rule.num_slots))
    for t in range(num_tiles):
        length = np.int64(tiles[t, 2] - tiles[t, 1])
        weight = weight_of(rule, length, tiles[t, 4] - tiles[t, 3])
        parts[t] = length
        if length > rule.grid and (length > longest or weight > share):
            pieces = max((length + longest - 1) // longest, (weight + share - 1) // share)
            pieces = min(pieces, (length + rule.grid - 1) // rule.grid)
            part = (length + pieces - 1) // pieces
            parts[t] = (part + rule.grid - 1) // rule.grid * rule.grid
    return parts


@njit(cached=False)
def _next_cut(fixed_chunk, begin, end, part):
    if fixed_chunk > 0:
        return min(end, (begin // fixed_chunk + 1) * fixed_chunk)
    return min(end, begin + part)


@njit(inline="always")
def emit(packs, tiles, parts, query, position, window, rule, num_queries):
    """The work list's arrays, items heaviest first (ties: as they were cut)."""
    num_items, num_entries = 0, 0
    for t in range(len(tiles)):
        begin, end = np.int64(tiles[t, 1]), np.int64(tiles[t, 2])
        while begin < end:
            begin = _next_cut(rule.fixed_chunk, begin, end, np.int64(parts[t]))
            num_items += 1
            num_entries += tiles[t, 4] - tiles[t, 3]
    items = np.empty((num_items, ITEM_COLUMNS), np.int32)
    queries = np.empty(num_entries, np.int32)
    weight = np.empty(num_items, np.int64)
    pieces = np.zeros(num_queries + 1, np.int32)
    count, filled = 0, 0
    for t in range(len(tiles)):
        begin, end = np.int64(tiles[t, 1]), np.int64(tiles[t, 2])
        while begin < end:
            cut = _next_cut(rule.fixed_chunk, begin, end, np.int64(parts[t]))
            first, low, high = filled, UNLIMITED, 0
            for i in range(tiles[t, 3], tiles[t, 4]):
                if position[i] >= begin and position[i] + 1 - window < cut:  # it sees a token of this part
                    queries[filled] = query[i]
                    pieces[query[i]] += 1
                    low = min(low, position[i])
                    high = max(high, position[i] + 1)
                    filled += 1
            if filled > first:
                items[count, KV_ROW] = packs.kv_row[tiles[t, 0]]
                items[count, KV_START] = max(begin, low + 1 - window)
                items[count, KV_END] = min(cut, high)
                items[count, QUERY_START], items[count, QUERY_END] = first, filled
                weight[count] = weight_of(rule, items[count, KV_END] - items[count, KV_START], filled - first)
                count += 1
            begin = cut
    queries = queries[:filled].copy()
    slots, merge_queries, merge_indptr = _partial_slots(queries, pieces, num_queries)
    order = heaviest_first(weight[:count])
    ordered = np.empty((count, ITEM_COLUMNS), np.int32)
    for i in range(count):
        for column in range(ITEM_COLUMNS):
            ordered[i, column] = items[order[i], column]
    return ordered, queries, slots, merge_queries, merge_indptr


@njit(cached=False)
def _partial_slots(queries, pieces, num_queries):
    """Consecutive slots per query in several pieces; items were cut in token order, so slots are too."""
    num_merged = 0
    for q in range(num_queries):
        num_merged += pieces[q] > 1
    merge_queries = np.empty(num_merged, np.int32)
    merge_indptr = np.zeros(num_merged + 1, np.int32)
    next_slot = np.full(num_queries, DIRECT, np.int32)
    merged = 0
    for q in range(num_queries):
        if pieces[q] > 1:
            merge_queries[merged] = q
            next_slot[q] = merge_indptr[merged]
            merge_indptr[merged + 1] = merge_indptr[merged] + pieces[q]
            merged += 1
    slots = np.empty(len(queries), np.int32)
    for i in range(len(queries)):
        slots[i] = next_slot[queries[i]]
        if slots[i] != DIRECT:
            next_slot[queries[i]] += 1
    return slots, merge_queries, merge_indptr
