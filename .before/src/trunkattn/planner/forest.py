"""Block table -> prefix forest (PAT §5.1, "Tree Structure Block Table"), in flat arrays.

A physical page at column j belongs to exactly one prefix, so two requests share a node exactly where their page ids
are equal in every column up to there. A node is a maximal run of columns shared by the same set of rows. Only pages
that are full for a row can be shared; what follows a row's last shared page is the row's own *leaf*, which may be
empty (a request that is a prefix of another, or one of several equal requests).

The result does not depend on how it is computed: with `rep[r, c]` = the lowest row that shares columns 0..c with row r
(r itself from the first private column on), `order` sorts the rows lexicographically by `rep`, and nodes are numbered
in depth-first order with children in the order of their lowest row.
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

ROOT = -1
_EMPTY = -1


class Forest(NamedTuple):
    """Flat arrays, int32. N nodes in depth-first order, R active rows (query length > 0).

    A node's rows are `order[row_start:row_end]`; its KV is tokens `[token_start, token_end)` of any of them.
    """

    order: NDArray[np.int32]  # [R] rows of the block table, depth first
    parent: NDArray[np.int32]  # [N] node, or ROOT
    depth: NDArray[np.int32]  # [N] number of proper ancestors
    row_start: NDArray[np.int32]  # [N] into order
    row_end: NDArray[np.int32]  # [N]
    token_start: NDArray[np.int32]  # [N]
    token_end: NDArray[np.int32]  # [N] a leaf's end is its row's seq_len
    is_leaf: NDArray[np.bool_]  # [N] exactly one leaf per active row
    leaf_of: NDArray[np.int32]  # [R] leaf node of order[i]


@njit(cache=True)
def build_forest(table, seq_lens, query_lens, page_size, share_columns):
    """Builds the forest in one pass over the shared part of the table.

    table [num_requests, max_pages] int32, seq_lens and query_lens [num_requests] int32. `share_columns` is the unit of
    sharing in columns: 1, or the chunk of a batch-invariant plan. Rows with query length 0 are left out.
    """
    num_rows = table.shape[0]
    cap = 2 * num_rows + 1
    rep = np.empty(cap, np.int32)
    col_start = np.empty(cap, np.int32)
    col_end = np.empty(cap, np.int32)
    leaf_row = np.full(cap, _EMPTY, np.int32)
    parent = np.full(cap, _EMPTY, np.int32)
    first_child = np.full(cap, _EMPTY, np.int32)
    last_child = np.full(cap, _EMPTY, np.int32)
    next_sibling = np.full(cap, _EMPTY, np.int32)
    prev_sibling = np.full(cap, _EMPTY, np.int32)
    buckets = 4
    while buckets < 4 * num_rows:
        buckets *= 2
    slots = np.full(buckets, _EMPTY, np.int32)  # open addressing: (parent, block of pages) -> child
    rep[0], col_start[0], col_end[0] = 0, 0, 0
    count = 1
    for row in range(num_rows):
        if query_lens[row] == 0:
            continue
        full = seq_lens[row] // page_size // share_columns * share_columns
        node, col = 0, 0
        while col < full:
            slot = _find(slots, parent, rep, col_start, table, row, col, node, share_columns)
            child = slots[slot]
            if child == _EMPTY:
                break
            end = col + share_columns
            while end < col_end[child] and end < full and _same(table, row, rep[child], end, share_columns):
                end += share_columns
            if end == col_end[child] and leaf_row[child] == _EMPTY:
                node, col = child, end
                continue
            upper = count  # the shared part of the edge becomes a node of its own
            count += 1
            rep[upper], col_start[upper], col_end[upper], parent[upper] = rep[child], col, end, node
            _replace_child(upper, child, node, first_child, last_child, next_sibling, prev_sibling)
            slots[slot] = upper
            col_start[child] = end
            parent[child] = upper
            _append_child(child, upper, first_child, last_child, next_sibling, prev_sibling)
            if end < col_end[child]:
                _insert(slots, parent, rep, col_start, table, child, share_columns)
            node, col = upper, end
            break
        leaf = count
        count += 1
        rep[leaf], col_start[leaf], col_end[leaf], leaf_row[leaf], parent[leaf] = row, col, full, row, node
        _append_child(leaf, node, first_child, last_child, next_sibling, prev_sibling)
        if col < full:
            _insert(slots, parent, rep, col_start, table, leaf, share_columns)
    return _number(count, first_child, next_sibling, parent, leaf_row, col_start, col_end, seq_lens, page_size)


@njit(cache=True)
def _same(table, row_a, row_b, col, width):
    equal = True
    for j in range(col, col + width):
        equal &= table[row_a, j] == table[row_b, j]
    return equal


@njit(cache=True)
def _hash(node, page, mask):
    return ((np.int64(node) * np.int64(0x9E3779B1) + np.int64(page)) * np.int64(0x85EBCA77) >> np.int64(15)) & mask


@njit(cache=True)
def _find(slots, parent, rep, col_start, table, row, col, node, width):
    """The slot of the child of `node` whose first block of pages equals the row's at `col`, or the free slot for it."""
    mask = len(slots) - 1
    slot = _hash(node, table[row, col], mask)
    while slots[slot] != _EMPTY:
        child = slots[slot]
        if parent[child] == node and _same(table, row, rep[child], col, width):
            break
        slot = (slot + 1) & mask
    return slot


@njit(cache=True)
def _insert(slots, parent, rep, col_start, table, child, width):
    col = col_start[child]
    slots[_find(slots, parent, rep, col_start, table, rep[child], col, parent[child], width)] = child


@njit(cache=True)
def _append_child(child, node, first_child, last_child, next_sibling, prev_sibling):
    prev_sibling[child] = last_child[node]
    next_sibling[child] = _EMPTY
    if last_child[node] == _EMPTY:
        first_child[node] = child
    else:
        next_sibling[last_child[node]] = child
    last_child[node] = child


@njit(cache=True)
def _replace_child(new, old, node, first_child, last_child, next_sibling, prev_sibling):
    before, after = prev_sibling[old], next_sibling[old]
    prev_sibling[new], next_sibling[new] = before, after
    if before == _EMPTY:
        first_child[node] = new
    else:
        next_sibling[before] = new
    if after == _EMPTY:
        last_child[node] = new
    else:
        prev_sibling[after] = new


@njit(cache=True)
def _number(count, first_child, next_sibling, parent, leaf_row, col_start, col_end, seq_lens, page_size):
    """Depth-first numbering: nodes, rows and tokens as `Forest` holds them. The root itself is left out."""
    num_nodes = count - 1
    num_rows = 0
    for node in range(count):
        if leaf_row[node] != _EMPTY:
            num_rows += 1
    order = np.empty(num_rows, np.int32)
    leaf_of = np.empty(num_rows, np.int32)
    new_parent = np.empty(num_nodes, np.int32)
    depth = np.empty(num_nodes, np.int32)
    row_start = np.empty(num_nodes, np.int32)
    row_end = np.empty(num_nodes, np.int32)
    token_start = np.empty(num_nodes, np.int32)
    token_end = np.empty(num_nodes, np.int32)
    is_leaf = np.zeros(num_nodes, np.bool_)
    number = np.full(count, ROOT, np.int32)
    node, next_number, rows = first_child[0], 0, 0
    while node != _EMPTY:
        k = next_number
        next_number += 1
        number[node] = k
        up = number[parent[node]]
        new_parent[k] = up
        depth[k] = 0 if up == ROOT else depth[up] + 1
        row_start[k] = rows
        token_start[k] = col_start[node] * page_size
        token_end[k] = col_end[node] * page_size
        if leaf_row[node] != _EMPTY:
            row = leaf_row[node]
            order[rows], leaf_of[rows] = row, k
            is_leaf[k] = True
            token_end[k] = seq_lens[row]
            rows += 1
        if first_child[node] != _EMPTY:
            node = first_child[node]
            continue
        while node != 0:
            row_end[number[node]] = rows
            if next_sibling[node] != _EMPTY:
                node = next_sibling[node]
                break
            node = parent[node]
        if node == 0:
            break
    return order, new_parent, depth, row_start, row_end, token_start, token_end, is_leaf, leaf_of
