"""Makes a tile list from the items of its stages: subtiles, partial slots, merges, and the order of the items."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.planner.tiles.layout import Items
from trunkattn.planner.work_list import (
    DIRECT,
    QUERY_END,
    QUERY_START,
    SEGMENT_COLUMNS,
    SEGMENT_END,
    SEGMENT_QUERIES,
    SEGMENT_SHARED_END,
    SEGMENT_START,
)

Int32Array = NDArray[np.int32]


class Subtiles(NamedTuple):
    """How the rows of a tile are divided into subtiles; see `nest`."""

    number: int
    height: int  # entries of a subtile
    block_segments: int  # segments of a subtile's block


class TileArrays(NamedTuple):
    """The arrays of a TileList, in its order."""

    items: Int32Array
    segments: Int32Array
    queries: Int32Array
    partial_slots: Int32Array
    merge_slots: Int32Array
    counts: Int32Array
    merge_queries: Int32Array
    merge_ranges: Int32Array
    num_slots: int


@njit(inner=True)
def join_stages(tall, low):
    """The items of two stages in one list."""
    items = np.concatenate((tall.items, low.items))
    num_segments, num_queries = np.int32(len(tall.segments)), np.int32(len(tall.queries))
    for item in range(len(tall.items), len(items)):
        for column in (SEGMENT_START, SEGMENT_SHARED_END, SEGMENT_END):
            items[item, column] += num_segments
        for column in (QUERY_START, QUERY_END):
            items[item, column] += num_queries
    segments = np.concatenate((tall.segments, low.segments))
    queries = np.concatenate((tall.queries, low.queries))
    return Items(items, segments, queries, np.concatenate((tall.uncut, low.uncut)))


@njit
def nest(emitted, tile_of_item, subtiles):
    """Deals the private segments of each item, from `shared_end` on, to its subtiles, which read them at the same time.

    tile_of_item: the index of each item's tile in the rule. subtiles [tiles of the rule, fields of Subtiles]. A segment
    goes to every subtile that has one of its queries. The list holds one block for each subtile in turn. Short blocks
    are filled up with empty segments.
    """
    items, segments = emitted.items.copy(), emitted.segments
    lengths = np.zeros(subtiles[:, 0].max(), np.int64)
    ends = np.zeros(len(items) + 1, np.int64)
    for item in range(len(items)):
        count, height, block = subtiles[tile_of_item[item]]
        size = items[item, SEGMENT_END] - items[item, SEGMENT_SHARED_END]
        if count > 1:
            _count(segments, items[item], height, lengths)
            size = (lengths.max() + block - 1) // block * block * count
        ends[item + 1] = ends[item] + items[item, SEGMENT_SHARED_END] - items[item, SEGMENT_START] + size
    nested = np.zeros((ends[-1], SEGMENT_COLUMNS), np.int32)
    for item in range(len(items)):
        count, height, block = subtiles[tile_of_item[item]]
        start, shared_end, end = items[item, SEGMENT_START], items[item, SEGMENT_SHARED_END], items[item, SEGMENT_END]
        at = ends[item] + shared_end - start
        nested[ends[item] : at] = segments[start:shared_end]
        if count == 1:
            nested[at : ends[item + 1]] = segments[shared_end:end]
        else:
            lengths[:] = 0
            for i in range(shared_end, end):
                low, high = segments[i, SEGMENT_QUERIES] & 255, segments[i, SEGMENT_QUERIES] >> 8 & 255
                for subtile in range(low // height, (high - 1) // height + 1):
                    nth = lengths[subtile]
                    nested[at + (nth // block * count + subtile) * block + nth % block] = segments[i]
                    lengths[subtile] += 1
        items[item, SEGMENT_START], items[item, SEGMENT_SHARED_END], items[item, SEGMENT_END] = (
            ends[item],
            at,
            ends[item + 1],
        )
    return Items(items, nested, emitted.queries, emitted.uncut)


@njit(inner=True)
def _count(segments, item, height, lengths):
    """Counts the private segments of an item by subtile."""
    lengths[:] = 0
    for i in range(item[SEGMENT_SHARED_END], item[SEGMENT_END]):
        low, high = segments[i, SEGMENT_QUERIES] & 255, segments[i, SEGMENT_QUERIES] >> 8 & 255
        for subtile in range(low // height, (high - 1) // height + 1):
            lengths[subtile] += 1


@njit
def finish(emitted, bucket, num_buckets, num_queries, fuse_up_to):
    """The arrays of a tile list: partial slots, merges, and the items by bucket, heaviest first.

    bucket [num_items]: index of each item's tile. An uncut item of the lowest tile merges the partials of its queries
    itself if it has the last partial of each of them and at most `fuse_up_to` others are to be merged. Such an item
    moves to the second half of the buckets.
    """
    items, queries = emitted.items, emitted.queries
    partials = np.zeros(num_queries, np.int32)
    for query in queries:
        partials[query] += 1
    slots, first = _slots(queries, partials)
    merge_slots = np.zeros((len(queries), 2), np.int32)
    fused = np.zeros(num_queries, np.bool_)
    bucket = bucket.copy()
    for item in range(len(items)):
        merges, leaf = False, emitted.uncut[item] and bucket[item] == 0
        for i in range(items[item, QUERY_START], items[item, QUERY_END]):
            count = partials[queries[i]]
            merges = merges or count > 1
            leaf = leaf and (count == 1 or (slots[i] == first[queries[i]] + count - 1 and count - 1 <= fuse_up_to))
        if merges and leaf:
            for i in range(items[item, QUERY_START], items[item, QUERY_END]):
                if partials[queries[i]] > 1:
                    merge_slots[i, 0], merge_slots[i, 1] = first[queries[i]], slots[i]
                    slots[i] = DIRECT
                    fused[queries[i]] = True
            bucket[item] += num_buckets
    weight = np.empty(len(items), np.int64)
    counts = np.zeros(2 * num_buckets + 1, np.int32)
    for item in range(len(items)):
        weight[item] = np.int64(bucket[item]) << 32 | (np.int64(1) << 31) - (
            items[item, SEGMENT_END] - items[item, SEGMENT_START]
        )
        counts[bucket[item] + 1] += 1
    for i in range(2 * num_buckets):
        counts[i + 1] += counts[i]
    merge_queries, merge_ranges = _list_merges(partials, first, fused)
    order = np.argsort(weight, kind="mergesort")
    num_slots = int(partials[partials > 1].sum())
    return TileArrays(
        items=items[order],
        segments=emitted.segments,
        queries=queries,
        partial_slots=slots,
        merge_slots=merge_slots,
        counts=counts,
        merge_queries=merge_queries,
        merge_ranges=merge_ranges,
        num_slots=num_slots,
    )


@njit(inner=True)
def _slots(queries, partials):
    """(slots, first): consecutive slots for the partials of each query in the order of emission, and its first slot."""
    first = np.zeros(len(partials), np.int32)
    total = 0
    for query in range(len(partials)):
        first[query] = total
        total += partials[query] if partials[query] > 1 else 0
    following = first.copy()
    slots = np.full(len(queries), DIRECT, np.int32)
    for i in range(len(queries)):
        if partials[queries[i]] > 1:
            slots[i] = following[queries[i]]
            following[queries[i]] += 1
    return slots, first


@njit(inner=True)
def _list_merges(partials, first, fused):
    """(merge_queries, merge_ranges): the queries with several partials that no item merges, and their partial slots."""
    left = 0
    for query in range(len(partials)):
        left += partials[query] > 1 and not fused[query]
    merge_queries = np.empty(left, np.int32)
    merge_ranges = np.empty((left, 2), np.int32)
    at = 0
    for query in range(len(partials)):
        if partials[query] > 1 and not fused[query]:
            merge_queries[at] = query
            merge_ranges[at, 0], merge_ranges[at, 1] = first[query], first[query] + partials[query]
            at += 1
    return merge_queries, merge_ranges
