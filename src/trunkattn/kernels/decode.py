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
_ITEM_COLUMNS = tl.constexpr(ITEM_COLUMNS)
_NOTHING = tl.constexpr(-1e30)  # maximum of no logit: finite, so that differences are never NaN
_LOG2_E = tl.constexpr(1.4426950408889634)
_LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _load(base, rows, columns, inside, WIDTH: tl.constexpr, PADDED: tl.constexpr, MASK_ROWS: tl.constexpr):
    """A tile of keys or values; masks only what needs one, because masked loads cost address registers."""
    pointers = base + rows + columns
    if WIDTH != PADDED:
        return tl.load(pointers, mask=inside & (columns < WIDTH), other=0.0)
    elif MASK_ROWS:
        return tl.load(pointers, mask=inside & (columns >= 0), other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _cap(scores, soft_cap):
    """Logits to soft_cap · tanh(logit / soft_cap), in base 2."""
    return (2.0 / (1.0 + tl.exp2(scores * (-2.0 * _LOG2_E / soft_cap))) - 1.0) * (soft_cap * _LOG2_E)


@triton.jit
def _merge(state, part, last, most, query_head, partial, partial_lse, used, dv,
           NUM_QO_HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr):  # fmt: skip
    """Adds the partials in slots [part, last) of each row to its state."""
    acc, top, total = state
    for i in range(0, most):
        here = used & (part + i < last)
        at = (part + i).to(tl.int64) * NUM_QO_HEADS + query_head
        other_top = tl.load(partial_lse + at, mask=here, other=_NOTHING) * _LOG2_E
        columns = here[:, None] & (dv < HEAD_DIM_V)[None, :]
        other = tl.load(partial + at[:, None] * HEAD_DIM_V + dv[None, :], mask=columns, other=0.0)
        higher = tl.maximum(top, other_top)
        rescale, weight = tl.exp2(top - higher), tl.where(here, tl.exp2(other_top - higher), 0.0)
        total = total * rescale + weight
        acc = acc * rescale[:, None] + other * weight[:, None]
        top = higher
    return acc, top, total


@triton.jit
def decode_kernel(
    q, k_cache, v_cache, out, lse_out, partial, partial_lse,  # tensors
    items, runs, queries, slots, parts, positions, counts,  # the plan
    logit_scale, v_scale, sinks, soft_cap, window,  # options
    q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h,
    BUCKET: tl.constexpr, NUM_QO_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    RUN: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_DIM: tl.constexpr,
    PADDED_DIM_V: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr,
    MERGE: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, RETURN_LSE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Items counts[BUCKET] .. counts[BUCKET + 1] - 1; see `kernels.gpu` for the launch, `TileList` for the arrays."""
    if OVERLAP and not MERGE:
        tl.extra.cuda.gdc_launch_dependents()
    GROUP: tl.constexpr = NUM_QO_HEADS // NUM_KV_HEADS
    BLOCK_RUNS: tl.constexpr = BLOCK_N // RUN
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d, dv = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_DIM_V)
    first_item = tl.load(counts + BUCKET)
    num_tasks = (tl.load(counts + BUCKET + 1) - first_item) * NUM_KV_HEADS
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        item = items + (first_item + task // NUM_KV_HEADS) * _ITEM_COLUMNS
        head = task % NUM_KV_HEADS
        run_start, run_full, run_end = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        begin, end = tl.load(item + 3), tl.load(item + 4)
        local = m // GROUP
        entry = begin + local
        used = entry < end
        token = tl.load(queries + entry, mask=used, other=0)
        query_head = head * GROUP + m % GROUP
        q_at = (token.to(tl.int64) * q_stride_t + query_head * q_stride_h)[:, None]
        q_tile = _load(q, q_at, d[None, :], used[:, None], HEAD_DIM, PADDED_DIM, True)
        scale = tl.load(logit_scale + head)
        top = tl.full([BLOCK_M], _NOTHING, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, PADDED_DIM_V], tl.float32)
        k_head, v_head = k_cache + head * k_stride_h, v_cache + head * v_stride_h
        for at in tl.range(run_start, run_full, BLOCK_RUNS, num_stages=STAGES):
            place = tl.load(runs + (at + n // RUN) * 3) + n % RUN
            page, offset = (place // PAGE_SIZE).to(tl.int64), place % PAGE_SIZE
            k_at = (page * k_stride_p + offset * k_stride_t)[None, :]
            k_tile = _load(k_head, k_at, d[:, None], True, HEAD_DIM, PADDED_DIM, False).to(q_tile.dtype)
            scores = tl.dot(q_tile, k_tile, input_precision=PRECISION) * scale
            if SOFT_CAP:
                scores = _cap(scores, soft_cap)
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            rescale = tl.exp2(top - higher)
            total = total * rescale + tl.sum(weights, 1)
            v_at = (page * v_stride_p + offset * v_stride_t)[:, None]
            v_tile = _load(v_head, v_at, dv[None, :], True, HEAD_DIM_V, PADDED_DIM_V, False).to(q_tile.dtype)
            acc = tl.dot(weights.to(q_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
            top = higher
        for at in tl.range(run_full, run_end, BLOCK_RUNS, num_stages=STAGES):
            listed = at + n // RUN < run_end
            place = tl.load(runs + (at + n // RUN) * 3, mask=listed, other=0) + n % RUN
            rows = tl.load(runs + (at + n // RUN) * 3 + 1, mask=listed, other=0)
            inside = n % RUN < rows >> 16
            page, offset = (place // PAGE_SIZE).to(tl.int64), place % PAGE_SIZE
            k_at = (page * k_stride_p + offset * k_stride_t)[None, :]
            k_tile = _load(k_head, k_at, d[:, None], inside[None, :], HEAD_DIM, PADDED_DIM, True).to(q_tile.dtype)
            scores = tl.dot(q_tile, k_tile, input_precision=PRECISION) * scale
            if SOFT_CAP:
                scores = _cap(scores, soft_cap)
            low = tl.where(inside, rows & 255, 256)
            seen = (local[:, None] >= low[None, :]) & (local[:, None] < (rows >> 8 & 255)[None, :])
            if MASKED:
                position = tl.load(positions + token, mask=used, other=0)[:, None]
                where = (tl.load(runs + (at + n // RUN) * 3 + 2, mask=listed, other=0) + n % RUN)[None, :]
                seen = seen & (where <= position) & (where > position - window)
            scores = tl.where(seen, scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            rescale = tl.exp2(top - higher)
            total = total * rescale + tl.sum(weights, 1)
            v_at = (page * v_stride_p + offset * v_stride_t)[:, None]
            v_tile = _load(v_head, v_at, dv[None, :], inside[:, None], HEAD_DIM_V, PADDED_DIM_V, True).to(q_tile.dtype)
            acc = tl.dot(weights.to(q_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
            top = higher
        if MERGE:
            if OVERLAP:
                tl.extra.cuda.gdc_wait()  # the earlier launch's partials are complete from here on
            part = tl.load(parts + 2 * entry, mask=used, other=0)
            last = tl.load(parts + 2 * entry + 1, mask=used, other=0)
            most = tl.max(last - part, 0)
            acc, top, total = _merge(
                (acc, top, total),
                part,
                last,
                most,
                query_head,
                partial,
                partial_lse,
                used,
                dv,
                NUM_QO_HEADS,
                HEAD_DIM_V,
            )
        slot = tl.load(slots + entry, mask=used, other=0)
        columns = (dv < HEAD_DIM_V)[None, :]
        result = acc / tl.where(total > 0, total, 1.0)[:, None]  # a row may see nothing of its item
        natural = tl.where(total > 0, top * _LN_2 + tl.log(tl.where(total > 0, total, 1.0)), _NOTHING)
        kept = used & (slot != _DIRECT)
        slot_at = slot.to(tl.int64) * NUM_QO_HEADS + query_head
        tl.store(partial + slot_at[:, None] * HEAD_DIM_V + dv[None, :], result, mask=kept[:, None] & columns)
        tl.store(partial_lse + slot_at, natural, mask=kept)
        direct = used & (slot == _DIRECT)
        result *= tl.load(v_scale + head)
        if SINKS:
            sink = tl.load(sinks + query_head, mask=used, other=0.0).to(tl.float32)
            result /= (1.0 + tl.exp2((sink - natural) * _LOG2_E))[:, None]
        out_at = token.to(tl.int64) * out_stride_t + query_head * out_stride_h
        tl.store(out + out_at[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=direct[:, None] & columns)
        if RETURN_LSE:
            tl.store(lse_out + token * NUM_QO_HEADS + query_head, natural, mask=direct)
