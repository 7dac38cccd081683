"""A whole analysis: which replays it makes, what it says, its spoilers and its fleet; tasks in processes."""

import gc
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.analysis.replays import PRICES, SIZE, log_of
from trunkattn.analysis import analyze as module
from trunkattn.analysis.analyze import analyze
from trunkattn.analysis.parallel import run_all
from trunkattn.analysis.records import FleetReplay, Log, LoggedRequest, Replay
from trunkattn.analysis.reports.html import to_html
from trunkattn.analysis.reports.report import to_dict
from trunkattn.analysis.reports.words import overload, verdict
from trunkattn.analysis.settings import ROUTES, Settings
from trunkattn.analysis.simulation.fleet import Fleet, fleet_replay, run_fleet
from trunkattn.analysis.simulation.load import Load, Workload
from trunkattn.analysis.simulation.timed_engine import ONE_BY_ONE, SHARED

SETTINGS = Settings(num_pages=4000, concurrencies=(2, 8), max_num_seqs=64)


def log(requests: list[LoggedRequest]) -> Log:
    return Log("some.jsonl", "test", requests, len(requests))


def without_times(requests: list[LoggedRequest]) -> list[LoggedRequest]:
    return [replace(each, arrival=None) for each in requests]


def test_an_analysis_says_what_sharing_is_worth() -> None:
    told: list[tuple[str, float]] = []
    found = analyze(log(log_of(30, 120, 4)), SETTINGS, lambda what, share: told.append((what, share)))
    assert [each.name for each in found.replays] == ["as logged", "2 at a time", "8 at a time"]
    assert (found.card, found.model, found.token_bytes) == ("NVIDIA H100", "llama-3-8b", 32 * 4096)
    assert found.verdict.startswith("At ") and "off the time per token" in found.verdict
    assert told[-1][1] == 1.0
    assert [share for _, share in told] == sorted(share for _, share in told)
    assert all(text.endswith(".") for text in found.assumptions)
    assert (found.spoilers, found.fleet) == ([], [])


def test_a_model_with_a_latent_cache_is_analysed_with_the_rates_of_its_kernel() -> None:
    found = analyze(log(log_of(30, 120, 4)), replace(SETTINGS, model="deepseek-v2-lite"))
    assert found.token_bytes == 27 * 576 * 2
    assert found.replays[-1].shared_tpot_ms == pytest.approx(found.replays[-1].tpot_ms, rel=0.01)  # little is shared
    said = " ".join(found.assumptions)
    assert "One by one is this library's kernel without sharing" in said and "fitted to no engine" in said
    assert "was not timed" not in said


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({}, ["8 at a time", "2 at a time"]),
        ({"rates": (5.0,)}, ["5 requests/s", "2 at a time", "8 at a time"]),
        ({"concurrencies": (4, 1, 2, 2)}, ["2 at a time", "1 at a time", "4 at a time"]),
    ],
)
def test_a_log_without_times_is_replayed_at_loads(change: dict[str, Any], names: list[str]) -> None:
    found = analyze(log(without_times(log_of(6, 10, 2))), replace(SETTINGS, **change))
    assert [each.name for each in found.replays] == names


def test_replays_after_the_first_take_the_first_requests() -> None:
    found = analyze(log(log_of(12, 10, 2)), replace(SETTINGS, max_requests=5))
    assert [each.num_requests for each in found.replays] == [12, 5, 5]
    assert "Replays after the first one take the first 5 requests." in found.assumptions


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"card": "A100"}, "gpu='A100': expected a card"),
        ({"model": "lama"}, "model='lama': expected one of"),
        ({"concurrencies": (0,)}, "concurrencies=0: expected an integer of at least 1"),
        ({"concurrencies": (10_000,)}, "concurrencies=10000: expected at most max_num_batched_tokens=8192"),
        ({"rates": (0.0,)}, "rates=0.0: expected a finite number of requests per second above 0"),
        ({"rates": (math.inf,)}, "rates=inf: expected a finite number of requests per second above 0"),
        ({"route": "nearest"}, "route='nearest': expected one of random, round-robin, prefix, sharers"),
        ({"scheduler_policy": "first"}, "scheduler_policy='first'"),
        ({"num_pages": 1}, "none of its 6 requests fits in 1 page of 16 tokens with all of its answers in"),
        ({"concurrencies": ()}, "has no times of arrival that differ: expected requests at a time, or a rate"),
        (
            {"concurrencies": (), "as_logged": False},
            "concurrencies=.*: expected a number of requests",
        ),
        ({"num_pages": 10**8}, "num_pages=100000000: expected an integer from 1 to 10000000"),
        ({"replicas": 10**6}, "replicas=1000000: expected an integer from 1 to 1024"),
        ({"route": "prefix"}, "route='prefix': expected it with replicas of at least 2"),
        ({"replicas": 2}, "replicas=2: some.jsonl has no times of arrival that differ: expected a rate"),
    ],
)
def test_bad_settings_are_refused_before_a_replay(
    change: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "run_all", None)
    with pytest.raises(ValueError, match=message):
        analyze(log(without_times(log_of(6, 10, 2))), replace(SETTINGS, **change))


def test_requests_for_which_the_engine_is_too_small_are_told_with_both_reasons() -> None:
    requests = [replace(each, num_output_tokens=None) for each in log_of(6, 10, 2)]
    found = analyze(log([replace(requests[0], num_answers=65), *requests[1:]]), SETTINGS)
    assert "The log names no answer length for 5 requests: a set number of tokens is generated." in found.assumptions
    (sentence,) = [each for each in found.assumptions if "too small for 1 request, so" in each]
    assert "fit in the KV cache, and all answers to a prompt in 64 sequences." in sentence
    with pytest.raises(ValueError, match="with all of its answers in max_num_seqs=64 sequences: expected a larger"):
        analyze(log([replace(each, num_answers=65) for each in requests]), SETTINGS)


def test_an_empty_log_is_refused() -> None:
    with pytest.raises(ValueError, match="it has no request that could be read"):
        analyze(log([]), SETTINGS)


def test_a_spoiler_is_told_with_the_gain_that_a_replay_finds() -> None:
    """Blocks by contents: a first block that differs keeps 60 blocks behind it from being shared."""
    requests = without_times(log_of(24, 0, 64))
    contents = [np.array([1000 + i, *range(60), *range(5000 + 3 * i, 5003 + 3 * i)], np.int64) for i in range(24)]
    spoiled = replace(log(requests), contents=contents)
    found = analyze(spoiled, replace(SETTINGS, concurrencies=(8,)))
    (spoiler,) = found.spoilers
    assert spoiler.num_requests == 24
    assert spoiler.gain_tpot is not None and spoiler.gain_tpot > 0.02
    assert spoiler.gain_prompt_tokens is not None and spoiler.gain_prompt_tokens > 20 * 59 * 16
    assert any("first 24 requests, each spoiler by itself" in text for text in found.assumptions)
    assert analyze(spoiled, replace(SETTINGS, concurrencies=(8,), find_spoilers=False)).spoilers == []
    short = [replace(each, num_output_tokens=1) for each in requests]  # no answer has a time per token
    (spoiler,) = analyze(replace(spoiled, requests=short), replace(SETTINGS, concurrencies=(8,))).spoilers
    assert spoiler.gain_tpot == 0


def verdict_of(tpot_ms: float, shared_tpot_ms: float, **change: Any) -> str:
    found = analyze(log(log_of(4, 1, 1)), replace(SETTINGS, concurrencies=())).replays[0]
    change = {"kv_bytes": 100.0, "unique_kv_bytes": 50.0} | change
    return verdict([replace(found, tpot_ms=tpot_ms, shared_tpot_ms=shared_tpot_ms, **change)])


def test_a_verdict_is_honest() -> None:
    assert "takes 25 % off the time per token, 7.50 ms instead of 10.0 ms" in verdict_of(10.0, 7.5)
    assert "gains 1 %, which is nothing." in verdict_of(10.0, 9.9)
    assert "costs 5 % of the time per token." in verdict_of(10.0, 10.5)
    assert "at a time (as logged) reading" in verdict_of(10.0, 9.9)
    assert "at a time reading" in verdict_of(10.0, 9.9, name="1 at a time")
    nothing = "saves nothing, because requests that decode together share nothing"
    assert f"{nothing}." in verdict_of(10.0, 9.9, unique_kv_bytes=100.0)
    assert f"{nothing}; the time per token is still 5 % shorter, by this library's kernels alone." in verdict_of(
        10.0, 9.5, unique_kv_bytes=99.9
    )
    assert "the time per token is still 5 % longer, by" in verdict_of(10.0, 10.5, unique_kv_bytes=100.0)


def test_a_short_prompt_with_a_long_answer_is_not_priced_by_its_first_step() -> None:
    """Launches of attention do not grow with the tokens, so a request alone takes about as long both ways."""
    alone = LoggedRequest(1, None, 1, 256, np.array([7], np.int64), 16)
    (replay,) = analyze(log([alone]), replace(SETTINGS, concurrencies=(1,))).replays
    assert abs(replay.tpot_ms - replay.shared_tpot_ms) < 0.03 * replay.tpot_ms
    assert replay.tpot_ms < 7


def test_answers_of_one_token_have_no_time_per_token() -> None:
    """As of a classifier."""
    found = analyze(log([replace(each, num_output_tokens=1) for each in log_of(6, 10, 2)]), SETTINGS)
    assert {each.tpot_ms for each in found.replays} == {0.0}
    assert "Time per token against" not in to_html(found)
    json.dumps(to_dict(found), allow_nan=False)


def test_an_engine_that_does_not_keep_up_is_told() -> None:
    found = analyze(log(log_of(4, 1, 1)), replace(SETTINGS, concurrencies=())).replays[0]
    assert overload(found) == []
    (sentence,) = overload(replace(found, shared_ttft_ms=61_000.0))
    assert "they wait 61 s on average" in sentence


def fleet_of(requests: list[LoggedRequest], route: str) -> FleetReplay:
    workload, fleet = Workload.of(requests, SIZE, 10), Fleet(4, route)
    shared, one_by_one = (run_fleet(workload, SIZE, PRICES, Load(), fleet, clock) for clock in (SHARED, ONE_BY_ONE))
    return fleet_replay(fleet, shared, one_by_one)


def test_a_fleet_that_looks_at_prefixes_shares_more() -> None:
    """Four families of prompts in turn, which round-robin spreads over all engines, because it has one turn too few."""
    families = [log_of(20, 120, 2) for _ in range(5)]
    requests = []
    for number in range(100):
        family, request = number % 5, families[number % 5][number // 5]
        blocks = request.blocks + 1_000_000 * family
        requests.append(replace(request, line=number + 1, arrival=number * 0.05, blocks=blocks))
    found = {route: fleet_of(requests, route) for route in ROUTES}
    assert {each.replicas for each in found.values()} == {4}
    for route in ("prefix", "sharers"):
        assert found[route].hit_rate > found["round-robin"].hit_rate + 0.1
        assert found[route].shared_tpot_ms < found["round-robin"].shared_tpot_ms
        assert found[route].kv_bytes / found[route].unique_kv_bytes > 1.2 * (
            found["round-robin"].kv_bytes / found["round-robin"].unique_kv_bytes
        )
    assert 1.0 <= found["round-robin"].balance < 1.1
    assert found["prefix"].balance >= found["round-robin"].balance


@pytest.mark.parametrize("route", ["prefix", "sharers"])
def test_engines_that_are_alike_take_turns(route: str) -> None:
    """Requests that share nothing come one by one, so that no engine is ever busier than another."""
    requests = [
        replace(request, line=number + 1, arrival=10.0 * number, blocks=request.blocks + 1_000_000 * number)
        for number, request in enumerate(log_of(12, 10, 2))
    ]
    assert fleet_of(requests, route).balance == pytest.approx(1.0, abs=0.2)


def test_an_analysis_replays_a_fleet_for_each_route() -> None:
    requests = log_of(12, 10, 2)
    every = analyze(log(requests), replace(SETTINGS, replicas=2)).fleet
    one = analyze(log(requests), replace(SETTINGS, replicas=2, route="sharers")).fleet
    assert [each.route for each in every] == list(ROUTES)
    assert one == [every[-1]]
    found = analyze(log(requests), replace(SETTINGS, replicas=2, route="random"))
    assert any(text.startswith("A router knows all caches") for text in found.assumptions)


def share_of(number: int) -> Callable[[Callable[[float], None]], int]:
    def task(say: Callable[[float], None]) -> int:
        say(0.5)
        if number == 3:
            raise ValueError("three is bad")
        return number * number

    return task


@pytest.mark.parametrize("num_workers", [1, 2])
def test_tasks_give_their_results_in_order(num_workers: int) -> None:
    told: list[float] = []
    assert run_all([share_of(number) for number in (2, 0, 1)], [1, 1, 2], told.append, num_workers) == [4, 0, 1]
    assert told == sorted(told)
    assert 0 < told[0] < told[-1] <= 1.0
    with pytest.raises(ValueError, match="three is bad"):
        run_all([share_of(number) for number in (2, 3)], [1, 1], told.append, num_workers)


def test_processes_look_for_garbage_rarely_and_this_one_as_before() -> None:
    def task(say: Callable[[float], None]) -> int:
        return gc.get_threshold()[0]

    before = gc.get_threshold()
    assert min(run_all([task, task], [1, 1], lambda share: None, 2)) >= 100_000
    assert gc.get_threshold() == before


def test_processes_and_this_one_replay_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    here: list[Replay] = analyze(log(log_of(12, 10, 2)), SETTINGS).replays
    monkeypatch.setattr(module, "_SMALL", 1)
    monkeypatch.setattr(module, "num_cores", lambda: 2)
    assert analyze(log(log_of(12, 10, 2)), SETTINGS).replays == here
