"""Writes new keys and values into a paged cache on a GPU. A CTA writes one token of one KV head to both caches."""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from trunkattn.numerics import padded_head_dim


class KeysValues(NamedTuple):
    """New keys and values [tokens, heads, D / Dv], or the caches [pages, page_size, heads, D / Dv]."""

    k: Any
    v: Any


class NewStrides(NamedTuple):
    """Strides of new keys and values, in elements."""

    k_token: Any
    k_head: Any
    k_dim: Any
    v_token: Any
    v_head: Any
    v_dim: Any


class CacheStrides(NamedTuple):
    """Strides of the caches, in elements. Their head dimension is contiguous."""

    k_page: Any
    k_token: Any
    k_head: Any
    v_page: Any
    v_token: Any
    v_head: Any


@triton.jit
def write_kv_kernel(
    new: KeysValues,
    cache: KeysValues,
    slot_mapping,
    num_slots,
    new_strides: NewStrides,
    strides: CacheStrides,
    PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_V: tl.constexpr,
    PADDED_DIM: tl.constexpr,
):
    """Writes the token and head of this program. It skips a slot outside the cache, -1 included, so that nothing is
    written outside."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        d = tl.arange(0, PADDED_DIM).to(tl.int64)
        new_key = new.k + token * new_strides.k_token + head * new_strides.k_head + d * new_strides.k_dim
        key = tl.load(new_key, mask=d < HEAD_DIM)
        k_at = page * strides.k_page + offset * strides.k_token + head * strides.k_head + d
        tl.store(cache.k + k_at, key.to(cache.k.dtype.element_ty), mask=d < HEAD_DIM)
        new_value = new.v + token * new_strides.v_token + head * new_strides.v_head + d * new_strides.v_dim
        value = tl.load(new_value, mask=d < HEAD_DIM_V)
        v_at = page * strides.v_page + offset * strides.v_token + head * strides.v_head + d
        tl.store(cache.v + v_at, value.to(cache.v.dtype.element_ty), mask=d < HEAD_DIM_V)


def write_on_gpu(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Does `write_kv` with checked arguments on the current stream."""
    num_tokens, num_kv_heads, head_dim = k.shape
    if not num_tokens:
        return
    write_kv_kernel[(num_tokens, num_kv_heads)](
        new=KeysValues(k, v),
        cache=KeysValues(k_cache, v_cache),
        slot_mapping=slot_mapping,
        num_slots=k_cache.shape[0] * k_cache.shape[1],
        new_strides=NewStrides(*k.stride(), *v.stride()),
        strides=CacheStrides(*k_cache.stride()[:3], *v_cache.stride()[:3]),
        PAGE_SIZE=k_cache.shape[1],
        HEAD_DIM=head_dim,
        HEAD_DIM_V=v.shape[2],
        PADDED_DIM=padded_head_dim(max(head_dim, v.shape[2])),
        num_warps=1,
    )
