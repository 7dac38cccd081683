"""The cheapest packing, found by dynamic programming over the forest.

Where a request's pack that ends at a node may begin depends only on the *cuts* above it: the nodes at whose ends a pack
of the request may begin. Two facts keep the number of cases small.

- All requests that cut at a node can share one way of getting there. Moving them all to the way with the fewest
  packs costs no more.
- Of two cuts that are reached with equally many packs, only the deeper one is worth starting from.

So the case at a node is a set of its ancestors, of which the i-th is reached with i packs. It is stored as a bit
mask over the path, and its value is the least cost of everything at and below the node:

    path        depth 0 --- depth 1 --- depth 2 --- node
    mask 0b101  cut         -           cut              the node's pack may begin
                                                         - at token 0              (0 packs before it)
                                                         - at the end of depth 0   (1 pack before it)
                                                         - at the end of depth 2   (2 packs before it)

The result is exact while a pack fits one pack tile: `tests/planner` compares it with every way to cut every path. With
more queries the tiles of a pack are counted for all queries below its node, which is an upper bound. A node at depth d
has 2^d cases, so the caller asks `count_states` first and leaves out forests that are too deep.
"""

from typing import Final

import numpy as np

from trunkattn.compiled import njit
from trunkattn.planner.packs.cost import partial_cost, read_cost
from trunkattn.planner.prefix_forest import ROOT, Forest

_NO_CUT: Final = -1  # a choice: no request cuts at this node
_TOO_DEEP: Final = 40  # at this depth a node has more cases than any caller allows
_DEARER_THAN_ALL: Final = 1 << 62


def count_states(forest: Forest) -> int:
    """Number of (node, set of cuts above it) cases. `optimal` takes time and memory in proportion to it."""
    return int((np.int64(1) << np.minimum(forest.depth, _TOO_DEEP).astype(np.int64)).sum())


@njit
def optimal(forest, queries, model):
    """`start` of the cheapest packing. Ties go to fewer cuts, then to the pack that starts higher."""
    parent, depths, ends, is_leaf = forest.parent, forest.depth, forest.token_end, forest.is_leaf
    num_nodes = len(parent)
    offset = np.zeros(num_nodes + 1, np.int64)
    max_depth = 0
    for node in range(num_nodes):
        offset[node + 1] = offset[node] + (np.int64(1) << depths[node])
        max_depth = max(max_depth, depths[node])
    below = np.zeros(offset[num_nodes] * 2, np.int64)  # [node, mask over the node and its ancestors]: its children
    choice = np.empty(offset[num_nodes], np.int8)  # [node, mask over its ancestors]: packs before the node's own
    path_end = np.empty(max_depth, np.int64)  # of the nodes above one
    for node in range(num_nodes - 1, -1, -1):
        depth = depths[node]
        up = parent[node]
        for d in range(depth - 1, -1, -1):
            path_end[d] = ends[up]
            up = parent[up]
        children = below[2 * offset[node] : 2 * offset[node + 1]]
        for mask in range(np.int64(1) << depth):
            cost, before = _best(ends[node], is_leaf[node], depth, queries[node], model, path_end, mask, children)
            choice[offset[node] + mask] = before
            if depth > 0:
                below[2 * offset[parent[node]] + mask] += cost
    return _follow(parent, depths, choice, offset)


@njit(inline="always")
def _best(end, leaf, depth, queries, model, path_end, mask, children):
    """Least cost at and below a node under the cuts `mask`, and how many packs come before its own, or _NO_CUT."""
    here = np.int64(1) << depth
    best, choice = (np.int64(_DEARER_THAN_ALL), 0) if leaf else (children[mask], _NO_CUT)
    kept, before, begin = np.int64(0), 0, np.int64(0)
    for d in range(depth + 1):
        if d == depth or mask >> d & 1:  # the node's pack may begin at token `begin`, after `before` others
            if end > begin:
                cost = read_cost(model, end - begin, queries)
                num_packs = before + 1
            else:  # an empty leaf right below a cut
                cost, num_packs = np.int64(0), before
            cost += partial_cost(model, num_packs, queries) if leaf else children[kept | here]
            if cost < best:
                best, choice = cost, before
            if d < depth:
                kept |= np.int64(1) << d
                before += 1
                begin = path_end[d]
    return best, choice


@njit(inline="always")
def _follow(parent, depths, choice, offset):
    """`start` of each node, by taking the choices from the roots down."""
    num_nodes = len(parent)
    start = np.full(num_nodes, ROOT, np.int32)
    masks = np.zeros(num_nodes, np.int64)  # the cuts above and at each node
    for node in range(num_nodes):
        up = parent[node]
        mask = np.int64(0) if up == ROOT else masks[up]
        packs_before = choice[offset[node] + mask]
        if packs_before == _NO_CUT:
            masks[node] = mask
            continue
        kept, count, begin = np.int64(0), 0, ROOT
        ancestors = np.empty(depths[node], np.int32)
        for d in range(depths[node] - 1, -1, -1):
            ancestors[d] = up
            up = parent[up]
        for d in range(depths[node]):
            if mask >> d & 1 and count < packs_before:
                kept |= np.int64(1) << d
                count += 1
                begin = ancestors[d]
        start[node] = begin
        masks[node] = kept | np.int64(1) << depths[node]
    return start
