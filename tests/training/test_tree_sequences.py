"""Trees made from the tokens of their sequences."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trunkattn import PrefixTree

from ..attention.cases import fraction


def test_nested_tensors_are_sequences() -> None:
    sequences = [[1, 2], [1, 3, 4]]
    for layout in (torch.jagged, torch.strided):
        given = torch.nested.nested_tensor([torch.tensor(own) for own in sequences], layout=layout)
        tree = PrefixTree.from_sequences(given)
        assert [tree.tokens[own].tolist() for own in tree.sequence_indices()] == sequences
        ones = torch.nested.nested_tensor([torch.ones(len(own)) for own in sequences], layout=layout)
        assert torch.equal(tree.pack(ones).weights, tree.pack().weights)


def test_children_are_in_the_order_of_the_first_sequence_that_each_holds() -> None:
    sequences = [[9, 5, 1], [3], [9, 2, 8], [9, 5, 7], [3], [9, 2, 4]]
    tree = PrefixTree.from_sequences(sequences)
    assert tree.tokens is not None
    assert tree.tokens.tolist() == [9, 5, 1, 7, 2, 8, 4, 3]
    assert tree.parents == (-1, 0, 1, 1, 0, 4, 4, -1) and tree.leaves == (2, 7, 5, 3, 7, 6)
    assert [tree.tokens[own].tolist() for own in tree.sequence_indices()] == sequences


def test_what_all_answers_begin_with_belongs_to_the_prompt() -> None:
    tree = PrefixTree.from_prompt([1, 2], [[4, 5], [4, 6]])
    assert (tree.parents, tree.lengths, tree.leaves) == ((-1, 0, 0), (3, 1, 1), (1, 2))


def test_tokens_may_be_numbers_of_64_bits() -> None:
    sequences = [[1, 5], [2**32 + 1, 5], [1, 6], [-(2**63), 2**63 - 1], np.array([2**63 - 1], np.uint64)]
    tree = PrefixTree.from_sequences(sequences)
    assert tree.tokens is not None and tree.tokens.tolist() == [1, 5, 6, 2**32 + 1, 5, -(2**63), 2**63 - 1, 2**63 - 1]
    assert [tree.tokens[own].tolist() for own in tree.sequence_indices()] == [*map(list, sequences)]


@pytest.mark.parametrize("rows", [np.array([[1, 2], [1, 3]]), torch.tensor([[1, 2], [1, 3]])], ids=["NumPy", "torch"])
def test_the_rows_of_an_array_are_sequences(rows: Any) -> None:
    tree = PrefixTree.from_sequences(rows)
    assert (tree.parents, tree.lengths, tree.leaves) == ((-1, 0, 0), (1, 1, 1), (1, 2))


def test_sequences_of_several_integer_types_share_what_they_begin_with() -> None:
    tree = PrefixTree.from_sequences([[7, 1], np.array([7, 2], np.uint8), torch.tensor([7, 3], dtype=torch.int16)])
    assert tree.tokens is not None and tree.tokens.tolist() == [7, 1, 2, 3]
    assert tree.tokens.dtype == torch.int64


@settings(max_examples=fraction(2))
@given(
    prompt=st.lists(st.integers(0, 2), min_size=1, max_size=3),
    answers=st.lists(st.lists(st.integers(0, 2), max_size=4), min_size=1, max_size=5),
)
@pytest.mark.property
def test_a_prompt_and_answers_are_their_sequences(prompt: list[int], answers: list[list[int]]) -> None:
    ended = [[*answer, 9] for answer in answers]
    tree = PrefixTree.from_prompt(prompt, ended)
    same = PrefixTree.from_sequences([[*prompt, *answer] for answer in ended])
    assert tree.tokens is not None and same.tokens is not None and torch.equal(tree.tokens, same.tokens)
    assert (tree.parents, tree.lengths, tree.leaves) == (same.parents, same.lengths, same.leaves)


def test_a_tree_keeps_tokens_of_its_own() -> None:
    given = torch.tensor([5, 6, 7])
    trees = PrefixTree.from_segments([-1], [3], tokens=given), PrefixTree.from_sequences([given])
    given.zero_()
    assert all(tree.tokens is not None and tree.tokens.tolist() == [5, 6, 7] for tree in trees)
