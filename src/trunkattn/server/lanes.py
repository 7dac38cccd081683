"""Threads for work whose time grows with a request, so that neither the event loop nor the engine does it."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final, TypeVar

Result = TypeVar("Result")
Rest = Callable[[], None]  # to be called again and again by what computes in Python; it waits if it is time

_SHORT: Final = 64 << 10  # bytes or characters of a short piece of work
_SLICE_S: Final = 0.005  # of a processor, between two rests
_RESTS: Final = 3  # times as long as it computed, rests a thread in the middle of its work
_LONGEST_REST_S: Final = 0.25  # more than a step of the engine takes


def no_rest() -> None:
    """Does not rest: for work that is short."""


class Pace:
    """Lets a thread rest while it works, so that the engine gets Python's lock.

    The engine releases Python's lock in each of the hundreds of operations of a step. If another thread computes in
    Python, the engine waits for the lock each time, and the step takes longer by the time that the other computes.

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
    def kept(self) -> Iterator[None]:
        """Context of a piece of work. It begins after the last one's rest, which is as long as that one took."""
        self._sleep(max(0.0, self._rested_at - self._now()))
        try:
            yield
        finally:
            self._rested_at = self._now() + self._due(1)

    def rest(self) -> None:
        """Waits, if the thread has computed for some milliseconds since its last rest."""
        if rest := self._due(_RESTS):
            self._sleep(rest)

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

    async def run(self, size: int, work: Callable[[Rest], Result]) -> Result:
        """The result of some work.

        Args:
            size: bytes or characters that it goes through.
            work: what to do. A loop in Python over what a request holds is to rest in every turn.
        """
        thread, pace = self._short if size <= _SHORT else self._long

        def paced() -> Result:
            with pace.kept():
                return work(pace.rest)

        return await asyncio.get_running_loop().run_in_executor(thread, paced)

    def close(self) -> None:
        """Ends the threads; work that has not begun is dropped."""
        for thread, _ in (self._short, self._long):
            thread.shutdown(wait=False, cancel_futures=True)
