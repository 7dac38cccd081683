"""The kernel for the gradients of queries in the deterministic backward pass (see `backward`).

A CTA holds a block of queries and streams the keys that it sees.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from trunkattn.gpu.bound import BoundLaunch
from trunkattn.training.arguments import Arguments, Batch, Numbers, Scales, Strides, bind_pass
from trunkattn.training.common import find_queries, load_tile, logits_of, store_tile, through_cap
from trunkattn.training.key_walk import walk_keys
from trunkattn.training.spec import FlashTile
from trunkattn.training.visibility import row_places, sees


class QueriesTensors(NamedTuple):
    """The tensors of `queries_kernel`. They have shapes as in `ForwardTensors`, and gradients are contiguous."""

    q: Any
    k: Any
    v: Any
    dout: Any
    shift: Any
    delta: Any
    dq: Any


class QueryTile(NamedTuple):
    """A block of queries. `q` is [M, D], `dout` is [M, head_dim of values], and `shift` and `delta` are [M]."""

    q: Any
    dout: Any
    shift: Any
    delta: Any


@triton.jit
def _add_keys(
    dq,
    block,
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
    """Adds the part of a block of keys to dq [M, D]."""
    KEYS: tl.constexpr = SHAPE.keys
    VALUES: tl.constexpr = SHAPE.head_values
    MASK_ROWS: tl.constexpr = MASK and not VARIANT.even_k
    k_tile = load_tile(keys.k, first, keys.k_token, keys.length, TILE.block_n, KEYS, MASK_ROWS)
    scores = tl.dot(block.q, tl.trans(k_tile), input_precision=SHAPE.precision)  # S = Q·Kᵀ
    logits = logits_of(scores, scales, VARIANT)
    p = tl.exp2(logits - block.shift[:, None])
    if MASK:
        n = first + tl.arange(0, TILE.block_n)[None, :]
        p = tl.where(sees(batch, n, keys.length, rows.position[:, None], rows.depth[:, None], VARIANT), p, 0.0)
    v_tile = load_tile(keys.v, first, keys.v_token, keys.length, TILE.block_n, VALUES, MASK_ROWS)
    dp = tl.dot(block.dout, tl.trans(v_tile), input_precision=SHAPE.precision)  # dP = dO·Vᵀ
    ds = through_cap(p * (dp - block.delta[:, None]), logits, scales, VARIANT)
    return tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=SHAPE.precision)  # dQ += dS·K


@triton.jit
def queries_kernel(
    tensors: QueriesTensors,
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
    """Writes dq of one block of queries, which `find_queries` finds."""
    numbers = Numbers(num_sequences, seqlen_q, seqlen_k, num_blocks)
    KEYS: tl.constexpr = SHAPE.keys
    VALUES: tl.constexpr = SHAPE.head_values
    BLOCK_M: tl.constexpr = TILE.block_m
    queries, keys = find_queries(tensors.q, tensors.k, tensors.v, batch, numbers, strides, SHAPE, TILE, VARIANT)
    first, length = queries.first, queries.length
    begin = queries.batch * numbers.seqlen_q + queries.begin
    q_stride, out_stride = batch.num_qo_heads * SHAPE.keys.dim, batch.num_qo_heads * SHAPE.head_values.dim
    dout_head = tensors.dout + begin * out_stride + queries.head * SHAPE.head_values.dim
    q_tile = load_tile(queries.q, first, strides.q_token, length, BLOCK_M, KEYS, True)
    dout = load_tile(dout_head, first, out_stride, length, BLOCK_M, VALUES, True)
    m = first + tl.arange(0, BLOCK_M)
    at_row = (queries.batch * batch.num_qo_heads + queries.head) * numbers.seqlen_q + queries.begin
    shift = tl.load(tensors.shift + at_row + m, mask=m < length, other=float("inf"))
    delta = tl.load(tensors.delta + at_row + m, mask=m < length, other=0.0)
    block = QueryTile(q_tile, dout, shift, delta)
    rows = row_places(batch, m, length, keys.length, VARIANT)
    D: tl.constexpr = SHAPE.keys.padded
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    dq = walk_keys(_add_keys, dq, block, queries, keys, batch, rows, scales, SHAPE, TILE, VARIANT)
    dq_head = tensors.dq + begin * q_stride + queries.head * SHAPE.keys.dim
    store_tile(dq_head, first, q_stride, length, dq * scales.sm_scale, KEYS)


def bind_query_gradients(given: Arguments, q: torch.Tensor, tile: FlashTile) -> BoundLaunch:
    """Returns the launch that writes dq of q [batch, ...]."""
    num_ctas = given.numbers.num_blocks * q.shape[2] * q.shape[0]
    return bind_pass(queries_kernel, num_ctas, given, tile, given.variant._replace(sinks=False, even_q=False))
