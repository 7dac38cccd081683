"""Packed linear layers against float64 products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trunkattn.engine.packed_linear import PackedLinear, can_pack, pack_linears


def expected(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    bias = 0.0 if linear.bias is None else linear.bias.detach().double()
    return x.double() @ linear.weight.detach().double().T + bias


@pytest.mark.property
@given(
    rows=st.integers(0, 40),
    in_features=st.integers(1, 700),
    out_features=st.integers(1, 200),
    bias=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_equals_a_float64_product(rows: int, in_features: int, out_features: int, bias: bool, seed: int) -> None:
    torch.manual_seed(seed)
    linear = nn.Linear(in_features, out_features, bias=bias)
    x = torch.randn(rows, in_features)
    y = PackedLinear(linear)(x)
    assert y.shape == (rows, out_features) and y.is_contiguous()
    torch.testing.assert_close(y.double(), expected(linear, x), rtol=0, atol=1e-5)


def test_any_leading_shape_and_strides() -> None:
    linear = nn.Linear(24, 50)
    x = torch.randn(5, 24, 3).transpose(1, 2)
    torch.testing.assert_close(PackedLinear(linear)(x).double(), expected(linear, x), rtol=0, atol=1e-5)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    linear, x = nn.Linear(576, 192), torch.randn(64, 576)
    together = PackedLinear(linear)(x)
    assert torch.equal(PackedLinear(linear)(x[8:16]), together[8:16])
    assert torch.equal(PackedLinear(linear)(x[37:38]), together[37:38])


def test_every_linear_layer_of_a_model_is_replaced() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Sequential(nn.Linear(16, 4, bias=False)))
    x = torch.randn(3, 8)
    before = model(x)
    pack_linears(model)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    torch.testing.assert_close(model(x), before)


def test_only_float32_on_a_cpu_is_packed() -> None:
    assert can_pack(torch.float32, torch.device("cpu"))
    assert not can_pack(torch.bfloat16, torch.device("cpu"))
    assert not can_pack(torch.float32, torch.device("meta"))
