"""What is attended to in training, for every kernel. Triton is not imported here."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from trunkattn.planner.work_list import UNLIMITED

OPTIONS: Final = ("sliding_window", "logits_soft_cap", "sinks")  # arguments of `flash_attention`


def aligned_tokens(tokens: int) -> int:
    """Room for a number of 4 bytes for each token, in whole 16 bytes."""
    return -(-tokens // 4) * 4


class TreeTables(NamedTuple):
    """A prefix tree as kernels read it: int32 tensors on the device of the queries.

    subtree_end, depths, segment_of: [tokens], the end of the range of tokens that see a token, the number of its
    ancestors, and its segment. segments: [segments, 4], the first token of each, the end of its own tokens, its parent
    or -1, and the number of segments above it.
    """

    subtree_end: torch.Tensor
    depths: torch.Tensor
    segment_of: torch.Tensor
    segments: torch.Tensor

    @classmethod
    def views(cls, flat: torch.Tensor, tokens: int) -> "TreeTables":
        """The tables of so many tokens in `flat`, int32, where one lies after the other, each at 16 bytes: one copy
        takes them to a device, and kernels are not compiled anew for another alignment."""
        room = aligned_tokens(tokens)
        subtree_end, depths, segment_of = (flat[begin : begin + tokens] for begin in (0, room, 2 * room))
        return cls(subtree_end, depths, segment_of, flat[3 * room :].view(-1, 4))


@dataclass(frozen=True)
class Sequences:
    """What is attended to, and how logits are made.

    causal: a query sees the keys up to its place; always so in a tree. cu_seqlens_q, cu_seqlens_k: [num_sequences + 1]
    int32 of packed tensors, else None. sliding_window: a query sees this many keys to each side, itself included; None
    for all. soft_cap: c > 0 turns a logit x into c · tanh(x / c); None for no cap. sinks: [num_qo_heads], a logit
    without a value in every softmax of a head; None for none.
    """

    causal: bool
    sm_scale: float
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    tree: TreeTables | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    sinks: torch.Tensor | None = None

    @property
    def packed(self) -> bool:
        """Whether tensors are several sequences of [tokens, heads, head_dim] one behind the other."""
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

    def window_within(self, tokens: int) -> int:
        """The window in a sequence of so many queries and keys together, where a larger one than that hides nothing
        and would not fit the kernels' sums of 32 bits; `UNLIMITED` for none."""
        return UNLIMITED if self.sliding_window is None else min(self.sliding_window, tokens)

    def blocks(self, cu_seqlens: torch.Tensor | None, tokens: int, block: int) -> int:
        """The blocks of each sequence of a batch, or of all packed ones, for one head."""
        if cu_seqlens is None:
            return -(-tokens // block)
        return tokens // block + len(cu_seqlens) - 1 if len(cu_seqlens) > 1 else 0

    def sink_gradients(self, delta: torch.Tensor, lse: torch.Tensor) -> torch.Tensor:
        """The gradients of sinks, [num_qo_heads], from delta (row sums of dout · out, less dlse) and lse, both
        [..., num_qo_heads, tokens]. A sink's weight is exp(sink - lse), and it has no value."""
        if self.sinks is None:
            return lse.new_empty(0)
        weight = torch.exp(self.sinks.to(lse.dtype)[:, None] - lse).masked_fill(lse == -torch.inf, 0.0)
        return -(weight * delta).reshape(-1, *lse.shape[-2:]).sum((0, 2))
