"""Threads of the compiled parallel loops."""

import numba


def set_threads(num_threads: int) -> None:
    """Lets this thread's next parallel loops use up to `num_threads` threads, as far as Numba started as many."""
    started: int = numba.config.NUMBA_NUM_THREADS  # type: ignore[attr-defined]  # Numba sets it at run time
    numba.set_num_threads(min(num_threads, started))
