"""A log replayed at one setting: which requests run together, what they share, and what each step costs.

Requests go through the scheduler and the cache manager of this project (`simulated`). Each step is priced twice, with
attention one by one and with sharing (`prices`). In a closed loop the steps do not depend on their times, so both
clocks run beside each other. Where requests arrive by time, a slower engine has more of them at once: then the log is
replayed once for each clock, and each one's times are those of its own replay.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from trunkattn.analysis.load import Feed, Load, Workload
from trunkattn.analysis.prices import Prices
from trunkattn.analysis.records import Replay
from trunkattn.analysis.simulated import EngineSize
from trunkattn.analysis.timed import ALONE, SHARED, TimedEngine

_REPORT_EVERY = 256  # calls of `advance`


def replay(
    workload: Workload,
    size: EngineSize,
    prices: Prices,
    load: Load,
    progress: Callable[[float], None] | None = None,
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
    if load.concurrency is not None:
        answers = max((logged.num_answers for logged, _ in workload.jobs), default=1)
        size = replace(size, max_num_seqs=max(load.concurrency, answers))
        shared = alone = _run(workload, size, prices, load, SHARED, progress)
    else:
        halves = [None, None] if progress is None else [_part(progress, 0.0), _part(progress, 0.5)]
        shared, alone = (_run(workload, size, prices, load, clock, half)
                         for clock, half in zip((SHARED, ALONE), halves, strict=True))  # fmt: skip
    slow, fast = alone.answers, shared.answers
    stats = shared.engine.scheduler.stats
    return Replay(
        name=load.name,
        concurrency=size.max_num_seqs,
        rate=load.rate,
        seconds=float(shared.now[SHARED]),
        num_requests=fast.num_requests,
        num_output_tokens=fast.num_tokens,
        hit_rate=stats.prefix_cache_hits / max(1, stats.prefix_cache_queries),
        tpot_ms=1e3 * float(slow.after_first[ALONE]) / max(1, slow.tokens_after_first),
        shared_tpot_ms=1e3 * float(fast.after_first[SHARED]) / max(1, fast.tokens_after_first),
        ttft_ms=1e3 * float(slow.to_first[ALONE]) / max(1, slow.first),
        shared_ttft_ms=1e3 * float(fast.to_first[SHARED]) / max(1, fast.first),
        tokens_per_s=slow.num_tokens / max(1e-9, float(alone.busy[ALONE])),
        shared_tokens_per_s=fast.num_tokens / max(1e-9, float(shared.busy[SHARED])),
        kv_bytes=shared.sums.kv_bytes,
        unique_kv_bytes=shared.sums.unique_kv_bytes,
        preemptions=stats.preemptions,
        moments=shared.timeline.moments(),
        snapshots=shared.album.snapshots,
    )


def _run(
    workload: Workload,
    size: EngineSize,
    prices: Prices,
    load: Load,
    clock: int,
    progress: Callable[[float], None] | None,
) -> TimedEngine:
    """An engine after all requests have ended. clock: by which they come."""
    engine = TimedEngine(size, prices, workload.source, clock)
    feed = Feed(workload.jobs, load.times([logged for logged, _ in workload.jobs]))
    in_engine = calls = 0  # answers that are not finished
    while feed or engine.has_work:
        if load.concurrency is not None:
            while feed and (in_engine == 0 or in_engine + feed.next_answers <= load.concurrency):
                _, job = feed.pop()
                in_engine += job.logged.num_answers
                engine.add(job)
        else:
            while feed and (feed.next_time <= engine.time or not engine.has_work):
                time, job = feed.pop()
                engine.add(job, time)
        for job in engine.advance(inf if load.concurrency is not None else feed.next_time):
            in_engine -= job.logged.num_answers
            feed.ended(job, engine.time)
        calls += 1
        if progress is not None and calls % _REPORT_EVERY == 0:
            progress(engine.answers.num_requests / max(1, len(workload.jobs)))
    if progress is not None:
        progress(1.0)
    return engine


def _part(progress: Callable[[float], None], start: float) -> Callable[[float], None]:
    """The progress of a half that begins at `start`."""
    return lambda share: progress(start + share / 2)
