"""Packing policies: which runs of a request's path are read together (PAT §5.1; RelayAttention §3; FastTree).

A packing is one array, `start[node]`: the node after whose end the segment ending at `node` begins (ROOT: at token 0).
A request walks from its leaf to the root along `start`; requests that pass the same node there form a pack, which
reads tokens `[end of start[node], end of node)` once. Nodes that no request passes are packs of nobody and dropped.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trunkattn.planner.cost_model import partial_cost, read_cost
from trunkattn.planner.forest import ROOT

# FastTree's weights of padded rows, padded keys and reductions, in hundredths, and its two query tiles.
_FASTTREE_PAD_ROWS, _FASTTREE_PAD_KEYS, _FASTTREE_REDUCE = 66, 33, 10
_FASTTREE_TILE_KEYS, _FASTTREE_TALL, _FASTTREE_SHORT = 32, 64, 16


class Packs(NamedTuple):
    """K packs in the order of their nodes (ancestors first). A row appears once in each of its packs."""

    kv_row: NDArray[np.int32]  # [K] a row of the block table that holds the pack's pages
    token_start: NDArray[np.int32]  # [K]
    token_end: NDArray[np.int32]  # [K]
    row_indptr: NDArray[np.int32]  # [K + 1] into rows
    rows: NDArray[np.int32]  # [...] rows of the block table


@njit(cache=True)
def end_of(forest, node):
    """Tokens from the sequence's start to the end of `node`."""
    return 0 if node == ROOT else forest.token_end[node]


@njit(cache=True)
def queries_below(forest, query_lens):
    """[N] int64: query tokens of each node's rows."""
    before = np.zeros(len(forest.order) + 1, np.int64)
    for i in range(len(forest.order)):
        before[i + 1] = before[i] + query_lens[forest.order[i]]
    return before[forest.row_end] - before[forest.row_start]


@njit(cache=True)
def per_query(forest, queries, model):
    """Every request reads its own KV from start to end (FlashAttention, FlashInfer decode)."""
    return np.full(len(forest.parent), ROOT, np.int32)


@njit(cache=True)
def relay(forest, queries, model):
    """One level: what all requests share is read once, the rest per request (RelayAttention §3.2)."""
    start = np.full(len(forest.parent), ROOT, np.int32)
    if len(start) > 0 and forest.row_end[0] == len(forest.order) and not forest.is_leaf[0]:
        for node in range(1, len(start)):
            start[node] = 0 if forest.is_leaf[node] else ROOT
    return start


@njit(cache=True)
def cascade(forest, queries, model):
    """Every node is a pack of its own (PAT's naive tree; FlashInfer's cascade)."""
    return forest.parent.copy()


@njit(cache=True)
def pat(forest, queries, model):
    """PAT's Algorithm 1: a child is merged iff 4·s ≥ L, s its queries and L the tokens carried to the node."""
    start = np.empty(len(forest.parent), np.int32)
    for node in range(len(start)):
        up = forest.parent[node]
        if up == ROOT:
            start[node] = ROOT
        else:
            carried = forest.token_end[up] - end_of(forest, start[up])
            start[node] = start[up] if 4 * queries[node] >= carried else up
    return start


@njit(cache=True)
def _padding_cost(rows, keys):
    tile = _FASTTREE_TALL if rows > _FASTTREE_SHORT else _FASTTREE_SHORT
    padded_rows = (rows + tile - 1) // tile * tile - rows
    padded_keys = max(np.int64(0), _FASTTREE_TILE_KEYS - keys)
    return _FASTTREE_PAD_ROWS * padded_rows * keys + _FASTTREE_PAD_KEYS * padded_keys * rows


@njit(cache=True)
def fasttree(forest, queries, model):
    """FastTree's compute-oriented cost (PAT §8.2): a child is merged where that wastes fewer padded products."""
    num_nodes = len(forest.parent)
    start = np.empty(num_nodes, np.int32)
    staying = queries.copy()  # queries of a node not yet merged into a child
    for node in range(num_nodes):
        up = forest.parent[node]
        if up == ROOT:
            start[node] = ROOT
            continue
        group = model.group_size
        own = np.int64(forest.token_end[node] - forest.token_start[node])
        carried = np.int64(forest.token_end[up] - end_of(forest, start[up]))
        here, there = staying[up] * group, queries[node] * group
        split = _padding_cost(here, carried) + _padding_cost(there, own) + _FASTTREE_REDUCE * queries[node]
        merged = _padding_cost(here - there, carried) + _padding_cost(there, own + carried)
        if split > merged:
            start[node] = start[up]
            staying[up] -= queries[node]
        else:
            start[node] = up
    return start


@njit(cache=True)
def collect_packs(forest, start, lowest):
    """Groups the rows by the nodes they pass. `lowest[row]` is the first token any of its queries sees (window)."""
    order, leaf_of, token_end = forest.order, forest.leaf_of, forest.token_end
    num_nodes, num_rows = len(start), len(order)
    count = np.zeros(num_nodes, np.int32)
    first = np.empty(num_nodes, np.int32)  # first token of the node's pack
    total = 0
    for i in range(num_rows):
        node = leaf_of[i]
        while node != ROOT:
            above = start[node]
            begin = max(0 if above == ROOT else token_end[above], lowest[order[i]])
            if token_end[node] > begin:
                first[node] = begin if count[node] == 0 else min(first[node], begin)
                count[node] += 1
                total += 1
            node = above
    pack_of = np.empty(num_nodes, np.int32)
    num_packs = 0
    for node in range(num_nodes):
        if count[node] > 0:
            pack_of[node] = num_packs
            num_packs += 1
    kv_row = np.empty(num_packs, np.int32)
    pack_start = np.empty(num_packs, np.int32)
    pack_end = np.empty(num_packs, np.int32)
    indptr = np.zeros(num_packs + 1, np.int32)
    for node in range(num_nodes):
        if count[node] > 0:
            p = pack_of[node]
            pack_start[p], pack_end[p] = first[node], token_end[node]
            indptr[p + 1] = indptr[p] + count[node]
    rows = np.empty(total, np.int32)
    fill = indptr[:-1].copy()
    for i in range(num_rows):
        row = order[i]
        node = leaf_of[i]
        while node != ROOT:
            above = start[node]
            if token_end[node] > max(0 if above == ROOT else token_end[above], lowest[row]):
                p = pack_of[node]
                if fill[p] == indptr[p]:
                    kv_row[p] = row
                rows[fill[p]] = row
                fill[p] += 1
            node = above
    return Packs(kv_row, pack_start, pack_end, indptr, rows)


@njit(cache=True)
def packing_cost(packs, query_lens, model):
    """int64 bytes: reads of every pack, and partials of every query whose KV is cut."""
    starts, ends, indptr, rows = packs.token_start, packs.token_end, packs.row_indptr, packs.rows
    cost = np.int64(0)
    pieces = np.zeros(len(query_lens), np.int32)
    for p in range(len(starts)):
        queries = np.int64(0)
        for i in range(indptr[p], indptr[p + 1]):
            queries += query_lens[rows[i]]
            pieces[rows[i]] += 1
        cost += read_cost(model, ends[p] - starts[p], queries)
    for row in range(len(query_lens)):
        cost += partial_cost(model, pieces[row], query_lens[row])
    return cost
