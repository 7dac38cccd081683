"""Sequences that are no lists of tokens: nested tensors."""

import torch

from trunkattn import PrefixTree


def test_nested_tensors_are_sequences() -> None:
    sequences = [[1, 2], [1, 3, 4]]
    for layout in (torch.jagged, torch.strided):
        given = torch.nested.nested_tensor([torch.tensor(own) for own in sequences], layout=layout)
        tree = PrefixTree.from_sequences(given)
        assert [tree.tokens[own].tolist() for own in tree.sequence_indices()] == sequences
        ones = torch.nested.nested_tensor([torch.ones(len(own)) for own in sequences], layout=layout)
        assert torch.equal(tree.pack(ones).weights, tree.pack().weights)
