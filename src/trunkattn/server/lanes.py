"""Threads for work whose time grows with a request, so that neither the event loop nor the engine does it."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

Result = TypeVar("Result")
# Long work in Python calls its `pause` again and again. Most calls return at once; some wait (`Pace.pause`).
Pause = Callable[[], None]

_SHORT: Final = 64 << 10  # bytes or characters of a short piece of work
_SLICE_S: Final = 0.005  # processor time between two pauses
_PAUSE_RATIO: Final = 3  # a thread pauses this many times as long as it has computed
_LONGEST_PAUSE_S: Final = 0.25  # longer than a step of the engine
_LONGEST_WAIT_S: Final = 1.0  # of long work, for the pauses of all threads


def no_pause() -> None:
    """Returns at once: the pause of short work."""


class Pauses:
    """The pauses of several threads, one after the other. Threads with long work compute about a quarter of the time
    together, and threads with short work another quarter.

    Short work waits for no pause of long work, so that a few large requests do not hold up many small ones.

    Args:
        now: seconds of the monotonic clock.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._end = self._short_end = 0.0  # of all pauses so far, and of those of short work

    def add(self, seconds: float, is_short: bool) -> float:
        """The time at which one more pause ends, which begins when the others have ended that it waits for."""
        with self._lock:
            now = self._now()
            self._end = min(max(self._end, now) + seconds, now + _LONGEST_WAIT_S)
            if not is_short:
                return self._end
            self._short_end = max(self._short_end, now) + seconds
            return self._short_end

    def left(self, end: float) -> float:
        """Seconds until a pause ends."""
        return max(0.0, end - self._now())


class Pace:
    """Makes a thread pause while it works, so that the engine gets Python's lock.

    A step of the engine has hundreds of operations, and each releases Python's lock. If another thread computes in
    Python, the engine waits for the lock after each of them, so the step takes longer by the time of that thread.

    Args:
        pauses: those of all threads that take turns with this one.
        is_short: whether its pieces of work are short.
        clock: processor seconds of the thread.
        sleep: waits.
    """

    def __init__(
        self,
        pauses: Pauses,
        is_short: bool,
        clock: Callable[[], float] = time.thread_time,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._pauses, self._is_short, self._clock, self._sleep = pauses, is_short, clock, sleep
        self._free_at = 0.0  # time at which the next piece of work may begin
        self._computed = 0.0  # time of the last pause on the thread's clock

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Context of a piece of work. It first waits for the pause of the thread's last piece."""
        self._sleep(self._pauses.left(self._free_at))
        try:
            yield
        finally:
            if seconds := self._due():
                self._free_at = self._pauses.add(seconds, self._is_short)

    def pause(self) -> None:
        """Waits if the thread has computed for some milliseconds since its last pause."""
        if seconds := self._due():
            self._sleep(self._pauses.left(self._pauses.add(seconds, self._is_short)))

    def _due(self) -> float:
        """Seconds of a pause for what the thread has computed since its last one; 0 if that is only a moment."""
        computed = self._clock()
        taken = computed - self._computed
        if taken < _SLICE_S:
            return 0.0
        self._computed = computed
        return min(_PAUSE_RATIO * taken, _LONGEST_PAUSE_S)


class Lanes:
    """Two threads, each with its own queue, so that short work never waits for long work. Both pause (`Pace`).

    Args:
        name: of the threads.
        pauses: those of all threads that take turns with these.
    """

    def __init__(self, name: str, pauses: Pauses) -> None:
        self._short = ThreadPoolExecutor(1, f"trunkattn-{name}-short"), Pace(pauses, True)
        self._long = ThreadPoolExecutor(1, f"trunkattn-{name}-long"), Pace(pauses, False)

    async def run(self, size: int, work: Callable[[Pause], Result]) -> Result:
        """Returns the result of some work.

        Args:
            size: bytes or characters that the work goes through.
            work: the work. It gets a `Pause`, which each turn of a long loop in Python must call.
        """
        thread, pace = self._short if size <= _SHORT else self._long

        def paced() -> Result:
            with pace.kept():
                return work(pace.pause)

        return await asyncio.get_running_loop().run_in_executor(thread, paced)

    def close(self) -> None:
        """Ends the threads; work that has not begun is dropped."""
        for thread, _ in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)
