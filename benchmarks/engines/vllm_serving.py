"""Serving through vLLM's AsyncLLM on a GPU, with its own attention and with ours (PAT §8.2, Figure 10).

    python -m benchmarks.engines.vllm_serving --model FOLDER --trace FILE  # results/vllm-serving-CARD.json

FOLDER needs a config.json only: weights are random (load_format="dummy"). Requests arrive for --seconds.
"""

import asyncio
import os
from collections.abc import AsyncIterator
from functools import partial
from multiprocessing.connection import Connection
from time import perf_counter
from typing import TYPE_CHECKING, Any

# What lies beside this file is imported by functions alone: vLLM's processes import this file too, without this folder
# on their path
if TYPE_CHECKING:
    from benchmarks.engines.engine_serving import Task

BUDGET = 2048  # tokens of a step


async def generate(engine: Any, name: str, prompt: list[int], output_tokens: int) -> AsyncIterator[int]:
    """One request: its tokens so far."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )  # fmt: skip
    tokens = 0
    async for output in engine.generate({"prompt_token_ids": prompt}, sampling, name):
        tokens += len(output.outputs[0].token_ids)
        yield tokens


def serve(task: "Task", answers: Connection) -> None:
    """A process with one back end: sends ("", facts), then (run, figures) as they come."""
    from benchmarks.engines.engine_serving import Engine, announce, own_process, run_all
    from benchmarks.engines.vllm_tpot import counters
    from benchmarks.lib.turn_lock import starting, turn

    with own_process(task):
        with starting(task.turns):
            os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
            from vllm.engine.arg_utils import AsyncEngineArgs
            from vllm.v1.engine.async_llm import AsyncLLM

            start = perf_counter()
            engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(task.model), **task.options))
            announce(task, start, answers)
        vocabulary = int(engine.model_config.get_vocab_size())
        served = Engine(partial(generate, engine), engine.reset_prefix_cache, vocabulary, counters)
        asyncio.run(run_all(served, task, answers))
        with turn(task.turns):  # to end is work too
            engine.shutdown()


def main() -> None:
    from benchmarks.engines.engine_serving import Result, Task, check, command_line, run_backends, wanted_runs
    from benchmarks.engines.vllm_tpot import BACKENDS, OPTIONS, fixed_cache

    parser = command_line(__doc__, BACKENDS)
    arguments = parser.parse_args()
    check(parser, arguments)
    options = OPTIONS | {"max_num_batched_tokens": BUDGET} | fixed_cache(arguments.kv_gib)
    taken = {
        "model": arguments.model.name, "options": options, "seconds": arguments.seconds,
        "side_by_side": arguments.parallel, "turns": arguments.turns is not None,
    }  # fmt: skip
    runs = wanted_runs(arguments)
    tasks = [
        Task(
            name,
            card if arguments.parallel else None,
            arguments.model,
            options | {"attention_backend": name},
            runs,
            arguments.turns,
        )
        for card, name in enumerate(arguments.backends)
    ]
    run_backends(serve, tasks, Result("vllm", taken, arguments.suffix, arguments.output).save)


if __name__ == "__main__":
    main()
