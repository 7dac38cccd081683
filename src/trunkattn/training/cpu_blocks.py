"""Attention and its gradients on a CPU, one sequence at a time, in blocks of PyTorch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

from trunkattn.training.sequences import Sequences

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Triple: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_CPU_BLOCK: Final = 256  # queries and keys of a tile: 256 KiB of scores a head


def sums_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype in which sums are made."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _blocks(begin: int, end: int) -> Iterator[slice]:
    """[begin, end) in blocks that end at multiples of their size."""
    while begin < end:
        stop = min(begin // _CPU_BLOCK * _CPU_BLOCK + _CPU_BLOCK, end)
        yield slice(begin, stop)
        begin = stop


@dataclass(frozen=True)
class CpuSequence:
    """One sequence, or one tree, with the KV head as the first axis. q [num_kv_heads, rows, head_dim]: a row is a query
    token of one head of the group, in the order of the tokens. k, v [num_kv_heads, tokens, head_dim]. Tiles in which no
    row sees a key are skipped."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    group: int
    given: Sequences

    def by_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, n] as [num_kv_heads, rows, n], in the dtype of sums."""
        num_kv_heads, (tokens, heads, width) = self.q.shape[0], tensor.shape
        per_head = tensor.to(self.q.dtype).view(tokens, num_kv_heads, heads // num_kv_heads, width)
        return per_head.transpose(0, 1).reshape(num_kv_heads, tokens * heads // num_kv_heads, width)

    def by_token(self, tensor: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """The inverse of `by_head`. heads: number of heads; None for that of q."""
        num_kv_heads, rows, width = tensor.shape
        group = self.group if heads is None else heads // num_kv_heads
        return (
            tensor.view(num_kv_heads, rows // group, group, width)
            .transpose(0, 1)
            .reshape(-1, num_kv_heads * group, width)
        )

    def tiles(self) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """(rows, keys, logits) of every tile in which some row sees a key. Logits are -inf where a row does not see the
        key. Rows that see no key, and without a tree keys that no row of the tile sees, are in none, because they may
        be NaN, and NaN times a weight of 0 is NaN."""
        tokens, tree = self.q.shape[1] // self.group, self.given.tree
        offset = self.k.shape[1] - tokens
        for block in _blocks(self._first_query(offset), tokens):
            rows = slice(block.start * self.group, block.stop * self.group)
            position = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=self.q.device) // self.group
            depth = position + offset if tree is None else tree.depths[position]
            for keys in self._key_blocks(position + offset, depth):
                logits = self.q[:, rows] @ self.k[:, keys].mT * self.given.sm_scale
                if self.given.soft_cap is not None:
                    logits = self.given.soft_cap * torch.tanh(logits / self.given.soft_cap)
                for hidden in self._hidden(keys, position + offset, depth):
                    logits.masked_fill_(hidden, -math.inf)
                yield rows, keys, logits

    def _first_query(self, offset: int) -> int:
        """The first query that sees a key. offset: the place of the first one among the keys."""
        if self.given.causal:
            return max(0, -offset)
        return 0 if self.given.sliding_window is None else max(0, 1 - offset - self.given.sliding_window)

    def _key_blocks(self, position: torch.Tensor, depth: torch.Tensor) -> Iterator[slice]:
        """The blocks of keys of which a block of rows may see a part."""
        given, window = self.given, self.given.sliding_window
        begin, end, first, last = 0, self.k.shape[1], int(position[0]), int(position[-1])
        if given.causal:
            end = min(end, max(0, last + 1))
        if window is not None and given.tree is None:
            begin, end = max(0, first + 1 - window), min(end, max(0, last + window))
        for keys in _blocks(begin, end):
            if given.tree is not None:
                unseen = int(given.tree.subtree_end[keys].max()) <= first
                if unseen or (window is not None and int(depth.min() - given.tree.depths[keys].max()) >= window):
                    continue
            yield keys

    def _hidden(self, keys: slice, position: torch.Tensor, depth: torch.Tensor) -> Iterator[torch.Tensor]:
        """Masks of the keys that rows do not see [rows, keys], of each reason that holds anywhere."""
        given, window = self.given, self.given.sliding_window
        number = torch.arange(keys.start, keys.stop, dtype=torch.int64, device=self.q.device)
        key_depth = number
        if given.causal and keys.stop - 1 > int(position[0]):
            yield number > position[:, None]
        if given.tree is not None:
            ends, key_depth = given.tree.subtree_end[keys], given.tree.depths[keys]
            if int(ends.min()) <= int(position[-1]):
                yield ends <= position[:, None]
        if window is not None:
            if int(depth.max() - key_depth.min()) >= window:
                yield depth[:, None] - key_depth >= window
            if not given.causal and int(key_depth.max() - depth.min()) >= window:
                yield key_depth - depth[:, None] >= window

    def _empty_sums(self) -> Pair:
        """The maximum and the sum of rows that have seen no key, [num_kv_heads, rows, 1]; a sink counts as one."""
        row_sum = torch.zeros_like(self.q[..., :1])
        if self.given.sinks is None:
            return torch.full_like(row_sum, -math.inf), row_sum
        sinks = self.given.sinks.to(self.q.dtype).view(self.q.shape[0], 1, self.group)
        row_max = sinks.repeat(1, self.q.shape[1] // self.group, 1).view(row_sum.shape)
        return row_max, (row_max > -math.inf).to(self.q.dtype)

    @torch.autocast("cpu", enabled=False)  # it would make these products in 16 bits
    def forward(self) -> Pair:
        """out and lse [num_kv_heads, rows, head_dim or 1], by online softmax."""
        acc = self.q.new_zeros(*self.q.shape[:2], self.v.shape[-1])
        row_max, row_sum = self._empty_sums()
        for rows, keys, logits in self.tiles():
            new_max = torch.maximum(row_max[:, rows], logits.amax(-1, keepdim=True))
            shift = new_max.masked_fill(new_max == -math.inf, 0.0)  # a row that has seen nothing yet
            p, rescale = torch.exp(logits - shift), torch.exp(row_max[:, rows] - shift)
            row_sum[:, rows] = row_sum[:, rows] * rescale + p.sum(-1, keepdim=True)
            acc[:, rows] = acc[:, rows] * rescale + p @ self.v[:, keys]
            row_max[:, rows] = new_max
        return acc / row_sum.masked_fill(row_sum == 0, 1.0), row_max + torch.log(row_sum)

    @torch.autocast("cpu", enabled=False)
    def backward(self, delta: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor) -> Triple:
        """dq, dk and dv. delta [num_kv_heads, rows, 1]: row sums of dout · out, less dlse. lse: from `forward`."""
        dq, dk, dv = torch.zeros_like(self.q), torch.zeros_like(self.k), torch.zeros_like(self.v)
        shift, cap = lse.masked_fill(lse == -math.inf, math.inf), self.given.soft_cap  # p is 0 where nothing is seen
        for rows, keys, logits in self.tiles():
            p = torch.exp(logits - shift[:, rows])
            ds = p * (dout[:, rows] @ self.v[:, keys].mT - delta[:, rows]) * self.given.sm_scale
            if cap is not None:
                ds = ds * (1 - (logits.clamp(-cap, cap) / cap).square())  # where nothing is seen, p is 0
            dv[:, keys] += p.mT @ dout[:, rows]
            dk[:, keys] += ds.mT @ self.q[:, rows]
            dq[:, rows] += ds @ self.k[:, keys]
        return dq, dk, dv
