"""Time per output token of a whole engine, vLLM on a GPU, with its own attention and with ours.

    python benchmarks/vllm_tpot.py --model FOLDER                     # results/vllm-tpot-CARD.json
    python benchmarks/vllm_tpot.py --model FOLDER --dcp 2             # results/vllm-tpot-CARD-dcp2.json
    python benchmarks/vllm_tpot.py --model FOLDER --invariant         # results/vllm-tpot-CARD-invariant.json
    python benchmarks/vllm_tpot.py --shape gpt-oss --kv-cache-dtype fp8    # results/vllm-tpot-CARD-gpt-oss-fp8.json

FOLDER needs a config.json only: weights are random (load_format="dummy"), the same for each back end. One after the
other, each back end is started in a process of its own, with full CUDA graphs and prefix caching, and generates for
batches of prompts: REQUESTS × (levels of shared and private tokens). Each batch is generated once to fill the prefix
cache, then for 136 tokens a request, timed as they arrive. TPOT is the median over repeats of the pace while all
requests decode: from the 8th token of the request that has it last until the first request ends. So what is left of the
prompts, which differs from run to run, is not in it. The result is written after each back end.

The first 16 tokens of each request, greedy, are compared with those of the first back end: the fraction that is equal
before the first that differs, and in which steps sequences part. With random weights logits lie close together, so that
rounding parts some: this shows gross errors, and is no test of accuracy. For CUSTOM what was read and saved is in the
result, from the counters that vLLM would serve under /metrics.

With --cold each back end starts with empty caches of compiled code, to compare the time until it is ready (`ready_s`).

With --invariant each back end runs with VLLM_BATCH_INVARIANT=1, and CUSTOM again without it, which shows the price.

With --shape the model is one of engine_models.py, and the batches are six of the twelve. qwen3-next needs einops.

With --dcp so many cards share each request (decode context parallelism): the model then has one KV head, and the batch
is 64 questions about one text of 64k tokens.
"""

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

SHORT, LONG, COMPARED = 8, 136, 16
LEAST = 32  # tokens of a request that give its pace
CACHES = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "VLLM_CACHE_ROOT", "NUMBA_CACHE_DIR")
OPTIONS = {
    "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "enable_prefix_caching": True,
    "hf_overrides": {"max_position_embeddings": 16384}, "max_model_len": 12544, "max_num_seqs": 256, "seed": 0,
}  # fmt: skip
# vLLM's other merge needs NCCL 2.29.7; with an older one it leaves results unmerged and does not say so.
SHARED_OPTIONS = {
    "hf_overrides": {"num_key_value_heads": 1, "num_attention_heads": 16}, "max_model_len": 66560, "max_num_seqs": 64,
    "dcp_comm_backend": "a2a",
}  # fmt: skip
BACKENDS = ("FLASH_ATTN", "CUSTOM")


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
SIX = tuple(WORKLOADS[place] for place in (0, 1, 5, 6, 7, 9))
SHARED_WORKLOADS = (Workload(64, ((1, 65536), (64, 128))),)


@dataclass(frozen=True)
class Setup:
    """What all runs have in common. cold: each starts with empty caches."""

    model: Path
    options: dict[str, Any]
    workloads: tuple[Workload, ...]
    repeats: int
    cold: bool


class Run(NamedTuple):
    """A back end in a process of its own."""

    name: str
    backend: str
    invariant: bool = False


def wanted_runs(backends: Sequence[str], invariant: bool) -> list[Run]:
    """A run of each back end, and with batch invariance one more of ours without it."""
    found = [Run(name, name, invariant) for name in backends]
    if invariant and "CUSTOM" in backends:
        found.append(Run("CUSTOM (not invariant)", "CUSTOM"))
    return found


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


def generate(llm: Any, prompts: Sequence[list[int]], tokens: int) -> Generated:
    """So many tokens of each request, from vLLM step by step."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    engine, found = llm.llm_engine, Generated([[] for _ in prompts], [[] for _ in prompts])
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = perf_counter()
        for output in outputs:
            number = int(output.request_id)
            found.tokens[number] += output.outputs[0].token_ids
            found.arrivals[number].append((now, len(found.tokens[number])))
    return found


def measure(
    generate: Callable[[Sequence[list[int]], int], Generated], prompts: Sequence[list[int]], repeats: int
) -> dict[str, Any]:
    """One back end on one batch. generate: so many tokens of each prompt."""
    generate(prompts, SHORT)
    found = [generate(prompts, LONG) for _ in range(repeats)]
    times = [pace(each.arrivals) for each in found]
    figures = {"tpot_ms": round(median(times), 3), "tpot_ms_each": [round(time, 3) for time in times]}
    return figures | {"tokens": [sequence[:COMPARED] for sequence in found[-1].tokens]}


def counters() -> dict[str, float]:
    """What the workers have counted so far, summed over their labels but path and reason."""
    from prometheus_client import CollectorRegistry, multiprocess

    registry, found = CollectorRegistry(), {}
    multiprocess.MultiProcessCollector(registry)
    for metric in registry.collect():
        for sample in metric.samples:
            if sample.name.startswith("trunkattn_"):
                name = " ".join(
                    [sample.name, *(sample.labels[key] for key in ("path", "reason") if key in sample.labels)]
                )
                found[name] = found.get(name, 0.0) + sample.value
    return found


def hide_benchmarks(path: list[str]) -> None:
    """transformers imports a package "kernels" if it finds one, and would find kernels.py beside this file."""
    path[:] = [folder for folder in path if Path(folder).resolve() != Path(__file__).resolve().parent]


def serve(run: Run, setup: Setup, answers: Connection) -> None:
    """A process with one back end: sends (workload, figures) as they come, then ("", facts of the run)."""
    hide_benchmarks(sys.path)
    with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as caches:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = shared  # before vLLM is imported
        os.environ["VLLM_BATCH_INVARIANT"] = str(int(run.invariant))
        for name in CACHES if setup.cold else ():
            os.environ[name] = str(Path(caches, name))
        os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
        import torch
        from vllm import LLM

        start = perf_counter()
        llm: Any = LLM(str(setup.model), attention_backend=run.backend, **setup.options)
        ready = perf_counter() - start
        print(f"{run.name}: ready after {ready:.0f} s", flush=True)
        vocabulary = json.loads((setup.model / "config.json").read_text())["vocab_size"]
        for workload in setup.workloads:
            figures = measure(partial(generate, llm), workload.prompts(vocabulary), setup.repeats)
            answers.send((str(workload), figures))
        answers.send(("", {"card": torch.cuda.get_device_name(), "ready_s": round(ready, 1), "counters": counters()}))
        llm.llm_engine.engine_core.shutdown()


def run_backend(backend: str, num_workloads: int, target: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    """Figures of each workload, and "" for facts of the run. target: the function of its process, which gets the
    arguments and a connection for its answers.

    Raises:
        RuntimeError: if the process ends before it has answered.
    """
    context = multiprocessing.get_context("spawn")
    answers, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, sender))
    process.start()
    sender.close()
    found: dict[str, Any] = {}
    try:
        while "" not in found:
            name, figures = answers.recv()
            found[name] = figures
            if name:
                print(f"{backend} {name}: {figures['tpot_ms']} ms, each {figures['tpot_ms_each']}", flush=True)
    except EOFError as error:
        raise RuntimeError(f"{backend}: the process ended after {len(found)} of {num_workloads} workloads") from error
    finally:
        process.join()
    return found


def compare(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Of the first tokens, before the first that differs."""
    parted = [
        next((step for step, (a, b) in enumerate(zip(x, y, strict=True)) if a != b), COMPARED)
        for x, y in zip(ours, theirs, strict=True)
    ]
    steps = sorted(step for step in parted if step < COMPARED)
    return {"equal_tokens": round(sum(parted) / (COMPARED * len(parted)), 4), "parted_in_steps": steps}


def table(results: dict[str, dict[str, Any]], workloads: Sequence[Workload] = WORKLOADS) -> list[dict[str, Any]]:
    """A row per workload: each back end, and how the others compare with the first."""
    first, *others = results
    rows = []
    for name in map(str, workloads):
        row: dict[str, Any] = {"workload": name}
        for backend, found in results.items():
            row[backend] = {key: value for key, value in found[name].items() if key != "tokens"}
        for backend in others:
            row[backend] |= compare(results[backend][name]["tokens"], results[first][name]["tokens"])
            row[backend]["speedup"] = round(results[first][name]["tpot_ms"] / results[backend][name]["tpot_ms"], 3)
        rows.append(row)
    return rows


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """vLLM's, the same for each back end."""
    from engine_models import SHAPES

    options: dict[str, Any] = {**OPTIONS}
    if arguments.shape:
        options = {key: value for key, value in options.items() if key != "hf_overrides"}
        options |= SHAPES[arguments.shape].options
    if arguments.dcp > 1:
        options |= SHARED_OPTIONS | {"decode_context_parallel_size": arguments.dcp}
    cards = max(arguments.dcp, arguments.tensor_parallel)
    return options | {"tensor_parallel_size": cards, "kv_cache_dtype": arguments.kv_cache_dtype}


def workloads_of(arguments: argparse.Namespace) -> tuple[Workload, ...]:
    """The batches that are asked for."""
    if arguments.dcp > 1:
        return SHARED_WORKLOADS
    chosen = arguments.workloads or ("six" if arguments.shape else "all")
    return {"six": SIX, "all": WORKLOADS}[chosen]


def name_of(arguments: argparse.Namespace) -> str:
    """What the result's name has after the card."""
    parts = [arguments.shape] if arguments.shape else []
    parts += [] if arguments.kv_cache_dtype == "auto" else [arguments.kv_cache_dtype]
    parts += ["invariant"] if arguments.invariant else []
    if arguments.dcp > 1:
        parts.append(f"dcp{arguments.dcp}")
    elif arguments.tensor_parallel > 1:
        parts.append(f"tp{arguments.tensor_parallel}")
    return "".join(f"-{part}" for part in parts)


def read_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's, checked."""
    from engine_models import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, help="a folder with the config.json of a model")
    model.add_argument("--shape", choices=list(SHAPES), help="of a model in engine_models.py")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8", "fp8_e5m2"))
    parser.add_argument("--backends", nargs="+", default=BACKENDS, help="the first is what others are compared with")
    parser.add_argument("--workloads", choices=("six", "all"), help="six batches or all twelve")
    parser.add_argument("--repeats", type=int, default=3, help="of each time, of which the median counts")
    parser.add_argument("--cold", action="store_true", help="with empty caches of compiled code")
    parser.add_argument("--invariant", action="store_true", help="with VLLM_BATCH_INVARIANT=1, and ours also without")
    spread = parser.add_mutually_exclusive_group()
    spread.add_argument("--tensor-parallel", type=int, default=1, help="cards that a model is spread over")
    spread.add_argument("--dcp", type=int, default=1, help="cards that share each request")
    arguments = parser.parse_args(given)
    if arguments.repeats < 1:
        parser.error(f"argument --repeats: expected at least 1, got {arguments.repeats}")
    if arguments.model and not (arguments.model / "config.json").is_file():
        parser.error(f"argument --model: {arguments.model} has no config.json")
    if arguments.dcp > 1 and (arguments.shape or arguments.workloads):
        parser.error("argument --dcp: it has a batch and heads of its own: leave out --shape and --workloads")
    return arguments


def main() -> None:
    arguments = read_arguments()
    # not by the processes that vLLM starts, which import this file: see `serve`
    from engine_models import SHAPES, write_config
    from report import short_name, write_result

    with tempfile.TemporaryDirectory() as folder:
        model = write_config(arguments.shape, Path(folder)) if arguments.shape else arguments.model
        setup = Setup(model, options_of(arguments), workloads_of(arguments), arguments.repeats, arguments.cold)
        figures = {"model": model.name, "dcp": arguments.dcp, "cards": setup.options["tensor_parallel_size"]}
        figures |= {"options": setup.options, "repeats": arguments.repeats, "cold": arguments.cold}
        if arguments.shape:
            figures |= {"config": SHAPES[arguments.shape].config, "differs": SHAPES[arguments.shape].differs}
        results: dict[str, dict[str, Any]] = {}
        for run in wanted_runs(arguments.backends, arguments.invariant):
            results[run.name] = run_backend(run.name, len(setup.workloads), serve, run, setup)
            rows, facts = table(results, setup.workloads), {name: found[""] for name, found in results.items()}
            card = next(iter(facts.values()))["card"]
            name = f"vllm-tpot-{short_name(card)}{name_of(arguments)}"
            found = {"card": card, **figures, "rows": rows, "runs": facts}
            print(write_result(name, found, "vllm", "triton"), flush=True)
    for row in rows:
        print(row, flush=True)


if __name__ == "__main__":
    main()
