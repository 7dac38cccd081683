"""Sequences of one length through PyTorch's cuDNN: who takes them, and the call, held to another back end on a CPU."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.page.support_matrix import card
from trunkattn import PrefixTree, flash_attention
from trunkattn.gpu.cards import card_at
from trunkattn.gpu.kernel import Work, choose
from trunkattn.training import torch_cudnn
from trunkattn.training.checks import Options
from trunkattn.training.flash_attention import _whole_kernel
from trunkattn.training.spec import TrainingConfig

from ..gpu.hopper_cases import OnCard

NAME = "cuDNN of PyTorch"
BF16, F32 = torch.bfloat16, torch.float32


def why(capability: tuple[int, int] = (9, 0), **changes: Any) -> str:
    with card(capability):
        choice = choose(
            Work.BATCH, TrainingConfig(128, BF16, 128)._replace(**changes), card_at(torch.device("cuda", 0))
        )
    assert (choice.kernel is None) == bool(choice.reasons)
    return "; ".join(choice.reasons)


def test_who_computes_sequences_of_one_length() -> None:
    assert why() == why((10, 0)) == why((10, 3)) == why((10, 0), is_grouped=True) == ""
    assert why(head_dim=32, head_dim_v=32) == why((10, 0), head_dim=64, head_dim_v=64) == ""  # no Hopper backward pass
    assert why(is_grouped=True) == (
        "head_dim 128, of values 128, of heads that are grouped: the Hopper backward pass is faster after cuDNN's"
        " forward pass"
    )
    assert "the Hopper backward pass is faster" in why(head_dim=64, head_dim_v=64)
    assert "the Hopper backward pass is faster" in why(head_dim=72, head_dim_v=96)
    assert "the Hopper passes are faster" in why(head_dim=72, head_dim_v=96, is_long=True)
    assert why((8, 0)) == "compute capability 8.0: expected 9.0, 10.0 or 10.3"
    assert why(dtype=F32) == "dtype torch.float32: expected torch.float16 or torch.bfloat16"
    for head_dims in ((256, 256), (192, 128), (40, 136)):
        for is_grouped in (False, True):
            said = why(head_dim=head_dims[0], head_dim_v=head_dims[1], is_grouped=is_grouped)
            assert said.endswith("grouped: the Hopper passes are faster")
    assert why(head_dim=256, head_dim_v=32) == ""  # no Hopper backward pass
    assert why(head_dim=260) == "head_dim 260, of values 128: expected multiples of 8 to 256"
    assert why((10, 0), head_dim=256) == "head_dim 256, of values 128: expected multiples of 8 to 128"
    assert why(options=("sinks",)) == "sinks is given: PyTorch's cuDNN attention has none"


@pytest.mark.parametrize(
    ("changes", "lengths", "taken"),
    [
        ({}, (16, 16), True),
        ({"causal": False}, (16, 40), True),
        ({}, (16, 40), False),
        ({"return_lse": True}, (16, 16), False),
        ({"sliding_window": 3}, (16, 16), False),
        ({"logits_soft_cap": 30.0}, (16, 16), False),
        ({"deterministic": True}, (16, 16), False),
    ],
)
def test_what_it_has_not_goes_to_the_kernels_of_our_own(
    changes: dict[str, Any], lengths: tuple[int, int], taken: bool
) -> None:
    plain = Options(True, None, None, None, None, None, None, None, False, False)
    with FakeTensorMode():
        q = torch.empty(2, lengths[0], 8, 128, device="cuda", dtype=BF16)
        k = torch.empty(2, lengths[1], 8, 128, device="cuda", dtype=BF16)
        with card((9, 0)):
            kernel = _whole_kernel(q, k, k, plain._replace(**changes))
    assert (kernel is not None and kernel.name == NAME) is taken


def test_trees_have_a_kernel_of_their_own() -> None:
    tree = PrefixTree.from_segments([-1, 0, 0], [8, 4, 4])
    with FakeTensorMode(allow_non_fake_inputs=True):
        q = torch.empty(16, 8, 64, device="cuda", dtype=BF16)
        options = Options(False, None, None, None, None, None, None, tree, False, False)
        with card((9, 0)):
            kernel = _whole_kernel(q, q, q, options)
    assert kernel is None or kernel.name == "cuDNN flex_attention"


@pytest.mark.parametrize("num_kv_heads", [4, 2])
@pytest.mark.parametrize(("causal", "lengths"), [(True, (9, 9)), (False, (9, 17))])
def test_outputs_and_gradients(
    causal: bool, lengths: tuple[int, int], num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:

    def elsewhere(q: Any, k: Any, v: Any, keeps_lse: bool, causal: bool, sm_scale: float) -> tuple[torch.Tensor, None]:
        assert keeps_lse
        groups = num_kv_heads != 4
        return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=sm_scale, enable_gqa=groups), None

    monkeypatch.setattr(torch_cudnn, "compute", elsewhere)
    torch.manual_seed(0)
    shapes = ((3, lengths[0], 4, 8), (3, lengths[1], num_kv_heads, 8), (3, lengths[1], num_kv_heads, 8))
    leaves = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    ours = torch_cudnn.attend(*leaves, causal, 0.3)
    expected = flash_attention(*leaves, causal, sm_scale=0.3)
    assert isinstance(expected, torch.Tensor) and ours.is_contiguous()
    dout = torch.randn_like(ours)
    pairs = zip(
        (ours, *torch.autograd.grad(ours, leaves, dout)),
        (expected, *torch.autograd.grad(expected, leaves, dout)),
        strict=True,
    )
    for found, right in pairs:
        torch.testing.assert_close(found, right, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("requires_grad", [False, True])
def test_torch_is_asked_for_what_its_own_function_asks_for(requires_grad: bool) -> None:
    """The op is no public interface: tensors without data hold it to what is passed and returned."""
    q = torch.empty(2, 16, 8, 64, device="meta", dtype=BF16, requires_grad=requires_grad)
    k = torch.empty(2, 16, 8, 64, device="meta", dtype=BF16)
    out = torch_cudnn.attend(q, k, k, True, 0.3)
    assert out.shape == q.shape and out.dtype == BF16 and out.requires_grad is requires_grad
    schema = str(torch.ops.aten._scaled_dot_product_cudnn_attention.default._schema)
    assert "attn_bias, bool compute_log_sumexp, float dropout_p=0., bool is_causal=False" in schema


def test_a_torch_without_cudnn_reads_nothing() -> None:
    q = torch.zeros(1, 4, 2, 64, dtype=BF16)
    assert not torch_cudnn.reads(q, q, q, True)
    assert not torch_cudnn.reads(q[:, :0], q, q, True)


@pytest.mark.parametrize("num_kv_heads", [8, 2])
@pytest.mark.parametrize("causal", [False, True])
def test_torch_is_asked_of_the_tensors_as_cudnn_gets_them(
    causal: bool, num_kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch_cudnn, "can_use_cudnn_attention", lambda params: asked.append(params) or True)
    q, k, v = (
        torch.zeros(2, 16, heads, dim, dtype=BF16).as_subclass(OnCard)
        for heads, dim in ((8, 64), (num_kv_heads, 64), (num_kv_heads, 32))
    )
    assert torch_cudnn.reads(q, k, v, causal)
    assert not torch_cudnn.reads(q, k[:, :0], v[:, :0], causal), "cuDNN takes no empty tensors"
    (params,) = asked
    shapes = [tuple(tensor.shape) for tensor in (params.query, params.key, params.value)]
    assert shapes == [(2, 8, 16, 64), (2, num_kv_heads, 16, 64), (2, num_kv_heads, 16, 32)]
    assert (params.is_causal, params.enable_gqa) == (causal, num_kv_heads != 8)
    assert (params.attn_mask, params.dropout) == (None, 0.0)


def test_sums_are_kept_for_a_backward_pass_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever tensor has a gradient: the backward pass of values reads them, too."""
    kept: list[bool] = []

    def compute(q: Any, k: Any, v: Any, keeps_lse: bool, causal: bool, sm_scale: float) -> tuple[torch.Tensor, None]:
        kept.append(keeps_lse)
        return q, None

    monkeypatch.setattr(torch_cudnn, "compute", compute)
    for trained in (0, 1, 2, None):
        tensors = [torch.zeros(1, 4, 2, 8, requires_grad=number == trained) for number in range(3)]
        torch_cudnn.attend(*tensors, True, 1.0)
        with torch.no_grad():
            torch_cudnn.attend(*tensors, True, 1.0)
    assert kept == [True, False] * 3 + [False, False]
