"""Ctrl-C between two steps instead of within one, and at once while a library works."""

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

Result = TypeVar("Result")


class _Hold:
    """A handler that keeps an interrupt for the one before it, which it calls at once for a second interrupt."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before, self._held = before, list[tuple[Any, ...]]()

    def __call__(self, *arguments: Any) -> None:
        self._held.append(arguments)
        if len(self._held) > 1:
            self._before(*arguments)

    def release(self) -> None:
        """Puts the handler before back, and gives it the interrupt that was kept."""
        signal.signal(signal.SIGINT, self._before)
        if len(self._held) == 1:
            self._before(*self._held[0])


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Holds a KeyboardInterrupt back until the block ends; a second one does not wait.

    Within a step it would leave a lock taken or a sequence half recorded, and code that Numba compiled can crash when
    its call is interrupted. Only the main thread gets interrupts; in other threads the block simply runs, and so does a
    block within another one, which holds the interrupt already.

    Example:
        >>> with held_interrupts():
        ...     pass
    """
    is_main = threading.current_thread() is threading.main_thread()  # asked first: signals cost microseconds
    before = signal.getsignal(signal.SIGINT) if is_main else None
    if not callable(before) or isinstance(before, _Hold):
        yield
        return
    hold = _Hold(before)
    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        hold.release()


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
