"""A lock for threads that share one engine."""

import threading
from typing import Any


class Turns:
    """A lock that a thread cannot take twice in a row while another one waits.

    A plain lock may go to the same thread again and again, and a stream of another thread would stand still. Here
    whoever waits holds the place at the head of the queue, so the thread that has just had its turn comes after it.

    Example:
        >>> turn = Turns()
        >>> with turn:
        ...     pass
    """

    def __init__(self) -> None:
        self._head = threading.Lock()  # of the queue
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._head:
            self._lock.acquire()

    def __exit__(self, *_: Any) -> None:
        self._lock.release()
