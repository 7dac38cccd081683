"""What the CPU kernels take: one record of addresses and numbers in C's layout, and the views that they make of it."""

from typing import Any, Final, NamedTuple

import numpy as np
from numba import carray, from_dtype, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

from trunkattn.compiled import njit


class LayerArguments(NamedTuple):
    """Arguments of one layer: addresses of contiguous float32 arrays and of the caches' first elements; strides in
    elements."""

    q: int
    k_cache: int
    v_cache: int
    out: int
    lse: int
    logit_scale: int
    v_scale: int
    sinks: int
    num_sinks: int
    soft_cap: int  # the bits of a float32
    k_page_stride: int
    k_token_stride: int
    k_head_stride: int
    v_page_stride: int
    v_token_stride: int
    v_head_stride: int


class WorkspaceArguments(NamedTuple):
    """Addresses of what a run writes besides its results; elements of each thread's part of floats and ints."""

    floats: int
    ints: int
    partial: int
    partial_lse: int
    thread_floats: int
    thread_ints: int


class PlanArguments(NamedTuple):
    """Arguments of one plan: addresses of contiguous int32 arrays, then numbers; see `CpuPlan` and `block.Shape`."""

    block_table: int
    items: int
    queries: int
    partial_slots: int
    positions: int
    tasks: int
    task_indptr: int
    merge_queries: int
    merge_indptr: int
    table_columns: int
    num_merged: int
    num_threads: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    kv_kind: int
    window: int
    aligned_blocks: int


_NAMES: Final = (*LayerArguments._fields, *WorkspaceArguments._fields, *PlanArguments._fields)
_RECORD: Final = np.dtype([(name, np.int64) for name in _NAMES])
_ANY_LENGTH: Final = 2**48  # compiled code does not look at it


def address_of(array: NDArray[Any]) -> int:
    """Where a contiguous array begins."""
    address: int = array.__array_interface__["data"][0]
    return address


@intrinsic
def array_at(typing_context, address, dtype):
    """A flat array of a NumPy type at an address, of a length that only the caller knows."""
    array_type = types.Array(dtype.instance_type, 1, "C")

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(array_type)(context, builder)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(array.data.type.pointee))
        populate_array(
            array,
            data=builder.inttoptr(args[0], array.data.type),
            shape=[context.get_constant(types.intp, _ANY_LENGTH)],
            strides=[itemsize],
            itemsize=itemsize,
            meminfo=None,
        )
        return array._getvalue()

    return array_type(types.int64, dtype), codegen


@intrinsic
def _record_pointer(typing_context, address):
    record = types.CPointer(from_dtype(_RECORD))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(record))

    return record(types.int64), codegen


@njit(inline="always")
def arguments_at(address):
    """The record of a layer's, a workspace's and a plan's arguments at an address."""
    return carray(_record_pointer(address), 1)[0]
