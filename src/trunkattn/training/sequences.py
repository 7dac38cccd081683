"""Descriptions of the sequences and trees that training kernels attend to. Triton is not imported here."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from trunkattn.gpu.bound import is_aligned
from trunkattn.planner.work_list import UNLIMITED
from trunkattn.training.spec import UNEVEN

OPTIONS: Final = ("sliding_window", "logits_soft_cap", "sinks")  # arguments of `flash_attention`


LARGEST_BLOCK: Final = 256  # tokens of a kernel's block of queries or keys, at most


def table_length(tokens: int) -> int:
    """The entries of a tree's table: one for each token, and a block more, so that kernels read whole blocks from any
    token on without a bound. Rounded up so that an int32 for each entry fills a multiple of 16 bytes."""
    return -(-(tokens + LARGEST_BLOCK) // 4) * 4


def num_blocks(tokens: int, block: int, num_sequences: int | None) -> int:
    """The blocks of a sequence, or the most that so many packed sequences have together."""
    if num_sequences is None:
        return -(-tokens // block)
    return tokens // block + num_sequences if num_sequences else 0


class TreeWork(NamedTuple):
    """What a tree costs. pairs: of a query and a key that it sees. largest: the tokens of the largest root's tree. Both
    are 0 without a tree."""

    pairs: int
    largest: int


NO_TREE: Final = TreeWork(0, 0)


class TreeTables(NamedTuple):
    """A prefix tree as kernels read it: int32 tensors on the device of the queries.

    subtree_end, depths: [table_length(tokens)] for each token one past the last token that sees it, and the number of
    its ancestors; entries past the tokens are there to be read and mean nothing. segment_of: [tokens] for each token
    its segment. segments: [segments, 4] for each segment its first token, one past its last token, its parent or -1,
    and the number of segments above it.
    """

    subtree_end: torch.Tensor
    depths: torch.Tensor
    segment_of: torch.Tensor
    segments: torch.Tensor

    @classmethod
    def of_segments(cls, numbers: torch.Tensor, tokens: int) -> "TreeTables":
        """Makes the tables of a tree on the device of `numbers`, without waiting for it.

        numbers: int32 [7 · segments]: `segments` row by row, then of all segments the ends of their subtrees, the
        numbers of ancestors of their first tokens less the numbers of these tokens, and their lengths, the last one
        longer by the entries that tables have past the tokens.
        """
        count = len(numbers) // 7
        of_tokens, lengths = numbers[4 * count : 6 * count].view(2, count), numbers[6 * count :]
        segment_of = torch.repeat_interleave(lengths, output_size=table_length(tokens))
        subtree_end, depths = of_tokens.index_select(1, segment_of)
        # not in place, which torch.func.functionalize refuses
        depths = depths + torch.arange(len(depths), dtype=torch.int32, device=numbers.device)
        return cls(subtree_end, depths, segment_of[:tokens], numbers[: 4 * count].view(count, 4))


@dataclass(frozen=True)
class Sequences:
    """The sequences of a call, and how their logits are made.

    causal: a query sees the keys up to its place; always so in a tree. cu_seqlens_q, cu_seqlens_k: [num_sequences + 1]
    int32 of packed tensors, else None. sliding_window: a query sees this many keys to each side, itself included; None
    for all. soft_cap: c > 0 turns a logit x into c · tanh(x / c); None for no cap. sinks: [num_qo_heads], a logit
    without a value in every softmax of a head; None for none. pairs, largest: the `TreeWork`.
    """

    causal: bool
    sm_scale: float
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    tree: TreeTables | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None
    pairs: int = 0
    largest: int = 0

    @property
    def kind(self) -> tuple[Hashable, ...]:
        """The properties on which a bound launch depends, besides q, k and v. A launch that was bound for some
        sequences computes all others of the same kind."""
        tensors = (self.sinks, self.cu_seqlens_q, self.cu_seqlens_k, *(self.tree or ()))
        kinds = [None if tensor is None else (tensor.dtype, tensor.shape[0], is_aligned(tensor)) for tensor in tensors]
        return self.causal, self.sm_scale, self.sliding_window, self.soft_cap, *kinds

    @property
    def packed(self) -> bool:
        """Whether tensors are several sequences of [tokens, heads, head_dim] one after the other."""
        return self.cu_seqlens_q is not None

    @property
    def has_batch(self) -> bool:
        """Whether tensors are [batch, tokens, heads, head_dim]."""
        return self.cu_seqlens_q is None and self.tree is None

    @property
    def options(self) -> tuple[str, ...]:
        """The arguments of `flash_attention` that are given and not every kernel has."""
        given = (self.sliding_window, self.soft_cap, self.sinks)
        return tuple(name for name, value in zip(OPTIONS, given, strict=True) if value is not None)

    def layout(self, q: torch.Tensor, k: torch.Tensor) -> tuple[str, ...]:
        """The options for a `TrainingConfig` by which these sequences differ from a batch of sequences of one
        length."""
        if self.packed:
            return ("cu_seqlens_q",)
        if self.tree is not None:
            return ("tree",)
        return (UNEVEN,) if self.causal and q.shape[1] != k.shape[1] else ()

    def window_within(self, tokens: int) -> int:
        """The window, at most `tokens`, the queries and keys of a sequence together, up to a multiple of 16, for which
        Triton compiles. A larger window hides nothing, and would overflow the kernels' 32-bit sums. `UNLIMITED` if
        there is no window."""
        return UNLIMITED if self.sliding_window is None else min(self.sliding_window, -(-tokens // 16) * 16)

    def blocks(self, cu_seqlens: torch.Tensor | None, tokens: int, block: int) -> int:
        """The blocks of each sequence of a batch, or of all packed ones, for one head."""
        return num_blocks(tokens, block, None if cu_seqlens is None else len(cu_seqlens) - 1)

    def sink_gradients(self, delta: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """The gradients of sinks, [num_qo_heads], from delta (row sums of dout · out, less dlse) and lse, both
        [..., num_qo_heads, tokens]. A sink's weight is exp(sink - lse), and it has no value."""
        if self.sinks is None:
            return lse.new_empty(0)
        weight = torch.exp(self.sinks.to(lse.dtype)[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
        return -(weight * delta).sum((0, -1) if lse.dim() == 3 else -1)
