"""Copies of a `PrefixTree`: for other processes, and in files."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trunkattn import PrefixTree


class _Elsewhere(torch.Tensor):
    """A tensor that has to be asked to come to the CPU, as one on a GPU has."""

    def numpy(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def cpu(self, *arguments: Any, **options: Any) -> torch.Tensor:
        return self.as_subclass(torch.Tensor)


def test_a_saved_tree_is_loaded_to_the_cpu() -> None:
    """Whatever the map_location is, and by the loader that runs no code."""
    tree, file = PrefixTree.from_prompt([1, 2, 3], [[4, 5], [6]]), io.BytesIO()
    torch.save({"tree": tree}, file)
    file.seek(0)
    with torch.serialization.safe_globals([PrefixTree]):
        loaded = torch.load(file, weights_only=True)["tree"]
    moved = object.__new__(PrefixTree)
    state = tree.__getstate__()
    moved.__setstate__(
        {name: each.as_subclass(_Elsewhere) if torch.is_tensor(each) else each for name, each in state.items()}
    )
    for found in (loaded, moved):
        assert torch.equal(found.subtree_end, tree.subtree_end) and found.work == tree.work
        for part, expected in zip(found.pack(), tree.pack(), strict=True):
            assert torch.equal(part, expected)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda tree: pickle.loads(pickle.dumps(tree))])
def test_a_copy_has_nothing_that_was_made_for_this_process(copied: Callable[[PrefixTree], PrefixTree]) -> None:
    """Such as tables on a GPU, or a plan of cuDNN, which no other process could read."""
    tree = PrefixTree.from_prompt([5, 6], [[7], [8]])
    tree.cached("plan", lambda: (part for part in "nothing that could be copied or pickled"))
    other = copied(tree)
    assert torch.equal(other.subtree_end, tree.subtree_end)
    assert all(map(torch.equal, other.pack(), tree.pack()))  # type: ignore[arg-type]


def test_a_tree_stays_as_it_is() -> None:
    tree = PrefixTree.from_prompt([5, 6], [[7], [8]])
    with pytest.raises(AttributeError, match="tokens of a PrefixTree is fixed: make another tree"):
        tree.tokens = None
    with pytest.raises(AttributeError, match="tokens of a PrefixTree is fixed: make another tree"):
        del tree.tokens
    assert repr(tree) == "PrefixTree(num_sequences=2, num_tokens=4)"
