"""Ctrl-C between two steps instead of within one, and at once while a library works; and signals that end a command."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NoReturn, TypeVar

Result = TypeVar("Result")
_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # what ends a command; a closed terminal sends SIGHUP
_WORDS: Final = "trunkattn: interrupted"
_SHOW_CURSOR: Final = "\x1b[?25h"  # progress bars hide it


def _stop_in_sight(number: int, _: Any) -> None:
    """Stops the process as Ctrl+Z does without a handler, after it has shown the cursor to whoever types next."""
    _show_cursor()
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)  # this returns when the process is continued
    signal.signal(number, _stop_in_sight)


def _show_cursor(words: str = "") -> None:
    """Writes to standard error, first what shows a terminal's cursor."""
    with suppress(OSError):
        os.write(2, f"{_SHOW_CURSOR if os.isatty(2) else ''}{words}".encode())


class CommandSignals:
    """The handler of a command's SIGINT, SIGTERM and SIGHUP. It raises KeyboardInterrupt, or ends the process at once.

    Attributes:
        received: the signal that came; None: none did.
        may_end: above 0 where the process may end at once (`ends_at_once`).
        unfinished: temporary folders that have to be removed first, and files that have to be written.

    Example:
        >>> with CommandSignals().handling() as signals:
        ...     assert signals.received is None
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self.may_end = self.unfinished = 0

    @property
    def ends_at_once(self) -> bool:
        """Whether the process ends at once."""
        return self.may_end > 0 and not self.unfinished

    @contextmanager
    def handling(self) -> Iterator["CommandSignals"]:
        """Context in which it handles these signals, but for those that whoever started the command lets it ignore, and
        in which Ctrl+Z leaves a terminal with a cursor. Only the main thread handles signals; in another one it handles
        none."""
        is_main = threading.current_thread() is threading.main_thread()
        before = {number: signal.getsignal(number) for number in (*_ENDING, signal.SIGTSTP) if is_main}
        taken = [number for number, handler in before.items() if handler not in (signal.SIG_IGN, None)]
        for number in taken:
            signal.signal(number, _stop_in_sight if number == signal.SIGTSTP else self)
        try:
            yield self
        finally:
            for number in taken:
                signal.signal(number, before[number])

    def __call__(self, number: int, _: Any) -> None:
        self.received = number
        if self.ends_at_once:
            with suppress(Exception):  # the stream may be in use, or its reader gone
                sys.stdout.flush()
            _show_cursor(f"\n{_WORDS}\n")
            os._exit(128 + number)
        raise KeyboardInterrupt

    def exit(self) -> NoReturn:
        """Ends the command with a line and the status that shells give it."""
        with suppress(OSError):
            print(_WORDS, file=sys.stderr)
        sys.exit(128 + (self.received or signal.SIGINT))


def _of_command() -> CommandSignals | None:
    """The handler of a command's signals, if this thread gets them. A script that starts a command in the background
    lets it ignore SIGINT, so that it handles only the other signals."""
    if threading.current_thread() is not threading.main_thread():
        return None
    return next((handler for handler in map(signal.getsignal, _ENDING) if isinstance(handler, CommandSignals)), None)


@contextmanager
def ends_at_once() -> Iterator[None]:
    """Context in which Ctrl-C, SIGTERM and SIGHUP end a command at once and with a line, also while it computes or
    compiles. In any other program it changes nothing."""
    signals = _of_command() or CommandSignals()
    signals.may_end += 1
    try:
        yield
    finally:
        signals.may_end -= 1


@contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed at the end, also of a command that a signal ends."""
    signals = _of_command() or CommandSignals()
    signals.unfinished += 1
    try:
        with TemporaryDirectory() as folder:
            yield Path(folder)
    finally:
        signals.unfinished -= 1


@contextmanager
def finished() -> Iterator[None]:
    """Context of work that a signal must not leave half done, such as files of which one names another. The signal
    waits for its end, also where a command ends at once."""
    signals = _of_command() or CommandSignals()
    signals.unfinished += 1
    with held_interrupts():
        try:
            yield
        finally:
            signals.unfinished -= 1


@contextmanager
def importing() -> Iterator[None]:
    """Context of imports that take long. Libraries drop an interrupt of theirs, turn it into other errors, or end the
    process, so it waits until they are through. A command ends at once."""
    with ends_at_once(), held_interrupts():
        yield


def usual_signals() -> bool:
    """Lets Ctrl-C, SIGTERM and SIGHUP do from now on what they do in any program, such as one that handles them itself,
    or in a process whose parent ends it. Returns whether a command handled one of them."""
    handled = False
    for number in _ENDING:
        if isinstance(signal.getsignal(number), CommandSignals):
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
            handled = True
    return handled


class _Hold:
    """A handler that keeps a signal for the one before it, which it calls at once for a second one."""

    def __init__(self, before: Callable[..., Any]) -> None:
        self._before, self._held = before, list[tuple[Any, ...]]()
        numbers = _ENDING if isinstance(before, CommandSignals) else (signal.SIGINT,)
        self._taken = [number for number in numbers if signal.getsignal(number) is before]
        for number in self._taken:
            signal.signal(number, self)

    def __call__(self, *arguments: Any) -> None:
        self._held.append(arguments)
        if len(self._held) > 1:
            self._before(*arguments)

    def release(self) -> None:
        """Puts the handler before back, and gives it the signal that was kept."""
        for number in self._taken:
            signal.signal(number, self._before)
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
    if before is signal.SIG_IGN:
        before = signal.getsignal(signal.SIGTERM)  # see `_of_command`
    if (
        not callable(before)
        or isinstance(before, _Hold)
        or (isinstance(before, CommandSignals) and before.ends_at_once)
    ):
        yield
        return
    hold = _Hold(before)
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
