"""What a program sets for itself, torch's default dtype and device, changes nothing here."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention, flash_attention, merge_states, write_kv, write_latent
from trunkattn.reference import paged_attention

SOURCE = Path(__file__).parents[1] / "src" / "trunkattn"

# Functions of torch that take the default dtype or device where none is given.
FACTORIES = frozenset({
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
})  # fmt: skip


def taken_defaults(source: str) -> list[str]:
    """Calls that make a tensor without naming its dtype and its device."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        given = {keyword.arg for keyword in node.keywords}
        if ast.unparse(node.func.value) == "torch" and node.func.attr in FACTORIES and not given >= {"dtype", "device"}:
            found.append(f"{node.lineno}: {ast.unparse(node)} names no dtype or no device")
    return found


def test_every_new_tensor_names_its_dtype_and_device() -> None:
    files = sorted(SOURCE.rglob("*.py"))
    found = [f"{file.relative_to(SOURCE)}: {each}" for file in files for each in taken_defaults(file.read_text())]
    assert files, "no sources"
    assert not found, "\n".join(found)


@pytest.mark.parametrize("call", ["torch.empty(3)", "torch.zeros(3, dtype=x)", "torch.tensor([1], device=x)"])
def test_a_tensor_of_the_default_dtype_or_device_is_found(call: str) -> None:
    assert len(taken_defaults(call)) == 1


@pytest.mark.parametrize("call", ["torch.empty(3, dtype=x, device=y)", "torch.zeros_like(x)", "np.empty(3)"])
def test_other_tensors_pass(call: str) -> None:
    assert taken_defaults(call) == []


@contextmanager
def changed(default: torch.dtype | torch.device) -> Iterator[None]:
    """While it lasts, a default of torch is another."""
    if isinstance(default, torch.device):
        with default:
            yield
        return
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


DEFAULTS = [torch.float64, torch.bfloat16, torch.float16, torch.device("meta")]
TABLE = torch.tensor([[0, 1, 2], [0, 1, 3], [0, 1, 4], [5, 6, 7]], dtype=torch.int32)
LENS = torch.tensor([45, 48, 34, 20], dtype=torch.int32)
STARTS = torch.tensor([0, 1, 6, 7, 27], dtype=torch.int32)
SLOTS = torch.arange(96, 104)


def layer(dtype: torch.dtype, **options: Any) -> list[torch.Tensor]:
    """Outputs and log-sum-exps of a decode and of prompts, with a cache that is written first."""
    config = AttentionConfig(4, 2, 32, 16, dtype, logits_soft_cap=20.0, sinks=True, **options)
    attention = BatchAttention(config, "cpu")
    generator = torch.Generator().manual_seed(0)
    make = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    k, v = torch.randn(2, 8, 16, 2, 32, **make).to(config.cache_dtype)
    written = torch.randn(8, 2, 32, **make).to(dtype)
    write_kv(written, written, k, v, SLOTS)
    sinks = torch.randn(4, **make)
    found: list[torch.Tensor] = []
    for starts in (None, STARTS):
        q = torch.randn(4 if starts is None else 27, 4, 32, **make).to(dtype)
        plan = attention.plan(TABLE, LENS, starts)
        found += attention.run(plan, q, k, v, return_lse=True, k_scale=0.5, v_scale=2.0, sinks=sinks)
    return [*found, *merge_states(found[0], found[1], found[2][:4], found[3][:4])]


def latent(dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs and log-sum-exps over a latent cache, with rows that are written first."""
    config = AttentionConfig(4, 1, 32, 16, dtype, latent_dim=24, sm_scale=0.2)
    attention = BatchAttention(config, "cpu")
    make = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float32, "device": "cpu"}
    cache = torch.randn(8, 16, 32, **make).to(dtype)
    write_latent(torch.randn(8, 24, **make), torch.randn(8, 8, **make), cache, SLOTS)
    pair = torch.randn(4, 4, 24, **make).to(dtype), torch.randn(4, 4, 8, **make).to(dtype)
    return [cache, *attention.run(attention.plan(TABLE, LENS), pair, cache, return_lse=True, k_scale=0.5)]


def training(dtype: torch.dtype) -> list[torch.Tensor]:
    """Outputs, log-sum-exps and gradients of a batch and of packed sequences."""
    make = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float32, "device": "cpu"}
    sums = torch.tensor([0, 5, 20], dtype=torch.int32, device="cpu")
    found: list[torch.Tensor] = []
    for cu_seqlens in (None, sums):
        shape = (2, 20) if cu_seqlens is None else (20,)
        q, k, v = (torch.randn(*shape, heads, 16, **make).to(dtype).requires_grad_() for heads in (4, 2, 2))
        given = {"cu_seqlens_q": cu_seqlens, "cu_seqlens_k": cu_seqlens, "causal": True, "return_lse": True}
        out, lse = flash_attention(q, k, v, **given)
        (out.float().square().sum() + lse.sum()).backward()
        found += [out.detach(), lse.detach(), q.grad, k.grad, v.grad]
    return found


def oracle() -> list[torch.Tensor]:
    """What the float64 reference says of a decode."""
    make = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float32, "device": "cpu"}
    k, v = torch.randn(2, 8, 16, 2, 32, **make)
    return [*paged_attention(torch.randn(4, 4, 32, **make), k, v, TABLE, LENS)]


def assert_same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one.dtype, one.device) == (other.dtype, other.device) and torch.equal(one, other)


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention_is_the_same(default: Any, kv_dtype: torch.dtype | None, dtype: torch.dtype) -> None:
    expected = layer(dtype, kv_dtype=kv_dtype)
    with changed(default):
        assert_same(layer(dtype, kv_dtype=kv_dtype), expected)


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_latent_attention_is_the_same(default: Any, dtype: torch.dtype) -> None:
    expected = latent(dtype)
    with changed(default):
        assert_same(latent(dtype), expected)


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_training_is_the_same(default: Any, dtype: torch.dtype) -> None:
    expected = training(dtype)
    with changed(default):
        assert_same(training(dtype), expected)


@pytest.mark.parametrize("default", DEFAULTS, ids=str)
def test_the_reference_is_the_same(default: Any) -> None:
    expected = oracle()
    with changed(default):
        assert_same(oracle(), expected)
