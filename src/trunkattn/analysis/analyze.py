"""A whole analysis: replays at several settings, what spoils sharing, a fleet, and a verdict in one sentence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from trunkattn.analysis.ceiling import ceiling_of
from trunkattn.analysis.figures import plural, saved
from trunkattn.analysis.parallel import num_cores, run_all
from trunkattn.analysis.pricing.memory import cache_pages
from trunkattn.analysis.pricing.model_shape import model_shape
from trunkattn.analysis.pricing.prices import Prices
from trunkattn.analysis.records import Analysis, FleetReplay, Log, Replay, Spoiler
from trunkattn.analysis.reports.words import assumptions, beside, overload, verdict
from trunkattn.analysis.settings import ROUTES, Progress, Settings
from trunkattn.analysis.simulation.engine import EngineSize
from trunkattn.analysis.simulation.fleet import Fleet, fleet_replay, run_fleet
from trunkattn.analysis.simulation.load import Load, Workload, has_times
from trunkattn.analysis.simulation.replay import clocks_of, replay_of, run
from trunkattn.analysis.simulation.timed_engine import ONE_BY_ONE, SHARED
from trunkattn.analysis.spoilers.search import find_spoilers, rewritten
from trunkattn.gpu.cards import card_named

_SMALL: Final = 2000  # requests; fewer are replayed in this process
_SPOILED: Final = 4000  # requests that are replayed without a spoiler, and spoilers whose gains are found so
_REPLAYED: Final = 8


@dataclass(frozen=True)
class Setup:
    """What all replays of an analysis have in common."""

    settings: Settings
    prices: Prices
    size: EngineSize

    def workload(self, log: Log, limit: int | None = None) -> Workload:
        """The first requests of a log."""
        return Workload.of(log.requests[:limit], self.size, self.settings.output_tokens)


def analyze(log: Log, settings: Settings, progress: Progress | None = None) -> Analysis:
    """Replays a log and says what sharing prefixes is worth.

    Args:
        log: what a reader returned.
        settings: see `Settings`.
        progress: see `Progress`.

    Raises:
        ValueError: the log has no request that fits, or a setting is out of range. No replay has begun then.
    """
    progress = progress or _silent
    if not log.requests:
        raise ValueError(f"{log.source}: it has no request that could be read: expected at least one")
    setup = setup_of(settings)
    loads = _loads(log, settings)
    whole = setup.workload(log)
    first = whole if settings.max_requests is None else setup.workload(log, settings.max_requests)
    if not first.requests:
        raise ValueError(
            f"{log.source}: none of its {len(log.requests)} requests fits in {plural(setup.size.num_pages, 'page')} of "
            f"{setup.size.page_size} tokens with all of its answers in max_num_seqs={setup.size.max_num_seqs} "
            "sequences: expected a larger cache, or more sequences"
        )
    workloads = [whole] + [first] * (len(loads) - 1)
    replays = _replays(setup, loads, workloads, partial(progress, "replaying"))
    spoilers = _spoilers(setup, log, loads[0], progress) if settings.find_spoilers else []
    fleet = _fleet(setup, first, loads[0], partial(progress, "replaying a fleet")) if settings.replicas > 1 else []
    return Analysis(
        log=log,
        card=setup.prices.card.model.name,
        model=setup.prices.shape.name,
        token_bytes=setup.prices.token_bytes,
        replays=replays,
        spoilers=spoilers,
        assumptions=[
            *assumptions(log, setup.prices, setup.size, whole, len(first.requests)),
            *beside(spoilers, min(_SPOILED, len(first.requests)), fleet),
            *overload(replays[0]),
        ],
        verdict=verdict(replays),
        ceiling=ceiling_of(log.requests),
        fleet=fleet,
    )


def setup_of(settings: Settings) -> Setup:
    """What all replays have in common.

    Raises:
        ValueError: card or model are not known, or do not go together.
    """
    card, shape = card_named(settings.card), model_shape(settings.model)
    prices = Prices(shape, card, settings.page_size, settings.tensor_parallel, settings.kv_cache_dtype)
    size = EngineSize(
        num_pages=cache_pages(settings, shape, card),
        page_size=settings.page_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        scheduler_policy=settings.scheduler_policy,
        enable_prefix_caching=settings.enable_prefix_caching,
    )
    return Setup(settings, prices, size)


def _loads(log: Log, settings: Settings) -> list[Load]:
    """The loads to replay, the one that the report is about first.

    Raises:
        ValueError: there is none, or a rate is out of range.
    """
    by_time = [Load(rate=rate, seed=settings.seed) for rate in settings.rates]
    closed = [Load(concurrency) for concurrency in sorted(set(settings.concurrencies))]
    for load in by_time:
        load.times(log.requests)
    if settings.as_logged and has_times(log.requests):
        return [Load(), *by_time, *closed]
    if settings.replicas > 1 and not by_time:
        raise ValueError(
            f"replicas={settings.replicas}: {log.source} has no times of arrival that differ: expected a rate, with it"
        )
    if not by_time and not closed:
        raise ValueError(
            f"{log.source} has no times of arrival that differ: expected requests at a time, or a rate, to replay it"
        )
    middle = closed[len(closed) // 2 :][:1] if not by_time else []
    return [*by_time, *middle, *(load for load in closed if load not in middle)]


def _replays(
    setup: Setup, loads: Sequence[Load], workloads: Sequence[Workload], progress: Callable[[float], None]
) -> list[Replay]:
    """A replay for each load, of the workload in its place."""
    parts = [(place, clock) for place, load in enumerate(loads) for clock in clocks_of(load)]
    tasks = [partial(run, workloads[place], setup.size, setup.prices, loads[place], clock) for place, clock in parts]
    weights = [len(workloads[place].requests) for place, _ in parts]
    outcomes = run_all(tasks, weights, progress, _workers(weights))
    done = list(zip(parts, outcomes, strict=True))
    return [
        replay_of(load, setup.size, [outcome for part, outcome in done if part[0] == place])
        for place, load in enumerate(loads)
    ]


def _spoilers(setup: Setup, log: Log, load: Load, progress: Progress) -> list[Spoiler]:
    """What spoils sharing, with the gains of the most expensive ones: the log is replayed without each of them."""
    findings = find_spoilers(log, progress)
    if not findings:
        return []
    limit = min(_SPOILED, len(log.requests), setup.settings.max_requests or _SPOILED)
    logs = [log, *(rewritten(_beginning(log, limit), finding, limit) for finding in findings[:_REPLAYED])]
    tasks = [partial(run, setup.workload(each, limit), setup.size, setup.prices, load, SHARED) for each in logs]
    weights = [1.0] * len(tasks)
    say = partial(progress, "replaying without spoilers")
    before, *after = run_all(tasks, weights, say, _workers([limit * len(tasks)]))
    gains = [
        replace(
            finding.spoiler,
            gain_tpot=saved(before.tpot_ms(SHARED), each.tpot_ms(SHARED)),
            gain_prompt_tokens=(each.stats.prefix_cache_hits - before.stats.prefix_cache_hits)
            * len(log.requests)
            // limit,
        )
        for finding, each in zip(findings, after, strict=False)
    ]
    return [*gains, *(finding.spoiler for finding in findings[_REPLAYED:])]


def _beginning(log: Log, count: int) -> Log:
    """The first requests of a log, with their texts and contents."""
    texts = None if log.texts is None else log.texts[:count]
    contents = None if log.contents is None else log.contents[:count]
    return replace(log, requests=log.requests[:count], texts=texts, contents=contents)


def _fleet(setup: Setup, workload: Workload, load: Load, progress: Callable[[float], None]) -> list[FleetReplay]:
    """A replay on several engines for each way to route."""
    settings = setup.settings
    routes = ROUTES if settings.route is None else (settings.route,)
    fleets = [Fleet(settings.replicas, route, settings.seed) for route in routes]
    parts = [(fleet, clock) for fleet in fleets for clock in (SHARED, ONE_BY_ONE)]
    tasks = [partial(run_fleet, workload, setup.size, setup.prices, load, fleet, clock) for fleet, clock in parts]
    weights = [float(len(workload.requests))] * len(tasks)
    outcomes = run_all(tasks, weights, progress, _workers(weights))
    return [
        fleet_replay(fleet, shared, one_by_one)
        for fleet, shared, one_by_one in zip(fleets, outcomes[::2], outcomes[1::2], strict=True)
    ]


def _workers(weights: Sequence[float]) -> int:
    """How many processes replay workloads of these numbers of requests."""
    return num_cores() if max(weights) >= _SMALL else 1


def _silent(what: str, share: float) -> None:
    """A progress that is shown nowhere."""
