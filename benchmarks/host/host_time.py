"""What a step and a layer take the host: planning, and launching an eager `run`; and an eager call in training.

    python -m benchmarks.host.host_time                                      # results/host-time-CARD.json
    python -m benchmarks.host.host_time --source ../old --source .          # checkouts, in turns, on one card
    python -m benchmarks.host.host_time --fake                               # no GPU: results/host-time-fake.json

Steps of 32 query and 8 KV heads of 128, bfloat16, pages of 16 tokens, nothing shared: 10 decodes of 5,120 tokens,
with or without a prompt chunk of 1,014 tokens after 4,096. Every call plans a step one token further, from tables on
the CPU. `plan_us`: a plan without a capacity; `plan_into_us`: into a plan of fixed size; `run_us`, `run_into_us`:
`run` with either, which launches one layer. The device is idle before each call, and no call waits for it. `*_calls`:
functions that Python calls meanwhile, its own and those of extensions. Calls in training: see `training_calls`.

`--fake` plans on the CPU for a made-up H100 and launches nothing, so that `run` is what comes before Triton's launcher;
Hopper's own decode kernels are left out, as they take only tensors on a GPU.
"""

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from statistics import median
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import torch

import trunkattn
from benchmarks.lib.options import existing, integer, need_gpu
from benchmarks.lib.report import short_name, write_result

PAGE_SIZE: Final = 16
DECODE_TOKENS, CHUNK_TOKENS, CACHED_TOKENS = 5120, 1014, 4096
EXECUTIONS: Final = ("auto", "serial")
FAKE_CARD: Final = SimpleNamespace(
    name="NVIDIA H100 80GB HBM3",
    multi_processor_count=132,
    major=9,
    minor=0,
    L2_cache_size=50 << 20,
    shared_memory_per_block_optin=227 << 10,
    shared_memory_per_block=48 << 10,
)
# The back end in this layout, and in the one before
BACKENDS: Final = (("trunkattn.gpu.attention", "GpuBackend"), ("trunkattn.gpu.executor", "GpuExecutor"))


class Case(NamedTuple):
    """A batch. decodes: requests of one query token. chunks: prompt chunks."""

    decodes: int
    chunks: int


PARTS: Final = ("steps", "training")
CASES: Final = {"10 decodes": Case(10, 0), "10 decodes and a chunk": Case(10, 1)}


class Steps:
    """Tables of a case's steps, each a token further than the one before."""

    def __init__(self, case: Case, number: int) -> None:
        lens = torch.tensor([DECODE_TOKENS] * case.decodes + [CACHED_TOKENS + CHUNK_TOKENS] * case.chunks)
        query_lens = torch.tensor([1] * case.decodes + [CHUNK_TOKENS] * case.chunks)
        columns = -(-(int(lens.max()) + number) // PAGE_SIZE)
        self.num_pages = len(lens) * columns
        pages = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(0))
        self.table = pages.view(len(lens), columns).to(torch.int32)
        self.starts = torch.cat([torch.zeros(1, dtype=torch.int64), query_lens.cumsum(0)]).to(torch.int32)
        self.lens = [(lens + further).to(torch.int32) for further in range(number)]
        self.capacity = trunkattn.Capacity(len(lens), int(self.starts[-1]), columns, self.num_pages)

    def further(self, call: Callable[..., object]) -> Callable[[], object]:
        """The call with the tables of one step after another, and from the first again."""
        at = 0

        def one() -> object:
            nonlocal at
            at = (at + 1) % len(self.lens)
            return call(self.table, self.lens[at], self.starts)

        return one


@contextmanager
def fake_gpu() -> Iterator[None]:
    """Lets this process plan for a card that it does not have, and inside launch nothing."""
    from triton.runtime.jit import JITFunction

    torch.set_num_threads(1)  # uploads become small copies, which several threads only delay
    torch.cuda.get_device_properties = lambda device=None: FAKE_CARD  # type: ignore[assignment, return-value]
    torch.cuda.device = lambda device: nullcontext()  # type: ignore[assignment, misc, return-value]
    run, JITFunction.run = JITFunction.run, lambda *arguments, **options: None
    yield
    JITFunction.run = run


def make_attention(config: Any, capacity: Any, fake: bool) -> Any:
    """A BatchAttention on the GPU; fake: one that plans for it on the CPU."""
    if not fake:
        return trunkattn.BatchAttention(config, "cuda", capacity)
    attention = trunkattn.BatchAttention(replace(config, execution="auto"), "cpu", capacity)
    for module, name in BACKENDS:
        try:
            backend = getattr(import_module(module), name)
        except ModuleNotFoundError:
            continue
        attention.config, attention._backend = config, backend(config, torch.device("cpu"), capacity)
        return attention
    raise RuntimeError(f"no back end for a GPU: expected a checkout with one of {BACKENDS}")


def host_us(call: Callable[[], object], calls: int, settle: Callable[[], object]) -> dict[str, float]:
    """Median and least time of a call on the host, and the functions that it calls."""
    times = []
    for _ in range(calls):
        settle()
        start = perf_counter()
        call()
        times.append((perf_counter() - start) * 1e6)
    profile = cProfile.Profile()
    settle()
    profile.runcall(call)
    times = times[calls // 10 :]
    called = pstats.Stats(profile).total_calls  # type: ignore[attr-defined]
    return {"us": round(median(times), 1), "min_us": round(min(times), 1), "calls": called}


def row_of(name: str, execution: str, calls: int, fake: bool) -> dict[str, Any]:
    """Planning and launching of a case."""
    device, settle = ("cpu", lambda: None) if fake else ("cuda", torch.cuda.synchronize)
    steps = Steps(CASES[name], calls)
    shape = (steps.num_pages, PAGE_SIZE, 8, 128)
    k_cache, v_cache = (torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    q = torch.zeros(int(steps.starts[-1]), 32, 128, dtype=torch.bfloat16, device=device)
    out = torch.empty_like(q)
    config = trunkattn.AttentionConfig(32, 8, 128, PAGE_SIZE, torch.bfloat16, execution=execution)
    free, sized = (make_attention(config, capacity, fake) for capacity in (None, steps.capacity))
    first = steps.table, steps.lens[0], steps.starts
    plan, into = free.plan(*first), sized.plan(*first)
    named = {
        "plan": steps.further(free.plan),
        "plan_into": steps.further(lambda *tables: sized.plan(*tables, into=into)),
        "run": lambda: free.run(plan, q, k_cache, v_cache, out),
        "run_into": lambda: sized.run(into, q, k_cache, v_cache, out),
    }
    row: dict[str, Any] = {"step": name, "execution": execution, "policy": plan.stats.policy}
    for what, call in named.items():
        row |= {f"{what}_{key}": value for key, value in host_us(call, calls, settle).items()}
    return row


def rows_of(parts: Sequence[str], calls: int, fake: bool) -> list[dict[str, Any]]:
    """Every case of steps with either execution, then those of training; parts: those of PARTS that are asked for."""
    rows: list[dict[str, Any]] = []
    if "steps" in parts:
        with fake_gpu() if fake else nullcontext():
            rows += [row_of(name, execution, calls, fake) for name in CASES for execution in EXECUTIONS]
    if "training" in parts:
        from benchmarks.host.training_calls import fake_training, training_rows  # needs a checkout with prefix trees

        settle = (lambda: None) if fake else torch.cuda.synchronize
        rows += training_rows(host_us, calls, settle, fake_training() if fake else None)
    return rows


def measure(source: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one checkout, by this script in a process of its own."""
    variables = os.environ | {"PYTHONPATH": str(source / "src")}
    command = [sys.executable, "-m", "benchmarks.host.host_time", "--only-measure", "--calls", str(options.calls)]
    command += ["--parts", *options.parts, *(["--fake"] if options.fake else [])]
    done = subprocess.run(command, env=variables, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source}: {done.stderr[-2000:]}")
    found: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return found


def least(rounds: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Each figure's least over the rounds."""
    joined = []
    for rows in zip(*rounds, strict=True):
        joined.append({name: min(row[name] for row in rows) if name != "policy" else rows[0][name] for name in rows[0]})
    return joined


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=existing, action="append", help="root of a checkout; repeat it to compare")
    parser.add_argument("--calls", type=integer(10, 10_000), default=300, help="of each function; default 300")
    parser.add_argument("--rounds", type=integer(1, 100), default=3, help="processes of each checkout; default 3")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS, help="default: both")
    parser.add_argument("--fake", action="store_true", help="without a GPU")
    parser.add_argument("--output", type=Path, help="a file for the JSON; default: in results/")
    parser.add_argument("--only-measure", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.fake:
        need_gpu(", or --fake")
    if options.only_measure:
        print(json.dumps(rows_of(options.parts, options.calls, options.fake)))
        return
    sources = {source.resolve(): source for source in options.source or [Path(__file__).parents[2]]}  # as given
    found: dict[Path, list[list[dict[str, Any]]]] = {source: [] for source in sources}
    for turn in range(options.rounds):
        for source in sources if turn % 2 == 0 else reversed(list(sources)):
            found[source].append(measure(source, options))
            print(turn, source, *found[source][-1], sep="\n", flush=True)
    card = FAKE_CARD.name if options.fake else torch.cuda.get_device_name()
    rows = [{"source": given.name or ".", **row} for source, given in sources.items() for row in least(found[source])]
    figures = {"card": card, "fake": options.fake, "calls": options.calls, "rounds": options.rounds, "rows": rows}
    name = f"host-time-{'fake' if options.fake else short_name(card)}"
    print(write_result(name, figures, "triton", path=options.output))


if __name__ == "__main__":
    main()
