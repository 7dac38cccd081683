"""The kernel for the gradients of keys and values, which in one pass also adds up those of queries (see `backward`).

A CTA holds a block of keys and values and streams the queries that see it.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from trunkattn.gpu.bound import BoundLaunch
from trunkattn.training.arguments import Arguments, Batch, Numbers, Scales, Strides, bind_pass
from trunkattn.training.common import find_tokens, load_tile, logits_of, store_tile, through_cap
from trunkattn.training.spec import FlashTile
from trunkattn.training.visibility import Ranges, row_places, sees


class KeysTensors(NamedTuple):
    """The tensors of `keys_kernel`. They have shapes as in `ForwardTensors`, and gradients are contiguous."""

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
    """A block of keys [N, D] and values [N, head_dim of values], and the number `n` of each key in its sequence, which
    has `length` tokens. In a tree with a window, no query sees a key of the block from depth `depth_end` on."""

    k: Any
    v: Any
    n: Any
    length: Any
    depth_end: Any


class KeyGradients(NamedTuple):
    """Sums over queries [N, D] in float32. `dk` is not yet multiplied by sm_scale."""

    dk: Any
    dv: Any


class QueryHead(NamedTuple):
    """Where the tokens of one query head of a sequence begin."""

    q: Any
    dout: Any
    dq: Any
    shift: Any
    delta: Any


class QuerySide(NamedTuple):
    """What the queries of a sequence have in common: the strides of q, the strides of a token in dout and dq and of a
    head in shift and delta, and the numbers of queries and of keys."""

    q_head: Any
    q_token: Any
    dout_token: Any
    dq_token: Any
    row_head: Any
    length: Any
    len_k: Any


@triton.jit
def _add_queries(
    state,
    block,
    head,
    side,
    batch,
    first,
    scales,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
    MASK: tl.constexpr,
):
    """Adds the part of a block of queries to dk and dv. All products are transposed, so that p stays in registers."""
    KEYS: tl.constexpr = SHAPE.keys
    VALUES: tl.constexpr = SHAPE.head_values
    m = first + tl.arange(0, TILE.block_m)
    q = load_tile(head.q, first, side.q_token, side.length, TILE.block_m, KEYS, not VARIANT.even_q)
    shift = tl.load(head.shift + m, mask=m < side.length, other=float("inf"))
    scores = tl.dot(block.k, tl.trans(q), input_precision=SHAPE.precision)  # Sᵀ = K·Qᵀ
    logits = logits_of(scores, scales, VARIANT)
    p = tl.exp2(logits - shift[None, :])
    if MASK:
        rows = row_places(batch, m, side.length, side.len_k, VARIANT)
        seen = sees(batch, block.n[:, None], block.length, rows.position[None, :], rows.depth[None, :], VARIANT)
        p = tl.where(seen, p, 0.0)
    dout = load_tile(head.dout, first, side.dout_token, side.length, TILE.block_m, VALUES, not VARIANT.even_q)
    dv = tl.dot(p.to(dout.dtype), dout, state.dv, input_precision=SHAPE.precision)  # dV += Pᵀ·dO
    delta = tl.load(head.delta + m, mask=m < side.length, other=0.0)
    dp = tl.dot(block.v, tl.trans(dout), input_precision=SHAPE.precision)  # dPᵀ = V·dOᵀ
    ds = through_cap(p * (dp - delta[None, :]), logits, scales, VARIANT).to(q.dtype)
    dk = tl.dot(ds, q, state.dk, input_precision=SHAPE.precision)  # dK += dSᵀ·Q
    if VARIANT.one_pass:
        rows_q, d = tl.arange(0, TILE.block_m)[:, None], tl.arange(0, SHAPE.keys.padded)[None, :]
        # dQ = dS·K
        dq = tl.dot(tl.trans(ds), block.k, input_precision=SHAPE.precision) * scales.sm_scale
        pointers = head.dq + tl.cast(first, tl.int64) * side.dq_token + rows_q * side.dq_token + d
        tl.atomic_add(pointers, dq, mask=(m < side.length)[:, None] & (d < SHAPE.keys.dim), sem="relaxed")
    return KeyGradients(dk, dv)


@triton.jit
def _add_group(
    state,
    block,
    head,
    side,
    batch,
    begin,
    end,
    scales,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
    MASK: tl.constexpr,
):
    """Adds queries [begin, end) of every head of a group. `head` is the first one."""
    steps = tl.cdiv(tl.maximum(end - begin, 0), TILE.block_m)
    for step in tl.range(0, SHAPE.group_size * steps):
        member, first = step // steps, begin + step % steps * TILE.block_m
        own = QueryHead(
            head.q + tl.cast(member, tl.int64) * side.q_head,
            head.dout + member * SHAPE.head_values.dim,
            head.dq + member * SHAPE.keys.dim,
            head.shift + member * side.row_head,
            head.delta + member * side.row_head,
        )
        if VARIANT.tree and VARIANT.window:  # in pre-order, queries beyond the window lie between others
            m = first + tl.arange(0, TILE.block_m)
            depths = tl.load(batch.depths + m, mask=m < side.length, other=2147483647)
            if tl.min(depths) < block.depth_end:
                state = _add_queries(state, block, own, side, batch, first, scales, SHAPE, TILE, VARIANT, MASK)
        else:
            state = _add_queries(state, block, own, side, batch, first, scales, SHAPE, TILE, VARIANT, MASK)
    return state


@triton.jit
def seen_by(batch, n, first, len_q, len_k, TILE: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the `Ranges` of the queries that see a block of keys, which have numbers `n` from `first` on."""
    BLOCK_M: tl.constexpr = TILE.block_m
    offset = len_k - len_q
    last = first + TILE.block_n - 1
    end = tl.where(first < len_k, len_q, 0)
    begin, full_begin, full_end = 0, 0, end
    if VARIANT.causal or VARIANT.window:
        ahead = 0
        if not VARIANT.causal:
            ahead = batch.window - 1
        begin = tl.minimum(tl.maximum(first - ahead - offset, 0), end) // BLOCK_M * BLOCK_M
        full_begin = tl.maximum(tl.cdiv(tl.maximum(last - ahead - offset, 0), BLOCK_M) * BLOCK_M, begin)
    if VARIANT.tree:  # the queries that see a key are its subtree
        inside = n < len_k
        ends = tl.load(batch.subtree_end + n, mask=inside, other=0)
        end = tl.max(ends)
        full_end = tl.min(tl.where(inside, ends, len_k))
        full_end = tl.where(full_end >= len_q, end, full_end // BLOCK_M * BLOCK_M)
        if VARIANT.window:
            full_end = begin
    elif VARIANT.window:
        full_end = tl.minimum(end, tl.maximum(first + batch.window - offset, 0) // BLOCK_M * BLOCK_M)
        end = tl.minimum(end, tl.maximum(last + batch.window - offset, 0))
    if VARIANT.tree or VARIANT.window:
        no_full = (full_begin >= full_end) | (last >= len_k)
        full_begin, full_end = tl.where(no_full, end, full_begin), tl.where(no_full, end, full_end)
    elif not VARIANT.even_k:
        full_begin = tl.where(last >= len_k, end, full_begin)
    return Ranges(begin, tl.minimum(full_begin, end), full_end, end)


@triton.jit
def _gradients(
    block, queries, side, batch, ranges, scales, SHAPE: tl.constexpr, TILE: tl.constexpr, VARIANT: tl.constexpr
):
    """Returns the `KeyGradients` of a block, over the queries of a group in the `Ranges` that see it."""
    BLOCK_N: tl.constexpr = TILE.block_n
    D: tl.constexpr = SHAPE.keys.padded
    D_V: tl.constexpr = SHAPE.head_values.padded
    state = KeyGradients(tl.zeros([BLOCK_N, D], tl.float32), tl.zeros([BLOCK_N, D_V], tl.float32))
    if VARIANT.causal or VARIANT.window or not VARIANT.even_k:
        state = _add_group(
            state, block, queries, side, batch, ranges.begin, ranges.full_begin, scales, SHAPE, TILE, VARIANT, True
        )
    state = _add_group(
        state, block, queries, side, batch, ranges.full_begin, ranges.full_end, scales, SHAPE, TILE, VARIANT, False
    )
    if VARIANT.window or VARIANT.tree:
        state = _add_group(
            state, block, queries, side, batch, ranges.full_end, ranges.end, scales, SHAPE, TILE, VARIANT, True
        )
    return state


@triton.jit
def _load_keys(
    tensors,
    batch,
    strides,
    sequence,
    row,
    kv_head,
    first,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Loads the `KeyBlock` of a KV head that begins with key `first` of a sequence. `row` is the sequence's place in
    the batch."""
    KEYS: tl.constexpr = SHAPE.keys
    VALUES: tl.constexpr = SHAPE.head_values
    BLOCK_N: tl.constexpr = TILE.block_n
    k_head = tensors.k + row * strides.k_batch + sequence.begin_k * strides.k_token
    k_head += tl.cast(kv_head, tl.int64) * strides.k_head
    v_head = tensors.v + row * strides.v_batch + sequence.begin_k * strides.v_token
    v_head += tl.cast(kv_head, tl.int64) * strides.v_head
    length = sequence.len_k
    keys = load_tile(k_head, first, strides.k_token, length, BLOCK_N, KEYS, not VARIANT.even_k)
    values = load_tile(v_head, first, strides.v_token, length, BLOCK_N, VALUES, not VARIANT.even_k)
    n = first + tl.arange(0, BLOCK_N)
    depth_end = 0
    if VARIANT.tree and VARIANT.window:
        depth_end = tl.max(tl.load(batch.depths + n, mask=n < length, other=0)) + batch.window
    return KeyBlock(keys, values, n, length, depth_end)


@triton.jit
def _query_heads(tensors, batch, numbers, strides, sequence, row, head, SHAPE: tl.constexpr):
    """Returns the `QueryHead` of the first query head of a group in a sequence, and the sequence's `QuerySide`. `row`
    is the sequence's place in the batch."""
    seqlen_q, num_qo_heads = numbers.seqlen_q, batch.num_qo_heads
    begin = row * seqlen_q + sequence.begin_q
    q_stride, out_stride = num_qo_heads * SHAPE.keys.dim, num_qo_heads * SHAPE.head_values.dim
    at_row = (row * num_qo_heads + head) * seqlen_q + sequence.begin_q
    q_head = tensors.q + row * strides.q_batch + sequence.begin_q * strides.q_token
    q_head += tl.cast(head, tl.int64) * strides.q_head
    queries = QueryHead(
        q_head,
        tensors.dout + begin * out_stride + head * SHAPE.head_values.dim,
        tensors.dq + begin * q_stride + head * SHAPE.keys.dim,
        tensors.shift + at_row,
        tensors.delta + at_row,
    )
    side = QuerySide(
        q_head=strides.q_head,
        q_token=strides.q_token,
        dout_token=out_stride,
        dq_token=q_stride,
        row_head=seqlen_q,
        length=sequence.len_q,
        len_k=sequence.len_k,
    )
    return queries, side


@triton.jit
def _store_gradients(state, tensors, batch, numbers, sequence, row, kv_head, first, scales, SHAPE: tl.constexpr):
    """Writes dk and dv of a block that begins with key `first` of a sequence."""
    KEYS: tl.constexpr = SHAPE.keys
    VALUES: tl.constexpr = SHAPE.head_values
    num_kv_heads = batch.num_qo_heads // SHAPE.group_size
    k_stride, v_stride = num_kv_heads * SHAPE.keys.dim, num_kv_heads * SHAPE.head_values.dim
    begin = row * numbers.seqlen_k + sequence.begin_k
    dk_head = tensors.dk + begin * k_stride + kv_head * SHAPE.keys.dim
    dv_head = tensors.dv + begin * v_stride + kv_head * SHAPE.head_values.dim
    store_tile(dk_head, first, k_stride, sequence.len_k, state.dk * scales.sm_scale, KEYS)
    store_tile(dv_head, first, v_stride, sequence.len_k, state.dv, VALUES)


@triton.jit
def keys_kernel(
    tensors: KeysTensors,
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
    """Writes dk and dv of this CTA's batch, KV head and block of keys, of which the block is the fastest index. The
    first blocks, which most causal queries see, go first. The kernel sums over the heads of a group in registers. In
    one pass it adds to dq, which holds zeros in float32 before."""
    numbers = Numbers(num_sequences, seqlen_q, seqlen_k, num_blocks)
    BLOCK_N: tl.constexpr = TILE.block_n
    number, other = tl.program_id(0) % numbers.num_blocks, tl.program_id(0) // numbers.num_blocks
    num_kv_heads = batch.num_qo_heads // SHAPE.group_size
    kv_head, row = other % num_kv_heads, (other // num_kv_heads).to(tl.int64)
    sequence, number = find_tokens(batch, numbers, number, batch.cu_seqlens_k, BLOCK_N, VARIANT)
    first = number * BLOCK_N
    block = _load_keys(tensors, batch, strides, sequence, row, kv_head, first, SHAPE, TILE, VARIANT)
    queries, side = _query_heads(tensors, batch, numbers, strides, sequence, row, kv_head * SHAPE.group_size, SHAPE)
    ranges = seen_by(batch, block.n, first, sequence.len_q, sequence.len_k, TILE, VARIANT)
    state = _gradients(block, queries, side, batch, ranges, scales, SHAPE, TILE, VARIANT)
    _store_gradients(state, tensors, batch, numbers, sequence, row, kv_head, first, scales, SHAPE)


def bind_key_gradients(given: Arguments, k: torch.Tensor, tile: FlashTile, one_pass: bool) -> BoundLaunch:
    """Returns the launch that writes dk and dv of k [batch, ...]. In one pass it also adds to dq, which holds float32
    zeros."""
    num_ctas = given.numbers.num_blocks * k.shape[2] * k.shape[0]
    variant = given.variant._replace(sinks=False, one_pass=one_pass)
    return bind_pass(keys_kernel, num_ctas, given, tile, variant)
