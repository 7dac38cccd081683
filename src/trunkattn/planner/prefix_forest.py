"""The prefix forest of a step: which requests share which pages, found only from the block table.

Engines give equal prefixes the same physical pages, and a page at column j belongs to exactly one prefix. So two
requests share their first columns exactly as far as their page ids are equal. With pages of 16 tokens:

    block table                 forest
    row 0:  7  8  3  5          node 0: tokens [0, 32) of rows 0, 1, 2           the trunk
    row 1:  7  8  3  6           |- node 1: [32, 48) of rows 0, 1
    row 2:  7  8  4              |   |- node 2: leaf of row 0
    row 3:  9                    |   `- node 3: leaf of row 1
                                 `- node 4: leaf of row 2
                                node 5: leaf of row 3                            another tree

A *node* is a longest range of columns that the same rows share. Only pages that are full for a row can be shared.
What follows a row's last shared page is its own *leaf*. It is empty for a request that is a prefix of another one, or
equal to it.

The result does not depend on how it is computed, so the planner on a GPU finds the same forest in another way. Let
`rep[r, c]` be the lowest row that shares columns 0 to c with row r (r itself, where no other does). Then `order` sorts
the rows lexicographically by `rep`, and nodes are numbered depth first, children in the order of their lowest row.

Source: PAT, https://arxiv.org/abs/2511.22333, §5.1 "Tree Structure Block Table".
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit

ROOT: Final = -1  # parent of a node without one
_EMPTY: Final = -1
_TOP: Final = 0  # while a forest is built, all of its trees hang below this node, which holds no column
_COLUMNS_AT_ONCE: Final = 64  # columns that are compared at once
_MIN_BUCKETS: Final = 4
_BUCKETS_PER_ROW: Final = 4  # a row adds at most two children, so the hash table stays half empty


class Forest(NamedTuple):
    """Flat arrays: N nodes in depth-first order, R active rows (those with a query token).

    A node's rows are `order[row_start:row_end]`. Its KV is tokens `[token_start, token_end)` of any of them.
    """

    order: NDArray[np.int32]  # [R] rows of the block table, depth first
    parent: NDArray[np.int32]  # [N] node, or ROOT
    depth: NDArray[np.int32]  # [N] number of ancestors
    row_start: NDArray[np.int32]  # [N] into order
    row_end: NDArray[np.int32]  # [N]
    token_start: NDArray[np.int32]  # [N]
    token_end: NDArray[np.int32]  # [N] a leaf's end is its row's seq_len
    is_leaf: NDArray[np.bool_]  # [N] each active row has exactly one leaf
    leaf_of: NDArray[np.int32]  # [R] leaf of order[i]


# A node while the forest is built; _EMPTY: none. Children are a linked list.
_FIELDS: Final = np.dtype(
    [
        ("row", np.int32),  # the first row that came to the node; its pages are the node's
        ("col_start", np.int32),
        ("col_end", np.int32),
        ("leaf_row", np.int32),  # the row whose leaf the node is
        ("parent", np.int32),
        ("first_child", np.int32),
        ("last_child", np.int32),
        ("next_sibling", np.int32),
        ("prev_sibling", np.int32),
    ]
)
_NODE: Final = np.dtype((np.record, _FIELDS))  # of fields that plain Python reads by name too


@njit
def build_forest(table, seq_lens, query_lens, page_size, share_columns):
    """The Forest of a block table, in one pass over the part of it that is shared.

    table [num_requests, max_pages], seq_lens and query_lens [num_requests], all int32. Rows without query tokens are
    left out. share_columns: columns are shared in groups of this many: 1, or a span of a batch-invariant plan.

    Each row walks down as far as its pages are those of a node, which a hash table finds by (parent, next pages). It
    begins at the last node that it shares with the row before it: neighbours often share nearly all of a long path.
    Where it leaves a node in the middle, the node is cut in two.
    """
    num_rows = table.shape[0]
    nodes = np.empty(2 * num_rows + 1, _NODE)
    num_buckets = _MIN_BUCKETS
    while num_buckets < _BUCKETS_PER_ROW * num_rows:
        num_buckets *= 2
    buckets = np.full(num_buckets, _EMPTY, np.int32)  # open addressing: (parent, group of pages) -> child
    _set_node(nodes, np.int64(_TOP), np.int64(0), np.int64(0), np.int64(0))
    count = np.int64(1)  # a literal would make Numba compile the helpers a second time
    node, before = np.int64(_TOP), np.int64(0)  # the parent of the last leaf, and the leaf's row
    for row in range(num_rows):
        if query_lens[row] == 0:
            continue
        full = seq_lens[row] // page_size // share_columns * share_columns
        common = _num_common(table, np.int64(row), before, min(full, nodes[node].col_end))
        while nodes[node].col_end > common:
            node = np.int64(nodes[node].parent)
        col = np.int64(nodes[node].col_end)
        before = np.int64(row)
        while col < full:
            bucket = _find(nodes, buckets, table, row, col, node, share_columns)
            child = np.int64(buckets[bucket])
            if child == _EMPTY:
                break
            end = col + share_columns
            child_end, child_row = nodes[child].col_end, np.int64(nodes[child].row)
            while end < child_end and end < full and _same(table, row, child_row, end, share_columns):
                end += share_columns
            if end == child_end and nodes[child].leaf_row == _EMPTY:
                node, col = child, end
                continue
            upper = count  # what the row shares of the child becomes a node of its own
            count += 1
            _set_node(nodes, upper, child_row, col, end)
            _replace_child(nodes, upper, child)
            buckets[bucket] = upper
            nodes[child].col_start = end
            _append_child(nodes, child, upper)
            if end < child_end:
                _insert(nodes, buckets, table, child, share_columns)
            node, col = upper, end
            break
        leaf = count
        count += 1
        _set_node(nodes, leaf, row, col, full)
        nodes[leaf].leaf_row = row
        _append_child(nodes, leaf, node)
        if col < full:
            _insert(nodes, buckets, table, leaf, share_columns)
    return _number(nodes, count, seq_lens, page_size)


@njit(inner=True)
def _set_node(nodes, node, row, col_start, col_end):
    """A node that has its columns and no relatives yet."""
    new = nodes[node]
    new.row, new.col_start, new.col_end = row, col_start, col_end
    new.leaf_row = new.parent = new.first_child = new.last_child = new.next_sibling = new.prev_sibling = _EMPTY


@njit(inner=True)
def _same(table, row_a, row_b, col, width):
    """Whether two rows have the same pages in `width` columns from `col` on."""
    equal = True
    for j in range(col, col + width):
        equal &= table[row_a, j] == table[row_b, j]
    return equal


@njit(inner=True)
def _num_common(table, row_a, row_b, most):
    """The number of leading columns, at most `most`, in which two rows have the same pages."""
    col = np.int64(0)
    while col + _COLUMNS_AT_ONCE <= most and _same(table, row_a, row_b, col, _COLUMNS_AT_ONCE):
        col += _COLUMNS_AT_ONCE
    while col < most and table[row_a, col] == table[row_b, col]:
        col += 1
    return col


@njit(inner=True)
def _hash(node, page, mask):
    return ((np.int64(node) * np.int64(0x9E3779B1) + np.int64(page)) * np.int64(0x85EBCA77) >> np.int64(15)) & mask


@njit(inner=True)
def _find(nodes, buckets, table, row, col, node, width):
    """The bucket of the child of `node` that begins with the row's pages from `col` on, or the free bucket for it."""
    mask = len(buckets) - 1
    bucket = _hash(node, table[row, col], mask)
    while buckets[bucket] != _EMPTY:
        child = buckets[bucket]
        if nodes[child].parent == node and _same(table, row, np.int64(nodes[child].row), col, width):
            break
        bucket = (bucket + 1) & mask
    return bucket


@njit(inner=True)
def _insert(nodes, buckets, table, child, width):
    """Makes a child with at least one column known to `_find`."""
    row, col, node = np.int64(nodes[child].row), np.int64(nodes[child].col_start), np.int64(nodes[child].parent)
    buckets[_find(nodes, buckets, table, row, col, node, width)] = child


@njit(inner=True)
def _append_child(nodes, child, node):
    """Makes `child` the last child of `node`."""
    last = nodes[node].last_child
    nodes[child].parent = node
    nodes[child].prev_sibling = last
    nodes[child].next_sibling = _EMPTY
    if last == _EMPTY:
        nodes[node].first_child = child
    else:
        nodes[last].next_sibling = child
    nodes[node].last_child = child


@njit(inner=True)
def _replace_child(nodes, new, old):
    """Puts a new node in the place of `old` among the children of old's parent."""
    node, before, after = nodes[old].parent, nodes[old].prev_sibling, nodes[old].next_sibling
    nodes[new].parent, nodes[new].prev_sibling, nodes[new].next_sibling = node, before, after
    if before == _EMPTY:
        nodes[node].first_child = new
    else:
        nodes[before].next_sibling = new
    if after == _EMPTY:
        nodes[node].last_child = new
    else:
        nodes[after].prev_sibling = new


@njit(inline="always")
def _number(nodes, count, seq_lens, page_size):
    """The Forest of a finished tree: nodes are numbered depth first, and the top itself is left out."""
    num_nodes = count - 1
    num_rows = 0
    for node in range(count):
        num_rows += nodes[node].leaf_row != _EMPTY
    order = np.empty(num_rows, np.int32)
    leaf_of = np.empty(num_rows, np.int32)
    parent = np.empty(num_nodes, np.int32)
    depth = np.empty(num_nodes, np.int32)
    row_start = np.empty(num_nodes, np.int32)
    row_end = np.empty(num_nodes, np.int32)
    token_start = np.empty(num_nodes, np.int32)
    token_end = np.empty(num_nodes, np.int32)
    is_leaf = np.empty(num_nodes, np.bool_)
    number = np.full(count, ROOT, np.int32)
    node, next_number, rows = nodes[_TOP].first_child, 0, 0
    while node != _EMPTY:
        k = next_number
        next_number += 1
        number[node] = k
        up = number[nodes[node].parent]
        parent[k] = up
        depth[k] = 0 if up == ROOT else depth[up] + 1
        row_start[k] = rows
        token_start[k] = nodes[node].col_start * page_size
        token_end[k] = nodes[node].col_end * page_size
        row = nodes[node].leaf_row
        is_leaf[k] = row != _EMPTY
        if is_leaf[k]:
            order[rows], leaf_of[rows] = row, k
            token_end[k] = seq_lens[row]
            rows += 1
        if nodes[node].first_child != _EMPTY:
            node = nodes[node].first_child
            continue
        while node != _TOP:  # up to the first ancestor, or the node itself, that has another sibling
            row_end[number[node]] = rows
            if nodes[node].next_sibling != _EMPTY:
                node = nodes[node].next_sibling
                break
            node = nodes[node].parent
        if node == _TOP:
            break
    return Forest(
        order=order,
        parent=parent,
        depth=depth,
        row_start=row_start,
        row_end=row_end,
        token_start=token_start,
        token_end=token_end,
        is_leaf=is_leaf,
        leaf_of=leaf_of,
    )
