"""`Sequences`: by which options a kernel is chosen, and what launches are sized and kept by."""

from dataclasses import replace

import torch

from trunkattn import PrefixTree
from trunkattn.training.sequences import Sequences, num_blocks
from trunkattn.training.spec import UNEVEN

SUMS = torch.tensor([0, 100, 300], dtype=torch.int32)
PLAIN = Sequences(True, 0.1)


def in_tree(*lengths: int) -> Sequences:
    tree = PrefixTree.from_segments([-1] * len(lengths), lengths)
    return replace(PLAIN, tree=tree.tables(torch.device("cpu")))


def test_the_layout_names_what_differs_from_a_batch_of_one_length() -> None:
    q, longer = torch.empty(2, 8, 4, 16), torch.empty(2, 9, 4, 16)
    assert PLAIN.layout(q, q) == () and PLAIN.layout(q, longer) == (UNEVEN,)
    assert replace(PLAIN, causal=False).layout(q, longer) == ()
    assert replace(PLAIN, cu_seqlens_q=SUMS, cu_seqlens_k=SUMS).layout(q, longer) == ("cu_seqlens_q",)
    assert in_tree(8).layout(q, longer) == ("tree",)


def test_launches_are_kept_for_tables_of_one_length() -> None:
    assert in_tree(4, 4).kind == in_tree(3, 5).kind
    assert len({in_tree(8).kind, in_tree(4, 4).kind, in_tree(800).kind, PLAIN.kind}) == 4


def test_blocks_of_packed_sequences_are_counted_for_the_worst_case() -> None:
    assert PLAIN.blocks(SUMS, 300, 128) == 300 // 128 + 2
    assert PLAIN.blocks(None, 300, 128) == 3
    assert num_blocks(300, 128, 0) == 0


def test_gradients_of_sinks_are_sums_over_a_batch() -> None:
    lse, delta = torch.zeros(3, 2, 5), torch.ones(3, 2, 5)
    assert PLAIN.sink_gradients(delta, lse).shape == (0,)
    found = replace(PLAIN, sinks=torch.zeros(2)).sink_gradients(delta, lse)
    assert found.tolist() == [-15, -15]
    assert replace(PLAIN, sinks=torch.zeros(2)).sink_gradients(delta[0], lse[0]).tolist() == [-5, -5]
