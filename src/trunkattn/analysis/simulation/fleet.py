"""Replays a log on several engines, each with its own cache, to find what prefix-aware routing is worth."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from trunkattn.analysis.pricing.prices import Prices
from trunkattn.analysis.records import FleetReplay
from trunkattn.analysis.simulation.engine import EngineSize, Job
from trunkattn.analysis.simulation.load import Feed, Load, Workload
from trunkattn.analysis.simulation.replay import Outcome
from trunkattn.analysis.simulation.timed_engine import ONE_BY_ONE, SHARED, TimedEngine

# An engine is passed over if it has more unfinished requests than _OVERLOAD times the mean plus _OVERLOAD_FROM.
_OVERLOAD: Final = 2.0
_OVERLOAD_FROM: Final = 8
# A shared prefix counts from 1/4 of the prompt on: a prefix that all prompts have does not distinguish the engines.
_LEAST_PART: Final = 4
_REPORT_EVERY: Final = 256


@dataclass
class Replica:
    """An engine of a fleet. blocks: number of its unfinished requests with each block of the log; taken: number of
    requests that it ever got."""

    engine: TimedEngine
    blocks: Counter[int]
    unfinished: int = 0
    taken: int = 0

    def add(self, job: Job, time: float) -> None:
        """Queues a request."""
        self.unfinished += 1
        self.taken += 1
        self.blocks.update(job.logged.blocks.tolist())
        self.engine.add(job, time)

    def ended(self, job: Job) -> None:
        """Forgets a request."""
        self.unfinished -= 1
        self.blocks.subtract(job.logged.blocks.tolist())
        for block in job.logged.blocks.tolist():
            if not self.blocks[block]:
                del self.blocks[block]

    def shared_tokens(self, job: Job) -> int:
        """Leading tokens of a prompt whose blocks some unfinished requests have, too."""
        shared = 0
        for block in job.logged.blocks.tolist():
            if block not in self.blocks:
                break
            shared += job.logged.block_size
        return shared


class Router:
    """Chooses the engine of each request.

    `random` and `round-robin` ignore the prompt. `prefix` takes the engine that has most of the prompt in its cache.
    `sharers` takes the engine whose unfinished requests have most of it, and among equals the one that has most of it
    cached. A prefix counts from a quarter of the prompt on. Both break ties by the fewest unfinished requests, then by
    the fewest requests so far. Both pass over engines with far more unfinished requests than the mean.
    """

    def __init__(self, route: str, workload: Workload, seed: int) -> None:
        self._route, self._source = route, workload.source
        self._rng, self._number = np.random.default_rng(seed), 0

    def choose(self, replicas: list[Replica], job: Job) -> Replica:
        """The engine of a request."""
        self._number += 1
        if self._route == "random":
            return replicas[int(self._rng.integers(len(replicas)))]
        if self._route == "round-robin":
            return replicas[self._number % len(replicas)]
        most = _OVERLOAD * sum(each.unfinished for each in replicas) / len(replicas) + _OVERLOAD_FROM
        free = [each for each in replicas if each.unfinished <= most]
        tokens = self._source.tokens(job.logged, 0, 0)

        def counted(num_tokens: int) -> int:
            return num_tokens if num_tokens * _LEAST_PART >= job.logged.num_prompt_tokens else 0

        def worth(replica: Replica) -> tuple[int, int, int, int]:
            shared = replica.shared_tokens(job) if self._route == "sharers" else 0
            cache = replica.engine.engine.cache
            cached = len(cache.index.match(tokens)) * cache.page_size
            return counted(shared), counted(cached), -replica.unfinished, -replica.taken

        return max(free, key=worth)


@dataclass(frozen=True)
class Fleet:
    """Engines, and how requests are routed to them; see `Router`."""

    replicas: int
    route: str
    seed: int = 0


def run_fleet(
    workload: Workload,
    size: EngineSize,
    prices: Prices,
    load: Load,
    fleet: Fleet,
    clock: int,
    progress: Callable[[float], None] | None = None,
) -> list[Outcome]:
    """The outcome of each engine. clock: the one that arrivals follow; other arguments are those of `replay`.

    Raises:
        ValueError: the load does not suit the log.
    """
    replicas = [Replica(TimedEngine(size, prices, workload.source, clock), Counter()) for _ in range(fleet.replicas)]
    feed = Feed(workload, load.times(workload.requests))
    router, calls, ended = Router(fleet.route, workload, fleet.seed), 0, 0
    while True:
        busy = [replica for replica in replicas if replica.engine.has_work]
        if not busy and not feed:
            break
        first = min(busy, key=lambda replica: replica.engine.time, default=None)
        if first is not None and first.engine.time < feed.next_time:
            for job in first.engine.advance(feed.next_time):
                first.ended(job)
                feed.ended(job, first.engine.time)
                ended += 1
        else:
            time, job = feed.pop()
            router.choose(replicas, job).add(job, time)
        calls += 1
        if progress is not None and calls % _REPORT_EVERY == 0:
            progress(ended / max(1, len(workload.requests)))
    return [Outcome.of(replica.engine) for replica in replicas]


def fleet_replay(fleet: Fleet, shared: list[Outcome], one_by_one: list[Outcome]) -> FleetReplay:
    """The result of a fleet. shared, one_by_one: outcomes of its engines, with arrivals by either clock."""
    queries = sum(each.stats.prefix_cache_queries for each in shared)
    tokens = [each.answers.num_tokens for each in shared]
    return FleetReplay(
        route=fleet.route,
        replicas=fleet.replicas,
        hit_rate=sum(each.stats.prefix_cache_hits for each in shared) / max(1, queries),
        tpot_ms=_mean_ms(one_by_one, ONE_BY_ONE),
        shared_tpot_ms=_mean_ms(shared, SHARED),
        ttft_ms=_mean_wait_ms(one_by_one, ONE_BY_ONE),
        shared_ttft_ms=_mean_wait_ms(shared, SHARED),
        tokens_per_s=_tokens_per_s(one_by_one, ONE_BY_ONE),
        shared_tokens_per_s=_tokens_per_s(shared, SHARED),
        balance=max(tokens) * len(tokens) / max(1, sum(tokens)),
        kv_bytes=sum(each.sums.kv_bytes for each in shared),
        unique_kv_bytes=sum(each.sums.unique_kv_bytes for each in shared),
    )


def _mean_ms(outcomes: list[Outcome], clock: int) -> float:
    seconds = sum(float(each.answers.after_first[clock]) for each in outcomes)
    return 1e3 * seconds / max(1, sum(each.answers.tokens_after_first for each in outcomes))


def _mean_wait_ms(outcomes: list[Outcome], clock: int) -> float:
    seconds = sum(float(each.answers.to_first[clock]) for each in outcomes)
    return 1e3 * seconds / max(1, sum(each.answers.first for each in outcomes))


def _tokens_per_s(outcomes: list[Outcome], clock: int) -> float:
    """Generated tokens of all engines per second in which the busiest one has work."""
    busiest = max((each.busy[clock] for each in outcomes), default=0.0)
    return sum(each.answers.num_tokens for each in outcomes) / busiest if busiest else 0.0
