"""A lock for threads that share one engine."""

import threading
from typing import Any


class Turns:
    """A lock that a thread cannot take twice in a row while another one waits.

    A plain lock may go to the same thread again and again, while a stream of another thread makes no progress. Here a
    waiting thread holds the head of the queue, so the thread that has just had its turn comes after it.

    Python may run any code within a turn, such as a logits processor, or a generator that is closed as garbage. A
    second turn of the same thread would wait for the first one for ever, so it is refused.

    Raises:
        RuntimeError: the thread has the turn, or is about to get it.

    Example:
        >>> turn = Turns()
        >>> with turn:
        ...     turn.is_own
        True
    """

    def __init__(self) -> None:
        self._head = threading.Lock()  # of the queue
        self._lock = threading.Lock()
        self._inside: set[int] = set()  # threads that have the turn or wait for it

    @property
    def is_own(self) -> bool:
        """Whether this thread has the turn, or is about to get it."""
        return threading.get_ident() in self._inside

    def __enter__(self) -> None:
        if self.is_own:
            raise RuntimeError(
                "the engine computes a step of this thread, and nothing that runs within a step, such as a logits "
                "processor, can use it; use another LLM there, or wait for the answers"
            )
        self._inside.add(threading.get_ident())
        try:
            with self._head:
                self._lock.acquire()
        except BaseException:  # an interrupt while it waits
            self._inside.discard(threading.get_ident())
            raise

    def __exit__(self, *_: Any) -> None:
        self._lock.release()
        self._inside.discard(threading.get_ident())
