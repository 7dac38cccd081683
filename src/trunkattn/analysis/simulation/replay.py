"""A log replayed at one setting: which requests run together, what they share, and what each step costs.

Requests go through the scheduler and the cache manager of this project (`simulated`). Each step is priced twice, with
attention one by one and with sharing (`prices`). In a closed loop the steps do not depend on their times, so both
clocks run beside each other. Where requests arrive by time, a slower engine has more of them at once: then the log is
replayed once for each clock, and each one's times are those of its own replay.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import Final

from trunkattn.analysis.pricing.prices import Prices
from trunkattn.analysis.records import Moment, Replay, Snapshot
from trunkattn.analysis.simulation.engine import EngineSize
from trunkattn.analysis.simulation.load import Feed, Load, Workload
from trunkattn.analysis.simulation.timed_engine import ONE_BY_ONE, SHARED, Answers, TimedEngine
from trunkattn.analysis.simulation.timeline import Sums
from trunkattn.engine.scheduling.scheduler import SchedulerStats

_REPORT_EVERY: Final = 256  # calls of `advance`


@dataclass(frozen=True)
class Outcome:
    """The state of an engine after all requests have ended.

    Attributes:
        seconds, busy: [clocks] time of the whole run, and time in which there was work.
        answers, sums, stats, moments, snapshots: records of the run.
    """

    seconds: tuple[float, float]
    busy: tuple[float, float]
    answers: Answers
    sums: Sums
    stats: SchedulerStats
    moments: list[Moment]
    snapshots: list[Snapshot]

    @classmethod
    def of(cls, engine: TimedEngine) -> "Outcome":
        """The outcome of an engine."""
        (one_by_one, shared), (busy_one_by_one, busy_shared) = engine.now.tolist(), engine.busy.tolist()
        return cls(
            seconds=(one_by_one, shared),
            busy=(busy_one_by_one, busy_shared),
            answers=engine.answers,
            sums=engine.sums,
            stats=engine.engine.scheduler.stats,
            moments=engine.timeline.moments(),
            snapshots=engine.album.snapshots,
        )

    def tpot_ms(self, clock: int) -> float:
        """Mean time per output token after the first."""
        return 1e3 * float(self.answers.after_first[clock]) / max(1, self.answers.tokens_after_first)

    def ttft_ms(self, clock: int) -> float:
        """Mean time to the first token."""
        return 1e3 * float(self.answers.to_first[clock]) / max(1, self.answers.first)

    def tokens_per_s(self, clock: int) -> float:
        """Generated tokens per second with work."""
        return self.answers.num_tokens / self.busy[clock] if self.busy[clock] else 0.0


def replay(
    workload: Workload, size: EngineSize, prices: Prices, load: Load, progress: Callable[[float], None] | None = None
) -> Replay:
    """Replays a workload.

    Args:
        workload: the requests that fit.
        size: the engine. A closed loop runs at most its own number of sequences.
        prices: of the model on a card.
        load: how requests come.
        progress: called now and then with the share that is done.

    Raises:
        ValueError: the load does not suit the log.
    """
    clocks = clocks_of(load)
    parts = []
    for place, clock in enumerate(clocks):
        parts.append(run(workload, size, prices, load, clock, _part(progress, place, len(clocks))))
    return replay_of(load, size, parts)


def clocks_of(load: Load) -> tuple[int, ...]:
    """The clocks by which a load is to be replayed."""
    return (SHARED,) if load.concurrency is not None else (SHARED, ONE_BY_ONE)


def replay_of(load: Load, size: EngineSize, outcomes: list[Outcome]) -> Replay:
    """The result of a load. outcomes: of the engines, one for each of `clocks_of`."""
    shared, one_by_one = outcomes[0], outcomes[-1]
    return Replay(
        name=load.name,
        concurrency=size.max_num_seqs if load.concurrency is None else load.concurrency,
        rate=load.rate,
        seconds=shared.seconds[SHARED],
        num_requests=shared.answers.num_requests,
        num_output_tokens=shared.answers.num_tokens,
        hit_rate=shared.stats.prefix_cache_hits / max(1, shared.stats.prefix_cache_queries),
        tpot_ms=one_by_one.tpot_ms(ONE_BY_ONE),
        shared_tpot_ms=shared.tpot_ms(SHARED),
        ttft_ms=one_by_one.ttft_ms(ONE_BY_ONE),
        shared_ttft_ms=shared.ttft_ms(SHARED),
        tokens_per_s=one_by_one.tokens_per_s(ONE_BY_ONE),
        shared_tokens_per_s=shared.tokens_per_s(SHARED),
        num_decode_steps=int(shared.sums.decode_steps),
        kv_bytes=shared.sums.kv_bytes,
        unique_kv_bytes=shared.sums.unique_kv_bytes,
        preemptions=shared.stats.preemptions,
        moments=shared.moments,
        snapshots=shared.snapshots,
    )


def run(
    workload: Workload,
    size: EngineSize,
    prices: Prices,
    load: Load,
    clock: int,
    progress: Callable[[float], None] | None = None,
) -> Outcome:
    """The outcome of one engine. clock: the clock that arrivals follow. Other arguments and errors are those of
    `replay`."""
    if load.concurrency is not None:
        answers = int(workload.requests.rows["num_answers"].max(initial=1))
        size = replace(size, max_num_seqs=max(load.concurrency, answers))
    engine = TimedEngine(size, prices, workload.source, clock)
    feed = Feed(workload, load.times(workload.requests))
    unfinished = calls = 0
    while feed or engine.has_work:
        if load.concurrency is None:
            while feed and (feed.next_time <= engine.time or not engine.has_work):
                time, job = feed.pop()
                engine.add(job, time)
        else:
            while feed and (unfinished == 0 or unfinished + feed.next_answers <= load.concurrency):
                job = feed.pop()[1]
                unfinished += job.logged.num_answers
                engine.add(job)
        for job in engine.advance(inf if load.concurrency is not None else feed.next_time):
            unfinished -= job.logged.num_answers
            feed.ended(job, engine.time)
        calls += 1
        if progress is not None and calls % _REPORT_EVERY == 0:
            progress(engine.answers.num_requests / max(1, len(workload.requests)))
    if progress is not None:
        progress(1.0)
    return Outcome.of(engine)


def _part(progress: Callable[[float], None] | None, place: int, number: int) -> Callable[[float], None] | None:
    """The progress of one of several parts."""
    return None if progress is None else lambda share: progress((place + share) / number)
