"""The gradients of queries, in the deterministic backward pass (see `backward`).

A CTA holds a block of queries and streams the keys that it sees.
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
    find_queries,
    load_tile,
    store_tile,
    visible,
    visible_keys,
)
from trunkattn.training.spec import FlashTile


class QueriesTensors(NamedTuple):
    """Tensors of `queries_kernel`, with shapes as in `ForwardTensors`; gradients are contiguous."""

    q: Any
    k: Any
    v: Any
    dout: Any
    shift: Any
    delta: Any
    dq: Any


class QueryTile(NamedTuple):
    """A block of queries: q and dout [M, D], shift and delta [M]."""

    q: Any
    dout: Any
    shift: Any
    delta: Any


@triton.jit
def _add_keys(
    dq,
    block,
    keys,
    first,
    position,
    scale,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
    MASK: tl.constexpr,
):
    """Adds the part of a block of keys to dq [M, D]."""
    MASK_ROWS: tl.constexpr = MASK and not VARIANT.even_k
    k_tile = load_tile(keys.k, first, keys.k_token, keys.length, TILE.block_n, SHAPE, MASK_ROWS)
    scores = tl.dot(block.q, tl.trans(k_tile), input_precision=SHAPE.precision)
    p = tl.exp2(scores * scale - block.shift[:, None])
    if MASK:
        p = tl.where(visible(keys, first, position, TILE, VARIANT.causal), p, 0.0)
    v_tile = load_tile(keys.v, first, keys.v_token, keys.length, TILE.block_n, SHAPE, MASK_ROWS)
    dp = tl.dot(block.dout, tl.trans(v_tile), input_precision=SHAPE.precision)
    ds = p * (dp - block.delta[:, None])
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=SHAPE.precision)


@triton.jit
def queries_kernel(
    tensors: QueriesTensors,
    batch: Batch,
    scales: Scales,
    strides: Strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """dq of one block of queries; see `find_queries`."""
    BLOCK_M: tl.constexpr = TILE.block_m
    D: tl.constexpr = SHAPE.padded_dim
    queries, keys = find_queries(tensors.q, tensors.k, tensors.v, batch, strides, SHAPE, TILE, VARIANT)
    first, length = queries.first, queries.length
    token_stride = batch.num_qo_heads * SHAPE.head_dim
    at_head = (queries.batch * batch.seqlen_q + queries.begin) * token_stride + queries.head * SHAPE.head_dim
    q_tile = load_tile(queries.q, first, strides.q_token, length, BLOCK_M, SHAPE, True)
    dout = load_tile(tensors.dout + at_head, first, token_stride, length, BLOCK_M, SHAPE, True)
    m = first + tl.arange(0, BLOCK_M)
    at_row = (queries.batch * batch.num_qo_heads + queries.head) * batch.seqlen_q + queries.begin
    shift = tl.load(tensors.shift + at_row + m, mask=m < length, other=float("inf"))
    delta = tl.load(tensors.delta + at_row + m, mask=m < length, other=0.0)
    block = QueryTile(q_tile, dout, shift, delta)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    full, end = visible_keys(first, length, keys.length, TILE, VARIANT.causal)
    for at in tl.range(0, full, TILE.block_n):
        dq = _add_keys(dq, block, keys, at, m, scales.log2, SHAPE, TILE, VARIANT, False)
    if VARIANT.causal or not VARIANT.even_k:
        position = m + (keys.length - length)
        for at in tl.range(full, end, TILE.block_n):
            dq = _add_keys(dq, block, keys, at, position, scales.log2, SHAPE, TILE, VARIANT, True)
    store_tile(tensors.dq + at_head, first, token_stride, length, dq * scales.sm_scale, SHAPE)


def write_query_gradients(tensors: QueriesTensors, sequences: Sequences, tile: FlashTile) -> None:
    """Writes dq."""
    batch, seqlen_q, heads, _ = tensors.q.shape
    num_blocks = sequences.blocks(sequences.cu_seqlens_q, seqlen_q, tile.block_m)
    if tensors.q.numel() and num_blocks:
        given = arguments(tensors.q, tensors.k, tensors.v, sequences, tile, num_blocks)
        queries_kernel[(num_blocks * heads * batch,)](
            tensors,
            given.batch,
            Scales(given.scale, sequences.sm_scale),
            given.strides,
            SHAPE=given.shape,
            TILE=tile,
            VARIANT=given.variant,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
