"""Sequences of one length through FlashAttention-4: who takes it, and its call with a stand-in on a CPU; on a card:
`tests/on_gpu/test_training_libraries.py`."""

import sys
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmarks.lib.internals import own_training_kernels, without_flash_attention_4
from trunkattn import flash_attention
from trunkattn.gpu.cards import ASSUMED, Card
from trunkattn.gpu.kernel import Work, choose
from trunkattn.training import flash_attention_4, op, spec
from trunkattn.training.sequences import Sequences
from trunkattn.training.spec import UNEVEN, TrainingConfig

BF16 = torch.bfloat16
PLAIN, LONG = TrainingConfig(128, BF16, 128), TrainingConfig(128, BF16, 128, is_long=True)


@pytest.fixture(autouse=True)
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "fa4_version", lambda: "4.0.0b36")


def chosen(work: Work, config: TrainingConfig, capability: int = 90) -> str | None:
    card = Card(ASSUMED.facts._replace(capability=capability), ASSUMED.model)
    kernel = choose(work, config, card).kernel
    return kernel.name if kernel else None


@pytest.mark.parametrize(
    ("config", "forward", "backward"),
    [
        (LONG, "FlashAttention-4", "FlashAttention-4"),
        (LONG._replace(is_grouped=True), "FlashAttention-4", "FlashAttention-4"),
        (LONG._replace(head_dim=64, head_dim_v=64), "FlashAttention-4", "FlashAttention-4"),
        (LONG._replace(head_dim=96, head_dim_v=96), "FlashAttention-4", "FlashAttention-4"),
        (LONG._replace(head_dim=256, head_dim_v=256), "FlashAttention-4", "Hopper"),
        (LONG._replace(options=("deterministic",)), "FlashAttention-4", "FlashAttention-4"),
        (LONG._replace(head_dim=192), "FlashAttention-4", "FlashAttention-4"),
        (LONG._replace(head_dim=192, is_grouped=True), "FlashAttention-4", "Hopper"),
        (PLAIN, "cuDNN", "FlashAttention-4"),
        (PLAIN._replace(head_dim=256, head_dim_v=256), "Hopper", "Hopper"),
        (PLAIN._replace(is_grouped=True), "cuDNN", "Hopper"),
        (PLAIN._replace(options=("deterministic",)), "Hopper", "FlashAttention-4"),
        (LONG._replace(options=("cu_seqlens_q",)), "Hopper", "Hopper"),
        (LONG._replace(options=("tree",)), "Hopper", "Hopper"),
        (LONG._replace(options=(UNEVEN,)), "Hopper", "Hopper"),
        (LONG._replace(options=("sliding_window",)), "Hopper", "Hopper"),
        (LONG._replace(dtype=torch.float32), "portable", "portable"),
        (LONG._replace(head_dim=32, head_dim_v=32), "portable", "portable"),
        (LONG._replace(head_dim=256), "Hopper", "Hopper"),
    ],
)
def test_who_computes_each_pass(config: TrainingConfig, forward: str, backward: str) -> None:
    assert chosen(Work.FORWARD, config) == f"{forward} forward"
    assert chosen(Work.BACKWARD, config) == f"{backward} backward"


def test_cudnn_computes_both_passes_where_none_of_them_is_faster_elsewhere() -> None:
    assert chosen(Work.BATCH, LONG) is chosen(Work.BATCH, PLAIN) is None
    for head_dim in (8, 32):
        assert chosen(Work.BATCH, PLAIN._replace(head_dim=head_dim, head_dim_v=head_dim)) == "cuDNN of PyTorch"
    assert chosen(Work.BATCH, LONG, capability=100) == "cuDNN of PyTorch"
    choice = choose(Work.BATCH, PLAIN, Card(ASSUMED.facts._replace(capability=90), ASSUMED.model))
    assert choice.reasons == (
        "head_dim 128, of values 128, of heads that are not grouped: FlashAttention-4's backward pass is faster",
    )


@pytest.mark.parametrize(
    ("version", "found"),
    [
        ("", "not installed"),
        ("4.0.0b35", "version 4.0.0b35"),
        ("4.0.1", None),
        ("4.1.0b1", "version 4.1.0b1"),
        ("4.1", "version 4.1"),
    ],
)
def test_other_versions_are_refused(version: str, found: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "fa4_version", lambda: version)
    card = Card(ASSUMED.facts._replace(capability=90), ASSUMED.model)
    for refuses in (spec.refuses_fa4_forward, spec.refuses_fa4_backward):
        reasons = "; ".join(refuses(LONG, card))
        expected = f"flash-attn-4 is {found}: expected 4.0.0b36 or later, before 4.1; pip install"
        assert reasons.startswith(expected) if found else not reasons


def test_a_configuration_tells_long_sequences_and_groups() -> None:
    q, k, v = (
        torch.empty(2, 2048, heads, dim, device="meta", dtype=BF16) for heads, dim in ((8, 64), (2, 64), (2, 32))
    )
    assert TrainingConfig.of(q, k, v, ("sinks",)) == TrainingConfig(64, BF16, 32, ("sinks",), True, True)
    assert TrainingConfig.of(q[:, 1:], q, q) == TrainingConfig(64, BF16, 64)


def stand_in(calls: list[str]) -> ModuleType:
    """Its module: two functions, of its names and arguments, in float64 on a CPU."""

    def forward(q: Any, k: Any, v: Any, *, softmax_scale: float, causal: bool, return_lse: bool) -> tuple[Any, ...]:
        calls.append("forward")
        assert return_lse
        with own_training_kernels():
            out, lse = op.attention(q, k, v, *op.arguments_of(Sequences(causal, softmax_scale)))
        return out, lse, None, None, None

    def backward(*tensors: Any, dlse: Any, causal: bool, **named: Any) -> tuple[Any, ...]:
        q, k, v, out, dout, lse = tensors
        calls.append(f"backward {named.pop('deterministic')}")
        options = op.arguments_of(Sequences(causal, named.pop("softmax_scale")))
        found = op._backward_cpu(dout, dlse, q, k, v, out, lse, *options)
        for name, gradient in zip(("dq", "dk", "dv"), found, strict=False):
            into = named.pop(name)
            assert into.is_contiguous() and into.shape == gradient.shape
            into.copy_(gradient)
        assert not named
        return found[:3]

    module = ModuleType(spec.FA4_MODULE)
    module._flash_attn_fwd, module._flash_attn_bwd = forward, backward  # type: ignore[attr-defined]
    return module


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("with_dlse", [False, True])
def test_outputs_and_gradients(deterministic: bool, with_dlse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, spec.FA4_MODULE, stand_in(calls))
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 9, heads, 8, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    expected, expected_lse = flash_attention(q, k, v, True, sm_scale=0.3, return_lse=True)
    sequences = Sequences(True, 0.3)
    strided = q.detach().transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = flash_attention_4.forward(strided, k.detach(), v.detach(), sequences)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse.transpose(1, 2))
    dout, dlse = torch.randn_like(out), torch.randn_like(lse) if with_dlse else None
    saved = strided, k.detach(), v.detach(), out, lse
    *found, dsinks = flash_attention_4.backward((dout, dlse), saved, sequences, deterministic)
    loss = (expected * dout).sum() + (0 if dlse is None else (expected_lse.transpose(1, 2) * dlse).sum())
    for gradient, right in zip(found, torch.autograd.grad(loss, (q, k, v)), strict=True):
        assert gradient.is_contiguous()
        torch.testing.assert_close(gradient, right, rtol=1e-12, atol=1e-12)
    assert dsinks.shape == (0,) and calls == ["forward", f"backward {deterministic}"]


def test_it_can_be_kept_away() -> None:
    q = torch.zeros(1, 4, 2, 64, dtype=BF16)
    assert flash_attention_4.reads(q, q, q)
    assert not flash_attention_4.reads(q, q[:, :0], q[:, :0]) and not flash_attention_4.reads(q[:, :0], q, q)
    with own_training_kernels():
        assert not flash_attention_4.reads(q, q, q)
    assert torch.backends.cuda.flash_sdp_enabled() and torch.backends.cuda.cudnn_sdp_enabled()


def test_a_card_takes_its_passes_and_can_do_without_them() -> None:
    """Where there is no card, an H100 stands in."""
    q, k = torch.zeros(1, 2048, 4, 192, dtype=BF16), torch.zeros(1, 2048, 4, 128, dtype=BF16)
    op._sources.cache_clear()
    for work in (Work.FORWARD, Work.BACKWARD):
        assert op._kernel(work, (q, q, k), ()) is flash_attention_4
        assert op._kernel(work, (q, q, k), ("tree",)) is not flash_attention_4
        with own_training_kernels():
            assert op._kernel(work, (q, q, k), ()).__name__ == f"trunkattn.training.hopper.{work.name.lower()}"
        with without_flash_attention_4():
            assert op._kernel(work, (q, q, k), ()).__name__ == f"trunkattn.training.hopper.{work.name.lower()}"
        assert op._kernel(work, (q, q, k), ()) is flash_attention_4
    op._sources.cache_clear()
