"""The CPU attention kernel: tiled attention with online softmax (FlashAttention), and the merge of partials (PAT §7).

A task is one work item for one KV head. Its query rows lie along the vector lanes, [head_dim, lanes]. The register tile
takes a list of row offsets, so keys and values are used in place in the paged cache for any page size. Softmax
statistics are per lane, so the arithmetic of a row does not depend on the other rows, which makes batch-invariant plans
possible.

Functions with one caller are inlined, because otherwise Numba would compile each of them twice.
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
    look_ahead,
    whole_tiles,
    workspace_at,
)
from trunkattn.cpu.convert import exp2
from trunkattn.cpu.microkernel import LANES, TILES, bits_to_float
from trunkattn.cpu.tuning import BLOCK_TOKENS
from trunkattn.numerics import LN_2, LOG2_E
from trunkattn.planner.work_list import DIRECT, ITEM_COLUMNS, KV_END, KV_ROW, KV_START, QUERY_END, QUERY_START

_LOG2_E, _LN_2 = np.float32(LOG2_E), np.float32(LN_2)
_SCORE_KEYS = TILES.score_keys


class Work(NamedTuple):
    """A step's work list: addresses of int32 arrays, see `planner.work_list`. positions: of each query token."""

    block_table: int
    table_columns: int
    items: int
    queries: int
    partial_slots: int
    positions: int


class Options(NamedTuple):
    """Addresses of float32 arrays: what logits and values are multiplied by, [num_kv_heads]; sinks [num_sinks]."""

    logit_scale: int
    v_scale: int
    sinks: int
    num_sinks: int


class Outputs(NamedTuple):
    """Addresses of float32 arrays: final rows and their lse, and the partial results that are merged."""

    out: int
    lse: int
    partial: int
    partial_lse: int


@njit(inline="always")
def _keys_of(task, work, shape):
    """The keys of a task. Its blocks have about equal sizes, so that no short one is left over, or, with
    `aligned_blocks`, begin at multiples of BLOCK_TOKENS."""
    item = array_at(work.items + 4 * ITEM_COLUMNS * (task // shape.num_kv_heads), np.int32)
    pages = work.block_table + 4 * np.int64(item[KV_ROW]) * work.table_columns
    start, end = np.int64(item[KV_START]), np.int64(item[KV_END])
    first, step = start // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS
    if not shape.aligned_blocks:
        blocks = (end - start + BLOCK_TOKENS - 1) // BLOCK_TOKENS
        first, step = start, whole_tiles((end - start + blocks - 1) // blocks)
    return Keys(pages=pages, start=start, end=end, head=task % shape.num_kv_heads, first=first, step=step)


@njit(inline="always")
def _load_queries(q_at, work, begin, end, head, shape, scale, lanes, ws):
    """Computes ws.q[d, m] = q · scale. Rows m are ordered by token, then by head of the group. Idle lanes are zero.

    Returns the least and the greatest position of the rows.
    """
    q, lane_q = array_at(q_at, np.float32), array_at(ws.q, np.float32)
    queries, positions = array_at(work.queries, np.int32), array_at(work.positions, np.int32)
    lane_positions = array_at(ws.positions, np.int64)
    group = shape.num_qo_heads // shape.num_kv_heads
    first_position = last_position = np.int64(positions[queries[begin]])
    for i in range(begin, end):
        token = np.int64(queries[i])
        position = np.int64(positions[token])
        first_position, last_position = min(first_position, position), max(last_position, position)
        for g in range(group):
            m = (i - begin) * group + g
            lane_positions[m] = position
            at = (token * shape.num_qo_heads + head * group + g) * shape.head_dim
            for d in range(shape.head_dim):
                lane_q[d * lanes + m] = q[at + d] * scale
    for d in range(shape.head_dim):
        for m in range((end - begin) * group, lanes):
            lane_q[d * lanes + m] = np.float32(0.0)
    return first_position, last_position


@njit(inline="always")
def _clear(ws, lanes, width):
    """Sets the softmax state of rows that have seen no key."""
    row_max, row_sum = array_at(ws.row_max, np.float32), array_at(ws.row_sum, np.float32)
    acc = array_at(ws.acc, np.float32)
    for m in range(lanes):
        row_max[m] = NEG_INF
        row_sum[m] = np.float32(0.0)
    for i in range(lanes * width):
        acc[i] = np.float32(0.0)


@njit(inline="always")
def _attend_keys(keys, following, queries, shape, k_cache, v_cache, kv_bits, ws, soft_cap):
    """Attends to all blocks of a task. following: the keys of the thread's next task, whose first block is fetched
    during the last one."""
    itemsize = array_at(k_cache.address, kv_bits).itemsize
    first = keys.first
    while first < keys.end:
        tokens = min(keys.step, whole_tiles(keys.end - first))
        ahead = keys
        ahead_first = first + keys.step
        if ahead_first >= keys.end:
            ahead = following
            ahead_first = following.first
        look_ahead(ws, tokens // _SCORE_KEYS, ahead, ahead_first, shape, k_cache, v_cache, itemsize)
        attend_block(keys, first, tokens, queries, shape, k_cache, v_cache, kv_bits, ws, soft_cap)
        first += keys.step


@njit(inline="always")
def _finish(work, begin, head, rows, width, shape, ws, options, outputs):
    """Writes the rows of a task: the output if all KV of the row is in this task, otherwise a partial."""
    group = shape.num_qo_heads // shape.num_kv_heads
    queries, slots = array_at(work.queries, np.int32), array_at(work.partial_slots, np.int32)
    row_max, row_sum = array_at(ws.row_max, np.float32), array_at(ws.row_sum, np.float32)
    v_scale, partial_lse = array_at(options.v_scale, np.float32), array_at(outputs.partial_lse, np.float32)
    for m in range(rows):
        acc_at = ws.acc + 4 * m * width
        query_head = head * group + m % group
        i, total = begin + m // group, row_sum[m]
        lse = row_max[m] * _LN_2 + np.float32(np.log(total))
        slot = np.int64(slots[i])
        if slot == DIRECT:
            token = np.int64(queries[i])
            _write(token, query_head, shape, acc_at, total, lse, v_scale[head], outputs, options)
        else:
            row = slot * shape.num_qo_heads + query_head
            acc, partial = array_at(acc_at, np.float32), _row_at(outputs.partial, row, shape)
            if total == 0:  # every logit of this part is -inf, and the other parts have the weight
                total = np.float32(1.0)
            for d in range(shape.head_dim_v):
                partial[d] = acc[d] / total
            partial_lse[row] = lse


@njit(inline="always")
def _row_at(address, row, shape):
    """A row of values, counted from 0.

    Numba lets a negative index count from the end. Unless it can rule negative indices out, LLVM does not vectorise, so
    each row is an array of its own.
    """
    return array_at(address + 4 * row * shape.head_dim_v, np.float32)


@njit(inner=True, error_model="numpy")
def _write(token, query_head, shape, acc_at, row_sum, lse, v_scale, outputs, options):
    """Writes the final output of one row, with the value scale and the sink.

    NumPy's error model makes 0 / 0 a NaN in that row. Python's would raise an error for the whole batch.
    """
    sinks, out_lse = array_at(options.sinks, np.float32), array_at(outputs.lse, np.float32)
    factor = v_scale / row_sum
    if options.num_sinks > 0:  # a sink is an extra logit without a value
        factor *= np.float32(1.0) / (np.float32(1.0) + np.float32(np.exp(sinks[query_head] - lse)))
    row = token * shape.num_qo_heads + query_head
    acc, out = array_at(acc_at, np.float32), _row_at(outputs.out, row, shape)
    for d in range(shape.head_dim_v):
        out[d] = acc[d] * factor
    out_lse[row] = lse


@njit(inline="always")
def _merge(token, slots, head, shape, outputs, options, acc_at):
    """Merges the partials of one query token for one head, in token order (PAT §7, RelayAttention §3.3).

    slots: the first partial slot and one past the last.
    """
    partial_lse = array_at(outputs.partial_lse, np.float32)
    v_scale, acc = array_at(options.v_scale, np.float32), array_at(acc_at, np.float32)
    row_max = NEG_INF
    for slot in range(slots[0], slots[1]):
        row_max = max(row_max, partial_lse[slot * shape.num_qo_heads + head])
    row_sum = np.float32(0.0)
    for d in range(shape.head_dim_v):
        acc[d] = np.float32(0.0)
    for slot in range(slots[0], slots[1]):
        row = slot * shape.num_qo_heads + head
        p = exp2((partial_lse[row] - row_max) * _LOG2_E)
        row_sum += p
        partial = _row_at(outputs.partial, row, shape)
        for d in range(shape.head_dim_v):
            acc[d] += p * partial[d]
    kv_head = head // (shape.num_qo_heads // shape.num_kv_heads)
    lse = row_max + np.float32(np.log(row_sum))
    _write(token, head, shape, acc_at, row_sum, lse, v_scale[kv_head], outputs, options)


@njit(inline="always")
def _shape_of(a):
    return Shape(
        num_qo_heads=a.num_qo_heads,
        num_kv_heads=a.num_kv_heads,
        head_dim=a.head_dim,
        head_dim_v=a.head_dim_v,
        page_size=a.page_size,
        kv_kind=a.kv_kind,
        window=a.window,
        aligned_blocks=a.aligned_blocks != 0,
    )


@cache
def attention_kernel(kv_bits: Any) -> Any:
    """The kernel of one thread's share of the tasks, for caches of a NumPy type; see `cpu.threads`.

    While a task's last keys are used, the first of the thread's next task are fetched.
    """

    @njit(by_address=True, error_model="numpy", fastmath={"contract", "nsz"})
    def attend(arguments, thread):
        a = arguments_at(arguments)
        shape = _shape_of(a)
        options = Options(a.logit_scale, a.v_scale, a.sinks, a.num_sinks)
        outputs = Outputs(a.out, a.lse, a.partial, a.partial_lse)
        work = Work(
            block_table=a.block_table,
            table_columns=a.table_columns,
            items=a.items,
            queries=a.queries,
            partial_slots=a.partial_slots,
            positions=a.positions,
        )
        k_cache = Cache(a.k_cache, a.k_page_stride, a.k_token_stride, a.k_head_stride)
        v_cache = Cache(a.v_cache, a.v_page_stride, a.v_token_stride, a.v_head_stride)
        floats, ints = a.floats + 4 * thread * a.thread_floats, a.ints + 8 * thread * a.thread_ints
        q, soft_cap = a.q, bits_to_float(np.int32(a.soft_cap))
        logit_scale = array_at(options.logit_scale, np.float32)
        tasks, task_indptr = array_at(a.tasks, np.int32), array_at(a.task_indptr, np.int32)
        group = shape.num_qo_heads // shape.num_kv_heads
        width = (shape.head_dim_v + LANES - 1) // LANES * LANES
        begin_task, end_task = np.int64(task_indptr[thread]), np.int64(task_indptr[thread + 1])
        for t in range(begin_task, end_task):
            task = np.int64(tasks[t])
            keys = _keys_of(task, work, shape)
            keys_after = _keys_of(np.int64(tasks[min(t + 1, end_task - 1)]), work, shape)
            item = array_at(work.items + 4 * ITEM_COLUMNS * (task // shape.num_kv_heads), np.int32)
            begin, end = np.int64(item[QUERY_START]), np.int64(item[QUERY_END])
            rows = (end - begin) * group
            lanes = (rows + LANES - 1) // LANES * LANES
            ws = workspace_at(floats, ints, shape.head_dim, lanes, width)
            scale = logit_scale[keys.head]
            positions = _load_queries(q, work, begin, end, keys.head, shape, scale, lanes, ws)
            _clear(ws, lanes, width)
            queries = Queries(rows, lanes, width, positions[0], positions[1])
            _attend_keys(keys, keys_after, queries, shape, k_cache, v_cache, kv_bits, ws, soft_cap)
            _finish(work, begin, keys.head, rows, width, shape, ws, options, outputs)

    return attend


@njit(by_address=True)
def merge_kernel(arguments, thread):
    """One thread's share of the merges; see `cpu.threads`."""
    a = arguments_at(arguments)
    shape = _shape_of(a)
    options = Options(a.logit_scale, a.v_scale, a.sinks, a.num_sinks)
    outputs = Outputs(a.out, a.lse, a.partial, a.partial_lse)
    merge_queries, merge_indptr = array_at(a.merge_queries, np.int32), array_at(a.merge_indptr, np.int32)
    acc_at = a.floats + 4 * thread * a.thread_floats
    heads = shape.num_qo_heads
    total = a.num_merged * heads
    for i in range(total * thread // a.num_threads, total * (thread + 1) // a.num_threads):
        token = i // heads
        slots = (np.int64(merge_indptr[token]), np.int64(merge_indptr[token + 1]))
        _merge(np.int64(merge_queries[token]), slots, i % heads, shape, outputs, options, acc_at)
