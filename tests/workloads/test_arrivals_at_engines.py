"""serving.py, replay.py and arrivals.py without an engine: workloads, times of requests, results."""

import argparse
import asyncio
import fcntl
import json
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from itertools import count, pairwise
from multiprocessing import Pipe, get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.engines import serving
from benchmarks.engines.adapters import ENGINES
from benchmarks.engines.interface import Start
from benchmarks.engines.replay import ask, replay, spread
from benchmarks.engines.serving import Result, Results, Task, read_arguments, run_all, run_backends
from benchmarks.lib.report import RESULTS
from benchmarks.workloads.arrivals import (
    BURST_SECONDS,
    LONGEST_PROMPT,
    QUESTIONS,
    Arrival,
    Sizes,
    documents,
    toolagent,
    wanted_runs,
)

from . import fake_engines
from .scripts import refused


def start(name: str, options: dict[str, Any] | None = None) -> Start:
    return Start(name, Path("m"), options or {}, {})


CLOCK = "benchmarks.engines.replay.perf_counter"


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
        assert len(burst) == QUESTIONS
        assert burst[-1].at - burst[0].at < BURST_SECONDS


def test_agents_prompts_begin_with_earlier_turns_and_stay_short_enough() -> None:
    arrivals = toolagent(4.0, 30.0)
    assert max(sum(size for _, size in arrival.parts) for arrival in arrivals) < LONGEST_PROMPT
    assert any(a.parts[0] == b.parts[0] for a, b in pairwise(arrivals))


def test_times_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 7.0
    monkeypatch.setattr(CLOCK, lambda: now)

    async def tokens() -> AsyncIterator[int]:
        nonlocal now
        for seconds, so_far in ((0.05, 1), (0.04, 9), (0.02, 11)):
            now += seconds
            yield so_far

    answer = asyncio.run(ask(tokens()))
    assert answer.output_tokens == 11
    assert (answer.ttft, answer.latency, answer.tpot) == pytest.approx((0.05, 0.11, 0.006))


class Arriving:
    """An engine that answers at once. note: told each request and each time that the cache is emptied."""

    def __init__(self, note: Callable[[str, int], None]) -> None:
        self.note = note

    async def stream(self, name: str, prompt: list[int], tokens: int) -> AsyncIterator[int]:
        self.note(name, len(prompt))
        yield tokens

    async def empty_cache(self) -> None:
        self.note("empty", 0)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)

    def shutdown(self) -> None: ...


def test_a_run_sends_requests_at_their_times_and_empties_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = count()
    monkeypatch.setattr(CLOCK, lambda: 1e-4 * next(ticks))  # however busy the machine is
    asked: list[tuple[str, int]] = []
    engine = Arriving(lambda *event: asked.append(event))
    arrivals = [Arrival(0.05, (("a", 3),), 4), Arrival(0.0, (("a", 5),), 6)]
    figures = asyncio.run(replay(engine, "run", arrivals, 100))
    assert asked == [("run-1", 5), ("run-0", 3), ("empty", 0)]
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
    given = argparse.Namespace(trace=None, workloads=["documents", "trace"], scale=0.5, seconds=20.0, quick=False)
    assert list(wanted_runs(given)) == ["documents 3/s", "documents 6/s"]


@pytest.fixture
def model(tmp_path: Path) -> str:
    config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return str(tmp_path)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "argument --trace: expected a file for the workload trace"),
        (["--turns", "lock", "--kv-gib", "8", "--parallel"], "not allowed with argument"),
        (["--turns", "lock", "--workloads", "documents"], "several engines on one card need --kv-gib"),
        (["--model", "nowhere"], "argument --model: nowhere has no config.json"),
    ],
)
def test_wrong_options_are_refused(
    engine: str, given: list[str], message: str, model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(read_arguments, ["--engine", engine, "--model", model, *given], capsys)


def test_vllm_has_no_cpu(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(read_arguments, ["--engine", "vllm", "--model", model, "--device", "cpu"], capsys)
    assert "argument --device: vllm has no such option: leave it out, or take sglang" in said


@pytest.mark.parametrize(
    ("engine", "expected", "absent"),
    [
        ("sglang", {"max_total_tokens": 16384, "sleep_on_idle": True, "chunked_prefill_size": 2048}, {"sleep_on_idle"}),
        ("vllm", {"kv_cache_memory_bytes": 2 << 30, "max_num_batched_tokens": 2048}, {"kv_cache_memory_bytes"}),
    ],
)
def test_turns_and_caches_are_part_of_an_engines_options(
    engine: str, expected: dict[str, Any], absent: set[str], model: str
) -> None:
    given = ["--engine", engine, "--model", model, "--workloads", "documents"]
    adapter, arguments = read_arguments([*given, "--turns", "lock", "--kv-gib", "2"])
    starts = adapter.serving_starts(arguments)
    assert [start.name for start in starts] == list(adapter.SERVED)
    assert all(start.options.items() >= expected.items() for start in starts)
    adapter, arguments = read_arguments(given)
    assert not any(start.options.keys() & absent for start in adapter.serving_starts(arguments))


def test_a_result_says_how_engines_were_started(model: str) -> None:
    """Runs are kept beside others only if this is equal, so that it must not change between scripts."""
    said = {}
    for engine in ENGINES:
        adapter, arguments = read_arguments(["--engine", engine, "--model", model, "--workloads", "documents"])
        said[engine] = adapter.serving_options(adapter.serving_starts(arguments))
    held = {engine: json.loads((RESULTS / f"{engine}-serving-h100.json").read_text())["options"] for engine in ENGINES}
    assert said["vllm"].keys() == held["vllm"].keys() and "attention_backend" not in said["vllm"]
    assert said["sglang"]["fa3+trunk@16"].items() <= held["sglang"]["fa3+trunk@16"].items()


def test_runs_and_the_warm_up_are_in_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock, seen = tmp_path / "lock", []
    monkeypatch.setattr(serving, "counters", dict)
    engine = Arriving(lambda what, _: seen.append((what, fake_engines.free_for(lock, fcntl.LOCK_SH))))
    answers, sender = Pipe(duplex=False)
    arrivals = [Arrival(0.0, (("a", 3),), 4)]
    task = Task("vllm", start("trunk"), None, {"a": arrivals, "b": arrivals}, lock)
    asyncio.run(run_all(engine, task, 100, sender))
    assert seen == [(name, False) for run in ("warm-up-0", "a-0", "b-0") for name in (run, "empty")]
    assert fake_engines.free_for(lock, fcntl.LOCK_EX)
    assert [answers.recv()[0] for _ in range(2)] == ["a", "b"]


class Kept(list[tuple[dict[str, list[str]], list[str]]]):
    """Runs by back end, and those that are lost, each time."""

    def __call__(self, results: Results, lost: Sequence[str]) -> None:
        self.append(({name: list(found) for name, found in results.items()}, list(lost)))


@pytest.mark.parametrize("lost", [None, "fa3"])
def test_back_ends_that_take_turns_start_at_once(lost: str | None) -> None:
    barrier, kept = get_context("spawn").Barrier(2), Kept()
    options = {name: {"barrier": barrier, "dies_after": 1 if name == lost else None} for name in ("fa3", "trunk")}
    runs: dict[str, list[Arrival]] = {"a": [], "b": []}
    tasks = [Task("sglang", start(name, each), None, runs, Path("lock")) for name, each in options.items()]
    if lost:
        with pytest.raises(RuntimeError, match=r"^fa3: the process ended after 1 of 2 runs$"):
            run_backends(fake_engines.serve_runs, tasks, kept)
        assert ({"fa3": ["", "a"], "trunk": ["", "a", "b"]}, ["fa3"]) in kept
    else:
        run_backends(fake_engines.serve_runs, tasks, kept)
        assert kept[-1] == ({name: ["", "a", "b"] for name in ("fa3", "trunk")}, [])


def test_a_result_names_the_lost_and_keeps_what_they_answered(tmp_path: Path) -> None:
    path, facts, figures = tmp_path / "result.json", {"": {"card": "cpu"}}, {"requests": 1}
    result = Result("sglang", {"turns": True}, "", path)
    result.save({"fa3": {**facts, "a": figures}, "trunk": {**facts, "a": figures, "b": figures}}, ["fa3"])
    held = json.loads(path.read_text())
    assert held["lost"] == ["fa3"]
    assert {name: list(runs) for name, runs in held["runs"].items()} == {"fa3": ["a"], "trunk": ["a", "b"]}
    result.save({"fa3": {}, "trunk": {**facts, "c": figures}}, ["fa3"])
    held = json.loads(path.read_text())
    assert {name: list(runs) for name, runs in held["runs"].items()} == {"fa3": ["a"], "trunk": ["a", "b", "c"]}
    path.unlink()
    result.save({"fa3": {}, "trunk": facts}, ["fa3", "trunk"])
    assert not path.exists()


def test_runs_with_and_without_turns_are_not_mixed(tmp_path: Path) -> None:
    path, both = tmp_path / "result.json", ("fa3", "trunk")

    def runs_after(taken: dict[str, object], run: str) -> list[str]:
        Result("sglang", taken, "", path).save({name: {"": {"card": "cpu"}, run: {}} for name in both})
        return list(json.loads(path.read_text())["runs"]["trunk"])

    assert runs_after({"seconds": 9.0}, "a") == ["a"], "as files were before there were turns"
    assert runs_after({"seconds": 9.0, "turns": False}, "b") == ["a", "b"]
    assert runs_after({"seconds": 9.0, "turns": True}, "c") == ["c"]
    assert runs_after({"seconds": 9.0, "turns": False}, "d") == ["d"]
