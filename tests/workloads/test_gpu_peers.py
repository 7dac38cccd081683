"""The batches of benchmarks/kernels/ragged_batches.py, and the trees that FastTree is given, on a CPU."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from benchmarks.kernels.ragged_batches import (
    LONGEST_PRIVATE,
    OURS,
    PEERS,
    compare,
    grown,
    make_batches,
    mooncake_batch,
    sample,
)
from benchmarks.peers.gpu_kernels import TreeNode, fasttree_nodes
from benchmarks.workloads import PagedBatch, parse_tree, random_forest, tree_batch
from trunkattn.analysis.reading.tokens import chained
from trunkattn.analysis.records import LoggedRequest

from .scripts import refusal

pytestmark = pytest.mark.slow

SEEDS = st.integers(0, 2**32 - 1)


def decode_forest(seed: int, page_size: int) -> PagedBatch:
    """A random forest with one query token per request."""
    found = random_forest(np.random.default_rng(seed), page_size=page_size, max_own_tokens=5 * page_size)
    rows = np.flatnonzero(found.seq_lens)
    ones = np.ones(len(rows), np.int32)
    return PagedBatch(found.block_table[rows], found.seq_lens[rows], ones, page_size, found.num_pages)


def slots_of(batch: PagedBatch, row: int) -> NDArray[np.int64]:
    """Places of a request's tokens in the cache, in order."""
    positions = np.arange(batch.seq_lens[row])
    pages = batch.block_table[row, positions // batch.page_size].astype(np.int64)
    return pages * batch.page_size + positions % batch.page_size


def path_to(tree: list[TreeNode], node: int) -> list[int]:
    """Nodes from the root."""
    return [*path_to(tree, tree[node].parent), node] if node > 0 else [0]


@pytest.mark.property
@given(SEEDS, st.sampled_from([1, 3, 16]))
def test_the_path_to_a_request_in_fasttrees_tree_is_its_tokens_in_order(seed: int, page_size: int) -> None:
    batch = decode_forest(seed, page_size)
    tree, slots = fasttree_nodes(batch)
    ends = np.cumsum([0] + [node.seqlen for node in tree])
    assert ends[-1] == len(slots)
    reached = []
    for leaf in (i for i, node in enumerate(tree) if i > 0 and node.num_children == 0):
        (row,) = tree[leaf].requests
        path = path_to(tree, leaf)
        assert np.concatenate([slots[ends[i] : ends[i + 1]] for i in path]).tolist() == slots_of(batch, row).tolist()
        reached.append(row)
    assert sorted(reached) == list(range(len(batch.seq_lens)))


@pytest.mark.property
@given(SEEDS)
def test_fasttrees_tree_is_one_tree_with_an_empty_root(seed: int) -> None:
    tree, _ = fasttree_nodes(decode_forest(seed, 4))
    assert (tree[0].parent, tree[0].seqlen) == (-1, 0)
    for i, node in enumerate(tree):
        children = [child for child in tree[1:] if child.parent == i]
        assert node.num_children == len(children)
        assert node.parent < i
        if children:
            assert sorted(node.requests) == sorted(request for child in children for request in child.requests)


def test_a_regular_tree_comes_level_by_level() -> None:
    tree, slots = fasttree_nodes(tree_batch(parse_tree("2,4,8_32,16,5"), 16))
    assert [node.seqlen for node in tree] == [0] + 2 * [32] + 4 * [16] + 8 * [5]
    assert [node.parent for node in tree] == [-1, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]
    assert [node.requests for node in tree[7:]] == [[row] for row in range(8)]
    assert slots[:128].tolist() == list(range(128))  # the pages of a regular tree are numbered level by level too


def trace_of(count: int) -> list[LoggedRequest]:
    """Requests that arrive every 100 ms and share their first 512 tokens; 300 output tokens each."""
    ids = [np.array([0, *range(100 * i + 1, 100 * i + 2 + i // 64)]) for i in range(count)]
    return [LoggedRequest(i + 1, 0.1 * i, 513 + 8 * i, 300, chained(some), 512) for i, some in enumerate(ids)]


@pytest.mark.parametrize("num_requests", [1, 30, 150])
def test_every_workload_has_the_requests_that_were_asked_for(num_requests: int) -> None:
    batches = make_batches(trace_of(600), num_requests)
    assert list(batches) == ["mooncake", "conversation", "toolagent"]
    for batch in batches.values():
        assert len(batch.block_table) == len(batch.seq_lens) == num_requests
        assert batch.query_lens.tolist() == [1] * num_requests
        slots = np.concatenate([slots_of(batch, row) for row in range(num_requests)])
        assert np.array_equal(np.unique(slots // 16), np.arange(batch.num_pages)), "no page is left over"
        assert len(fasttree_nodes(batch)[1]) == len(np.unique(slots))
    assert batches["conversation"].seq_lens.max() <= 46 + 348 + 2123 + LONGEST_PRIVATE


def test_without_a_trace_there_is_no_mooncake_workload() -> None:
    assert list(make_batches((), 3)) == ["conversation", "toolagent"]


def test_a_trace_that_is_never_busy_enough_is_refused() -> None:
    with pytest.raises(ValueError, match="--trace has fewer than 3 requests in decode at once"):
        mooncake_batch(trace_of(3), 3)


@given(SEEDS)
def test_a_sample_keeps_what_requests_share(seed: int) -> None:
    batch = decode_forest(seed, 16)
    chosen = sample(batch, len(batch.seq_lens))
    assert sorted(chosen.seq_lens) == sorted(batch.seq_lens)
    forests = [fasttree_nodes(each)[0] for each in (batch, chosen)]
    lengths, others = (sorted((node.seqlen, len(node.requests)) for node in tree) for tree in forests)
    assert lengths == others


@pytest.mark.parametrize("steps", [1, 16, 40])
def test_a_batch_grows_on_new_pages(steps: int) -> None:
    batch = tree_batch(parse_tree("1,2,3_16,32,5"), 16)
    table, lens = grown(batch, steps)
    assert [len_.tolist() for len_ in lens] == [[53 + step] * 3 for step in range(steps)]
    assert table[:, :4].tolist() == batch.block_table.tolist()
    new = table[:, 4:].flatten().tolist()
    assert min(new) >= batch.num_pages and len(set(new)) == len(new)
    assert table.shape[1] * 16 >= lens[-1].max()


def test_a_step_is_a_plan_and_32_layers() -> None:
    peer = next(iter(PEERS))
    cells: dict[str, dict[str, Any]] = {
        "trunkattn": {"us": 10.0, "plan_us": 80.0, "grown_plan_us": 40.0},
        "trunkattn_per_query": {"us": 20.0, "plan_us": 60.0, "grown_plan_us": 50.0},
        **{name: {"missing": "it does not import"} for name in PEERS},
        peer: {"us": 15.0, "plan_us": 20.0, "grown_plan_us": 20.0},
    }
    found = compare(cells)
    assert [cells[name]["step_us"] for name in (*OURS, peer)] == [400, 700, 500]
    assert found == {
        "best_peer": peer, "over_best_peer": 0.8, "over_per_query": round(400 / 700, 4),
        "grown_best_peer": peer, "grown_over_best_peer": 0.72, "grown_over_per_query": round(360 / 690, 4),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--requests", "8", "0"], "argument --requests: expected an integer from 1 to 100000, got '0'"),
        (["--heads", "3/2"], "argument --heads: invalid choice: '3/2'"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], expected: str) -> None:
    assert expected in refusal("benchmarks.kernels.ragged_batches", arguments)
