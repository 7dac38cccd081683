"""Makes work items from packs: packs are cut into pack tiles, and tiles with much KV are split.

A pack names query tokens and the KV tokens that they read together. A *pack tile* holds as many of its queries as one
work item can compute. If a tile has so much KV that workers would end at different times, it is split, and each split
is a work item:

    one pack, 5 queries, 10 KV tokens         KV 0    4    8 10
    at most 2 queries a tile,         q0 q1      |----|----|--|     items 0, 1, 2
    at most 4 tokens an item          q2 q3      |----|----|--|     items 3, 4, 5
                                      q4         |----|----|--|     items 6, 7, 8

A query in several items gets one *partial slot* per item, in the order of the tokens, and a merge combines its
partials. A query in a single item needs none: the item writes the output. Items are listed heaviest first, so that
those that start last are the shortest.

Source: PAT, https://arxiv.org/abs/2511.22333, §5.2 for tiles, §6 "Long KV Split", §7 for the merge. Flash-decoding
splits KV in the same way.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.numerics import MAX_INT32
from trunkattn.planner.device import DeviceModel
from trunkattn.planner.packs.cost import CostModel
from trunkattn.planner.split_schedule import heaviest_first, scheduled_splits, split_evenly, weight_of
from trunkattn.planner.work_list import (
    DIRECT,
    ITEM_COLUMNS,
    KV_END,
    KV_ROW,
    KV_START,
    QUERY_END,
    QUERY_START,
    UNLIMITED,
)

# A pack tile has the columns of a work item, except that the first is its pack, not a row of the block table.
TILE_PACK: Final = KV_ROW

_OPERATIONS_PER_PRODUCT: Final = 2  # a multiplication and an addition
# A worker's share of the work is at least this many items: few enough that partials are rare, and enough that the
# workers end together.
_ITEMS_PER_WORKER: Final = 2


class SplitRule(NamedTuple):
    """How tiles are split; integers only. A *worker* computes one item of one KV head at a time.

    Bytes are a unit of time: the time in which a worker reads that many bytes of KV.
    """

    num_workers: int  # items of one KV head that are computed at once
    num_kv_heads: int  # each item is computed once per KV head
    grid: int  # splits begin at multiples of this many tokens from the pack's start
    above_mean: bool  # no item is longer than the mean tile (PAT §6)
    fixed_chunk: int  # above 0: splits begin at all multiples of this many tokens of the sequence, and nowhere else
    head_bytes: int  # KV bytes of one token and head
    row_bytes: int  # cost of the arithmetic of one query row and one key
    row_unit: int  # rows are computed in multiples of this, a power of two
    group_size: int
    by_schedule: bool | None = None  # True: `split_schedule` decides; None: it does not, and is not compiled
    item_bytes: int = 0  # fixed cost of an item of one head
    partial_bytes: int = 0  # cost of one row's partial output and lse, written and read
    merge_bytes: int = 0  # fixed cost of a merge


class PackTiles(NamedTuple):
    """Pack tiles, and the query tokens that they hold."""

    tiles: NDArray[np.int32]  # [T, ITEM_COLUMNS] pack, first and end KV token, first and end of the arrays below
    query: NDArray[np.int32]  # [...] query tokens of the step
    position: NDArray[np.int32]  # [...] their positions in their sequences


class WorkArrays(NamedTuple):
    """The arrays of a WorkList, in its order."""

    items: NDArray[np.int32]
    queries: NDArray[np.int32]
    partial_slots: NDArray[np.int32]
    merge_queries: NDArray[np.int32]
    merge_indptr: NDArray[np.int32]


class PartialSlots(NamedTuple):
    """The partial slots and merges of a WorkList."""

    partial_slots: NDArray[np.int32]
    merge_queries: NDArray[np.int32]
    merge_indptr: NDArray[np.int32]


def split_rule(device: DeviceModel, model: CostModel, num_kv_heads: int, head_dims: int, fixed_chunk: int) -> SplitRule:
    """The rule for one attention shape on one device. `head_dims` is head_dim + head_dim_v."""
    return SplitRule(
        num_workers=device.num_workers,
        num_kv_heads=num_kv_heads,
        grid=device.split_grid,
        above_mean=device.split_above_mean,
        fixed_chunk=fixed_chunk,
        head_bytes=model.kv_bytes // num_kv_heads,
        row_bytes=max(1, _OPERATIONS_PER_PRODUCT * head_dims // device.flops_per_byte),
        row_unit=device.row_unit,
        group_size=model.group_size,
        by_schedule=True if device.by_schedule else None,
        item_bytes=device.item_bytes,
        partial_bytes=device.partial_factor * model.partial_bytes // (num_kv_heads * model.group_size),
        merge_bytes=device.merge_bytes,
    )


@njit(inline="always")
def cut_packs(packs, query_start_loc, seq_lens, window, queries_per_tile):
    """Cuts the query tokens of each pack into pack tiles.

    A tile reads the KV that at least one of its queries sees (causal mask, window). A tile that sees none is left out.

    Raises:
        OverflowError: the packs have more query tokens than int32 counts.
    """
    starts, ends, indptr, rows = packs.token_start, packs.token_end, packs.row_indptr, packs.rows
    num_queries, num_tiles = 0, 0
    for pack in range(len(indptr) - 1):
        in_pack = 0
        for i in range(indptr[pack], indptr[pack + 1]):
            in_pack += query_start_loc[rows[i] + 1] - query_start_loc[rows[i]]
        num_queries += in_pack
        num_tiles += (in_pack + queries_per_tile - 1) // queries_per_tile
    if num_queries > MAX_INT32:
        raise OverflowError("query tokens of packs")
    tiles = np.empty((num_tiles, ITEM_COLUMNS), np.int32)
    query = np.empty(num_queries, np.int32)
    position = np.empty(num_queries, np.int32)
    filled, count = 0, 0
    for pack in range(len(indptr) - 1):
        begin = filled
        for i in range(indptr[pack], indptr[pack + 1]):
            first, last = query_start_loc[rows[i]], query_start_loc[rows[i] + 1]
            for token in range(first, last):
                query[filled] = token
                position[filled] = seq_lens[rows[i]] - last + token
                filled += 1
        for query_start in range(begin, filled, queries_per_tile):
            query_end = min(query_start + queries_per_tile, filled)
            lowest, end = MAX_INT32, 0
            for i in range(query_start, query_end):
                lowest = min(lowest, position[i])
                end = max(end, position[i] + 1)
            kv_start = max(starts[pack], lowest + 1 - window)
            kv_end = min(ends[pack], end)
            if kv_end > kv_start:
                tiles[count, TILE_PACK] = pack
                tiles[count, KV_START], tiles[count, KV_END] = kv_start, kv_end
                tiles[count, QUERY_START], tiles[count, QUERY_END] = query_start, query_end
                count += 1
    return PackTiles(tiles[:count], query, position)


@njit(inline="always")
def split_tiles(rule, tiles):
    """[T] int32: tokens of each split of a tile; a tile that stays whole has all of its tokens in one."""
    return _split_tiles(rule, rule.by_schedule, tiles)


@njit(inner=True)
def _split_tiles(rule, by_schedule, tiles):
    if by_schedule is not None:  # the type decides, so Numba compiles only one branch
        return scheduled_splits(rule, tiles)
    num_tiles = len(tiles)
    tokens, work = np.int64(0), np.int64(0)
    for t in range(num_tiles):
        length = tiles[t, KV_END] - tiles[t, KV_START]
        tokens += length
        work += weight_of(rule, length, tiles[t, QUERY_END] - tiles[t, QUERY_START])
    splits = np.empty(num_tiles, np.int32)
    if num_tiles == 0:
        return splits
    mean = (tokens + num_tiles - 1) // num_tiles
    longest = (mean + rule.grid - 1) // rule.grid * rule.grid if rule.above_mean else np.int64(UNLIMITED)
    heaviest = max(np.int64(1), work * rule.num_kv_heads // (_ITEMS_PER_WORKER * rule.num_workers))
    for t in range(num_tiles):
        length = np.int64(tiles[t, KV_END] - tiles[t, KV_START])
        weight = weight_of(rule, length, tiles[t, QUERY_END] - tiles[t, QUERY_START])
        splits[t] = length
        if length > longest or weight > heaviest:
            num_splits = max((length + longest - 1) // longest, (weight + heaviest - 1) // heaviest)
            splits[t] = split_evenly(rule, length, num_splits)
    return splits


@njit(inner=True)
def _split_end(fixed_chunk, begin, end, split):
    """End of the split that begins at token `begin` of a tile that ends at `end`."""
    if fixed_chunk > 0:
        return min(end, (begin // fixed_chunk + 1) * fixed_chunk)
    return min(end, begin + split)


@njit(inline="always")
def emit(packs, pack_tiles, splits, window, rule, num_queries):
    """The arrays of a WorkList. Items stand heaviest first; equal ones stay in the order of their tiles and tokens."""
    tiles, query, position, kv_row = pack_tiles.tiles, pack_tiles.query, pack_tiles.position, packs.kv_row
    num_items, num_entries = 0, 0
    for t in range(len(tiles)):
        begin, end = np.int64(tiles[t, KV_START]), np.int64(tiles[t, KV_END])
        while begin < end:
            begin = _split_end(rule.fixed_chunk, begin, end, np.int64(splits[t]))
            num_items += 1
            num_entries += tiles[t, QUERY_END] - tiles[t, QUERY_START]
    items = np.empty((num_items, ITEM_COLUMNS), np.int32)
    queries = np.empty(num_entries, np.int32)
    weights = np.empty(num_items, np.int64)
    items_of = np.zeros(num_queries + 1, np.int32)  # of each query token
    count, filled = 0, 0
    for t in range(len(tiles)):
        begin, end = np.int64(tiles[t, KV_START]), np.int64(tiles[t, KV_END])
        while begin < end:
            split_end = _split_end(rule.fixed_chunk, begin, end, np.int64(splits[t]))
            first, lowest, seen_end = filled, MAX_INT32, 0
            for i in range(tiles[t, QUERY_START], tiles[t, QUERY_END]):
                if position[i] >= begin and position[i] + 1 - window < split_end:  # it sees a token of this split
                    queries[filled] = query[i]
                    items_of[query[i]] += 1
                    lowest = min(lowest, position[i])
                    seen_end = max(seen_end, position[i] + 1)
                    filled += 1
            if filled > first:
                items[count, KV_ROW] = kv_row[tiles[t, TILE_PACK]]
                items[count, KV_START] = max(begin, lowest + 1 - window)
                items[count, KV_END] = min(split_end, seen_end)
                items[count, QUERY_START], items[count, QUERY_END] = first, filled
                weights[count] = weight_of(rule, items[count, KV_END] - items[count, KV_START], filled - first)
                count += 1
            begin = split_end
    queries = queries[:filled].copy()
    partials = _partial_slots(queries, items_of, num_queries)
    return WorkArrays(
        items=_take_rows(items, heaviest_first(weights[:count])),
        queries=queries,
        partial_slots=partials.partial_slots,
        merge_queries=partials.merge_queries,
        merge_indptr=partials.merge_indptr,
    )


@njit(inline="always")
def _take_rows(items, order):
    """items[order], which Numba compiles faster than NumPy's indexing."""
    ordered = np.empty((len(order), ITEM_COLUMNS), np.int32)
    for i in range(len(order)):
        for column in range(ITEM_COLUMNS):
            ordered[i, column] = items[order[i], column]
    return ordered


@njit(inner=True)
def _partial_slots(queries, items_of, num_queries):
    """Consecutive slots for each query in several items; items stand in the order of their tokens, so slots do too."""
    num_merged = 0
    for query in range(num_queries):
        num_merged += items_of[query] > 1
    merge_queries = np.empty(num_merged, np.int32)
    merge_indptr = np.zeros(num_merged + 1, np.int32)
    next_slot = np.full(num_queries, DIRECT, np.int32)
    merged = 0
    for query in range(num_queries):
        if items_of[query] > 1:
            merge_queries[merged] = query
            next_slot[query] = merge_indptr[merged]
            merge_indptr[merged + 1] = merge_indptr[merged] + items_of[query]
            merged += 1
    slots = np.empty(len(queries), np.int32)
    for i in range(len(queries)):
        slots[i] = next_slot[queries[i]]
        if slots[i] != DIRECT:
            next_slot[queries[i]] += 1
    return PartialSlots(slots, merge_queries, merge_indptr)
