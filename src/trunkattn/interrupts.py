"""Ctrl-C between two steps instead of within one, and at once while a library works."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


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


def interruptible(work: Callable[[], Result]) -> Result:
    """The result of some work of a library, for which Ctrl-C does not wait.

    Python raises KeyboardInterrupt between two of its own instructions, so not before a long call of a library has
    ended. Here a thread of its own makes the call. After an interrupt it ends by itself, or with the process.

    Raises:
        Exception: what `work` raises.

    Example:
        >>> interruptible(lambda: 1 + 1)
        2
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="trunkattn-interruptible", daemon=True).start()
    return future.result()
