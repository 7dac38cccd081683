"""Threads of the compiled parallel loops."""

import numba
import torch


def set_threads(num_threads: int) -> None:
    """Lets this thread's next parallel loops use up to `num_threads` threads, as far as Numba started as many."""
    started: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # Numba sets it at run time
    before = torch.get_num_threads()
    numba.set_num_threads(min(num_threads, started))
    if torch.get_num_threads() != before:  # the first call starts Numba's threads, in the pool that torch uses too
        torch.set_num_threads(before)
