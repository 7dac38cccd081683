"""How busy other programs keep this machine while something is measured."""

import os
import time
from pathlib import Path
from typing import Final

_STAT: Final = Path("/proc/stat")
_NOT_BUSY: Final = ("idle", "iowait")
_FIELDS: Final = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")


class OtherWork:
    """Cores that other programs keep busy from now on. `steal`, what a host takes from its guest, counts as theirs.

    Example:
        >>> work = OtherWork()
        >>> cores = work.cores()  # since the line before; None where the system does not tell
    """

    def __init__(self) -> None:
        self._before = _seconds()
        self._started = time.monotonic()

    def cores(self) -> float | None:
        """Mean number of cores, at least 0; None where the system has no /proc/stat."""
        now, before = _seconds(), self._before
        elapsed = time.monotonic() - self._started
        if now is None or before is None or elapsed <= 0:
            return None
        return max(0.0, (now - before) / elapsed)


def _seconds() -> float | None:
    """Seconds for which all cores have been busy with others, since the machine started."""
    try:
        words = _STAT.read_text().split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    spent = dict(zip(_FIELDS, map(int, words), strict=False))
    busy = sum(ticks for name, ticks in spent.items() if name not in _NOT_BUSY) / os.sysconf("SC_CLK_TCK")
    own = os.times()
    return busy - own.user - own.system - own.children_user - own.children_system
