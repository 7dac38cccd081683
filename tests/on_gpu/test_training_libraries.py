"""What other libraries compute of `flash_attention` on an NVIDIA GPU: cuDNN, and FlashAttention-4 where it is
installed."""

import pytest
import torch

from trunkattn import PrefixTree, flash_attention
from trunkattn.gpu.cards import card_at
from trunkattn.gpu.kernel import Work, choose
from trunkattn.training import flash_attention_4
from trunkattn.training.spec import TrainingConfig

from ..training.training_cases import TrainingCase, check, run, tree_case

pytestmark = pytest.mark.gpu
F16, BF16 = torch.float16, torch.bfloat16


@pytest.mark.parametrize("dtype", [F16, BF16])
@pytest.mark.parametrize(
    ("head_dims", "heads"),
    [((64, 64), (8, 2)), ((128, 128), (8, 2)), ((192, 128), (4, 4)), ((64, 96), (4, 4)), ((256, 256), (8, 2))],
)
def test_cudnn_computes_trees_where_it_is_installed(
    head_dims: tuple[int, int], heads: tuple[int, int], dtype: torch.dtype
) -> None:
    pytest.importorskip("cudnn.flex_attention")
    tree = PrefixTree.from_segments([-1, 0, 0, 2, 2, 0, -1, 6], [700, 90, 300, 130, 257, 64, 100, 40])
    case = tree_case(tree, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=dtype, device="cuda", heads=heads)
    q, k, v = case.inputs[:3]
    config = TrainingConfig(q.shape[-1], q.dtype, v.shape[-1], is_grouped=q.shape[-2] != k.shape[-2])
    choice = choose(Work.TREE, config, card_at(q.device))
    if choice.kernel is None:
        pytest.skip("; ".join(choice.reasons))
    check(case, False)


@pytest.mark.parametrize(("head_dims", "heads"), [((192, 128), (8, 2)), ((64, 128), (4, 4)), ((96, 64), (8, 2))])
def test_what_cudnn_refuses_of_a_tree_is_computed(head_dims: tuple[int, int], heads: tuple[int, int]) -> None:
    tree = PrefixTree.from_segments([-1, 0, 0], [300, 90, 130])
    check(
        tree_case(tree, head_dim=head_dims[0], head_dim_v=head_dims[1], dtype=BF16, device="cuda", heads=heads), False
    )


@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize("head_dims", [(32, 32), (64, 64), (104, 104), (128, 128), (192, 128), (224, 224), (256, 256)])
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_cudnn_computes_sequences_of_one_length(
    dtype: torch.dtype, head_dims: tuple[int, int], heads: tuple[int, int]
) -> None:
    """Both passes, or the forward pass where our own backward pass is faster."""
    q, k, v = (
        torch.zeros(2, 600, number, head_dim, device="cuda", dtype=dtype)
        for number, head_dim in zip((*heads, heads[1]), (head_dims[0], *head_dims), strict=True)
    )
    config, card = TrainingConfig.of(q, k, v), card_at(q.device)
    both, forward = choose(Work.BATCH, config, card), choose(Work.FORWARD, config, card).kernel
    if both.kernel is not None:
        assert both.kernel.source().reads(q, k, v, True)
    elif forward is not None and forward.name == "cuDNN forward":
        assert forward.source().reads(q, k, v)
    else:
        pytest.skip("; ".join(both.reasons))
    for lengths, causal in (((600, 600), True), ((300, 777), False)):
        case = TrainingCase(
            (lengths, lengths), False, causal, heads, head_dims[0], dtype, head_dim_v=head_dims[1], device="cuda"
        )
        check(case, False)
        q, k, v, dout, dlse = case.inputs
        dlse.zero_()
        leaves = [tensor.clone(memory_format=torch.contiguous_format).requires_grad_() for tensor in (q, k, v)]
        out = flash_attention(*leaves, causal)  # an lse that nobody asks for is not computed: another kernel
        _, lse = flash_attention(q, k, v, causal, return_lse=True)
        case.assert_accurate((out, lse, *torch.autograd.grad(out, leaves, dout)))


@pytest.mark.parametrize(
    ("head_dims", "heads"),
    [
        ((64, 64), (4, 4)), ((64, 64), (8, 2)), ((96, 96), (8, 2)), ((128, 128), (4, 4)),
        ((128, 128), (8, 2)), ((192, 128), (4, 4)), ((256, 256), (4, 2)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [F16, BF16])
def test_flash_attention_4_computes_sequences_of_one_length(
    dtype: torch.dtype, head_dims: tuple[int, int], heads: tuple[int, int]
) -> None:
    pytest.importorskip("flash_attn.cute")
    for lengths, causal in (((2100, 2100), True), ((2048, 333), False)):
        case = TrainingCase(
            (lengths, lengths), False, causal, heads, head_dims[0], dtype, head_dim_v=head_dims[1], device="cuda"
        )
        config = TrainingConfig.of(*case.inputs[:3])
        passes = [choose(work, config, card_at("cuda")).kernel for work in (Work.FORWARD, Work.BACKWARD)]
        assert [kernel and kernel.source() for kernel in passes] == [flash_attention_4] * 2
        for deterministic in (False, True):
            check(case, deterministic)
        first, *others = (run(case, True) for _ in range(20))
        assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True) if a is not None)


@pytest.mark.parametrize("lengths", [(600, 600), (2100, 2100)])
def test_torch_compile_with_flash_attention_4(lengths: tuple[int, int]) -> None:
    """The forward pass of the shorter ones is cuDNN's."""
    pytest.importorskip("flash_attn.cute")
    case = TrainingCase((lengths, lengths), False, True, (4, 4), 128, BF16, device="cuda")
    q, k, v, dout, dlse = case.inputs

    def step(*leaves: torch.Tensor) -> torch.Tensor:
        out, lse = flash_attention(*leaves, True, return_lse=True)
        return (out.float() * dout).sum() + (lse * dlse).sum()

    leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    gradients = torch.autograd.grad(torch.compile(step, fullgraph=True)(*leaves), leaves)
    out, lse = flash_attention(q, k, v, True, return_lse=True)
    case.assert_accurate((out, lse, *gradients))
    batched = torch.autograd.grad(
        flash_attention(*leaves, True), leaves, torch.stack([dout] * 2), is_grads_batched=True
    )
    for tensor, pair in zip(leaves, batched, strict=True):
        assert pair.shape == (2, *tensor.shape)
        assert (pair[0] - pair[1]).norm() <= 0.01 * pair[0].norm()


@pytest.mark.parametrize(("heads", "head_dim"), [((8, 8), 64), ((8, 2), 64), ((8, 2), 128), ((8, 8), 128)])
@pytest.mark.parametrize("autocast", [False, True])
def test_torch_compile_beside_cudnn(heads: tuple[int, int], head_dim: int, autocast: bool) -> None:
    """The forward pass may be cuDNN's; the backward pass of a compiled step is our own."""
    case = TrainingCase(((600, 600), (600, 600)), False, True, heads, head_dim, BF16, device="cuda")
    q, k, v, dout, dlse = case.inputs

    def step(*leaves: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", BF16, enabled=autocast):
            out, lse = flash_attention(*leaves, True, return_lse=True)
        return (out.float() * dout).sum() + (lse * dlse).sum()

    compiled = torch.compile(step, fullgraph=True)
    for _ in range(2):
        leaves = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
        gradients = torch.autograd.grad(compiled(*leaves), leaves)
        out, lse = flash_attention(q, k, v, True, return_lse=True)
        case.assert_accurate((out, lse, *gradients))
