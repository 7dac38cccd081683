"""Compiles kernels in parallel, before a step needs them.

Triton compiles a kernel at its first launch, so an engine's start waits for one compilation after the other. Here the
launches only name the kernels that they need, and all of these are compiled at the same time.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final

_MOST_THREADS: Final = 16
_compiling: ContextVar[bool] = ContextVar("compiling", default=False)


def is_compiling() -> bool:
    """Whether launches now only compile their kernels and run nothing."""
    return _compiling.get()


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, to be called with the kernel's arguments. Inside `compiled_together` the call only compiles."""
    return partial(kernel.warmup, grid=grid) if is_compiling() else kernel[grid]


@contextmanager
def compiled_together() -> Iterator[None]:
    """Context in which launches of plans and layers run nothing. When it ends, all kernels that they need are compiled.
    Plans made inside, and outputs of layers run inside, are undefined. Triton's interpreter compiles nothing."""
    from triton import AsyncCompileMode  # imported here, because a machine without a GPU may lack Triton

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool, AsyncCompileMode(pool):
        token = _compiling.set(True)
        try:
            yield
        finally:
            _compiling.reset(token)
