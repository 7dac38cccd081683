"""Time per output token of a whole engine, SGLang, with its own attention and with ours.

    python benchmarks/sglang_tpot.py --model FOLDER                     # results/sglang-tpot-CARD.json
    python benchmarks/sglang_tpot.py --model FOLDER --backends flashinfer trunk@16 fa3@16 fa3+trunk@16

A back end is NAME[@PAGE_SIZE], or PROMPTS+DECODING[@PAGE_SIZE] for one of each; without a page size it is SGLang's own,
one token. FOLDER needs a config.json only: weights are random (load_format="dummy"), the same for each back end. One
after the other, each back end is started in a process of its own, with decode graphs and the radix cache, and generates
for the batches of vllm_tpot.py. Time per token is taken and tokens are compared as there, and the result is written
after each back end. SGLang sends a request's tokens 8 at a time, so that its front end keeps up with all requests. What
our back end read and saved is in the result, from the counters that SGLang would serve under /metrics.

On a CPU, `--device cpu --quick` runs two small batches, to see that it works: FOLDER is a tiny model then.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

# vllm_tpot is imported by functions alone: the processes that SGLang starts import this file, and must not find the
# folder that it is in (see `vllm_tpot.hide_benchmarks`).
if TYPE_CHECKING:
    from vllm_tpot import Generated, Workload

COMMON = {"load_format": "dummy", "skip_tokenizer_init": True, "random_seed": 0, "log_level": "warning",
          "sampling_backend": "pytorch", "grammar_backend": "none"}  # fmt: skip
# Graphs of prompts take longer to capture than they save here, where only decoding is measured.
ON_GPU = {"dtype": "bfloat16", "context_length": 12288, "max_running_requests": 256, "mem_fraction_static": 0.85,
          "json_model_override_args": '{"max_position_embeddings": 16384}', "cuda_graph_max_bs_decode": 256,
          "cuda_graph_backend_prefill": "disabled"}  # fmt: skip
ON_CPU = {"device": "cpu", "dtype": "float32", "context_length": 640, "max_running_requests": 16,
          "max_total_tokens": 8192, "mem_fraction_static": 0.3, "disable_cuda_graph": True}  # fmt: skip
BACKENDS = ("fa3", "fa3+trunk@16", "fa3+trunk")
AT_ONCE = 8  # tokens of a request that SGLang sends together
QUICK = ((8, ((1, 256), (8, 32))), (4, ((4, 64),)))  # arguments of Workload


class Task(NamedTuple):
    """What one process does."""

    backend: str
    model: Path
    device: str
    cards: int
    workloads: "tuple[Workload, ...]"
    repeats: int

    def options(self) -> dict[str, Any]:
        """The engine's."""
        names, _, page = self.backend.partition("@")
        prompts, _, decoding = names.partition("+")
        chosen: dict[str, Any] = {"attention_backend": prompts}
        if decoding:
            chosen |= {"prefill_attention_backend": prompts, "decode_attention_backend": decoding}
        if page:
            chosen["page_size"] = int(page)
        return {**COMMON, **(ON_CPU if self.device == "cpu" else ON_GPU), "tp_size": self.cards, **chosen}


async def _stream(engine: Any, prompt: list[int], tokens: int) -> tuple[list[int], list[tuple[float, int]]]:
    """The tokens of one request, and (time, tokens by then) as they came."""
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, "stream_interval": AT_ONCE}
    arrivals, found = [], []
    async for answer in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True):
        found = answer["output_ids"]  # all so far
        arrivals.append((perf_counter(), len(found)))
    return list(found), arrivals


def generate(engine: Any, prompts: Sequence[list[int]], tokens: int) -> "Generated":
    """So many tokens of each request, from SGLang as they arrive."""
    from vllm_tpot import Generated

    async def together() -> list[tuple[list[int], list[tuple[float, int]]]]:
        return await asyncio.gather(*(_stream(engine, prompt, tokens) for prompt in prompts))

    return Generated(*map(list, zip(*engine.loop.run_until_complete(together()), strict=True)))


def serve(task: Task, answers: Connection) -> None:
    """A process with one back end: sends (workload, figures) as they come, then ("", facts of the run)."""
    from vllm_tpot import counters, hide_benchmarks, measure

    hide_benchmarks(sys.path)
    with tempfile.TemporaryDirectory() as shared:
        os.environ["PROMETHEUS_MULTIPROC_DIR"] = shared  # before SGLang is imported
        import sglang
        import torch

        start = perf_counter()
        engine = sglang.Engine(model_path=str(task.model), **task.options())
        ready = perf_counter() - start
        print(f"{task.backend}: ready after {ready:.0f} s", flush=True)
        vocabulary = json.loads((task.model / "config.json").read_text())["vocab_size"]
        for workload in task.workloads:
            figures = measure(partial(generate, engine), workload.prompts(vocabulary), task.repeats)
            answers.send((str(workload), figures))
        card = "cpu" if task.device == "cpu" else torch.cuda.get_device_name()
        facts = {"card": card, "ready_s": round(ready, 1), "options": task.options(), "counters": counters()}
        answers.send(("", facts))
        engine.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with the config.json of a model")
    parser.add_argument("--backends", nargs="+", default=BACKENDS, help="the first is what others are compared with")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="two small batches instead of all")
    parser.add_argument("--repeats", type=int, default=3, help="of each time, of which the median counts")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="cards that a model is spread over")
    parser.add_argument("--output", type=Path, help="write here instead of into results/")
    arguments = parser.parse_args()
    if arguments.repeats < 1:
        parser.error(f"argument --repeats: expected at least 1, got {arguments.repeats}")
    if not (arguments.model / "config.json").is_file():
        parser.error(f"argument --model: {arguments.model} has no config.json")
    from report import environment, short_name, write_result
    from vllm_tpot import WORKLOADS, Workload, run_backend, table

    cards = arguments.tensor_parallel
    workloads = tuple(Workload(*each) for each in QUICK) if arguments.quick else WORKLOADS
    results: dict[str, dict[str, Any]] = {}
    for name in arguments.backends:
        task = Task(name, arguments.model, arguments.device, cards, workloads, arguments.repeats)
        results[name] = run_backend(name, len(workloads), serve, task)
        rows, facts = table(results, workloads), {backend: found[""] for backend, found in results.items()}
        card = next(iter(facts.values()))["card"]
        figures = {"card": card, "cards": cards, "model": arguments.model.name, "repeats": arguments.repeats}
        figures |= {"rows": rows, "runs": facts}
        if arguments.output:
            arguments.output.write_text(json.dumps({**environment("sglang", "triton"), **figures}, indent=1) + "\n")
            print(arguments.output, flush=True)
        else:
            result = f"sglang-tpot-{short_name(card)}" + (f"-tp{cards}" if cards > 1 else "")
            print(write_result(result, figures, "sglang", "triton"), flush=True)
    for row in rows:
        print(row, flush=True)


if __name__ == "__main__":
    main()
