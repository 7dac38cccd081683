"""When requests of a log arrive: by time, or at a fixed concurrency; each turn of a session after the one before."""

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from math import inf

import numpy as np

from trunkattn.analysis.records import LoggedRequest
from trunkattn.analysis.simulation.sequences import TokenSource
from trunkattn.analysis.simulation.simulated import EngineSize, Job


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
        logged = [request.arrival for request in requests if request.arrival is not None]
        has_times = len(logged) == len(requests) and bool(logged) and max(logged) > min(logged)
        if self.rate is None:
            if not has_times:
                raise ValueError(
                    "the log has no times of arrival that differ: expected a number of requests at a time, or a rate"
                )
            return [time - logged[0] for time in logged]
        if not 0 < self.rate < float("inf"):
            raise ValueError(f"rate={self.rate!r}: expected a finite number above 0, in requests per second")
        if has_times:
            scale = len(logged) / self.rate / (max(logged) - min(logged))
            return [(time - logged[0]) * scale for time in logged]
        gaps = np.random.default_rng(self.seed).exponential(1 / self.rate, len(requests))
        return (np.cumsum(gaps) - gaps[0]).tolist() if len(gaps) else []


@dataclass(frozen=True)
class Workload:
    """The requests of a log that an engine can hold.

    Attributes:
        jobs: the log's requests with the lengths of their answers, in order.
        source: their tokens.
        num_left_out: requests that need more pages than the cache has.
        num_guessed: requests for which the log names no answer length.
    """

    jobs: list[tuple[LoggedRequest, int]]
    source: TokenSource
    num_left_out: int
    num_guessed: int

    @classmethod
    def of(cls, requests: Sequence[LoggedRequest], size: EngineSize, output_tokens: int) -> "Workload":
        """The requests that fit. output_tokens: answer length where the log names none."""
        lengths = [each.num_output_tokens for each in requests]
        known = [output_tokens if length is None else max(1, length) for length in lengths]
        jobs = list(zip(requests, known, strict=True))
        kept = [(each, tokens) for each, tokens in jobs if size.fits(each, tokens)]
        guessed = sum(each.num_output_tokens is None for each, _ in kept)
        return cls(kept, TokenSource([each for each, _ in kept]), len(jobs) - len(kept), guessed)


class Feed:
    """Requests in order of their times. A turn of a session waits until the turn before it has ended."""

    def __init__(self, jobs: Sequence[tuple[LoggedRequest, int]], times: Sequence[float]) -> None:
        self._jobs, self._times = jobs, times
        self._next: dict[int, int] = {}  # number of a turn -> number of the turn after it
        self.numbers = {request.key: number for number, (request, _) in enumerate(jobs)}
        last: dict[str, int] = {}
        for number in sorted(range(len(jobs)), key=lambda number: jobs[number][0].turn):
            session = jobs[number][0].session
            if session is not None and session in last:
                self._next[last[session]] = number
            if session is not None:
                last[session] = number
        followers = set(self._next.values())
        self._ready = [(times[number], number) for number in range(len(jobs)) if number not in followers]
        heapify(self._ready)

    def __bool__(self) -> bool:
        """Whether a request is ready, now or later."""
        return bool(self._ready)

    @property
    def next_time(self) -> float:
        """Time of the next request; infinity if none is ready."""
        return self._ready[0][0] if self._ready else inf

    @property
    def next_answers(self) -> int:
        """Answers of the next request."""
        return self._jobs[self._ready[0][1]][0].num_answers

    def pop(self) -> tuple[float, Job]:
        """The next request, and when it comes."""
        time, number = heappop(self._ready)
        logged, num_output_tokens = self._jobs[number]
        return time, Job(logged, num_output_tokens)

    def ended(self, job: Job, time: float) -> None:
        """Lets the turn after a finished request begin: now, or at its own time if that is later."""
        follower = self._next.get(self.numbers[job.logged.key])
        if follower is not None:
            heappush(self._ready, (max(time, self._times[follower]), follower))
