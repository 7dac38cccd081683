"""The gradients of keys and values, and in one pass those of queries (see `backward`).

A CTA holds a block of keys and values and streams the queries that see it.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trunkattn.training.common import (
    Batch,
    Scales,
    Sequences,
    Strides,
    arguments,
    find_sequence,
    load_tile,
    span,
    store_tile,
)
from trunkattn.training.spec import FlashTile


class KeysTensors(NamedTuple):
    """Tensors of `keys_kernel`, with shapes as in `ForwardTensors`; gradients are contiguous."""

    q: Any
    k: Any
    v: Any
    dout: Any
    shift: Any
    delta: Any
    dq: Any
    dk: Any
    dv: Any


class KeyBlock(NamedTuple):
    """A block of keys and values [N, D], and the number of each key in its sequence, which has `length` tokens."""

    k: Any
    v: Any
    n: Any
    length: Any


class KeyGradients(NamedTuple):
    """Sums over queries [N, D], float32; dk not yet times sm_scale."""

    dk: Any
    dv: Any


class QueryHead(NamedTuple):
    """Where the tokens of one query head of a sequence begin."""

    q: Any
    dout: Any
    dq: Any
    shift: Any
    delta: Any


class KeysVariant(NamedTuple):
    """Constants that turn code on. even_q, even_k: every block of queries, of keys, is full. one_pass: the kernel also
    adds to dq."""

    causal: bool
    packed: bool
    even_q: bool
    even_k: bool
    one_pass: bool


class QuerySide(NamedTuple):
    """What the queries of a sequence have in common: strides of q, strides of a token in dout and dq and of a head in
    shift and delta, the number of queries, and the position of query 0 among the keys."""

    q_head: Any
    q_token: Any
    token: Any
    row_head: Any
    length: Any
    offset: Any


@triton.jit
def _add_queries(
    state,
    block,
    head,
    side,
    first,
    scales,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
    MASK: tl.constexpr,
):
    """Adds the part of a block of queries to dk and dv. All products are transposed, so that p stays in registers."""
    m = first + tl.arange(0, TILE.block_m)
    q = load_tile(head.q, first, side.q_token, side.length, TILE.block_m, SHAPE, not VARIANT.even_q)
    shift = tl.load(head.shift + m, mask=m < side.length, other=float("inf"))
    scores = tl.dot(block.k, tl.trans(q), input_precision=SHAPE.precision)
    p = tl.exp2(scores * scales.log2 - shift[None, :])
    if MASK:
        seen = block.n[:, None] < block.length
        if VARIANT.causal:
            seen = seen & (block.n[:, None] <= m[None, :] + side.offset)
        p = tl.where(seen, p, 0.0)
    dout = load_tile(head.dout, first, side.token, side.length, TILE.block_m, SHAPE, not VARIANT.even_q)
    dv = tl.dot(p.to(dout.dtype), dout, state.dv, input_precision=SHAPE.precision)
    delta = tl.load(head.delta + m, mask=m < side.length, other=0.0)
    dp = tl.dot(block.v, tl.trans(dout), input_precision=SHAPE.precision)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, state.dk, input_precision=SHAPE.precision)
    if VARIANT.one_pass:
        rows, d = tl.arange(0, TILE.block_m)[:, None], tl.arange(0, SHAPE.padded_dim)[None, :]
        dq = tl.dot(tl.trans(ds), block.k, input_precision=SHAPE.precision) * scales.sm_scale
        pointers = head.dq + tl.cast(first, tl.int64) * side.token + rows * side.token + d
        tl.atomic_add(pointers, dq, mask=(m < side.length)[:, None] & (d < SHAPE.head_dim), sem="relaxed")
    return KeyGradients(dk, dv)


@triton.jit
def _add_group(
    state,
    block,
    head,
    side,
    begin,
    end,
    scales,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
    MASK: tl.constexpr,
):
    """Adds queries [begin, end) of every head of a group. head: the first one."""
    steps = tl.cdiv(tl.maximum(end - begin, 0), TILE.block_m)
    for step in tl.range(0, SHAPE.group_size * steps):
        member, first = step // steps, begin + step % steps * TILE.block_m
        own = QueryHead(
            head.q + tl.cast(member, tl.int64) * side.q_head,
            head.dout + member * SHAPE.head_dim,
            head.dq + member * SHAPE.head_dim,
            head.shift + member * side.row_head,
            head.delta + member * side.row_head,
        )
        state = _add_queries(state, block, own, side, first, scales, SHAPE, TILE, VARIANT, MASK)
    return state


@triton.jit
def keys_kernel(
    tensors: KeysTensors,
    batch: Batch,
    scales: Scales,
    strides: Strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """dk and dv of CTA (batch, KV head, block of keys), block fastest. The first blocks, which most causal queries see,
    go first. It sums over the heads of a group in registers. In one pass dq holds zeros in float32 before."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    D: tl.constexpr = SHAPE.padded_dim
    seqlen_q, num_qo_heads = batch.seqlen_q, batch.num_qo_heads
    number, other = tl.program_id(0) % batch.num_blocks, tl.program_id(0) // batch.num_blocks
    num_kv_heads = num_qo_heads // SHAPE.group_size
    kv_head, row = other % num_kv_heads, (other // num_kv_heads).to(tl.int64)
    begin_q, begin_k, len_q, len_k = 0, 0, seqlen_q, batch.seqlen_k
    if VARIANT.packed:
        sequence, number = find_sequence(number, batch.cu_seqlens_k, batch.num_sequences, BLOCK_N)
        begin_q, len_q = span(batch.cu_seqlens_q, sequence, seqlen_q)
        begin_k, len_k = span(batch.cu_seqlens_k, sequence, batch.seqlen_k)
    first, offset = number * BLOCK_N, len_k - len_q
    k_head = tensors.k + row * strides.k_batch + begin_k * strides.k_token + tl.cast(kv_head, tl.int64) * strides.k_head
    v_head = tensors.v + row * strides.v_batch + begin_k * strides.v_token + tl.cast(kv_head, tl.int64) * strides.v_head
    keys = load_tile(k_head, first, strides.k_token, len_k, BLOCK_N, SHAPE, not VARIANT.even_k)
    values = load_tile(v_head, first, strides.v_token, len_k, BLOCK_N, SHAPE, not VARIANT.even_k)
    block = KeyBlock(keys, values, first + tl.arange(0, BLOCK_N), len_k)
    end = tl.where(first < len_k, len_q, 0)
    begin, full = 0, 0  # the first query that sees a key, and the first from which all see all keys
    if VARIANT.causal:
        begin = tl.minimum(tl.maximum(first - offset, 0), end) // BLOCK_M * BLOCK_M
        full = tl.maximum(tl.cdiv(tl.maximum(first + BLOCK_N - 1 - offset, 0), BLOCK_M) * BLOCK_M, begin)
    if not VARIANT.even_k:
        full = tl.where(first + BLOCK_N > len_k, tl.cdiv(end, BLOCK_M) * BLOCK_M, full)
    token_stride = num_qo_heads * SHAPE.head_dim
    state = KeyGradients(tl.zeros([BLOCK_N, D], tl.float32), tl.zeros([BLOCK_N, D], tl.float32))
    head = kv_head * SHAPE.group_size
    q_head = tensors.q + row * strides.q_batch + begin_q * strides.q_token + tl.cast(head, tl.int64) * strides.q_head
    at_head = (row * seqlen_q + begin_q) * token_stride + head * SHAPE.head_dim
    at_row = (row * num_qo_heads + head) * seqlen_q + begin_q
    queries = QueryHead(
        q_head, tensors.dout + at_head, tensors.dq + at_head, tensors.shift + at_row, tensors.delta + at_row
    )
    side = QuerySide(strides.q_head, strides.q_token, token_stride, seqlen_q, len_q, offset)
    if VARIANT.causal or not VARIANT.even_k:
        masked_end = tl.minimum(full, end)
        state = _add_group(state, block, queries, side, begin, masked_end, scales, SHAPE, TILE, VARIANT, True)
    state = _add_group(state, block, queries, side, full, end, scales, SHAPE, TILE, VARIANT, False)
    token_stride = num_kv_heads * SHAPE.head_dim
    at_head = (row * batch.seqlen_k + begin_k) * token_stride + kv_head * SHAPE.head_dim
    store_tile(tensors.dk + at_head, first, token_stride, len_k, state.dk * scales.sm_scale, SHAPE)
    store_tile(tensors.dv + at_head, first, token_stride, len_k, state.dv, SHAPE)


def write_key_gradients(tensors: KeysTensors, sequences: Sequences, tile: FlashTile, one_pass: bool) -> None:
    """Writes dk and dv; in one pass it also adds to dq, float32 zeros."""
    batch, seqlen_k, num_kv_heads, _ = tensors.k.shape
    num_blocks = sequences.blocks(sequences.cu_seqlens_k, seqlen_k, tile.block_n)
    if tensors.k.numel() and num_blocks:
        given = arguments(tensors.q, tensors.k, tensors.v, sequences, tile, num_blocks)
        keys_kernel[(num_blocks * num_kv_heads * batch,)](
            tensors,
            given.batch,
            Scales(given.scale, sequences.sm_scale),
            given.strides,
            SHAPE=given.shape,
            TILE=tile,
            VARIANT=KeysVariant(
                causal=sequences.causal,
                packed=sequences.packed,
                even_q=not sequences.packed and tensors.q.shape[1] % tile.block_m == 0,
                even_k=given.variant.even_k,
                one_pass=one_pass,
            ),
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
