"""A whole analysis: replays at several settings, what spoils sharing, a fleet, and a verdict in one sentence."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from trunkattn.analysis.load import Load, Workload
from trunkattn.analysis.model_shape import model_shape
from trunkattn.analysis.parallel import num_cores, run_all
from trunkattn.analysis.prices import Prices
from trunkattn.analysis.records import Analysis, Log, Replay
from trunkattn.analysis.replay import clocks_of, replay_of, run
from trunkattn.analysis.settings import ROUTES, Progress, Settings
from trunkattn.analysis.simulated import EngineSize
from trunkattn.engine.config import check_budget, check_scheduler_policy
from trunkattn.gpu.cards import card_named
from trunkattn.validate import check_int

_SMALL: Final = 2000  # requests; fewer are replayed in this process
_WORTH: Final = 0.02  # gains below this are nothing


@dataclass(frozen=True)
class _Setup:
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
    setup = _checked(log, settings)
    loads = _loads(log, settings)
    whole = setup.workload(log)
    first = whole if settings.max_requests is None else setup.workload(log, settings.max_requests)
    if not first.jobs:
        raise ValueError(
            f"{log.source}: none of its {len(log.requests)} requests fits in {setup.size.num_pages} pages of "
            f"{setup.size.page_size} tokens: expected requests, and a cache that holds them"
        )
    workloads = [whole] + [first] * (len(loads) - 1)
    replays = _replays(setup, loads, workloads, partial(progress, "replaying"))
    return Analysis(
        log=log,
        card=setup.prices.card.model.name,
        model=setup.prices.shape.name,
        token_bytes=setup.prices.token_bytes,
        replays=replays,
        spoilers=[],
        assumptions=assumptions(log, setup.prices, setup.size, whole, len(first.jobs)),
        verdict=verdict(replays),
    )


def _checked(log: Log, settings: Settings) -> _Setup:
    """The setup of an analysis. Errors as of `analyze`."""
    if not log.requests:
        raise ValueError(f"{log.source}: it has no request that could be read: expected at least one")
    for name in ("page_size", "max_num_seqs", "max_num_batched_tokens", "output_tokens", "replicas", "tensor_parallel"):
        check_int(name, getattr(settings, name), 1)
    for concurrency in settings.concurrencies:
        check_int("concurrencies", concurrency, 1)
        check_budget(concurrency, settings.max_num_batched_tokens)
    check_budget(settings.max_num_seqs, settings.max_num_batched_tokens)
    check_scheduler_policy("scheduler_policy", settings.scheduler_policy)
    if settings.route is not None and settings.route not in ROUTES:
        raise ValueError(f"route={settings.route!r}: expected one of {', '.join(ROUTES)}")
    card, shape = card_named(settings.card), model_shape(settings.model)
    prices = Prices(shape, card, settings.page_size, settings.tensor_parallel, settings.kv_cache_dtype)
    size = EngineSize(
        num_pages=prices.num_pages if settings.num_pages is None else check_int("num_pages", settings.num_pages, 1),
        page_size=settings.page_size,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        scheduler_policy=settings.scheduler_policy,
        enable_prefix_caching=settings.enable_prefix_caching,
    )
    return _Setup(settings, prices, size)


def _loads(log: Log, settings: Settings) -> list[Load]:
    """The loads to replay, the one that the report is about first.

    Raises:
        ValueError: there is none, or a rate is out of range.
    """
    by_time = [Load(rate=rate, seed=settings.seed) for rate in settings.rates]
    closed = [Load(concurrency) for concurrency in sorted(set(settings.concurrencies))]
    for load in by_time:
        load.times(log.requests)
    times = {request.arrival for request in log.requests}
    if settings.as_logged and None not in times and len(times) > 1:
        return [Load(), *by_time, *closed]
    if not by_time and not closed:
        raise ValueError(f"{log.source} has no times of arrival: expected requests at a time, or a rate, to replay it")
    middle = closed[len(closed) // 2 :][:1] if not by_time else []
    return [*by_time, *middle, *(load for load in closed if load not in middle)]


def _replays(
    setup: _Setup, loads: Sequence[Load], workloads: Sequence[Workload], progress: Callable[[float], None]
) -> list[Replay]:
    """A replay for each load, of the workload in its place."""
    parts = [(place, clock) for place, load in enumerate(loads) for clock in clocks_of(load)]
    tasks = [partial(run, workloads[place], setup.size, setup.prices, loads[place], clock) for place, clock in parts]
    weights = [len(workloads[place].jobs) for place, _ in parts]
    workers = num_cores() if max(weights) >= _SMALL else 1
    outcomes = run_all(tasks, weights, progress, workers)
    done = list(zip(parts, outcomes, strict=True))
    return [
        replay_of(load, setup.size, [outcome for part, outcome in done if part[0] == place])
        for place, load in enumerate(loads)
    ]


def verdict(replays: Sequence[Replay]) -> str:
    """What sharing is worth in the first replay, and in the one where it is worth most, in one sentence."""
    first = replays[0]
    gain = gain_of(first)
    text = f"At {_at_a_time(first)} at a time ({first.name}) reading shared prefixes once "
    if gain < _WORTH:
        text += f"gains {max(0.0, gain):.0%}, which is nothing"
    else:
        text += f"takes {gain:.0%} off the time per token, {first.shared_tpot_ms:.3g} ms instead of {first.tpot_ms:.3g}"
    best = max(replays, key=gain_of)
    if gain_of(best) > gain + _WORTH:
        text += f"; at {_at_a_time(best)} at a time it would take {gain_of(best):.0%} off"
    return f"{text}."


def gain_of(replay: Replay) -> float:
    """Share of the time per token that sharing saves."""
    return 1.0 - replay.shared_tpot_ms / replay.tpot_ms if replay.tpot_ms else 0.0


def _at_a_time(replay: Replay) -> str:
    """Mean number of sequences that decode, for people."""
    steps = sum(moment.num_steps for moment in replay.moments)
    mean = sum(moment.decoding * moment.num_steps for moment in replay.moments) / max(1, steps)
    return f"{mean:.3g} request" + ("" if f"{mean:.3g}" == "1" else "s")


def assumptions(log: Log, prices: Prices, size: EngineSize, whole: Workload, num_first: int) -> list[str]:
    """What an analysis assumes, one sentence each."""
    cards = f"{prices.tensor_parallel} x " if prices.tensor_parallel > 1 else ""
    said = [
        *log.assumptions,
        f"{prices.shape.name} runs on {cards}{prices.card.model.name} with a KV cache of {size.num_pages:,} pages of "
        f"{size.page_size} tokens, at most {size.max_num_seqs} sequences at once where requests come by time, and "
        f"{size.max_num_batched_tokens:,} tokens a step ({size.scheduler_policy}).",
        "One by one is FlashAttention, which reads a shared page once from memory and again from the L2 cache; shared "
        "is this library's attention; all else of a step is the same in both.",
        "Requests that come by time are replayed twice, since an engine that is slower has more of them at once; in a "
        "closed loop both run the same steps.",
        "A step takes what kernels take: times of HTTP, tokenizers and other programs are not in it.",
    ]
    if whole.num_guessed:
        said.append(f"{whole.num_guessed:,} requests for which the log names no answer length generate a set number.")
    if whole.num_left_out:
        said.append(f"{whole.num_left_out:,} requests do not fit in the KV cache and are left out.")
    if num_first < len(whole.jobs):
        said.append(f"Replays after the first one, and those of spoilers, take the first {num_first:,} requests.")
    if whole.source.knows_answers:
        said.append("A turn of a session begins with the prompt and the answer before it, and comes after that answer.")
    if prices.shape.latent_dim is not None:
        said.append("No engine with a latent cache was measured: one by one is this library's kernel without sharing.")
    return said


def _silent(what: str, share: float) -> None:
    """Tells nobody."""
