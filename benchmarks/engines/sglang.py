"""SGLang, as the scripts ask for it.

A back end is NAME[@PAGE_SIZE], or PROMPTS+DECODING[@PAGE_SIZE] for one of each; without a page size it is SGLang's own,
one token. Ours is trunk. SGLang sends a request's first token by itself and later ones several at a time, so that its
front end keeps up with all requests.
"""

import argparse
import asyncio
import json
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any, Final

from benchmarks.engines.equality_cases import SGLANG_CASES, SGLANG_PLAIN
from benchmarks.engines.interface import BUDGET, Case, EqualityAnswers, Generated, Span, Start, Traced
from benchmarks.lib import ports

PACKAGE: Final = "sglang"
BACKENDS: Final = ("fa3", "fa3+trunk@16", "fa3+trunk")
SERVED: Final = ("fa3", "fa3+trunk@16")
STEADY: Final = "trunk@16"
LACKS: Final = ("shape", "kv_cache_dtype", "cold", "invariant", "dcp")
CASES: Final = SGLANG_CASES
PLAIN: Final = SGLANG_PLAIN

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
AT_ONCE = 8  # tokens of a request that SGLang sends together
LOOK_SECONDS, WRITE_SECONDS = 1.0, 60  # between looks at a run that is traced; that the profiler may take
LONGEST_FLUSH = 30.0  # seconds
PATHS, LEAST_MIXED = ("decode", "full_graph", "prefill", "mixed"), 5
SMALL = {"load_format": "auto", "max_total_tokens": 65536, "max_running_requests": 32, "mem_fraction_static": 0.9,
         "log_level": "info"}  # fmt: skip
SMALL_ON_GPU = {"cuda_graph_max_bs_decode": 32}
SMALL_ON_CPU = {"context_length": 2048}

own_ports = ports.own_ports


def options(backend: str, device: str, cards: int = 1) -> dict[str, Any]:
    """The engine's."""
    names, _, page = backend.partition("@")
    prompts, _, decoding = names.partition("+")
    chosen: dict[str, Any] = {"attention_backend": prompts}
    if decoding:
        chosen |= {"prefill_attention_backend": prompts, "decode_attention_backend": decoding}
    if page:
        chosen["page_size"] = int(page)
    return {**COMMON, **(ON_CPU if device == "cpu" else ON_GPU), "tp_size": cards, **chosen}


def beside_others(arguments: argparse.Namespace, cards: int) -> dict[str, Any]:
    """Options of an engine that shares its card, and of one that takes turns."""
    chosen: dict[str, Any] = {}
    if arguments.kv_gib is not None:
        config = json.loads((arguments.model / "config.json").read_text())
        chosen["max_total_tokens"] = cache_tokens(config, arguments.kv_gib, cards)
        chosen |= {} if arguments.device == "cpu" else {"mem_fraction_static": STATIC_BESIDE_OTHERS}
    if arguments.turns:
        chosen["sleep_on_idle"] = True  # an engine that waits would keep a core busy while others measure
    return chosen


def cache_tokens(config: Mapping[str, Any], kv_gib: float, cards: int) -> int:
    """Tokens in so many GiB on each card. config: of the model; each card has its share of the heads."""
    heads = config["num_attention_heads"]
    kv_heads = max(1, (config.get("num_key_value_heads") or heads) // cards)
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    token_bytes = 2 * config["num_hidden_layers"] * kv_heads * head_dim * ELEMENT_BYTES
    return int(kv_gib * 2**30) // token_bytes


def check_cache(engine: Any, wanted: int | None) -> None:
    """Raises RuntimeError if the cache holds fewer tokens than are wanted: SGLang takes less and only warns."""
    if wanted and (held := engine.get_server_info()["max_total_num_tokens"]) < LEAST_CACHE * wanted:
        raise RuntimeError(
            f"SGLang's cache holds {held} tokens: expected {wanted}; lower --kv-gib or start fewer engines at once"
        )


def profile_request(folder: Path, device: str, steps: int) -> Any:
    """What SGLang's profiler is asked for."""
    from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

    activities = ["CPU"] if device == "cpu" else ["CPU", "GPU"]
    options = {"output_dir": str(folder), "num_steps": steps, "activities": activities, "with_stack": False}
    return ProfileReq(req_type=ProfileReqType.START_PROFILE, **options)


async def stream(
    engine: Any, prompt: list[int], tokens: int, at_once: int = AT_ONCE, name: str | None = None
) -> AsyncIterator[dict[str, Any]]:
    """What SGLang says of one greedy request as its tokens come. at_once: tokens that it sends together."""
    sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, "stream_interval": at_once}
    async for answer in await engine.async_generate(input_ids=prompt, sampling_params=sampling, stream=True, rid=name):
        yield answer


class Offline:
    """SGLang's Engine, for requests that come together."""

    def __init__(self, engine: Any, device: str) -> None:
        self._engine, self._device = engine, device

    def _streams(
        self, prompts: Sequence[list[int]], tokens: int, at_once: int = AT_ONCE
    ) -> tuple[list[list[tuple[float, int]]], list[Coroutine[Any, Any, list[int]]]]:
        """(for each request the times at which its tokens come, and what awaits its tokens)."""

        async def one(prompt: list[int], came: list[tuple[float, int]]) -> list[int]:
            found: list[int] = []
            async for answer in stream(self._engine, prompt, tokens, at_once):
                found = answer["output_ids"]  # all so far
                came.append((perf_counter(), len(found)))
            return list(found)

        arrivals: list[list[tuple[float, int]]] = [[] for _ in prompts]
        return arrivals, [one(prompt, came) for prompt, came in zip(prompts, arrivals, strict=True)]

    def generate(self, prompts: Sequence[list[int]], tokens: int) -> Generated:
        """Generates so many tokens of each request, as they arrive."""
        arrivals, streams = self._streams(prompts, tokens)

        async def together() -> list[list[int]]:
            return await asyncio.gather(*streams)

        return Generated(self._engine.loop.run_until_complete(together()), arrivals)

    def trace(
        self, prompts: Sequence[list[int]], span: Span, folder: Path, look: Callable[[], object] | None = None
    ) -> Traced:
        """Generates with the profiler on for some steps, once all have begun."""
        arrivals, streams = self._streams(prompts, span.tokens, max(AT_ONCE, span.tokens // 100))

        def written() -> bool:
            return any(folder.rglob("*.json*"))

        async def together() -> int:
            running = asyncio.gather(*streams)
            while not all(arrivals) and not running.done():
                await asyncio.sleep(0.001)
            await self._engine.tokenizer_manager.start_profile(profile_request(folder, self._device, span.steps))
            while not running.done():
                if look and written():
                    look()
                await asyncio.wait({running}, timeout=LOOK_SECONDS)
            for _ in range(WRITE_SECONDS):
                if written():
                    break
                await asyncio.sleep(1)
            return sum(map(len, running.result()))

        return Traced(span.steps, self._engine.loop.run_until_complete(together()))

    def answers(
        self, prompts: list[list[int]], tokens: int, samples: int = 1, logprobs: bool = True
    ) -> tuple[EqualityAnswers, dict[str, int]]:
        """Each answer's tokens, with the two best log-probabilities of each step and its own; tokens found in the
        cache, and retractions."""
        sampling = {"temperature": 0.0, "max_new_tokens": tokens, "ignore_eos": True, "n": samples}
        wanted = {"return_logprob": True, "top_logprobs_num": 2} if logprobs else {}
        found, facts = [], {"cached_tokens": 0, "retractions": 0}
        for output in self._engine.generate(input_ids=prompts, sampling_params=sampling, **wanted):
            meta_info = output["meta_info"]
            steps = (
                zip(meta_info["output_top_logprobs"], meta_info["output_token_logprobs"], strict=True)
                if logprobs
                else ()
            )
            best = [{str(token): logprob for logprob, token, _ in (*two, drawn)} for two, drawn in steps]
            found.append({"tokens": list(output["output_ids"]), "best": best})
            facts["cached_tokens"] += meta_info["cached_tokens"]
            facts["retractions"] += meta_info.get("num_retractions") or 0
        return found, facts

    def empty_cache(self) -> None:
        """Forgets all prefixes."""
        self._engine.loop.run_until_complete(flush(self._engine))

    def shutdown(self) -> None:
        """Ends the engine's processes."""
        self._engine.shutdown()


async def flush(engine: Any) -> None:
    """Forgets all prefixes. Raises RuntimeError if a request still runs."""
    if not (await engine.tokenizer_manager.flush_cache(timeout_s=LONGEST_FLUSH)).success:
        raise RuntimeError(f"SGLang has not emptied its cache within {LONGEST_FLUSH:g} s: expected no request to run")


class Online:
    """SGLang's Engine, for requests that arrive."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    async def stream(self, name: str, prompt: list[int], tokens: int) -> AsyncIterator[int]:
        """Number of tokens so far."""
        async for answer in stream(self._engine, prompt, tokens, name=name):
            yield answer["meta_info"]["completion_tokens"]

    async def empty_cache(self) -> None:
        """Forgets all prefixes."""
        await flush(self._engine)

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs a coroutine on the engine's loop."""
        self._engine.loop.run_until_complete(work)

    def shutdown(self) -> None:
        """Ends the engine's processes."""
        self._engine.shutdown()


def _start(start: Start) -> Any:
    """SGLang's Engine, with a cache as large as asked for."""
    os.environ.update(start.environment)
    import sglang

    port = {"nccl_port": start.port} if start.port else {}
    engine = sglang.Engine(model_path=str(start.model), **start.options, **port)
    check_cache(engine, start.cache_tokens)
    return engine


def offline(start: Start, traces: Path | None = None) -> Offline:
    """An Engine; its profiler is told of its folder when it begins."""
    return Offline(_start(start), start.device)


def online(start: Start) -> Online:
    """An Engine."""
    return Online(_start(start))


def tpot_starts(arguments: argparse.Namespace, model: Path) -> list[Start]:
    """Starts of each back end."""
    cards, device = arguments.tensor_parallel, arguments.device
    own = beside_others(arguments, cards)
    held = own.get("max_total_tokens")
    return [
        Start(name, model, options(name, device, cards) | own, {}, device=device, cache_tokens=held)
        for name in arguments.backends or BACKENDS
    ]


def tpot_facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """Nothing: each run names its options."""
    return {}


def serving_starts(arguments: argparse.Namespace) -> list[Start]:
    """Starts of each back end. Prompts are computed in chunks of as many tokens as vLLM's steps have."""
    device, own = arguments.device, beside_others(arguments, 1) | {"chunked_prefill_size": BUDGET}
    held = own.get("max_total_tokens")
    return [
        Start(name, arguments.model, options(name, device) | own, {}, device=device, cache_tokens=held)
        for name in arguments.backends or SERVED
    ]


def serving_options(starts: Sequence[Start]) -> dict[str, Any]:
    """Options by back end."""
    return {start.name: start.options for start in starts}


def steady_start(arguments: argparse.Namespace) -> Start:
    """Start of one back end."""
    chosen = options(arguments.backend, arguments.device)
    return Start(arguments.backend, arguments.model, chosen, {}, device=arguments.device)


def equality_start(case: Case, backend: str, folder: Path, device: str) -> Start:
    """Start of a case with one back end."""
    chosen = options(backend, device) | SMALL | (SMALL_ON_CPU if device == "cpu" else SMALL_ON_GPU)
    return Start(backend, folder, chosen | dict(case.options), dict(case.environment), device=device)


def missing(case: Case, backend: str, run: Mapping[str, Any]) -> list[str]:
    """Steps of ours that should have been counted; retractions."""
    steps = {path: run["counters"].get(f"trunkattn_steps_total {path}", 0.0) for path in PATHS}
    prompts, _, decoding = backend.partition("@")[0].partition("+")
    found = []
    if "trunk" in (prompts, decoding) and not steps["decode"] + steps["full_graph"]:
        found.append("our back end has counted no step of decodes")
    if prompts == "trunk" and not steps["prefill"]:
        found.append("our back end has counted no step of prompts")
    if prompts == "trunk" and case.mixes and steps["mixed"] < LEAST_MIXED:
        found.append(f"our back end has counted {steps['mixed']:.0f} mixed steps: expected {LEAST_MIXED} or more")
    if case.environment and not sum(facts["retractions"] for facts in run["facts"]):
        found.append("SGLang has retracted no request")
    return found
