"""`optimal` against every way to cut each request's path, on every forest of up to 6 requests and 4 levels."""

from collections.abc import Iterator

import numpy as np
import pytest
from numba import njit

from trunkattn.planner.packs import policies as packing
from trunkattn.planner.packs.cost import CostModel, partial_cost, read_cost
from trunkattn.planner.packs.optimal import optimal
from trunkattn.planner.planner import HEURISTICS
from trunkattn.planner.prefix_forest import Forest, build_forest

Shape = tuple  # a shared node: its groups; a request: ()
MAX_REQUESTS, MAX_LEVELS = 6, 4


def _partitions(total: int, largest: int) -> Iterator[tuple[int, ...]]:
    if total == 0:
        yield ()
    for first in range(min(total, largest), 0, -1):
        for rest in _partitions(total - first, first):
            yield (first, *rest)


def _groups(sizes: tuple[int, ...], levels: int) -> Iterator[tuple[Shape, ...]]:
    if not sizes:
        yield ()
        return
    for shape in _shapes(sizes[0], levels):
        for rest in _groups(sizes[1:], levels):
            yield (shape, *rest)


def _shapes(requests: int, levels: int) -> Iterator[Shape]:
    """One tree of `requests` requests with at most `levels` nodes on a path; a shared node has at least two groups."""
    if requests == 1:
        yield ()
    elif levels > 1:
        for sizes in _partitions(requests, requests - 1):
            yield from _groups(sizes, levels - 1)


def all_forests() -> list[tuple[Shape, ...]]:
    return [
        forest
        for requests in range(1, MAX_REQUESTS + 1)
        for sizes in _partitions(requests, requests)
        for forest in _groups(sizes, MAX_LEVELS)
    ]


def make_forest(groups: tuple[Shape, ...], rng: np.random.Generator) -> tuple[Forest, np.ndarray]:
    """Random node lengths (page size 1), some leaves empty; random query lengths of 1 to 3."""
    rows: list[list[int]] = []
    next_page = 1

    def grow(shape: Shape, prefix: list[int]) -> None:
        nonlocal next_page
        length = int(rng.choice([1, 2, 5, 30, 200])) if shape else int(rng.choice([0, 1, 4, 60]))
        if not shape and not prefix:
            length = max(length, 1)
        path = prefix + list(range(next_page, next_page + length))
        next_page += length
        if not shape:
            rows.append(path)
        for child in shape:
            grow(child, path)

    for group in groups:
        grow(group, [])
    query_lens = rng.integers(1, 4, len(rows)).astype(np.int32)
    lens = np.array([len(row) for row in rows], np.int32)
    table = np.zeros((len(rows), int(lens.max())), np.int32)
    for i, row in enumerate(rows):
        table[i, : len(row)] = row
    return Forest(*build_forest(table, lens, query_lens, 1, 1)), query_lens


@njit
def brute_force(forest, query_lens, model):
    """Least cost over every choice, request by request, of the nodes after which its path is cut."""
    num_rows, num_nodes = len(forest.order), len(forest.parent)
    num_cuts = np.empty(num_rows, np.int64)
    total = np.int64(1)
    for i in range(num_rows):
        num_cuts[i] = np.int64(1) << forest.depth[forest.leaf_of[i]]
        total *= num_cuts[i]
    readers = np.zeros((num_nodes + 1, num_nodes), np.int64)
    best = np.int64(1) << 62
    for code in range(total):
        readers[:] = 0
        cost = np.int64(0)
        rest = code
        for i in range(num_rows):
            mask = rest % num_cuts[i]
            rest //= num_cuts[i]
            queries = query_lens[forest.order[i]]
            end = forest.leaf_of[i]
            pieces = 0
            node = end
            while node != -1:
                up = forest.parent[node]
                cut = up == -1 or mask & 1
                mask >>= 1
                if cut:
                    begin = 0 if up == -1 else forest.token_end[up]
                    if forest.token_end[end] > begin:
                        # an empty leaf reads what its parent's other requests read
                        reader = end if forest.token_end[end] > forest.token_start[end] else forest.parent[end]
                        readers[up + 1, reader] += queries
                        pieces += 1
                    end = up
                node = up
            cost += partial_cost(model, pieces, queries)
        for up in range(num_nodes + 1):
            begin = 0 if up == 0 else forest.token_end[up - 1]
            for end in range(num_nodes):
                if readers[up, end] > 0:
                    cost += read_cost(model, forest.token_end[end] - begin, readers[up, end])
        best = min(best, cost)
    return best


def _cost(forest: Forest, start: np.ndarray, query_lens: np.ndarray, model: CostModel) -> int:
    lowest = np.zeros(len(query_lens), np.int32)
    return int(packing.packing_cost(forest, start, lowest, query_lens, model))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_optimal_equals_brute_force(seed: int) -> None:
    rng = np.random.default_rng(seed)
    forests = all_forests()
    assert len(forests) == 99
    for groups in forests:
        forest, query_lens = make_forest(groups, rng)
        model = CostModel(
            kv_bytes=int(rng.choice([1, 512, 4096])),
            partial_bytes=int(rng.choice([1, 300, 20_000])),
            item_bytes=int(rng.choice([0, 100, 50_000])),
            queries_per_tile=18,  # at most 6 requests of 3 query tokens: one tile
            group_size=4,
        )
        queries = packing.queries_below(forest, query_lens)
        start = optimal(forest, queries, model)
        assert _cost(forest, start, query_lens, model) == brute_force(forest, query_lens, model), (groups, model)
        for name, policy in HEURISTICS.items():
            other = _cost(forest, policy(forest, queries, model), query_lens, model)
            assert _cost(forest, start, query_lens, model) <= other, (name, groups, model)
