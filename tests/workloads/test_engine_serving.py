"""benchmarks/engines/engine_serving.py without an engine: workloads, times of requests, results."""

import argparse
import asyncio
import fcntl
import json
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from multiprocessing import Pipe, get_context
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from benchmarks.engines import engine_serving, sglang_serving, vllm_serving
from benchmarks.engines.engine_serving import (
    Arrival,
    Engine,
    Result,
    Results,
    Sizes,
    Task,
    announce,
    ask,
    command_line,
    documents,
    replay,
    run_all,
    run_backends,
    spread,
    toolagent,
)

from . import fake_engines
from .scripts import refusal


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
def test_a_trace_is_wanted_or_left_out(script: ModuleType) -> None:
    said = refusal(script.__name__, ["--model", "m"])
    assert "argument --trace: expected a file for the workload trace" in said


@pytest.mark.parametrize("script", [sglang_serving, vllm_serving])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--turns", "lock", "--kv-gib", "8", "--parallel"], "not allowed with argument"),
        (["--turns", "lock", "--workloads", "documents"], "several engines on one card need --kv-gib"),
    ],
)
def test_turns_are_for_one_card(script: ModuleType, given: list[str], message: str) -> None:
    assert message in refusal(script.__name__, ["--model", "m", *given])


def test_turns_and_caches_are_part_of_sglangs_options(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps(config))
    parser = command_line("", sglang_serving.BACKENDS)
    parser.add_argument("--device", default="cuda")
    given = ["--model", str(tmp_path), "--turns", "lock", "--kv-gib", "2"]
    for options in sglang_serving.options_of(parser.parse_args(given)).values():
        assert options.items() >= {"max_total_tokens": 16384, "sleep_on_idle": True}.items()
    for options in sglang_serving.options_of(parser.parse_args(given[:2])).values():
        assert not options.keys() & {"max_total_tokens", "sleep_on_idle"}


def test_runs_and_the_warm_up_are_in_a_turn(tmp_path: Path) -> None:
    lock, seen = tmp_path / "lock", []

    async def note(what: str) -> None:
        seen.append((what, fake_engines.free_for(lock, fcntl.LOCK_SH)))

    async def generate(name: str, prompt: list[int], output_tokens: int) -> AsyncIterator[int]:
        await note(name)
        yield output_tokens

    answers, sender = Pipe(duplex=False)
    arrivals = [Arrival(0.0, (("a", 3),), 4)]
    task = Task("trunk", None, tmp_path, {}, {"a": arrivals, "b": arrivals}, lock)
    asyncio.run(run_all(Engine(generate, lambda: note("empty"), 100, dict), task, sender))
    assert seen == [(name, False) for run in ("warm-up-0", "a-0", "b-0") for name in (run, "empty")]
    assert fake_engines.free_for(lock, fcntl.LOCK_EX)
    assert [answers.recv()[0] for _ in range(2)] == ["a", "b"]


def test_the_time_to_start_beside_others_is_no_fact() -> None:
    answers, sender = Pipe(duplex=False)
    for turns in (None, Path("lock")):
        announce(Task("trunk", None, Path("m"), {}, {}, turns), 0.0, sender)
    assert ["ready_s" in answers.recv()[1] for _ in range(2)] == [True, False]


class Kept(list[tuple[dict[str, list[str]], list[str]]]):
    """Runs by back end, and those that are lost, each time."""

    def __call__(self, results: Results, lost: Sequence[str]) -> None:
        self.append(({name: list(found) for name, found in results.items()}, list(lost)))


@pytest.mark.parametrize("lost", [None, "fa3"])
def test_back_ends_that_take_turns_start_at_once(lost: str | None) -> None:
    barrier, kept = get_context("spawn").Barrier(2), Kept()
    options = {name: {"barrier": barrier, "dies_after": 1 if name == lost else None} for name in ("fa3", "trunk")}
    tasks = [Task(name, None, Path("m"), each, {"a": [], "b": []}, Path("lock")) for name, each in options.items()]
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
