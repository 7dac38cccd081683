"""How busy other programs keep the processors that this process may use."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/stat")
_NOT_BUSY: Final = ("idle", "iowait")
_FIELDS: Final = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


def _process_seconds() -> float:
    """Processor time of this process and of those it has waited for."""
    own = os.times()
    return own.user + own.system + own.children_user + own.children_system


class OtherWork:
    """Counts how many of this process's processors other programs keep busy, from now on. On a virtual machine the time
    that the host takes away (`steal`) counts, too.

    Args:
        own_seconds: returns the processor time that does not count as others'; by default that of this process.
        counts_nice: whether programs of low priority (`nice`) count.

    Example:
        >>> work = OtherWork()
        >>> cores = work.cores()  # since the line before; None if the system has no /proc/stat
    """

    def __init__(self, own_seconds: Callable[[], float] = _process_seconds, counts_nice: bool = True) -> None:
        self._own_seconds = own_seconds
        self._not_counted = _NOT_BUSY if counts_nice else (*_NOT_BUSY, "nice")
        self._started = time.monotonic()
        self._before = self._seconds()

    def cores(self) -> float | None:
        """The mean number of busy processors so far, at least 0; None if the system has no /proc/stat."""
        now, before = self._seconds(), self._before
        elapsed = time.monotonic() - self._started
        if now is None or before is None or elapsed <= 0:
            return None
        return max(0.0, (now - before) / elapsed)

    def _seconds(self) -> float | None:
        """Processor time of other programs since the machine started, in seconds."""
        try:
            lines = [line.split() for line in _STAT.read_text().splitlines() if line.startswith("cpu")]
        except OSError:
            return None
        ours = {f"cpu{number}" for number in os.sched_getaffinity(0)}
        ticks = 0
        for name, *words in lines:
            if name in ours:
                spent = dict(zip(_FIELDS, map(int, words), strict=False))
                ticks += sum(count for field, count in spent.items() if field not in self._not_counted)
        return ticks / os.sysconf("SC_CLK_TCK") - self._own_seconds()
