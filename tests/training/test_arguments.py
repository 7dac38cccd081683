"""What the portable training kernels are told of a call, whatever sequences the interpreter has tried."""

from dataclasses import replace

import pytest
import torch

from trunkattn import PrefixTree
from trunkattn.numerics import LOG2_E
from trunkattn.planner.work_list import UNLIMITED
from trunkattn.training.arguments import Arguments, arguments, with_tables
from trunkattn.training.sequences import Sequences
from trunkattn.training.spec import FlashTile

TILE = FlashTile(64, 32, 4, 2)
PLAIN = Sequences(True, 0.25)
SUMS = torch.tensor([0, 3, 128], dtype=torch.int32)


def told(sequences: Sequences = PLAIN, seqlen_q: int = 128, seqlen_k: int = 128) -> Arguments:
    q, k, v = (
        torch.zeros(2, seqlen_q, 9, 24)[:, :, :8],
        torch.zeros(2, seqlen_k, 2, 24),
        torch.zeros(2, seqlen_k, 2, 40),
    )
    return arguments(q, k, v[..., :16], sequences, TILE, num_blocks=7)


@pytest.mark.parametrize(("seqlen", "even"), [(128, (True, True)), (96, (False, True)), (80, (False, False))])
def test_only_sequences_of_one_length_may_fill_their_blocks(seqlen: int, even: tuple[bool, bool]) -> None:
    """The last block of a packed sequence is cut whatever the tokens of all of them together are."""
    variant = told(seqlen_q=seqlen, seqlen_k=seqlen).variant
    assert (variant.even_q, variant.even_k) == even
    packed = told(replace(PLAIN, cu_seqlens_q=SUMS, cu_seqlens_k=SUMS), seqlen, seqlen).variant
    assert (packed.even_q, packed.even_k, packed.packed) == (False, False, True)


@pytest.mark.parametrize(("window", "seen"), [(12, 12), (24, 24), (2**31 - 1, 32), (None, UNLIMITED)])
def test_a_window_may_be_wider_than_the_keys(window: int | None, seen: int) -> None:
    """20 queries before the last of 5 keys: a window of 12 hides all keys from the first ones. One of 25 hides nothing,
    and neither does 32, a multiple of 16."""
    found = told(replace(PLAIN, sliding_window=window), 20, 5)
    assert (found.batch.window, found.variant.window) == (seen, window is not None)


def test_every_tensor_has_its_own_strides_and_width() -> None:
    found = told(replace(PLAIN, soft_cap=5.0), 128, 64)
    assert found.strides == (128 * 9 * 24, 9 * 24, 24, 64 * 2 * 24, 2 * 24, 24, 64 * 2 * 40, 2 * 40, 40)
    assert found.shape[:3] == (4, (24, 32), (16, 16))
    assert found.scales == (0.25 * LOG2_E, 0.25, 5.0) and told().scales.soft_cap == 0.0
    assert found.numbers == (0, 128, 64, 7) and found.batch.num_qo_heads == 8
    assert (found.variant.causal, found.variant.soft_cap, found.variant.sinks) == (True, True, False)


def test_a_batch_gets_the_tables_of_its_sequences() -> None:
    packed = replace(PLAIN, cu_seqlens_q=SUMS, cu_seqlens_k=SUMS + 1)
    found = told(packed)
    assert found.numbers.num_sequences == 2 and found.batch.cu_seqlens_q is None
    batch = with_tables(found.batch, packed)
    assert batch.cu_seqlens_q is packed.cu_seqlens_q and batch.cu_seqlens_k is packed.cu_seqlens_k
    tree = PrefixTree.from_segments([-1, 0, 0], [64, 40, 24]).tables(torch.device("cpu"))
    planted = replace(PLAIN, tree=tree)
    found = told(planted)
    assert (found.variant.tree, found.numbers.num_sequences, found.batch.segments) == (True, 0, None)
    batch = with_tables(found.batch, planted)
    assert all(getattr(batch, name) is getattr(tree, name) for name in tree._fields) and batch.cu_seqlens_q is None


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 2), (63, 2), (64, 3), (200, 5)])
def test_packed_sequences_have_at_most_so_many_blocks(tokens: int, blocks: int) -> None:
    """Two of them: the whole blocks of all tokens, and for each sequence a cut one."""
    assert PLAIN.blocks(SUMS, tokens, 64) == blocks
    assert PLAIN.blocks(SUMS[:1], tokens, 64) == 0
    assert PLAIN.blocks(None, tokens, 64) == -(-tokens // 64)
