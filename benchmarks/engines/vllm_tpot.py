"""Time per output token of a whole engine, vLLM on a GPU, with its own attention and with ours.

    python -m benchmarks.engines.vllm_tpot --model FOLDER  # results/vllm-tpot-CARD.json
    python -m benchmarks.engines.vllm_tpot --model FOLDER --dcp 2  # results/vllm-tpot-CARD-dcp2.json
    python -m benchmarks.engines.vllm_tpot --model FOLDER --invariant  # results/vllm-tpot-CARD-invariant.json
    python -m benchmarks.engines.vllm_tpot --model FOLDER --cold  # results/vllm-tpot-CARD-cold.json
    python -m benchmarks.engines.vllm_tpot --shape gpt-oss --kv-cache-dtype fp8  # vllm-tpot-CARD-gpt-oss-fp8.json

FOLDER needs a config.json only: weights are random (load_format="dummy"), the same for each back end. One after the
other, each back end is started in a process of its own, with full CUDA graphs and prefix caching, and generates for
batches of prompts: REQUESTS × (levels of shared and private tokens). Each batch is generated once to fill the prefix
cache, then for 136 tokens a request, timed as they arrive. TPOT is the median over repeats of the pace while all
requests decode: from the 8th token of the request that has it last until the first request ends. So what is left of the
prompts, which differs from run to run, is not in it. The result is written after each batch that all back ends that
have started have answered, and says which batches it lacks (`unfinished`).

The first 16 tokens of each request, greedy, are compared with those of the first back end: the fraction that is equal
before the first that differs, and in which steps sequences part. With random weights logits lie close together, so that
rounding parts some: this shows gross errors, and is no test of accuracy. For CUSTOM what was read and saved is in the
result, from the counters that vLLM would serve under /metrics.

With --busy some steps of each batch are traced, by vLLM's own profiler, after all were timed. `busy_ms` is about how
long kernels and copies are under way on the card in a step, those that wait for others included, `kernels_ms` how long
each is, and `calls_ms` how long the host is in each of CUDA's calls. If `busy_ms` is much less than the time per token,
the host bounds it. Where a trace fails, `busy_missing` says why.

With --cold each back end starts with empty caches of compiled code, to compare the time until it is ready (`ready_s`),
and runs one batch.

With --turns FILE all back ends start at once, and take turns to measure: see turn_lock.py. Several on one card need
--kv-gib: GiB of each one's KV cache. If one is lost the others' result is written, and names it (`lost`).

With --invariant each back end runs with VLLM_BATCH_INVARIANT=1, and CUSTOM again without it, which shows the price.

With --shape the model is one of model_shapes.py, and the batches are six of the twelve. qwen3-next needs einops.

With --dcp so many cards share each request (decode context parallelism): the model then has one KV head, and the batch
is 64 questions about one text of 64k tokens.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

# What lies beside this file is imported by functions alone: the processes that vLLM starts import this file, and must
# not find the folder that it is in (see `hide_benchmarks`).
if TYPE_CHECKING:
    from benchmarks.engines.engine_tpot import Generated, Results, Workload

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
LEAST_FREE = 0.1  # of a card: vLLM does not start with less, and ignores it otherwise where its cache's size is given


@dataclass(frozen=True)
class Setup:
    """What all runs have in common. cold: each starts with empty caches. turns: see turn_lock.py. busy: trace steps."""

    model: Path
    options: dict[str, Any]
    workloads: "tuple[Workload, ...]"
    repeats: int
    cold: bool
    turns: Path | None = None
    busy: bool = False


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


def generate(
    llm: Any, prompts: Sequence[list[int]], tokens: int, watch: "Callable[[Generated], None] | None" = None
) -> "Generated":
    """So many tokens of each request, from vLLM step by step. watch: called after each with what there is."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from benchmarks.engines.engine_tpot import Generated

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
        if watch is not None:
            watch(found)
    return found


class Tracer:
    """Traces some steps in which all requests decode. tokens: of a request meanwhile; 0 before the end."""

    def __init__(self, engine: Any) -> None:
        self._engine, self._first, self.tokens = engine, 0, 0

    def __call__(self, found: "Generated") -> None:
        from benchmarks.engines.engine_tpot import SHORT, TRACED

        least = min(map(len, found.tokens))
        if self._first == 0 and least >= SHORT:
            self._engine.start_profile()
            self._first = least
        elif self._first and self.tokens == 0 and least >= self._first + TRACED:
            self._engine.stop_profile()
            self.tokens = least - self._first


def trace(llm: Any, prompts: Sequence[list[int]], folder: Path) -> dict[str, Any]:
    """What the card does in a step. folder: of vLLM's profiler."""
    from benchmarks.engines.engine_tpot import LONG, SHORT, traced

    tracer = Tracer(llm.llm_engine)
    generate(llm, prompts, SHORT)  # its prefixes may have left the cache
    generate(llm, prompts, LONG, tracer)
    return traced(folder, tracer.tokens)


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
    """transformers imports a package "kernels" if it finds one, and would find decode.py beside this file."""
    path[:] = [folder for folder in path if Path(folder).resolve() != Path(__file__).resolve().parent]


def serve(run: Run, setup: Setup, answers: Connection) -> None:
    """A process with one back end: sends the card, (workload, figures) as they come, then ("", facts of the run)."""
    from benchmarks.engines.engine_tpot import measure, traced_or_why
    from benchmarks.lib.turn_lock import starting, turn

    hide_benchmarks(sys.path)
    folders = [tempfile.TemporaryDirectory() for _ in range(3)]
    with folders[0] as shared, folders[1] as caches, folders[2] as traces:
        with starting(setup.turns):
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = shared  # before vLLM is imported
            os.environ["VLLM_BATCH_INVARIANT"] = str(int(run.invariant))
            for name in CACHES if setup.cold else ():
                os.environ[name] = str(Path(caches, name))
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
            import torch
            from vllm import LLM

            start = perf_counter()
            options = setup.options | (profiler(traces) if setup.busy else {})
            llm: Any = LLM(str(setup.model), attention_backend=run.backend, **options)
            ready = perf_counter() - start
            print(f"{run.name}: ready after {ready:.0f} s", flush=True)
            card = {"card": torch.cuda.get_device_name()}
        answers.send(("card", card))
        vocabulary = json.loads((setup.model / "config.json").read_text())["vocab_size"]
        timed: dict[Workload, dict[str, Any]] = {}
        for workload in setup.workloads:
            with turn(setup.turns):
                timed[workload] = measure(partial(generate, llm), workload.prompts(vocabulary), setup.repeats)
            answers.send((str(workload), timed[workload]))
        for workload, figures in timed.items() if setup.busy else ():
            with turn(setup.turns):
                found = traced_or_why(partial(trace, llm, workload.prompts(vocabulary), Path(traces)))
            answers.send((str(workload), figures | found))
        facts: dict[str, Any] = {**card, "counters": counters()}
        # The time beside others that start is no back end's own.
        answers.send(("", facts | ({} if setup.turns else {"ready_s": round(ready, 1)})))
        with turn(setup.turns):  # to end is work too
            llm.llm_engine.engine_core.shutdown()


def profiler(folder: str) -> dict[str, Any]:
    """vLLM's options for traces in a folder."""
    return {
        "profiler_config": {
            "profiler": "torch", "torch_profiler_dir": folder, "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
        }
    }  # fmt: skip


def fixed_cache(kv_gib: float | None) -> dict[str, Any]:
    """vLLM's options for so large a cache on each card; None: its own choice."""
    if kv_gib is None:
        return {}
    return {"kv_cache_memory_bytes": int(kv_gib * 2**30), "gpu_memory_utilization": LEAST_FREE}


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """vLLM's, the same for each back end."""
    from benchmarks.workloads.model_shapes import SHAPES

    options: dict[str, Any] = {**OPTIONS}
    if arguments.shape:
        options = {key: value for key, value in options.items() if key != "hf_overrides"}
        options |= SHAPES[arguments.shape].options
    if arguments.dcp > 1:
        options |= SHARED_OPTIONS | {"decode_context_parallel_size": arguments.dcp}
    options |= fixed_cache(arguments.kv_gib)
    cards = max(arguments.dcp, arguments.tensor_parallel)
    return options | {"tensor_parallel_size": cards, "kv_cache_dtype": arguments.kv_cache_dtype}


def workloads_of(arguments: argparse.Namespace) -> "tuple[Workload, ...]":
    """The batches that are asked for."""
    from benchmarks.engines.engine_tpot import COLD_WORKLOADS, SHARED_WORKLOADS, workloads_named

    if arguments.dcp > 1:
        return SHARED_WORKLOADS
    if arguments.cold and not arguments.workloads:
        return COLD_WORKLOADS
    return workloads_named(arguments.workloads or ["six" if arguments.shape else "all"])


def setup_of(arguments: argparse.Namespace, model: Path) -> Setup:
    """What all runs have in common."""
    asked = arguments.repeats, arguments.cold, arguments.turns, arguments.busy
    return Setup(model, options_of(arguments), workloads_of(arguments), *asked)


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


def read_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's, checked."""
    from benchmarks.engines.engine_tpot import add_common, check_common
    from benchmarks.lib import turn_lock
    from benchmarks.workloads.model_shapes import SHAPES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--model", type=Path, help="a folder with the config.json of a model")
    model.add_argument("--shape", choices=list(SHAPES), help="of a model in model_shapes.py")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=("auto", "fp8", "fp8_e5m2"))
    parser.add_argument("--backends", nargs="+", default=BACKENDS, help="the first is what others are compared with")
    add_common(parser)
    parser.add_argument("--cold", action="store_true", help="with empty caches of compiled code")
    parser.add_argument("--invariant", action="store_true", help="with VLLM_BATCH_INVARIANT=1, and ours also without")
    spread = parser.add_mutually_exclusive_group()
    spread.add_argument("--tensor-parallel", type=int, default=1, help="cards that a model is spread over")
    spread.add_argument("--dcp", type=int, default=1, help="cards that share each request")
    turn_lock.add_options(parser)
    arguments = parser.parse_args(given)
    check_common(parser, arguments)
    if arguments.turns and arguments.cold:
        parser.error("argument --turns: an engine's time until it is ready is not its own then: leave out --cold")
    turn_lock.check_options(parser, arguments, len(wanted_runs(arguments.backends, arguments.invariant)))
    if arguments.dcp > 1 and (arguments.shape or arguments.workloads):
        parser.error("argument --dcp: it has a batch and heads of its own: leave out --shape and --workloads")
    return arguments


def save(arguments: argparse.Namespace, setup: Setup, results: "Results", lost: Sequence[str]) -> None:
    """Writes the figures that there are. lost: back ends that ended before they had answered."""
    from benchmarks.engines.engine_tpot import outcome
    from benchmarks.lib.report import short_name, write_result
    from benchmarks.workloads.model_shapes import SHAPES

    card = next(iter(results.values()))[""]["card"]
    figures = {"card": card, "model": setup.model.name, "dcp": arguments.dcp}
    figures |= {"cards": setup.options["tensor_parallel_size"], "options": setup.options}
    figures |= {"repeats": arguments.repeats, "cold": arguments.cold, "busy": arguments.busy}
    if arguments.shape:
        figures |= {"config": SHAPES[arguments.shape].config, "differs": SHAPES[arguments.shape].differs}
    figures |= outcome(results, setup.workloads, setup.turns is not None, lost)
    name = f"vllm-tpot-{short_name(card)}{name_of(arguments)}"
    print(write_result(name, figures, "vllm", "triton", path=arguments.output), flush=True)


def main() -> None:
    arguments = read_arguments()
    from benchmarks.engines.engine_tpot import run_backends, table
    from benchmarks.workloads.model_shapes import write_config

    with tempfile.TemporaryDirectory() as folder:
        model = write_config(arguments.shape, Path(folder)) if arguments.shape else arguments.model
        setup = setup_of(arguments, model)
        workloads = setup.workloads
        runs = {run.name: (run, setup) for run in wanted_runs(arguments.backends, arguments.invariant)}
        together, keep = setup.turns is not None, partial(save, arguments, setup)
        results = run_backends(serve, runs, len(workloads), together, keep)
    for row in table(results, workloads):
        print(row, flush=True)


if __name__ == "__main__":
    main()
