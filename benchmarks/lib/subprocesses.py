"""Work in a process of its own, which may crash or hang without taking its caller along, as a broken kernel does."""

import math
from collections.abc import Callable, Iterator
from enum import Enum
from multiprocessing import get_context
from multiprocessing.connection import Connection
from time import monotonic
from typing import Any

JOIN_SECONDS = 10  # for a process that ends by itself, or that was killed


class Lost(Exception):
    """The process gave no answer, and why. It is gone."""


class _Kind(Enum):
    """Kind of a message from the process."""

    ANSWER, END, FAILURE = range(3)


def _serve(connection: Connection) -> None:
    """Calls what it is sent, a generator function and its arguments, and sends what that yields. A failure ends the
    process, since a device may be unusable after it."""
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:  # the caller is gone
            return
        try:
            for answer in function(*arguments):
                connection.send((_Kind.ANSWER, answer))
        except Exception as error:
            connection.send((_Kind.FAILURE, f"{type(error).__name__}: {str(error)[:300]}"))
            raise
        connection.send((_Kind.END, None))


class Apart:
    """A process that calls functions for this one. It starts with the first call, and again after it was lost."""

    def __init__(self) -> None:
        self._process: Any = None
        self._connection: Any = None

    def ask(
        self, function: Callable[..., Iterator[Any]], *arguments: Any, patience: float, until: float = math.inf
    ) -> Iterator[Any]:
        """What a generator function of a module yields there, each answer as it comes.

        patience: seconds to wait for an answer. until: moment of `monotonic` after which no answer is waited for.

        Raises:
            Lost: the call failed, the process ended, or an answer took too long.
        """
        self._start()
        try:
            self._connection.send((function, arguments))
            while True:
                seconds = max(0.0, min(patience, until - monotonic()))
                if not self._connection.poll(seconds):
                    raise Lost(f"no answer in {seconds:.0f} s")
                kind, answer = self._connection.recv()
                if kind is _Kind.FAILURE:
                    self._process.join(JOIN_SECONDS)  # it prints where it failed
                    raise Lost(answer)
                if kind is _Kind.END:
                    return
                yield answer
        except (EOFError, ConnectionError):
            self._process.join(JOIN_SECONDS)
            code = self._process.exitcode
            self._kill()
            raise Lost(f"the process ended with exit code {code}") from None
        except BaseException:  # its next answers would be to this call
            self._kill()
            raise

    def stop(self) -> None:
        """Ends the process, which has nothing to do."""
        if self._process is not None:
            self._connection.close()
            self._process.join(JOIN_SECONDS)
            self._kill()

    def _start(self) -> None:
        if self._process is not None:
            return
        context = get_context("spawn")  # a process that has used a device cannot be forked
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()

    def _kill(self) -> None:
        self._process.kill()
        self._process.join(JOIN_SECONDS)
        self._connection.close()
        self._process = None
