"""Merge of a query's partial states on a GPU (PAT §7; RelayAttention §3.3): one program per query token and head."""

import triton
import triton.language as tl

# Partials of a step, of few and of many. On an H100 steps of 8 alone take 1.6 µs more for 33 of a
# query, steps of 32 alone 1.4 to 1.9 more for two or three of each of 256 queries (one warp; of 16 in two warps both)
_FEW = tl.constexpr(8)
_MANY = tl.constexpr(32)


@triton.jit
def _add(state, partials, start, last, head, NUM_QO_HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr,
         PADDED_DIM_V: tl.constexpr, COUNT: tl.constexpr):  # fmt: skip
    """Adds up to COUNT partials, [start, last), to acc [Dv], maximum and sum of a query token and head."""
    acc, top, total = state
    partial, partial_lse = partials
    p, dv = tl.arange(0, COUNT), tl.arange(0, PADDED_DIM_V)
    here = start + p < last
    at = (start + p).to(tl.int64) * NUM_QO_HEADS + head
    lse = tl.load(partial_lse + at, mask=here, other=-1e30) * 1.4426950408889634
    states = tl.load(
        partial + at[:, None] * HEAD_DIM_V + dv[None, :], mask=here[:, None] & (dv < HEAD_DIM_V)[None, :], other=0.0
    )
    higher = tl.maximum(top, tl.max(lse, 0))
    weights = tl.where(here, tl.exp2(lse - higher), 0.0)
    rescale = tl.exp2(top - higher)
    return acc * rescale + tl.sum(states * weights[:, None], 0), higher, total * rescale + tl.sum(weights, 0)


@triton.jit
def merge_query(
    task, tensors, lists, options, strides,
    NUM_QO_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_DIM_V: tl.constexpr,
    SINKS: tl.constexpr, RETURN_LSE: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """One query token and head; its partials are taken in the order of their tokens."""
    out, lse_out, partial, partial_lse = tensors
    merge_queries, merge_ranges = lists
    v_scale, sinks = options
    out_stride_t, out_stride_h = strides
    dv = tl.arange(0, PADDED_DIM_V)
    merged, head = task // NUM_QO_HEADS, task % NUM_QO_HEADS
    token = tl.load(merge_queries + merged)
    first, last = tl.load(merge_ranges + 2 * merged), tl.load(merge_ranges + 2 * merged + 1)
    if FOLLOWS:
        tl.extra.cuda.gdc_wait()  # the earlier launches' partials are complete from here on; the plan was before them
    state = (tl.zeros([PADDED_DIM_V], tl.float32), -1e30, 0.0)
    partials = (partial, partial_lse)
    if last - first <= _FEW:
        state = _add(state, partials, first, last, head, NUM_QO_HEADS, HEAD_DIM_V, PADDED_DIM_V, _FEW)
    else:
        MANY: tl.constexpr = _MANY if PADDED_DIM_V <= 128 else _FEW  # or a launch of wide tiles has to spill
        for start in range(first, last, MANY):
            state = _add(state, partials, start, last, head, NUM_QO_HEADS, HEAD_DIM_V, PADDED_DIM_V, MANY)
    acc, top, total = state
    natural = top * 0.6931471805599453 + tl.log(total)
    result = acc / tl.where(total > 0, total, 1.0) * tl.load(v_scale + head // (NUM_QO_HEADS // NUM_KV_HEADS))
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32)
        result = result / (1.0 + tl.exp2((sink - natural) * 1.4426950408889634))
    out_at = token.to(tl.int64) * out_stride_t + head * out_stride_h
    tl.store(out + out_at + dv, result.to(out.dtype.element_ty), mask=dv < HEAD_DIM_V)
    if RETURN_LSE:
        tl.store(lse_out + token * NUM_QO_HEADS + head, natural)


@triton.jit
def merge_kernel(
    out, lse_out, partial, partial_lse, merge_queries, merge_ranges, counts, v_scale, sinks,
    out_stride_t, out_stride_h,
    COUNT_AT: tl.constexpr, NUM_QO_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    PADDED_DIM_V: tl.constexpr, SINKS: tl.constexpr, RETURN_LSE: tl.constexpr, FOLLOWS: tl.constexpr,
):  # fmt: skip
    """counts[COUNT_AT] query tokens."""
    for task in range(tl.program_id(0), tl.load(counts + COUNT_AT) * NUM_QO_HEADS, tl.num_programs(0)):
        merge_query(
            task, (out, lse_out, partial, partial_lse), (merge_queries, merge_ranges), (v_scale, sinks),
            (out_stride_t, out_stride_h), NUM_QO_HEADS, NUM_KV_HEADS, HEAD_DIM_V, PADDED_DIM_V, SINKS, RETURN_LSE,
            FOLLOWS,
        )  # fmt: skip
    if FOLLOWS and tl.program_id(0) == 0:  # with nothing to merge, too: what waits for this waits for those ahead of it
        tl.extra.cuda.gdc_wait()
