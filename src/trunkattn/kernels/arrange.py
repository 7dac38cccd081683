"""Order of a work list on a GPU: by launch (trunks, then leaves that merge) and by tile height, heaviest first."""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trunkattn.plan_format import DIRECT, QUERY_END, QUERY_START, WorkList


class Arranged(NamedTuple):
    """All int32. items as in WorkList; parts [len(queries), 2]: partial slots [first, last) that the entry merges."""

    items: NDArray[np.int32]
    queries: NDArray[np.int32]
    slots: NDArray[np.int32]
    parts: NDArray[np.int32]
    counts: NDArray[np.int32]  # [2 * num_classes + 1] first item of each class, trunks first; then the end
    merge_queries: NDArray[np.int32]
    merge_ranges: NDArray[np.int32]  # [len(merge_queries), 2] slots [first, last) that no leaf merges


def arrange(work: WorkList, group_size: int, heights: tuple[int, ...], fuse_up_to: int) -> Arranged:
    """`heights`: tile rows, ascending. `fuse_up_to`: a leaf merges at most this many partials; 0: none does."""
    return Arranged(
        *_arrange(
            work.items, work.queries, work.slots, work.merge_queries, work.merge_indptr,
            group_size, np.array(heights, np.int64), fuse_up_to,
        )
    )  # fmt: skip


@njit(cache=True)
def _arrange(items, queries, slots, merge_queries, merge_indptr, group_size, heights, fuse_up_to):
    num_items, classes = len(items), len(heights)
    owner = np.full(merge_indptr[-1], -1, np.int32)  # merged query of a slot
    for i in range(len(merge_queries)):
        for slot in range(merge_indptr[i], merge_indptr[i + 1]):
            owner[slot] = i
    parts = np.zeros((len(queries), 2), np.int32)
    slots = slots.copy()
    fused = np.zeros(len(merge_queries), np.bool_)
    bucket = np.empty(num_items, np.int32)
    for item in range(num_items):
        begin, end = items[item, QUERY_START], items[item, QUERY_END]
        height = 0
        while heights[height] < (end - begin) * group_size:
            height += 1
        # a leaf may merge only if it leaves no partial itself: nobody then waits for it
        merges, leaf = False, True
        for i in range(begin, end):
            if slots[i] != DIRECT:
                query = owner[slots[i]]
                pieces = merge_indptr[query + 1] - merge_indptr[query]
                merges = True
                leaf = leaf and slots[i] == merge_indptr[query + 1] - 1 and pieces - 1 <= fuse_up_to
        if merges and leaf:
            for i in range(begin, end):
                if slots[i] != DIRECT:
                    query = owner[slots[i]]
                    parts[i, 0], parts[i, 1] = merge_indptr[query], slots[i]
                    slots[i] = DIRECT
                    fused[query] = True
            height += classes
        bucket[item] = height
    counts = np.zeros(2 * classes + 1, np.int32)
    for item in range(num_items):
        counts[bucket[item] + 1] += 1
    for i in range(2 * classes):
        counts[i + 1] += counts[i]
    order = np.argsort(bucket, kind="mergesort")
    left = np.flatnonzero(~fused)
    kept = np.empty(len(left), np.int32)
    ranges = np.empty((len(left), 2), np.int32)
    for i in range(len(left)):
        kept[i] = merge_queries[left[i]]
        ranges[i, 0], ranges[i, 1] = merge_indptr[left[i]], merge_indptr[left[i] + 1]
    return items[order], queries, slots, parts, counts, kept, ranges
