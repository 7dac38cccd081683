"""benchmarks/engine_serving.py without an engine: workloads, times of requests, results."""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from .scripts import refusal

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import engine_serving
import sglang_serving
import vllm_serving
from engine_serving import Arrival, Engine, Result, Sizes, ask, documents, replay, spread, toolagent


async def tokens(*pairs: tuple[float, int]) -> AsyncIterator[int]:
    """So many tokens so far, after so many seconds each."""
    for seconds, so_far in pairs:
        await asyncio.sleep(seconds)
        yield so_far


def test_a_name_stands_for_the_same_tokens_everywhere() -> None:
    first = Arrival(0.0, (("root", 40), (("private", 1), 5)), 8).prompt(1000)
    second = Arrival(1.0, (("root", 30), (("private", 2), 5)), 8).prompt(1000)
    assert len(first) == 45 and len(second) == 35
    assert first[:30] == second[:30] and first[40:] != second[30:]


def test_documents_come_with_bursts_of_questions() -> None:
    sizes = Sizes(document=(20, 30), question=(3, 5), answer=(2, 4))
    arrivals = documents(40.0, 10.0, sizes)
    assert [arrival.at for arrival in arrivals] == sorted(arrival.at for arrival in arrivals)
    asked: dict[object, list[Arrival]] = {}
    for arrival in arrivals:
        asked.setdefault(arrival.parts[0], []).append(arrival)
        assert 20 <= arrival.parts[0][1] < 30 and 3 <= arrival.parts[1][1] < 5 and 2 <= arrival.output_tokens < 4
    assert len(asked) > 10
    for burst in asked.values():
        assert len(burst) == engine_serving.QUESTIONS
        assert burst[-1].at - burst[0].at < engine_serving.BURST_SECONDS


def test_agents_prompts_begin_with_earlier_turns_and_stay_short_enough() -> None:
    arrivals = toolagent(4.0, 30.0)
    assert max(sum(size for _, size in arrival.parts) for arrival in arrivals) < engine_serving.LONGEST_PROMPT
    assert any(a.parts[0] == b.parts[0] for a, b in pairwise(arrivals))


def test_times_of_a_request() -> None:
    answer = asyncio.run(ask(tokens((0.05, 1), (0.04, 9), (0.02, 11))))
    assert answer.output_tokens == 11
    assert 0.05 <= answer.ttft < 0.1 and answer.latency >= 0.11
    assert answer.tpot == pytest.approx((answer.latency - answer.ttft) / 10)


def test_a_run_sends_requests_at_their_times_and_empties_the_cache() -> None:
    emptied, asked = [], []

    async def empty_cache() -> None:
        emptied.append(len(asked))

    async def generate(name: str, prompt: list[int], output_tokens: int) -> AsyncIterator[int]:
        asked.append((name, len(prompt)))
        yield output_tokens

    engine = Engine(generate, empty_cache, 100, dict)
    arrivals = [Arrival(0.05, (("a", 3),), 4), Arrival(0.0, (("a", 5),), 6)]
    figures = asyncio.run(replay(engine, "run", arrivals))
    assert asked == [("run-1", 5), ("run-0", 3)] and emptied == [2]
    assert (figures["requests"], figures["input_tokens"], figures["output_tokens"]) == (2, 8, 10)
    assert figures["output_tokens_per_s"] > 0 and figures["latency"].keys() == {"mean", "median", "p99"}


def test_figures_of_all_answers() -> None:
    values = np.arange(101.0).tolist()
    assert spread(values) == {"mean": 50.0, "median": 50.0, "p99": 99.0}


def test_a_result_keeps_runs_that_were_taken_alike(tmp_path: Path) -> None:
    path, facts = tmp_path / "result.json", {"": {"card": "cpu", "ready_s": 1.0}}
    result = Result("sglang", {"seconds": 5.0}, "", path)
    result.save({"fa3": {**facts, "a": {"requests": 1}}, "trunk": facts})
    assert not path.exists(), "not all have answered"
    result.save({name: {**facts, "a": {"requests": 1}} for name in ("fa3", "trunk")})
    result.save({name: {**facts, "b": {"requests": 2}} for name in ("fa3", "trunk")})
    held = json.loads(path.read_text())
    assert list(held["runs"]) == ["fa3", "trunk"] and list(held["runs"]["trunk"]) == ["a", "b"]
    assert held["runs"]["fa3"]["a"]["commit"] and held["card"] == "cpu"
    Result("sglang", {"seconds": 9.0}, "", path).save(
        {name: {**facts, "b": {"requests": 2}} for name in ("fa3", "trunk")}
    )
    assert list(json.loads(path.read_text())["runs"]["trunk"]) == ["b"], "the other run was taken otherwise"


def test_runs_by_workload_and_rate() -> None:
    given = argparse.Namespace(trace=None, workloads=["documents", "trace"], scale=0.5, seconds=20.0)
    assert list(engine_serving.wanted_runs(given)) == ["documents 3/s", "documents 6/s"]


@pytest.mark.parametrize("script", [sglang_serving, vllm_serving])
def test_a_trace_is_wanted_or_left_out(script: object) -> None:
    said = refusal(Path(script.__file__).name, ["--model", "m"])
    assert "argument --trace: expected a file for the workload trace" in said
