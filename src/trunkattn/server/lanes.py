"""Threads for work whose time grows with a request, so that neither the event loop nor the engine does it."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

Result = TypeVar("Result")

_SHORT: Final = 64 << 10  # bytes or characters of a short piece of work


class Lanes:
    """Two threads, each with its own queue: a short piece of work never waits for a long one."""

    def __init__(self, name: str) -> None:
        self._short = ThreadPoolExecutor(1, f"trunkattn-{name}-short")
        self._long = ThreadPoolExecutor(1, f"trunkattn-{name}-long")

    async def run(self, size: int, work: Callable[[], Result]) -> Result:
        """The result of some work. size: bytes or characters that it goes through."""
        lane = self._short if size <= _SHORT else self._long
        return await asyncio.get_running_loop().run_in_executor(lane, work)

    def close(self) -> None:
        """Ends the threads; work that has not begun is dropped."""
        for lane in (self._short, self._long):
            lane.shutdown(wait=False, cancel_futures=True)
