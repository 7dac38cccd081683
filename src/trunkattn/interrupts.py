"""Ctrl-C between two steps instead of within one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Holds a KeyboardInterrupt back until the block ends; a second one does not wait.

    Within a step it would leave a lock taken or a sequence half recorded, and code that Numba compiled can crash when
    its call is interrupted. Only the main thread gets interrupts; in other threads the block simply runs.

    Example:
        >>> with held_interrupts():
        ...     pass
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    held: list[tuple[Any, ...]] = []

    def hold(*arguments: Any) -> None:
        held.append(arguments)
        if len(held) > 1:
            before(*arguments)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if len(held) == 1:
            before(*held[0])
