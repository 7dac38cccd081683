"""Loads and stores that the portable attention kernels share: query rows, blocks of keys and values, and results."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trunkattn.gpu.portable.online_softmax import lse_of, output_of, sink_divisor
from trunkattn.planner.work_list import DIRECT

_DIRECT = tl.constexpr(DIRECT)


class Rows(NamedTuple):
    """The rows of a tile [M]. Each is a query token of the step and a query head, if it is used."""

    token: Any
    head: Any
    used: Any


class HeadCache(NamedTuple):
    """Keys and values of one KV head. The fields say where they begin, and what the strides of a page and of a token in
    it are."""

    k: Any
    v: Any
    k_page: Any
    k_token: Any
    v_page: Any
    v_token: Any


@triton.jit
def load_in_halves(pointer, mask):
    """Loads int32 numbers as two halves, and 0 where masked. Triton would stage a load of 32 bits in shared memory, as
    it does keys, and wait for it. Halves stay in registers."""
    half = pointer.to(tl.pointer_type(tl.uint16))
    low = tl.load(half, mask=mask, other=0).to(tl.int32)
    return low | tl.load(half + 1, mask=mask, other=0).to(tl.int32) << 16


@triton.jit
def load_tile(base, rows, columns, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASK_ROWS: tl.constexpr):
    """Loads a tile of queries, keys or values. It masks only if it must, because masked loads take address
    registers."""
    pointers = base + rows + columns
    if WIDTH != PADDED:
        return tl.load(pointers, mask=inside & (columns < WIDTH), other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=inside & (columns >= 0), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def load_queries(operands, strides, rows, SHAPE: tl.constexpr):
    """Loads the query rows in the dtype of the matrix product with the keys. Rows that are not used are 0."""
    at = (rows.token.to(tl.int64) * strides.q_token + rows.head * strides.q_head)[:, None]
    d = tl.arange(0, SHAPE.padded_dim)[None, :]
    tile = load_tile(operands.q, at, d, rows.used[:, None], SHAPE.head_dim, SHAPE.padded_dim, True)
    if operands.k_cache.dtype.element_ty.primitive_bitwidth == 8 and operands.q.dtype.element_ty == tl.bfloat16:
        tile = tile.to(tl.float16)  # a pair of 8-bit keys becomes fp16 in one instruction, bf16 in several
    return tile


@triton.jit
def load_block(cache, page, offset, q_tile, SHAPE: tl.constexpr):
    """Loads a block's keys [D, N] and values [N, Dv] in the dtype of the queries. `page` and `offset` [N] are the place
    of each key."""
    d, dv = tl.arange(0, SHAPE.padded_dim), tl.arange(0, SHAPE.padded_dim_v)
    k_at, v_at = page * cache.k_page + offset * cache.k_token, page * cache.v_page + offset * cache.v_token
    keys = load_tile(cache.k, k_at[None, :], d[:, None], True, SHAPE.head_dim, SHAPE.padded_dim, False)
    keys = keys.to(q_tile.dtype)
    values = load_tile(cache.v, v_at[:, None], dv[None, :], True, SHAPE.head_dim_v, SHAPE.padded_dim_v, False)
    return keys, values.to(q_tile.dtype)


@triton.jit
def load_masked_block(cache, page, offset, inside, q_tile, SHAPE: tl.constexpr):
    """Loads a block's keys [..., D, N] and values [..., N, Dv] in the dtype of the cache. They are 0 where a key is not
    `inside`. `page`, `offset` and `inside` [..., N] belong to each key."""
    N: tl.constexpr = len(q_tile.shape) - 2  # the axis to insert for keys
    M: tl.constexpr = len(q_tile.shape) - 1  # and for values
    d, dv = tl.arange(0, SHAPE.padded_dim), tl.arange(0, SHAPE.padded_dim_v)
    k_at = tl.expand_dims(page * cache.k_page + offset * cache.k_token, N)
    v_at = tl.expand_dims(page * cache.v_page + offset * cache.v_token, M)
    D: tl.constexpr = SHAPE.head_dim
    DV: tl.constexpr = SHAPE.head_dim_v
    keys = load_tile(cache.k, k_at, d[:, None], tl.expand_dims(inside, N), D, SHAPE.padded_dim, True)
    values = load_tile(cache.v, v_at, dv[None, :], tl.expand_dims(inside, M), DV, SHAPE.padded_dim_v, True)
    return keys, values


@triton.jit
def store_rows(
    state, rows, partial_slot, operands, strides, v_scale, sinks, SHAPE: tl.constexpr, FEATURES: tl.constexpr
):
    """Writes each used row to its partial slot, or to the output if the slot is DIRECT. `v_scale` is that of the KV
    head."""
    dv = tl.arange(0, SHAPE.padded_dim_v)
    columns = (dv < SHAPE.head_dim_v)[None, :]
    result, lse = output_of(state), lse_of(state)
    kept = rows.used & (partial_slot != _DIRECT)
    slot_at = partial_slot.to(tl.int64) * SHAPE.num_qo_heads + rows.head
    mask = kept[:, None] & columns
    tl.store(operands.partial + slot_at[:, None] * SHAPE.head_dim_v + dv[None, :], result, mask=mask)
    tl.store(operands.partial_lse + slot_at, lse, mask=kept)
    direct = rows.used & (partial_slot == _DIRECT)
    result *= tl.load(v_scale)
    if FEATURES.sinks:
        sink = tl.load(sinks + rows.head, mask=rows.used, other=0.0).to(tl.float32)
        result /= sink_divisor(sink, lse)[:, None]
    out_at = rows.token.to(tl.int64) * strides.out_token + rows.head * strides.out_head
    mask = direct[:, None] & columns
    tl.store(operands.out + out_at[:, None] + dv[None, :], result.to(operands.out.dtype.element_ty), mask=mask)
    if FEATURES.return_lse:
        tl.store(operands.lse + rows.token * SHAPE.num_qo_heads + rows.head, lse, mask=direct)
