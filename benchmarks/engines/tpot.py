"""Time per output token of a whole engine, vLLM or SGLang, with its own attention and with ours.

    python -m benchmarks.engines.tpot --engine vllm --model FOLDER  # results/vllm-tpot-CARD.json
    python -m benchmarks.engines.tpot --engine vllm --model FOLDER --dcp 2  # results/vllm-tpot-CARD-dcp2.json
    python -m benchmarks.engines.tpot --engine vllm --model FOLDER --invariant  # vllm-tpot-CARD-invariant.json
    python -m benchmarks.engines.tpot --engine vllm --model FOLDER --cold  # vllm-tpot-CARD-cold.json
    python -m benchmarks.engines.tpot --engine vllm --shape gpt-oss --kv-cache-dtype fp8  # ...-CARD-gpt-oss-fp8.json
    python -m benchmarks.engines.tpot --engine vllm --shape deepseek-v3-16  # latent attention: FLASHMLA, TRUNK_MLA ...
    python -m benchmarks.engines.tpot --engine sglang --model FOLDER  # results/sglang-tpot-CARD.json
    python -m benchmarks.engines.tpot --engine sglang --model FOLDER --backends flashinfer trunk@16 fa3+trunk@16

FOLDER needs a config.json only: weights are random (load_format="dummy"), the same for each back end. Back ends are
named as `vllm.py` and `sglang.py` say. One after the other, each is started in a process of its own, with CUDA graphs
of decoding and its prefix cache, and generates for batches of prompts: REQUESTS x (levels of shared and private
tokens). Each batch is generated once to fill the prefix cache, then for 136 tokens a request, timed as they arrive.
TPOT is the median over repeats of the pace while all requests decode: from the 8th token of the request that has it
last until the first request ends. So what is left of the prompts, which differs from run to run, is not in it. The
result is written after each batch that all back ends that have started have answered, and says which batches it lacks
(`unfinished`).

The first 16 tokens of each request, greedy, are compared with those of the first back end: the fraction that is equal
before the first that differs, and in which steps sequences part. With random weights logits lie close together, so that
rounding parts some: this shows gross errors, and is no test of accuracy. What our back end read and saved is in the
result, from the counters that the engine would serve under /metrics.

With --busy some steps of each batch are traced, by the engine's own profiler, after all were timed. `busy_ms` is about
how long kernels and copies run on the card in a step, those that wait for others included, `kernels_ms` how long each
is, and `calls_ms` how long the host is in each of CUDA's calls. If `busy_ms` is much less than the time per token, the
host bounds it. Where a trace fails, `busy_missing` says why.

With --cold each back end starts with empty caches of compiled code, to compare the time until it is ready (`ready_s`),
and runs one batch.

With --turns FILE all back ends start at once, and take turns to measure: see turn_lock.py. Several on one card need
--kv-gib: GiB of each one's KV cache. If one is lost the others' result is written, and names it (`lost`).

With --invariant each back end runs with VLLM_BATCH_INVARIANT=1, and CUSTOM again without it, which shows the price.

With --shape the model is one of model_shapes.py, and the batches are six of the twelve. qwen3-next needs einops.

With --dcp N, N cards share each request (decode context parallelism). The model then has one KV head, and the batch is
64 questions about one text of 64k tokens.

On a CPU, `--engine sglang --device cpu --quick` runs two small batches, to see that it works: FOLDER is a tiny model.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from benchmarks.engines.adapters import ENGINES, add_device, add_engine, card_name, need_device, parse, with_ports
from benchmarks.engines.counters import counted, counters
from benchmarks.engines.interface import Start, vocabulary
from benchmarks.engines.pace import measure, table, traced_or_why
from benchmarks.engines.tpot_answers import Results, outcome, run_backends
from benchmarks.lib import turn_lock
from benchmarks.lib.options import integer
from benchmarks.lib.report import short_name, write_result
from benchmarks.lib.turn_lock import starting, turn
from benchmarks.workloads.decode_batches import (
    CHOICES,
    COLD_WORKLOADS,
    QUICK_WORKLOADS,
    SHARED_WORKLOADS,
    Workload,
    workloads_named,
)
from benchmarks.workloads.model_shapes import SHAPES, write_config

CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "NUMBA_CACHE_DIR")


class Plan(NamedTuple):
    """What all back ends have in common.

    Attributes:
        engine: its name.
        workloads: that each one answers.
        repeats: of each time.
        cold: each starts with empty caches of compiled code.
        turns: see turn_lock.py.
        busy: some steps are traced.
    """

    engine: str
    workloads: tuple[Workload, ...]
    repeats: int
    cold: bool = False
    turns: Path | None = None
    busy: bool = False


def serve(start: Start, plan: Plan, answers: Connection) -> None:
    """A process with one back end: sends the card, (workload, figures) as they come, then ("", facts of the run)."""
    with counted(), tempfile.TemporaryDirectory() as caches, tempfile.TemporaryDirectory() as traces:
        with starting(plan.turns):
            for name in CACHES if plan.cold else ():
                os.environ[name] = str(Path(caches, name))
            begin = perf_counter()
            engine = ENGINES[plan.engine].offline(start, Path(traces) if plan.busy else None)
            ready = perf_counter() - begin
            print(f"{start.name}: ready after {ready:.0f} s", flush=True)
            card = {"card": card_name(start.device)}
        answers.send(("card", card))
        tokens, timed = vocabulary(start.model), dict[Workload, dict[str, Any]]()
        for workload in plan.workloads:
            with turn(plan.turns):
                timed[workload] = measure(engine, workload.prompts(tokens), plan.repeats)
            answers.send((str(workload), timed[workload]))
        for workload, figures in timed.items() if plan.busy else ():
            with turn(plan.turns):
                found = traced_or_why(engine, workload.prompts(tokens), Path(traces))
            answers.send((str(workload), figures | found))
        facts: dict[str, Any] = {**card, "options": start.options, "counters": counters()}
        # The time beside others that start is no back end's own.
        answers.send(("", facts | ({} if plan.turns else {"ready_s": round(ready, 1)})))
        with turn(plan.turns):  # to end is work too
            engine.shutdown()


def workloads_of(arguments: argparse.Namespace) -> tuple[Workload, ...]:
    """The batches that are asked for."""
    if arguments.dcp > 1:
        return SHARED_WORKLOADS
    if arguments.quick:
        return QUICK_WORKLOADS
    if arguments.cold and not arguments.workloads:
        return COLD_WORKLOADS
    return workloads_named(arguments.workloads or ["six" if arguments.shape else "all"])


def plan_of(arguments: argparse.Namespace) -> Plan:
    """What all back ends have in common."""
    asked = arguments.repeats, arguments.cold, arguments.turns, arguments.busy
    return Plan(arguments.engine, workloads_of(arguments), *asked)


def name_of(arguments: argparse.Namespace) -> str:
    """What the result's name has after the card."""
    parts = [arguments.shape] if arguments.shape else []
    parts += [] if arguments.kv_cache_dtype == "auto" else [arguments.kv_cache_dtype]
    parts += ["invariant"] if arguments.invariant else []
    parts += ["cold"] if arguments.cold else []
    if arguments.dcp > 1:
        parts.append(f"dcp{arguments.dcp}")
    elif arguments.tensor_parallel > 1:
        parts.append(f"tp{arguments.tensor_parallel}")
    return "".join(f"-{part}" for part in parts)


def command_line() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_engine(parser)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, help="a folder with the config.json of a model")
    model.add_argument("--shape", choices=list(SHAPES), help="of a model in model_shapes.py; vLLM")
    add_device(parser)
    parser.add_argument("--backends", nargs="+", help="the first is what others are compared with")
    batches = parser.add_mutually_exclusive_group()
    batches.add_argument("--quick", action="store_true", help="two small batches instead of all; SGLang")
    batches.add_argument(
        "--workloads", nargs="+", help="six or all of the twelve batches, or some by their names, with --output"
    )
    parser.add_argument("--repeats", type=integer(1, 1000), default=3, help="of each time, of which the median counts")
    parser.add_argument("--busy", action="store_true", help="trace some steps of each batch, too")
    parser.add_argument("--output", type=Path, help="write here instead of into results/")
    parser.add_argument(
        "--kv-cache-dtype", default="auto", choices=("auto", "fp8", "fp8_e5m2"), help="of the cache; vLLM"
    )
    parser.add_argument("--cold", action="store_true", help="with empty caches of compiled code; vLLM")
    parser.add_argument(
        "--invariant", action="store_true", help="with VLLM_BATCH_INVARIANT=1, and ours also without; vLLM"
    )
    spread = parser.add_mutually_exclusive_group()
    spread.add_argument("--tensor-parallel", type=integer(1, 64), default=1, help="cards that a model is spread over")
    spread.add_argument("--dcp", type=integer(1, 64), default=1, help="cards that share each request; vLLM")
    turn_lock.add_options(parser)
    return parser


def read_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's, checked."""
    parser = command_line()
    engine, arguments = parse(parser, given)
    if arguments.workloads:
        try:
            workloads_named(arguments.workloads)
        except ValueError as error:
            parser.error(f"argument --workloads: {error}")
        if arguments.workloads[0] not in CHOICES and not arguments.output:
            parser.error("argument --workloads: some batches would take the place of a whole result: give --output")
    if arguments.turns and arguments.cold:
        parser.error("argument --turns: an engine's time until it is ready is not its own then: leave out --cold")
    if arguments.dcp > 1 and (arguments.shape or arguments.workloads):
        parser.error("argument --dcp: it has a batch and heads of its own: leave out --shape and --workloads")
    if arguments.busy and arguments.device == "cpu":
        parser.error("argument --busy: it tells of a card: leave out --device cpu")
    shape = SHAPES[arguments.shape] if arguments.shape else None
    arguments.backends = arguments.backends or (shape.backends if shape else ()) or engine.BACKENDS
    runs = len(arguments.backends) + (arguments.invariant and "CUSTOM" in arguments.backends)
    turn_lock.check_options(parser, arguments, runs)
    return arguments


def save(arguments: argparse.Namespace, plan: Plan, model: str, results: Results, lost: Sequence[str]) -> None:
    """Writes the figures that there are. model: its name. lost: back ends that ended before they had answered."""
    engine, card = ENGINES[plan.engine], next(iter(results.values()))[""]["card"]
    cards = max(arguments.dcp, arguments.tensor_parallel)
    figures = {"card": card, "cards": cards, "model": model, "repeats": plan.repeats, "busy": plan.busy}
    figures |= engine.tpot_facts(arguments) | outcome(results, plan.workloads, plan.turns is not None, lost)
    name = f"{engine.PACKAGE}-tpot-{short_name(card)}{name_of(arguments)}"
    print(write_result(name, figures, engine.PACKAGE, "triton", path=arguments.output), flush=True)


def main() -> None:
    arguments = read_arguments()
    engine, plan = ENGINES[arguments.engine], plan_of(arguments)
    need_device(engine, arguments.device)
    with tempfile.TemporaryDirectory() as folder:
        model = write_config(arguments.shape, Path(folder)) if arguments.shape else arguments.model
        with with_ports(engine, engine.tpot_starts(arguments, model)) as starts:
            runs = {start.name: (start, plan) for start in starts}
            keep = partial(save, arguments, plan, model.name)
            results = run_backends(serve, runs, len(plan.workloads), plan.turns is not None, keep)
    for row in table(results, plan.workloads):
        print(row, flush=True)


if __name__ == "__main__":
    main()
