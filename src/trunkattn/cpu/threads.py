"""The one parallel loop of the CPU kernels: every thread calls the same kernel.

The threads are those of torch's OpenMP. Numba's own parallel loops need an OpenMP of the system, and without one they
end a process in which two threads of Python compute at once.
"""

import ctypes
import os
import threading
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numba
import numpy as np
import torch
from numba import types

from trunkattn.compiled import njit
from trunkattn.cpu.arguments import array_at
from trunkattn.cpu.microkernel import add_to, call_kernel

_NUM_CALLS, _TAKEN = 2, 3  # places in a loop's numbers, see `_take_calls`


def kernel_address(kernel: Any) -> int:
    """Address of a kernel's C function, compiled if need be; valid while `kernel` lives.

    kernel: `f(arguments, thread)`, compiled with `njit(by_address=True)`; both are int64.
    """
    return _address(kernel, types.int64, types.int64)


def call_on_threads(kernel: int, arguments: int, num_threads: int) -> None:
    """Calls a kernel as `kernel(arguments, thread)` for each thread below `num_threads`; returns when all have ended.

    Up to `torch.get_num_threads()` calls run at once. In a forked child of a process that has computed in parallel,
    this thread makes all calls in turn, because the threads of its parent are not there. The results are the same bits.

    kernel: see `kernel_address`. arguments: address of what the kernel takes.
    """
    most = torch.get_num_threads()
    if min(num_threads, most) == 1 or os.getpid() != _home():
        _call_in_turn(kernel, arguments, num_threads)
        return
    loop = array("q", (kernel, arguments, num_threads, 0))
    # GNU's OpenMP ends the threads that a smaller team leaves over, and the next full one has to start others.
    at_once = min(num_threads, most) if _openmp() is None else most
    _parallel()(_take_calls_address(), loop.buffer_info()[0], at_once)


def team(num_threads: int) -> list[int]:
    """The threads, by the system's numbers, that run this thread's parallel loops of up to `num_threads` threads."""
    found: list[int] = []
    note = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: found.append(threading.get_native_id()))
    if num_threads == 1 or os.getpid() != _home():
        note(None)
    else:
        _parallel()(note, None, num_threads)
    return found


@cache
def _home() -> int:
    """The process that computed in parallel first; forked children inherit the answer."""
    return os.getpid()


@njit(nogil=True)
def _call_in_turn(kernel, arguments, num_threads):
    for thread in range(num_threads):
        call_kernel(kernel, arguments, thread)


@njit(by_address=True)
def _take_calls(loop):
    """Makes calls of a loop until all are taken. OpenMP may run it on fewer threads than there are calls.

    loop: address of int64 [4]: the kernel, its arguments, the number of calls, and how many of them are taken.
    """
    numbers = array_at(loop, np.int64)
    thread = add_to(loop + 8 * _TAKEN, 1)
    while thread < numbers[_NUM_CALLS]:
        call_kernel(numbers[0], numbers[1], thread)
        thread = add_to(loop + 8 * _TAKEN, 1)


@cache
def _take_calls_address() -> int:
    return _address(_take_calls, types.int64)


def _address(function: Any, *argument_types: Any) -> int:
    if numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # Numba sets it at run time
        raise ValueError(
            "NUMBA_DISABLE_JIT is set: only plans are made in plain Python; unset it to compute attention on a CPU"
        )
    compiled = function.get_compile_result(types.void(*argument_types))
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)
    return address


def set_num_threads(num_threads: int) -> None:
    """How many threads this thread's parallel loops use from now on, torch's too, whose own function starts threads."""
    library = _openmp()
    if library is not None:
        library.omp_set_num_threads(num_threads)


@cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP that torch calls, if it has the entry points of GNU's. On Linux, LLVM's and Intel's have them too."""
    for name in (None, torch._C.__file__):  # where the dynamic loader looks, in its order
        library = ctypes.CDLL(name)
        if hasattr(library, "GOMP_parallel"):
            return library
    return None


@cache
def _parallel() -> Callable[[Any, int | None, int], None]:
    """`run(function, argument, num_threads)`: calls a C function on this thread and on others at once."""
    library = _openmp()
    if library is None:
        return _on_threads_of_python
    parallel = library.GOMP_parallel
    parallel.argtypes, parallel.restype = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None
    return lambda function, argument, num_threads: parallel(function, argument, num_threads, 0)


def _on_threads_of_python(function: Any, argument: int | None, num_threads: int) -> None:
    call: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.cast(function, ctypes.c_void_p).value or 0)
    others = [_pool().submit(call, argument) for _ in range(num_threads - 1)]
    call(argument)
    for other in others:
        other.result()


@cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(os.cpu_count(), "trunkattn-cpu")
