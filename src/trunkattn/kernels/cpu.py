"""CPU executor of a work list: tiled attention with online softmax (FlashAttention; PAT §3.4 pack, forward, merge).

A task is one work item for one KV head. Its query rows lie along the vector lanes, [head_dim, rows], so keys and values
are used where they are in the paged cache, without a copy, whatever the page size: the register tile takes a list of
row addresses. Softmax statistics are per lane; every row's arithmetic is the same whatever rows lie beside it. That is
what makes batch-invariant plans possible.

Two other ways were measured on the same work (docs/performance.md): batched torch products with a gather, and
torch's own CPU flash kernel over the packs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray

from trunkattn.kernels.cpu_math import FLOAT32, as_float32, exp2, to_float
from trunkattn.kernels.cpu_tile import LANES, TILES, multiply_add_tile
from trunkattn.kernels.tile_table import BLOCK_TOKENS
from trunkattn.plan_format import DIRECT, KV_END, KV_ROW, KV_START, QUERY_END, QUERY_START, WorkList

_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)
_NOTHING = np.float32(-1e30)  # maximum of no logit: finite, so that differences are never NaN

_SCORE_KEYS = TILES.score_keys
_SCORE_LANES = TILES.score_vectors * LANES
_OUTPUT_ROWS = TILES.output_rows
_OUTPUT_LANES = TILES.output_vectors * LANES
_SCORES_WIDE = TILES.score_keys * 10000 + TILES.score_vectors * 100
_SCORES_NARROW = TILES.score_keys * 10000 + 100
_OUTPUT_TALL_WIDE = TILES.output_rows * 10000 + TILES.output_vectors * 100 + 1
_OUTPUT_TALL_NARROW = TILES.output_rows * 10000 + 101
_OUTPUT_ROW_WIDE = 10000 + TILES.output_vectors * 100 + 1
_OUTPUT_ROW_NARROW = 10101


class Shape(NamedTuple):
    """Sizes of one attention, and how the kernels read the cache (strides in elements)."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    kv_kind: int
    window: int
    aligned_blocks: bool  # blocks of keys start at multiples of BLOCK_TOKENS, whatever the item's first token


class Strides(NamedTuple):
    """Element strides of a cache [num_pages, page_size, num_kv_heads, head_dim], last dimension contiguous."""

    page: int
    token: int
    head: int


_SHAPE = len(Shape._fields)


@njit(cache=True)
def _shape(sizes):
    return Shape(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7] != 0)


@dataclass(frozen=True)
class CpuPlan:
    """A work list with its tasks dealt to threads. positions [num_query_tokens] int32: place in the sequence."""

    work: WorkList
    block_table: NDArray[np.int32]
    positions: NDArray[np.int32]
    tasks: NDArray[np.int32]  # item * num_kv_heads + head, by thread
    task_indptr: NDArray[np.int32]  # [num_threads + 1]
    max_rows: int  # query rows of the tallest item, padded to whole vectors


def prepare(work: WorkList, block_table: NDArray[np.int32], batch: tuple, shape: Shape, num_threads: int) -> CpuPlan:
    """Deals the tasks to threads, heaviest first to the least loaded. `batch`: seq_lens, query_start_loc (int32)."""
    seq_lens, query_start_loc = batch
    group = shape.num_qo_heads // shape.num_kv_heads
    positions, tasks, indptr, most = _deal(
        work.items, seq_lens, query_start_loc, shape.num_kv_heads, group, num_threads
    )
    return CpuPlan(work, block_table, positions, tasks, indptr, _padded(most))


def workspace_sizes(plan: CpuPlan, shape: Shape) -> tuple[int, int]:
    """float32 and int64 elements that each thread needs."""
    rows, values = plan.max_rows, _padded(shape.head_dim_v)
    floats = rows * (shape.head_dim + BLOCK_TOKENS + values + 3) + BLOCK_TOKENS * (shape.head_dim + values)
    return floats, shape.head_dim + 2 * rows + 4 * BLOCK_TOKENS


def _padded(count: int) -> int:
    return (count + LANES - 1) // LANES * LANES


@njit(cache=True)
def _deal(items, seq_lens, query_start_loc, num_kv_heads, group, num_threads):
    positions = np.empty(query_start_loc[-1], np.int32)
    for row in range(len(seq_lens)):
        first, last = query_start_loc[row], query_start_loc[row + 1]
        for token in range(first, last):
            positions[token] = seq_lens[row] - last + token
    num_tasks = len(items) * num_kv_heads
    owner = np.empty(num_tasks, np.int32)
    load = np.zeros(num_threads, np.int64)
    indptr = np.zeros(num_threads + 1, np.int32)
    most = 1
    for task in range(num_tasks):
        item = task // num_kv_heads
        rows = (items[item, QUERY_END] - items[item, QUERY_START]) * group
        most = max(most, rows)
        thread = np.argmin(load)
        owner[task] = thread
        indptr[thread + 1] += 1
        # 40: rows of arithmetic in the time of reading one key and value; 64: keys in the time of starting a task
        load[thread] += (np.int64(items[item, KV_END] - items[item, KV_START]) + 64) * (40 + rows)
    for thread in range(num_threads):
        indptr[thread + 1] += indptr[thread]
    fill = indptr[:-1].copy()
    tasks = np.empty(num_tasks, np.int32)
    for task in range(num_tasks):
        tasks[fill[owner[task]]] = task
        fill[owner[task]] += 1
    return positions, tasks, indptr, most


@njit(cache=True, fastmath={"contract", "nsz"})
def _scores(scores, keys, key_rows, q, q_rows, rows, depth):
    """scores[t, m] = keys[t] · q[:, m] for a block of keys."""
    for t in range(0, BLOCK_TOKENS, _SCORE_KEYS):
        m = 0
        while m + _SCORE_LANES <= rows:
            multiply_add_tile(scores, t * rows + m, rows, keys, key_rows, t, 1, q, q_rows, m, depth, _SCORES_WIDE)
            m += _SCORE_LANES
        while m < rows:
            multiply_add_tile(scores, t * rows + m, rows, keys, key_rows, t, 1, q, q_rows, m, depth, _SCORES_NARROW)
            m += LANES


@njit(cache=True, fastmath={"contract", "nsz"})
def _outputs(out, scores, lane, values, value_rows, used, rows, width):
    """out[m, :] += Σ_t scores[t, m] · values[t]."""
    keys = BLOCK_TOKENS
    for d in range(0, width // _OUTPUT_LANES * _OUTPUT_LANES, _OUTPUT_LANES):
        m = 0
        while m + _OUTPUT_ROWS <= used:
            at = m * width + d
            multiply_add_tile(out, at, width, scores, lane, m, rows, values, value_rows, d, keys, _OUTPUT_TALL_WIDE)
            m += _OUTPUT_ROWS
        while m < used:
            at = m * width + d
            multiply_add_tile(out, at, width, scores, lane, m, rows, values, value_rows, d, keys, _OUTPUT_ROW_WIDE)
            m += 1
    for d in range(width // _OUTPUT_LANES * _OUTPUT_LANES, width, LANES):
        m = 0
        while m + _OUTPUT_ROWS <= used:
            at = m * width + d
            multiply_add_tile(out, at, width, scores, lane, m, rows, values, value_rows, d, keys, _OUTPUT_TALL_NARROW)
            m += _OUTPUT_ROWS
        while m < used:
            at = m * width + d
            multiply_add_tile(out, at, width, scores, lane, m, rows, values, value_rows, d, keys, _OUTPUT_ROW_NARROW)
            m += 1


@njit(cache=True, fastmath={"contract", "nsz", "arcp"})
def _soft_cap(scores, count, cap):
    """cap · tanh(x / cap) on logits in base 2: tanh(y) = 1 - 2 e^-2|y| / (1 + e^-2|y|), with the sign of y."""
    for i in range(count):
        y = scores[i] / cap
        e = exp2(np.float32(-2.0) * _LOG2_E * abs(y))
        magnitude = (np.float32(1.0) - e) / (np.float32(1.0) + e)
        scores[i] = cap * _LOG2_E * (magnitude if y >= 0 else -magnitude)


@njit(cache=True)
def _mask(scores, rows, used, position, first, kv_range, window):
    """Removes what a row must not see: tokens outside the item, after its position, or before its window."""
    kv_start, kv_end = kv_range
    for t in range(BLOCK_TOKENS):
        token = first + t
        outside = token < kv_start or token >= kv_end
        for m in range(used):
            if outside or token > position[m] or token <= position[m] - window:
                scores[t * rows + m] = -np.inf


@njit(cache=True, fastmath={"contract", "nsz"})
def _online_softmax(scores, rows, top, total, rescale):
    """Scores become weights 2^(s - max); `rescale` is what earlier weights must be multiplied by."""
    for m in range(rows):
        rescale[m] = top[m]
    for t in range(BLOCK_TOKENS):
        line = t * rows
        for m in range(rows):
            top[m] = max(top[m], scores[line + m])
    for m in range(rows):
        rescale[m] = exp2(rescale[m] - top[m])
        total[m] *= rescale[m]
    for t in range(BLOCK_TOKENS):
        line = t * rows
        for m in range(rows):
            weight = exp2(scores[line + m] - top[m])
            scores[line + m] = weight
            total[m] += weight


@njit(cache=True)
def _block_rows(rows, pages, first, kv_range, page_size, strides, head):
    """Element offset of each key of a block; keys outside the item stand at the nearest one inside, and are masked."""
    kv_start, kv_end = kv_range
    for t in range(BLOCK_TOKENS):
        token = min(max(first + t, kv_start), kv_end - 1)
        page = np.int64(pages[token // page_size])
        rows[t] = page * strides.page + (token % page_size) * strides.token + head * strides.head


@njit(cache=True)
def _stage(staged, staged_rows, cache, cache_rows, width, padded, kind):
    """Copies a block to float32, padded to whole vectors with zeros."""
    for t in range(BLOCK_TOKENS):
        at = t * padded
        staged_rows[t] = at
        source = cache_rows[t]
        for d in range(width):
            staged[at + d] = to_float(cache[source + d], kind)
        for d in range(width, padded):
            staged[at + d] = np.float32(0.0)


@njit(cache=True)
def _load_queries(q, shape, scale, head, tokens, rows, q_lanes, positions, position):
    """q_lanes[d, m] = q · scale, rows ordered by token then head of the group; idle lanes are zero."""
    group = shape.num_qo_heads // shape.num_kv_heads
    used = len(tokens) * group
    for i in range(len(tokens)):
        for g in range(group):
            m = i * group + g
            position[m] = positions[tokens[i]]
            at = (np.int64(tokens[i]) * shape.num_qo_heads + head * group + g) * shape.head_dim
            for d in range(shape.head_dim):
                q_lanes[d * rows + m] = q[at + d] * scale
    for d in range(shape.head_dim):
        for m in range(used, rows):
            q_lanes[d * rows + m] = np.float32(0.0)
    return used


@njit(cache=True)
def _write(token, query_head, shape, state, target, sinks):
    """Final output of one row: normalised state, value scale and sink applied. state: acc, at, total, lse, v_scale."""
    acc, at, total, lse, v_scale = state
    out, out_lse = target
    factor = v_scale / total
    if len(sinks) > 0:  # an extra logit without a value
        factor *= np.float32(1.0) / (np.float32(1.0) + np.float32(np.exp(sinks[query_head] - lse)))
    to = (np.int64(token) * shape.num_qo_heads + query_head) * shape.head_dim_v
    for d in range(shape.head_dim_v):
        out[to + d] = acc[at + d] * factor
    out_lse[token, query_head] = lse


@njit(cache=True, fastmath={"contract", "nsz"})
def _run_task(task, shape, inputs, plan, options, outputs, floats, ints):
    """One work item for one KV head."""
    q, k_cache, v_cache, k_strides, v_strides = inputs
    block_table, items, queries, slots, positions = plan
    logit_scale, v_scale, soft_cap, sinks = options
    out, out_lse, partial, partial_lse = outputs
    item, head = task // shape.num_kv_heads, task % shape.num_kv_heads
    begin, end = items[item, QUERY_START], items[item, QUERY_END]
    group = shape.num_qo_heads // shape.num_kv_heads
    tokens = queries[begin:end]
    rows = (len(tokens) * group + LANES - 1) // LANES * LANES
    width = (shape.head_dim_v + LANES - 1) // LANES * LANES
    depth = shape.head_dim
    cut = np.cumsum(
        np.array(
            [
                depth * rows,
                BLOCK_TOKENS * rows,
                rows * width,
                rows,
                rows,
                rows,
                BLOCK_TOKENS * depth,
                BLOCK_TOKENS * width,
            ]
        )
    )
    q_lanes, scores, acc = floats[: cut[0]], floats[cut[0] : cut[1]], floats[cut[1] : cut[2]]
    top, total, rescale = floats[cut[2] : cut[3]], floats[cut[3] : cut[4]], floats[cut[4] : cut[5]]
    staged_k, staged_v = floats[cut[5] : cut[6]], floats[cut[6] : cut[7]]
    q_rows, lane = ints[:depth], ints[depth : depth + rows]
    position = ints[depth + rows : depth + 2 * rows]
    row_space = ints[depth + 2 * rows : depth + 2 * rows + 4 * BLOCK_TOKENS].reshape(4, BLOCK_TOKENS)
    for d in range(depth):
        q_rows[d] = d * rows
    for m in range(rows):
        lane[m] = m
    used = _load_queries(q, shape, logit_scale[head], head, tokens, rows, q_lanes, positions, position)
    top[:] = _NOTHING
    total[:] = np.float32(0.0)
    acc[:] = np.float32(0.0)
    kv_range = (np.int64(items[item, KV_START]), np.int64(items[item, KV_END]))
    pages = block_table[items[item, KV_ROW]]
    lowest, highest = position[:used].min(), position[:used].max()
    stage_v = shape.kv_kind != FLOAT32 or width != shape.head_dim_v
    k_rows, v_rows = 2 if shape.kv_kind != FLOAT32 else 0, 3 if stage_v else 1
    first = kv_range[0] // BLOCK_TOKENS * BLOCK_TOKENS if shape.aligned_blocks else kv_range[0]
    while first < kv_range[1]:
        last = first + BLOCK_TOKENS
        _block_rows(row_space[0], pages, first, kv_range, shape.page_size, k_strides, head)
        _block_rows(row_space[1], pages, first, kv_range, shape.page_size, v_strides, head)
        if shape.kv_kind != FLOAT32:
            _stage(staged_k, row_space[2], k_cache, row_space[0], depth, depth, shape.kv_kind)
        _scores(scores, as_float32(k_cache, staged_k), row_space[k_rows], q_lanes, q_rows, rows, depth)
        if soft_cap > 0:
            _soft_cap(scores, BLOCK_TOKENS * rows, soft_cap)
        if first < kv_range[0] or last > kv_range[1] or last - 1 > lowest or first <= highest - shape.window:
            _mask(scores, rows, used, position, first, kv_range, shape.window)
        _online_softmax(scores, rows, top, total, rescale)
        for m in range(used):
            if rescale[m] != np.float32(1.0):
                for d in range(width):
                    acc[m * width + d] *= rescale[m]
        if stage_v:
            _stage(staged_v, row_space[3], v_cache, row_space[1], shape.head_dim_v, width, shape.kv_kind)
        values = staged_v if stage_v else as_float32(v_cache, staged_v)
        _outputs(acc, scores, lane, values, row_space[v_rows], used, rows, width)
        first = last
    for m in range(used):
        query_head = head * group + m % group
        lse = top[m] * _LN_2 + np.float32(np.log(total[m]))
        slot = slots[begin + m // group]
        if slot == DIRECT:
            state = (acc, m * width, total[m], lse, v_scale[head])
            _write(tokens[m // group], query_head, shape, state, (out, out_lse), sinks)
        else:
            for d in range(shape.head_dim_v):
                partial[slot, query_head, d] = acc[m * width + d] / total[m]
            partial_lse[slot, query_head] = lse


@njit(cache=True)
def _merge(i, head, shape, merge, outputs, options, acc):
    """Online-softmax merge of one query token's partials, in token order (PAT §7, RelayAttention §3.3)."""
    merge_queries, merge_indptr = merge
    out, out_lse, partial, partial_lse = outputs
    _logit_scale, v_scale, _soft_cap, sinks = options
    top = _NOTHING
    for slot in range(merge_indptr[i], merge_indptr[i + 1]):
        top = max(top, partial_lse[slot, head])
    total = np.float32(0.0)
    acc[: shape.head_dim_v] = np.float32(0.0)
    for slot in range(merge_indptr[i], merge_indptr[i + 1]):
        weight = exp2((partial_lse[slot, head] - top) * _LOG2_E)
        total += weight
        for d in range(shape.head_dim_v):
            acc[d] += weight * partial[slot, head, d]
    group = shape.num_qo_heads // shape.num_kv_heads
    state = (acc, 0, total, top + np.float32(np.log(total)), v_scale[head // group])
    _write(merge_queries[i], head, shape, state, (out, out_lse), sinks)


@njit(cache=True)
def _run_tasks(thread, tasks, sizes, inputs, plan, options, outputs, floats, ints):
    """One thread's share of the work items."""
    task_list, task_indptr = tasks
    q, k_cache, v_cache = inputs
    shape = _shape(sizes)
    k_strides = Strides(sizes[_SHAPE], sizes[_SHAPE + 1], sizes[_SHAPE + 2])
    v_strides = Strides(sizes[_SHAPE + 3], sizes[_SHAPE + 4], sizes[_SHAPE + 5])
    caches = (q, k_cache, v_cache, k_strides, v_strides)
    for i in range(task_indptr[thread], task_indptr[thread + 1]):
        _run_task(task_list[i], shape, caches, plan, options, outputs, floats, ints)


@njit(cache=True)
def _run_merges(thread, num_threads, sizes, merge, outputs, options, floats):
    """One thread's share of the merges."""
    shape = _shape(sizes)
    heads = shape.num_qo_heads
    total = len(merge[0]) * heads
    for i in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        _merge(i // heads, i % heads, shape, merge, outputs, options, floats)


@njit(cache=True, parallel=True, nogil=True)
def _execute(
    sizes, q, k_cache, v_cache, table, items, queries, slots, positions, tasks, task_indptr,
    merge_queries, merge_indptr, logit_scale, v_scale, soft_cap, sinks, out, lse, partial, partial_lse, floats, ints,
):  # fmt: skip
    """The parallel loops; their bodies take flat arguments because a parallel loop cannot capture a named tuple."""
    num_threads = len(task_indptr) - 1
    for thread in prange(num_threads):
        options, outputs = (logit_scale, v_scale, soft_cap, sinks), (out, lse, partial, partial_lse)
        plan, inputs = (table, items, queries, slots, positions), (q, k_cache, v_cache)
        _run_tasks(thread, (tasks, task_indptr), sizes, inputs, plan, options, outputs, floats[thread], ints[thread])
    for thread in prange(num_threads):
        options, outputs = (logit_scale, v_scale, soft_cap, sinks), (out, lse, partial, partial_lse)
        _run_merges(thread, num_threads, sizes, (merge_queries, merge_indptr), outputs, options, floats[thread])


class Options(NamedTuple):
    """logit_scale, v_scale [num_kv_heads] float32; soft_cap 0: none; sinks [num_qo_heads] float32, or empty."""

    logit_scale: NDArray[np.float32]
    v_scale: NDArray[np.float32]
    soft_cap: np.float32
    sinks: NDArray[np.float32]


def flat(cache: torch.Tensor, dtype: torch.dtype) -> tuple[NDArray, Strides]:
    """A cache of any strides (last dimension contiguous) as a flat array, and its strides."""
    pages, tokens, heads, width = cache.shape
    strides = Strides(
        *(stride if size > 1 else 0 for stride, size in zip(cache.stride()[:3], cache.shape[:3], strict=True))
    )
    span = (pages - 1) * strides.page + (tokens - 1) * strides.token + (heads - 1) * strides.head + width
    return cache.as_strided((span,), (1,)).view(dtype).numpy(), strides


def execute(
    plan: CpuPlan,
    shape: Shape,
    inputs: tuple[NDArray, NDArray, NDArray, Strides, Strides],
    options: Options,
    outputs: tuple[NDArray, NDArray, NDArray, NDArray],
    workspace: tuple[NDArray, NDArray],
) -> None:
    """Runs a plan.

    inputs: q (flat float32), keys, values and their strides. outputs: out (flat), lse, partial, partial_lse.
    """
    q, k_cache, v_cache, k_strides, v_strides = inputs
    work = plan.work
    sizes = np.array([*shape, *k_strides, *v_strides], np.int64)
    _execute(
        sizes, q, k_cache, v_cache, plan.block_table, work.items, work.queries, work.slots, plan.positions, plan.tasks,
        plan.task_indptr, work.merge_queries, work.merge_indptr, *options, *outputs, *workspace,
    )  # fmt: skip
