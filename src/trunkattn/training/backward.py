"""The backward pass of FlashAttention by recomputation (FlashAttention-2, §3.1; https://arxiv.org/abs/2307.08691).

The probabilities p come again from q, k and lse, tile by tile. With delta, the row sums of dout · out: dv = pᵀ dout,
ds = p · (dout vᵀ - delta), dk = dsᵀ q and dq = ds k, the latter two times sm_scale.

There are two ways. Two kernels are deterministic: one holds a block of keys and streams queries, the other holds a
block of queries and streams keys, and both compute the scores. One pass is faster: the first kernel also adds its part
of dq to memory in float32, in the order in which its CTAs happen to run.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from trunkattn.gpu.triton.online_softmax import LOG2_E
from trunkattn.training.common import (
    Batch,
    Sequences,
    Strides,
    arguments,
    attention_shape,
    find_queries,
    find_sequence,
    load_tile,
    span,
    store_tile,
    visible,
    visible_keys,
    with_batch,
)
from trunkattn.training.tiles import FlashTile, card_tile


class PrepareTensors(NamedTuple):
    """out, dout [batch, seqlen_q, num_qo_heads, head_dim]; the others [batch, num_qo_heads, seqlen_q], float32."""

    out: Any
    dout: Any
    lse: Any
    dlse: Any
    delta: Any
    shift: Any


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


class QueriesTensors(NamedTuple):
    """Tensors of `queries_kernel`, with shapes as in `ForwardTensors`; gradients are contiguous."""

    q: Any
    k: Any
    v: Any
    dout: Any
    shift: Any
    delta: Any
    dq: Any


class Scales(NamedTuple):
    """Of logits: log2 is sm_scale · log2(e)."""

    log2: Any
    sm_scale: Any


class KeyBlock(NamedTuple):
    """A block of keys and values [N, D], and the number of each key in its sequence, which has `length` tokens."""

    keys: Any
    values: Any
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


class QuerySide(NamedTuple):
    """What the queries of a sequence have in common: strides of q, the stride of a token in dout and dq, the number of
    queries, and the position of query 0 among the keys."""

    q_head: Any
    q_token: Any
    token: Any
    length: Any
    offset: Any


class QueryTile(NamedTuple):
    """A block of queries: q and dout [M, D], shift and delta [M]."""

    q: Any
    dout: Any
    shift: Any
    delta: Any


@triton.jit
def prepare_kernel(
    tensors: PrepareTensors, seqlen_q, num_qo_heads, num_blocks, SHAPE: tl.constexpr, BLOCK: tl.constexpr
):
    """delta: row sums of dout · out, less dlse, since a gradient of lse adds p · dlse to ds. shift: lse in base 2, and
    +inf for a query that sees nothing, so that its p is 0."""
    first, other = tl.program_id(0) % num_blocks * BLOCK, tl.program_id(0) // num_blocks
    head, batch = (other % num_qo_heads).to(tl.int64), (other // num_qo_heads).to(tl.int64)
    token_stride = num_qo_heads * SHAPE.head_dim
    at = batch * seqlen_q * token_stride + head * SHAPE.head_dim
    out = load_tile(tensors.out + at, first, token_stride, seqlen_q, BLOCK, SHAPE, True)
    dout = load_tile(tensors.dout + at, first, token_stride, seqlen_q, BLOCK, SHAPE, True)
    if tensors.out.dtype.element_ty == tl.float32:  # summed as dout vᵀ is: for a query of one key both then cancel
        products = tl.dot(dout, tl.trans(out), input_precision="ieee")
        diagonal = tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]
        delta = tl.sum(tl.where(diagonal, products, 0.0), 1)
    else:
        delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    m = first + tl.arange(0, BLOCK)
    rows = (batch * num_qo_heads + head) * seqlen_q + m
    inside = m < seqlen_q
    lse = tl.load(tensors.lse + rows, mask=inside, other=0.0)
    sees_nothing = lse == -float("inf")
    dlse = tl.load(tensors.dlse + rows, mask=inside, other=0.0)  # may be NaN where a query sees nothing
    tl.store(tensors.delta + rows, tl.where(sees_nothing, 0.0, delta - dlse), mask=inside)
    tl.store(tensors.shift + rows, tl.where(sees_nothing, float("inf"), lse * LOG2_E), mask=inside)


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
    EVEN_Q: tl.constexpr,
    MASK: tl.constexpr,
    ONE_PASS: tl.constexpr,
):
    """Adds the part of a block of queries to dk and dv. All products are transposed, so that p stays in registers."""
    m = first + tl.arange(0, TILE.block_m)
    q = load_tile(head.q, first, side.q_token, side.length, TILE.block_m, SHAPE, not EVEN_Q)
    shift = tl.load(head.shift + m, mask=m < side.length, other=float("inf"))
    scores = tl.dot(block.keys, tl.trans(q), input_precision=SHAPE.precision)
    p = tl.exp2(scores * scales.log2 - shift[None, :])
    if MASK:
        seen = block.n[:, None] < block.length
        if VARIANT.causal:
            seen = seen & (block.n[:, None] <= m[None, :] + side.offset)
        p = tl.where(seen, p, 0.0)
    dout = load_tile(head.dout, first, side.token, side.length, TILE.block_m, SHAPE, not EVEN_Q)
    dv = tl.dot(p.to(dout.dtype), dout, state.dv, input_precision=SHAPE.precision)
    delta = tl.load(head.delta + m, mask=m < side.length, other=0.0)
    dp = tl.dot(block.values, tl.trans(dout), input_precision=SHAPE.precision)
    ds = (p * (dp - delta[None, :])).to(q.dtype)
    dk = tl.dot(ds, q, state.dk, input_precision=SHAPE.precision)
    if ONE_PASS:
        rows, d = tl.arange(0, TILE.block_m)[:, None], tl.arange(0, SHAPE.padded_dim)[None, :]
        dq = tl.dot(tl.trans(ds), block.keys, input_precision=SHAPE.precision) * scales.sm_scale
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
    seqlen_q,
    scales,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
    EVEN_Q: tl.constexpr,
    MASK: tl.constexpr,
    ONE_PASS: tl.constexpr,
):
    """Adds queries [begin, end) of every head of a group. head: the first one."""
    steps = tl.cdiv(tl.maximum(end - begin, 0), TILE.block_m)
    for step in tl.range(0, SHAPE.group_size * steps):
        member, first = step // steps, begin + step % steps * TILE.block_m
        own = QueryHead(
            head.q + tl.cast(member, tl.int64) * side.q_head,
            head.dout + member * SHAPE.head_dim,
            head.dq + member * SHAPE.head_dim,
            head.shift + member * seqlen_q,
            head.delta + member * seqlen_q,
        )
        state = _add_queries(state, block, own, side, first, scales, SHAPE, TILE, VARIANT, EVEN_Q, MASK, ONE_PASS)
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
    EVEN_Q: tl.constexpr,
    ONE_PASS: tl.constexpr,
):
    """dk and dv of CTA (batch, KV head, block of keys), block fastest. The first blocks, which most causal queries see,
    go first. It sums over the heads of a group in registers. EVEN_Q: every block of queries is full. ONE_PASS: it also
    adds to dq, which holds zeros in float32."""
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
    side = QuerySide(strides.q_head, strides.q_token, token_stride, len_q, offset)
    if VARIANT.causal or not VARIANT.even_k:
        state = _add_group(
            state,
            block,
            queries,
            side,
            begin,
            tl.minimum(full, end),
            seqlen_q,
            scales,
            SHAPE,
            TILE,
            VARIANT,
            EVEN_Q,
            True,
            ONE_PASS,
        )
    state = _add_group(
        state, block, queries, side, full, end, seqlen_q, scales, SHAPE, TILE, VARIANT, EVEN_Q, False, ONE_PASS
    )
    token_stride = num_kv_heads * SHAPE.head_dim
    at_head = (row * batch.seqlen_k + begin_k) * token_stride + kv_head * SHAPE.head_dim
    store_tile(tensors.dk + at_head, first, token_stride, len_k, state.dk * scales.sm_scale, SHAPE)
    store_tile(tensors.dv + at_head, first, token_stride, len_k, state.dv, SHAPE)


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


def backward(
    gradients: tuple[torch.Tensor, torch.Tensor],
    saved: tuple[torch.Tensor, ...],
    sequences: Sequences,
    deterministic: bool,
    tiles: dict[str, FlashTile] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """dq, dk and dv, contiguous, from the gradients of out and lse, and q, k, v, out and lse of `forward`; as there.

    deterministic: two kernels, bit-equal over repeated runs; else one pass. tiles: by pass, None for the table's.
    """
    q, k, v = (with_batch(tensor, sequences) for tensor in saved[:3])
    out, dout = (with_batch(tensor, sequences).contiguous() for tensor in (saved[3], gradients[0]))
    lse, dlse = saved[4].contiguous(), gradients[1].contiguous()
    chosen = {name: card_tile(name, q) for name in ("keys", "queries", "one_pass")} | (tiles or {})
    shift, delta = torch.empty_like(lse), torch.empty_like(lse)
    make = torch.zeros if sequences.packed else torch.empty
    dk, dv = (make(k.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    dq = (make if deterministic else torch.zeros)(
        q.shape, dtype=q.dtype if deterministic else torch.float32, device=q.device
    )
    if q.numel():
        _prepare(PrepareTensors(out, dout, lse, dlse, delta, shift))
    tensors = KeysTensors(q, k, v, dout, shift, delta, dq, dk, dv)
    _keys(tensors, sequences, chosen["keys" if deterministic else "one_pass"], not deterministic)
    if deterministic:
        _queries(QueriesTensors(*tensors[:7]), sequences, chosen["queries"])
    dq = dq.to(q.dtype)
    return (dq[0], dk[0], dv[0]) if sequences.packed else (dq, dk, dv)


def _prepare(tensors: PrepareTensors) -> None:
    batch, seqlen_q, heads, head_dim = tensors.out.shape
    shape = attention_shape(1, head_dim, tensors.out.dtype)  # the kernel does not group heads
    block = 16 if tensors.out.dtype == torch.float32 else 64
    num_blocks = -(-seqlen_q // block)
    prepare_kernel[(num_blocks * heads * batch,)](
        tensors, seqlen_q, heads, num_blocks, SHAPE=shape, BLOCK=block, num_warps=4
    )


def _keys(tensors: KeysTensors, sequences: Sequences, tile: FlashTile, one_pass: bool) -> None:
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
            VARIANT=given.variant,
            EVEN_Q=not sequences.packed and tensors.q.shape[1] % tile.block_m == 0,
            ONE_PASS=one_pass,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )


def _queries(tensors: QueriesTensors, sequences: Sequences, tile: FlashTile) -> None:
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
