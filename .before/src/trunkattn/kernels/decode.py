"""Packed attention on a GPU (PAT §5.2 to §7): one program computes one item of a tile list for one KV head.

A program's rows are (query token, head of the group) pairs; it streams the item's runs of KV with an online softmax
(FlashAttention). Runs that all rows see whole come first and need no mask; of the others each row takes those of its
own request (a block-diagonal mask). Rows with other pieces leave a partial state; an item that merges adds the partials
that an earlier launch left to its own state and writes the final output, so that leaves need no merge launch.
"""

import triton
import triton.language as tl

from trunkattn.plan_format import DIRECT, ITEM_COLUMNS

_DIRECT = tl.constexpr(DIRECT)
ITEM = tl.constexpr(ITEM_COLUMNS)
NOTHING = tl.constexpr(-1e30)  # maximum of no logit: finite, so that differences are never NaN
LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_in_halves(pointer, mask):
    """int32 numbers, 0 where masked. A load of 32 bits would be staged as the keys are, and wait for them; halves stay
    in registers."""
    half = pointer.to(tl.pointer_type(tl.uint16))
    low = tl.load(half, mask=mask, other=0).to(tl.int32)
    return low | tl.load(half + 1, mask=mask, other=0).to(tl.int32) << 16


@triton.jit
def _listed(runs, at, end, COLUMN: tl.constexpr):
    """A column of the run list, 0 from `end` on."""
    return load_in_halves(runs + at * 3 + COLUMN, at < end)


@triton.jit
def _column(runs, at, end, key_run, COLUMN: tl.constexpr, STEP: tl.constexpr):
    """`_listed` for each key of a step; as scalars where it has few runs: a thread then keeps one address per run."""
    if STEP > 4:
        return _listed(runs, at + key_run, end, COLUMN)
    value = tl.zeros_like(key_run)
    for i in tl.static_range(STEP):
        value = tl.where(key_run == i, _listed(runs, at + i, end, COLUMN), value)
    return value


@triton.jit
def load_tile(base, rows, columns, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASK_ROWS: tl.constexpr):
    """A tile of keys or values; masks only what needs one, because masked loads cost address registers."""
    pointers = base + rows + columns
    if WIDTH != PADDED:
        return tl.load(pointers, mask=inside & (columns < WIDTH), other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=inside & (columns >= 0), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def cap(scores, soft_cap):
    """Logits to soft_cap · tanh(logit / soft_cap), in base 2."""
    return (2.0 / (1.0 + tl.exp2(scores * (-2.0 * LOG2_E / soft_cap))) - 1.0) * (soft_cap * LOG2_E)


@triton.jit
def _attend(state, q_tile, keys, values, seen, scale, soft_cap,
            MASK: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One step of the online softmax: acc [..., M, Dv], maximum and sum [..., M]."""
    acc, top, total = state
    scores = tl.dot(q_tile, keys, input_precision=PRECISION) * scale
    if SOFT_CAP:
        scores = cap(scores, soft_cap)
    if MASK:
        scores = tl.where(seen, scores, -float("inf"))
    AXIS: tl.constexpr = len(scores.shape) - 1
    higher = tl.maximum(top, tl.max(scores, AXIS))
    weights = tl.exp2(scores - tl.expand_dims(higher, AXIS))
    rescale = tl.exp2(top - higher)
    total = total * rescale + tl.sum(weights, AXIS)
    acc = tl.dot(weights.to(values.dtype), values, acc * tl.expand_dims(rescale, AXIS), input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def _attend_masked(state, q_tile, local, position, key_run, key_place, runs, first, end, k_head, v_head,
                   k_stride_p, k_stride_t, v_stride_p, v_stride_t, scale, soft_cap, window,
                   STEP: tl.constexpr, PAGE_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
                   PADDED_DIM: tl.constexpr, PADDED_DIM_V: tl.constexpr, MASKED: tl.constexpr, SOFT_CAP: tl.constexpr,
                   STAGES: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Runs [first, end) that not all rows see, STEP at a time. local, position [..., M]: each row's query; key_run,
    key_place [..., N]: each key's run of a step, and place in it."""
    M: tl.constexpr = len(q_tile.shape) - 1  # axis to insert, so that a mask lies along the keys
    N: tl.constexpr = len(q_tile.shape) - 2
    d, dv = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_DIM_V)
    place = _column(runs, first, end, key_run, 0, STEP)
    rows = _column(runs, first, end, key_run, 1, STEP)
    for at in tl.range(first, end, STEP, num_stages=STAGES):
        inside = key_place < rows >> 16
        page, offset = (place // PAGE_SIZE).to(tl.int64), place % PAGE_SIZE + key_place
        k_at = tl.expand_dims(page * k_stride_p + offset * k_stride_t, N)
        v_at = tl.expand_dims(page * v_stride_p + offset * v_stride_t, M)
        keys = load_tile(k_head, k_at, d[:, None], tl.expand_dims(inside, N), HEAD_DIM, PADDED_DIM, True)
        values = load_tile(v_head, v_at, dv[None, :], tl.expand_dims(inside, M), HEAD_DIM_V, PADDED_DIM_V, True)
        low, high = tl.where(inside, rows & 255, 256), rows >> 8 & 255
        query = tl.expand_dims(local, M)
        seen = (query >= tl.expand_dims(low, N)) & (query < tl.expand_dims(high, N))
        if MASKED:
            where = tl.expand_dims(_column(runs, at, end, key_run, 2, STEP) + key_place, N)
            seen = seen & (where <= tl.expand_dims(position, M)) & (where > tl.expand_dims(position, M) - window)
        state = _attend(state, q_tile, keys.to(q_tile.dtype), values.to(q_tile.dtype), seen, scale, soft_cap,
                        True, SOFT_CAP, PRECISION)  # fmt: skip
        place = _column(runs, at + STEP, end, key_run, 0, STEP)
        rows = _column(runs, at + STEP, end, key_run, 1, STEP)
    return state


@triton.jit
def _merge(state, part, last, most, query_head, partial, partial_lse, used, dv,
           NUM_QO_HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr):  # fmt: skip
    """Adds the partials in slots [part, last) of each row to its state."""
    acc, top, total = state
    for i in range(0, most):
        here = used & (part + i < last)
        at = (part + i).to(tl.int64) * NUM_QO_HEADS + query_head
        other_top = tl.load(partial_lse + at, mask=here, other=NOTHING) * LOG2_E
        columns = here[:, None] & (dv < HEAD_DIM_V)[None, :]
        other = tl.load(partial + at[:, None] * HEAD_DIM_V + dv[None, :], mask=columns, other=0.0)
        higher = tl.maximum(top, other_top)
        rescale, weight = tl.exp2(top - higher), tl.where(here, tl.exp2(other_top - higher), 0.0)
        total = total * rescale + weight
        acc = acc * rescale[:, None] + other * weight[:, None]
        top = higher
    return acc, top, total


@triton.jit
def finish(
    state, token, query_head, slot, used, dv, v_scale, tensors, sinks, out_stride_t, out_stride_h,
    NUM_QO_HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, SINKS: tl.constexpr, RETURN_LSE: tl.constexpr,
):  # fmt: skip
    """Writes the state of each used row: to its partial slot, or to the output if the slot is DIRECT. v_scale: of
    the head."""
    out, lse_out, partial, partial_lse = tensors
    acc, top, total = state
    columns = (dv < HEAD_DIM_V)[None, :]
    result = acc / tl.where(total > 0, total, 1.0)[:, None]  # a row may see nothing of its item
    natural = tl.where(total > 0, top * _LN_2 + tl.log(tl.where(total > 0, total, 1.0)), NOTHING)
    kept = used & (slot != _DIRECT)
    slot_at = slot.to(tl.int64) * NUM_QO_HEADS + query_head
    tl.store(partial + slot_at[:, None] * HEAD_DIM_V + dv[None, :], result, mask=kept[:, None] & columns)
    tl.store(partial_lse + slot_at, natural, mask=kept)
    direct = used & (slot == _DIRECT)
    result *= tl.load(v_scale)
    if SINKS:
        sink = tl.load(sinks + query_head, mask=used, other=0.0).to(tl.float32)
        result /= (1.0 + tl.exp2((sink - natural) * LOG2_E))[:, None]
    out_at = token.to(tl.int64) * out_stride_t + query_head * out_stride_h
    tl.store(out + out_at[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=direct[:, None] & columns)
    if RETURN_LSE:
        tl.store(lse_out + token * NUM_QO_HEADS + query_head, natural, mask=direct)


@triton.jit
def load_queries(q, token, query_head, used, stride_t, stride_h, cache, HEAD_DIM: tl.constexpr,
                 PADDED_DIM: tl.constexpr):  # fmt: skip
    """The query rows, 0 where not used, in the dtype in which they meet the cache's keys."""
    at = (token.to(tl.int64) * stride_t + query_head * stride_h)[:, None]
    tile = load_tile(q, at, tl.arange(0, PADDED_DIM)[None, :], used[:, None], HEAD_DIM, PADDED_DIM, True)
    if cache.dtype.element_ty.primitive_bitwidth == 8 and q.dtype.element_ty == tl.bfloat16:
        tile = tile.to(tl.float16)  # 8-bit keys become fp16 in one instruction a pair, bf16 in several
    return tile


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, PADDED_DIM_V: tl.constexpr):
    """acc, maximum and sum of rows that have seen nothing."""
    acc = tl.zeros([BLOCK_M, PADDED_DIM_V], tl.float32)
    return acc, tl.full([BLOCK_M], NOTHING, tl.float32), tl.zeros([BLOCK_M], tl.float32)


@triton.jit
def compute_item(
    item, head, tensors, plan, options, strides,
    NUM_QO_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, RUN: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr, PRIVATE_N: tl.constexpr,
    MASKED: tl.constexpr, MERGE: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, RETURN_LSE: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One item for one KV head. tensors, plan, options, strides: as `decode_kernel` groups its arguments."""
    q, k_cache, v_cache, out, lse_out, partial, partial_lse = tensors
    runs, queries, slots, parts, positions = plan
    logit_scale, v_scale, sinks, soft_cap, window = options
    q_stride_t, q_stride_h, out_stride_t, out_stride_h = strides[0], strides[1], strides[2], strides[3]
    k_stride_p, k_stride_t, k_stride_h = strides[4], strides[5], strides[6]
    v_stride_p, v_stride_t, v_stride_h = strides[7], strides[8], strides[9]
    GROUP: tl.constexpr = NUM_QO_HEADS // NUM_KV_HEADS
    BLOCK_RUNS: tl.constexpr = BLOCK_N // RUN
    ROWS: tl.constexpr = BLOCK_M // SUBTILES  # of a subtile, which holds whole groups
    ENTRIES: tl.constexpr = ROWS // GROUP
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    w, p = tl.arange(0, SUBTILES), tl.arange(0, PRIVATE_N)
    d, dv = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_DIM_V)
    run_start, run_full, run_end = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    begin, end = tl.load(item + 3), tl.load(item + 4)
    local = m // ROWS * ENTRIES + m % ROWS // GROUP
    entry = begin + local
    used = (entry < end) & (m % ROWS < ENTRIES * GROUP)
    token = tl.load(queries + entry, mask=used, other=0)
    query_head = head * GROUP + m % ROWS % GROUP
    q_tile = load_queries(q, token, query_head, used, q_stride_t, q_stride_h, k_cache, HEAD_DIM, PADDED_DIM)
    scale = tl.load(logit_scale + head)
    state = empty_state(BLOCK_M, PADDED_DIM_V)
    far = tl.cast(head, tl.int64)  # heads may lie far apart
    k_head, v_head = k_cache + far * k_stride_h, v_cache + far * v_stride_h
    position = local
    if MASKED:
        position = tl.load(positions + token, mask=used, other=0)
    place = _column(runs, run_start, run_end, n // RUN, 0, BLOCK_RUNS)
    for at in tl.range(run_start, run_full, BLOCK_RUNS, num_stages=STAGES):
        page, offset = (place // PAGE_SIZE).to(tl.int64), place % PAGE_SIZE + n % RUN
        k_at, v_at = page * k_stride_p + offset * k_stride_t, page * v_stride_p + offset * v_stride_t
        keys = load_tile(k_head, k_at[None, :], d[:, None], True, HEAD_DIM, PADDED_DIM, False).to(q_tile.dtype)
        values = load_tile(v_head, v_at[:, None], dv[None, :], True, HEAD_DIM_V, PADDED_DIM_V, False).to(q_tile.dtype)
        state = _attend(state, q_tile, keys, values, True, scale, soft_cap, False, SOFT_CAP, PRECISION)
        place = _column(runs, at + BLOCK_RUNS, run_end, n // RUN, 0, BLOCK_RUNS)
    if SUBTILES == 1:
        state = _attend_masked(
            state, q_tile, local, position, n // RUN, n % RUN, runs, run_full, run_end, k_head, v_head,
            k_stride_p, k_stride_t, v_stride_p, v_stride_t, scale, soft_cap, window,
            BLOCK_RUNS, PAGE_SIZE, HEAD_DIM, HEAD_DIM_V, PADDED_DIM, PADDED_DIM_V, MASKED, SOFT_CAP,
            STAGES, PRECISION,
        )  # fmt: skip
    else:
        inner = _attend_masked(
            (
                tl.reshape(state[0], (SUBTILES, ROWS, PADDED_DIM_V)),
                tl.reshape(state[1], (SUBTILES, ROWS)),
                tl.reshape(state[2], (SUBTILES, ROWS)),
            ),
            tl.reshape(q_tile, (SUBTILES, ROWS, PADDED_DIM)), tl.reshape(local, (SUBTILES, ROWS)),
            tl.reshape(position, (SUBTILES, ROWS)), w[:, None] * (PRIVATE_N // RUN) + (p // RUN)[None, :],
            (p % RUN)[None, :] + tl.zeros_like(w)[:, None], runs, run_full, run_end, k_head, v_head,
            k_stride_p, k_stride_t, v_stride_p, v_stride_t, scale, soft_cap, window,
            SUBTILES * (PRIVATE_N // RUN), PAGE_SIZE, HEAD_DIM, HEAD_DIM_V, PADDED_DIM, PADDED_DIM_V, MASKED,
            SOFT_CAP, 2, PRECISION,
        )  # fmt: skip
        state = (
            tl.reshape(inner[0], (BLOCK_M, PADDED_DIM_V)),
            tl.reshape(inner[1], (BLOCK_M,)),
            tl.reshape(inner[2], (BLOCK_M,)),
        )
    if MERGE:
        if FOLLOWS:
            tl.extra.cuda.gdc_wait()  # the earlier launches' partials are complete from here on
        part = tl.load(parts + 2 * entry, mask=used, other=0)
        last = tl.load(parts + 2 * entry + 1, mask=used, other=0)
        most = tl.max(last - part, 0)
        state = _merge(state, part, last, most, query_head, partial, partial_lse, used, dv, NUM_QO_HEADS, HEAD_DIM_V)
    finish(
        state, token, query_head, tl.load(slots + entry, mask=used, other=0), used, dv, v_scale + head,
        (out, lse_out, partial, partial_lse), sinks, out_stride_t, out_stride_h, NUM_QO_HEADS, HEAD_DIM_V, SINKS,
        RETURN_LSE,
    )  # fmt: skip


@triton.jit
def decode_kernel(
    q, k_cache, v_cache, out, lse_out, partial, partial_lse,  # tensors
    items, counts, runs, queries, slots, parts, positions,  # the plan
    logit_scale, v_scale, sinks, soft_cap, window,  # options
    q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h,
    NUM_QO_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, RUN: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr, PRIVATE_N: tl.constexpr,
    MASKED: tl.constexpr, MERGE: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, RETURN_LSE: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
    BUCKET: tl.constexpr, ALSO: tl.constexpr, LEADS: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """The items of BUCKET, and of ALSO if that is none below 0; see `kernels.gpu`, and `TileList` for the arrays."""
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()
    first_item = tl.load(counts + BUCKET)
    num_items = tl.load(counts + BUCKET + 1) - first_item
    also, num_also = first_item, 0
    if ALSO >= 0:
        also = tl.load(counts + ALSO) - num_items
        num_also = tl.load(counts + ALSO + 1) - also - num_items
    for task in range(tl.program_id(0), (num_items + num_also) * NUM_KV_HEADS, tl.num_programs(0)):
        number = task // NUM_KV_HEADS
        compute_item(
            items + (number + tl.where(number < num_items, first_item, also)) * ITEM, task % NUM_KV_HEADS,
            (q, k_cache, v_cache, out, lse_out, partial, partial_lse), (runs, queries, slots, parts, positions),
            (logit_scale, v_scale, sinks, soft_cap, window),
            (q_stride_t, q_stride_h, out_stride_t, out_stride_h,
             k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h),
            NUM_QO_HEADS, NUM_KV_HEADS, PAGE_SIZE, RUN, HEAD_DIM, HEAD_DIM_V, PADDED_DIM, PADDED_DIM_V,
            BLOCK_M, BLOCK_N, SUBTILES, PRIVATE_N, MASKED, MERGE, SOFT_CAP, SINKS, RETURN_LSE, STAGES, PRECISION,
            FOLLOWS,
        )  # fmt: skip
    if FOLLOWS and tl.program_id(0) == 0:  # so that whatever waits for this launch also waits for those ahead of it
        tl.extra.cuda.gdc_wait()
