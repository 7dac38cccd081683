"""Checks for functions without derivatives: does autograd ask for one?"""

import torch
from torch.autograd import forward_ad


def are_recorded() -> bool:
    """Whether autograd records operations now. Forward mode does so under torch.no_grad, too."""
    return torch.is_grad_enabled() or forward_ad._current_level >= 0


def check_none(name: str, tensor: torch.Tensor, why: str) -> None:
    """Raises ValueError if autograd asks for a derivative with respect to a tensor. why: why there is none, and what to
    do."""
    if tensor.requires_grad and torch.is_grad_enabled():
        raise ValueError(f"{name} requires grad: expected no gradient, for {why}")
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        raise ValueError(f"{name} is a dual tensor of forward-mode differentiation: expected no tangent, for {why}")
