"""FlashAttention for prompt chunks over the paged cache (FlashAttention §3.1; RelayAttention §3.2 for shared prefixes).

One program computes one item of a work list for one KV head. Its rows are (query token, head of the group) pairs; it
streams the item's range of KV, finding pages in the block table, with an online softmax. Keys that all rows see need
no mask and come first; then the rest: the diagonal, the edge of a window, what is left of the range.
"""

import triton
import triton.language as tl

from trunkattn.kernels.decode import ITEM, cap, empty_state, finish, load_in_halves, load_queries, load_tile
from trunkattn.plan_format import KV_END, KV_ROW, KV_START, QUERY_END, QUERY_START

_KV_ROW, _KV_START, _KV_END = tl.constexpr(KV_ROW), tl.constexpr(KV_START), tl.constexpr(KV_END)
_QUERY_START, _QUERY_END = tl.constexpr(QUERY_START), tl.constexpr(QUERY_END)


@triton.jit
def _pages_of(pages, at, columns, n, PAGE_SIZE: tl.constexpr, RUN: tl.constexpr, RUNS: tl.constexpr):
    """Page of each key of the block at token `at`, which holds RUNS runs of keys of one page each."""
    if RUNS > 4:
        column = (at + n // RUN * RUN) // PAGE_SIZE
        return load_in_halves(pages + column, column < columns)
    page = tl.zeros_like(n)  # as scalars: a thread then keeps one address per run
    for i in tl.static_range(RUNS):
        column = (at + i * RUN) // PAGE_SIZE
        page = tl.where(n // RUN == i, load_in_halves(pages + column, column < columns), page)
    return page


@triton.jit
def _places(pages, at, n, PAGE_SIZE: tl.constexpr, RUN: tl.constexpr):
    """(page, place in it) of each key of a block; a block begins at a multiple of RUN."""
    if RUN == PAGE_SIZE:
        return pages.to(tl.int64), n % RUN
    return pages.to(tl.int64), (at + n // RUN * RUN) % PAGE_SIZE + n % RUN


@triton.jit
def _attend(state, q_tile, keys, values, seen, scale, soft_cap,
            MASK: tl.constexpr, SOFT_CAP: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """One step of the online softmax. The scale comes after the maximum, so that scaling and subtraction are one
    instruction."""
    acc, top, total = state
    scores = tl.dot(q_tile, keys, input_precision=PRECISION)
    if SOFT_CAP:
        scores, scale = cap(scores * scale, soft_cap), 1.0
    if MASK:
        scores = tl.where(seen, scores, tl.where(scale < 0, float("inf"), -float("inf")))
    higher = tl.max(scores, 1)
    if scale < 0:
        higher = tl.min(scores, 1)
    higher = tl.maximum(top, higher * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    rescale = tl.exp2(top - higher)
    total = total * rescale + tl.sum(weights, 1)
    acc = tl.dot(weights.to(values.dtype), values, acc * rescale[:, None], input_precision=PRECISION)
    return acc, higher, total


@triton.jit
def prefill_item(
    item, head, tensors, plan, options, strides,
    NUM_QO_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, RUN: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr,
    RETURN_LSE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One item for one KV head. tensors, plan, options, strides: as `prefill_kernel` groups its arguments."""
    q, k_cache, v_cache, out, lse_out, partial, partial_lse = tensors
    block_table, table_stride, queries, slots, positions = plan
    logit_scale, v_scale, sinks, soft_cap, window = options
    q_stride_t, q_stride_h, out_stride_t, out_stride_h = strides[0], strides[1], strides[2], strides[3]
    k_stride_p, k_stride_t, k_stride_h = strides[4], strides[5], strides[6]
    v_stride_p, v_stride_t, v_stride_h = strides[7], strides[8], strides[9]
    GROUP: tl.constexpr = NUM_QO_HEADS // NUM_KV_HEADS
    RUNS: tl.constexpr = BLOCK_N // RUN
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    d, dv = tl.arange(0, PADDED_DIM), tl.arange(0, PADDED_DIM_V)
    kv_start, kv_end = tl.load(item + _KV_START), tl.load(item + _KV_END)
    entry = tl.load(item + _QUERY_START) + m // GROUP
    used = (entry < tl.load(item + _QUERY_END)) & (m < BLOCK_M // GROUP * GROUP)
    token = tl.load(queries + entry, mask=used, other=0)
    position = tl.load(positions + token, mask=used, other=0)
    query_head = head * GROUP + m % GROUP
    q_tile = load_queries(q, token, query_head, used, q_stride_t, q_stride_h, k_cache, HEAD_DIM, PADDED_DIM)
    scale = tl.load(logit_scale + head)
    scale = tl.where(tl.abs(scale) < 1e-37, 1e-37, scale)  # a masked score, which is infinite, is to stay so
    state = empty_state(BLOCK_M, PADDED_DIM_V)
    far = tl.cast(head, tl.int64)  # heads may lie far apart
    k_head, v_head = k_cache + far * k_stride_h, v_cache + far * v_stride_h
    pages = block_table + tl.load(item + _KV_ROW).to(tl.int64) * table_stride
    columns = (kv_end + PAGE_SIZE - 1) // PAGE_SIZE
    # blocks, counted from `start`: `lead` with a mask, then `full` without one, then the rest with one
    start = kv_start // RUN * RUN
    lowest, highest = tl.min(tl.where(used, position, kv_end), 0), tl.max(position, 0)
    lead = (tl.maximum(kv_start, highest - window + 1) - start + BLOCK_N - 1) // BLOCK_N
    full = tl.maximum(tl.minimum(kv_end, lowest + 1) - start - lead * BLOCK_N, 0) // BLOCK_N
    begin, end = start + lead * BLOCK_N, start + (lead + full) * BLOCK_N
    page = _pages_of(pages, begin, columns, n, PAGE_SIZE, RUN, RUNS)
    for at in tl.range(begin, end, BLOCK_N, num_stages=STAGES):
        of_page, place = _places(page, at, n, PAGE_SIZE, RUN)
        k_at, v_at = of_page * k_stride_p + place * k_stride_t, of_page * v_stride_p + place * v_stride_t
        keys = load_tile(k_head, k_at[None, :], d[:, None], True, HEAD_DIM, PADDED_DIM, False).to(q_tile.dtype)
        values = load_tile(v_head, v_at[:, None], dv[None, :], True, HEAD_DIM_V, PADDED_DIM_V, False).to(q_tile.dtype)
        state = _attend(state, q_tile, keys, values, True, scale, soft_cap, False, SOFT_CAP, PRECISION)
        page = _pages_of(pages, at + BLOCK_N, columns, n, PAGE_SIZE, RUN, RUNS)
    page = _pages_of(pages, tl.where(lead > 0, start, end), columns, n, PAGE_SIZE, RUN, RUNS)
    for block in tl.range(0, (kv_end - start + BLOCK_N - 1) // BLOCK_N - full, num_stages=STAGES):
        at = start + (block + tl.where(block < lead, 0, full)) * BLOCK_N
        of_page, place = _places(page, at, n, PAGE_SIZE, RUN)
        where = at + n
        inside = (where >= kv_start) & (where < kv_end)
        k_at, v_at = of_page * k_stride_p + place * k_stride_t, of_page * v_stride_p + place * v_stride_t
        keys = load_tile(k_head, k_at[None, :], d[:, None], inside[None, :], HEAD_DIM, PADDED_DIM, True)
        values = load_tile(v_head, v_at[:, None], dv[None, :], inside[:, None], HEAD_DIM_V, PADDED_DIM_V, True)
        seen = inside[None, :] & (where[None, :] <= position[:, None])
        seen = seen & (where[None, :] > position[:, None] - window)
        state = _attend(state, q_tile, keys.to(q_tile.dtype), values.to(q_tile.dtype), seen, scale, soft_cap,
                        True, SOFT_CAP, PRECISION)  # fmt: skip
        following = start + (block + 1 + tl.where(block + 1 < lead, 0, full)) * BLOCK_N
        page = _pages_of(pages, following, columns, n, PAGE_SIZE, RUN, RUNS)
    finish(
        state, token, query_head, tl.load(slots + entry, mask=used, other=0), used, dv, v_scale + head,
        (out, lse_out, partial, partial_lse), sinks, out_stride_t, out_stride_h, NUM_QO_HEADS, HEAD_DIM_V, SINKS,
        RETURN_LSE,
    )  # fmt: skip


@triton.jit
def prefill_kernel(
    q, k_cache, v_cache, out, lse_out, partial, partial_lse,  # tensors
    items, counts, block_table, queries, slots, positions,  # the plan
    logit_scale, v_scale, sinks, soft_cap, window,  # options
    table_stride, q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h,
    NUM_QO_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, PAGE_SIZE: tl.constexpr, RUN: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, PADDED_DIM: tl.constexpr, PADDED_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SOFT_CAP: tl.constexpr, SINKS: tl.constexpr,
    RETURN_LSE: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """counts[0] items, as `even_rounds` orders them; see `PrefillList` for the arrays. A program takes its turn from
    the front in one round and from the back in the next, if that is full, so that all end at about the same time."""
    if LEADS:
        tl.extra.cuda.gdc_launch_dependents()
    tasks, programs = tl.load(counts) * NUM_KV_HEADS, tl.num_programs(0)
    for first in range(0, tasks, programs):
        turn = tl.program_id(0)
        backwards = (first // programs % 2 == 1) & (first + programs <= tasks)
        task = first + tl.where(backwards, programs - 1 - turn, turn)
        if task < tasks:
            prefill_item(
                items + task // NUM_KV_HEADS * ITEM, task % NUM_KV_HEADS,
                (q, k_cache, v_cache, out, lse_out, partial, partial_lse),
                (block_table, table_stride, queries, slots, positions),
                (logit_scale, v_scale, sinks, soft_cap, window),
                (q_stride_t, q_stride_h, out_stride_t, out_stride_h,
                 k_stride_p, k_stride_t, k_stride_h, v_stride_p, v_stride_t, v_stride_h),
                NUM_QO_HEADS, NUM_KV_HEADS, PAGE_SIZE, RUN, HEAD_DIM, HEAD_DIM_V, PADDED_DIM, PADDED_DIM_V,
                BLOCK_M, BLOCK_N, SOFT_CAP, SINKS, RETURN_LSE, STAGES, PRECISION,
            )  # fmt: skip
