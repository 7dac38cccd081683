"""The cheapest packing, by dynamic programming over the forest.

Which segment a request may start at a node depends only on the *cuts* made above it. Order those cuts by depth; two
facts make the state small. All requests cut at a node can share one way of getting there: moving them all to the way
with fewer pieces costs no more. And of two cuts reached with equally many pieces only the deeper is worth starting
from. So the state at a node is a set of ancestors, the i-th of which is reached with i pieces: a bit mask over the
path. The value of a state is the least cost of everything at and below the node.

Exact while a pack fits one row tile (`tests/planner` compares with every way to cut every path); above that the number
of row tiles is that of all queries below the node, an upper bound. The states number 2^depth per node, so forests
deeper than the caller's limit are refused (`count_states`).
"""

import numpy as np
from numba import njit

from trunkattn.planner.cost_model import partial_cost, read_cost
from trunkattn.planner.forest import ROOT

_UNUSED = -1  # choice: no request is cut at this node
_TOO_DEEP = 40


@njit(cache=True)
def count_states(forest):
    """Number of (node, set of cuts above it) states: the work of `optimal`, before doing it."""
    states = np.int64(0)
    for node in range(len(forest.depth)):
        states += np.int64(1) << min(forest.depth[node], _TOO_DEEP)
    return states


@njit(cache=True)
def optimal(forest, queries, model):
    """`start` of the cheapest packing. Ties go to fewer cuts, then to the segment that starts higher."""
    parent, depths, ends, is_leaf = forest.parent, forest.depth, forest.token_end, forest.is_leaf
    num_nodes = len(parent)
    offset = np.zeros(num_nodes + 1, np.int64)
    max_depth = 0
    for node in range(num_nodes):
        offset[node + 1] = offset[node] + (np.int64(1) << depths[node])
        max_depth = max(max_depth, depths[node])
    below = np.zeros(offset[num_nodes] * 2, np.int64)  # [node, mask over the node and its ancestors]: its children
    choice = np.empty(offset[num_nodes], np.int8)
    path_end = np.empty(max_depth + 1, np.int64)
    for node in range(num_nodes - 1, -1, -1):
        depth = depths[node]
        up = parent[node]
        for d in range(depth - 1, -1, -1):
            path_end[d] = ends[up]
            up = parent[up]
        children = below[2 * offset[node] : 2 * offset[node + 1]]
        for mask in range(np.int64(1) << depth):
            value, pick = _best(ends[node], is_leaf[node], depth, queries[node], model, path_end, mask, children)
            choice[offset[node] + mask] = pick
            if depth > 0:
                below[2 * offset[parent[node]] + mask] += value
    return _follow(parent, depths, choice, offset)


@njit(cache=True)
def _best(end, leaf, depth, queries, model, path_end, mask, children):
    """Least cost at and below a node under the cuts `mask`, and the number of pieces before its segment, or _UNUSED."""
    here = np.int64(1) << depth
    best, pick = (np.int64(1) << 62, 0) if leaf else (children[mask], _UNUSED)
    kept, before, begin = np.int64(0), 0, np.int64(0)
    for d in range(depth + 1):
        if d == depth or mask >> d & 1:  # the segment may start at token `begin`, reached with `before` pieces
            if end > begin:
                cost = read_cost(model, end - begin, queries)
                pieces = before + 1
            else:  # an empty leaf right below a cut
                cost, pieces = np.int64(0), before
            cost += partial_cost(model, pieces, queries) if leaf else children[kept | here]
            if cost < best:
                best, pick = cost, before
            if d < depth:
                kept |= np.int64(1) << d
                before += 1
                begin = path_end[d]
    return best, pick


@njit(cache=True)
def _follow(parent, depths, choice, offset):
    """Replays the choices from the roots down."""
    num_nodes = len(parent)
    start = np.full(num_nodes, ROOT, np.int32)
    masks = np.zeros(num_nodes, np.int64)  # cuts above and at the node
    for node in range(num_nodes):
        up = parent[node]
        mask = np.int64(0) if up == ROOT else masks[up]
        pieces = choice[offset[node] + mask]
        if pieces == _UNUSED:
            masks[node] = mask
            continue
        kept, count, begin = np.int64(0), 0, ROOT
        ancestors = np.empty(depths[node], np.int32)
        for d in range(depths[node] - 1, -1, -1):
            ancestors[d] = up
            up = parent[up]
        for d in range(depths[node]):
            if mask >> d & 1 and count < pieces:
                kept |= np.int64(1) << d
                count += 1
                begin = ancestors[d]
        start[node] = begin
        masks[node] = kept | np.int64(1) << depths[node]
    return start
