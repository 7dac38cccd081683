"""Backward pass of FlashAttention by recomputation (lecture §5.8): weights come again from q, k and lse, tile by tile.

With P the weights and delta the row sums of dout · out: dv = Pᵀ dout, dS = P · (dout vᵀ - delta), dk = dSᵀ q and
dq = dS k, the latter two times sm_scale.
Two ways. Two kernels, deterministic: one holds a block of keys and streams queries, the other a block of queries and
streams keys; scores are computed twice. One pass: the first kernel also adds its part of dq to memory in float32, in
the order in which programs happen to come.
"""

import torch
import triton
import triton.language as tl

from trunkattn.kernels.flash_training import (
    LOG2_E,
    FlashTile,
    Sequences,
    arguments,
    card_tile,
    find_queries,
    find_sequence,
    load_tile,
    padded,
    span,
    store_tile,
    visible_keys,
    with_batch,
)

_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def prepare_kernel(out, dout, lse, dlse, delta, shift, seqlen_q, num_qo_heads, blocks,
                   HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """delta: row sums of dout · out, less dlse, as a gradient of lse adds P · dlse to dS. shift: lse in base 2; +inf
    for a query that sees nothing, so that its weights are 0."""
    first, other = tl.program_id(0) % blocks * BLOCK, tl.program_id(0) // blocks
    head, batch = (other % num_qo_heads).to(tl.int64), (other // num_qo_heads).to(tl.int64)
    stride_t = num_qo_heads * HEAD_DIM
    at = batch * seqlen_q * stride_t + head * HEAD_DIM
    out_tile = load_tile(out + at, first, stride_t, seqlen_q, BLOCK, HEAD_DIM, PADDED_DIM, True)
    dout_tile = load_tile(dout + at, first, stride_t, seqlen_q, BLOCK, HEAD_DIM, PADDED_DIM, True)
    if out.dtype.element_ty == tl.float32:  # summed as P's gradient will be: for a query of one key both cancel
        products = tl.dot(dout_tile, tl.trans(out_tile), input_precision="ieee")
        diagonal = tl.arange(0, BLOCK)[:, None] == tl.arange(0, BLOCK)[None, :]
        own = tl.sum(tl.where(diagonal, products, 0.0), 1)
    else:
        own = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    m = first + tl.arange(0, BLOCK)
    rows = (batch * num_qo_heads + head) * seqlen_q + m
    inside = m < seqlen_q
    natural = tl.load(lse + rows, mask=inside, other=0.0)
    nothing = natural == -float("inf")
    own = tl.where(nothing, 0.0, own - tl.load(dlse + rows, mask=inside, other=0.0))  # dlse may be NaN there
    tl.store(delta + rows, own, mask=inside)
    tl.store(shift + rows, tl.where(nothing, float("inf"), natural * _LOG2_E), mask=inside)


@triton.jit
def _add_queries(state, keys, values, q_head, dout_head, dq_head, shift_row, delta_row, at, end, q_stride_t, stride_t,
                 n, end_k, offset, scale, sm_scale, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
                 PADDED_DIM: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, EVEN_Q: tl.constexpr,
                 ONE_PASS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Adds BLOCK_M queries' part to dk and dv [N, D]; everything transposed, so that weights stay in registers."""
    dk, dv = state
    m = at + tl.arange(0, BLOCK_M)
    q_tile = load_tile(q_head, at, q_stride_t, end, BLOCK_M, HEAD_DIM, PADDED_DIM, not EVEN_Q)
    shift = tl.load(shift_row + m, mask=m < end, other=float("inf"))
    scores = tl.dot(keys, tl.trans(q_tile), input_precision=PRECISION)
    weights = tl.exp2(scores * scale - shift[None, :])
    if MASK:
        seen = n[:, None] < end_k
        if CAUSAL:
            seen = seen & (n[:, None] <= m[None, :] + offset)
        weights = tl.where(seen, weights, 0.0)
    dout_tile = load_tile(dout_head, at, stride_t, end, BLOCK_M, HEAD_DIM, PADDED_DIM, not EVEN_Q)
    dv = tl.dot(weights.to(dout_tile.dtype), dout_tile, dv, input_precision=PRECISION)
    delta = tl.load(delta_row + m, mask=m < end, other=0.0)
    dweights = tl.dot(values, tl.trans(dout_tile), input_precision=PRECISION)
    dscores = (weights * (dweights - delta[None, :])).to(q_tile.dtype)
    dk = tl.dot(dscores, q_tile, dk, input_precision=PRECISION)
    if ONE_PASS:
        d = tl.arange(0, PADDED_DIM)
        part = tl.dot(tl.trans(dscores), keys, input_precision=PRECISION) * sm_scale
        pointers = dq_head + tl.cast(at, tl.int64) * stride_t + tl.arange(0, BLOCK_M)[:, None] * stride_t + d[None, :]
        tl.atomic_add(pointers, part, mask=(m < end)[:, None] & (d < HEAD_DIM)[None, :], sem="relaxed")
    return dk, dv


@triton.jit
def _add_group(state, keys, values, heads, begin, end, seqlen_q, len_q, q_stride_h, q_stride_t, stride_t, n, end_k,
               offset, scale, sm_scale, GROUP: tl.constexpr, BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr,
               PADDED_DIM: tl.constexpr, MASK: tl.constexpr, CAUSAL: tl.constexpr, EVEN_Q: tl.constexpr,
               ONE_PASS: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Adds queries [begin, end) of every head of a group; heads: of the first one, q, dout, dq, shift and delta."""
    q_head, dout_head, dq_head, shift_row, delta_row = heads
    steps = tl.cdiv(tl.maximum(end - begin, 0), BLOCK_M)
    for step in tl.range(0, GROUP * steps):
        member, at = step // steps, begin + step % steps * BLOCK_M
        state = _add_queries(
            state, keys, values, q_head + tl.cast(member, tl.int64) * q_stride_h, dout_head + member * HEAD_DIM,
            dq_head + member * HEAD_DIM, shift_row + member * seqlen_q, delta_row + member * seqlen_q,
            at, len_q, q_stride_t, stride_t, n, end_k, offset, scale, sm_scale,
            BLOCK_M, HEAD_DIM, PADDED_DIM, MASK, CAUSAL, EVEN_Q, ONE_PASS, PRECISION,
        )  # fmt: skip
    return state


@triton.jit
def keys_kernel(
    q, k, v, dout, shift, delta, dq, dk, dv, cu_seqlens_q, cu_seqlens_k,
    num_sequences, seqlen_q, seqlen_k, num_qo_heads, blocks, scale, sm_scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    EVEN_Q: tl.constexpr, EVEN_K: tl.constexpr, ONE_PASS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (batch, KV head, block of keys), block fastest; the first blocks, which most causal queries see, go
    first. Sums over the group's heads in registers. Under ONE_PASS it also adds to dq, float32 zeros."""
    block, other = tl.program_id(0) % blocks, tl.program_id(0) // blocks
    num_kv_heads = num_qo_heads // GROUP
    kv_head, batch = other % num_kv_heads, (other // num_kv_heads).to(tl.int64)
    begin_q, begin_k, len_q, len_k = 0, 0, seqlen_q, seqlen_k
    if PACKED:
        sequence, block = find_sequence(block, cu_seqlens_k, num_sequences, BLOCK_N)
        begin_q, len_q = span(cu_seqlens_q, sequence, seqlen_q)
        begin_k, len_k = span(cu_seqlens_k, sequence, seqlen_k)
    first, offset = block * BLOCK_N, len_k - len_q
    k_head = k + batch * k_stride_b + begin_k * k_stride_t + tl.cast(kv_head, tl.int64) * k_stride_h
    v_head = v + batch * v_stride_b + begin_k * v_stride_t + tl.cast(kv_head, tl.int64) * v_stride_h
    keys = load_tile(k_head, first, k_stride_t, len_k, BLOCK_N, HEAD_DIM, PADDED_DIM, not EVEN_K)
    values = load_tile(v_head, first, v_stride_t, len_k, BLOCK_N, HEAD_DIM, PADDED_DIM, not EVEN_K)
    n = first + tl.arange(0, BLOCK_N)
    end = tl.where(first < len_k, len_q, 0)
    begin, full = 0, 0  # first query that sees a key; first from which all see all keys
    if CAUSAL:
        begin = tl.minimum(tl.maximum(first - offset, 0), end) // BLOCK_M * BLOCK_M
        full = tl.maximum(tl.cdiv(tl.maximum(first + BLOCK_N - 1 - offset, 0), BLOCK_M) * BLOCK_M, begin)
    if not EVEN_K:
        full = tl.where(first + BLOCK_N > len_k, tl.cdiv(end, BLOCK_M) * BLOCK_M, full)
    stride_t = num_qo_heads * HEAD_DIM
    state = (tl.zeros([BLOCK_N, PADDED_DIM], tl.float32), tl.zeros([BLOCK_N, PADDED_DIM], tl.float32))
    head = kv_head * GROUP
    q_head = q + batch * q_stride_b + begin_q * q_stride_t + tl.cast(head, tl.int64) * q_stride_h
    at_head = (batch * seqlen_q + begin_q) * stride_t + head * HEAD_DIM
    row = (batch * num_qo_heads + head) * seqlen_q + begin_q
    heads = (q_head, dout + at_head, dq + at_head, shift + row, delta + row)
    if CAUSAL or not EVEN_K:
        state = _add_group(
            state, keys, values, heads, begin, tl.minimum(full, end), seqlen_q, len_q, q_stride_h, q_stride_t, stride_t,
            n, len_k, offset, scale, sm_scale,
            GROUP, BLOCK_M, HEAD_DIM, PADDED_DIM, True, CAUSAL, EVEN_Q, ONE_PASS, PRECISION,
        )  # fmt: skip
    state = _add_group(
        state, keys, values, heads, full, end, seqlen_q, len_q, q_stride_h, q_stride_t, stride_t,
        n, len_k, offset, scale, sm_scale,
        GROUP, BLOCK_M, HEAD_DIM, PADDED_DIM, False, CAUSAL, EVEN_Q, ONE_PASS, PRECISION,
    )  # fmt: skip
    stride_t = num_kv_heads * HEAD_DIM
    at_head = (batch * seqlen_k + begin_k) * stride_t + kv_head * HEAD_DIM
    store_tile(dk + at_head, first, stride_t, len_k, state[0] * sm_scale, BLOCK_N, HEAD_DIM, PADDED_DIM)
    store_tile(dv + at_head, first, stride_t, len_k, state[1], BLOCK_N, HEAD_DIM, PADDED_DIM)


@triton.jit
def _add_keys(dq, q_tile, dout_tile, shift, delta, k_head, v_head, at, end, k_stride_t, v_stride_t, position, scale,
              BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr, MASK: tl.constexpr,
              CAUSAL: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Adds BLOCK_N keys' part to dq [M, D]."""
    keys = load_tile(k_head, at, k_stride_t, end, BLOCK_N, HEAD_DIM, PADDED_DIM, MASK and not EVEN_K)
    weights = tl.exp2(tl.dot(q_tile, tl.trans(keys), input_precision=PRECISION) * scale - shift[:, None])
    if MASK:
        n = at + tl.arange(0, BLOCK_N)[None, :]
        seen = n < end
        if CAUSAL:
            seen = seen & (n <= position[:, None])
        weights = tl.where(seen, weights, 0.0)
    values = load_tile(v_head, at, v_stride_t, end, BLOCK_N, HEAD_DIM, PADDED_DIM, MASK and not EVEN_K)
    dweights = tl.dot(dout_tile, tl.trans(values), input_precision=PRECISION)
    dscores = weights * (dweights - delta[:, None])
    return tl.dot(dscores.to(keys.dtype), keys, dq, input_precision=PRECISION)


@triton.jit
def queries_kernel(
    q, k, v, dout, shift, delta, dq, cu_seqlens_q, cu_seqlens_k,
    num_sequences, seqlen_q, seqlen_k, num_qo_heads, blocks, scale, sm_scale,
    q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr, PACKED: tl.constexpr,
    EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq; programs as in `forward_kernel`."""
    first, head, batch, begin_q, len_q, len_k, q_head, k_head, v_head = find_queries(
        q, k, v, cu_seqlens_q, cu_seqlens_k, num_sequences, seqlen_q, seqlen_k, num_qo_heads, blocks,
        q_stride_b, q_stride_t, q_stride_h, k_stride_b, k_stride_t, k_stride_h, v_stride_b, v_stride_t, v_stride_h,
        GROUP, BLOCK_M, CAUSAL, PACKED,
    )  # fmt: skip
    stride_t = num_qo_heads * HEAD_DIM
    at_head = (batch * seqlen_q + begin_q) * stride_t + head * HEAD_DIM
    q_tile = load_tile(q_head, first, q_stride_t, len_q, BLOCK_M, HEAD_DIM, PADDED_DIM, True)
    dout_tile = load_tile(dout + at_head, first, stride_t, len_q, BLOCK_M, HEAD_DIM, PADDED_DIM, True)
    m = first + tl.arange(0, BLOCK_M)
    row = (batch * num_qo_heads + head) * seqlen_q + begin_q
    row_shift = tl.load(shift + row + m, mask=m < len_q, other=float("inf"))
    row_delta = tl.load(delta + row + m, mask=m < len_q, other=0.0)
    sums = tl.zeros([BLOCK_M, PADDED_DIM], tl.float32)
    full, end = visible_keys(first, len_q, len_k, BLOCK_M, BLOCK_N, CAUSAL)
    for at in tl.range(0, full, BLOCK_N):
        sums = _add_keys(
            sums, q_tile, dout_tile, row_shift, row_delta, k_head, v_head, at, len_k, k_stride_t, v_stride_t, m, scale,
            BLOCK_N, HEAD_DIM, PADDED_DIM, False, CAUSAL, EVEN_K, PRECISION,
        )  # fmt: skip
    if CAUSAL or not EVEN_K:
        position = m + (len_k - len_q)
        for at in tl.range(full, end, BLOCK_N):
            sums = _add_keys(
                sums, q_tile, dout_tile, row_shift, row_delta, k_head, v_head, at, len_k, k_stride_t, v_stride_t,
                position, scale, BLOCK_N, HEAD_DIM, PADDED_DIM, True, CAUSAL, EVEN_K, PRECISION,
            )  # fmt: skip
    store_tile(dq + at_head, first, stride_t, len_q, sums * sm_scale, BLOCK_M, HEAD_DIM, PADDED_DIM)


def backward(
    gradients: tuple[torch.Tensor, torch.Tensor], saved: tuple[torch.Tensor, ...], sequences: Sequences,
    deterministic: bool, tiles: dict[str, FlashTile] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """dq, dk and dv, contiguous, from the gradients of out and lse, and q, k, v, out and lse of `forward`; as there.

    deterministic: two kernels, bit-equal over repeated runs; else one pass. tiles: by pass, None for the table's.
    """
    q, k, v = (with_batch(tensor, sequences) for tensor in saved[:3])
    out, dout = (with_batch(tensor, sequences).contiguous() for tensor in (saved[3], gradients[0]))
    lse, dlse = saved[4].contiguous(), gradients[1].contiguous()
    chosen = {name: card_tile(name, q) for name in ("keys", "queries", "one_pass")} | (tiles or {})
    shift, delta = torch.empty_like(lse), torch.empty_like(lse)
    batch, seqlen_q, heads, head_dim = q.shape
    make = torch.zeros if sequences.packed else torch.empty
    dk, dv = (make(k.shape, dtype=q.dtype, device=q.device) for _ in range(2))
    dq = (make if deterministic else torch.zeros)(
        q.shape, dtype=q.dtype if deterministic else torch.float32, device=q.device
    )
    if q.numel():
        rows = 16 if q.dtype == torch.float32 else 64  # of a program that prepares
        blocks = -(-seqlen_q // rows)
        prepare_kernel[(blocks * heads * batch,)](
            out, dout, lse, dlse, delta, shift, seqlen_q, heads, blocks,
            HEAD_DIM=head_dim, PADDED_DIM=padded(head_dim), BLOCK=rows, num_warps=4,
        )  # fmt: skip
    more = {"dout": dout, "shift": shift, "delta": delta, "dq": dq, "sm_scale": sequences.sm_scale}
    tile = chosen["keys" if deterministic else "one_pass"]
    blocks = sequences.blocks(sequences.cu_seqlens_k, k.shape[1], tile.block_n)
    if k.numel() and blocks:
        keys_kernel[(blocks * k.shape[2] * batch,)](
            **arguments(q, k, v, sequences, tile), **more, dk=dk, dv=dv, blocks=blocks, ONE_PASS=not deterministic,
            EVEN_Q=not sequences.packed and seqlen_q % tile.block_m == 0,
            EVEN_K=not sequences.packed and k.shape[1] % tile.block_n == 0,
        )  # fmt: skip
    tile = chosen["queries"]
    blocks = sequences.blocks(sequences.cu_seqlens_q, seqlen_q, tile.block_m)
    if deterministic and q.numel() and blocks:
        queries_kernel[(blocks * heads * batch,)](
            **arguments(q, k, v, sequences, tile), **more, blocks=blocks,
            EVEN_K=not sequences.packed and k.shape[1] % tile.block_n == 0,
        )  # fmt: skip
    dq = dq.to(q.dtype)
    return (dq[0], dk[0], dv[0]) if sequences.packed else (dq, dk, dv)
