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


def test_it_looks_like_the_layer_that_it_replaces() -> None:
    linear = nn.Linear(24, 50)
    packed = PackedLinear(linear)
    assert torch.equal(packed.weight, linear.weight) and torch.equal(packed.bias, linear.bias)
    assert (packed.weight.dtype, packed.weight.device) == (torch.float32, torch.device("cpu"))
    assert (packed.in_features, packed.out_features) == (24, 50)
    with pytest.raises(RuntimeError, match="dtype"):
        packed(torch.zeros(3, 24, dtype=torch.float16))


def test_a_layer_with_more_than_a_product_is_left_alone() -> None:
    hooked, double, own_forward = nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 4)
    hooked.register_forward_hook(lambda module, inputs, output: output + 1)
    own_forward.forward = lambda x: x  # type: ignore[method-assign]
    model = nn.Sequential(hooked, double, own_forward)
    pack_linears(model)
    assert list(model) == [hooked, double, own_forward]


def test_a_layer_with_two_parents_stays_one_layer() -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared), shared)
    pack_linears(model)
    assert model[0][0] is model[1][0] is model[2] and isinstance(model[2], PackedLinear)
