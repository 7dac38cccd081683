"""Tables of trees as GPUs make them, under Triton's interpreter, beside those that PyTorch makes on a CPU."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from hypothesis import given, settings

from trunkattn import PrefixTree
from trunkattn.gpu.bound import BoundLaunch
from trunkattn.training.cudnn_trees import intervals
from trunkattn.training.sequences import LARGEST_BLOCK
from trunkattn.training.spec import hopper_forward_tile
from trunkattn.training.tree_tables import intervals as intervals_on_gpu
from trunkattn.training.tree_tables import tables_of_segments

from .tree_cases import trees

pytestmark = pytest.mark.slow
CPU = torch.device("cpu")


@settings(max_examples=20)
@given(tree=trees(90))
@pytest.mark.property
def test_tables_and_intervals_are_those_of_a_cpu(tree: PrefixTree) -> None:
    expected = tree.tables(CPU)
    found = tables_of_segments(tree._by_segment, tree.num_tokens)
    assert all(map(torch.equal, found, expected))
    assert all(table.data_ptr() % 16 == found[0].data_ptr() % 16 for table in found[:3])
    assert torch.equal(intervals_on_gpu(found, tree.num_levels), intervals(expected, tree.num_levels))


def test_tables_reach_a_block_beyond_the_tokens() -> None:
    """Kernels read blocks of them without a bound, also of copies that torch.compile makes."""
    tree = PrefixTree.from_segments([-1, 0, 0], [60, 40, 41])
    head_dims = range(40, 257, 8)
    largest = max(hopper_forward_tile((keys, values)).block_n for keys in head_dims for values in head_dims)
    assert largest <= LARGEST_BLOCK
    for tables in (tree.tables(CPU), tables_of_segments(tree._by_segment, tree.num_tokens)):
        assert len(tables.subtree_end) == len(tables.depths) >= tree.num_tokens + LARGEST_BLOCK
        assert len(tables.segment_of) == len(tree.subtree_end) == tree.num_tokens
        assert tables.subtree_end.is_contiguous() and tables.depths.is_contiguous()


def test_launches_go_to_the_device_of_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not to the current one, whose stream and memory are others."""
    current: list[torch.Tensor] = []
    launched: list[torch.Tensor] = []

    @contextmanager
    def device_of(tensor: torch.Tensor) -> Iterator[None]:
        current.append(tensor)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    monkeypatch.setattr(BoundLaunch, "__call__", lambda *_: launched.append(current[-1]))
    tree = PrefixTree.from_segments([-1, 0, 0], [6, 4, 4])
    found = tables_of_segments(tree._by_segment, tree.num_tokens)
    ends = intervals_on_gpu(tree.tables(CPU), tree.num_levels)
    assert [tensor.data_ptr() for tensor in launched] == [found.subtree_end.data_ptr(), ends.data_ptr()]


def test_more_tokens_than_programs_take_at_once() -> None:
    tree = PrefixTree.from_segments([-1, 0, 1, 0, -1], [30_000, 3_000, 1, 700, 7])
    found = tables_of_segments(tree._by_segment, tree.num_tokens)
    assert all(map(torch.equal, found, tree.tables(CPU)))
    assert torch.equal(intervals_on_gpu(found, 3), intervals(tree.tables(CPU), 3))
