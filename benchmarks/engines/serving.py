"""Requests that arrive at vLLM or SGLang, with its own attention and with ours (PAT §8.2, Figure 10).

    python -m benchmarks.engines.serving --engine vllm --model FOLDER --trace FILE    # results/vllm-serving-CARD.json
    python -m benchmarks.engines.serving --engine sglang --model FOLDER --trace FILE  # results/sglang-serving-CARD.json
    python -m benchmarks.engines.serving --engine sglang --model FOLDER --device cpu --quick --output FILE

FOLDER needs a config.json only: weights are random (load_format="dummy"). Back ends are named as `vllm.py` and
`sglang.py` say. Requests arrive for --seconds: `arrivals.py` has the workloads. Each run ends when its last request is
answered; the prefix cache is emptied before the next. Prompts are computed in steps of at most 2,048 tokens.

Each back end runs in a process of its own: one after the other, with --parallel side by side on a card each, or with
--turns FILE side by side on one card, on which they take turns to measure (see turn_lock.py) and need --kv-gib each. A
run that all have answered is written at once, beside those that the file holds, if they were taken alike. A back end
that is lost does not hold up those beside it, and the result names it (`lost`).

--quick takes short documents for five seconds, to see that it works: on a CPU, FOLDER is a tiny model.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.engines import processes
from benchmarks.engines.adapters import ENGINES, add_engine, add_model, card_name, need_device, parse, with_ports
from benchmarks.engines.counters import counted, counters
from benchmarks.engines.interface import Adapter, Online, Start, vocabulary
from benchmarks.engines.replay import replay
from benchmarks.lib import turn_lock
from benchmarks.lib.options import existing, positive
from benchmarks.lib.report import date_and_commit, read_result, short_name, write_result
from benchmarks.lib.turn_lock import starting, turn
from benchmarks.workloads import arrivals as workloads
from benchmarks.workloads.arrivals import QUICK_SECONDS, RATES, Arrival, wanted_runs

WARM_UP_REQUESTS, WARM_UP_GAP, WARM_UP_TOKENS = 40, 0.02, 16
Results = dict[str, dict[str, Any]]  # figures by back end and run; "": its facts


class Task(NamedTuple):
    """What one process serves.

    Attributes:
        engine: its name.
        start: with which back end.
        card: the only one that it sees; None: all.
        runs: by name.
        turns: see turn_lock.py.
    """

    engine: str
    start: Start
    card: int | None
    runs: dict[str, list[Arrival]]
    turns: Path | None = None


def serve(task: Task, answers: Connection) -> None:
    """A process with one back end: sends ("", facts), then (run, figures) as they come."""
    if task.card is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(task.card)
    with counted():
        with starting(task.turns):
            begin = perf_counter()
            engine = ENGINES[task.engine].online(task.start)
            ready = perf_counter() - begin
            print(f"{task.start.name}: ready after {ready:.0f} s", flush=True)
            facts = {"card": card_name(task.start.device)}
            # The time beside others that start is no back end's own.
            answers.send(("", facts | ({} if task.turns else {"ready_s": round(ready, 1)})))
        engine.run(run_all(engine, task, vocabulary(task.start.model), answers))
        with turn(task.turns):  # to end is work too
            engine.shutdown()


async def run_all(engine: Online, task: Task, tokens: int, answers: Connection) -> None:
    """All runs on one engine, each in its turn; the first one twice, briefly, so that everything is compiled. tokens:
    that the model knows."""
    first = next(iter(task.runs.values()))[:WARM_UP_REQUESTS]
    warm = [Arrival(WARM_UP_GAP * number, each.parts, WARM_UP_TOKENS) for number, each in enumerate(first)]
    with turn(task.turns):
        await replay(engine, "warm-up", warm, tokens)
    for name, arrivals in task.runs.items():
        with turn(task.turns):
            before = counters()
            figures = await replay(engine, name, arrivals, tokens)
            figures["counters"] = {key: value - before.get(key, 0.0) for key, value in counters().items()}
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
    results: Results = {task.start.name: {} for task in tasks}
    wanted = {task.start.name: len(task.runs) for task in tasks}
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
        processes.collect([processes.start(task.start.name, serve, task) for task in group], receive)
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
        waited_for = [found for name, found in results.items() if name not in lost]
        complete = [run for run in chain(*waited_for[:1]) if run and all(run in found for found in waited_for)]
        if not complete:
            return
        facts = {name: found[""] for name, found in results.items() if "" in found}
        card = next(iter(facts.values()))["card"]
        taken = {"card": card, **self.taken}
        name = f"{self.engine}-serving-{short_name(card)}{self.suffix}"
        held = read_result(name, self.path)
        # A file that does not say how is older than the question: that was not done then.
        alike = all(held.get(key, False) == value for key, value in taken.items())
        alike = alike and list(held["runs"]) == list(results)
        where = date_and_commit()
        runs = {
            backend: (held["runs"][backend] if alike else {})
            | {run: {**where, **found[run]} for run in complete if run in found}
            for backend, found in results.items()
        }
        figures = {**taken, "runs": runs, "facts": facts} | ({"lost": list(lost)} if lost else {})
        print(write_result(name, figures, self.engine, "triton", path=self.path), flush=True)


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        description=f"{__doc__}\n{workloads.__doc__}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_engine(parser)
    add_model(parser)
    parser.add_argument("--trace", type=existing, help="a trace in Mooncake's format")
    parser.add_argument("--backends", nargs="+", help="the first is what others are compared with")
    parser.add_argument(
        "--workloads", nargs="+", default=list(RATES), choices=list(RATES), help="what arrives; default: all"
    )
    parser.add_argument("--quick", action="store_true", help="short documents for five seconds instead of all; SGLang")
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


def read_arguments(given: Sequence[str] | None = None) -> tuple[Adapter, argparse.Namespace]:
    """The engine, and the command's arguments, checked."""
    parser = command_line()
    engine, arguments = parse(parser, given)
    if "trace" in arguments.workloads and arguments.trace is None and not arguments.quick:
        parser.error("argument --trace: expected a file for the workload trace, or --workloads without it")
    turn_lock.check_options(parser, arguments, len(arguments.backends or engine.SERVED))
    return engine, arguments


def main() -> None:
    engine, arguments = read_arguments()
    need_device(engine, arguments.device)
    starts, runs = engine.serving_starts(arguments), wanted_runs(arguments)
    taken = {
        "model": arguments.model.name, "options": engine.serving_options(starts),
        "seconds": QUICK_SECONDS if arguments.quick else arguments.seconds,
        "side_by_side": arguments.parallel, "turns": arguments.turns is not None,
    }  # fmt: skip
    with with_ports(engine, starts) as numbered:
        tasks = [
            Task(arguments.engine, start, card if arguments.parallel else None, runs, arguments.turns)
            for card, start in enumerate(numbered)
        ]
        run_backends(serve, tasks, Result(engine.PACKAGE, taken, arguments.suffix, arguments.output).save)


if __name__ == "__main__":
    main()
