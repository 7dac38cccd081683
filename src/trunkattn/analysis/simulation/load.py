"""When requests of a log arrive: by time, or at a fixed concurrency; each turn of a session after the one before."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from typing import overload

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.records import LoggedRequest
from trunkattn.analysis.requests import UNKNOWN, Requests
from trunkattn.analysis.simulation.engine import EngineSize, Job
from trunkattn.analysis.simulation.sequences import TokenSource


@dataclass(frozen=True)
class Load:
    """How requests come.

    Attributes:
        concurrency: sequences that run at a time, in the log's order; when one ends, the next one comes. None: they
            come by time.
        rate: requests per second. The log's own times are scaled; without any, arrivals are a Poisson process. None:
            as logged.
        seed: of the Poisson process.
    """

    concurrency: int | None = None
    rate: float | None = None
    seed: int = 0

    @property
    def name(self) -> str:
        """What differs from other loads, for people."""
        if self.concurrency is not None:
            return f"{self.concurrency} at a time"
        return "as logged" if self.rate is None else f"{self.rate:g} requests/s"

    def times(self, requests: Sequence[LoggedRequest]) -> list[float]:
        """Seconds at which requests arrive.

        Raises:
            ValueError: as logged, and the log has no times; or the rate is not above 0.
        """
        if self.concurrency is not None:
            return [0.0] * len(requests)
        logged = Requests.of(requests).rows["arrival"]
        if self.rate is None:
            if not has_times(requests):
                raise ValueError(
                    "the log has no times of arrival that differ: expected a number of requests at a time, or a rate"
                )
            return (logged - logged[0]).tolist()  # type: ignore[no-any-return]
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"rate={self.rate!r}: expected a finite number above 0, in requests per second")
        if has_times(requests):
            scale = len(logged) / self.rate / (logged.max() - logged.min())
            return ((logged - logged[0]) * scale).tolist()  # type: ignore[no-any-return]
        gaps = np.random.default_rng(self.seed).exponential(1 / self.rate, len(requests))
        return (np.cumsum(gaps) - gaps[0]).tolist() if len(gaps) else []


def has_times(requests: Sequence[LoggedRequest]) -> bool:
    """Whether requests have times of arrival that differ."""
    arrivals = Requests.of(requests).rows["arrival"]
    return bool(len(arrivals)) and bool(arrivals.max() > arrivals.min())  # which is false if one has no time


@dataclass(frozen=True)
class Workload:
    """The requests of a log that an engine can hold.

    Attributes:
        requests: those of the log, in order.
        lengths: int64, of their answers, in tokens.
        source: their tokens.
        num_left_out: requests that need more pages than the cache has.
        num_guessed: requests for which the log names no answer length.
    """

    requests: Requests
    lengths: NDArray[np.int64]
    source: TokenSource
    num_left_out: int
    num_guessed: int

    @classmethod
    def of(cls, requests: Sequence[LoggedRequest], size: EngineSize, output_tokens: int) -> "Workload":
        """The requests that fit. output_tokens: answer length where the log names none."""
        kept = Requests.of(requests)
        known = kept.rows["num_output_tokens"]
        lengths = np.where(known == UNKNOWN, output_tokens, np.maximum(1, known))
        fits = size.fits(kept.rows["num_prompt_tokens"] + lengths, kept.rows["num_answers"])
        kept = kept if fits.all() else kept[np.flatnonzero(fits)]
        num_guessed = int((known[fits] == UNKNOWN).sum())
        return cls(kept, lengths[fits], TokenSource(kept), len(fits) - len(kept), num_guessed)

    @property
    def jobs(self) -> "Jobs":
        """The requests with the lengths of their answers."""
        return Jobs(self.requests, self.lengths)


@dataclass(frozen=True)
class Jobs(Sequence[tuple[LoggedRequest, int]]):
    """Requests, each with the length of its answers; see `Workload`."""

    requests: Requests
    lengths: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.requests)

    @overload
    def __getitem__(self, place: int) -> tuple[LoggedRequest, int]: ...
    @overload
    def __getitem__(self, place: slice) -> "Jobs": ...
    def __getitem__(self, place: int | slice) -> "tuple[LoggedRequest, int] | Jobs":
        if isinstance(place, slice):
            return Jobs(self.requests[place], self.lengths[place])
        return self.requests[place], int(self.lengths[place])


class Feed:
    """Requests in order of their times. A turn of a session waits until the turn before it has ended."""

    def __init__(self, workload: Workload, times: Sequence[float]) -> None:
        """Takes a workload and the times of its requests, in seconds."""
        self._jobs, self._times = workload.jobs, np.array(times, np.float64)
        self._next: dict[int, int] = {}  # number of a turn -> number of the turn after it
        sessions, turns = (workload.requests.rows[name] for name in ("session", "turn"))
        numbers = np.flatnonzero(sessions != UNKNOWN)
        last: dict[int, int] = {}
        for number in numbers[np.argsort(turns[numbers], kind="stable")].tolist():
            session = int(sessions[number])
            if session in last:
                self._next[last[session]] = number
            last[session] = number
        is_first = np.ones(len(self._times), bool)
        is_first[[*self._next.values()]] = False
        first = np.flatnonzero(is_first)
        # Those that wait for no other, in order of their times, and how many have been taken.
        self._first, self._num_taken = first[np.argsort(self._times[first], kind="stable")], 0
        self._ready: list[tuple[float, int]] = []  # a heap of the others whose turn before has ended
        self._running: dict[tuple[int, int], int] = {}  # numbers of those that others may wait for, by key

    def __bool__(self) -> bool:
        """Whether a request is ready, now or later."""
        return bool(self._ready) or self._num_taken < len(self._first)

    @property
    def _upcoming(self) -> tuple[float, int]:
        """Time and number of the next request; there must be one."""
        if self._num_taken == len(self._first):
            return self._ready[0]
        number = int(self._first[self._num_taken])
        one = float(self._times[number]), number
        return min(one, self._ready[0]) if self._ready else one

    @property
    def next_time(self) -> float:
        """Time of the next request; infinity if none is ready."""
        return self._upcoming[0] if self else inf

    @property
    def next_answers(self) -> int:
        """Answers of the next request."""
        return int(self._jobs.requests.rows["num_answers"][self._upcoming[1]])

    def pop(self) -> tuple[float, Job]:
        """The next request, and when it comes."""
        time, number = self._upcoming
        if self._ready and self._ready[0] == (time, number):
            heappop(self._ready)
        else:
            self._num_taken += 1
        logged, num_output_tokens = self._jobs[number]
        if number in self._next:
            self._running[logged.key] = number
        return time, Job(logged, num_output_tokens)

    def ended(self, job: Job, time: float) -> None:
        """Lets the turn after a finished request begin: now, or at its own time if that is later."""
        number = self._running.pop(job.logged.key, None)
        if number is not None:
            follower = self._next[number]
            heappush(self._ready, (max(time, float(self._times[follower])), follower))
