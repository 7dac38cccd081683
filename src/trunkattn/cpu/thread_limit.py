"""Fewer threads beside other work, so that no thread waits for one that has lost its processor.

The threads of OpenMP meet after each parallel loop, hundreds of times in a step, and spin while they wait. If there
are as many threads as processors and another program computes, each loop waits for the thread that shares a processor.
"""

import math
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from trunkattn.cpu.threads import set_num_threads, team
from trunkattn.other_work import OtherWork

_WINDOW_S: Final = 0.25  # the system counts processor time in hundredths of a second


class ThreadLimit:
    """The number of threads that have a processor for themselves, at least one and at most as many as torch has.
    Programs that give way (`nice`) take no processor from them.

    Example:
        >>> limit = ThreadLimit()
        >>> with limit.applied():  # doctest: +SKIP
        ...     logits = model(tokens)
    """

    def __init__(self) -> None:
        self._team = _Team()
        self._others: OtherWork | None = None
        self._free: int | None = None  # processors that others left in the last window
        self._window_ends = 0.0

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Limits this thread's parallel loops, torch's too."""
        most = torch.get_num_threads()
        if most > 1:
            self._look(most)
        if self._free is None or self._free >= most:
            yield
            return
        set_num_threads(self._free)
        try:
            yield
        finally:
            set_num_threads(most)

    def _look(self, num_threads: int) -> None:
        """Looks four times a second at most at how busy others keep the processors."""
        now = time.monotonic()
        if now < self._window_ends:
            return
        self._window_ends = now + _WINDOW_S
        cores = None if self._others is None else self._others.cores()
        self._free = None if cores is None else max(1, round(len(os.sched_getaffinity(0)) - cores))
        # those of the loops until the next look: a smaller team ends the other threads, whose time is then unknown
        self._team.find(num_threads if self._free is None else min(num_threads, self._free))
        gives_way = os.getpriority(os.PRIO_PROCESS, 0) > 0  # then its own time is counted as that of such programs
        self._others = OtherWork(self._team.seconds, counts_nice=gives_way)


class _Team:
    """The threads of one thread's parallel loops. Other threads of this process need processors too."""

    def __init__(self) -> None:
        self._known_for = (0, 0)  # the thread whose loops they run, and how many threads these may use
        self._threads: list[int] = []

    def find(self, num_threads: int) -> None:
        """Finds the threads of this thread's loops, if they are not known."""
        wanted_for = threading.get_ident(), num_threads
        if wanted_for != self._known_for or math.isnan(self.seconds()):
            self._known_for, self._threads = wanted_for, team(num_threads)

    def seconds(self) -> float:
        """Processor time that they have taken; nan if one of them has ended."""
        try:
            return sum(time.clock_gettime(~thread << 3 | 6) for thread in self._threads)  # see pthread_getcpuclockid(3)
        except OSError:
            return math.nan
