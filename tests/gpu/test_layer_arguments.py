"""Strides of a layer as kernels get them: those of each tensor itself, because engines keep keys and values apart."""

from typing import Any

import pytest
import torch

from trunkattn.gpu.hopper import arguments as hopper
from trunkattn.gpu.layer import Tensors
from trunkattn.gpu.mla import decode as latent
from trunkattn.gpu.portable import arguments as portable

pytestmark = pytest.mark.slow

AXES = {"page": -4, "token": -3, "head": -2}


def apart(*shape: int, by: int) -> torch.Tensor:
    """A tensor whose rows, heads and pages all lie farther apart than their size."""
    return torch.zeros([size + by for size in shape])[tuple(slice(size) for size in shape)]


def make_tensors() -> Tensors:
    floats = dict.fromkeys(("lse", "partial", "partial_lse", "logit_scale", "v_scale", "sinks"), torch.zeros(1))
    q, out, rope = apart(3, 4, 16, by=1), apart(3, 4, 16, by=2), apart(3, 4, 16, by=3)
    return Tensors(q, apart(5, 8, 2, 16, by=4), apart(5, 8, 2, 16, by=5), out, **floats, q_rope=rope)


@pytest.mark.parametrize("made", [hopper.layer_of, portable.strides, latent.layer_of])
def test_every_tensor_has_its_own_strides(made: Any) -> None:
    t = make_tensors()
    tensors: dict[str, Any] = {
        "q": t.q,
        "q_latent": t.q,
        "q_rope": t.q_rope,
        "out": t.out,
        "k": t.k_cache,
        "v": t.v_cache,
    }
    found = {name.removesuffix("_stride"): value for name, value in made(t)._asdict().items() if isinstance(value, int)}
    assert found
    for name, value in found.items():
        tensor, axis = name.rsplit("_", 1)
        assert value == tensors[tensor].stride(AXES[axis]), name
