"""Serving through SGLang's Engine, with its own attention and with ours.

    python -m benchmarks.engines.sglang_serving --model FOLDER --trace FILE        # results/sglang-serving-CARD.json
    python -m benchmarks.engines.sglang_serving --model FOLDER --device cpu --quick --output FILE

A back end is named as in sglang_tpot.py. FOLDER needs a config.json only: weights are random (load_format="dummy").
Requests arrive for --seconds, as in vllm_serving.py: prompts are computed in chunks of as many tokens as vLLM's steps
have there. SGLang sends a request's first token alone and later ones 8 at a time, so that its front end keeps up.
--quick takes short documents for five seconds, to see that it works: on a CPU, FOLDER is a tiny model.
"""

import argparse
import json
from collections.abc import AsyncIterator
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter
from typing import TYPE_CHECKING, Any

# What lies beside this file is imported by functions alone: see sglang_tpot.py
if TYPE_CHECKING:
    from benchmarks.engines.engine_serving import Task

BACKENDS = ("fa3", "fa3+trunk@16")
LONGEST_FLUSH = 30.0  # seconds
QUICK_RATE, QUICK_SECONDS = 4.0, 5.0
QUICK_TOKENS = ((64, 128), (8, 16), (8, 16))  # of Sizes


async def generate(engine: Any, at_once: int, name: str, prompt: list[int], output_tokens: int) -> AsyncIterator[int]:
    """One request: its tokens so far. at_once: tokens after the first that SGLang sends together."""
    sampling = {"temperature": 0.0, "max_new_tokens": output_tokens, "ignore_eos": True, "stream_interval": at_once}
    async for output in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True, rid=name):
        yield output["meta_info"]["completion_tokens"]


async def empty_cache(engine: Any) -> None:
    """Forgets all prefixes. Raises RuntimeError if a request still runs."""
    if not (await engine.tokenizer_manager.flush_cache(timeout_s=LONGEST_FLUSH)).success:
        raise RuntimeError(f"SGLang has not emptied its cache within {LONGEST_FLUSH:g} s: expected no request to run")


def serve(task: "Task", answers: Connection) -> None:
    """A process with one back end: sends ("", facts), then (run, figures) as they come."""
    from benchmarks.engines import engine_serving
    from benchmarks.engines.sglang_tpot import AT_ONCE, check_cache
    from benchmarks.engines.vllm_tpot import counters
    from benchmarks.lib.turn_lock import starting, turn

    with engine_serving.own_process(task):
        with starting(task.turns):
            import sglang

            start = perf_counter()
            engine = sglang.Engine(model_path=str(task.model), **task.options)
            check_cache(engine, task.options)
            engine_serving.announce(task, start, answers)
        vocabulary = json.loads((task.model / "config.json").read_text())["vocab_size"]
        ask, empty = partial(generate, engine, AT_ONCE), partial(empty_cache, engine)
        served = engine_serving.Engine(ask, empty, vocabulary, counters)
        engine.loop.run_until_complete(engine_serving.run_all(served, task, answers))
        with turn(task.turns):  # to end is work too
            engine.shutdown()


def options_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """The engine's, by back end."""
    from benchmarks.engines import sglang_tpot
    from benchmarks.engines.vllm_serving import BUDGET

    config = json.loads((arguments.model / "config.json").read_text()) if arguments.kv_gib else {}
    tokens = sglang_tpot.cache_tokens(config, arguments.kv_gib, 1)
    tasks = [
        sglang_tpot.Task(name, arguments.model, arguments.device, 1, (), 1, tokens, arguments.turns)
        for name in arguments.backends
    ]
    return {task.backend: task.options() | {"chunked_prefill_size": BUDGET} for task in tasks}


def main() -> None:
    from benchmarks.engines.engine_serving import (
        Result,
        Sizes,
        Task,
        check,
        command_line,
        documents,
        run_backends,
        wanted_runs,
    )
    from benchmarks.engines.sglang_tpot import own_ports

    parser = command_line(__doc__, BACKENDS)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--quick", action="store_true", help="short documents for five seconds instead of all")
    arguments = parser.parse_args()
    check(parser, arguments, arguments.quick)
    if arguments.quick:
        runs = {f"documents {QUICK_RATE:g}/s": documents(QUICK_RATE, QUICK_SECONDS, Sizes(*QUICK_TOKENS))}
    else:
        runs = wanted_runs(arguments)
    options = options_of(arguments)
    taken = {
        "model": arguments.model.name, "options": options, "side_by_side": arguments.parallel,
        "turns": arguments.turns is not None, "seconds": QUICK_SECONDS if arguments.quick else arguments.seconds,
    }  # fmt: skip
    with own_ports(len(options)) as ports:
        tasks = [
            Task(
                name,
                card if arguments.parallel else None,
                arguments.model,
                own | {"nccl_port": ports[card]},
                runs,
                arguments.turns,
            )
            for card, (name, own) in enumerate(options.items())
        ]
        run_backends(serve, tasks, Result("sglang", taken, arguments.suffix, arguments.output).save)


if __name__ == "__main__":
    main()
