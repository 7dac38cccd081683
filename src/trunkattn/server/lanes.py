"""Threads for work whose time grows with a request, so that neither the event loop nor the engine does it."""

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

Result = TypeVar("Result")

_SHORT: Final = 64 << 10  # bytes or characters of a short piece of work
_LONGEST_REST_S: Final = 0.25  # more than a step of the engine takes


class Lanes:
    """Two threads, each with its own queue: a short piece of work never waits for a long one.

    Reading JSON and the like hold Python's lock for as long as they take. So after a long piece the next one waits for
    as long as that one computed, and the engine finishes its step meanwhile.
    """

    def __init__(self, name: str) -> None:
        self._short = ThreadPoolExecutor(1, f"trunkattn-{name}-short")
        self._long = ThreadPoolExecutor(1, f"trunkattn-{name}-long")
        self._rested_at = 0.0  # when the next long piece may begin

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """The result of some work. size: bytes or characters that it goes through."""
        loop = asyncio.get_running_loop()
        if size <= _SHORT:
            return await loop.run_in_executor(self._short, work)
        return await loop.run_in_executor(self._long, self._rested, work)

    def _rested(self, work: Callable[[], Result]) -> Result:
        time.sleep(max(0.0, self._rested_at - time.monotonic()))
        began = time.thread_time()
        try:
            return work()
        finally:
            self._rested_at = time.monotonic() + min(time.thread_time() - began, _LONGEST_REST_S)

    def close(self) -> None:
        """Ends the threads; work that has not begun is dropped."""
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
