"""vLLM, as the scripts ask for it.

A back end is NAME[@BLOCK_SIZE], with vLLM's name; without a block size it is vLLM's choice. Ours are CUSTOM and, for
latent attention, TRUNK_MLA.
"""

import argparse
import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from benchmarks.engines.equality_cases import VLLM_CASES, VLLM_PLAIN
from benchmarks.engines.interface import BUDGET, Case, EqualityAnswers, Generated, Span, Start, Traced
from benchmarks.workloads.model_shapes import SHAPES

PACKAGE: Final = "vllm"
BACKENDS: Final = ("FLASH_ATTN", "CUSTOM")
SERVED: Final = BACKENDS
STEADY: Final = "CUSTOM"
LACKS: Final = ("device", "quick")
CASES: Final = VLLM_CASES
PLAIN: Final = VLLM_PLAIN
NOT_INVARIANT: Final = " (not invariant)"

COMMON = {
    "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "enable_prefix_caching": True,
    "hf_overrides": {"max_position_embeddings": 16384}, "max_model_len": 12544, "max_num_seqs": 256, "seed": 0,
}  # fmt: skip
# vLLM's other merge needs NCCL 2.29.7; with an older one it leaves results unmerged and does not say so.
SHARED_REQUESTS = {
    "hf_overrides": {"num_key_value_heads": 1, "num_attention_heads": 16}, "max_model_len": 66560, "max_num_seqs": 64,
    "dcp_comm_backend": "a2a",
}  # fmt: skip
LEAST_FREE = 0.1  # of a card: vLLM does not start with less, and ignores it otherwise where its cache's size is given
CACHE_BYTES, GRAPHS = 3 << 30, [1, 2, 4, 8, 16, 24, 32, 64, 96, 128]
SMALL = {
    "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 12288, "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": CACHE_BYTES, "enable_prefix_caching": True, "max_num_seqs": 32, "seed": 0,
    "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": GRAPHS},
    "max_num_batched_tokens": 1024,
}  # fmt: skip
LOOK_SECONDS = 1.0


def environment(invariant: bool = False) -> dict[str, str]:
    """Variables of an engine's process; a sampler that is asked for outside stays."""
    sampler = os.environ.get("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return {"VLLM_BATCH_INVARIANT": str(int(invariant)), "VLLM_USE_FLASHINFER_SAMPLER": sampler}


def fixed_cache(kv_gib: float | None) -> dict[str, Any]:
    """vLLM's options for so large a cache on each card; None: its own choice."""
    if kv_gib is None:
        return {}
    return {"kv_cache_memory_bytes": int(kv_gib * 2**30), "gpu_memory_utilization": LEAST_FREE}


def chosen(backend: str) -> dict[str, Any]:
    """vLLM's options for a back end."""
    name, _, block = backend.partition("@")
    return {"attention_backend": name} | ({"block_size": int(block)} if block else {})


def profiler(folder: Path | None) -> dict[str, Any]:
    """vLLM's options for traces in a folder."""
    if folder is None:
        return {}
    return {
        "profiler_config": {
            "profiler": "torch", "torch_profiler_dir": str(folder), "torch_profiler_with_stack": False,
            "torch_profiler_dump_cuda_time_total": False,
        }
    }  # fmt: skip


def own_ports(count: int) -> AbstractContextManager[list[int]]:
    """No ports: vLLM finds its own."""
    return nullcontext([])


class Tracer:
    """Traces some steps in which all requests decode. traced: tokens of a request meanwhile; 0 before the end."""

    def __init__(self, engine: Any, span: Span, look: Callable[[], object] | None) -> None:
        self._engine, self._span, self._look = engine, span, look
        self._first, self._looked, self.traced = 0, 0.0, 0

    def __call__(self, found: Generated) -> None:
        least = min(map(len, found.tokens))
        if self._first == 0 and least >= self._span.after:
            self._engine.start_profile()
            self._first = least
        elif self._first and self.traced == 0 and least >= self._first + self._span.steps:
            self._engine.stop_profile()
            self.traced = least - self._first
        if self.traced and self._look and perf_counter() - self._looked >= LOOK_SECONDS:
            self._look()
            self._looked = perf_counter()


class Offline:
    """vLLM's LLM."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def generate(
        self, prompts: Sequence[list[int]], tokens: int, watch: Callable[[Generated], None] | None = None
    ) -> Generated:
        """Generates so many tokens of each request, step by step. watch: called after each with what there is."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        engine, found = self._llm.llm_engine, Generated([[] for _ in prompts], [[] for _ in prompts])
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

    def trace(
        self, prompts: Sequence[list[int]], span: Span, folder: Path, look: Callable[[], object] | None = None
    ) -> Traced:
        """Generates with the profiler on for some steps."""
        tracer = Tracer(self._llm.llm_engine, span, look)
        found = self.generate(prompts, span.tokens, tracer)
        return Traced(tracer.traced, sum(map(len, found.tokens)))

    def answers(
        self, prompts: list[list[int]], tokens: int, samples: int = 1, logprobs: bool = True
    ) -> tuple[EqualityAnswers, dict[str, int]]:
        """Each answer's tokens, with the two best log-probabilities of each step."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, n=samples,
            logprobs=2 if logprobs else None,
        )  # fmt: skip
        outputs = self._llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        found = [
            {
                "tokens": list(each.token_ids),
                "best": [{str(token): value.logprob for token, value in step.items()} for step in each.logprobs or ()],
            }
            for output in outputs
            for each in output.outputs
        ]
        return found, {"cached_tokens": sum(output.num_cached_tokens or 0 for output in outputs)}

    def empty_cache(self) -> None:
        """Forgets all prefixes."""
        self._llm.reset_prefix_cache()

    def shutdown(self) -> None:
        """Ends the engine's processes."""
        self._llm.llm_engine.engine_core.shutdown()


class Online:
    """vLLM's AsyncLLM."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def stream(self, name: str, prompt: list[int], tokens: int) -> AsyncIterator[int]:
        """Number of tokens so far."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        so_far = 0
        async for output in self._engine.generate({"prompt_token_ids": prompt}, sampling, name):
            so_far += len(output.outputs[0].token_ids)
            yield so_far

    async def empty_cache(self) -> None:
        """Forgets all prefixes."""
        await self._engine.reset_prefix_cache()

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine."""
        asyncio.run(work)

    def shutdown(self) -> None:
        """Ends the engine's processes."""
        self._engine.shutdown()


def offline(start: Start, traces: Path | None = None) -> Offline:
    """An LLM."""
    os.environ.update(start.environment)
    from vllm import LLM

    return Offline(LLM(str(start.model), **start.options, **profiler(traces)))


def online(start: Start) -> Online:
    """An AsyncLLM."""
    os.environ.update(start.environment)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    return Online(AsyncLLM.from_engine_args(AsyncEngineArgs(model=str(start.model), **start.options)))


def tpot_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """vLLM's, the same for each back end."""
    options: dict[str, Any] = {**COMMON}
    if arguments.shape:
        options = {key: value for key, value in options.items() if key != "hf_overrides"}
        options |= SHAPES[arguments.shape].options
    if arguments.dcp > 1:
        options |= SHARED_REQUESTS | {"decode_context_parallel_size": arguments.dcp}
    options |= fixed_cache(arguments.kv_gib)
    cards = max(arguments.dcp, arguments.tensor_parallel)
    return options | {"tensor_parallel_size": cards, "kv_cache_dtype": arguments.kv_cache_dtype}


def tpot_starts(arguments: argparse.Namespace, model: Path) -> list[Start]:
    """Starts of each back end, and with batch invariance one more of ours without it."""
    options, named = tpot_options(arguments), arguments.backends or BACKENDS
    runs = [(name, name, arguments.invariant) for name in named]
    if arguments.invariant and "CUSTOM" in named:
        runs.append((f"CUSTOM{NOT_INVARIANT}", "CUSTOM", False))
    return [Start(name, model, options | chosen(backend), environment(invariant)) for name, backend, invariant in runs]


def tpot_facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Options, and how a model's shape differs from the real one."""
    facts = {"dcp": arguments.dcp, "options": tpot_options(arguments), "cold": arguments.cold}
    if arguments.shape:
        facts |= {"config": SHAPES[arguments.shape].config, "differs": SHAPES[arguments.shape].differs}
    return facts


def serving_starts(arguments: argparse.Namespace) -> list[Start]:
    """Starts of each back end."""
    options = COMMON | {"max_num_batched_tokens": BUDGET} | fixed_cache(arguments.kv_gib)
    return [
        Start(name, arguments.model, options | chosen(name), environment()) for name in arguments.backends or SERVED
    ]


def serving_options(starts: Sequence[Start]) -> dict[str, Any]:
    """What all back ends have in common."""
    return {key: value for key, value in starts[0].options.items() if key not in ("attention_backend", "block_size")}


def steady_start(arguments: argparse.Namespace) -> Start:
    """Start of one back end."""
    options = COMMON | chosen(arguments.backend)
    return Start(arguments.backend, arguments.model, options, environment())


def equality_start(case: Case, backend: str, folder: Path, device: str) -> Start:
    """Start of a case with one back end."""
    return Start(
        backend, folder, SMALL | dict(case.options) | {"attention_backend": backend},
        environment() | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | dict(case.environment), device=device,
    )  # fmt: skip


def missing(case: Case, backend: str, run: Mapping[str, Any]) -> list[str]:
    """Whether ours has counted a step."""
    steps = sum(count for name, count in run["counters"].items() if name.startswith("trunkattn_steps_total"))
    return [] if steps or backend != "CUSTOM" else ["our back end has counted no step"]
