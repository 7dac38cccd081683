"""Workloads, each run of which ends when its last request is answered; the prefix cache is emptied before the next:

conversation: Poisson arrivals behind PAT's three-level system instruction; private parts as long as the trace's inputs,
4096 tokens at most, outputs as long as its outputs, 512 at most; without a trace, drawn like them.
toolagent: Poisson arrivals of turns of agents' sessions; a turn's prompt begins with its session's earlier turns.
documents: Poisson arrivals of documents of 4k to 10k tokens, each with a burst of 16 short questions within half a
second; answers of 64 to 256 tokens.
trace: a stretch from the middle of the trace, its gaps divided by one factor so that the mean rate is the one asked
for; inputs cut to 16 blocks of 512 tokens, outputs to 512.

Each back end runs in a process of its own: one after the other, with --parallel side by side on a card each, or with
--turns FILE side by side on one card, on which they take turns to measure (see turn_lock.py) and need --kv-gib each. A
run that all have answered is written at once, beside those that the file holds, if they were taken alike. A back end
that is lost does not hold up those beside it, and the result names it (`lost`).
"""

# What vllm_serving.py and sglang_serving.py share. The processes that engines start import neither: see vllm_tpot.py.

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.engines.processes import collect, start
from benchmarks.lib import turn_lock
from benchmarks.lib.options import positive
from trunkattn.workloads import (
    HASH_BLOCK_TOKENS,
    TraceRequest,
    agent_requests,
    conversation_lengths,
    poisson_arrivals,
    read_trace,
)
from trunkattn.workloads.serving import CONVERSATION_LEVELS

RATES = {"conversation": (3.0, 5.0), "toolagent": (2.5, 4.0), "documents": (6.0, 12.0), "trace": (1.5, 2.5)}  # a second
LONGEST_PRIVATE, LONGEST_BLOCKS, LONGEST_OUTPUT, LONGEST_PROMPT = 4096, 16, 512, 11_000
LANGUAGES, COUNTRIES = 4, 8
QUESTIONS, BURST_SECONDS = 16, 0.5  # of a document
SEED = 0
Results = dict[str, dict[str, Any]]  # figures by back end and run; "": its facts


class Sizes(NamedTuple):
    """Least and most tokens of the workload documents."""

    document: tuple[int, int] = (4096, 10_000)
    question: tuple[int, int] = (16, 96)
    answer: tuple[int, int] = (64, 256)


SIZES = Sizes()


@dataclass(frozen=True)
class Arrival:
    """at: seconds from the start. parts: (name, tokens) in order; a name stands for the same tokens everywhere."""

    at: float
    parts: tuple[tuple[Hashable, int], ...]
    output_tokens: int

    def prompt(self, vocabulary: int) -> list[int]:
        """A part's tokens, drawn by its name: a shorter part of a name begins a longer one."""
        tokens: list[int] = []
        for name, size in self.parts:
            seed = [SEED, *str(name).encode()]
            tokens += np.random.default_rng(seed).integers(0, vocabulary, size).tolist()
        return tokens


@dataclass(frozen=True)
class Answer:
    """Seconds: to the first token, between tokens in the mean, to the last token."""

    ttft: float
    tpot: float
    latency: float
    output_tokens: int


class Task(NamedTuple):
    """What one process serves.

    Attributes:
        backend: its name in the result.
        card: the only one that it sees; None: all.
        model: a folder.
        options: the engine's.
        runs: by name.
        turns: see turn_lock.py.
    """

    backend: str
    card: int | None
    model: Path
    options: dict[str, Any]
    runs: dict[str, list[Arrival]]
    turns: Path | None = None


@contextmanager
def own_process(task: Task) -> Iterator[None]:
    """What a task's process does before it imports an engine: it hides this folder, takes its card, and gets a place
    for counters."""
    from benchmarks.engines.vllm_tpot import hide_benchmarks

    hide_benchmarks(sys.path)
    if task.card is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(task.card)
    with tempfile.TemporaryDirectory() as shared:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = shared
        yield


def announce(task: Task, start: float, answers: Connection) -> None:
    """Sends the facts of an engine that is ready. start: by perf_counter, when it was asked for."""
    import torch

    ready = perf_counter() - start
    print(f"{task.backend}: ready after {ready:.0f} s", flush=True)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    # The time beside others that start is no back end's own.
    answers.send(("", {"card": name} | ({} if task.turns else {"ready_s": round(ready, 1)})))


class Engine(NamedTuple):
    """An engine that is ready.

    Attributes:
        generate: of a request's name, prompt and number of tokens: how many tokens there are so far, as they come.
        empty_cache: forgets all prefixes.
        vocabulary: number of tokens.
        counters: what our back end has counted so far.
    """

    generate: Callable[[str, list[int], int], AsyncIterator[int]]
    empty_cache: Callable[[], Awaitable[object]]
    vocabulary: int
    counters: Callable[[], dict[str, float]]


def poisson(rate: float, seconds: float) -> NDArray[np.float64]:
    """Arrival times in [0, seconds)."""
    times = poisson_arrivals(int(2 * rate * seconds) + 100, rate, SEED)
    return times[times < seconds]


def conversation(rate: float, seconds: float, trace: Sequence[TraceRequest]) -> list[Arrival]:
    """See above."""
    rng = np.random.default_rng(SEED)
    root, language_tokens, country_tokens = CONVERSATION_LEVELS
    found, times = [], poisson(rate, seconds)
    generated = conversation_lengths(len(times), SEED)
    for number, at in enumerate(times):
        language, country = int(rng.integers(LANGUAGES)), int(rng.integers(COUNTRIES))
        if trace:
            drawn = trace[int(rng.integers(len(trace)))]
            private, output = drawn.input_length, drawn.output_length
        else:
            private, output = map(int, generated[number])
        parts = (
            ("root", root), (("language", language), language_tokens), (("country", language, country), country_tokens),
            (("private", number), max(1, min(private, LONGEST_PRIVATE))),
        )  # fmt: skip
        found.append(Arrival(float(at), parts, max(2, min(output, LONGEST_OUTPUT))))
    return found


def toolagent(rate: float, seconds: float) -> list[Arrival]:
    """See above; a prompt over LONGEST_PROMPT tokens is left out, as its session's later ones are."""
    times = poisson(rate, seconds)
    fitting = [turn for turn in agent_requests(4 * len(times), SEED) if turn.input_tokens < LONGEST_PROMPT]
    return [
        Arrival(
            float(at),
            (*turn.prefix, (("turn", turn.session, turn.turn), turn.new_tokens)),
            max(2, min(turn.output_tokens, LONGEST_OUTPUT)),
        )
        for at, turn in zip(times, fitting, strict=False)
    ]


def documents(rate: float, seconds: float, sizes: Sizes = SIZES) -> list[Arrival]:
    """See above."""
    rng, found = np.random.default_rng(SEED), list[Arrival]()
    for number, at in enumerate(poisson(rate / QUESTIONS, seconds)):
        document = (("document", number), int(rng.integers(*sizes.document)))
        for later in np.sort(rng.uniform(0, BURST_SECONDS, QUESTIONS)).tolist():
            question = (("question", number, len(found)), int(rng.integers(*sizes.question)))
            found.append(Arrival(float(at) + later, (document, question), int(rng.integers(*sizes.answer))))
    return sorted(found, key=lambda arrival: arrival.at)


def stretch(rate: float, seconds: float, trace: Sequence[TraceRequest]) -> list[Arrival]:
    """See above."""
    wanted = round(rate * seconds)
    chosen = trace[len(trace) // 2 :][:wanted]
    start, end = chosen[0].timestamp, chosen[-1].timestamp
    factor = (end - start) / (seconds * 1e3)
    found = []
    for request in chosen:
        blocks = request.hash_ids[:LONGEST_BLOCKS]
        size = min(request.input_length, len(blocks) * HASH_BLOCK_TOKENS)
        sizes = [min(HASH_BLOCK_TOKENS, size - at * HASH_BLOCK_TOKENS) for at in range(len(blocks))]
        parts = tuple((("block", block), tokens) for block, tokens in zip(blocks, sizes, strict=True))
        at = (request.timestamp - start) / 1e3 / factor
        found.append(Arrival(at, parts, max(2, min(request.output_length, LONGEST_OUTPUT))))
    return found


async def ask(tokens_so_far: AsyncIterator[int]) -> Answer:
    """Times one request, from now on."""
    start, first, last, tokens = perf_counter(), 0.0, 0.0, 0
    async for so_far in tokens_so_far:
        last, tokens = perf_counter(), so_far
        first = first or last
    return Answer(first - start, (last - first) / max(1, tokens - 1), last - start, tokens)


async def replay(engine: Engine, name: str, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Sends every request at its time; figures of all answers."""
    prompts = [arrival.prompt(engine.vocabulary) for arrival in arrivals]
    start = perf_counter()

    async def later(number: int) -> Answer:
        await asyncio.sleep(arrivals[number].at - (perf_counter() - start))
        return await ask(engine.generate(f"{name}-{number}", prompts[number], arrivals[number].output_tokens))

    answers = await asyncio.gather(*(later(number) for number in range(len(arrivals))))
    took = perf_counter() - start
    await engine.empty_cache()
    output_tokens = sum(answer.output_tokens for answer in answers)
    return {
        "requests": len(answers), "seconds": round(took, 1), "input_tokens": sum(map(len, prompts)),
        "output_tokens": output_tokens, "output_tokens_per_s": round(output_tokens / took, 1),
        **{field: spread([asdict(answer)[field] * 1e3 for answer in answers]) for field in ("ttft", "tpot", "latency")},
    }  # fmt: skip


def spread(milliseconds: Sequence[float]) -> dict[str, float]:
    """Mean, median and P99."""
    values = np.array(milliseconds)
    figures = {"mean": values.mean(), "median": np.median(values), "p99": np.percentile(values, 99)}
    return {name: round(float(value), 2) for name, value in figures.items()}


async def run_all(engine: Engine, task: Task, answers: Connection) -> None:
    """All runs on one engine, each in its turn; the first one twice, briefly, so that everything is compiled."""
    first = next(iter(task.runs.values()))
    warm = [Arrival(0.02 * number, arrival.parts, 16) for number, arrival in enumerate(first[:40])]
    with turn_lock.turn(task.turns):
        await replay(engine, "warm-up", warm)
    for name, arrivals in task.runs.items():
        with turn_lock.turn(task.turns):
            before = engine.counters()
            figures = await replay(engine, name, arrivals)
            figures["counters"] = {key: value - before.get(key, 0.0) for key, value in engine.counters().items()}
        answers.send((name, figures))


def run_backends(
    serve: Callable[[Task, Connection], None], tasks: Sequence[Task], keep: Callable[[Results, Sequence[str]], object]
) -> None:
    """Runs back ends.

    Args:
        serve: the function of a process: sends ("", facts), then (run, figures) as they come.
        tasks: with a card each or turns, side by side; without, one after the other.
        keep: called after each answer with what all have answered so far, and the names of those that are lost.

    Raises:
        RuntimeError: if a process ended before it had answered. Those beside it have answered all.
    """
    results: Results = {task.backend: {} for task in tasks}
    wanted = {task.backend: len(task.runs) for task in tasks}
    lost: dict[str, str] = {}

    def receive(backend: str, answer: tuple[str, dict[str, Any]] | None) -> None:
        if answer is not None:
            run, figures = answer
            results[backend][run] = figures
            print(backend, run, {key: figures[key] for key in ("ttft", "tpot", "latency") if run}, flush=True)
        else:
            done = len(results[backend].keys() - {""})
            if done == wanted[backend]:
                return
            lost[backend] = f"{backend}: the process ended after {done} of {wanted[backend]} runs"
            print(lost[backend], flush=True)
        keep(results, list(lost))

    together = tasks[0].card is not None or tasks[0].turns is not None
    for group in [tasks] if together else [[task] for task in tasks]:
        collect([start(task.backend, serve, task) for task in group], receive)
        if lost:
            raise RuntimeError("; ".join(lost.values()))


@dataclass(frozen=True)
class Result:
    """Where a result goes, and how it was taken.

    Attributes:
        engine: whose package it is.
        taken: runs of another file are kept if they were taken alike.
        suffix: of the file's name.
        path: instead of a file in results/.
    """

    engine: str
    taken: dict[str, Any]
    suffix: str
    path: Path | None

    def save(self, results: Results, lost: Sequence[str] = ()) -> None:
        """Writes the runs that all back ends have answered, beside those of the file that were taken alike. Those that
        are lost answer no more: nobody waits for them."""
        from benchmarks.lib.report import RESULTS, environment, short_name, write_result

        waited_for = [found for name, found in results.items() if name not in lost]
        complete = [run for run in chain(*waited_for[:1]) if run and all(run in found for found in waited_for)]
        if not complete:
            return
        facts = {name: found[""] for name, found in results.items() if "" in found}
        card = next(iter(facts.values()))["card"]
        taken = {"card": card, **self.taken}
        name = f"{self.engine}-serving-{short_name(card)}{self.suffix}"
        path = self.path or RESULTS / f"{name}.json"
        held = json.loads(path.read_text()) if path.exists() else {}
        # A file that does not say how is older than the question: that was not done then.
        alike = all(held.get(key, False) == value for key, value in taken.items())
        alike = alike and list(held["runs"]) == list(results)
        where = {key: value for key, value in environment().items() if key in ("date", "commit")}
        runs = {
            backend: (held["runs"][backend] if alike else {})
            | {run: {**where, **found[run]} for run in complete if run in found}
            for backend, found in results.items()
        }
        figures = {**taken, "runs": runs, "facts": facts} | ({"lost": list(lost)} if lost else {})
        print(write_result(name, figures, self.engine, "triton", path=path), flush=True)


def wanted_runs(arguments: argparse.Namespace) -> dict[str, list[Arrival]]:
    """By name: workload and rate."""
    trace = read_trace(arguments.trace) if arguments.trace else ()
    runs = {}
    for workload in arguments.workloads:
        for rate in [rate * arguments.scale for rate in RATES[workload]]:
            if workload == "conversation":
                runs[f"{workload} {rate:g}/s"] = conversation(rate, arguments.seconds, trace)
            elif workload == "toolagent":
                runs[f"{workload} {rate:g}/s"] = toolagent(rate, arguments.seconds)
            elif workload == "documents":
                runs[f"{workload} {rate:g}/s"] = documents(rate, arguments.seconds)
            elif trace:
                runs[f"{workload} {rate:g}/s"] = stretch(rate, arguments.seconds, trace)
    return runs


def command_line(description: str, backends: Sequence[str]) -> argparse.ArgumentParser:
    """The options that both scripts have. backends: the default."""
    parser = argparse.ArgumentParser(
        description=f"{description}\n{__doc__}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, required=True, help="a folder with the config.json of a model")
    parser.add_argument("--trace", type=Path, help="a trace in Mooncake's format")
    parser.add_argument("--backends", nargs="+", default=backends, help="the first is what others are compared with")
    parser.add_argument("--workloads", nargs="+", default=list(RATES), choices=list(RATES))
    parser.add_argument("--seconds", type=positive, default=90.0, help="that requests arrive for, in each run")
    parser.add_argument("--scale", type=positive, default=1.0, help="factor of all request rates")
    side_by_side = parser.add_mutually_exclusive_group()
    side_by_side.add_argument(
        "--parallel", action="store_true", help="each back end on a card of its own, side by side"
    )
    turn_lock.add_options(parser, side_by_side)
    parser.add_argument("--suffix", default="", help="of the result's name")
    parser.add_argument("--output", type=Path, help="write here instead of into results/")
    return parser


def check(parser: argparse.ArgumentParser, arguments: argparse.Namespace, quick: bool = False) -> None:
    """Refuses what neither script can run. quick: without a trace."""
    if "trace" in arguments.workloads and arguments.trace is None and not quick:
        parser.error("argument --trace: expected a file for the workload trace, or --workloads without it")
    turn_lock.check_options(parser, arguments, len(arguments.backends))
