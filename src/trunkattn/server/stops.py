"""Limits of time that leave out the time in which this process stands still, as between Ctrl+Z and `fg`.

When it goes on, the event loop finds its timers due before it reads what clients have sent meanwhile.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

Result = TypeVar("Result")
_LATE_SECONDS: Final = 1.0  # no timer of a loop that runs is so late


def stood_still(due: float) -> bool:
    """Whether a timer that fires now is so late that the process, or its event loop, stood still. due: when it had to
    fire, on the monotonic clock, which is an event loop's too."""
    return time.monotonic() - due > _LATE_SECONDS


async def within(seconds: float, wait: Callable[[], Awaitable[Result]]) -> Result:
    """What comes within some time of a process that runs. wait: begins to wait, or goes on after it was cancelled.
    Raises asyncio.TimeoutError."""
    while True:
        due = time.monotonic() + seconds
        try:
            return await asyncio.wait_for(wait(), seconds)
        except asyncio.TimeoutError:
            if not stood_still(due):
                raise
