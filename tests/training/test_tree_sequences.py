"""Sequences of other kinds than lists of tokens that part: turns that go on from each other, and nested tensors."""

import torch

from trunkattn import PrefixTree, flash_attention


def test_the_turns_of_a_conversation_go_on_from_each_other() -> None:
    """Each turn is a sequence, and the last one holds all tokens."""
    turns = [[1, 2, 3, 4, 5, 6], [1, 2], [1, 2, 3, 4], [1, 2, 7]]
    tree = PrefixTree.from_sequences(turns)
    assert (tree.parents, tree.lengths, tree.leaves) == ((-1, 0, 1, 0), (2, 2, 2, 1), (2, 0, 1, 3))
    assert tree.pack([torch.full((len(turn),), 10.0**place) for place, turn in enumerate(turns)]).weights.tolist() == [
        *(0, 1111, 101, 101, 1, 1, 1000)
    ]
    q, k, v = (torch.randn(tree.num_tokens, 2, 8, requires_grad=True) for _ in range(3))
    for found, turn in zip(tree.unpack(flash_attention(q, k, v, tree=tree)), tree.sequence_indices(), strict=True):
        torch.testing.assert_close(found, flash_attention(q[turn][None], k[turn][None], v[turn][None], True)[0])


def test_nested_tensors_are_sequences() -> None:
    sequences = [[1, 2], [1, 3, 4]]
    for layout in (torch.jagged, torch.strided):
        given = torch.nested.nested_tensor([torch.tensor(own) for own in sequences], layout=layout)
        tree = PrefixTree.from_sequences(given)
        assert [tree.tokens[own].tolist() for own in tree.sequence_indices()] == sequences
        ones = torch.nested.nested_tensor([torch.ones(len(own)) for own in sequences], layout=layout)
        assert torch.equal(tree.pack(ones).weights, tree.pack().weights)
