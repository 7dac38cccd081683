"""The one parallel loop of the CPU kernels: every thread calls the same kernel.

Numba compiles the body of a parallel loop several times over, so this body is a single call through a pointer, and the
kernels themselves are compiled once, as plain C functions.
"""

import os
import threading
from functools import cache
from typing import Any

import numba
import torch
from numba import prange, types

from trunkattn.compiled import njit
from trunkattn.cpu.microkernel import call_kernel
from trunkattn.interrupts import held_interrupts


def kernel_address(kernel: Any) -> int:
    """Address of a kernel's C function, compiled if need be; valid while `kernel` lives.

    kernel: `f(arguments, thread)`, compiled with `njit(by_address=True)`; both are int64.
    """
    with held_interrupts():  # an interrupted compiler frees memory twice
        compiled = kernel.get_compile_result(types.void(types.int64, types.int64))
    address: int = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name)
    return address


def call_on_threads(kernel: int, arguments: int, num_threads: int) -> None:
    """Calls a kernel as `kernel(arguments, thread)` for each thread below `num_threads`; returns when all have ended.

    A single call needs no parallel loop, and this thread makes it. In a forked child of a process that has computed in
    parallel, this thread makes all calls in turn: GNU's OpenMP ends a child that uses the threads of its parent. The
    results are the same bits.

    kernel: see `kernel_address`. arguments: address of what the kernel takes.
    """
    if num_threads == 1 or os.getpid() != _home():
        _call_in_turn(kernel, arguments, num_threads)
        return
    if getattr(_local, "num_threads", 0) != num_threads:
        _set_threads(num_threads)
        _local.num_threads = num_threads
    _call_on_threads(kernel, arguments, num_threads)


_local = threading.local()  # how many threads this thread's loops may use, as set last


@cache
def _home() -> int:
    """The process that computed in parallel first; forked children inherit the answer."""
    return os.getpid()


def _set_threads(num_threads: int) -> None:
    """Lets this thread's next parallel loops use up to `num_threads` threads, or as many as Numba has started."""
    started: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # Numba sets it at run time
    before = torch.get_num_threads()
    numba.set_num_threads(min(num_threads, started))
    if torch.get_num_threads() != before:  # the first call starts Numba's threads, in the pool that torch uses too
        torch.set_num_threads(before)


@njit(parallel=True, nogil=True)
def _call_on_threads(kernel, arguments, num_threads):
    for thread in prange(num_threads):
        call_kernel(kernel, arguments, thread)


@njit(nogil=True)
def _call_in_turn(kernel, arguments, num_threads):
    for thread in range(num_threads):
        call_kernel(kernel, arguments, thread)
