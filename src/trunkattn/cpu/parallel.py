"""CPU executor of a work list (PAT §3.4: pack, forward, merge): deals tasks to threads and runs them."""

from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.cpu.arguments import ARGUMENTS, address_of
from trunkattn.cpu.attention import attention_kernel, merge_kernel
from trunkattn.cpu.block import Shape, padded
from trunkattn.cpu.microkernel import LANES
from trunkattn.cpu.threads import call_on_threads, kernel_address
from trunkattn.planner.work_list import KV_END, KV_START, QUERY_END, QUERY_START, WorkList

# The planner's unit of load is one query row × one key. Fetching a key and its value takes the time of so many rows:
_FETCH_ROWS = 16
# and beginning and ending a task that of so many rows × keys:
_TASK_LOAD = 600


@dataclass(frozen=True)
class CpuPlan:
    """A work list with its tasks dealt to threads. positions [num_query_tokens] int32: place in the sequence."""

    work: WorkList
    block_table: NDArray[np.int32]
    positions: NDArray[np.int32]
    tasks: NDArray[np.int32]  # item * num_kv_heads + head, by thread
    task_indptr: NDArray[np.int32]  # [num_threads + 1]
    max_lanes: int  # query rows of the tallest item, padded to whole vectors
    arguments: NDArray[np.void]  # of the kernels, those that no layer changes


class Layer(NamedTuple):
    """One layer's tensors: q and out contiguous float32, lse float32, caches of any strides.

    kv_bits: the dtype through which NumPy reads the caches' bits.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    kv_bits: torch.dtype
    out: torch.Tensor
    lse: torch.Tensor


class Options(NamedTuple):
    """logit_scale, v_scale [num_kv_heads] float32; soft_cap 0: none; sinks [num_qo_heads] float32, or empty."""

    logit_scale: NDArray[np.float32]
    v_scale: NDArray[np.float32]
    soft_cap: float
    sinks: NDArray[np.float32]


class Workspace(NamedTuple):
    """What a run writes besides its results. floats, ints: [num_threads, ...], see `block.workspace_sizes`.

    partial [num_slots, num_qo_heads, head_dim_v], partial_lse [num_slots, num_qo_heads].
    """

    floats: NDArray[np.float32]
    ints: NDArray[np.int64]
    partial: NDArray[np.float32]
    partial_lse: NDArray[np.float32]


class Strides(NamedTuple):
    """Element strides of a cache [num_pages, page_size, num_kv_heads, head_dim], last dimension contiguous."""

    page: int
    token: int
    head: int


def prepare(
    work: WorkList,
    block_table: NDArray[np.int32],
    seq_lens: NDArray[np.int32],
    query_start_loc: NDArray[np.int32],
    shape: Shape,
    num_threads: int,
) -> CpuPlan:
    """Deals the tasks to threads, heaviest first to the least loaded."""
    group = shape.num_qo_heads // shape.num_kv_heads
    positions, tasks, indptr, most = _deal(
        work.items, seq_lens, query_start_loc, shape.num_kv_heads, group, num_threads
    )
    arguments = np.zeros((), ARGUMENTS)
    arrays = {
        "block_table": block_table,
        "items": work.items,
        "queries": work.queries,
        "slots": work.slots,
        "positions": positions,
        "tasks": tasks,
        "task_indptr": indptr,
        "merge_queries": work.merge_queries,
        "merge_indptr": work.merge_indptr,
    }
    for name, array in arrays.items():
        arguments[name] = address_of(array)
    for name, value in zip(shape._fields, shape, strict=True):
        arguments[name] = value
    arguments["table_columns"] = block_table.shape[1]
    arguments["num_merged"] = len(work.merge_queries)
    arguments["num_threads"] = num_threads
    return CpuPlan(work, block_table, positions, tasks, indptr, padded(most), arguments)


@njit
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
        thread = 0
        for other in range(1, num_threads):
            if load[other] < load[thread]:
                thread = other
        owner[task] = thread
        indptr[thread + 1] += 1
        lanes = (rows + LANES - 1) // LANES * LANES
        load[thread] += np.int64(items[item, KV_END] - items[item, KV_START]) * (lanes + _FETCH_ROWS) + _TASK_LOAD
    fill = np.empty(num_threads, np.int32)
    for thread in range(num_threads):
        fill[thread] = indptr[thread]
        indptr[thread + 1] += indptr[thread]
    tasks = np.empty(num_tasks, np.int32)
    for task in range(num_tasks):
        tasks[fill[owner[task]]] = task
        fill[owner[task]] += 1
    return positions, tasks, indptr, most


def strides_of(cache: torch.Tensor) -> Strides:
    """A cache's strides, 0 where there is one page, token or head."""
    return Strides(
        *(stride if size > 1 else 0 for stride, size in zip(cache.stride()[:3], cache.shape[:3], strict=True))
    )


def flat(cache: torch.Tensor, dtype: torch.dtype) -> tuple[NDArray, Strides]:
    """A cache of any strides (last dimension contiguous) as a flat array, and its strides."""
    pages, tokens, heads, width = cache.shape
    strides = strides_of(cache)
    span = (pages - 1) * strides.page + (tokens - 1) * strides.token + (heads - 1) * strides.head + width
    span = span if cache.numel() else 0
    return cache.as_strided((span,), (1,)).view(dtype).numpy(), strides


# NumPy's type of a cache's bits, by torch's.
_NUMPY_TYPES = MappingProxyType({torch.float32: np.float32, torch.uint16: np.uint16, torch.uint8: np.uint8})


def execute(plan: CpuPlan, layer: Layer, options: Options, workspace: Workspace) -> None:
    """Runs a plan: writes `layer.out` and `layer.lse`."""
    arguments = plan.arguments.copy()
    for name, tensor in (
        ("q", layer.q), ("k_cache", layer.k_cache), ("v_cache", layer.v_cache), ("out", layer.out), ("lse", layer.lse),
    ):  # fmt: skip
        arguments[name] = tensor.data_ptr()
    for prefix, kv in (("k", layer.k_cache), ("v", layer.v_cache)):
        for name, stride in zip(Strides._fields, strides_of(kv), strict=True):
            arguments[f"{prefix}_{name}_stride"] = stride
    arrays = {"logit_scale": options.logit_scale, "v_scale": options.v_scale, "sinks": options.sinks}
    for name, array in {**arrays, **workspace._asdict()}.items():
        arguments[name] = address_of(array)
    arguments["soft_cap"], arguments["num_sinks"] = options.soft_cap, len(options.sinks)
    arguments["thread_floats"], arguments["thread_ints"] = workspace.floats.shape[1], workspace.ints.shape[1]
    num_threads, address = len(plan.task_indptr) - 1, address_of(arguments)
    call_on_threads(_attention_address(layer.kv_bits), address, num_threads)
    if len(plan.work.merge_queries):
        call_on_threads(_merge_address(), address, num_threads)


@cache
def _attention_address(kv_bits: torch.dtype) -> int:
    return kernel_address(attention_kernel(_NUMPY_TYPES[kv_bits]))


@cache
def _merge_address() -> int:
    return kernel_address(merge_kernel)
