"""Packing and unpacking trees of many sequences."""

import math

import numpy as np
import torch

from trunkattn import PrefixTree


def test_unpacking_has_one_gradient_for_all_sequences() -> None:
    """One as large as all values for each sequence takes seconds for 10,000 of them. Each part may be written to."""
    tree = PrefixTree.from_segments([-1, *[0] * 50], [3, *[2] * 50])
    values = torch.randn(tree.num_tokens, 2, requires_grad=True)
    parts = tree.unpack(values)
    assert len({part.grad_fn for part in parts}) == 1
    parts[0].zero_()
    parts[1][4] *= 3
    (gradient,) = torch.autograd.grad(sum(part.sum() for part in parts), values)
    expected = torch.ones(tree.num_tokens, 2)
    expected[:3], expected[3:5], expected[6] = 49, 0, 3
    assert torch.equal(gradient, expected)


def test_weights_are_lists_arrays_or_tensors() -> None:
    tree = PrefixTree.from_segments([-1, 0, 0], [2, 1, 1])
    expected = tree.pack([torch.tensor([1.0, 0.1, 1.0]), torch.tensor([1.0, 0.3, 0.0])]).weights
    assert torch.equal(tree.pack([[1, 0.1, True], np.array([1.0, 0.3, 0.0])]).weights, expected)
    assert torch.equal(tree.pack(np.array([[1.0, 0.1, 1.0], [1.0, 0.3, 0.0]])).weights, expected)  # type: ignore[arg-type]


def test_weights_of_many_copies_are_rounded_once() -> None:
    tree = PrefixTree.from_segments([-1, *[0] * 5000], [2, *[1] * 5000])
    weight = torch.tensor([0.1, 0.1, 0.1])
    expected = math.fsum([weight[1].item()] * 5000)
    assert tree.pack([weight] * 5000).weights[1] == torch.tensor(expected, dtype=torch.float32)
