"""Executes a work list on a CPU (PAT §3.4: pack, forward, merge): deals tasks to threads and runs them."""

from array import array
from functools import cache
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.cpu.arguments import LayerArguments, PlanArguments, WorkspaceArguments, address_of
from trunkattn.cpu.attention import attention_kernel, merge_kernel
from trunkattn.cpu.block import Shape, workspace_sizes
from trunkattn.cpu.microkernel import LANES
from trunkattn.cpu.threads import call_on_threads, kernel_address
from trunkattn.planner.planner import StepTables
from trunkattn.planner.work_list import KV_END, KV_START, QUERY_END, QUERY_START, WorkList

# The unit of load is one query row × one key. To fetch a key and its value takes as long as 16 rows of arithmetic.
_FETCH_ROWS = 16
# To begin and end a task takes as long as 600 units.
_TASK_LOAD = 600
_LINE_FLOATS = 16  # float32 numbers of a cache line


class CpuPlan(NamedTuple):
    """A work list with its tasks dealt to threads."""

    work: WorkList
    block_table: NDArray[np.int32]
    positions: NDArray[np.int32]  # [num_query_tokens] position of each query token in its sequence
    tasks: NDArray[np.int32]  # item * num_kv_heads + head, by thread
    task_indptr: NDArray[np.int32]  # [num_threads + 1]
    max_lanes: int  # query rows of the tallest item, padded to whole vectors
    arguments: PlanArguments


class Layer(NamedTuple):
    """One layer's tensors: q and out contiguous float32, lse float32, caches of any strides.

    kv_bits: the dtype with which NumPy reads the bits of the caches.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    kv_bits: torch.dtype
    out: torch.Tensor
    lse: torch.Tensor


class Options:
    """The scales, soft cap and sinks of a layer.

    logit_scale, v_scale: [num_kv_heads] float32. soft_cap: 0 for none. sinks: [num_qo_heads] float32, or empty.
    """

    def __init__(
        self,
        logit_scale: NDArray[np.float32],
        v_scale: NDArray[np.float32],
        soft_cap: float,
        sinks: NDArray[np.float32],
    ) -> None:
        self._arrays = (logit_scale, v_scale, sinks)  # kept alive, because `arguments` has their addresses
        cap_bits = int(np.float32(soft_cap).view(np.int32))
        self.arguments = {
            "logit_scale": address_of(logit_scale),
            "v_scale": address_of(v_scale),
            "sinks": address_of(sinks),
            "num_sinks": len(sinks),
            "soft_cap": cap_bits,
        }


class Workspace:
    """Scratch memory of a run, for tiles of up to `lanes` padded query rows and for `num_slots` partials."""

    def __init__(self, num_threads: int, lanes: int, num_slots: int, shape: Shape) -> None:
        self.lanes, self.num_slots = lanes, num_slots
        floats, ints = workspace_sizes(lanes, shape)
        floats = -(-floats // _LINE_FLOATS) * _LINE_FLOATS
        states = num_slots * shape.num_qo_heads
        self._arrays = (  # what the addresses point to
            # torch aligns to cache lines
            torch.empty(num_threads * floats, dtype=torch.float32, device="cpu").numpy(),
            np.empty(num_threads * ints, np.int64),
            np.empty(states * shape.head_dim_v, np.float32),
            np.empty(states, np.float32),
        )
        at = [address_of(array) for array in self._arrays]
        self.arguments = WorkspaceArguments(
            floats=at[0], ints=at[1], partial=at[2], partial_lse=at[3], thread_floats=floats, thread_ints=ints
        )


class Strides(NamedTuple):
    """Element strides of a cache [num_pages, page_size, num_kv_heads, head_dim], last dimension contiguous."""

    page: int
    token: int
    head: int


class _Lists(NamedTuple):
    """The arrays of a work list, and the tables that it was made for."""

    items: NDArray[np.int32]
    queries: NDArray[np.int32]
    partial_slots: NDArray[np.int32]
    merge_queries: NDArray[np.int32]
    merge_indptr: NDArray[np.int32]
    block_table: NDArray[np.int32]
    seq_lens: NDArray[np.int32]
    query_start_loc: NDArray[np.int32]


class _Dealt(NamedTuple):
    """What a plan has beside its work list; see `CpuPlan`."""

    positions: NDArray[np.int32]
    tasks: NDArray[np.int32]
    task_indptr: NDArray[np.int32]
    max_lanes: int
    arguments: PlanArguments


def prepare(work: WorkList, batch: StepTables, shape: Shape, num_threads: int) -> CpuPlan:
    """Deals the tasks to threads: the heaviest first, each to the thread with the least load."""
    lists = _Lists(
        items=work.items,
        queries=work.queries,
        partial_slots=work.partial_slots,
        merge_queries=work.merge_queries,
        merge_indptr=work.merge_indptr,
        block_table=batch.block_table,
        seq_lens=batch.seq_lens,
        query_start_loc=batch.query_start_loc,
    )
    dealt: _Dealt = _prepare(lists, shape, num_threads)
    return CpuPlan(
        work=work,
        block_table=batch.block_table,
        positions=dealt.positions,
        tasks=dealt.tasks,
        task_indptr=dealt.task_indptr,
        max_lanes=dealt.max_lanes,
        arguments=dealt.arguments,
    )


@njit(inner=True)
def _positions_of(seq_lens, query_start_loc):
    """[num_query_tokens] the position of each query token in its sequence."""
    positions = np.empty(query_start_loc[-1], np.int32)
    for row in range(len(seq_lens)):
        first, last = query_start_loc[row], query_start_loc[row + 1]
        for token in range(first, last):
            positions[token] = seq_lens[row] - last + token
    return positions


@njit(inner=True)
def _by_thread(owner, num_threads):
    """The tasks by thread, in their order, and where each thread's tasks begin. owner: the thread of each task."""
    indptr = np.zeros(num_threads + 1, np.int32)
    for thread in owner:
        indptr[thread + 1] += 1
    fill = np.empty(num_threads, np.int32)
    for thread in range(num_threads):
        fill[thread] = indptr[thread]
        indptr[thread + 1] += indptr[thread]
    tasks = np.empty(len(owner), np.int32)
    for task in range(len(owner)):
        tasks[fill[owner[task]]] = task
        fill[owner[task]] += 1
    return tasks, indptr


@njit(inner=True)
def _deal(items, shape, num_threads):
    """(the thread of each task, the lanes of the tallest item)."""
    num_kv_heads, group = shape.num_kv_heads, shape.num_qo_heads // shape.num_kv_heads
    owner = np.empty(len(items) * num_kv_heads, np.int32)
    load = np.zeros(num_threads, np.int64)
    max_lanes = np.int64(LANES)
    for task in range(len(owner)):
        item = task // num_kv_heads
        rows = (items[item, QUERY_END] - items[item, QUERY_START]) * group
        lanes = (rows + LANES - 1) // LANES * LANES
        max_lanes = max(max_lanes, lanes)
        thread = 0
        for other in range(1, num_threads):
            if load[other] < load[thread]:
                thread = other
        owner[task] = thread
        load[thread] += np.int64(items[item, KV_END] - items[item, KV_START]) * (lanes + _FETCH_ROWS) + _TASK_LOAD
    return owner, max_lanes


@njit
def _prepare(lists, shape, num_threads):
    """Compiled, because Python takes as long to find one array's address as this takes for all of them."""
    positions = _positions_of(lists.seq_lens, lists.query_start_loc)
    owner, max_lanes = _deal(lists.items, shape, num_threads)
    tasks, task_indptr = _by_thread(owner, num_threads)
    arguments = PlanArguments(
        block_table=lists.block_table.ctypes.data,
        items=lists.items.ctypes.data,
        queries=lists.queries.ctypes.data,
        partial_slots=lists.partial_slots.ctypes.data,
        positions=positions.ctypes.data,
        tasks=tasks.ctypes.data,
        task_indptr=task_indptr.ctypes.data,
        merge_queries=lists.merge_queries.ctypes.data,
        merge_indptr=lists.merge_indptr.ctypes.data,
        table_columns=lists.block_table.shape[1],
        num_merged=len(lists.merge_queries),
        num_threads=num_threads,
        num_qo_heads=shape.num_qo_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        head_dim_v=shape.head_dim_v,
        page_size=shape.page_size,
        kv_kind=shape.kv_kind,
        window=shape.window,
        aligned_blocks=shape.aligned_blocks,
    )
    return _Dealt(positions, tasks, task_indptr, max_lanes, arguments)


def strides_of(cache: torch.Tensor) -> Strides:
    """A cache's strides. The stride of an axis of size 1 is 0."""
    page, token, head, _ = cache.stride()
    pages, tokens, heads, _ = cache.shape
    return Strides(page if pages > 1 else 0, token if tokens > 1 else 0, head if heads > 1 else 0)


# NumPy's type of a cache's bits, by torch's.
_NUMPY_TYPES = MappingProxyType({torch.float32: np.float32, torch.uint16: np.uint16, torch.uint8: np.uint8})


def execute(plan: CpuPlan, layer: Layer, options: Options, workspace: Workspace) -> None:
    """Runs a plan: writes `layer.out` and `layer.lse`."""
    keys, values = strides_of(layer.k_cache), strides_of(layer.v_cache)
    of_layer = LayerArguments(
        q=layer.q.data_ptr(),
        k_cache=layer.k_cache.data_ptr(),
        v_cache=layer.v_cache.data_ptr(),
        out=layer.out.data_ptr(),
        lse=layer.lse.data_ptr(),
        k_page_stride=keys.page,
        k_token_stride=keys.token,
        k_head_stride=keys.head,
        v_page_stride=values.page,
        v_token_stride=values.token,
        v_head_stride=values.head,
        **options.arguments,
    )
    arguments = array("q", (*of_layer, *workspace.arguments, *plan.arguments))
    num_threads, address = len(plan.task_indptr) - 1, arguments.buffer_info()[0]
    call_on_threads(_attention_address(layer.kv_bits), address, num_threads)
    if len(plan.work.merge_queries):
        call_on_threads(_merge_address(), address, num_threads)


@cache
def _attention_address(kv_bits: torch.dtype) -> int:
    return kernel_address(attention_kernel(_NUMPY_TYPES[kv_bits]))


@cache
def _merge_address() -> int:
    return kernel_address(merge_kernel)
