"""Kernels compiled side by side, before a step waits for them.

Triton compiles a kernel when it is first launched, one after the other, while an engine's start waits. Here launches
only say what they need, and all of it is compiled at once.
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
    """Whether launches compile kernels and run nothing."""
    return _compiling.get()


def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
    """`kernel[grid]`, to be called with the kernel's arguments; inside `compiled_together` the call only compiles."""
    return partial(kernel.warmup, grid=grid) if is_compiling() else kernel[grid]


@contextmanager
def compiled_together() -> Iterator[None]:
    """Inside, launches of plans and layers run nothing; at the end all kernels that they need are compiled. What a plan
    holds, and what a layer writes, is undefined. Triton's interpreter compiles nothing."""
    from triton import AsyncCompileMode  # which a CPU can do without

    with ThreadPoolExecutor(min(_MOST_THREADS, os.cpu_count() or 1)) as pool, AsyncCompileMode(pool):
        token = _compiling.set(True)
        try:
            yield
        finally:
            _compiling.reset(token)
