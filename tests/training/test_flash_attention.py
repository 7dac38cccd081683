"""`flash_attention` on a CPU: gradients, torch.compile, memory, bad input."""

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from trunkattn import PrefixTree, flash_attention
from trunkattn.training import cpu_blocks, op

from ..attention.cases import fraction
from .any_case import any_case
from .training_cases import BF16, F16, F32, FEATURES, TABLE, TREES, TrainingCase, longer, run, tree_case

DENSE = TrainingCase(((5, 7), (5, 7)), False, True, (4, 2), 8)
PACKED = TrainingCase(((3, 4), (0, 2), (4, 4), (2, 0)), True, True, (4, 2), 8)
SMALL_TREE = tree_case(PrefixTree.from_segments([-1, 0, 0, 2], [3, 2, 4, 1]), head_dim=8)
EVERYTHING = replace(SMALL_TREE, head_dim_v=5, sliding_window=3, soft_cap=2.0, has_sinks=True)


@pytest.mark.parametrize("case", TABLE)
def test_outputs_and_gradients_are_as_accurate_as_plain_pytorch(case: TrainingCase) -> None:
    results = run(case)
    case.assert_accurate(results)
    if case.packed:
        case.assert_padding_is_zero(results)


@pytest.mark.parametrize("case", (*FEATURES, *TREES))
@pytest.mark.parametrize("block", [16, 256])
def test_windows_caps_sinks_values_and_trees_are_as_accurate_as_plain_pytorch(
    case: TrainingCase, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_blocks, "_CPU_BLOCK", block)
    results = run(case)
    case.assert_accurate(results)
    if case.padding:
        case.assert_padding_is_zero(results)


def test_a_branch_may_begin_with_the_last_query_of_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_blocks, "_CPU_BLOCK", 16)
    case = tree_case(PrefixTree.from_segments((-1, 0, 0), (16, 47, 20)))
    case.assert_accurate(run(case))


@pytest.mark.parametrize("number", [2, 4, 9])
def test_sequences_may_have_several_blocks(number: int) -> None:
    case = longer(TABLE[number], 8, "cpu", F32)
    case.assert_accurate(run(case))


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_half_precision_has_float32_sums(dtype: torch.dtype) -> None:
    case = replace(TABLE[0], dtype=dtype)
    case.assert_accurate(run(case))


@settings(max_examples=fraction(2))
@given(case=any_case(20, (F32, F16, BF16)), block=st.sampled_from([4, 16]))
@pytest.mark.property
def test_any_case_is_as_accurate_as_plain_pytorch(case: TrainingCase, block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_blocks, "_CPU_BLOCK", block)
        results = run(case)
    case.assert_accurate(results, rounded_out=True)
    if case.packed:
        case.assert_padding_is_zero(results)


@pytest.mark.parametrize("case", [DENSE, PACKED, SMALL_TREE, EVERYTHING])
def test_gradients_are_those_of_finite_differences(case: TrainingCase) -> None:
    leaves = [tensor.double().contiguous().requires_grad_() for tensor in case.inputs[:3]]
    if case.has_sinks:
        leaves.append(torch.linspace(-1, 1, case.heads[0], dtype=torch.float64).requires_grad_())
    options: dict[str, Any] = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), case.cu_seqlens, strict=True))
    options |= {"tree": case.tree, "sliding_window": case.sliding_window, "logits_soft_cap": case.soft_cap}

    def results(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own = options | ({"sinks": leaves[3]} if case.has_sinks else {})
        out, lse = flash_attention(*leaves[:3], case.causal, **own, return_lse=True)
        return out, lse.masked_fill(lse == -math.inf, 0.0)

    assert torch.autograd.gradcheck(results, leaves, fast_mode=True)


def test_a_query_that_sees_nothing_has_gradient_0() -> None:
    case = TrainingCase(((40, 7),), False, True, (2, 1), 16)
    out, lse, dq, dk, dv = run(case)
    assert torch.equal(out[0, :33], torch.zeros(33, 2, 16)) and torch.equal(dq[0, :33], torch.zeros(33, 2, 16))
    assert (lse[0, :33] == -math.inf).all() and lse[0, 33:].isfinite().all()
    assert dk.isfinite().all() and dv.isfinite().all()


def test_either_result_has_gradients_without_the_other() -> None:
    leaves = [tensor.clone().requires_grad_() for tensor in DENSE.inputs[:3]]
    out, lse = flash_attention(*leaves, return_lse=True)
    zeros = torch.zeros_like(out), torch.zeros_like(lse)
    for results, wanted in (((out,), (torch.ones_like(out), zeros[1])), ((lse,), (zeros[0], torch.ones_like(lse)))):
        alone = torch.autograd.grad([each.sum() for each in results], leaves, retain_graph=True, allow_unused=True)
        both = torch.autograd.grad((out, lse), leaves, wanted, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(alone, both, strict=True))


def test_lse_is_optional_and_of_the_shape_of_q() -> None:
    q, k, v = DENSE.inputs[:3]
    out, lse = flash_attention(q, k, v, return_lse=True)
    assert torch.equal(flash_attention(q, k, v), out)
    assert (out.shape, lse.shape, lse.dtype) == (q.shape, q.shape[:-1], torch.float32)


@pytest.mark.parametrize("case", [DENSE, PACKED, SMALL_TREE, EVERYTHING])
def test_the_operators_keep_what_torch_asks_of_them(case: TrainingCase) -> None:
    """Schema, fake tensors, autograd and tracing with dynamic shapes."""
    q, k, v = (tensor.clone().requires_grad_() for tensor in case.inputs[:3])
    sinks = None if case.sinks is None else case.sinks.clone().requires_grad_()
    options = op.arguments_of(replace(case.sequences, sinks=sinks), deterministic=True)
    torch.library.opcheck(torch.ops.trunkattn.flash_attention, (q, k, v, *options))
    out, lse = torch.ops.trunkattn.flash_attention(q, k, v, *options)
    saved = [tensor.detach() for tensor in (q, k, v, out, lse)]
    gradients = (torch.ones_like(saved[3]), torch.ones_like(saved[4]))
    every = (None if sinks is None else sinks.detach(), *options[1:])
    for dlse in (gradients[1], None):
        given = gradients[0], dlse, *saved, *every
        torch.library.opcheck(torch.ops.trunkattn.flash_attention_backward, given)


@pytest.mark.parametrize("case", [DENSE, PACKED])
def test_torch_compile_takes_it_whole(case: TrainingCase) -> None:
    sums = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), case.cu_seqlens, strict=True))

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attention(q.sin(), k, v, case.causal, **sums)
        assert isinstance(out, torch.Tensor)
        return out.square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    leaves = [tensor.clone().requires_grad_() for tensor in case.inputs[:3]]
    expected, found = loss(*leaves), compiled(*leaves)
    assert torch.equal(expected, found)
    for a, b in zip(torch.autograd.grad(expected, leaves), torch.autograd.grad(found, leaves), strict=True):
        assert torch.equal(a, b)


def test_no_tensor_is_quadratic_in_the_length() -> None:
    """2,000 tokens: the scores would be 16 MB, a tile of them is 256 KiB; outputs and gradients are 64 KB each."""
    q, k, v = (torch.randn(1, 2000, 1, 8, requires_grad=True) for _ in range(3))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = flash_attention(q, k, v)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()
    largest = max(event.self_cpu_memory_usage for event in profile.events())
    assert 200_000 < largest < 500_000


def test_a_second_derivative_is_refused() -> None:
    leaves = [tensor.clone().requires_grad_() for tensor in DENSE.inputs[:3]]
    out = flash_attention(*leaves)
    assert isinstance(out, torch.Tensor)
    (gradient,) = torch.autograd.grad(out.sum(), leaves[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="flash_attention_backward"):
        gradient.sum().backward()


@pytest.mark.parametrize("enabled", [True, False])
def test_forward_mode_is_refused_whether_or_not_gradients_are_recorded(enabled: bool) -> None:
    q, k, v = DENSE.inputs[:3]
    with torch.set_grad_enabled(enabled):
        refused = pytest.raises(RuntimeError, match="no forward-mode derivatives: expected tensors without tangents")
        with forward_ad.dual_level(), refused:
            flash_attention(forward_ad.make_dual(q, q), k, v)
        with refused:
            torch.func.jvp(lambda given: flash_attention(given, k, v), (q,), (q,))


@pytest.mark.parametrize("packed", [False, True])
def test_a_gradient_that_is_nan_where_nothing_is_seen_stays_there(packed: bool) -> None:
    """As of lse², with lse -inf."""
    case = TrainingCase(((5, 2),), packed, True, (2, 1), 8)
    leaves = [tensor.detach().requires_grad_() for tensor in case.inputs[:3]]
    sums = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), case.cu_seqlens, strict=True))
    out, lse = flash_attention(*leaves, True, **sums, return_lse=True)
    loss = lse.square().masked_fill(~lse.isfinite(), 0).sum() + out.sum()
    assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(loss, leaves))


@pytest.mark.parametrize("mask", [{"causal": True}, {"sliding_window": 1}])
def test_a_gradient_that_is_nan_where_nothing_is_seen_reaches_nothing(mask: dict[str, Any]) -> None:
    """The output there is 0 whatever the sink is."""
    q, k, v, dout, _ = TrainingCase(((5, 2),), False, True, (2, 1), 8).inputs
    leaves = [tensor.detach().requires_grad_() for tensor in (q, k, v, torch.tensor([0.5, -1.0]))]
    out = flash_attention(*leaves[:3], sinks=leaves[3], **mask)
    sees_nothing = out.detach() == 0
    assert sees_nothing[0, :, 0, 0].tolist() == [True, True, True, False, False]
    expected, found = (
        torch.autograd.grad(out, leaves, dout.masked_fill(sees_nothing, value), retain_graph=True)
        for value in (0.0, math.nan)
    )
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True)) and expected[3].all()


def test_what_inference_mode_has_made_trains() -> None:
    """Autograd saves no tensor of inference mode: lengths and sinks of a collator, or keys of a frozen part."""
    sums = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), PACKED.cu_seqlens, strict=True))
    q, k, v = (tensor.detach().requires_grad_() for tensor in PACKED.inputs[:3])
    given: dict[str, Any] = {"k": k.detach(), "sinks": torch.linspace(-1, 1, 4), **sums}
    with torch.inference_mode():
        made = {name: tensor.clone() for name, tensor in given.items()}
    assert all(tensor.is_inference() for tensor in made.values())
    expected, found = (
        torch.autograd.grad(flash_attention(q, v=v, causal=True, **each).square().sum(), (q, v))
        for each in (given, made)
    )
    assert all(torch.equal(a, b) and b.abs().sum() > 0 for a, b in zip(expected, found, strict=True))


def test_autocast_chooses_the_dtype() -> None:
    """Rotary embeddings leave float32 queries and keys beside 16-bit values."""
    q, k, v = DENSE.inputs[:3]
    with torch.autocast("cpu", torch.bfloat16):
        out = flash_attention(q, k, v.bfloat16())
        assert isinstance(out, torch.Tensor) and out.dtype == torch.bfloat16
        doubles = flash_attention(q.double(), k.double(), v.double())
        assert isinstance(doubles, torch.Tensor) and doubles.dtype == torch.float64
    assert torch.equal(out, flash_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_a_scale_that_varies_compiles_without_a_break() -> None:
    q, k, v = DENSE.inputs[:3]
    compiled = torch.compile(
        lambda scale: flash_attention(q, k, v, sm_scale=scale), backend="aot_eager", fullgraph=True
    )
    for scale in (0.1, 0.2, 0.3):
        assert torch.equal(compiled(scale), flash_attention(q, k, v, sm_scale=scale))


class Layer(torch.nn.Module):
    """`flash_attention` as a module, which export needs."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sums: list[torch.Tensor]) -> torch.Tensor:
        named = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), sums, strict=False))
        out = flash_attention(q, k, v, True, **named)
        assert isinstance(out, torch.Tensor)
        return out


@pytest.mark.parametrize("case", [DENSE, PACKED])
def test_it_exports_with_a_batch_of_any_size(case: TrainingCase) -> None:
    tensors = [tensor.contiguous() for tensor in case.inputs[:3]]
    sums = [tensor for tensor in case.cu_seqlens if tensor is not None]
    size = torch.export.Dim("size", min=2, max=64)
    shapes = [{0: None if case.packed else size}] * 3
    dynamic = (*shapes, [{0: size} for _ in sums])
    exported = torch.export.export(Layer(), (*tensors, sums), dynamic_shapes=dynamic)
    larger = [torch.cat([tensor, tensor]) for tensor in tensors] if not case.packed else tensors
    longer_sums = [torch.cat([tensor, tensor[-1:]]) for tensor in sums]
    found = exported.module()(*larger, longer_sums)
    assert torch.equal(found, Layer()(*larger, longer_sums))


def int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


Q, K = torch.zeros(2, 5, 4, 8), torch.zeros(2, 7, 2, 8)
ROWS, KEYS = torch.zeros(9, 4, 8), torch.zeros(11, 2, 8)
SUMS = {"cu_seqlens_q": int32(0, 4, 9), "cu_seqlens_k": int32(0, 5, 11)}
POSITIVE = "expected None or a number from 1.18e-38 to 1.7e+38, the range of float32 in base 2"
BAD: tuple[tuple[type[Exception], str, dict[str, Any]], ...] = (
    (TypeError, "q is a list: expected a torch.Tensor", {"q": [0.0]}),
    (TypeError, "v is None: expected a torch.Tensor", {"v": None}),
    (ValueError, "q is on meta: expected cpu or cuda", {"q": Q.to("meta")}),
    (ValueError, "k is on meta: expected cpu or cuda", {"k": K.to("meta")}),
    (ValueError, "q has layout torch.sparse_coo: expected a dense tensor", {"q": Q.detach().to_sparse()}),
    (ValueError, "k is nested: expected a dense tensor", {"k": torch.nested.nested_tensor(list(K))}),
    (ValueError, "sinks has layout torch.sparse_coo: expected a dense", {"sinks": torch.zeros(4).to_sparse()}),
    (TypeError, "q has dtype torch.int64: expected one of torch.float16, torch.bfloat16", {"q": Q.long()}),
    (TypeError, "k has dtype torch.float16: expected torch.float32, like q", {"k": K.half()}),
    (ValueError, "q has shape (5, 4, 8): expected (batch, seqlen, heads, head_dim), or cu_seqlens_q", {"q": Q[0]}),
    (ValueError, "k has shape (2, 7, 2, 9): expected q's head_dim, 8, and batch, 2", {"k": torch.zeros(2, 7, 2, 9)}),
    (ValueError, "k has shape (3, 7, 2, 8): expected q's head_dim, 8, and batch, 2", {"k": torch.zeros(3, 7, 2, 8)}),
    (ValueError, "v has shape (2, 6, 2, 8): expected (2, 7, 2, head_dim), as k has", {"v": K[:, :6]}),
    (ValueError, "v has head_dim 0: expected 1 to 256", {"v": K[..., :0]}),
    (ValueError, "q has head_dim 0: expected 1 to 256", {"q": Q[..., :0], "k": K[..., :0], "v": K[..., :0]}),
    (ValueError, "k has 3 heads: expected a divisor of q's 4", {name: torch.zeros(2, 7, 3, 8) for name in "kv"}),
    (ValueError, "k has 0 heads: expected a divisor of q's 4", {name: K[:, :, :0] for name in "kv"}),
    (ValueError, "k has 2 heads: expected a divisor of q's 0", {"q": Q[:, :, :0]}),
    (TypeError, "causal=1: expected a bool", {"causal": 1}),
    (TypeError, "deterministic=None: expected a bool", {"deterministic": None}),
    (TypeError, "return_lse=0: expected a bool", {"return_lse": 0}),
    (TypeError, "sm_scale='x': expected None or a number", {"sm_scale": "x"}),
    (TypeError, "sm_scale=True: expected None or a number", {"sm_scale": True}),
    (ValueError, f"sm_scale=-1: {POSITIVE}", {"sm_scale": -1}),
    (ValueError, f"sm_scale=0.0: {POSITIVE}", {"sm_scale": 0.0}),
    (ValueError, f"sm_scale=nan: {POSITIVE}", {"sm_scale": math.nan}),
    (ValueError, f"logits_soft_cap=0: {POSITIVE}", {"logits_soft_cap": 0}),
    (ValueError, f"logits_soft_cap=3e+38: {POSITIVE}", {"logits_soft_cap": 3e38}),
    (ValueError, "sliding_window=0: expected an integer from 1 to 2147483647", {"sliding_window": 0}),
    (TypeError, "sliding_window=(3, 0): expected an integer from 1", {"sliding_window": (3, 0)}),
    (TypeError, "sinks is a float: expected a torch.Tensor", {"sinks": 0.5}),
    (TypeError, "sinks has dtype torch.int64: expected a floating one", {"sinks": torch.zeros(4).long()}),
    (ValueError, "sinks is on meta: expected cpu, like q", {"sinks": torch.zeros(4, device="meta")}),
    (ValueError, "sinks has shape (2,): expected (4,), one for each head of q", {"sinks": torch.zeros(2)}),
    (ValueError, "cu_seqlens_q is None: expected both", {"cu_seqlens_k": int32(0, 7)}),
)
BAD_PACKED: tuple[tuple[type[Exception], str, dict[str, Any]], ...] = (
    (ValueError, "cu_seqlens_k is None: expected both", {"cu_seqlens_k": None}),
    (ValueError, "q has shape (2, 5, 4, 8): expected (tokens, heads, head_dim), as cu_seqlens_q is given", {"q": Q}),
    (TypeError, "cu_seqlens_q is a list: expected a torch.Tensor", {"cu_seqlens_q": [0, 9]}),
    (ValueError, "cu_seqlens_q has layout torch.sparse_coo: expected", {"cu_seqlens_q": int32(0, 4, 9).to_sparse()}),
    (
        TypeError,
        "cu_seqlens_k has dtype torch.int64: expected torch.int32; use cu_seqlens_k.int()",
        {"cu_seqlens_k": torch.tensor([0, 5, 11])},
    ),
    (ValueError, "cu_seqlens_k is on meta: expected cpu, like q", {"cu_seqlens_k": int32(0, 5, 11).to("meta")}),
    (ValueError, "cu_seqlens_k has shape (2,): expected (3,), like cu_seqlens_q", {"cu_seqlens_k": int32(0, 11)}),
    (ValueError, "cu_seqlens_q has shape (0,): expected (num_sequences + 1)", {"cu_seqlens_q": int32()}),
    (ValueError, "cu_seqlens_q has shape (1, 3): expected", {"cu_seqlens_q": int32(0, 4, 9)[None]}),
    (ValueError, "cu_seqlens_q[0]=1: expected 0", {"cu_seqlens_q": int32(1, 4, 9)}),
    (ValueError, "cu_seqlens_q[2]=3: expected 4 to 9", {"cu_seqlens_q": int32(0, 4, 3)}),
    (ValueError, "cu_seqlens_k[1]=-1: expected 0 to 11", {"cu_seqlens_k": int32(0, -1, 11)}),
    (ValueError, "cu_seqlens_k[2]=12: expected 5 to 11", {"cu_seqlens_k": int32(0, 5, 12)}),
)


@pytest.mark.parametrize(("error", "message", "changes"), BAD, ids=[message for _, message, _ in BAD])
def test_bad_input_is_refused(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=re.escape(message)):
        flash_attention(**{"q": Q, "k": K, "v": K} | changes)


@pytest.mark.parametrize(("error", "message", "changes"), BAD_PACKED, ids=[message for _, message, _ in BAD_PACKED])
def test_bad_packed_input_is_refused(error: type[Exception], message: str, changes: dict[str, Any]) -> None:
    with pytest.raises(error, match=re.escape(message)):
        flash_attention(**{"q": ROWS, "k": KEYS, "v": KEYS} | SUMS | changes)


def test_a_soft_cap_that_a_gpu_would_round_logits_by_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are said to lie on a GPU and have no memory: nothing is launched."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with FakeTensorMode():
        q = torch.empty(2, 5, 4, 8, device="cuda")
        with pytest.raises(
            ValueError, match=r"logits_soft_cap=2000: expected at most 1024 on a GPU, or None for no cap"
        ):
            flash_attention(q, q, q, logits_soft_cap=2000)
        for soft_cap in (None, 1024):  # what is checked after it is refused
            with pytest.raises(ValueError, match="sliding_window=0"):
                flash_attention(q, q, q, logits_soft_cap=soft_cap, sliding_window=0)
    assert flash_attention(Q, K, K, logits_soft_cap=2000).shape == Q.shape


def test_more_tokens_than_a_gpu_counts_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    tree = PrefixTree.from_segments([-1, 0], [2**28, 1])
    message = r"q has 268435457 tokens: expected at most 268435456 on a GPU; attend to fewer sequences at a time, or"
    with FakeTensorMode(allow_non_fake_inputs=True):
        for options in ({}, {"cu_seqlens_q": torch.zeros(2), "cu_seqlens_k": torch.zeros(2)}, {"tree": tree}):
            q = torch.empty(*(() if options else (1,)), 2**28 + 1, 1, 8, device="cuda")
            with pytest.raises(ValueError, match=message):
                flash_attention(q, q, q, **options)


@pytest.mark.parametrize(
    ("shape", "kv_heads", "message"),
    [
        ((1, 3, 2**17, 64), 2**17, "q has 131072 heads of 64: expected fewer than 8388608 numbers of a token on a GPU"),
        ((1, 2**28, 16, 8), 1, "q has 268435456 tokens: expected at most 134217728 on a GPU, as 16 heads of q share"),
        ((1, 2**28, 18, 8), 2, "q has 268435456 tokens: expected at most 238609294 on a GPU, as 9 heads of q share"),
        ((1, 3, 2, 257), 1, "q has head_dim 257: expected 1 to 256 on a GPU, from 1 on a CPU"),
    ],
)
def test_offsets_that_a_gpu_does_not_count_are_refused(
    shape: tuple[int, ...], kv_heads: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with FakeTensorMode():
        q, k = (torch.empty(*shape[:2], heads, shape[3], device="cuda") for heads in (shape[2], kv_heads))
        with pytest.raises(ValueError, match=message):
            flash_attention(q, k, k, True)


@pytest.mark.parametrize(
    ("lengths", "causal", "window", "unseen_keys", "blind_rows"),
    [
        ((5, 20), True, 4, 12, 0),
        ((5, 20), False, 4, 12, 0),
        ((300, 700), True, 40, 361, 0),
        ((20, 5), True, None, 0, 15),
        ((20, 5), False, 4, 0, 12),
        ((700, 300), False, 30, 0, 371),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_what_nobody_sees_may_be_nan(
    packed: bool, lengths: tuple[int, int], causal: bool, window: int | None, unseen_keys: int, blind_rows: int
) -> None:
    """Keys before every window, and queries that see no key with their gradients of out."""
    torch.manual_seed(0)
    shapes = [(lengths[0], 2), (lengths[1], 1), (lengths[1], 1), (lengths[0], 2)]
    clean = [torch.randn(*shape, 8) for shape in shapes]
    dirty = [tensor.clone() for tensor in clean]
    for tensor, count in zip(dirty, (blind_rows, unseen_keys, unseen_keys, blind_rows), strict=True):
        tensor[:count] = math.nan
    sums = {
        name: torch.tensor([0, own]).int() for name, own in zip(("cu_seqlens_q", "cu_seqlens_k"), lengths, strict=True)
    }
    results = []
    for *inputs, dout in (clean, dirty):
        leaves = [(tensor if packed else tensor[None]).requires_grad_() for tensor in inputs]
        found = flash_attention(*leaves, causal, sliding_window=window, return_lse=True, **(sums if packed else {}))
        gradients = torch.autograd.grad(found[0], leaves, dout if packed else dout[None])
        results.append((*found, *gradients))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize(("head_dim", "head_dim_v"), [(1, 300), (300, 1)])
def test_a_cpu_takes_any_head_dim(head_dim: int, head_dim_v: int) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, 5, 2, width, dtype=torch.float64) for width in (head_dim, head_dim, head_dim_v))
    expected = torch.nn.functional.scaled_dot_product_attention(*(each.transpose(1, 2) for each in (q, k, v)))
    torch.testing.assert_close(flash_attention(q, k, v), expected.transpose(1, 2))


def test_all_tensors_are_on_the_device_of_q(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with FakeTensorMode(), pytest.raises(ValueError, match="k is on cpu: expected cuda:0, like q"):
        q = torch.empty(2, 5, 4, 8, device="cuda")
        flash_attention(q, q.cpu(), q)


def test_what_the_bad_inputs_change_is_good() -> None:
    assert flash_attention(Q, K, K).shape == Q.shape
    assert flash_attention(ROWS, KEYS, KEYS, **SUMS).shape == ROWS.shape
