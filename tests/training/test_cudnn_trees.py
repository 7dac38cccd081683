"""Trees through cuDNN's flex_attention: its intervals on a CPU, and its call with a stand-in that computes them."""

import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given

from benchmarks.page.support_matrix import card
from trunkattn import PrefixTree
from trunkattn.gpu.cards import card_at
from trunkattn.gpu.kernel import Work, choose
from trunkattn.training import spec
from trunkattn.training.checks import Options
from trunkattn.training.cudnn_trees import attend, intervals
from trunkattn.training.spec import TrainingConfig

from .tree_cases import inputs, textbook, trees, with_gradients

BF16 = torch.bfloat16
OPTIONS = Options(**dict.fromkeys(Options._fields))
flash_module = import_module("trunkattn.training.flash_attention")


def union(ends: torch.Tensor) -> torch.Tensor:
    """The mask [tokens, tokens] of [0, F0), [F1, F2) and so on"""
    key = torch.arange(ends.shape[1])
    begins = torch.cat([torch.zeros_like(ends[:1]), ends[1::2]])
    return ((key >= begins[..., None]) & (key < ends[0::2][..., None])).any(0)


@given(tree=trees(6))
@pytest.mark.property
def test_intervals_are_the_mask_of_the_tree(tree: PrefixTree) -> None:
    (ends,) = intervals(tree.tables(torch.device("cpu")), tree.num_levels)
    assert ends.dtype == torch.int32 and ends.is_contiguous() and len(ends) % 2 == 1
    assert (ends.diff(dim=0) >= 0).all() and ends.min() >= 0 and ends.max() <= tree.num_tokens
    t = torch.arange(tree.num_tokens)
    assert torch.equal(union(ends), (t <= t[:, None]) & (t[:, None] < tree.subtree_end))


def stand_in(calls: list[str]) -> ModuleType:
    """cuDNN's module: two functions, of its names and arguments."""

    def create_mask_plan(mask: Any, q: Any, k: Any, v: Any, *, build_backward: bool) -> Any:
        assert mask.shape[::2] == (1, q.shape[1]) and build_backward and not q.requires_grad
        calls.append("plan")
        return union(mask[0])

    def flex_attn_func(q: Any, k: Any, v: Any, *, mask_plan: Any, softmax_scale: float, return_lse: bool) -> Any:
        calls.append("attend")
        group = q.shape[2] // k.shape[2]
        k, v = (tensor.repeat_interleave(group, 2).transpose(1, 2) for tensor in (k, v))
        logits = (q.transpose(1, 2) @ k.mT * softmax_scale).masked_fill(~mask_plan, -torch.inf)
        assert return_lse
        return (logits.softmax(-1) @ v).transpose(1, 2), logits.logsumexp(-1)

    module: Any = ModuleType("cudnn.flex_attention")
    module.create_mask_plan, module.flex_attn_func = create_mask_plan, flex_attn_func
    return module


def test_a_call_plans_once_and_has_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention", stand_in(calls))
    tree = PrefixTree.from_segments((-1, 0, 1, 1, 0, -1), (7, 3, 4, 2, 5, 3))
    given = inputs(tree, (4, 2), torch.float64)

    def ours(*leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = attend(*leaves, tree, 8**-0.5)
        return out, lse.T

    for _ in range(2):
        for found, expected in zip(with_gradients(ours, given), textbook(tree, torch.float64, given), strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    assert calls == ["plan", "attend", "attend"]
    q, k, v = given[:3]
    for other in ((q.float(), k.float(), v.float()), (q, k, v[..., :4]), (q[:, :2], k, v)):
        calls.clear()
        for _ in range(2):
            ours(*other)
        assert calls == ["plan", "attend", "attend"], "a plan for each dtype and shape of heads"


def test_who_computes_a_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "version", lambda _: "1.32.0")

    def why(capability: tuple[int, int] = (9, 0), **changes: Any) -> str:
        with card(capability):
            config = TrainingConfig(128, BF16, 128)._replace(**changes)
            choice = choose(Work.TREE, config, card_at(torch.device("cuda", 0)))
        assert (choice.kernel is None) == bool(choice.reasons)
        return "; ".join(choice.reasons)

    for capability in ((9, 0), (10, 0), (10, 3)):
        assert why(capability) == ""
    assert why(head_dim=192) == why(head_dim=256, head_dim_v=256) == why(head_dim=64, head_dim_v=72) == ""
    wide = {"head_dim": 192, "head_dim_v": 128}
    assert why(**wide) == why(is_grouped=True) == ""
    assert why(**wide, is_grouped=True) == (
        "head_dim 192, of values 128, of grouped heads: expected one head_dim on Hopper"
    )
    assert why((10, 0), **wide, is_grouped=True) == why((10, 0), head_dim=64) == why(head_dim=48) == ""
    assert why(head_dim=64).startswith("head_dim 64, of values 128: expected a head_dim up to 48 or from 72 on Hopper")
    assert why((8, 0)) == "compute capability 8.0: expected 9.0, 10.0 or 10.3"
    assert why(dtype=torch.float32).startswith("dtype torch.float32: expected torch.float16")
    assert why(head_dim=192, head_dim_v=192).startswith("head_dim 192, of values 192: expected multiples of 8")
    assert why(options=("sinks",)) == "sinks is given: cuDNN's flex_attention has none"
    monkeypatch.setattr(spec, "version", lambda _: "1.9.1")
    assert why().startswith("nvidia-cudnn-frontend is version 1.9: expected 1.32 or later; pip install")


def test_a_tree_of_many_levels_goes_to_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its mask would be larger than the tensors. The choice is asked for, and nothing is launched."""
    asked: list[TrainingConfig] = []
    monkeypatch.setattr(flash_module, "_chosen", lambda work, config, device: asked.append(config))
    qkv: Any = SimpleNamespace(is_cuda=True, shape=(1, 2, 128), dtype=BF16, device=torch.device("cuda", 0))
    for levels in (spec.CUDNN_LEVELS, spec.CUDNN_LEVELS + 1):
        tree = PrefixTree.from_segments(range(-1, levels - 1), [4] * levels)
        assert tree.num_levels == levels
        flash_module._whole_kernel(qkv, qkv, qkv, OPTIONS._replace(tree=tree))
    monkeypatch.setattr(spec, "version", lambda _: "1.32.0")
    with card((9, 0)):
        choices = [choose(Work.TREE, config, card_at(torch.device("cuda", 0))) for config in asked]
    assert choices[0].kernel is not None
    assert choices[1].reasons == ("a tree of more than 1024 levels is given: cuDNN's flex_attention has none",)


def test_a_tree_whose_tokens_see_few_goes_to_our_own_kernels_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[TrainingConfig] = []
    monkeypatch.setattr(flash_module, "_chosen", lambda work, config, device: asked.append(config))
    monkeypatch.setattr(spec, "version", lambda _: "1.32.0")

    def takes_cudnn(root: int, head_dim: int = 128, capability: tuple[int, int] = (9, 0), **options: Any) -> bool:
        """Of a root and 16 answers of 512 tokens."""
        qkv: Any = SimpleNamespace(is_cuda=True, shape=(1, 2, head_dim), dtype=BF16, device=torch.device("cuda", 0))
        tree = PrefixTree.from_segments([-1, *[0] * 16], [root, *[512] * 16])
        flash_module._whole_kernel(qkv, qkv, qkv, OPTIONS._replace(tree=tree, **options))
        with card(capability):
            choice = choose(Work.TREE, asked[-1], card_at(torch.device("cuda", 0)))
        assert choice.kernel or "a tree of at most 1024 keys a query" in choice.reasons[0]
        return choice.kernel is not None

    assert [takes_cudnn(root) for root in (512, 810, 830, 2048)] == [False, False, True, True]
    assert [takes_cudnn(512, head_dim) for head_dim in (64, 96, 104, 256)] == [True, True, False, True]
    assert takes_cudnn(512, capability=(10, 0)), "kernels of our own for Hopper do not run there"


def test_an_unaligned_tensor_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    flex = SimpleNamespace(
        create_mask_plan=lambda *_, **__: None,
        flex_attn_func=lambda q, k, v, **_: seen.extend((q, k, v)) or (q, q[..., 0].transpose(1, 2)),
    )
    monkeypatch.setitem(sys.modules, "cudnn", ModuleType("cudnn"))
    monkeypatch.setitem(sys.modules, "cudnn.flex_attention", flex)
    tree = PrefixTree.from_segments([-1], [4])
    wide = torch.zeros(4, 2, 9, dtype=BF16)
    strided = torch.zeros(4, 2, 16, dtype=BF16)[..., :8]
    attend(wide[..., 1:], strided, wide[..., :8], tree, 1.0)
    assert seen[0].is_contiguous() and seen[1].data_ptr() == strided.data_ptr()
    assert seen[2].is_contiguous(), "heads after the first begin between multiples of 16 bytes"
    memory = torch.zeros(4 * 2 * 256 + 64 + 8, dtype=BF16)
    begin = -memory.data_ptr() % 128 // 2  # where a multiple of 128 bytes is
    even, odd = (memory[begin + by :][: 4 * 2 * 256].view(4, 2, 256) for by in (0, 8))
    attend(even, odd, even, tree, 1.0)
    assert seen[3].data_ptr() == even.data_ptr() != seen[4].data_ptr() != odd.data_ptr()
