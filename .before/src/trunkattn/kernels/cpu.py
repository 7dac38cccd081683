"""CPU executor of a work list (PAT §3.4: pack, forward, merge): deals tasks to threads and runs them.

Two other ways to do the same work were measured (docs/performance.md): batched torch products with a gather, and
torch's own CPU flash kernel over the packs.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numba import njit, prange
from numpy.typing import NDArray

from trunkattn.kernels.cpu_task import SHAPE_FIELDS, Shape, Strides, run_merge, run_task, shape_of
from trunkattn.kernels.cpu_threads import set_threads
from trunkattn.kernels.cpu_tile import LANES, TILES
from trunkattn.kernels.tile_table import BLOCK_TOKENS
from trunkattn.plan_format import KV_END, KV_START, QUERY_END, QUERY_START, WorkList


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
    return floats, shape.head_dim + 2 * rows + 4 * BLOCK_TOKENS + BLOCK_TOKENS // TILES.score_keys * shape.head_dim


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
        # 16: rows of arithmetic in the time of fetching a key and a value; 600: row × key products in that of a task
        lanes = (rows + LANES - 1) // LANES * LANES
        load[thread] += np.int64(items[item, KV_END] - items[item, KV_START]) * (lanes + 16) + 600
    for thread in range(num_threads):
        indptr[thread + 1] += indptr[thread]
    fill = indptr[:-1].copy()
    tasks = np.empty(num_tasks, np.int32)
    for task in range(num_tasks):
        tasks[fill[owner[task]]] = task
        fill[owner[task]] += 1
    return positions, tasks, indptr, most


@njit(cache=True)
def _run_tasks(thread, tasks, sizes, inputs, plan, options, outputs, floats, ints):
    """One thread's share of the work items."""
    task_list, task_indptr = tasks
    q, k_cache, v_cache = inputs
    shape = shape_of(sizes)
    k_strides = Strides(sizes[SHAPE_FIELDS], sizes[SHAPE_FIELDS + 1], sizes[SHAPE_FIELDS + 2])
    v_strides = Strides(sizes[SHAPE_FIELDS + 3], sizes[SHAPE_FIELDS + 4], sizes[SHAPE_FIELDS + 5])
    caches = (k_cache, v_cache, k_strides, v_strides)
    last = task_indptr[thread + 1] - 1
    for i in range(task_indptr[thread], last + 1):
        run_task(task_list[i], task_list[min(i + 1, last)], shape, q, caches, plan, options, outputs, (floats, ints))


@njit(cache=True)
def _run_merges(thread, num_threads, sizes, merge, outputs, options, floats):
    """One thread's share of the merges."""
    shape = shape_of(sizes)
    heads = shape.num_qo_heads
    total = len(merge[0]) * heads
    for i in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        run_merge(i // heads, i % heads, shape, merge, outputs, options, floats)


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
    span = span if cache.numel() else 0
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
    set_threads(len(plan.task_indptr) - 1)
    sizes = np.array([*shape, *k_strides, *v_strides], np.int64)
    _execute(
        sizes, q, k_cache, v_cache, plan.block_table, work.items, work.queries, work.slots, plan.positions, plan.tasks,
        plan.task_indptr, work.merge_queries, work.merge_indptr, *options, *outputs, *workspace,
    )  # fmt: skip
