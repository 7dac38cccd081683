"""Norms in one call against what the modules of transformers compute, and which modules are norms."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RMSNorm
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from trunkattn.cpu.rms_norm import rms_norm
from trunkattn.engine.model.fused_norm import FusedRMSNorm, fuse_norms

NORMS = (LlamaRMSNorm, DeepseekV3RMSNorm, Gemma2RMSNorm)


@pytest.mark.property
@given(
    rows=st.integers(0, 70),
    width=st.integers(1, 1100),
    size=st.sampled_from([0.0, 1e-5, 1.0, 1e4]),
    epsilon=st.sampled_from([1e-6, 1e-5, 1e-3]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_a_fused_norm_equals_float64(rows: int, width: int, size: float, epsilon: float, seed: int) -> None:
    torch.manual_seed(seed)
    x, weight = size * torch.randn(rows, width), torch.randn(width)
    exact = weight.double() * x.double() / (x.double().square().mean(-1, keepdim=True) + epsilon).sqrt()
    torch.testing.assert_close(rms_norm(x, weight, epsilon).double(), exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("threads", [1, 3])
def test_rows_do_not_depend_on_their_neighbours(threads: int) -> None:
    x, weight, before = torch.randn(300, 576), torch.randn(576), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = rms_norm(x, weight, 1e-6)
        assert all(torch.equal(rms_norm(x[i : i + 1], weight, 1e-6)[0], together[i]) for i in (0, 7, 150, 299))
    finally:
        torch.set_num_threads(before)


def test_rows_may_be_parts_of_longer_ones() -> None:
    x, weight = torch.randn(5, 2, 60)[..., :40], torch.randn(40)
    found = rms_norm(x, weight, 1e-6)
    assert torch.equal(found, rms_norm(x.clone(), weight, 1e-6)) and found.is_contiguous()


def test_zeros_without_epsilon_are_torchs_and_end_no_other_row() -> None:
    x, weight = torch.randn(5, 96), torch.randn(96)
    x[1] = 0
    expected = weight * (x * x.square().mean(-1, keepdim=True).rsqrt())
    assert expected.isnan().any(-1).tolist() == [False, True, False, False, False]
    torch.testing.assert_close(rms_norm(x, weight, 0.0), expected, equal_nan=True)


@pytest.mark.parametrize("norm_class", NORMS)
def test_norms_of_transformers_are_replaced(norm_class: type[nn.Module]) -> None:
    norm = norm_class(96)
    nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    model = nn.ModuleDict({"norm": norm, "again": norm})
    x = torch.randn(2, 5, 96).transpose(0, 1)
    with torch.inference_mode():
        expected = norm(x)
        fuse_norms(model)
        assert isinstance(model["norm"], FusedRMSNorm) and model["norm"] is model["again"]
        torch.testing.assert_close(model["norm"](x), expected)
        torch.testing.assert_close(model["norm"](x.double()), norm(x.double()))  # another dtype than the weight's
    assert model["norm"].weight is norm.weight


class Gated(LlamaRMSNorm):
    """A norm that takes a gate, too."""

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        normal: torch.Tensor = super().forward(hidden_states)
        return normal if gate is None else normal * gate


class Doubled(LlamaRMSNorm):
    """Looks like a norm of transformers, and computes something else."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden_states)


class OutsideTheRoot(LlamaRMSNorm):
    """Adds its epsilon to the root, not to the mean below it."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        root = hidden_states.square().mean(-1, keepdim=True).sqrt()
        return self.weight * hidden_states / (root + self.variance_epsilon)


def doubled() -> nn.Module:
    norm = Doubled(8)
    nn.init.normal_(norm.weight)
    return norm


def hooked() -> nn.Module:
    norm = LlamaRMSNorm(8)
    norm.register_forward_hook(lambda module, inputs, output: output + 1)
    return norm


def hooked_before() -> nn.Module:
    norm = LlamaRMSNorm(8)
    norm.register_forward_pre_hook(lambda module, inputs: (inputs[0],))  # it may change later
    return norm


def with_state(name: str) -> nn.Module:
    """A norm with something more that its result may depend on, as one that counts its calls has."""
    norm = LlamaRMSNorm(8)
    if name == "buffer":
        norm.register_buffer(name, torch.ones(1))
    elif name == "parameter":
        norm.register_parameter(name, nn.Parameter(torch.ones(1)))
    else:
        norm.add_module(name, nn.Dropout())
    return norm


class Widened(LlamaRMSNorm):
    """Returns another dtype than it takes."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden_states).double()


def with_one_factor() -> nn.Module:
    norm = LlamaRMSNorm(8)
    norm.weight = nn.Parameter(torch.ones(()))
    return norm


def of_zeros() -> nn.Module:
    norm = nn.LayerNorm(8, bias=False)
    nn.init.zeros_(norm.weight)
    return norm


def test_modules_that_compute_anything_else_stay_as_they_are() -> None:
    kept = [
        nn.LayerNorm(8, bias=False),
        nn.LayerNorm(8),
        nn.Linear(8, 8),
        nn.Embedding(8, 8),
        LlamaRMSNorm(8).double(),
        LlamaRMSNorm(8).to("meta"),
        Gated(8),
        doubled(),
        hooked(),
        hooked_before(),
        of_zeros(),
        OutsideTheRoot(8),
        Widened(8),
        with_one_factor(),
        *(with_state(name) for name in ("buffer", "parameter", "module")),
    ]
    model = nn.ModuleList(kept)
    fuse_norms(model)
    assert list(model) == kept
