"""Packed decode attention on a GPU (PAT §5.2–§7): one program computes one work item for one KV head.

Its rows are (query token, head of the group) pairs, its keys one run of pages that all those queries see. Rows that
have other pieces leave a partial state; a row's last piece may instead merge the partials that an earlier launch left
and write the final output (leaf-fused merge), so that leaves leave no partials and most merges need no launch.
"""

import triton
import triton.language as tl

from trunkattn.plan_format import DIRECT

_DIRECT = tl.constexpr(DIRECT)


@triton.jit
def _load_rows(pointer, offsets, mask, EXACT: tl.constexpr):
    """Rows of keys or values; `EXACT`: the width is the padded width, so columns need no mask."""
    return tl.load(pointer + offsets, mask=mask, other=0.0)


@triton.jit
def decode_kernel(
    q, k_cache, v_cache, out, lse_out, partial, partial_lse,  # tensors
    block_table, items, queries, slots, parts, positions, counts,  # the plan
    logit_scale, v_scale, sinks, soft_cap, window,  # options
    table_stride, q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h,
    CLASS: tl.constexpr, NUM_QO_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MASKED: tl.constexpr, MERGE: tl.constexpr,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, RETURN_LSE: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Items counts[CLASS] .. counts[CLASS + 1] - 1 of the plan, as many programs as there are; see `kernels.gpu`."""
    GROUP: tl.constexpr = NUM_QO_HEADS // NUM_KV_HEADS
    first_item = tl.load(counts + CLASS)
    num_tasks = (tl.load(counts + CLASS + 1) - first_item) * NUM_KV_HEADS
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d, dv = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_DIM_V)
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        item = items + (first_item + task // NUM_KV_HEADS) * 5
        head = task % NUM_KV_HEADS
        kv_row, kv_start, kv_end = tl.load(item), tl.load(item + 1), tl.load(item + 2)
        begin, end = tl.load(item + 3), tl.load(item + 4)
        entry = begin + m // GROUP
        used = entry < end
        token = tl.load(queries + entry, mask=used, other=0)
        slot = tl.load(slots + entry, mask=used, other=0)
        query_head = head * GROUP + m % GROUP
        q_at = token.to(tl.int64) * q_stride_t + query_head * q_stride_h
        q_tile = tl.load(q + q_at[:, None] + d[None, :], mask=used[:, None] & (d < HEAD_DIM)[None, :], other=0.0)
        scale = tl.load(logit_scale + head)
        if MASKED:
            position = tl.load(positions + token, mask=used, other=0)
        top = tl.full([BLOCK_M], -1e30, tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
        acc = tl.zeros([BLOCK_M, PADDED_DIM_V], tl.float32)
        pages = block_table + kv_row.to(tl.int64) * table_stride
        k_head, v_head = k_cache + head * k_stride_h, v_cache + head * v_stride_h
        for start in tl.range(kv_start, kv_end, BLOCK_N, num_stages=STAGES):
            tokens = start + n
            inside = tokens < kv_end
            page = tl.load(pages + tokens // PAGE_SIZE, mask=inside, other=0).to(tl.int64)
            k_at = page * k_stride_p + (tokens % PAGE_SIZE) * k_stride_t
            k_mask = inside[None, :] if HEAD_DIM == PADDED_DIM else inside[None, :] & (d < HEAD_DIM)[:, None]
            k_tile = tl.load(k_head + k_at[None, :] + d[:, None], mask=k_mask, other=0.0)
            scores = tl.dot(q_tile, k_tile.to(q_tile.dtype), input_precision=PRECISION) * scale
            if SOFT_CAP:
                bounded = 2.0 / (1.0 + tl.exp2(scores * (-2.8853900817779268 / soft_cap))) - 1.0
                scores = bounded * (soft_cap * 1.4426950408889634)
            seen = inside[None, :]
            if MASKED:
                seen = seen & (tokens[None, :] <= position[:, None]) & (tokens[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, -float("inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            weights = tl.exp2(scores - higher[:, None])
            rescale = tl.exp2(top - higher)
            total = total * rescale + tl.sum(weights, 1)
            v_at = page * v_stride_p + (tokens % PAGE_SIZE) * v_stride_t
            v_mask = inside[:, None] if HEAD_DIM_V == PADDED_DIM_V else inside[:, None] & (dv < HEAD_DIM_V)[None, :]
            v_tile = tl.load(v_head + v_at[:, None] + dv[None, :], mask=v_mask, other=0.0).to(q_tile.dtype)
            acc = tl.dot(weights.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision=PRECISION)
            top = higher
        if MERGE:
            part, last = tl.load(parts + 2 * entry, mask=used, other=0), tl.load(parts + 2 * entry + 1, mask=used, other=0)
            most = tl.max(last - part, 0)
            for i in range(0, most):
                here = used & (part + i < last)
                at = (part + i).to(tl.int64) * NUM_QO_HEADS + query_head
                other_top = tl.load(partial_lse + at, mask=here, other=-1e30) * 1.4426950408889634
                other = tl.load(
                    partial + at[:, None] * HEAD_DIM_V + dv[None, :],
                    mask=here[:, None] & (dv < HEAD_DIM_V)[None, :], other=0.0,
                )  # fmt: skip
                higher = tl.maximum(top, other_top)
                rescale, weight = tl.exp2(top - higher), tl.exp2(other_top - higher)
                total = total * rescale + weight
                acc = acc * rescale[:, None] + other * weight[:, None]
                top = higher
        natural = top * 0.6931471805599453 + tl.log(total)
        direct = used & (slot == _DIRECT)
        columns = (dv < HEAD_DIM_V)[None, :]
        result = acc / total[:, None]
        slot_at = slot.to(tl.int64) * NUM_QO_HEADS + query_head
        kept = used & (slot != _DIRECT)
        tl.store(partial + slot_at[:, None] * HEAD_DIM_V + dv[None, :], result, mask=kept[:, None] & columns)
        tl.store(partial_lse + slot_at, natural, mask=kept)
        result = result * tl.load(v_scale + head)
        if SINKS:
            sink = tl.load(sinks + query_head, mask=used, other=0.0).to(tl.float32)
            result = result / (1.0 + tl.exp2((sink - natural) * 1.4426950408889634))[:, None]
        out_at = token.to(tl.int64) * out_stride_t + query_head * out_stride_h
        tl.store(out + out_at[:, None] + dv[None, :], result.to(out.dtype.element_ty), mask=direct[:, None] & columns)
        if RETURN_LSE:
            tl.store(lse_out + token * NUM_QO_HEADS + query_head, natural, mask=direct)
