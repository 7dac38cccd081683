"""Holds the loads of interpreted kernels to the tensors that a launch is given, as guards around tensors do for stores.

A load from elsewhere often changes no result in a test: a mask is missing, and what lies there happens to be 0. On a
card it reads another tensor, or memory that is nobody's.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder


@contextmanager
def guarded_loads() -> Iterator[None]:
    """Inside, a launch that loads from outside of its tensors raises InterpreterError."""
    arguments, load = GridExecutor._init_args_hst, InterpreterBuilder.create_masked_load
    begins = ends = np.zeros(0, np.uint64)

    def take_arguments(self: GridExecutor, args: Any, kwargs: Any) -> Any:
        nonlocal begins, ends
        taken = arguments(self, args, kwargs)
        ranges = np.array(sorted(_ranges(taken)), np.uint64).reshape(-1, 2)
        begins, ends = ranges[:, 0], np.maximum.accumulate(ranges[:, 1])
        return taken

    def load_within(self: InterpreterBuilder, ptrs: Any, mask: Any, *others: Any) -> Any:
        places = ptrs.data[np.broadcast_to(mask.data, ptrs.data.shape)]
        nth = np.searchsorted(begins, places, side="right")
        assert (nth > 0).all() and (places < ends[nth - 1]).all(), "a load from outside the tensors of the launch"
        return load(self, ptrs, mask, *others)

    with (
        patch.object(GridExecutor, "_init_args_hst", take_arguments),
        patch.object(InterpreterBuilder, "create_masked_load", load_within),
    ):
        yield


def _ranges(argument: Any) -> Iterator[tuple[int, int]]:
    """The addresses [begin, end) of every tensor among arguments."""
    if isinstance(argument, dict):
        argument = tuple(argument.values())
    if isinstance(argument, tuple | list):
        for each in argument:
            yield from _ranges(each)
    elif hasattr(argument, "data_ptr") and argument.numel():
        last = sum((size - 1) * stride for size, stride in zip(argument.shape, argument.stride(), strict=True))
        yield argument.data_ptr(), argument.data_ptr() + (last + 1) * argument.element_size()
