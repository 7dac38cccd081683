"""Block table -> prefix forest: small cases written out, random ones against the definition."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import random_forest
from trunkattn.planner.planner import StepTables
from trunkattn.planner.prefix_forest import ROOT, Forest

from .specs import as_batch, forest_of, make_batch

Node = tuple[int, list[int], int, int, bool]  # parent, rows, first token, one past the last, leaf


def nodes_of(forest: Forest) -> list[Node]:
    rows = [forest.order[a:b].tolist() for a, b in zip(forest.row_start, forest.row_end, strict=True)]
    tokens = zip(forest.token_start.tolist(), forest.token_end.tolist(), strict=True)
    return [
        (parent, rows, *span, leaf)
        for parent, rows, span, leaf in zip(forest.parent.tolist(), rows, tokens, forest.is_leaf.tolist(), strict=True)
    ]


def forest_by_definition(batch: StepTables, page_size: int, share_columns: int) -> Forest:
    """The forest from representatives: rep[r][c] is the lowest row that shares blocks 0..c with row r."""
    query_lens = np.diff(batch.query_start_loc)
    active = [r for r in range(len(query_lens)) if query_lens[r]]
    unit = page_size * share_columns
    blocks = {
        r: [
            tuple(batch.block_table[r, c : c + share_columns])
            for c in range(0, n // unit * share_columns, share_columns)
        ]
        for r, n in ((r, int(batch.seq_lens[r])) for r in active)
    }
    sharers = {
        r: [[s for s in active if blocks[s][: c + 1] == blocks[r][: c + 1]] for c in range(len(blocks[r]))]
        for r in active
    }
    width = max([0, *map(len, blocks.values())]) + 1
    rep = {r: [min(rows) for rows in sharers[r]] + [r] * (width - len(blocks[r])) for r in active}
    order = sorted(active, key=lambda r: rep[r])
    columns: dict[str, list[int]] = {name: [] for name in Forest._fields}
    number: dict[tuple[int, ...], int] = {}  # by the rows of a shared node
    for at, r in enumerate(order):
        shared = [tuple(rows) for rows in sharers[r] if len(rows) > 1]
        up, start = ROOT, 0
        for depth, rows in enumerate([*sorted(set(shared), key=shared.index), None]):
            stop = start + shared.count(rows) * unit if rows else int(batch.seq_lens[r])
            if rows is None or rows not in number:
                node = len(columns["parent"])
                values = (up, depth, at, at + len(rows or (r,)), start, stop, rows is None)
                for name, value in zip(
                    ("parent", "depth", "row_start", "row_end", "token_start", "token_end", "is_leaf"),
                    values,
                    strict=True,
                ):
                    columns[name].append(value)
            else:
                node = number[rows]
            if rows:
                number[rows] = node
            up, start = node, stop
        columns["leaf_of"].append(up)
    columns["order"] = order
    return Forest(*(np.array(columns[name], bool if name == "is_leaf" else np.int32) for name in Forest._fields))


def assert_same(found: Forest, expected: Forest) -> None:
    for name, a, b in zip(Forest._fields, found, expected, strict=True):
        assert a.dtype == b.dtype, name
        assert a.tolist() == b.tolist(), name


def test_no_rows_make_an_empty_forest() -> None:
    assert nodes_of(forest_of(make_batch([]))) == []


def test_one_request_is_one_leaf() -> None:
    assert nodes_of(forest_of(make_batch([[5, 6, 7]], seq_lens=[40]), page_size=16)) == [(ROOT, [0], 0, 40, True)]


def test_equal_rows_share_their_full_pages_and_have_a_private_tail() -> None:
    batch = make_batch([[5, 6, 7], [5, 6, 7]], seq_lens=[40, 40])
    assert nodes_of(forest_of(batch, page_size=16)) == [
        (ROOT, [0, 1], 0, 32, False),
        (0, [0], 32, 40, True),
        (0, [1], 32, 40, True),
    ]


def test_equal_rows_of_full_pages_have_empty_leaves() -> None:
    assert nodes_of(forest_of(make_batch([[5, 6], [5, 6]]))) == [
        (ROOT, [0, 1], 0, 2, False),
        (0, [0], 2, 2, True),
        (0, [1], 2, 2, True),
    ]


def test_a_strict_prefix_of_another_row_has_an_empty_leaf() -> None:
    assert nodes_of(forest_of(make_batch([[1, 2, 3, 4], [1, 2]]))) == [
        (ROOT, [0, 1], 0, 2, False),
        (0, [0], 2, 4, True),
        (0, [1], 2, 2, True),
    ]


def test_a_page_that_only_one_row_fills_is_not_shared() -> None:
    batch = make_batch([[1, 2], [1, 2]], seq_lens=[32, 31])
    assert nodes_of(forest_of(batch, page_size=16)) == [
        (ROOT, [0, 1], 0, 16, False),
        (0, [0], 16, 32, True),
        (0, [1], 16, 31, True),
    ]


def test_a_prefix_that_ends_inside_an_edge_cuts_it() -> None:
    assert nodes_of(forest_of(make_batch([[1, 2, 3, 4], [1, 2, 3, 5], [1, 9]]))) == [
        (ROOT, [0, 1, 2], 0, 1, False),
        (0, [0, 1], 1, 3, False),
        (1, [0], 3, 4, True),
        (1, [1], 3, 4, True),
        (0, [2], 1, 2, True),
    ]


def test_children_are_ordered_by_their_lowest_row() -> None:
    forest = forest_of(make_batch([[9], [1, 3], [1, 2], [9, 4], [1, 3, 5]]))
    assert forest.order.tolist() == [0, 3, 1, 4, 2]
    assert forest.leaf_of.tolist() == [1, 2, 5, 6, 7]


def test_stale_columns_are_ignored() -> None:
    batch = make_batch([[1, 2, 7, 8], [1, 3, 7, 8], [1, 2, 7, -1]], seq_lens=[2, 2, 2])
    clean = make_batch([[1, 2], [1, 3], [1, 2]])
    assert_same(forest_of(batch), forest_of(clean))
    after_longer_rows = make_batch([[1, 2, 3], [1, 2, 4], [1, 2, 5]], seq_lens=[3, 3, 1])
    assert_same(forest_of(after_longer_rows), forest_of(make_batch([[1, 2, 3], [1, 2, 4], [1]])))


def test_rows_without_a_query_are_left_out() -> None:
    batch = make_batch([[1, 2], [1, 3], [-1], [1, 4]], query_lens=[1, 0, 0, 2])
    assert nodes_of(forest_of(batch)) == [
        (ROOT, [0, 3], 0, 1, False),
        (0, [0], 1, 2, True),
        (0, [3], 1, 2, True),
    ]


def test_an_equal_page_after_different_ones_is_not_shared() -> None:
    assert nodes_of(forest_of(make_batch([[1, 2], [3, 2]]))) == [(ROOT, [0], 0, 2, True), (ROOT, [1], 0, 2, True)]


def test_whole_blocks_of_columns_are_shared() -> None:
    batch = make_batch([[1, 2, 3, 4, 5], [1, 2, 3, 6, 7], [1, 8, 3, 4, 5]])
    assert nodes_of(forest_of(batch, share_columns=2)) == [
        (ROOT, [0, 1], 0, 2, False),
        (0, [0], 2, 5, True),
        (0, [1], 2, 5, True),
        (ROOT, [2], 0, 5, True),
    ]


@pytest.mark.property
@given(seed=st.integers(0, 2**32 - 1), page_size=st.integers(1, 128), share_columns=st.integers(1, 3))
def test_a_random_forest_is_the_one_of_the_definition(seed: int, page_size: int, share_columns: int) -> None:
    batch = as_batch(random_forest(np.random.default_rng(seed), page_size=page_size, max_requests=20))
    found = forest_of(batch, page_size, share_columns)
    assert_same(found, forest_by_definition(batch, page_size, share_columns))


@pytest.mark.property
@given(
    rows=st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=12),
    share_columns=st.integers(1, 3),
    data=st.data(),
)
def test_a_crowded_table_gives_the_forest_of_the_definition(
    rows: list[list[int]], share_columns: int, data: st.DataObject
) -> None:
    query_lens = data.draw(st.lists(st.integers(0, 2), min_size=len(rows), max_size=len(rows)))
    batch = make_batch(rows, query_lens=query_lens)
    assert_same(forest_of(batch, 1, share_columns), forest_by_definition(batch, 1, share_columns))
