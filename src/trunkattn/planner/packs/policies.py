"""Packing policies: which nodes of a request's path through the prefix forest are read together.

A packing is one array: `start[node]` is the node after whose end the pack that ends at `node` begins, or ROOT for
token 0. Each request walks from its leaf towards the root along `start`. The requests that stop at a node form a pack:
it reads the tokens from the end of `start[node]` to the end of `node` once for all of them. Here node 0 is the trunk,
and node 1 is shared by requests A and B:

    tokens  0       8   12 15      per_query          pat                cascade
            |---0---|-1-|-2-|  A   A ===============  A ~~~~~~~~~~~~===  A ********~~~~===
                        |-3-|  B   B ===============  B ~~~~~~~~~~~~===  B ********~~~~===
                    |-4-|      C   C ===========      C ********===      C ********===
            start of 0 1 2 3 4     R R R R R          R R 1 1 0          R 0 1 1 0

The stretches of `*` are one pack, read once for all requests that show them, and so are those of `~`. In this case
`pat` lets node 1 carry the trunk's tokens: A and B then have two partials to merge, not three. A node at which no
request stops has no pack.

Sources: PAT, https://arxiv.org/abs/2511.22333, §5.1 with Algorithm 1, and §8.2 for FastTree's rule; RelayAttention,
https://arxiv.org/abs/2402.14808, §3.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.numerics import MAX_INT32
from trunkattn.planner.packs.cost import CostModel, partial_cost, read_cost
from trunkattn.planner.prefix_forest import ROOT, Forest

_PAT_TOKENS_PER_QUERY: Final = 4  # what one query's partial costs, in tokens read

# FastTree's weights of padded rows, padded keys and reductions, in hundredths, and the sizes of its tiles.
_FASTTREE_PAD_ROWS: Final = 66
_FASTTREE_PAD_KEYS: Final = 33
_FASTTREE_REDUCE: Final = 10
_FASTTREE_TILE_KEYS: Final = 32
_FASTTREE_TALL_ROWS: Final = 64
_FASTTREE_SHORT_ROWS: Final = 16


class Packs(NamedTuple):
    """K packs in the order of their nodes, so ancestors first. A row appears once in each of its packs."""

    kv_row: NDArray[np.int32]  # [K] a row of the block table that holds the pack's pages
    token_start: NDArray[np.int32]  # [K]
    token_end: NDArray[np.int32]  # [K]
    row_indptr: NDArray[np.int32]  # [K + 1] into rows
    rows: NDArray[np.int32]  # [...] rows of the block table


@njit(inline="always")
def end_of(forest, node):
    """Tokens from the sequence's start to the end of `node`."""
    return 0 if node == ROOT else forest.token_end[node]


def queries_below(forest: Forest, query_lens: NDArray[np.int32]) -> NDArray[np.int64]:
    """[N] int64: query tokens of all rows below each node."""
    before = np.zeros(len(forest.order) + 1, np.int64)
    np.cumsum(query_lens[forest.order], out=before[1:])
    return before[forest.row_end] - before[forest.row_start]


def per_query(forest: Forest, queries: NDArray[np.int64], model: CostModel) -> NDArray[np.int32]:
    """Every request reads its own KV from start to end, as FlashAttention does."""
    return np.full(len(forest.parent), ROOT, np.int32)


def relay(forest: Forest, queries: NDArray[np.int64], model: CostModel) -> NDArray[np.int32]:
    """What all requests share is read once, and the rest per request (RelayAttention §3.2)."""
    start = np.full(len(forest.parent), ROOT, np.int32)
    if len(start) > 0 and forest.row_end[0] == len(forest.order) and not forest.is_leaf[0]:
        start[forest.is_leaf] = 0
    return start


def cascade(forest: Forest, queries: NDArray[np.int64], model: CostModel) -> NDArray[np.int32]:
    """Every node is a pack of its own: PAT's naive tree, FlashInfer's cascade."""
    return forest.parent


@njit
def pat(forest, queries, model):
    """PAT's Algorithm 1. A node reads its parent's tokens itself if that costs less than a partial for each query.

    That is so iff 4·s ≥ l, where s is the node's queries and l the tokens that its parent carries.
    """
    start = np.empty(len(forest.parent), np.int32)
    for node in range(len(start)):
        up = forest.parent[node]
        if up == ROOT:
            start[node] = ROOT
        else:
            carried = forest.token_end[up] - end_of(forest, start[up])
            start[node] = start[up] if _PAT_TOKENS_PER_QUERY * queries[node] >= carried else up
    return start


@njit(inner=True)
def _padding_cost(rows, keys):
    """Products of padding that FastTree's tiles compute for `rows` query rows and `keys` keys, weighted."""
    tile = _FASTTREE_TALL_ROWS if rows > _FASTTREE_SHORT_ROWS else _FASTTREE_SHORT_ROWS
    padded_rows = (rows + tile - 1) // tile * tile - rows
    padded_keys = max(np.int64(0), _FASTTREE_TILE_KEYS - keys)
    return _FASTTREE_PAD_ROWS * padded_rows * keys + _FASTTREE_PAD_KEYS * padded_keys * rows


@njit
def fasttree(forest, queries, model):
    """FastTree's rule (PAT §8.2): a node reads its parent's tokens itself where that computes less padding."""
    num_nodes = len(forest.parent)
    start = np.empty(num_nodes, np.int32)
    staying = queries.copy()  # queries of a node that no child has taken over
    for node in range(num_nodes):
        up = forest.parent[node]
        if up == ROOT:
            start[node] = ROOT
            continue
        own = np.int64(forest.token_end[node] - forest.token_start[node])
        carried = np.int64(forest.token_end[up] - end_of(forest, start[up]))
        rows_of_parent, rows_of_node = staying[up] * model.group_size, queries[node] * model.group_size
        apart = _padding_cost(rows_of_parent, carried) + _padding_cost(rows_of_node, own)
        apart += _FASTTREE_REDUCE * queries[node]
        merged = _padding_cost(rows_of_parent - rows_of_node, carried) + _padding_cost(rows_of_node, own + carried)
        if apart > merged:
            start[node] = start[up]
            staying[up] -= queries[node]
        else:
            start[node] = up
    return start


@njit
def collect_packs(forest, start, first_visible):
    """The packs of a packing. `first_visible[row]` is the first token that any query of the row sees in its window.

    Raises:
        OverflowError: the packs list more rows than int32 counts.
    """
    order, leaf_of, ends = forest.order, forest.leaf_of, forest.token_end
    num_nodes, num_rows = len(start), len(order)
    rows_of = np.zeros(num_nodes, np.int32)  # rows that stop at the node and see some of its tokens
    first_token = np.empty(num_nodes, np.int32)  # of the node's pack
    total = 0
    for i in range(num_rows):
        node = leaf_of[i]
        while node != ROOT:
            above = start[node]
            begin = max(0 if above == ROOT else ends[above], first_visible[order[i]])
            if ends[node] > begin:
                first_token[node] = begin if rows_of[node] == 0 else min(first_token[node], begin)
                rows_of[node] += 1
                total += 1
            node = above
    if total > MAX_INT32:
        raise OverflowError("rows of packs")
    num_packs = 0
    for node in range(num_nodes):
        if rows_of[node] > 0:
            num_packs += 1
    kv_row = np.empty(num_packs, np.int32)
    pack_start = np.empty(num_packs, np.int32)
    pack_end = np.empty(num_packs, np.int32)
    indptr = np.zeros(num_packs + 1, np.int32)
    rows = np.empty(total, np.int32)
    next_row = np.empty(num_nodes, np.int32)  # where the next row of the node's pack goes
    pack = 0
    for node in range(num_nodes):
        if rows_of[node] > 0:
            pack_start[pack], pack_end[pack] = first_token[node], ends[node]
            next_row[node] = indptr[pack]
            indptr[pack + 1] = indptr[pack] + rows_of[node]
            pack += 1
    for i in range(num_rows):
        row, node = order[i], leaf_of[i]
        while node != ROOT:
            above = start[node]
            if ends[node] > max(0 if above == ROOT else ends[above], first_visible[row]):
                rows[next_row[node]] = row
                next_row[node] += 1
            node = above
    for k in range(num_packs):
        kv_row[k] = rows[indptr[k]]
    return Packs(kv_row, pack_start, pack_end, indptr, rows)


@njit
def packing_cost(forest, start, first_visible, query_lens, model):
    """int64 bytes: the reads of every pack, and the partial results of every query whose KV lies in several.

    The packs are those of `collect_packs`, but no rows are listed: in a deep forest these take far more time and memory
    than the forest. A node adds its queries to those of `start[node]` instead, and a row takes its own away at the
    first node on its way that its window hides.
    """
    order, ends, num_nodes = forest.order, forest.token_end, len(start)
    # The last entries stand for ROOT, which is -1.
    num_packs = np.zeros(num_nodes + 1, np.int64)  # on the way from the node, which is included, to token 0
    queries = np.zeros(num_nodes + 1, np.int64)  # of the node's pack
    lowest = np.full(num_nodes + 1, MAX_INT32, np.int32)  # the first token that any of them sees
    for node in range(num_nodes):
        above = start[node]
        num_packs[node] = num_packs[above] + (ends[node] > end_of(forest, above))
    cost = np.int64(0)
    for i in range(len(order)):
        row, leaf = order[i], forest.leaf_of[i]
        hidden = leaf if first_visible[row] > 0 else ROOT
        while hidden != ROOT and ends[hidden] > first_visible[row]:
            hidden = start[hidden]
        queries[leaf] += query_lens[row]
        queries[hidden] -= query_lens[row]
        lowest[leaf] = first_visible[row]
        cost += partial_cost(model, num_packs[leaf] - num_packs[hidden], query_lens[row])
    for node in range(num_nodes - 1, -1, -1):  # a node comes after the nodes at which its pack may begin
        above = start[node]
        tokens = ends[node] - max(end_of(forest, above), lowest[node])
        if tokens > 0:
            cost += read_cost(model, tokens, queries[node])
        queries[above] += queries[node]
        lowest[above] = min(lowest[above], lowest[node])
    return cost
