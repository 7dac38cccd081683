"""Attention over the packed tokens of a prefix tree, on a CPU: two custom ops of torch.

Token t sees the keys s <= t with t < subtree_end[s], itself and its ancestors, so the gradients of a shared key and
value are sums over all its descendants.
"""

from typing import Any

import torch
from torch.library import custom_op

from trunkattn.training.cpu_blocks import CpuSequence, Pair, Triple, sums_dtype


@custom_op("trunkattn::tree_attention", mutates_args=())
def tree_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, subtree_end: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q and lse [num_qo_heads, tokens] of checked tensors [tokens, heads, head_dim]; subtree_end int32."""
    tree = _whole(q, k, v, subtree_end, sm_scale)
    out, lse = tree.forward()
    return tree.by_token(out).to(q.dtype), tree.by_token(lse).squeeze(-1).T.contiguous()


@tree_attention.register_fake
def _(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Pair:
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=sums_dtype(q))
    return torch.empty_like(q, memory_format=torch.contiguous_format), lse


@custom_op("trunkattn::tree_attention_backward", mutates_args=())
def _backward(
    dout: torch.Tensor, dlse: torch.Tensor, saved: list[torch.Tensor], subtree_end: torch.Tensor, sm_scale: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv. saved: q, k, v, out and lse."""
    q, k, v, out, lse = saved
    tree = _whole(q, k, v, subtree_end, sm_scale)
    delta = (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1) - dlse.T
    rows = (tree.by_head(tensor) for tensor in (delta[..., None], lse.T[..., None], dout))
    dq, dk, dv = tree.backward(*rows)
    heads = k.shape[1]
    return tree.by_token(dq).to(q.dtype), tree.by_token(dk, heads).to(q.dtype), tree.by_token(dv, heads).to(q.dtype)


@_backward.register_fake
def _(dout: torch.Tensor, dlse: torch.Tensor, saved: list[torch.Tensor], *options: Any) -> Triple:
    dq, dk, dv = (torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in saved[:3])
    return dq, dk, dv


def _whole(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, subtree_end: torch.Tensor, sm_scale: float
) -> CpuSequence:
    """The tree as one sequence with a narrower mask."""
    q, k, v = (tensor.to(sums_dtype(tensor)) for tensor in (q, k, v))
    group = q.shape[1] // k.shape[1]
    rows = q.unflatten(1, (k.shape[1], group)).transpose(0, 1).flatten(1, 2)
    return CpuSequence(rows, k.transpose(0, 1), v.transpose(0, 1), group, True, sm_scale, subtree_end)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Pair) -> None:
    q, k, v, subtree_end, ctx.sm_scale = inputs
    ctx.save_for_backward(q, k, v, *output, subtree_end)


def _gradients(ctx: Any, dout: torch.Tensor, dlse: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    *saved, subtree_end = ctx.saved_tensors
    return (*_backward(dout, dlse, saved, subtree_end, ctx.sm_scale), None, None)


tree_attention.register_autograd(_gradients, setup_context=_save)
