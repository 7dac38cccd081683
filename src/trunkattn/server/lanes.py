"""Threads for work whose time grows with a request, so that neither the event loop nor the engine does it."""

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final, TypeVar

Result = TypeVar("Result")

_SHORT: Final = 64 << 10  # bytes or characters of a short piece of work
_SLICE_S: Final = 0.005  # of a processor, between two rests
_RESTS: Final = 3  # times as long as it computed, rests a thread that holds Python's lock
_LONGEST_REST_S: Final = 0.25  # more than a step of the engine takes
_EVENTS: Final = 64  # calls and returns between two looks at the clock


class Pace:
    """Rests of a thread.

    The engine gives Python's lock away in each of the hundreds of operations of a step. While another thread computes
    in Python, it waits for the lock each time, and a step takes as much longer as that thread computes meanwhile.

    Args:
        clock: processor seconds of the thread.
        now: seconds of the monotonic clock.
        sleep: waits.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.thread_time,
        now: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._clock, self._now, self._sleep = clock, now, sleep
        self._rested_at = 0.0  # when the next piece of work may begin
        self._computed = 0.0  # at the last rest, on the thread's clock

    @contextmanager
    def kept(self, holds_lock: bool) -> Iterator[None]:
        """Context of a piece of work, which begins after the last one's rest. holds_lock: whether it computes in
        Python. It rests after every few milliseconds then, otherwise only at its end, as long as it took."""
        self._sleep(max(0.0, self._rested_at - self._now()))
        profile, left = sys.getprofile(), _EVENTS

        def on_event(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal left
            left -= 1
            if not left:
                left = _EVENTS
                self._sleep(self._due(_RESTS))

        if holds_lock:
            sys.setprofile(on_event)
        try:
            yield
        finally:
            sys.setprofile(profile)
            self._rested_at = self._now() + self._due(_RESTS if holds_lock else 1)

    def _due(self, rests: int) -> float:
        """Seconds of the rest that is due now; 0 if the thread has not computed long enough for one."""
        computed = self._clock()
        taken = computed - self._computed
        if taken < _SLICE_S:
            return 0.0
        self._computed = computed
        return min(rests * taken, _LONGEST_REST_S)


class Lanes:
    """Two threads, each with its own queue: a short piece of work never waits for a long one. Both rest: see `Pace`."""

    def __init__(self, name: str) -> None:
        self._short = ThreadPoolExecutor(1, f"trunkattn-{name}-short"), Pace()
        self._long = ThreadPoolExecutor(1, f"trunkattn-{name}-long"), Pace()

    async def run(self, size: int, work: Callable[[], Result], holds_lock: bool = True) -> Result:
        """The result of some work.

        Args:
            size: bytes or characters that it goes through.
            work: what to do.
            holds_lock: whether it computes in Python, not in a library that leaves Python to others meanwhile.
        """
        thread, pace = self._short if size <= _SHORT else self._long

        def paced() -> Result:
            with pace.kept(holds_lock):
                return work()

        return await asyncio.get_running_loop().run_in_executor(thread, paced)

    def close(self) -> None:
        """Ends the threads; work that has not begun is dropped."""
        for thread, _ in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)
