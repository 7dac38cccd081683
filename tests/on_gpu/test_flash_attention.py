"""`flash_attention` on an NVIDIA GPU at real sizes: gradients, determinism, memory, torch.compile, graphs."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from trunkattn import PrefixTree, flash_attention
from trunkattn.gpu.cards import card_at
from trunkattn.gpu.kernel import Work, choose
from trunkattn.training import spec
from trunkattn.training.hopper import division
from trunkattn.training.spec import TrainingConfig

from ..training.training_cases import FEATURES, TABLE, TREES, Results, TrainingCase, check, longer, run, tree_case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("own_kernels", "one_pass"),
]  # these are tests of what computes all lengths
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("number", range(len(TABLE)))
def test_small_sequences_and_packed_ones(number: int, dtype: torch.dtype, deterministic: bool) -> None:
    check(longer(TABLE[number], 1, "cuda", dtype), deterministic)
    check(longer(TABLE[number], 11, "cuda", dtype), deterministic)


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
def test_any_head_dim_matches_float64(head_dim: int, dtype: torch.dtype, deterministic: bool) -> None:
    for lengths, causal in (((512, 512), True), ((512, 1024), False), ((333, 777), True)):
        check(TrainingCase((lengths,), False, causal, (4, 2), head_dim, dtype, device="cuda"), deterministic)


@pytest.mark.parametrize("heads", [(8, 8), (8, 1), (12, 4), (7, 7), (32, 1)])
def test_any_group_of_heads_matches_float64(heads: tuple[int, int]) -> None:
    for deterministic in (True, False):
        check(TrainingCase(((700, 700), (700, 700)), False, True, heads, 128, BF16, device="cuda"), deterministic)


def test_4096_tokens_match_float64() -> None:
    for deterministic in (True, False):
        check(TrainingCase(((4096, 4096),), False, True, (2, 1), 128, BF16, device="cuda"), deterministic)


@pytest.mark.parametrize("head_dim", [64, 128, 192, 256])
def test_gradients_are_bit_equal_where_that_is_asked(head_dim: int) -> None:
    lengths = ((1500, 1500), (100, 2000), (0, 7), (900, 300))
    case = TrainingCase(lengths, True, True, (8, 2), head_dim, BF16, device="cuda")
    first = run(case, True)
    for _ in range(100):
        assert all(torch.equal(a, b) for a, b in zip(first, run(case, True), strict=True))


def test_outputs_are_bit_equal_either_way() -> None:
    case = TrainingCase(((1500, 1500),), False, True, (8, 2), 128, BF16, device="cuda")
    first, second = run(case, True), run(case, False)
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


@pytest.mark.parametrize("deterministic", [True, False])
def test_memory_grows_with_the_length_and_not_its_square(deterministic: bool) -> None:
    def peak(length: int) -> int:
        leaves = [torch.randn(1, length, 8, 128, device="cuda", dtype=BF16, requires_grad=True) for _ in range(3)]
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = flash_attention(*leaves, True, deterministic=deterministic)
        assert isinstance(out, torch.Tensor)
        out.backward(torch.ones_like(out))
        return torch.cuda.max_memory_allocated() - before

    peak(1024)
    assert peak(16384) <= 8.1 * peak(2048)


@pytest.mark.parametrize("packed", [False, True])
def test_torch_compile_takes_it_whole(packed: bool) -> None:
    case = TrainingCase(((300, 300), (300, 300)), packed, True, (4, 2), 64, BF16, device="cuda")
    sums = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), case.cu_seqlens, strict=True))

    def loss(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = flash_attention(q, k, v, True, **sums, deterministic=True)
        assert isinstance(out, torch.Tensor)
        return out.float().square().sum()

    compiled = torch.compile(loss, fullgraph=True)
    leaves = [tensor.clone().requires_grad_() for tensor in case.inputs[:3]]
    expected, found = (torch.autograd.grad(call(*leaves), leaves) for call in (loss, compiled))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_step_is_captured_in_a_graph(deterministic: bool) -> None:
    """Sequences may change between replays; nothing waits for the device."""
    case = TrainingCase(((200, 200), (312, 312)), True, True, (4, 2), 128, BF16, device="cuda")
    sums, _ = case.cu_seqlens
    assert sums is not None
    q, k, v, dout, dlse = (tensor.clone() for tensor in case.inputs)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]

    def step() -> Results:
        out, lse = flash_attention(
            *leaves, True, cu_seqlens_q=sums, cu_seqlens_k=sums, deterministic=deterministic, return_lse=True
        )
        return out, lse, *torch.autograd.grad((out, lse), leaves, (dout, dlse))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    for middle in (200, 17, 512):
        sums.copy_(torch.tensor([0, middle, 512], dtype=torch.int32))
        graph.replay()
        lengths = ((middle, middle), (512 - middle, 512 - middle))
        now = TrainingCase(lengths, True, True, (4, 2), 128, BF16, device="cuda")
        now.assert_accurate(tuple(tensor.detach() for tensor in results))


def test_what_a_gpu_does_not_take_is_refused() -> None:
    q = torch.zeros(1, 8, 2, 64, device="cuda")
    with pytest.raises(TypeError, match=r"q has dtype torch.float64: expected one of torch.float16"):
        flash_attention(q.double(), q.double(), q.double())
    with pytest.raises(ValueError, match="q has head_dim 320: expected 1 to 256"):
        flash_attention(*(torch.zeros(1, 8, 2, 320, device="cuda") for _ in range(3)))
    with pytest.raises(ValueError, match="k is on cpu: expected cuda:0, like q"):
        flash_attention(q, q.cpu(), q)


@pytest.mark.parametrize("number", [2, 8])
def test_short_sequences_have_the_same_gradients_in_either_way(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user gets them: where queries see few keys, bits repeat, too."""
    case = replace(longer(TABLE[number], 3, "cuda", BF16), head_dim=128, head_dim_v=None)
    check(case, False)
    monkeypatch.setattr(division, "FEW_KEYS", spec.FEW_KEYS)
    division._divide.cache_clear()
    check(case, False)
    if not card_at("cuda").why_not_hopper:
        assert all(map(torch.equal, run(case), run(case, True)))


def test_for_the_sanitizer() -> None:
    for deterministic in (True, False):
        for number in (2, 5, 8, 10):
            check(longer(TABLE[number], 3, "cuda", F16), deterministic)
        wrong = torch.tensor([-5, 900, 30], dtype=torch.int32, device="cuda")
        leaves = [torch.randn(100, 2, 64, device="cuda", dtype=F16, requires_grad=True) for _ in range(3)]
        out = flash_attention(*leaves, True, cu_seqlens_q=wrong, cu_seqlens_k=wrong, deterministic=deterministic)
        assert isinstance(out, torch.Tensor)
        out.sum().backward()


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("case", (*FEATURES, *TREES))
def test_windows_caps_sinks_values_and_trees(case: TrainingCase, dtype: torch.dtype, deterministic: bool) -> None:
    check(replace(case, device="cuda", dtype=dtype, padding=0), deterministic)


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [True, False])
def test_a_large_tree_matches_float64_and_repeats_if_asked(head_dim: int, deterministic: bool) -> None:
    """By cuDNN where it is installed and bits need not repeat."""
    tree = PrefixTree.from_segments([-1, 0, 0, 2, 2, 0, -1, 6, 6], [700, 90, 300, 130, 257, 64, 100, 40, 300])
    case = tree_case(tree, head_dim=head_dim, dtype=BF16, device="cuda", heads=(8, 2))
    check(case, deterministic)
    if deterministic:
        first = run(case, True)
        for _ in range(100):
            assert all(torch.equal(a, b) for a, b in zip(first, run(case, True), strict=True))


def test_a_new_tree_compiles_nothing() -> None:
    """Trees of other shapes, of tokens in whole 16 and not, run with what two of them have compiled, either way."""
    from trunkattn.training.forward import forward_kernel
    from trunkattn.training.hopper.backward import hopper_backward_kernel, prepare_rows_kernel, write_gradients_kernel
    from trunkattn.training.hopper.forward import hopper_forward_kernel
    from trunkattn.training.hopper.query_gradients import query_gradients_kernel

    kernels = (
        forward_kernel, hopper_forward_kernel, prepare_rows_kernel, hopper_backward_kernel, write_gradients_kernel,
        query_gradients_kernel,
    )  # fmt: skip

    def attend(answers: int, length: int) -> int:
        tree = PrefixTree.from_segments([-1, *[0] * answers], [500, *[length] * answers])
        for deterministic in (True, False):
            run(tree_case(tree, head_dim=64, dtype=BF16, device="cuda", heads=(4, 2)), deterministic)
        return sum(len(found) for kernel in kernels for found, *_ in kernel.device_caches.values())

    attend(2, 100)
    known = attend(3, 108)
    assert [attend(*shape) for shape in ((5, 77), (8, 31), (7, 4), (3, 116), (9, 212))] == [known] * 5


# Sequences that begin at odd tokens, of lengths about a tile of 128; some are shorter than a block of keys.
PACKED = (
    (1, 1),
    (127, 127),
    (128, 128),
    (129, 129),
    (3, 3),
    (300, 300),
    (0, 9),
    (33, 40),
    (5, 0),
    (257, 255),
    (90, 900),
)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    "head_dims",
    [
        (64, 64),
        (96, 96),
        (128, 128),
        (192, 128),
        (192, 192),
        (136, 176),
        (256, 256),
        (40, 72),
        (256, 128),
        (40, 256),
        (136, 64),
    ],
)
@pytest.mark.parametrize("causal", [True, False])
def test_packed_sequences_of_odd_lengths(causal: bool, head_dims: tuple[int, int], dtype: torch.dtype) -> None:
    keys, head_values = head_dims
    case = TrainingCase(PACKED, True, causal, (4, 2), keys, dtype, head_dim_v=head_values, padding=150, device="cuda")
    check(case, True)


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 255, 257])
def test_batches_of_lengths_about_a_tile(length: int, dtype: torch.dtype) -> None:
    for lengths, causal in (
        ((length, length), True),
        ((length, 300), True),
        ((300, length), True),
        ((length, 129), False),
    ):
        check(TrainingCase((lengths, lengths), False, causal, (4, 2), 128, dtype, device="cuda"), True)


DEEP = PrefixTree.from_segments([-1, *range(39)], [7] * 40)
BUSHY = PrefixTree.from_segments([-1, *[0] * 20, -1, 21, 22, 22], [333, *[37] * 20, 1, 127, 129, 200])


@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("tree", [DEEP, BUSHY])
def test_trees_of_short_segments(tree: PrefixTree, head_dims: tuple[int, int]) -> None:
    check(
        tree_case(tree, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=BF16, device="cuda", heads=(4, 2)), True
    )


@pytest.mark.parametrize(
    ("head_dims", "window"),
    [
        *product([(64, 64), (80, 96), (128, 128), (192, 192), (256, 256), (40, 72)], [301]),
        *product([(64, 64)], [None, 1, 128, 2**31 - 1]),
    ],
)
def test_windows_caps_and_sinks_together(head_dims: tuple[int, int], window: int | None) -> None:
    """Windows that begin and end inside blocks; those that Triton compiles for; and one that hides nothing. The largest
    error of a sink's gradient, a sum over all queries, is that of chance unless there are several sinks."""
    of_heads: dict[str, Any] = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "heads": (8, 2)}
    options: dict[str, Any] = {"sliding_window": window, "soft_cap": 5.0, "has_sinks": True, **of_heads}
    case = replace(TrainingCase((), False, True, (8, 2), 64, F16, device="cuda"), **options)
    for causal in (True, False):
        for lengths in ((1100, 1100), (300, 777), (777, 300), (1, 65)):
            check(replace(case, lengths=(lengths,) * 2, causal=causal), False)
    if window == 301:
        check(replace(case, lengths=PACKED, packed=True, padding=150), False)
        for tree in (DEEP, BUSHY):
            check(tree_case(tree, dtype=F16, device="cuda", **options), False)


@pytest.mark.parametrize("features", [{"sliding_window": 70}, {"soft_cap": 5.0}, {"has_sinks": True}])
@pytest.mark.parametrize("head_dims", [(64, 64), (128, 128), (192, 128)])
def test_a_feature_by_itself(head_dims: tuple[int, int], features: dict[str, Any]) -> None:
    """Windows of trees leave out blocks in the midst of others."""
    of_heads: dict[str, Any] = {"head_dim": head_dims[0], "head_dim_v": head_dims[1], "heads": (4, 2)}
    case = replace(TrainingCase((), False, True, (4, 2), 64, BF16, device="cuda"), **of_heads, **features)
    for causal in (True, False):
        for lengths in ((700, 700), (333, 777), (777, 333)):
            check(replace(case, lengths=(lengths, lengths), causal=causal), False)
        check(replace(case, lengths=PACKED, packed=True, causal=causal, padding=150), False)
    for tree in (DEEP, BUSHY):
        check(tree_case(tree, dtype=BF16, device="cuda", **of_heads, **features), False)


@pytest.mark.parametrize("head_dims", [(128, 128), (96, 96), (64, 64), (192, 192)])
def test_ctas_that_have_all_heads_of_a_group_and_those_that_have_some(head_dims: tuple[int, int]) -> None:
    """By the number of blocks of keys beside that of SMs."""
    for length, batch in ((900, 1), (1100, 12)):
        lengths = ((length, length),) * batch
        check(TrainingCase(lengths, False, True, (16, 8), head_dims[0], BF16, device="cuda"), False)


def test_parts_of_a_fused_tensor_and_tensors_that_tma_cannot_read() -> None:
    """The latter are copied first."""
    sums = {
        name: torch.tensor([0, 7, 300], dtype=torch.int32, device="cuda") for name in ("cu_seqlens_q", "cu_seqlens_k")
    }
    fused = torch.randn(300, 3, 4, 128, device="cuda", dtype=BF16).unbind(1)
    apart = flash_attention(*(tensor.contiguous() for tensor in fused), True, **sums)
    assert isinstance(apart, torch.Tensor)
    assert torch.equal(apart, flash_attention(*fused, True, **sums))
    odd = [torch.empty(tensor.numel() + 1, device="cuda", dtype=BF16)[1:].view(tensor.shape) for tensor in fused]
    for target, tensor in zip(odd, fused, strict=True):
        target.copy_(tensor)
    assert torch.equal(flash_attention(*odd, True, **sums), apart)
    gradients = []
    for tensors in (odd, fused):
        leaves = [tensor.detach().requires_grad_() for tensor in tensors]
        out = flash_attention(*leaves, True, deterministic=True, **sums)
        gradients.append(torch.autograd.grad(out, leaves, apart))
    assert all(map(torch.equal, *gradients))


def test_transformations_of_torch_func() -> None:
    """A new tree makes its tables within one."""
    q, k, v = (torch.randn(12, 2, 64, device="cuda", dtype=BF16) for _ in range(3))
    sums = {
        name: torch.tensor([0, 5, 12], dtype=torch.int32, device="cuda") for name in ("cu_seqlens_q", "cu_seqlens_k")
    }
    for options in ({"causal": True, **sums}, {"tree": PrefixTree.from_segments([-1, 0, 0], [6, 3, 3])}, {}):
        lead = q[None] if not options else q

        def loss(query: torch.Tensor, options: dict[str, Any] = options) -> torch.Tensor:
            out = flash_attention(query, *((k, v) if options else (k[None], v[None])), deterministic=True, **options)
            assert isinstance(out, torch.Tensor)
            return out.float().square().sum()

        found = torch.func.grad(loss)(lead)
        own = lead.clone().requires_grad_()
        torch.testing.assert_close(found, torch.autograd.grad(loss(own), own)[0])
        assert torch.equal(torch.vmap(torch.func.grad(loss))(lead[None])[0], found)


def test_nan_of_a_packed_sequence_stays_in_it() -> None:
    q, k, v = (torch.randn(200, 2, 128, device="cuda", dtype=BF16) for _ in range(3))
    sums = {
        name: torch.tensor([0, 100, 200], dtype=torch.int32, device="cuda") for name in ("cu_seqlens_q", "cu_seqlens_k")
    }
    expected = flash_attention(q, k, v, True, **sums)
    k[:100], v[:100] = torch.nan, torch.nan
    found = flash_attention(q, k, v, True, **sums)
    assert isinstance(found, torch.Tensor) and isinstance(expected, torch.Tensor)
    assert found[:100].isnan().all() and torch.equal(found[100:], expected[100:])


@pytest.mark.parametrize("head_dims", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
@pytest.mark.parametrize("is_tree", [False, True])
def test_hopper_kernels_for_the_sanitizer(
    monkeypatch: pytest.MonkeyPatch, is_tree: bool, head_dims: tuple[int, int]
) -> None:
    """Some CTAs compute several tiles."""
    monkeypatch.setattr(spec, "cudnn_version", tuple)  # it would compute the tree
    head_dim, head_dim_v = head_dims
    case = TrainingCase(PACKED, True, True, (8, 2), head_dim, BF16, padding=150, device="cuda", head_dim_v=head_dim_v)
    if is_tree:
        tree = PrefixTree.from_segments([-1, *[0] * 50], [300, *[37] * 50])
        case = tree_case(tree, head_dim=head_dim, head_dim_v=head_dim_v, dtype=BF16, device="cuda", heads=(8, 2))
    card = card_at("cuda")
    if not card.why_not_hopper:
        for work, name in ((Work.FORWARD, "Hopper forward"), (Work.BACKWARD, "Hopper backward")):
            options = ("tree" if is_tree else "cu_seqlens_q",)
            kernel = choose(work, TrainingConfig(head_dim, BF16, head_dim_v, options, True), card).kernel
            assert kernel and kernel.name == name
            assert kernel.source().reads(*case.inputs[:3])
    for deterministic in (False, True):
        check(case, deterministic)
