"""One layer in training: sequences in a batch or packed, plain PyTorch with autograd beside it, allowed errors."""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from trunkattn import PrefixTree, flash_attention
from trunkattn.training.sequences import NO_TREE, Sequences

NAMES = ("out", "lse", "dq", "dk", "dv", "dsinks")
Results = tuple[torch.Tensor, ...]  # as NAMES; lse [..., num_qo_heads]


@dataclass(frozen=True)
class TrainingCase:
    """lengths: (queries, keys) of each sequence, all the same unless packed. padding: packed tokens of no sequence, NaN
    like whatever lies between the heads' elements. sinks: whether there are any. tree: then there is one sequence, that
    of its packed tokens."""

    lengths: tuple[tuple[int, int], ...]
    packed: bool
    causal: bool
    heads: tuple[int, int]
    head_dim: int
    dtype: torch.dtype = torch.float32
    sm_scale: float | None = None
    padding: int = 0
    device: str = "cpu"
    head_dim_v: int | None = None
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    tree: PrefixTree | None = None

    @cached_property
    def inputs(self) -> Results:
        """q, k, v and the gradients of out and lse, every one a part of a larger tensor of NaN."""
        torch.manual_seed(0)
        return tuple(
            self._inside_nan(self._shape(side, heads, *width), torch.float32 if not width else self.dtype)
            for side, heads, *width in (
                (0, self.heads[0], self.head_dim),
                (1, self.heads[1], self.head_dim),
                (1, self.heads[1], self.width_v),
                (0, self.heads[0], self.width_v),
                (0, self.heads[0]),
            )
        )

    @property
    def width_v(self) -> int:
        return self.head_dim_v or self.head_dim

    @cached_property
    def sinks(self) -> torch.Tensor | None:
        """One of them stands for none."""
        if not self.has_sinks:
            return None
        sinks = torch.linspace(-1, 2, self.heads[0]).to(self.device)
        sinks[-1] = sinks[-1] if self.heads[0] == 1 else -math.inf
        return sinks

    @property
    def sequences(self) -> Sequences:
        """What kernels take."""
        tables = None if self.tree is None else self.tree.tables(torch.device(self.device))
        work = NO_TREE if self.tree is None else self.tree.work
        options = tables, self.sliding_window, self.soft_cap, self.sinks, *work
        return Sequences(self.causal, self.scale, *self.cu_seqlens, *options)

    def _shape(self, side: int, heads: int, *width: int) -> tuple[int, ...]:
        if self.packed:
            return (sum(lengths[side] for lengths in self.lengths), heads, *width)
        return (len(self.lengths), self.lengths[0][side], heads, *width)

    def _inside_nan(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        rows = shape[0] + (self.padding if self.packed else 0)
        whole = torch.full((rows, *shape[1:-1], shape[-1] + 16), math.nan, dtype=dtype, device=self.device)
        whole[: shape[0], ..., : shape[-1]] = torch.randn(shape).to(self.device, dtype)
        return whole[..., : shape[-1]]

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim) if self.sm_scale is None else self.sm_scale

    @property
    def cu_seqlens(self) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        if not self.packed or self.tree is not None:
            return None, None
        sums = torch.tensor([(0, 0), *self.lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        return sums[:, 0].contiguous().to(self.device), sums[:, 1].contiguous().to(self.device)

    def per_sequence(self, tensor: torch.Tensor, side: int) -> list[torch.Tensor]:
        """[tokens, heads, ...] of each sequence; padding is left out."""
        if not self.packed:
            return list(tensor)
        lengths = [pair[side] for pair in self.lengths]
        return list(tensor[: sum(lengths)].split(lengths))

    def plain(self, dtype: torch.dtype) -> list[list[torch.Tensor]]:
        """The textbook formula and its gradients in `dtype`: for each of NAMES a tensor per sequence."""
        q, k, v, dout, dlse = (
            self.per_sequence(tensor.detach(), side) for tensor, side in zip(self.inputs, (0, 1, 1, 0, 0), strict=True)
        )
        results: list[list[torch.Tensor]] = [[] for _ in NAMES]
        for row in range(len(self.lengths)):
            leaves = [tensor[row].to(dtype).requires_grad_() for tensor in (q, k, v)]
            if self.sinks is not None:
                leaves.append(self.sinks.clone().to(dtype).requires_grad_())
            out, lse = self._textbook(*leaves)
            seen = torch.isfinite(lse)
            target = (out * dout[row].to(dtype)).sum() + (torch.where(seen, lse, 0) * dlse[row].to(dtype)).sum()
            found = (out.detach(), lse.detach(), *torch.autograd.grad(target, leaves))
            for name_results, tensor in zip(results, found, strict=False):
                name_results.append(tensor)
        if self.sinks is not None:
            results[-1] = [torch.stack(results[-1]).sum(0)]
        return results

    def _seen(self, len_q: int, len_k: int) -> torch.Tensor:
        """[len_q, len_k], from the sequences themselves."""
        if self.tree is not None:
            seen = torch.zeros(len_q, len_k, dtype=torch.bool)
            for own in self.tree.sequence_indices():
                seen[own[:, None], own] |= self._near(torch.arange(len(own)), torch.arange(len(own)))
            return seen.to(self.device)
        return self._near(torch.arange(len_q) + len_k - len_q, torch.arange(len_k)).to(self.device)

    def _near(self, position: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        ahead = key[None, :] - position[:, None]
        seen = ahead <= 0 if self.causal else torch.ones_like(ahead, dtype=torch.bool)
        return seen if self.sliding_window is None else seen & (ahead.abs() < self.sliding_window)

    def _textbook(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One sequence; a query that sees nothing has output 0 and lse -inf, or its sink."""
        group = self.heads[0] // self.heads[1]
        k, v = (tensor.repeat_interleave(group, 1).transpose(0, 1) for tensor in (k, v))
        logits = _product(q.transpose(0, 1), k.mT) * self.scale
        if self.soft_cap is not None:
            logits = self.soft_cap * torch.tanh(logits / self.soft_cap)
        logits = logits.masked_fill(~self._seen(*logits.shape[-2:]), -math.inf)
        every = logits
        if sinks is not None:
            every = torch.cat([logits, sinks[:, None, None].expand(-1, logits.shape[1], 1)], -1)
        if every.shape[-1]:
            none = (every == -math.inf).all(-1, keepdim=True)
            lse = every.masked_fill(none, 0.0).logsumexp(-1).masked_fill(none[..., 0], -math.inf)
        else:
            lse = every.sum(-1) - math.inf
        weights = torch.exp(logits - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
        return _product(weights, v).transpose(0, 1), lse.transpose(0, 1)

    def assert_accurate(self, results: Results, rounded_out: bool = False) -> None:
        """The error of each result is at most twice that of plain PyTorch in the same dtype (float32 for lse), plus
        what rounding the largest value costs in that dtype, and rounding the largest logit in float32. rounded_out:
        dsinks may have the rounding of out, of which they are made, where one sum is right by chance."""
        expected, plain, plain32 = self.plain(torch.float64), self.plain(self.dtype), self.plain(torch.float32)
        q, k = (tensor.nan_to_num(0.0).float().norm(dim=-1) for tensor in self.inputs[:2])
        largest_logit = float(q.max() * k.max()) * self.scale if q.numel() and k.numel() else 0.0
        for index, (name, side) in enumerate(zip(NAMES[: 5 + self.has_sinks], (0, 0, 0, 1, 1, None), strict=False)):
            dtype = self.dtype if name not in ("lse", "dsinks") else torch.float32
            assert results[index].dtype == dtype, name
            beside = (plain32 if name == "lse" else plain)[index]
            found = [results[index]] if side is None else self.per_sequence(results[index], side)
            right, ours, theirs = (
                torch.cat([_finite(part) for part in parts]) for parts in (expected[index], found, beside)
            )
            unseen = [torch.cat([part.flatten() == -math.inf for part in parts]) for parts in (expected[index], found)]
            assert torch.equal(*unseen), f"{name}: -inf elsewhere"
            if not right.numel():
                continue
            rounded = self.dtype if rounded_out and name == "dsinks" else dtype
            rounding = torch.finfo(rounded).eps + torch.finfo(torch.float32).eps * (1 + largest_logit)
            allowed = 2 * float((theirs - right).abs().max()) + rounding * max(1.0, float(right.abs().max()))
            error = float((ours - right).abs().max())
            assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g}"

    def assert_padding_is_zero(self, results: Results) -> None:
        """Of packed tokens after the last sequence."""
        for name, tensor, side in zip(NAMES[:5], results, (0, 0, 0, 1, 1), strict=False):
            rest = tensor[sum(lengths[side] for lengths in self.lengths) :]
            assert len(rest) == self.padding
            assert torch.equal(rest, torch.full_like(rest, -math.inf if name == "lse" else 0.0)), name


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a @ b with float32 sums; on a CPU torch's own 16-bit product does that too, but takes a hundred times as long."""
    return a @ b if a.is_cuda or a.dtype == torch.float64 else (a.float() @ b.float()).to(a.dtype)


def _finite(tensor: torch.Tensor) -> torch.Tensor:
    """Flat, in float64, 0 in place of -inf; NaN stays."""
    flat = tensor.flatten().double()
    return flat.masked_fill(flat == -math.inf, 0.0)


F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Lengths on and off the blocks of small tiles, more queries than keys, more keys than queries, groups, dtypes, widths.
TABLE = (
    TrainingCase(((32, 32), (32, 32)), False, True, (4, 2), 32),
    TrainingCase(((32, 64),), False, False, (2, 2), 64, F16),
    TrainingCase(((37, 37), (37, 37)), False, True, (2, 1), 32, F16),
    TrainingCase(((21, 50),), False, False, (3, 1), 80, F32, sm_scale=0.3),
    TrainingCase(((50, 20),), False, True, (2, 2), 16),
    TrainingCase(((20, 50),), False, True, (2, 1), 96, F16),
    TrainingCase(((32, 49),), False, True, (1, 1), 32),
    TrainingCase(((1, 40), (1, 40)), False, True, (8, 2), 64),
    TrainingCase(((17, 17), (0, 9), (33, 40), (5, 0), (0, 0), (30, 12)), True, True, (4, 2), 32),
    TrainingCase(((17, 5), (64, 32), (0, 3), (1, 33)), True, False, (2, 2), 64, F16),
    TrainingCase(((40, 40), (23, 23)), True, True, (2, 1), 72, F32, padding=19),
    TrainingCase(((16, 3),), True, False, (1, 1), 20, F16, sm_scale=2.0, padding=1),
    TrainingCase(((0, 16),), False, False, (2, 1), 16),
    TrainingCase(((16, 0),), False, True, (2, 1), 16),
)


# Windows that cut blocks, caps, sinks and narrower or wider values, by themselves and together.
FEATURES = (
    TrainingCase(((50, 50),), False, True, (2, 1), 16, sliding_window=7),
    TrainingCase(((33, 70),), False, False, (2, 2), 32, sliding_window=20),
    TrainingCase(((70, 33),), False, False, (1, 1), 16, sliding_window=5),
    TrainingCase(((64, 64),), False, True, (1, 1), 16, sliding_window=40),
    TrainingCase(((70, 33),), False, False, (1, 1), 16, sliding_window=2**31 - 1),
    TrainingCase(((70, 33),), False, True, (1, 1), 16, sliding_window=2**31 - 1),
    TrainingCase(((17, 17), (0, 9), (33, 40), (5, 0), (30, 12)), True, True, (4, 2), 16, sliding_window=10, padding=3),
    TrainingCase(((40, 40),), False, True, (2, 1), 16, soft_cap=2.0, sm_scale=1.0),
    TrainingCase(((20, 50),), False, False, (2, 1), 16, F16, soft_cap=30.0),
    TrainingCase(((32, 40),), False, True, (4, 2), 16, has_sinks=True),
    TrainingCase(((40, 7), (3, 0), (9, 30)), True, True, (2, 1), 16, has_sinks=True, padding=5),
    TrainingCase(((0, 16), (0, 16)), False, True, (2, 1), 16, has_sinks=True),
    TrainingCase(((0, 16),), True, True, (2, 1), 16, has_sinks=True),
    TrainingCase(((37, 37),), False, True, (2, 1), 24, head_dim_v=16),
    TrainingCase(((37, 37), (9, 9)), True, False, (2, 2), 48, F16, head_dim_v=32),
    TrainingCase(((20, 33),), False, True, (2, 1), 16, head_dim_v=40),
    TrainingCase(
        ((40, 40), (23, 60)), True, True, (4, 2), 48, head_dim_v=32, sliding_window=12, soft_cap=5.0, has_sinks=True
    ),
)
# Three levels, an only child, a second root, segments that begin and end inside tiles, and a trunk of many tiles.
TREE = PrefixTree.from_segments((-1, 0, 1, 1, 0, -1, 5), (40, 9, 20, 17, 11, 3, 2))


def tree_case(tree: PrefixTree, **changes: Any) -> TrainingCase:
    """A tree with grouped heads."""
    length = (tree.num_tokens, tree.num_tokens)
    return replace(TrainingCase((length,), True, True, (2, 1), 16, tree=tree), **changes)


TREES = (
    tree_case(TREE),
    tree_case(TREE, dtype=F16, heads=(2, 2)),
    tree_case(TREE, sliding_window=11),
    tree_case(TREE, head_dim=24, head_dim_v=16, sliding_window=40, soft_cap=3.0, has_sinks=True, heads=(1, 1)),
    tree_case(PrefixTree.from_segments((-1, 0, 0, 0), (32, 32, 32, 32)), heads=(1, 1)),
)


def longer(case: TrainingCase, times: int, device: str, dtype: torch.dtype) -> TrainingCase:
    """The case with longer sequences, and its padding."""
    return replace(
        case,
        lengths=tuple((a * times, b * times) for a, b in case.lengths),
        padding=case.padding * times,
        device=device,
        dtype=dtype,
    )


def run(case: TrainingCase, deterministic: bool = False) -> Results:
    """What `flash_attention` makes of a case."""
    q, k, v, dout, dlse = case.inputs
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
    sums = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), case.cu_seqlens, strict=True))
    options: dict[str, Any] = {
        "sm_scale": case.sm_scale, "deterministic": deterministic, "tree": case.tree,
        "sliding_window": case.sliding_window, "logits_soft_cap": case.soft_cap,
    }  # fmt: skip
    if case.sinks is not None:
        leaves.append(case.sinks.clone().requires_grad_())
        options["sinks"] = leaves[-1]
    out, lse = flash_attention(*leaves[:3], case.causal, **sums, **options, return_lse=True)
    return out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, (dout, dlse))


def check(case: TrainingCase, deterministic: bool) -> None:
    """Holds what `flash_attention` makes of a case to float64."""
    results = run(case, deterministic)
    case.assert_accurate(results)
    if case.packed:
        case.assert_padding_is_zero(results)
