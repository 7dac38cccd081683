"""What vllm_tpot.py and sglang_tpot.py share: batches, their pace, runs of all back ends, the table of a result.

The processes that engines start do not import this: see vllm_tpot.py.
"""

import argparse
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from benchmarks.engines.processes import collect, start
from benchmarks.engines.traces import busy, events_in

SHORT, LONG, COMPARED = 8, 136, 16
LEAST = 32  # tokens of a request that give its pace
TRACED = 24  # tokens of a request whose steps are traced, within those


@dataclass(frozen=True)
class Workload:
    """levels: (number of groups, tokens), from the root; a request is in one group of each, in turn."""

    requests: int
    levels: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        parts = [f"{groups} groups x {tokens}" if 1 < groups < self.requests else f"{tokens}"
                 for groups, tokens in self.levels]  # fmt: skip
        return f"{self.requests} x ({' + '.join(parts)})"

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Random tokens, the same at every call; prompts of two workloads share nothing."""
        rng = random.Random(str(self))
        texts = [[rng.choices(range(vocabulary), k=tokens) for _ in range(groups)] for groups, tokens in self.levels]
        return [[token for level in texts for token in level[i % len(level)]] for i in range(self.requests)]


WORKLOADS = (
    Workload(64, ((1, 8192), (64, 512))),
    Workload(64, ((1, 1024), (8, 3072), (64, 256))),
    Workload(256, ((1, 1024), (256, 128))),
    Workload(64, ((1, 2048), (64, 256))),
    Workload(8, ((1, 4096), (8, 128))),
    Workload(32, ((32, 2048),)),
    Workload(64, ((4, 12000), (64, 64))),
    Workload(128, ((8, 512), (128, 128))),
    Workload(128, ((1, 640), (128, 64))),
    Workload(128, ((128, 704),)),
    Workload(8, ((8, 8192),)),
    Workload(1, ((1, 2048),)),
)
COLD_WORKLOADS = (WORKLOADS[5],)
SIX = tuple(WORKLOADS[place] for place in (0, 1, 5, 6, 7, 9))
CHOICES = MappingProxyType({"six": SIX, "all": WORKLOADS})
SHARED_WORKLOADS = (Workload(64, ((1, 65536), (64, 128))),)


class Generated(NamedTuple):
    """tokens: of each request. arrivals: of each, (time, tokens by then) as they came."""

    tokens: list[list[int]]
    arrivals: list[list[tuple[float, int]]]


def pace(arrivals: Sequence[Sequence[tuple[float, int]]]) -> float:
    """Milliseconds per token while all requests decode: of the request that has its SHORT-th token last, from then on
    until the first request ends.

    Raises:
        ValueError: all decode at once for less than LEAST tokens.
    """
    starts = [next(time for time, tokens in request if tokens >= SHORT) for request in arrivals]
    start, end = max(starts), min(request[-1][0] for request in arrivals)
    window = [arrival for arrival in arrivals[starts.index(start)] if start <= arrival[0] <= end]
    tokens = window[-1][1] - window[0][1] if window else 0
    if tokens < LEAST:
        raise ValueError(
            f"all requests decoded at once for {tokens} tokens: expected {LEAST} or more; lower the batch's tokens, or "
            "give the cache room for its prompts"
        )
    return (window[-1][0] - window[0][0]) / tokens * 1e3


def measure(
    generate: Callable[[Sequence[list[int]], int], Generated], prompts: Sequence[list[int]], repeats: int
) -> dict[str, Any]:
    """One back end on one batch. generate: so many tokens of each prompt."""
    generate(prompts, SHORT)
    found = [generate(prompts, LONG) for _ in range(repeats)]
    times = [pace(each.arrivals) for each in found]
    figures = {"tpot_ms": round(median(times), 3), "tpot_ms_each": [round(time, 3) for time in times]}
    return figures | {"tokens": [sequence[:COMPARED] for sequence in found[-1].tokens]}


def traced(folder: Path, steps: int) -> dict[str, Any]:
    """What the card did in a step, from the traces of so many in a folder, which are removed.

    Raises:
        RuntimeError: there are none.
    """
    events = events_in(folder)
    if not (events and steps):
        raise RuntimeError("the engine's profiler wrote no trace of whole steps")
    for path in folder.rglob("*"):
        if path.is_file():
            path.unlink()
    return busy(events, steps)


def traced_or_why(trace: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a trace finds, or why it does not: what was timed stays in the result."""
    try:
        return trace()
    except Exception as error:
        return {"busy_missing": f"{type(error).__name__}: {error}"}


def compare(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Of the first tokens, before the first that differs."""
    parted = [
        next((step for step, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), COMPARED)
        for x, y in zip(ours, theirs, strict=True)
    ]
    steps = sorted(step for step in parted if step < COMPARED)
    return {"equal_tokens": round(sum(parted) / (COMPARED * len(parted)), 4), "parted_in_steps": steps}


def table(results: Mapping[str, Mapping[str, Any]], workloads: Sequence[Workload] = WORKLOADS) -> list[dict[str, Any]]:
    """A row per workload that all have answered: each back end, and how the others compare with the first."""
    first, *others = results
    rows = []
    for name in map(str, workloads):
        if any(name not in found for found in results.values()):
            continue
        row: dict[str, Any] = {"workload": name}
        for backend, found in results.items():
            row[backend] = {key: value for key, value in found[name].items() if key != "tokens"}
        for backend in others:
            row[backend] |= compare(results[backend][name]["tokens"], results[first][name]["tokens"])
            row[backend]["speedup"] = round(results[first][name]["tpot_ms"] / results[backend][name]["tpot_ms"], 3)
        rows.append(row)
    return rows


Results = dict[str, dict[str, Any]]  # figures by back end and workload; "": facts of the run


@dataclass
class Answers:
    """What back ends have answered so far, and why some have not.

    Attributes:
        workloads: how many each one answers.
        keep: see `run_backends`.
        found: of those that have started, in their order.
        finished: those that have answered all.
        lost: those that ended before, and why.
    """

    workloads: int
    keep: Callable[[Results, Sequence[str]], object]
    found: Results = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    lost: dict[str, str] = field(default_factory=dict)

    def receive(self, name: str, answer: tuple[str, dict[str, Any]] | None) -> None:
        """answer: first ("card", its name), then (workload, figures) each, then ("", facts of the run); None when the
        process has ended."""
        if answer is None:
            self._end(name)
            return
        subject, figures = answer
        self.found[name]["" if subject == "card" else subject] = figures
        if subject == "":
            self.finished.add(name)
            self._keep()
        elif subject != "card":
            shown = "".join(f", {key} {value}" for key, value in figures.items() if key.startswith("busy"))
            print(f"{name} {subject}: {figures['tpot_ms']} ms, each {figures['tpot_ms_each']}{shown}", flush=True)
            if all(subject in other for other in self._left().values()):
                self._keep()

    def _end(self, name: str) -> None:
        if name in self.finished:
            return
        answered = len(self.found[name].keys() - {""})
        self.lost[name] = f"{name}: the process ended after {answered} of {self.workloads} workloads"
        print(self.lost[name], flush=True)
        # What the others have is kept with their next answer: where all are lost together, what all had stays kept.
        if self._left().keys() <= self.finished:
            self._keep()

    def _left(self) -> Results:
        """Of those that are not lost; the first is what the others are compared with."""
        return {name: found for name, found in self.found.items() if name not in self.lost}

    def _keep(self) -> None:
        left = self._left()
        results = {name: found for name, found in left.items() if found.keys() - {""}}
        if results and next(iter(results)) == next(iter(left)):
            self.keep(results, list(self.lost))


def run_backends(
    target: Callable[..., None],
    runs: Mapping[str, tuple[Any, ...]],
    workloads: int,
    together: bool,
    keep: Callable[[Results, Sequence[str]], object],
) -> Results:
    """Figures of all back ends.

    Args:
        target: the function of a process, which gets arguments and a connection for its answers.
        runs: the arguments of each back end's, by name.
        workloads: how many each one answers.
        together: all start at once, and one that is lost does not end the others; else one after the other.
        keep: called after each workload that all that have started have answered, and when one has finished: with the
            figures of those that have any, and the names of the lost, for which nobody waits.

    Raises:
        RuntimeError: if a process ended before it had answered. The others' figures have been kept.
    """
    answers = Answers(workloads, keep)
    for group in [list(runs)] if together else [[name] for name in runs]:
        answers.found |= {name: {} for name in group}
        collect([start(name, target, *runs[name]) for name in group], answers.receive)
        if answers.lost:
            raise RuntimeError("; ".join(answers.lost.values()))
    return answers.found


def outcome(results: Results, workloads: Sequence[Workload], turns: bool, lost: Sequence[str]) -> dict[str, Any]:
    """What a result says of its runs, and which workloads it lacks. lost: back ends that ended before they had
    answered."""
    rows = table(results, workloads)
    found: dict[str, Any] = {"turns": turns, "rows": rows}
    found |= {"runs": {name: figures[""] for name, figures in results.items()}}
    unfinished = [name for name in map(str, workloads) if name not in {row["workload"] for row in rows}]
    return found | ({"unfinished": unfinished} if unfinished else {}) | ({"lost": list(lost)} if lost else {})


def add_common(parser: argparse.ArgumentParser, batches: argparse._ActionsContainer | None = None) -> None:
    """The options that both scripts have. batches: a group for --workloads."""
    (batches or parser).add_argument(
        "--workloads", nargs="+", help="six or all of the twelve batches, or some by their names, with --output"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of each time, of which the median counts")
    parser.add_argument("--busy", action="store_true", help="trace some steps of each batch, too")
    parser.add_argument("--output", type=Path, help="write here instead of into results/")


def workloads_named(names: Sequence[str]) -> tuple[Workload, ...]:
    """One of CHOICES, or batches by name.

    Raises:
        ValueError: there is no such batch.
    """
    if len(names) == 1 and names[0] in CHOICES:
        return CHOICES[names[0]]
    known = {str(workload): workload for workload in WORKLOADS}
    for name in names:
        if name not in known:
            raise ValueError(f"{name!r}: expected six or all alone, or some of {', '.join(map(repr, known))}")
    return tuple(known[name] for name in dict.fromkeys(names))


def check_common(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """Refuses what neither script can run."""
    if arguments.workloads:
        try:
            workloads_named(arguments.workloads)
        except ValueError as error:
            parser.error(f"argument --workloads: {error}")
        if arguments.workloads[0] not in CHOICES and not arguments.output:
            parser.error("argument --workloads: some batches would take the place of a whole result: give --output")
    if arguments.repeats < 1:
        parser.error(f"argument --repeats: expected at least 1, got {arguments.repeats}")
    if arguments.model and not (arguments.model / "config.json").is_file():
        parser.error(f"argument --model: {arguments.model} has no config.json")
