"""Packed linear layers against float64 products."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trunkattn.cpu.linear import GROUP, Panels, multiply
from trunkattn.engine.model import packed_linear
from trunkattn.engine.model.latent import HeadLinear
from trunkattn.engine.model.packed_linear import (
    PackedHeadLinear,
    PackedLinear,
    _Panels,
    can_pack,
    pack_linears,
    unpacked_weights,
)


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


def test_any_leading_shape_and_strides_are_multiplied() -> None:
    linear = nn.Linear(24, 50)
    x = torch.randn(5, 24, 3).transpose(1, 2)
    torch.testing.assert_close(PackedLinear(linear)(x).double(), expected(linear, x), rtol=0, atol=1e-5)


def test_some_heads_multiply_rows_of_any_strides() -> None:
    linear, rows, out = HeadLinear(torch.randn(4, 50, 24)), torch.randn(24, 5).T, torch.full((5, 2, 50), torch.nan)
    PackedHeadLinear(linear).of_rows(rows, slice(1, 3), out.transpose(0, 1))
    exact = torch.einsum("ri,hoi->rho", rows.double(), linear.weight[1:3].double())
    torch.testing.assert_close(out.double(), exact, rtol=0, atol=1e-5)


def test_rows_do_not_depend_on_their_neighbours() -> None:
    linear, x = nn.Linear(576, 192), torch.randn(64, 576)
    together = PackedLinear(linear)(x)
    assert torch.equal(PackedLinear(linear)(x[8:16]), together[8:16])
    assert torch.equal(PackedLinear(linear)(x[37:38]), together[37:38])


@pytest.mark.parametrize("to_int8", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
def test_threads_take_every_panel_once(rows: int, to_int8: bool) -> None:
    linear, x, before = nn.Linear(40, 240), torch.randn(rows, 40), torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(PackedLinear(linear, _Panels([linear], to_int8))(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(*found)


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


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("in_features", [1, 32, 70])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_int8_gives_few_rows_the_bits_of_the_rounded_weights(rows: int, in_features: int) -> None:
    """Which are widened for each of up to two rows. A group of zeros has no scale."""
    linear, x = nn.Linear(in_features, 100), torch.randn(rows, in_features)
    linear.weight.data[7] = 0
    packed = in_int8(linear)
    linear.weight.data = packed.weight
    torch.use_deterministic_algorithms(True)  # fills new tensors with NaN
    try:
        found = packed(x)
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(found, PackedLinear(linear)(x))


def test_int8_keeps_the_weights_of_a_q8_0_file() -> None:
    steps = torch.randint(-127, 128, (48, 3, GROUP))
    steps[..., 0] = 127
    linear = nn.Linear(3 * GROUP, 48)
    linear.weight.data = (steps * (torch.rand(48, 3, 1) / 100).half().float()).flatten(1)
    assert torch.equal(in_int8(linear).weight, linear.weight)


@pytest.mark.parametrize("rows", [3, 9])
def test_layers_of_one_input_are_rounded_as_each_is_alone(rows: int) -> None:
    model, x = Attention(bias=True), torch.randn(rows, 40)
    alone = {name: in_int8(layer) for name, layer in model.named_children()}
    pack_linears(model, to_int8=True)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert torch.equal(model.get_submodule(name)(x), alone[name](x))
        assert torch.equal(model.get_submodule(name).weight, alone[name].weight)
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


@pytest.mark.parametrize("in_features", [1, 24])
def test_its_weight_is_a_copy(in_features: int) -> None:
    packed, x = PackedLinear(nn.Linear(in_features, 50)), torch.randn(3, in_features)
    before = packed(x)
    packed.weight.zero_()
    assert torch.equal(packed(x), before)


def test_it_looks_like_the_layer_that_it_replaces() -> None:
    linear = nn.Linear(24, 50)
    packed = PackedLinear(linear)
    assert torch.equal(packed.weight, linear.weight) and torch.equal(packed.bias, linear.bias)
    assert (packed.weight.dtype, packed.weight.device) == (torch.float32, torch.device("cpu"))
    assert (packed.in_features, packed.out_features) == (24, 50)
    with pytest.raises(RuntimeError, match="dtype"):
        packed(torch.zeros(3, 24, dtype=torch.float16))


def test_a_layer_with_more_than_a_product_is_left_alone() -> None:
    hooked, hooked_before, own_forward = (nn.Linear(4, 4) for _ in range(3))
    hooked.register_forward_hook(lambda module, inputs, output: output + 1)
    hooked_before.register_forward_pre_hook(lambda module, inputs: (inputs[0] + 1,))
    own_forward.forward = lambda x: x  # type: ignore[method-assign]
    kept = [hooked, hooked_before, own_forward, nn.Linear(4, 4, dtype=torch.float64), Doubled(4, 4)]
    model = nn.Sequential(*kept)
    pack_linears(model)
    assert list(model) == kept


class Doubled(nn.Linear):
    """A linear layer, and more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def test_weights_that_are_not_packed_are_named() -> None:
    """Their products depend on the batch; those of biases and norms do not."""
    own = nn.Module()
    own.weight = nn.Parameter(torch.zeros(4, 4))
    model = nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4), own, nn.LayerNorm(4), Doubled(4, 4))
    pack_linears(model)
    assert unpacked_weights(model) == ["2.weight", "4.weight"]


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


def test_an_input_that_is_written_to_between_two_layers_is_another_one() -> None:
    model, x = Attention(bias=False), torch.randn(2, 40)
    alone = PackedLinear(model.k_proj)
    pack_linears(model)
    model.q_proj(x)
    x += 1
    assert torch.equal(model.k_proj(x), alone(x))


def test_layers_of_one_input_are_one_product(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = Attention(bias=False), []

    def counted(rows: torch.Tensor, panels: Panels) -> torch.Tensor:
        calls.append(rows)
        return multiply(rows, panels)

    monkeypatch.setattr(packed_linear, "multiply", counted)
    pack_linears(model)
    for x in torch.randn(2, 3, 40):
        for layer in (model.q_proj, model.k_proj, model.v_proj):
            layer(x)
    assert len(calls) == 2


def test_layers_of_two_parents_stay_the_same_layers() -> None:
    first, second = Attention(bias=False), Attention(bias=False)
    second.q_proj, second.k_proj, second.v_proj = first.q_proj, first.k_proj, first.v_proj
    pack_linears(nn.Sequential(first, second))
    assert all(first.get_submodule(name) is second.get_submodule(name) for name in ("q_proj", "k_proj", "v_proj"))


def test_layers_of_other_sizes_are_packed_alone() -> None:
    model, x = Attention(bias=False), torch.randn(2, 50)
    model.k_proj = nn.Linear(50, 24)
    right = expected(model.k_proj, x)
    pack_linears(model)
    torch.testing.assert_close(model.k_proj(x).double(), right, rtol=0, atol=1e-5)


def test_layers_of_other_sizes_or_parents_are_packed_alone() -> None:
    model = Attention(bias=False)
    model.k_proj = nn.Linear(50, 24)
    shared = model.v_proj
    whole = nn.Sequential(nn.Sequential(shared), model)
    pack_linears(whole)
    assert model.k_proj(torch.ones(2, 50)).shape == (2, 24)
    assert whole[0][0] is model.v_proj and isinstance(model.q_proj, PackedLinear)
