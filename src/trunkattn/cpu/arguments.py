"""What the CPU kernels take: one record of addresses and numbers in C's layout, and the views that they make of it."""

from typing import Any, Final

import numpy as np
from numba import carray, from_dtype, types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array
from numpy.typing import NDArray

from trunkattn.compiled import njit

# Addresses of contiguous arrays, by the dtype of their elements.
_FLOAT_ARRAYS: Final = ("q", "logit_scale", "v_scale", "sinks", "out", "lse", "partial", "partial_lse", "floats")
_INT32_ARRAYS: Final = (
    "block_table", "items", "queries", "slots", "positions", "tasks", "task_indptr", "merge_queries", "merge_indptr",
)  # fmt: skip
_CACHES: Final = ("k_cache", "v_cache")  # of the KV dtype's bits
_INT64_ARRAYS: Final = ("ints",)
# `floats` and `ints`: the workspace, thread_floats and thread_ints elements for each thread. Strides are in elements.
_NUMBERS: Final = (
    "num_qo_heads", "num_kv_heads", "head_dim", "head_dim_v", "page_size", "kv_kind", "window", "aligned_blocks",
    "table_columns", "k_page_stride", "k_token_stride", "k_head_stride", "v_page_stride", "v_token_stride",
    "v_head_stride", "num_sinks", "num_merged", "num_threads", "thread_floats", "thread_ints",
)  # fmt: skip
ARGUMENTS: Final = np.dtype(
    [(name, np.int64) for name in (*_FLOAT_ARRAYS, *_INT32_ARRAYS, *_CACHES, *_INT64_ARRAYS, *_NUMBERS)]
    + [("soft_cap", np.float32)]
)
_ANY_LENGTH: Final = 2**48  # compiled code does not look at it


def address_of(array: NDArray) -> int:
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
    record = types.CPointer(from_dtype(ARGUMENTS))

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(record))

    return record(types.int64), codegen


@njit(inline="always")
def arguments_at(address):
    """The record at an address."""
    return carray(_record_pointer(address), 1)[0]
