"""Attention and its gradients on a CPU, one sequence at a time, in blocks of PyTorch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch

Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]
Triple: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_CPU_BLOCK: Final = 256  # queries and keys of a tile: 256 KiB of scores a head


def sums_dtype(q: torch.Tensor) -> torch.dtype:
    """The dtype in which sums are made."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class CpuSequence:
    """One sequence, KV head first: q [num_kv_heads, rows, head_dim], where a row is a query token of one head of the
    group, tokens in order; k, v [num_kv_heads, tokens, head_dim].

    subtree_end: [tokens] of a prefix tree: key s is seen by the queries before subtree_end[s] only, and tiles of which
    nothing is seen are left out.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    group: int
    causal: bool
    sm_scale: float
    subtree_end: torch.Tensor | None = None

    def by_head(self, tensor: torch.Tensor) -> torch.Tensor:
        """[tokens, heads, n] as [num_kv_heads, rows, n], in the dtype of sums."""
        num_kv_heads, (tokens, heads, width) = self.q.shape[0], tensor.shape
        per_head = tensor.to(self.q.dtype).view(tokens, num_kv_heads, heads // num_kv_heads, width)
        return per_head.transpose(0, 1).reshape(num_kv_heads, tokens * heads // num_kv_heads, width)

    def by_token(self, tensor: torch.Tensor, heads: int | None = None) -> torch.Tensor:
        """The way back. heads: None for those of q."""
        num_kv_heads, rows, width = tensor.shape
        group = self.group if heads is None else heads // num_kv_heads
        return (
            tensor.view(num_kv_heads, rows // group, group, width)
            .transpose(0, 1)
            .reshape(-1, num_kv_heads * group, width)
        )

    def tiles(self) -> Iterator[tuple[slice, slice, torch.Tensor]]:
        """Rows and keys of every tile of which something is seen, and its logits, -inf where nothing is."""
        num_rows, len_k = self.q.shape[1], self.k.shape[1]
        offset = len_k - num_rows // self.group
        for first in range(0, num_rows, _CPU_BLOCK * self.group):
            rows = slice(first, min(first + _CPU_BLOCK * self.group, num_rows))
            queries = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=self.q.device)
            position = queries[:, None] // self.group + offset
            end = min(len_k, max(0, int(position[-1]) + 1)) if self.causal else len_k
            for at in range(0, end, _CPU_BLOCK):
                keys = slice(at, min(at + _CPU_BLOCK, end))
                ends = None if self.subtree_end is None else self.subtree_end[keys]
                if ends is not None and int(ends.max()) <= int(position[0]):
                    continue
                scores = self.q[:, rows] @ self.k[:, keys].mT * self.sm_scale
                if self.causal and keys.stop - 1 > int(position[0]):
                    seen = torch.arange(keys.start, keys.stop, dtype=torch.int64, device=self.q.device)
                    scores.masked_fill_(seen > position, -math.inf)
                if ends is not None and int(ends.min()) <= int(position[-1]):
                    scores.masked_fill_(ends <= position, -math.inf)
                yield rows, keys, scores

    @torch.autocast("cpu", enabled=False)  # it would make these products in 16 bits
    def forward(self) -> Pair:
        """out and lse [num_kv_heads, rows, head_dim or 1], by online softmax."""
        acc, row_sum = torch.zeros_like(self.q), torch.zeros_like(self.q[..., :1])
        row_max = torch.full_like(row_sum, -math.inf)
        for rows, keys, scores in self.tiles():
            new_max = torch.maximum(row_max[:, rows], scores.amax(-1, keepdim=True))
            shift = new_max.masked_fill(new_max == -math.inf, 0.0)  # a row that has seen nothing yet
            p, rescale = torch.exp(scores - shift), torch.exp(row_max[:, rows] - shift)
            row_sum[:, rows] = row_sum[:, rows] * rescale + p.sum(-1, keepdim=True)
            acc[:, rows] = acc[:, rows] * rescale + p @ self.v[:, keys]
            row_max[:, rows] = new_max
        return acc / row_sum.masked_fill(row_sum == 0, 1.0), row_max + torch.log(row_sum)

    @torch.autocast("cpu", enabled=False)
    def backward(self, delta: torch.Tensor, lse: torch.Tensor, dout: torch.Tensor) -> Triple:
        """dq, dk and dv. delta [num_kv_heads, rows, 1]: row sums of dout · out, less dlse. lse: from `forward`."""
        dq, dk, dv = torch.zeros_like(self.q), torch.zeros_like(self.k), torch.zeros_like(self.v)
        shift = lse.masked_fill(lse == -math.inf, math.inf)  # p of a row that sees nothing is 0
        for rows, keys, scores in self.tiles():
            p = torch.exp(scores - shift[:, rows])
            ds = p * (dout[:, rows] @ self.v[:, keys].mT - delta[:, rows]) * self.sm_scale
            dv[:, keys] += p.mT @ dout[:, rows]
            dk[:, keys] += ds.mT @ self.q[:, rows]
            dq[:, rows] += ds @ self.k[:, keys]
        return dq, dk, dv
