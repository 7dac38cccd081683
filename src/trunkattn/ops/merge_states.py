"""Merges two attention states over disjoint keys: online softmax, the "relay fusion" of RelayAttention §3.3.

RelayAttention: Zhu et al. 2024, https://arxiv.org/abs/2402.14808.
"""

import math

import torch

from trunkattn.validate import check_dense, described


def merge_states(
    out_a: torch.Tensor, lse_a: torch.Tensor, out_b: torch.Tensor, lse_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The attention state of the union of two disjoint sets of keys.

    The empty state is (0, -inf), the identity: merging two empty states gives (0, -inf). A sink belongs to the union:
    merge states that were computed without sinks, then multiply out by sigmoid(lse - sink). Source: RelayAttention,
    https://arxiv.org/abs/2402.14808, §3.3.

    Args:
        out_a, out_b: [..., head_dim_v], a floating dtype of 16 bits or more, which may be two different ones.
        lse_a, lse_b: [...] float32 or float64, natural log-sum-exp of the logits. Where both are +inf, which attention
            to finite logits never makes, out is NaN, as the softmax of two infinite logits is.

    Returns:
        out in out_a's dtype and lse in lse_a's.

    Raises:
        ValueError: shapes or devices do not match.
        TypeError: an argument is not a tensor, or has a dtype that is not accepted.

    Example:
        >>> out, lse = merge_states(torch.ones(1, 2), torch.zeros(1), 3 * torch.ones(1, 2), torch.zeros(1))
        >>> out.tolist(), round(lse.item(), 4)
        ([[2.0, 2.0]], 0.6931)
    """
    for name, tensor in (("out_a", out_a), ("lse_a", lse_a), ("out_b", out_b), ("lse_b", lse_b)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is {described(tensor)}: expected a torch.Tensor")
        check_dense(name, tensor)
        if not tensor.is_floating_point() or tensor.itemsize < (4 if name.startswith("lse") else 2):
            wide = "a floating dtype of 16 bits or more"
            expected = "torch.float32 or torch.float64" if name.startswith("lse") else wide
            raise TypeError(f"{name} has dtype {tensor.dtype}: expected {expected}")
        if tensor.device != out_a.device:
            raise ValueError(f"{name} is on {tensor.device}: expected {out_a.device}, like out_a")
    if out_a.dim() == 0:
        raise ValueError("out_a has shape (): expected (..., head_dim_v)")
    if out_a.shape != out_b.shape:
        raise ValueError(f"out_b has shape {tuple(out_b.shape)}: expected {tuple(out_a.shape)}, like out_a")
    for name, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        if lse.shape != out_a.shape[:-1]:
            expected = f"{tuple(out_a.shape[:-1])}, that of out_a without head_dim_v"
            raise ValueError(f"{name} has shape {tuple(lse.shape)}: expected {expected}")
    # Two empty states, as two that weigh nothing: -inf - -inf is NaN, and so is any gradient that passes it.
    empty = torch.maximum(lse_a, lse_b) == -math.inf
    safe_a, safe_b = (lse.masked_fill(empty, 0.0) for lse in (lse_a, lse_b))
    lse = torch.logaddexp(safe_a, safe_b).masked_fill(empty, -math.inf)
    # Only the difference counts: lse is rounded to its own size, so far from 0 exp(lse_a - lse) loses the weights' sum.
    weight_a = torch.sigmoid(safe_a - safe_b).unsqueeze(-1)
    weight_b = torch.sigmoid(safe_b - safe_a).unsqueeze(-1)
    # The output of an empty state may be anything, so it meets no weight, forward or backward.
    part_a = weight_a * _without_empty(out_a, lse_a, weight_a)
    part_b = weight_b * _without_empty(out_b, lse_b, weight_b)
    return (part_a + part_b).to(out_a.dtype), lse.to(lse_a.dtype)


def _without_empty(out: torch.Tensor, lse: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The output of a state, 0 where it is empty or weighs nothing."""
    return out.masked_fill((lse == -math.inf).unsqueeze(-1) | (weight == 0), 0.0)
