"""The forward pass of FlashAttention for training on a GPU (FlashAttention-2, §3.1; https://arxiv.org/abs/2307.08691).

A CTA computes BLOCK_M queries of one head. It streams their keys and values with an online softmax and stores outputs
and log-sum-exps, never the scores. Keys that all its queries see come first and need no mask. Sequences are those of a
batch, equally long, or packed one after the other; then a CTA looks up the sequence of its block.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from trunkattn.gpu.portable.online_softmax import add_values, empty_state, lse_of, output_of, softmax_step
from trunkattn.training.common import (
    Batch,
    Sequences,
    Strides,
    arguments,
    find_queries,
    load_tile,
    store_tile,
    visible,
    visible_keys,
    with_batch,
)
from trunkattn.training.spec import FlashTile, card_tile


class ForwardTensors(NamedTuple):
    """q, out [batch, seqlen_q, num_qo_heads, head_dim]; k, v [batch, seqlen_k, num_kv_heads, head_dim]; lse [batch,
    num_qo_heads, seqlen_q]."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any


@triton.jit
def _attend(
    state,
    q_tile,
    keys,
    first,
    position,
    scale,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
    MASK: tl.constexpr,
):
    """Adds a block of keys to the state. scale: sm_scale · log2(e)."""
    PRECISION: tl.constexpr = SHAPE.precision
    MASK_ROWS: tl.constexpr = MASK and not VARIANT.even_k
    k_tile = load_tile(keys.k, first, keys.k_token, keys.length, TILE.block_n, SHAPE, MASK_ROWS)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    if MASK:
        scores = tl.where(visible(keys, first, position, TILE, VARIANT.causal), scores, -float("inf"))
    p, state, rescale = softmax_step(state, scores, scale, tl.max(scores, 1) * scale)
    v_tile = load_tile(keys.v, first, keys.v_token, keys.length, TILE.block_n, SHAPE, MASK_ROWS)
    return add_values(state, rescale, p, v_tile, PRECISION)


@triton.jit
def forward_kernel(
    tensors: ForwardTensors,
    batch: Batch,
    scale,
    strides: Strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """One block of queries; see `find_queries`. scale: sm_scale · log2(e)."""
    BLOCK_M: tl.constexpr = TILE.block_m
    queries, keys = find_queries(tensors.q, tensors.k, tensors.v, batch, strides, SHAPE, TILE, VARIANT)
    first, length = queries.first, queries.length
    q_tile = load_tile(queries.q, first, strides.q_token, length, BLOCK_M, SHAPE, True)
    m = first + tl.arange(0, BLOCK_M)
    state = empty_state(BLOCK_M, SHAPE.padded_dim)
    full, end = visible_keys(first, length, keys.length, TILE, VARIANT.causal)
    for at in tl.range(0, full, TILE.block_n):
        state = _attend(state, q_tile, keys, at, m, scale, SHAPE, TILE, VARIANT, False)
    if VARIANT.causal or not VARIANT.even_k:
        position = m + (keys.length - length)
        for at in tl.range(full, end, TILE.block_n):
            state = _attend(state, q_tile, keys, at, position, scale, SHAPE, TILE, VARIANT, True)
    result = output_of(state)
    token_stride = batch.num_qo_heads * SHAPE.head_dim
    out = tensors.out + (queries.batch * batch.seqlen_q + queries.begin) * token_stride + queries.head * SHAPE.head_dim
    store_tile(out, first, token_stride, length, result, SHAPE)
    lse = lse_of(state, -float("inf"))
    row = (queries.batch * batch.num_qo_heads + queries.head) * batch.seqlen_q + queries.begin
    tl.store(tensors.lse + row + m, lse, mask=m < length)


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, tile: FlashTile | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q, contiguous, and lse [batch, num_qo_heads, seqlen_q] or, packed, [num_qo_heads, total_q], float32, of
    checked arguments on the current stream and device. Packed tokens of no sequence: 0 and -inf.

    tile: None for the table's.
    """
    tile = card_tile("forward", q) if tile is None else tile
    q4, k4, v4 = (with_batch(tensor, sequences) for tensor in (q, k, v))
    batch, seqlen_q, heads, _ = q4.shape
    out = torch.empty(q4.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=q.device)
    if sequences.packed:  # tokens of no sequence are nobody's
        out.zero_()
        lse.fill_(-torch.inf)
    num_blocks = sequences.blocks(sequences.cu_seqlens_q, seqlen_q, tile.block_m)
    if out.numel() and num_blocks:
        given = arguments(q4, k4, v4, sequences, tile, num_blocks)
        forward_kernel[(num_blocks * heads * batch,)](
            ForwardTensors(q4, k4, v4, out, lse),
            given.batch,
            given.scale,
            given.strides,
            SHAPE=given.shape,
            TILE=tile,
            VARIANT=given.variant,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return (out[0], lse[0]) if sequences.packed else (out, lse)
