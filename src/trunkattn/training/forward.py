"""The forward pass of FlashAttention for training on a GPU (FlashAttention-2, §3.1; https://arxiv.org/abs/2307.08691).

A CTA computes BLOCK_M queries of one head. It streams their keys and values with an online softmax and stores outputs
and log-sum-exps, never the scores. Blocks of keys that all its queries see need no mask. Sequences are those of a
batch, equally long, or packed one after the other; then a CTA looks up the sequence of its block. In a prefix tree it
goes up the segments from its block to the root, so it reads no key that none of its queries sees.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from trunkattn.gpu.bound import BoundLaunch, kept, tensor_kind
from trunkattn.gpu.portable.online_softmax import (
    LOG2_E,
    NEG_INF,
    Softmax,
    add_values,
    empty_state,
    lse_of,
    output_of,
    soft_capped,
    softmax_step,
)
from trunkattn.training.arguments import (
    Batch,
    Numbers,
    Scales,
    Strides,
    arguments,
    bind_pass,
    readable,
    with_batch,
    with_tables,
)
from trunkattn.training.common import find_queries, load_tile, store_tile
from trunkattn.training.key_walk import walk_keys
from trunkattn.training.sequences import Sequences
from trunkattn.training.spec import FlashTile, card_tile
from trunkattn.training.visibility import row_places, sees


class ForwardTensors(NamedTuple):
    """q, out [batch, seqlen_q, num_qo_heads, head_dim]; k, v [batch, seqlen_k, num_kv_heads, head_dim]; lse [batch,
    num_qo_heads, seqlen_q]; sinks [num_qo_heads] or None. out and v have the values' head_dim."""

    q: Any
    k: Any
    v: Any
    out: Any
    lse: Any
    sinks: Any


@triton.jit
def _attend(
    state,
    q_tile,
    keys,
    batch,
    first,
    rows,
    scales,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
    MASK: tl.constexpr,
):
    """Adds a block of keys to the state."""
    KEYS: tl.constexpr = SHAPE.keys
    VALUES: tl.constexpr = SHAPE.head_values
    PRECISION: tl.constexpr = SHAPE.precision
    MASK_ROWS: tl.constexpr = MASK and not VARIANT.even_k
    k_tile = load_tile(keys.k, first, keys.k_token, keys.length, TILE.block_n, KEYS, MASK_ROWS)
    scores = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)  # S = Q·Kᵀ
    scale = scales.log2
    if VARIANT.soft_cap:
        scores = soft_capped(scores * scales.sm_scale, scales.soft_cap)
        scale = 1.0
    if MASK:
        n = first + tl.arange(0, TILE.block_n)[None, :]
        seen = sees(batch, n, keys.length, rows.position[:, None], rows.depth[:, None], VARIANT)
        scores = tl.where(seen, scores, -float("inf"))
    p, state, rescale = softmax_step(state, scores, scale, tl.max(scores, 1) * scale)
    v_tile = load_tile(keys.v, first, keys.v_token, keys.length, TILE.block_n, VALUES, MASK_ROWS)
    return add_values(state, rescale, p, v_tile, PRECISION)


@triton.jit
def forward_kernel(
    tensors: ForwardTensors,
    batch: Batch,
    num_sequences,
    seqlen_q,
    seqlen_k,
    num_blocks,
    scales: Scales,
    strides: Strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """One block of queries; see `find_queries`."""
    numbers = Numbers(num_sequences, seqlen_q, seqlen_k, num_blocks)
    KEYS: tl.constexpr = SHAPE.keys
    VALUES: tl.constexpr = SHAPE.head_values
    BLOCK_M: tl.constexpr = TILE.block_m
    queries, keys = find_queries(tensors.q, tensors.k, tensors.v, batch, numbers, strides, SHAPE, TILE, VARIANT)
    first, length = queries.first, queries.length
    q_tile = load_tile(queries.q, first, strides.q_token, length, BLOCK_M, KEYS, True)
    m = first + tl.arange(0, BLOCK_M)
    rows = row_places(batch, m, length, keys.length, VARIANT)
    state = empty_state(BLOCK_M, SHAPE.head_values.padded)
    if VARIANT.sinks:
        sink = tl.load(tensors.sinks + queries.head) * LOG2_E
        row_max = tl.zeros([BLOCK_M], tl.float32) + tl.maximum(sink, NEG_INF)
        row_sum = tl.zeros([BLOCK_M], tl.float32) + tl.where(sink > -float("inf"), 1.0, 0.0)
        state = Softmax(state.acc, row_max, row_sum)
    state = walk_keys(_attend, state, q_tile, queries, keys, batch, rows, scales, SHAPE, TILE, VARIANT)
    token_stride = batch.num_qo_heads * SHAPE.head_values.dim
    begin = queries.batch * numbers.seqlen_q + queries.begin
    out = tensors.out + begin * token_stride + queries.head * SHAPE.head_values.dim
    store_tile(out, first, token_stride, length, output_of(state), VALUES)
    row = (queries.batch * batch.num_qo_heads + queries.head) * numbers.seqlen_q + queries.begin
    tl.store(tensors.lse + row + m, lse_of(state), mask=m < length)


class _Bound(NamedTuple):
    """What a call does that does not depend on the addresses of its tensors. launch: None if there is nothing to
    compute. batch: without its tables."""

    launch: BoundLaunch | None
    batch: Batch
    lse_shape: tuple[int, ...]


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, tile: FlashTile | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out like q with v's head_dim, contiguous, and lse [batch, num_qo_heads, seqlen_q] or, packed, [num_qo_heads,
    total_q], float32, of checked arguments on the current stream and device. Packed tokens of no sequence: 0 and -inf.

    tile: None for the table's.
    """
    q, k, v = readable(q, k, v)
    key = "forward", q.device, tensor_kind(q), tensor_kind(k), tensor_kind(v), sequences.kind, tile
    bound = kept(key, lambda: _bind(q, k, v, sequences, tile))
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(bound.lse_shape, dtype=torch.float32, device=q.device)
    if sequences.packed:  # tokens of no sequence are nobody's
        out.zero_()
        lse.fill_(-torch.inf)
    if bound.launch is not None:
        tensors = ForwardTensors(q=q, k=k, v=v, out=out, lse=lse, sinks=sequences.sinks)
        bound.launch((tensors, with_tables(bound.batch, sequences)))
    return out, lse


def _bind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, tile: FlashTile | None) -> _Bound:
    """The launch for tensors and sequences of these kinds."""
    name = "forward" if sequences.tree is None else "forward_tree"
    tile = card_tile(name, q, v) if tile is None else tile
    q, k, v = (with_batch(tensor, sequences) for tensor in (q, k, v))
    batch, seqlen_q, heads, _ = q.shape
    num_blocks = sequences.blocks(sequences.cu_seqlens_q, seqlen_q, tile.block_m)
    given = arguments(q, k, v, sequences, tile, num_blocks)
    is_empty = 0 in (batch, seqlen_q, v.shape[-1], num_blocks)
    return _Bound(
        launch=None if is_empty else bind_pass(forward_kernel, num_blocks * heads * batch, given, tile, given.variant),
        batch=given.batch,
        lse_shape=(batch, heads, seqlen_q) if sequences.has_batch else (heads, seqlen_q),
    )
