"""New keys and values into a paged cache on a GPU: one program per token and KV head, both caches in one launch."""

import torch
import triton
import triton.language as tl


@triton.jit
def write_kv_kernel(
    k, v, k_cache, v_cache, slot_mapping, num_slots,
    k_stride_n, k_stride_h, k_stride_d, v_stride_n, v_stride_h, v_stride_d,
    kc_stride_p, kc_stride_t, kc_stride_h, vc_stride_p, vc_stride_t, vc_stride_h,
    PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED: tl.constexpr,
):  # fmt: skip
    """Program (token, head). A slot outside the cache, -1 included, is skipped: nothing is written outside."""
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    slot = tl.load(slot_mapping + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        page, offset = slot // PAGE_SIZE, slot % PAGE_SIZE
        d = tl.arange(0, PADDED)
        key = tl.load(k + token * k_stride_n + head * k_stride_h + d * k_stride_d, mask=d < HEAD_DIM)
        k_at = page * kc_stride_p + offset * kc_stride_t + head * kc_stride_h + d
        tl.store(k_cache + k_at, key.to(k_cache.dtype.element_ty), mask=d < HEAD_DIM)
        value = tl.load(v + token * v_stride_n + head * v_stride_h + d * v_stride_d, mask=d < HEAD_DIM_V)
        v_at = page * vc_stride_p + offset * vc_stride_t + head * vc_stride_h + d
        tl.store(v_cache + v_at, value.to(v_cache.dtype.element_ty), mask=d < HEAD_DIM_V)


def write_on_gpu(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`write_kv` of checked arguments on the current stream."""
    num_tokens, heads, width = k.shape
    if not num_tokens:
        return
    num_slots = k_cache.shape[0] * k_cache.shape[1]
    write_kv_kernel[(num_tokens, heads)](
        k, v, k_cache, v_cache, slot_mapping, num_slots, *k.stride(), *v.stride(),
        *k_cache.stride()[:3], *v_cache.stride()[:3],
        PAGE_SIZE=k_cache.shape[1], HEAD_DIM=width, HEAD_DIM_V=v.shape[2],
        PADDED=1 << (max(width, v.shape[2]) - 1).bit_length(), num_warps=1,
    )  # fmt: skip
