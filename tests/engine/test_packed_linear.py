"""Packed linear layers against float64 products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trunkattn.cpu.linear import GROUP
from trunkattn.engine.packed_linear import PackedLinear, _Panels, can_pack, pack_linears


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


@pytest.mark.property
@given(
    rows=st.integers(0, 40),
    in_features=st.integers(1, 700),
    out_features=st.integers(1, 200),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_int8_gives_the_bits_of_the_rounded_weights(rows: int, in_features: int, out_features: int, seed: int) -> None:
    torch.manual_seed(seed)
    linear = nn.Linear(in_features, out_features)
    linear.weight.data[:, in_features // 2 :] *= 100
    linear.weight.data[0] = 0
    before = linear.weight.detach().clone()
    packed = in_int8(linear)
    for start in range(0, in_features, GROUP):
        group = before[:, start : start + GROUP]
        most = group.abs().amax(1, keepdim=True) / 254 * 1.00001
        assert ((packed.weight[:, start : start + GROUP] - group).abs() <= most).all()
    linear.weight.data = packed.weight
    x = torch.randn(rows, in_features)
    assert torch.equal(packed(x), PackedLinear(linear)(x))


def test_int8_keeps_the_weights_of_a_q8_0_file() -> None:
    steps = torch.randint(-127, 128, (48, 3, GROUP))
    steps[..., 0] = 127
    linear = nn.Linear(3 * GROUP, 48)
    linear.weight.data = (steps * (torch.rand(48, 3, 1) / 100).half().float()).flatten(1)
    assert torch.equal(in_int8(linear).weight, linear.weight)


def test_layers_of_one_input_are_rounded_as_each_is_alone() -> None:
    model, x = Attention(bias=True), torch.randn(3, 40)
    alone = {name: in_int8(layer) for name, layer in model.named_children()}
    pack_linears(model, to_int8=True)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(model.get_submodule(name)(x), alone[name](x))
    assert all(layer._panels.whole.values.dtype == torch.int8 for layer in model.children())  # type: ignore[union-attr]


def in_int8(linear: nn.Linear) -> PackedLinear:
    return PackedLinear(linear, _Panels([linear], to_int8=True))


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


class Attention(nn.Module):
    """Layers of one input, as transformers' models keep them."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(40, 70, bias=bias), nn.Linear(40, 24, bias=bias)
        self.v_proj, self.o_proj = nn.Linear(40, 24, bias=bias), nn.Linear(70, 40, bias=bias)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 40])
def test_layers_of_one_input_give_the_bits_that_each_gives_alone(rows: int, bias: bool) -> None:
    model = Attention(bias)
    alone = {name: PackedLinear(layer) for name, layer in model.named_children()}
    pack_linears(model)
    for _ in range(2):
        x = torch.randn(rows, 40)
        for name, layer in (("k_proj", model.k_proj), ("q_proj", model.q_proj), ("v_proj", model.v_proj)):
            y = layer(x)
            assert torch.equal(y, alone[name](x)) and y.is_contiguous()
            assert torch.equal(layer.weight, alone[name].weight)
            y.zero_()  # what a caller does to its output stays there
            assert torch.equal(layer(x), alone[name](x))
        x += 1  # the same tensor with other values is another input
        assert torch.equal(model.v_proj(x), alone["v_proj"](x))


def test_layers_of_other_sizes_or_parents_are_packed_alone() -> None:
    model = Attention(bias=False)
    model.k_proj = nn.Linear(50, 24)
    shared = model.v_proj
    whole = nn.Sequential(nn.Sequential(shared), model)
    pack_linears(whole)
    assert model.k_proj(torch.ones(2, 50)).shape == (2, 24)
    assert whole[0][0] is model.v_proj and isinstance(model.q_proj, PackedLinear)
