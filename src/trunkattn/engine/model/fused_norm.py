"""The norms of a model on a CPU, each as one call."""

from collections.abc import Callable
from inspect import signature
from typing import Final

import torch
from torch import nn

from trunkattn.cpu.rms_norm import rms_norm

_EPSILONS: Final = ("variance_epsilon", "eps")  # names that transformers' norms have for it


class FusedRMSNorm(nn.Module):
    """The root mean square norm of float32 rows on a CPU: x [..., width] -> [..., width].

    Args:
        norm: the module that it stands for.
        weight: [width] float32, what a row is multiplied by.
        epsilon: what is added to the mean of the squares.
    """

    def __init__(self, norm: nn.Module, weight: torch.Tensor, epsilon: float) -> None:
        super().__init__()
        self.weight = norm.weight
        self._factors, self._epsilon = weight, epsilon
        self._plain: Callable[[torch.Tensor], torch.Tensor] = norm.forward

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The rows, normalised."""
        if hidden_states.dtype != torch.float32:
            return self._plain(hidden_states)
        return rms_norm(hidden_states, self._factors, self._epsilon)


def fuse_norms(model: nn.Module) -> None:
    """Replaces every float32 root mean square norm on a CPU.

    A norm is recognised by what it computes: transformers has a class for each model, and some add 1 to the weight.
    """
    fused: dict[nn.Module, nn.Module] = {}
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            if child is None:
                continue
            if child not in fused:
                fused[child] = _fused(child)
            if fused[child] is not child:
                setattr(parent, name, fused[child])


def _fused(module: nn.Module) -> nn.Module:
    """A module's faster equal; the module itself, if it has none."""
    weight = module._parameters.get("weight")
    epsilon = next((value for name in _EPSILONS if isinstance(value := getattr(module, name, None), float)), None)
    if weight is None or epsilon is None or not _is_simple(module) or weight.dim() != 1:
        return module
    if weight.dtype != torch.float32 or weight.device.type != "cpu" or not weight.isfinite().all():
        return module
    # Small rows show where epsilon is added, others what the mean is taken of.
    rows = torch.randn(3, len(weight), generator=torch.Generator().manual_seed(0), dtype=torch.float32, device="cpu")
    rows *= torch.tensor([[epsilon**0.5], [1.0], [30.0]], dtype=torch.float32, device="cpu")
    rows[1] += 1
    try:
        expected = module(rows)
    except Exception:  # a module of another kind may fail in any way on a single tensor
        return module
    if not isinstance(expected, torch.Tensor) or expected.dtype != torch.float32 or expected.shape != rows.shape:
        return module
    for factors in (weight.detach(), 1 + weight.detach()):
        if expected.any() and torch.allclose(rms_norm(rows, factors, epsilon), expected, rtol=1e-5, atol=1e-6):
            return FusedRMSNorm(module, factors, epsilon)
    return module


def _is_simple(module: nn.Module) -> bool:
    """Whether a module has one parameter and nothing else that its result could depend on."""
    others = [value for name, value in module._parameters.items() if name != "weight" and value is not None]
    hooks = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    takes_more = len(signature(module.forward).parameters) != 1  # such as the gate of a gated norm
    return not (others or hooks or takes_more or module._buffers or module._modules)
