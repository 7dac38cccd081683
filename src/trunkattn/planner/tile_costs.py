"""What row tiles cost, for the prediction of their time: blocks, tokens read again, and the slots' makespan."""

import heapq

import numpy as np
from numba import njit

from trunkattn.planner.tiles import segments, visible


@njit(cache=True)
def stage_blocks(forest, entries, stage, window, run):
    """[tiles that have any, 2] blocks of nodes that hold the whole tile, and of others."""
    indptr, nodes, num_runs = segments(forest, entries, stage, window, run)
    blocks = np.zeros((len(indptr) - 1, 2), np.int64)
    height = stage.height // stage.subtiles
    private = np.zeros(stage.subtiles, np.int64)
    for tile in range(len(blocks)):
        first, last = tile * stage.height, min((tile + 1) * stage.height, len(entries.query))
        whole = np.int64(0)
        private[:] = 0
        for i in range(indptr[tile], indptr[tile + 1]):
            low, high = max(entries.node_start[nodes[i]], first), min(entries.node_end[nodes[i]], last)
            if low == first and high == last:
                whole += num_runs[i]
            else:
                for subtile in range((low - first) // height, (high - 1 - first) // height + 1):
                    private[subtile] += num_runs[i]
        blocks[tile, 0] = whole // stage.block_runs
        left, step = whole % stage.block_runs, stage.block_runs if stage.subtiles == 1 else stage.private_runs
        blocks[tile, 1] = (private.max() + left + step - 1) // step
    return blocks[blocks.sum(axis=1) > 0]


@njit(cache=True)
def read_tokens(forest, entries, window):
    """Tokens of the forest that a query sees."""
    total = np.int64(0)
    for node in range(len(forest.parent)):
        if entries.node_end[node] > entries.node_start[node]:
            start, end, _, _ = visible(forest, entries, node, entries.node_start[node], entries.node_end[node], window)
            total += max(0, end - start)
    return total


@njit(cache=True)
def stage_rereads(forest, entries, stage, window):
    """Tokens of nodes that several tiles read, and how many tokens those tiles read beyond the first."""
    shared, again = np.int64(0), np.int64(0)
    for node in range(len(forest.parent)):
        size = entries.node_end[node] - entries.node_start[node]
        if stage.least <= size < stage.below and size > 0:
            more = (entries.node_end[node] - 1) // stage.height - entries.node_start[node] // stage.height
            start, end, _, _ = visible(forest, entries, node, entries.node_start[node], entries.node_end[node], window)
            tokens = np.int64(max(0, end - start))
            shared += tokens * (more > 0)
            again += tokens * more
    return shared, again


@njit(cache=True)
def makespan(costs, counts, slots):
    """When `slots` that take the heaviest item left, each as it becomes free, have done counts[i] items of costs[i].

    Where there are fewer items than slots, each runs the faster for it.
    """
    order = np.argsort(-costs, kind="mergesort")
    total = counts.sum()
    if total <= slots:
        return costs[order[0]] * total // slots
    ends = [np.int64(0)] * slots
    for i in order:
        for _ in range(counts[i]):
            heapq.heapreplace(ends, ends[0] + costs[i])
    return max(ends)
