"""From the items of its stages to a tile list: subtiles, partial slots, merges, and the order of the items."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.planner.row_tiles.layout import Items
from trunkattn.planner.work_list import (
    DIRECT,
    QUERY_END,
    QUERY_START,
    RUN_END,
    RUN_FULL,
    RUN_START,
    SEGMENT_COLUMNS,
    SEGMENT_QUERIES,
)

Int32Array = NDArray[np.int32]


class Subtiles(NamedTuple):
    """How the rows of a tile are divided; see `nest`."""

    number: int
    height: int  # entries of one
    block_runs: int  # runs of a block of one


class TileArrays(NamedTuple):
    """The arrays of a TileList, in its order."""

    items: Int32Array
    runs: Int32Array
    queries: Int32Array
    slots: Int32Array
    parts: Int32Array
    counts: Int32Array
    merge_queries: Int32Array
    merge_ranges: Int32Array
    num_slots: int


@njit(inner=True)
def join_stages(tall, low):
    """The items of two stages in one list."""
    items = np.concatenate((tall.items, low.items))
    num_runs, num_queries = np.int32(len(tall.runs)), np.int32(len(tall.queries))
    for item in range(len(tall.items), len(items)):
        for column in (RUN_START, RUN_FULL, RUN_END):
            items[item, column] += num_runs
        for column in (QUERY_START, QUERY_END):
            items[item, column] += num_queries
    runs = np.concatenate((tall.runs, low.runs))
    queries = np.concatenate((tall.queries, low.queries))
    return Items(items, runs, queries, np.concatenate((tall.uncut, low.uncut)))


@njit
def nest(emitted, kind_of_item, subtiles):
    """Deals the runs of an item that are not full to its subtiles, which read them at the same time.

    subtiles [kinds, fields of Subtiles]. A run goes to every subtile that has queries of it. The list holds a block
    for each subtile in turn; short blocks are filled up with runs of no token.
    """
    items, runs, queries, uncut = emitted
    items = items.copy()
    lengths = np.zeros(subtiles[:, 0].max(), np.int64)
    ends = np.zeros(len(items) + 1, np.int64)
    for item in range(len(items)):
        count, height, block = subtiles[kind_of_item[item]]
        size = items[item, RUN_END] - items[item, RUN_FULL]
        if count > 1:
            _count(runs, items[item], height, lengths)
            size = (lengths.max() + block - 1) // block * block * count
        ends[item + 1] = ends[item] + items[item, RUN_FULL] - items[item, RUN_START] + size
    nested = np.zeros((ends[-1], SEGMENT_COLUMNS), np.int32)
    for item in range(len(items)):
        count, height, block = subtiles[kind_of_item[item]]
        start, full, end = items[item, RUN_START], items[item, RUN_FULL], items[item, RUN_END]
        at = ends[item] + full - start
        nested[ends[item] : at] = runs[start:full]
        if count == 1:
            nested[at : ends[item + 1]] = runs[full:end]
        else:
            lengths[:] = 0
            for i in range(full, end):
                low, high = runs[i, SEGMENT_QUERIES] & 255, runs[i, SEGMENT_QUERIES] >> 8 & 255
                for subtile in range(low // height, (high - 1) // height + 1):
                    nth = lengths[subtile]
                    nested[at + (nth // block * count + subtile) * block + nth % block] = runs[i]
                    lengths[subtile] += 1
        items[item, RUN_START], items[item, RUN_FULL], items[item, RUN_END] = ends[item], at, ends[item + 1]
    return Items(items, nested, queries, uncut)


@njit(inner=True)
def _count(runs, item, height, lengths):
    """Runs of an item that are not full, by subtile."""
    lengths[:] = 0
    for i in range(item[RUN_FULL], item[RUN_END]):
        low, high = runs[i, SEGMENT_QUERIES] & 255, runs[i, SEGMENT_QUERIES] >> 8 & 255
        for subtile in range(low // height, (high - 1) // height + 1):
            lengths[subtile] += 1


@njit
def finish(emitted, bucket, num_buckets, num_queries, fuse_up_to):
    """Partial slots, merges, and items in the order of their buckets, heaviest first.

    bucket [num_items]: tile height. An item of the lowest tile that is `uncut` and holds the last piece of all its
    queries merges the others itself, at most `fuse_up_to` of them, and moves to the second half of the buckets.
    """
    items, runs, queries, uncut = emitted
    pieces = np.zeros(num_queries, np.int32)
    for query in queries:
        pieces[query] += 1
    slots, first = _slots(queries, pieces)
    parts = np.zeros((len(queries), 2), np.int32)
    fused = np.zeros(num_queries, np.bool_)
    bucket = bucket.copy()
    for item in range(len(items)):
        merges, leaf = False, uncut[item] and bucket[item] == 0
        for i in range(items[item, QUERY_START], items[item, QUERY_END]):
            count = pieces[queries[i]]
            merges = merges or count > 1
            leaf = leaf and (count == 1 or (slots[i] == first[queries[i]] + count - 1 and count - 1 <= fuse_up_to))
        if merges and leaf:
            for i in range(items[item, QUERY_START], items[item, QUERY_END]):
                if pieces[queries[i]] > 1:
                    parts[i, 0], parts[i, 1] = first[queries[i]], slots[i]
                    slots[i] = DIRECT
                    fused[queries[i]] = True
            bucket[item] += num_buckets
    weight = np.empty(len(items), np.int64)
    counts = np.zeros(2 * num_buckets + 1, np.int32)
    for item in range(len(items)):
        weight[item] = np.int64(bucket[item]) << 32 | (np.int64(1) << 31) - (
            items[item, RUN_END] - items[item, RUN_START]
        )
        counts[bucket[item] + 1] += 1
    for i in range(2 * num_buckets):
        counts[i + 1] += counts[i]
    left = 0
    for query in range(num_queries):
        left += pieces[query] > 1 and not fused[query]
    merge_queries = np.empty(left, np.int32)
    merge_ranges = np.empty((left, 2), np.int32)
    at = 0
    for query in range(num_queries):
        if pieces[query] > 1 and not fused[query]:
            merge_queries[at] = query
            merge_ranges[at, 0], merge_ranges[at, 1] = first[query], first[query] + pieces[query]
            at += 1
    order = np.argsort(weight, kind="mergesort")
    num_slots = int(pieces[pieces > 1].sum())
    return TileArrays(items[order], runs, queries, slots, parts, counts, merge_queries, merge_ranges, num_slots)


@njit(inner=True)
def _slots(queries, pieces):
    """Consecutive slots for the pieces of a query, in the order in which they were emitted."""
    first = np.zeros(len(pieces), np.int32)
    total = 0
    for query in range(len(pieces)):
        first[query] = total
        total += pieces[query] if pieces[query] > 1 else 0
    following = first.copy()
    slots = np.full(len(queries), DIRECT, np.int32)
    for i in range(len(queries)):
        if pieces[queries[i]] > 1:
            slots[i] = following[queries[i]]
            following[queries[i]] += 1
    return slots, first
