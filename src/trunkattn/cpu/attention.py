"""The CPU attention kernel: tiled attention with online softmax (FlashAttention), and the merge of partials (PAT §7).

A task is one work item for one KV head. Its query rows lie along the vector lanes, [head_dim, lanes], so keys and
values are used where they are in the paged cache, without a copy, whatever the page size: the register tile takes a
list of row offsets. Softmax statistics are per lane; every row's arithmetic is the same whatever rows lie beside it.
That is what makes batch-invariant plans possible.

Functions with one caller are inlined: Numba would compile each of them alone, and once more in its caller.
"""

from functools import cache
from typing import Any, NamedTuple

import numpy as np

from trunkattn.compiled import njit
from trunkattn.cpu.arguments import arguments_at, array_at
from trunkattn.cpu.block import (
    NEG_INF,
    Cache,
    Keys,
    Queries,
    Shape,
    attend_block,
    first_block,
    look_ahead,
    tokens_of_block,
    whole_tiles,
    workspace_at,
)
from trunkattn.cpu.convert import exp2
from trunkattn.cpu.microkernel import LANES, TILES
from trunkattn.planner.work_list import DIRECT, ITEM_COLUMNS, KV_END, KV_ROW, KV_START, QUERY_END, QUERY_START

_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)
_SCORE_KEYS = TILES.score_keys


class Work(NamedTuple):
    """A step's work list, flat; see `planner.work_list`. positions: of each query token in its sequence."""

    block_table: Any
    table_columns: int
    items: Any
    queries: Any
    slots: Any
    positions: Any


class Options(NamedTuple):
    """Arrays [num_kv_heads] of what logits and values are multiplied by; a soft cap or 0; sinks [num_sinks]."""

    logit_scale: Any
    v_scale: Any
    soft_cap: float
    sinks: Any
    num_sinks: int


class Outputs(NamedTuple):
    """Final rows and their lse, and the partial states that are merged; flat."""

    out: Any
    lse: Any
    partial: Any
    partial_lse: Any


@njit(inline="always")
def _keys_of(task, work, shape):
    """Keys of a task: its row of the block table, token range and KV head."""
    item = task // shape.num_kv_heads * ITEM_COLUMNS
    return Keys(
        work.block_table,
        np.int64(work.items[item + KV_ROW]) * work.table_columns,
        np.int64(work.items[item + KV_START]),
        np.int64(work.items[item + KV_END]),
        task % shape.num_kv_heads,
    )


@njit(inline="always")
def _load_queries(q, work, begin, end, head, shape, scale, lanes, ws):
    """ws.q[d, m] = q · scale, rows ordered by token, then head of the group; idle lanes are zero."""
    group = shape.num_qo_heads // shape.num_kv_heads
    for i in range(begin, end):
        token = np.int64(work.queries[i])
        for g in range(group):
            m = (i - begin) * group + g
            ws.positions[m] = work.positions[token]
            at = (token * shape.num_qo_heads + head * group + g) * shape.head_dim
            for d in range(shape.head_dim):
                ws.q[d * lanes + m] = q[at + d] * scale
    for d in range(shape.head_dim):
        for m in range((end - begin) * group, lanes):
            ws.q[d * lanes + m] = np.float32(0.0)


@njit(inline="always")
def _clear(ws, lanes, width):
    """The state of no key."""
    for m in range(lanes):
        ws.row_max[m] = NEG_INF
        ws.row_sum[m] = np.float32(0.0)
    for i in range(lanes * width):
        ws.acc[i] = np.float32(0.0)


@njit(inline="always")
def _run_task(task, following, shape, q, k_cache, v_cache, work, options, outputs, floats, ints):
    """One work item for one KV head: its partial states, or the output of queries that have no other item.

    `following` is the thread's next task, whose first keys are fetched while the last ones of this are used.
    """
    item = task // shape.num_kv_heads * ITEM_COLUMNS
    begin, end = np.int64(work.items[item + QUERY_START]), np.int64(work.items[item + QUERY_END])
    group = shape.num_qo_heads // shape.num_kv_heads
    rows = (end - begin) * group
    lanes = (rows + LANES - 1) // LANES * LANES
    width = (shape.head_dim_v + LANES - 1) // LANES * LANES
    ws = workspace_at(floats, ints, shape.head_dim, lanes, width)
    keys = _keys_of(task, work, shape)
    head = keys.head
    _load_queries(q, work, begin, end, head, shape, options.logit_scale[head], lanes, ws)
    _clear(ws, lanes, width)
    first_position = last_position = ws.positions[0]
    for m in range(1, rows):
        first_position = min(first_position, ws.positions[m])
        last_position = max(last_position, ws.positions[m])
    queries = Queries(rows, lanes, width, first_position, last_position)
    first, step = first_block(keys, shape.aligned_blocks), tokens_of_block(keys, shape.aligned_blocks)
    while first < keys.end:
        tokens = min(step, whole_tiles(keys.end - first))
        ahead, ahead_first, ahead_step = keys, first + step, step
        if ahead_first >= keys.end:
            ahead = _keys_of(following, work, shape)
            ahead_first = first_block(ahead, shape.aligned_blocks)
            ahead_step = tokens_of_block(ahead, shape.aligned_blocks)
        look_ahead(ws, tokens // _SCORE_KEYS, ahead, ahead_first, ahead_step, shape, k_cache, v_cache)
        attend_block(keys, first, tokens, queries, shape, k_cache, v_cache, ws, options.soft_cap)
        first += step
    for m in range(rows):
        query_head = head * group + m % group
        i = begin + m // group
        lse = ws.row_max[m] * _LN_2 + np.float32(np.log(ws.row_sum[m]))
        slot = np.int64(work.slots[i])
        if slot == DIRECT:
            token = np.int64(work.queries[i])
            v_scale = options.v_scale[head]
            _write(token, query_head, shape, ws.acc, m * width, ws.row_sum[m], lse, v_scale, outputs, options)
        else:
            to = (slot * shape.num_qo_heads + query_head) * shape.head_dim_v
            for d in range(shape.head_dim_v):
                outputs.partial[to + d] = ws.acc[m * width + d] / ws.row_sum[m]
            outputs.partial_lse[slot * shape.num_qo_heads + query_head] = lse


@njit(cached=False, error_model="numpy")
def _write(token, query_head, shape, acc, at, row_sum, lse, v_scale, outputs, options):
    """Final output of one row: normalised, value scale and sink applied.

    By NumPy's rules 0 / 0 is NaN in that row; by Python's it would end the batch.
    """
    factor = v_scale / row_sum
    if options.num_sinks > 0:  # an extra logit without a value
        factor *= np.float32(1.0) / (np.float32(1.0) + np.float32(np.exp(options.sinks[query_head] - lse)))
    row = token * shape.num_qo_heads + query_head
    for d in range(shape.head_dim_v):
        outputs.out[row * shape.head_dim_v + d] = acc[at + d] * factor
    outputs.lse[row] = lse


@njit(inline="always")
def _run_merge(i, head, shape, merge_queries, merge_indptr, outputs, options, acc):
    """Online-softmax merge of one query token's partials, in token order (PAT §7, RelayAttention §3.3)."""
    row_max = NEG_INF
    for slot in range(merge_indptr[i], merge_indptr[i + 1]):
        row_max = max(row_max, outputs.partial_lse[slot * shape.num_qo_heads + head])
    row_sum = np.float32(0.0)
    for d in range(shape.head_dim_v):
        acc[d] = np.float32(0.0)
    for slot in range(merge_indptr[i], merge_indptr[i + 1]):
        p = exp2((outputs.partial_lse[slot * shape.num_qo_heads + head] - row_max) * _LOG2_E)
        row_sum += p
        at = (slot * shape.num_qo_heads + head) * shape.head_dim_v
        for d in range(shape.head_dim_v):
            acc[d] += p * outputs.partial[at + d]
    v_scale = options.v_scale[head // (shape.num_qo_heads // shape.num_kv_heads)]
    lse = row_max + np.float32(np.log(row_sum))
    _write(np.int64(merge_queries[i]), head, shape, acc, 0, row_sum, lse, v_scale, outputs, options)


@njit(inline="always")
def _shape_of(a):
    return Shape(
        a.num_qo_heads, a.num_kv_heads, a.head_dim, a.head_dim_v, a.page_size, a.kv_kind, a.window,
        a.aligned_blocks != 0,
    )  # fmt: skip


@njit(inline="always")
def _options_of(a):
    return Options(
        array_at(a.logit_scale, np.float32),
        array_at(a.v_scale, np.float32),
        a.soft_cap,
        array_at(a.sinks, np.float32),
        a.num_sinks,
    )


@njit(inline="always")
def _outputs_of(a):
    return Outputs(
        array_at(a.out, np.float32),
        array_at(a.lse, np.float32),
        array_at(a.partial, np.float32),
        array_at(a.partial_lse, np.float32),
    )


@cache
def attention_kernel(kv_bits: type[np.generic]) -> Any:
    """The kernel of one thread's share of the work items, for caches of one NumPy type; see `cpu.threads`."""

    @njit(no_cfunc_wrapper=False, error_model="numpy", fastmath={"contract", "nsz"})
    def attend(arguments, thread):
        a = arguments_at(arguments)
        shape, options, outputs = _shape_of(a), _options_of(a), _outputs_of(a)
        k_elements, v_elements = array_at(a.k_cache, kv_bits), array_at(a.v_cache, kv_bits)
        k_cache = Cache(k_elements, a.k_cache, a.k_page_stride, a.k_token_stride, a.k_head_stride)
        v_cache = Cache(v_elements, a.v_cache, a.v_page_stride, a.v_token_stride, a.v_head_stride)
        work = Work(
            array_at(a.block_table, np.int32),
            a.table_columns,
            array_at(a.items, np.int32),
            array_at(a.queries, np.int32),
            array_at(a.slots, np.int32),
            array_at(a.positions, np.int32),
        )
        q = array_at(a.q, np.float32)
        floats, ints = a.floats + 4 * thread * a.thread_floats, a.ints + 8 * thread * a.thread_ints
        tasks, task_indptr = array_at(a.tasks, np.int32), array_at(a.task_indptr, np.int32)
        last = np.int64(task_indptr[thread + 1]) - 1
        for i in range(np.int64(task_indptr[thread]), last + 1):
            task, following = np.int64(tasks[i]), np.int64(tasks[min(i + 1, last)])
            _run_task(task, following, shape, q, k_cache, v_cache, work, options, outputs, floats, ints)

    return attend


@njit(no_cfunc_wrapper=False)
def merge_kernel(arguments, thread):
    """One thread's share of the merges; see `cpu.threads`."""
    a = arguments_at(arguments)
    shape, options, outputs = _shape_of(a), _options_of(a), _outputs_of(a)
    merge_queries, merge_indptr = array_at(a.merge_queries, np.int32), array_at(a.merge_indptr, np.int32)
    acc = array_at(a.floats + 4 * thread * a.thread_floats, np.float32)
    heads = shape.num_qo_heads
    total = a.num_merged * heads
    for i in range(total * thread // a.num_threads, total * (thread + 1) // a.num_threads):
        _run_merge(i // heads, i % heads, shape, merge_queries, merge_indptr, outputs, options, acc)
