"""Prefix trees for tests: random ones, their tensors, and what attention on them is by the formula."""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from hypothesis import strategies as st

from trunkattn import PrefixTree


def parents_by_steps(steps: Iterable[int]) -> tuple[int, ...]:
    """The parents of segments, each of which hangs so many steps above the child of the one before; -1 above a root."""
    parents: list[int] = []
    path: list[int] = []
    for up in steps:
        path = path[: max(0, len(path) - up)]
        parents.append(path[-1] if path else -1)
        path.append(len(parents) - 1)
    return tuple(parents)


def trees(max_length: int) -> st.SearchStrategy[PrefixTree]:
    """Random forests: each segment hangs below a root, the one before or an ancestor of it."""

    def build(drawn: list[tuple[int, int]]) -> PrefixTree:
        return PrefixTree.from_segments(parents_by_steps(up for up, _ in drawn), [length for _, length in drawn])

    segment = st.tuples(st.integers(0, 4), st.integers(1, max_length))
    return st.lists(segment, min_size=1, max_size=12).map(build)


def inputs(tree: PrefixTree, heads: tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k, v and the gradients of out and lse, q to v with strides."""
    torch.manual_seed(0)
    tokens = tree.num_tokens
    q, k, v = (
        torch.randn(own, tokens, 10).to(dtype)[..., :8].transpose(0, 1) for own in (heads[0], heads[1], heads[1])
    )
    return [q, k, v, torch.randn(tokens, heads[0], 8).to(dtype), torch.randn(tokens, heads[0])]


def with_gradients(attend: Callable[..., Any], given: list[torch.Tensor]) -> list[torch.Tensor]:
    leaves = [tensor.detach().requires_grad_() for tensor in given[:3]]
    out, lse = attend(*leaves)
    upstream = (given[3].to(out.dtype), given[4].to(lse.dtype))
    return [out.detach(), lse.detach(), *torch.autograd.grad((out, lse), leaves, upstream)]


def textbook(tree: PrefixTree, dtype: torch.dtype, given: list[torch.Tensor]) -> list[torch.Tensor]:
    """The formula with the mask from the sequences themselves, and its gradients by autograd in `dtype`."""
    seen = torch.zeros(tree.num_tokens, tree.num_tokens, dtype=torch.bool)
    for own in tree.sequence_indices():
        seen[own[:, None], own] |= torch.ones(len(own), len(own), dtype=torch.bool).tril()

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        group = q.shape[1] // k.shape[1]
        k, v = (tensor.repeat_interleave(group, 1).transpose(0, 1) for tensor in (k, v))
        logits = ((q.transpose(0, 1) @ k.mT) / math.sqrt(8)).masked_fill(~seen, -math.inf)
        return (logits.softmax(-1) @ v).transpose(0, 1), logits.logsumexp(-1).T

    return with_gradients(attend, [tensor.to(dtype) for tensor in given])
