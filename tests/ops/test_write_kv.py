"""Writing keys and values into a paged cache of any strides and dtype."""

from importlib import import_module
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

from trunkattn import write_kv, write_latent
from trunkattn.dtypes import KV_KINDS
from trunkattn.gpu.cards import GpuFacts, card_of

from .cases import (
    HEAD_DIM,
    HEAD_DIM_V,
    LAYOUTS,
    NUM_HEADS,
    NUM_PAGES,
    PAGE_SIZE,
    empty_caches,
    random_kv,
    storage_bytes,
)

CACHE_DTYPES = list(KV_KINDS)


@pytest.mark.property
@given(
    slots=st.lists(st.integers(0, NUM_PAGES * PAGE_SIZE - 1), unique=True),
    skipped=st.sets(st.integers(0, 23)),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(CACHE_DTYPES),
    new_dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
)
def test_every_token_goes_into_its_slot_and_nowhere_else(
    slots: list[int], skipped: set[int], layout: str, dtype: torch.dtype, new_dtype: torch.dtype
) -> None:
    mapping = [-1 if i in skipped else slot for i, slot in enumerate(slots)]
    found, expected = empty_caches(layout, dtype), empty_caches(layout, dtype)
    new = random_kv(len(mapping), new_dtype)
    for token, slot in enumerate(mapping):
        if slot >= 0:
            for cache, values in zip(expected, new, strict=True):
                cache[slot // PAGE_SIZE, slot % PAGE_SIZE] = values[token].to(dtype)
    write_kv(*new, *found, torch.tensor(mapping, dtype=torch.int64))
    for cache, wanted in zip(found, expected, strict=True):
        assert torch.equal(storage_bytes(cache), storage_bytes(wanted))


def test_new_values_may_have_any_strides() -> None:
    k, v = random_kv(5)
    expected, found = empty_caches("plain", torch.float32), empty_caches("plain", torch.float32)
    slots = torch.tensor([9, -1, 3, 0, 23])
    write_kv(k, v, *expected, slots)
    wide = torch.stack([slots, slots + 100], dim=1)
    write_kv(k.transpose(0, 2).contiguous().transpose(0, 2), torch.cat([v, v], 2)[..., :HEAD_DIM_V], *found, wide[:, 0])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("num_pages", [0, NUM_PAGES])
def test_no_token_writes_nothing(num_pages: int) -> None:
    k_cache, v_cache = (cache[:num_pages].clone() for cache in empty_caches("plain", torch.float32))
    write_kv(*random_kv(0), k_cache, v_cache, torch.empty(0, dtype=torch.int64))
    assert torch.equal(k_cache, torch.ones_like(k_cache))


K, V = random_kv(3)
K_CACHE, V_CACHE = empty_caches("plain", torch.float32)
MORE = torch.zeros(NUM_PAGES + 1, PAGE_SIZE, NUM_HEADS, HEAD_DIM)
SLOTS = torch.tensor([0, -1, 23])


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"k": None}, TypeError, "k is None: expected a torch.Tensor"),
        ({"v_cache": [1]}, TypeError, "v_cache is a list"),
        ({"slot_mapping": [0, 1, 2]}, TypeError, "slot_mapping is a list"),
        ({"slot_mapping": SLOTS.int()}, TypeError, r"slot_mapping has dtype torch\.int32: expected torch\.int64"),
        ({"slot_mapping": SLOTS[:, None]}, ValueError, r"slot_mapping has shape \(3, 1\)"),
        ({"slot_mapping": SLOTS.to("meta")}, ValueError, "slot_mapping is on meta"),
        ({"slot_mapping": SLOTS + 1}, ValueError, r"slot_mapping\[2\]=24: expected a slot from 0 to 23, or -1"),
        ({"slot_mapping": SLOTS - 1}, ValueError, r"slot_mapping\[1\]=-2: expected a slot from 0 to 23, or -1"),
        (
            {"slot_mapping": SLOTS[:2]},
            ValueError,
            r"k has shape \(3, 2, 8\): expected \(num_tokens=2, num_kv_heads=2, head_dim=8\)",
        ),
        (
            {"k": K[:, :1]},
            ValueError,
            r"k has shape \(3, 1, 8\): expected \(num_tokens=3, num_kv_heads=2, head_dim=8\), by k_cache",
        ),
        (
            {"v": K},
            ValueError,
            r"v has shape \(3, 2, 8\): expected \(num_tokens=3, num_kv_heads=2, head_dim=5\), by v_cache",
        ),
        ({"k": K.to("meta")}, ValueError, "k is on meta"),
        ({"v": V.to("meta")}, ValueError, "v is on meta"),
        ({"k_cache": K_CACHE.to("meta")}, ValueError, "k_cache is on meta"),
        ({"k_cache": K_CACHE[0]}, ValueError, r"k_cache has shape \(4, 2, 8\)"),
        ({"k_cache": K_CACHE[:1].expand(6, 4, 2, 8)}, ValueError, r"k_cache has strides \(0, .*no two elements in one"),
        ({"v": V.clone().requires_grad_()}, ValueError, r"v requires grad: .*use torch\.no_grad"),
        ({"k_cache": K_CACHE.clone().requires_grad_()}, ValueError, "k_cache requires grad: expected no gradient"),
        ({"k": K.to_sparse()}, ValueError, r"k has layout torch\.sparse_coo: expected a dense tensor"),
        ({"v": torch._neg_view(V)}, ValueError, "v is a view that torch negates when it reads it: .*resolve_neg"),
        ({"v": V.to(torch.complex64)}, TypeError, r"v has dtype torch\.complex64: expected real numbers"),
        ({"k_cache": K_CACHE.int()}, TypeError, r"k_cache has dtype torch\.int32: expected one of torch\.float32"),
        ({"v_cache": V_CACHE.double()}, TypeError, r"v_cache has dtype torch\.float64"),
        (
            {"v_cache": V_CACHE[:5]},
            ValueError,
            r"v_cache has shape \(5, 4, 2, 5\): expected the num_pages and page_size of k_cache",
        ),
        ({"v_cache": V_CACHE.view(12, 2, 2, 5)}, ValueError, r"v_cache has shape \(12, 2, 2, 5\)"),
        ({"k": K_CACHE.view(-1, 2, 8)[:3]}, ValueError, "k_cache lies in the memory of k: expected memory of its own"),
        ({"v": K_CACHE.view(-1, 2, 8)[:3, :, 3:]}, ValueError, "k_cache lies in the memory of v"),
        ({"slot_mapping": V_CACHE.view(-1)[:6].view(torch.int64)}, ValueError, "v_cache lies in the memory of slot_"),
        ({"v": K, "v_cache": K_CACHE}, ValueError, "v_cache lies in the memory of k_cache"),
        ({"v": K, "v_cache": MORE[1:], "k_cache": MORE[:-1]}, ValueError, "v_cache lies in the memory of k_cache"),
        ({"v_cache": V_CACHE.mT.contiguous().mT}, ValueError, r"v_cache has .*strides .*: expected .*last contiguous"),
        ({"k": K[..., :2], "k_cache": MORE[:-1, ..., ::4]}, ValueError, r"k_cache has .*strides .*last contiguous"),
    ],
)
def test_bad_input_is_named_and_nothing_is_written(
    changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments = {"k": K, "v": V, "k_cache": K_CACHE, "v_cache": V_CACHE, "slot_mapping": SLOTS} | changed
    with pytest.raises(error, match=message):
        write_kv(**arguments)
    # and nothing was written
    assert torch.equal(K_CACHE, torch.ones_like(K_CACHE))
    assert torch.equal(V_CACHE, torch.ones_like(V_CACHE))


@pytest.mark.parametrize("name", ["k", "v", "k_cache", "v_cache"])
def test_tangents_of_forward_mode_are_refused(name: str) -> None:
    arguments = {"k": K, "v": V, "k_cache": K_CACHE, "v_cache": V_CACHE, "slot_mapping": SLOTS}
    with torch.no_grad(), forward_ad.dual_level():
        dual = forward_ad.make_dual(arguments[name].clone(), torch.ones_like(arguments[name]))
        with pytest.raises(ValueError, match=f"{name} is a dual tensor of forward-mode differentiation: expected no"):
            write_kv(**(arguments | {name: dual}))


def test_a_model_with_gradients_may_write_without_recording_them() -> None:
    k_cache, v_cache = empty_caches("plain", torch.float32)
    with torch.no_grad():
        write_kv(K.clone().requires_grad_(), V, k_cache, v_cache, SLOTS)
    assert torch.equal(k_cache[0, 0], K[0])


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_a_latent_cache_gets_latent_and_rope_columns(dtype: torch.dtype) -> None:
    wide = torch.ones(NUM_PAGES, PAGE_SIZE, 20).to(dtype)  # rows may lie apart
    cache, new = wide[..., :13], torch.randn(3, 13)
    expected = wide.clone()
    write_latent(new[:, :8], new[:, 8:], cache, SLOTS)
    expected.flatten(0, 1)[[0, 23], :13] = new[[0, 2]].to(dtype)
    assert torch.equal(storage_bytes(wide), storage_bytes(expected))


def test_a_head_of_one_element_may_have_any_stride() -> None:
    k_cache = torch.ones(NUM_PAGES, PAGE_SIZE, NUM_HEADS, 3)[..., ::3]
    write_kv(K[..., :1], V, k_cache, torch.ones_like(V_CACHE), SLOTS)
    assert torch.equal(k_cache[0, 0], K[0, :, :1]) and torch.equal(k_cache[5, 3], K[2, :, :1])
    assert (k_cache == 1).sum() == k_cache.numel() - 2 * NUM_HEADS


def test_no_heads_are_nothing_to_write() -> None:
    write_kv(K[:, :0], V[:, :0], K_CACHE[:, :, :0], V_CACHE[:, :, :0], SLOTS)


LATENT_ARGUMENTS = {
    "latent": torch.zeros(3, 8), "rope": torch.zeros(3, 5), "cache": torch.ones(6, 4, 13), "slot_mapping": SLOTS,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"latent": None}, TypeError, "latent is None: expected a torch.Tensor"),
        (
            {"rope": torch.zeros(3, 1, 5)},
            ValueError,
            r"rope has shape \(3, 1, 5\): expected \(num_tokens=3, head_dim - latent",
        ),
        (
            {"rope": torch.zeros(2, 5)},
            ValueError,
            r"rope has shape \(2, 5\): expected \(num_tokens=3, head_dim - latent_dim\)",
        ),
        ({"cache": torch.ones(6, 4, 1, 13)}, ValueError, r"cache has shape \(6, 4, 1, 13\): expected \(num_pages, pag"),
        ({"cache": torch.ones(6, 4, 12)}, ValueError, "cache has rows of 12 numbers: expected 8 [+] 5"),
        ({"cache": torch.ones(6, 4, 13).int()}, TypeError, r"cache has dtype torch\.int32: expected one of"),
        ({"cache": torch.ones(6, 13, 4).mT}, ValueError, "cache has .*strides .*: expected .*last contiguous"),
        ({"rope": torch.zeros(3, 5, device="meta")}, ValueError, "rope is on meta: expected cpu, like latent"),
        ({"slot_mapping": SLOTS.int()}, TypeError, r"slot_mapping has dtype torch\.int32"),
        ({"slot_mapping": [0, -1, 23]}, TypeError, "slot_mapping is a list: expected a torch.Tensor"),
        ({"slot_mapping": SLOTS + 1}, ValueError, r"slot_mapping\[2\]=24: expected a slot from 0 to 23"),
    ],
)
def test_bad_input_of_a_latent_cache_is_named(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        write_latent(**{**LATENT_ARGUMENTS, **changed})
    assert torch.equal(LATENT_ARGUMENTS["cache"], torch.ones(6, 4, 13))


def test_tensors_without_memory_are_named() -> None:
    write = torch.func.functionalize(lambda new: write_kv(new, V, K_CACHE, V_CACHE, SLOTS))
    with pytest.raises(ValueError, match="k is a Tensor without memory of its own: expected a plain tensor"):
        write(K)


def test_a_card_that_does_not_convert_e4m3_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tensors are said to lie on a GPU and have no memory: nothing is launched."""
    a100 = card_of(GpuFacts("NVIDIA A100-SXM4-80GB", 108, 80, 40 << 20))
    monkeypatch.setattr(import_module("trunkattn.ops.write_kv"), "card_at", lambda device: a100)
    with FakeTensorMode():
        new = torch.empty(3, 2, 8, device="cuda")
        cache = torch.empty(4, 16, 2, 8, device="cuda", dtype=torch.float8_e4m3fn)
        slots = torch.zeros(3, dtype=torch.int64, device="cuda")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        with pytest.raises(TypeError, match=r"k_cache has dtype torch\.float8_e4m3fn: expected .* capability 8\.9"):
            write_kv(new, new, cache, cache, slots)
