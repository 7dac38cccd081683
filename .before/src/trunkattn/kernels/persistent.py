"""A step in one launch: every tile's items, then, once all programs have arrived at a barrier, the merges (PAT §7)."""

import triton
import triton.language as tl

from trunkattn.kernels.decode import ITEM, compute_item
from trunkattn.kernels.merge_partials import merge_query


@triton.jit
def _barrier(counters):
    """Waits until every program of a cooperative launch is here; the last one to leave sets the counters back."""
    tl.debug_barrier()
    arrived = tl.atomic_add(counters, 1, sem="acq_rel") + 1
    while arrived < tl.num_programs(0):
        arrived = tl.atomic_add(counters, 0, sem="acquire")
    if tl.atomic_add(counters + 1, 1, sem="acq_rel") == tl.num_programs(0) - 1:
        tl.store(counters, 0)
        tl.store(counters + 1, 0)
    tl.debug_barrier()


@triton.jit
def _items_of_bucket(
    bucket, first, items, counts, tensors, plan, options, strides,
    NUM_QO_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, RUN: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SUBTILES: tl.constexpr, PRIVATE_N: tl.constexpr, STAGES: tl.constexpr,
    MASKED: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, RETURN_LSE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Every num_programs-th task from `first` on; returns where this program goes on in the next bucket."""
    begin, programs = tl.load(counts + bucket), tl.num_programs(0)
    tasks = (tl.load(counts + bucket + 1) - begin) * NUM_KV_HEADS
    for task in range(first, tasks, programs):
        compute_item(
            items + (begin + task // NUM_KV_HEADS) * ITEM, task % NUM_KV_HEADS, tensors, plan, options, strides,
            NUM_QO_HEADS, NUM_KV_HEADS, PAGE_SIZE, RUN, HEAD_DIM, HEAD_DIM_V, PADDED_DIM, PADDED_DIM_V,
            BLOCK_M, BLOCK_N, SUBTILES, PRIVATE_N, MASKED, False, SOFT_CAP, SINKS, RETURN_LSE, STAGES, PRECISION, False,
        )  # fmt: skip
    return (first + programs - tasks % programs) % programs


@triton.jit
def persistent_kernel(
    q, k_cache, v_cache, out, lse_out, partial, partial_lse,  # tensors
    items, counts, runs, queries, slots, parts, positions, merge_queries, merge_ranges,  # the plan
    logit_scale, v_scale, sinks, soft_cap, window, counters,  # options
    q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h,
    NUM_QO_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, RUN: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_DIM_V: tl.constexpr,
    HEIGHTS: tl.constexpr, LOW_M: tl.constexpr, LOW_N: tl.constexpr, LOW_SUBTILES: tl.constexpr,
    LOW_PRIVATE_N: tl.constexpr, LOW_STAGES: tl.constexpr, TALL_M: tl.constexpr, TALL_N: tl.constexpr,
    TALL_SUBTILES: tl.constexpr, TALL_PRIVATE_N: tl.constexpr, TALL_STAGES: tl.constexpr, MASKED: tl.constexpr,
    SOFT_CAP: tl.constexpr, SINKS: tl.constexpr, RETURN_LSE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """No item merges; see `TileList` for the arrays. HEIGHTS: 1, of low tiles alone, or 2."""
    tensors = (q, k_cache, v_cache, out, lse_out, partial, partial_lse)
    plan = (runs, queries, slots, parts, positions)
    options = (logit_scale, v_scale, sinks, soft_cap, window)
    strides = (
        q_stride_t, q_stride_h, out_stride_t, out_stride_h,
        k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h,
    )  # fmt: skip
    first = tl.program_id(0)
    if HEIGHTS > 1:
        first = _items_of_bucket(
            1, first, items, counts, tensors, plan, options, strides,
            NUM_QO_HEADS, NUM_KV_HEADS, PAGE_SIZE, RUN, HEAD_DIM, HEAD_DIM_V, PADDED_DIM, PADDED_DIM_V,
            TALL_M, TALL_N, TALL_SUBTILES, TALL_PRIVATE_N, TALL_STAGES, MASKED, SOFT_CAP, SINKS, RETURN_LSE, PRECISION,
        )  # fmt: skip
    _items_of_bucket(
        0, first, items, counts, tensors, plan, options, strides,
        NUM_QO_HEADS, NUM_KV_HEADS, PAGE_SIZE, RUN, HEAD_DIM, HEAD_DIM_V, PADDED_DIM, PADDED_DIM_V,
        LOW_M, LOW_N, LOW_SUBTILES, LOW_PRIVATE_N, LOW_STAGES, MASKED, SOFT_CAP, SINKS, RETURN_LSE, PRECISION,
    )  # fmt: skip
    merges = tl.load(counts + 2 * HEIGHTS + 1) * NUM_QO_HEADS
    if merges > 0:
        _barrier(counters)
        for task in range(tl.program_id(0), merges, tl.num_programs(0)):
            merge_query(
                task, (out, lse_out, partial, partial_lse), (merge_queries, merge_ranges), (v_scale, sinks),
                (out_stride_t, out_stride_h), NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM_V, PADDED_DIM_V, SINKS,
                RETURN_LSE, False,
            )  # fmt: skip
