"""Time per output token of a whole engine, SGLang, with its own attention and with ours.

    python -m benchmarks.engines.sglang_tpot --model FOLDER                     # results/sglang-tpot-CARD.json
    python -m benchmarks.engines.sglang_tpot --model FOLDER --backends flashinfer trunk@16 fa3@16 fa3+trunk@16

A back end is NAME[@PAGE_SIZE], or PROMPTS+DECODING[@PAGE_SIZE] for one of each; without a page size it is SGLang's own,
one token. FOLDER needs a config.json only: weights are random (load_format="dummy"), the same for each back end. One
after the other, each back end is started in a process of its own, with decode graphs and the radix cache, and generates
for the batches of vllm_tpot.py. Time per token is taken, tokens are compared and the result is written as there. SGLang
sends a request's tokens 8 at a time, so that its front end keeps up with all requests. What our back end read and saved
is in the result, from the counters that SGLang would serve under /metrics.

With --turns FILE all back ends start at once, and take turns to measure: see turn_lock.py. Several on one card need
--kv-gib: GiB of each one's KV cache. If one is lost the others' result is written, and names it (`lost`).

With --busy some steps of each batch are traced after all were timed, as there, by SGLang's own profiler.

On a CPU, `--device cpu --quick` runs two small batches, to see that it works: FOLDER is a tiny model then.
"""

import argparse
import asyncio
import json
import os
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any, NamedTuple

# What lies beside this file is imported by functions alone: the processes that SGLang starts import this file, and must
# not find the folder that it is in (see `vllm_tpot.hide_benchmarks`).
if TYPE_CHECKING:
    from benchmarks.engines.engine_tpot import Generated, Results, Workload

COMMON = {"load_format": "dummy", "skip_tokenizer_init": True, "random_seed": 0, "log_level": "warning",
          "sampling_backend": "pytorch", "grammar_backend": "none"}  # fmt: skip
# Graphs of prompts take longer to capture than they save here, where only decoding is measured.
ON_GPU = {"dtype": "bfloat16", "context_length": 12288, "max_running_requests": 256, "mem_fraction_static": 0.85,
          "json_model_override_args": '{"max_position_embeddings": 16384}', "cuda_graph_max_bs_decode": 256,
          "cuda_graph_backend_prefill": "disabled"}  # fmt: skip
ON_CPU = {"device": "cpu", "dtype": "float32", "context_length": 640, "max_running_requests": 16,
          "max_total_tokens": 8192, "mem_fraction_static": 0.3, "disable_cuda_graph": True}  # fmt: skip
# SGLang's cache takes no more than max_total_tokens, and no more than is free when it looks, less the part of the card
# that is not "static". So nearly all is: what others take beside it meanwhile is no longer free anyway.
STATIC_BESIDE_OTHERS = 0.99
LEAST_CACHE = 0.99  # of the tokens asked for: pages round them
ELEMENT_BYTES = 2  # bfloat16
# For NCCL, below those that the kernel gives to whoever asks for any; of each process.
FIRST_PORT, LAST_PORT, PORTS = 31000, 32600, 20
BACKENDS = ("fa3", "fa3+trunk@16", "fa3+trunk")
AT_ONCE = 8  # tokens of a request that SGLang sends together
WRITE_SECONDS = 60  # that the profiler may take
QUICK = ((8, ((1, 256), (8, 32))), (4, ((4, 64),)))  # arguments of Workload


class Task(NamedTuple):
    """What one process does. cache_tokens: None: SGLang's own choice. port: for NCCL. turns: see turn_lock.py. busy:
    trace steps."""

    backend: str
    model: Path
    device: str
    cards: int
    workloads: "tuple[Workload, ...]"
    repeats: int
    cache_tokens: int | None = None
    turns: Path | None = None
    port: int | None = None
    busy: bool = False

    def options(self) -> dict[str, Any]:
        """The engine's."""
        names, _, page = self.backend.partition("@")
        prompts, _, decoding = names.partition("+")
        chosen: dict[str, Any] = {"attention_backend": prompts}
        if decoding:
            chosen |= {"prefill_attention_backend": prompts, "decode_attention_backend": decoding}
        if page:
            chosen["page_size"] = int(page)
        if self.cache_tokens:
            chosen["max_total_tokens"] = self.cache_tokens
            chosen |= {} if self.device == "cpu" else {"mem_fraction_static": STATIC_BESIDE_OTHERS}
        if self.turns:
            chosen["sleep_on_idle"] = True  # an engine that waits would keep a core busy while others measure
        return {**COMMON, **(ON_CPU if self.device == "cpu" else ON_GPU), "tp_size": self.cards, **chosen}


def cache_tokens(config: Mapping[str, Any], kv_gib: float | None, cards: int) -> int | None:
    """Tokens in so many GiB on each card; None for None. config: of the model; each card has its share of the heads."""
    if kv_gib is None:
        return None
    heads = config["num_attention_heads"]
    kv_heads = max(1, (config.get("num_key_value_heads") or heads) // cards)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    token_bytes = 2 * config["num_hidden_layers"] * kv_heads * head_dim * ELEMENT_BYTES
    return int(kv_gib * 2**30) // token_bytes


@contextmanager
def own_ports(count: int) -> Iterator[list[int]]:
    """The first of PORTS each, that other commands do not take meanwhile: this one holds the last of each."""
    with ExitStack() as held:
        found: list[int] = []
        for first in range(FIRST_PORT, LAST_PORT, PORTS):
            if len(found) == count:
                break
            claim = held.enter_context(socket.socket())
            try:
                claim.bind(("127.0.0.1", first + PORTS - 1))
                with socket.socket() as probe:
                    probe.bind(("", first))  # what an engine that has not ended may have
            except OSError:
                continue
            found.append(first)
        if len(found) < count:
            raise RuntimeError(
                f"{len(found)} of {count} engines find free ports from {FIRST_PORT} to {LAST_PORT}: end what holds them"
            )
        yield found


def check_cache(engine: Any, options: Mapping[str, Any]) -> None:
    """Raises RuntimeError if the cache is smaller than the options ask for: SGLang takes less with a warning alone."""
    wanted = options.get("max_total_tokens")
    if wanted and (held := engine.get_server_info()["max_total_num_tokens"]) < LEAST_CACHE * wanted:
        raise RuntimeError(
            f"SGLang's cache holds {held} tokens: expected {wanted}; lower --kv-gib or start fewer engines at once"
        )


async def _stream(engine: Any, prompt: list[int], tokens: int, arrivals: list[tuple[float, int]]) -> list[int]:
    """The tokens of one request. arrivals: gets (time, tokens by then) as they come."""
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, "stream_interval": AT_ONCE}
    found: list[int] = []
    async for answer in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True):
        found = answer["output_ids"]  # all so far
        arrivals.append((perf_counter(), len(found)))
    return list(found)


def generate(engine: Any, prompts: Sequence[list[int]], tokens: int) -> "Generated":
    """So many tokens of each request, from SGLang as they arrive."""
    from benchmarks.engines.engine_tpot import Generated

    arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]

    async def together() -> list[list[int]]:
        streams = (_stream(engine, prompt, tokens, came) for prompt, came in zip(prompts, arrivals, strict=True))
        return await asyncio.gather(*streams)

    return Generated(engine.loop.run_until_complete(together()), arrivals)


def profile_request(folder: Path, device: str, steps: int) -> Any:
    """What SGLang's profiler is asked for."""
    from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

    activities = ["CPU"] if device == "cpu" else ["CPU", "GPU"]
    options = {"output_dir": str(folder), "num_steps": steps, "activities": activities, "with_stack": False}
    return ProfileReq(req_type=ProfileReqType.START_PROFILE, **options)


def trace(engine: Any, task: Task, prompts: Sequence[list[int]], folder: Path) -> dict[str, Any]:
    """What the card does in a step in which all requests decode."""
    from benchmarks.engines.engine_tpot import LONG, SHORT, TRACED, traced

    generate(engine, prompts, SHORT)  # its prefixes may have left the cache

    async def together() -> None:
        arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
        streams = (_stream(engine, prompt, LONG, came) for prompt, came in zip(prompts, arrivals, strict=True))
        running = asyncio.gather(*streams)
        while not all(arrivals) and not running.done():
            await asyncio.sleep(0.001)
        await engine.tokenizer_manager.start_profile(profile_request(folder, task.device, TRACED))
        await running
        for _ in range(WRITE_SECONDS):
            if any(folder.rglob("*.json*")):
                break
            await asyncio.sleep(1)

    engine.loop.run_until_complete(together())
    return traced(folder, TRACED)


def serve(task: Task, answers: Connection) -> None:
    """A process with one back end: sends the card, (workload, figures) as they come, then ("", facts of the run)."""
    from benchmarks.engines.engine_tpot import measure, traced_or_why
    from benchmarks.engines.vllm_tpot import counters, hide_benchmarks
    from benchmarks.lib.turn_lock import starting, turn

    hide_benchmarks(sys.path)
    with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as traces:
        with starting(task.turns):
            os.environ["PROMETHEUS_MULTIPROC_DIR"] = shared  # before SGLang is imported
            import sglang
            import torch

            start, port = perf_counter(), {"nccl_port": task.port} if task.port else {}
            engine = sglang.Engine(model_path=str(task.model), **task.options(), **port)
            check_cache(engine, task.options())
            ready = perf_counter() - start
            print(f"{task.backend}: ready after {ready:.0f} s", flush=True)
            card = {"card": "cpu" if task.device == "cpu" else torch.cuda.get_device_name()}
        answers.send(("card", card))
        vocabulary = json.loads((task.model / "config.json").read_text())["vocab_size"]
        timed: dict[Workload, dict[str, Any]] = {}
        for workload in task.workloads:
            with turn(task.turns):
                timed[workload] = measure(partial(generate, engine), workload.prompts(vocabulary), task.repeats)
            answers.send((str(workload), timed[workload]))
        for workload, figures in timed.items() if task.busy else ():
            with turn(task.turns):
                found = traced_or_why(partial(trace, engine, task, workload.prompts(vocabulary), Path(traces)))
            answers.send((str(workload), figures | found))
        facts = {**card, "options": task.options(), "counters": counters()}
        # The time beside others that start is no back end's own.
        answers.send(("", facts | ({} if task.turns else {"ready_s": round(ready, 1)})))
        with turn(task.turns):  # to end is work too
            engine.shutdown()


def read_arguments(given: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's, checked."""
    from benchmarks.engines.engine_tpot import add_common, check_common
    from benchmarks.lib import turn_lock

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with the config.json of a model")
    parser.add_argument("--backends", nargs="+", default=BACKENDS, help="the first is what others are compared with")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    batches = parser.add_mutually_exclusive_group()
    batches.add_argument("--quick", action="store_true", help="two small batches instead of all")
    add_common(parser, batches)
    parser.add_argument("--tensor-parallel", type=int, default=1, help="cards that a model is spread over")
    turn_lock.add_options(parser)
    arguments = parser.parse_args(given)
    check_common(parser, arguments)
    turn_lock.check_options(parser, arguments, len(arguments.backends))
    if arguments.busy and arguments.device == "cpu":
        parser.error("argument --busy: it tells of a card: leave out --device cpu")
    return arguments


def tasks_of(arguments: argparse.Namespace, ports: Sequence[int]) -> list[Task]:
    """Of each back end. ports: for as many; none: SGLang finds its own."""
    from benchmarks.engines.engine_tpot import Workload, workloads_named

    some = [Workload(*each) for each in QUICK]
    workloads = tuple(some) if arguments.quick else workloads_named(arguments.workloads or ["all"])
    cards, config = arguments.tensor_parallel, json.loads((arguments.model / "config.json").read_text())
    tokens = cache_tokens(config, arguments.kv_gib, cards)
    tasks = [
        Task(name, arguments.model, arguments.device, cards, workloads, arguments.repeats, tokens, arguments.turns)
        for name in arguments.backends
    ]
    tasks = [task._replace(busy=arguments.busy) for task in tasks]
    return [task._replace(port=port) for task, port in zip(tasks, ports, strict=True)] if ports else tasks


def save(arguments: argparse.Namespace, first: Task, results: "Results", lost: Sequence[str]) -> None:
    """Writes the figures that there are. first: a task. lost: back ends that ended before they had answered."""
    from benchmarks.engines.engine_tpot import outcome
    from benchmarks.lib.report import short_name, write_result

    card, cards = next(iter(results.values()))[""]["card"], arguments.tensor_parallel
    figures = {"card": card, "cards": cards, "model": arguments.model.name, "repeats": arguments.repeats}
    figures |= {"busy": arguments.busy}
    figures |= outcome(results, first.workloads, first.turns is not None, lost)
    result = f"sglang-tpot-{short_name(card)}" + (f"-tp{cards}" if cards > 1 else "")
    print(write_result(result, figures, "sglang", "triton", path=arguments.output), flush=True)


def main() -> None:
    arguments = read_arguments()
    from benchmarks.engines.engine_tpot import run_backends, table

    together = arguments.turns is not None
    with own_ports(len(arguments.backends) if together else 0) as ports:
        tasks = tasks_of(arguments, ports)
        runs, workloads = {task.backend: (task,) for task in tasks}, tasks[0].workloads
        keep = partial(save, arguments, tasks[0])
        results = run_backends(serve, runs, len(workloads), together, keep)
    for row in table(results, workloads):
        print(row, flush=True)


if __name__ == "__main__":
    main()
