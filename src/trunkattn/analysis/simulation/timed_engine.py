"""A simulated engine with two clocks: the times of steps and answers without sharing and with it."""

from array import array
from dataclasses import dataclass, field
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.pricing.prices import AttentionTimes, DecodeBatch, Prices
from trunkattn.analysis.simulation.block_table import BlockTable
from trunkattn.analysis.simulation.engine import Ends, EngineSize, Job, SimulatedEngine, Steps
from trunkattn.analysis.simulation.sequences import TokenSource
from trunkattn.analysis.simulation.timeline import Album, Sums, Timeline

ONE_BY_ONE: Final = 0  # the clock of an engine in which each request reads its own KV
SHARED: Final = 1  # the clock of an engine with sharing
_PRICE_AGAIN: Final = 0.04  # a change of this share in sequences or tokens makes a new price necessary
_SECONDS: Final = 1e-6  # in a µs


class _Priced(NamedTuple):
    """A decode step whose price is scaled for similar steps. read_shares: see `Prices`."""

    decoding: int
    tokens: int
    unique_tokens: int
    times: AttentionTimes
    read_shares: tuple[float, float]

    def is_like(self, steps: Steps) -> bool:
        """Whether the steps differ so little from this one that its price can be scaled for them."""
        pairs = (
            (self.decoding, steps.decoding),
            (self.tokens, steps.tokens[0]),
            (self.unique_tokens, steps.unique_tokens[0]),
        )
        return all(abs(mine - other) <= _PRICE_AGAIN * mine for mine, other in pairs)


class _StepTimes(NamedTuple):
    """µs of some steps [clocks, steps]. attention: of their attention. whole: of the whole steps."""

    attention: NDArray[np.float64]
    whole: NDArray[np.float64]

    def first(self, count: int) -> "_StepTimes":
        """The times of the first steps."""
        return _StepTimes(self.attention[:, :count], self.whole[:, :count])


@dataclass
class Answers:
    """Latencies that users see, as sums over requests, on each clock.

    Attributes:
        num_requests, num_tokens: requests that have ended, and generated tokens.
        first: requests that have got their first token.
        to_first: [clocks] seconds from arrival to the first token.
        after_first: [clocks] seconds from a sequence's first token to its last.
        tokens_after_first: tokens generated in these seconds.
        paces: seconds per token on both clocks, pair after pair, for each sequence of several tokens.
    """

    num_requests: int = 0
    num_tokens: int = 0
    first: int = 0
    tokens_after_first: int = 0
    to_first: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))
    after_first: NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))
    paces: "array[float]" = field(default_factory=lambda: array("d"))


class TimedEngine:
    """A `SimulatedEngine` whose steps take time on two clocks: one by one, and shared.

    Attributes:
        engine: the engine without clocks.
        now: [clocks] seconds since the first request arrived.
        busy: [clocks] seconds in which there was work.
        answers, sums, timeline, album: records of the run so far.
    """

    def __init__(self, size: EngineSize, prices: Prices, source: TokenSource, clock: int = SHARED) -> None:
        """Makes an idle engine. clock: the clock that arrivals follow."""
        self.engine = SimulatedEngine(size, source)
        self.now, self.busy = np.zeros(2), np.zeros(2)
        self.answers, self.sums, self.timeline, self.album = Answers(), Sums(), Timeline(), Album()
        self._prices, self._clock = prices, clock
        self._table = BlockTable(self.engine.cache)
        self._priced: _Priced | None = None
        self._arrived: dict[tuple[int, int], NDArray[np.float64]] = {}  # request key -> arrival, until the first token
        self._first: dict[str, NDArray[np.float64]] = {}  # sequence -> time of its first token
        self._looked_up = self._found = 0

    @property
    def time(self) -> float:
        """Seconds on the clock that arrivals follow."""
        return float(self.now[self._clock])

    @property
    def has_work(self) -> bool:
        """Whether a request is unfinished."""
        return self.engine.scheduler.has_unfinished

    def add(self, job: Job, arrived: float | None = None) -> None:
        """Queues a request. arrived: its arrival, until which an idle engine waits; None: now, on both clocks."""
        if arrived is not None and not self.has_work:
            self.now = np.maximum(self.now, arrived)
        self._arrived[job.logged.key] = self.now.copy() if arrived is None else np.full(2, arrived)
        self.engine.add(job)

    def advance(self, until: float) -> list[Job]:
        """Computes one step, or several steps of decodes only, and returns the requests that ended with them.

        Args:
            until: arrival of the next request. No step begins after it, unless that request would have to wait.
        """
        steps = self.engine.decodes()
        if steps is not None:
            times = self._times(steps)
            count = steps.count
            if not self.engine.is_full:
                ends = self.time + np.cumsum(times.whole[self._clock]) * _SECONDS
                count = min(count, int(np.searchsorted(ends, until)) + 1)
            done = self.engine.run(count)
            if done:
                self._record(steps, times.first(done))
                return []
        steps = self.engine.schedule()
        times = self._times(steps)
        self._record(steps, times)
        return self._note(self.engine.update())

    def _note(self, ends: Ends) -> list[Job]:
        """Notes when answers begin and end."""
        answers = self.answers
        for request, job in ends.started:
            self._first[request.request_id] = self.now.copy()
            arrived = self._arrived.pop(job.logged.key, None)
            if arrived is not None:
                answers.first += 1
                answers.to_first += self.now - arrived
        for request in ends.ended:
            seconds, num_tokens = self.now - self._first.pop(request.request_id), request.num_output_tokens - 1
            answers.after_first += seconds
            answers.tokens_after_first += num_tokens
            if num_tokens:
                answers.paces.extend((seconds / num_tokens).tolist())
            answers.num_tokens += request.num_output_tokens
        answers.num_requests += len(ends.finished)
        return ends.finished

    def _times(self, steps: Steps) -> _StepTimes:
        """How long steps take on both clocks."""
        chunks = steps.chunks
        num_sampled = steps.decoding + sum(chunk.is_sampled for chunk in chunks)
        num_prompt_tokens = sum(chunk.num_tokens for chunk in chunks)
        other_us = self._prices.other_us(num_sampled, steps.decoding, num_prompt_tokens)
        if chunks:
            pairs = sum(chunk.num_tokens * (chunk.start + (chunk.num_tokens + 1) / 2) for chunk in chunks)
            other_us += self._prices.prompt_attention_us(pairs)
        attention = np.zeros((2, steps.count))
        if steps.decoding:
            attention[ONE_BY_ONE], attention[SHARED] = self._attention(steps)
        return _StepTimes(attention, attention + other_us)

    def _attention(self, steps: Steps) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[steps] µs of attention of decodes, one by one and shared."""
        wants_tree = self.album.wants(self.time)
        if self._priced is None or wants_tree or not self._priced.is_like(steps):
            self._priced = self._price(steps, wants_tree)
        priced = self._priced
        counts = priced.tokens, priced.unique_tokens
        return self._prices.scaled(priced.times, counts, steps.tokens, steps.unique_tokens)

    def _price(self, steps: Steps, wants_tree: bool) -> _Priced:
        seq_lens = np.array([request.num_computed_tokens + 1 for request in steps.decodes], np.int32)
        table = self._table.of(steps.decodes, seq_lens)
        batch = DecodeBatch.of(table, seq_lens, self.engine.cache.page_size)
        if wants_tree:
            self.album.add(self.time, batch, self.engine.keys(steps.decodes))
        times = self._prices.attention(batch)
        shares = self._prices.read_shares(batch)
        return _Priced(steps.decoding, int(steps.tokens[0]), int(steps.unique_tokens[0]), times, shares)

    def _record(self, steps: Steps, times: _StepTimes) -> None:
        """Lets the clocks go on over steps. times: of the first of them, which are all that were computed."""
        count, stats, token_bytes = times.whole.shape[1], self.engine.scheduler.stats, self._prices.token_bytes
        attention_us, whole_us = times.attention.sum(axis=1), times.whole.sum(axis=1)
        shares = (1.0, 1.0) if self._priced is None else self._priced.read_shares
        sums = Sums(
            num_steps=count,
            decode_steps=count if steps.decoding else 0,
            decoding=steps.decoding * count,
            waiting=len(self.engine.scheduler.waiting) * count,
            kv_bytes=int(steps.tokens[:count].sum()) * token_bytes * shares[ONE_BY_ONE],
            unique_kv_bytes=int(steps.unique_tokens[:count].sum()) * token_bytes * shares[SHARED],
            attention_us=float(attention_us[ONE_BY_ONE]),
            shared_attention_us=float(attention_us[SHARED]),
            step_us=float(whole_us[ONE_BY_ONE]),
            shared_step_us=float(whole_us[SHARED]),
            prompt_tokens=stats.prefix_cache_queries - self._looked_up,
            cached_tokens=stats.prefix_cache_hits - self._found,
        )
        self._looked_up, self._found = stats.prefix_cache_queries, stats.prefix_cache_hits
        self.timeline.add(self.time, sums)
        self.sums.add(sums)
        self.now = self.now + whole_us * _SECONDS
        self.busy = self.busy + whole_us * _SECONDS
