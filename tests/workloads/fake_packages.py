"""Packages that stand for vLLM and SGLang in one process: what the adapters ask of either, answered without a model.

Every answer has the tokens 1, 2, 3, ... Each engine notes what is asked of it.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

EVENTS = [
    {"name": "our_kernel", "ts": 0, "dur": 48_000, "cat": "kernel", "args": {"device": 0}},
    {"name": "Memcpy DtoH", "ts": 0, "dur": 24, "cat": "gpu_memcpy", "args": {"device": 0}},
    {"name": "cudaEventSynchronize", "ts": 0, "dur": 24, "cat": "cuda_runtime", "args": {}},
]
BEST, SECOND_BEST = -0.5, -2.0


@dataclass
class Noted:
    """options: of the engine that was started. said: what was asked of it. look: called at each of these."""

    options: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    look: Callable[[str], object] = lambda what: None

    def start(self, options: dict[str, Any]) -> None:
        self.options = options
        self.note("start")

    def note(self, what: str) -> None:
        self.said.append(what)
        self.look(what)


def write_trace(folder: Path) -> None:
    (folder / "rank0.trace.json").write_text(json.dumps({"traceEvents": EVENTS}))


class LLMEngine:
    """vLLM's, which answers a token of each request in a step."""

    def __init__(self, noted: Noted) -> None:
        self.noted, self.requests = noted, dict[str, list[int]]()
        self.engine_core = SimpleNamespace(shutdown=lambda: noted.note("end"))

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
        if not self.requests:
            self.noted.note(f"generate {sampling.max_tokens}")
        self.requests[name] = list(range(1, sampling.max_tokens + 1))

    def has_unfinished_requests(self) -> bool:
        return bool(self.requests)

    def step(self) -> list[Any]:
        found = [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[left.pop(0)])])
            for name, left in self.requests.items()
        ]
        self.requests = {name: left for name, left in self.requests.items() if left}
        return found

    def start_profile(self) -> None:
        self.noted.note("trace")

    def stop_profile(self) -> None:
        write_trace(Path(self.noted.options["profiler_config"]["torch_profiler_dir"]))


class LLM:
    """vLLM's."""

    def __init__(self, noted: Noted, model: str, **options: Any) -> None:
        noted.start({"model": model, **options})
        self.noted, self.llm_engine = noted, LLMEngine(noted)

    def generate(self, prompts: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
        self.noted.note(f"answers {len(prompts)}")
        tokens = list(range(1, sampling.max_tokens + 1))
        steps = [
            {token: SimpleNamespace(logprob=BEST), token + 1: SimpleNamespace(logprob=SECOND_BEST)} for token in tokens
        ]
        output = SimpleNamespace(token_ids=tokens, logprobs=steps if sampling.logprobs else None)
        return [SimpleNamespace(outputs=[output] * sampling.n, num_cached_tokens=5) for _ in prompts]

    def reset_prefix_cache(self) -> None:
        self.noted.note("empty")


class AsyncLLM:
    """vLLM's."""

    def __init__(self, noted: Noted, options: dict[str, Any]) -> None:
        noted.start(options)
        self.noted = noted

    async def generate(self, prompt: Any, sampling: Any, name: str) -> AsyncIterator[Any]:
        self.noted.note(name)
        for _ in range(sampling.max_tokens):
            await asyncio.sleep(0)
            yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1])])

    async def reset_prefix_cache(self) -> None:
        self.noted.note("empty")

    def shutdown(self) -> None:
        self.noted.note("end")


class Engine:
    """SGLang's."""

    def __init__(self, noted: Noted, **options: Any) -> None:
        noted.start(options)
        self.noted, self.loop, self.tokenizer_manager = noted, asyncio.new_event_loop(), self
        self._running = False

    def get_server_info(self) -> dict[str, int]:
        return {"max_total_num_tokens": self.noted.options["max_total_tokens"]}

    def generate(self, input_ids: list[Any], sampling_params: dict[str, Any], **wanted: Any) -> list[Any]:
        self.noted.note(f"answers {len(input_ids)}")
        tokens = list(range(1, sampling_params["max_new_tokens"] + 1))
        meta_info: dict[str, Any] = {"cached_tokens": 5, "num_retractions": 1}
        if wanted:
            meta_info["output_top_logprobs"] = [
                [(BEST, token, None), (SECOND_BEST, token + 1, None)] for token in tokens
            ]
            meta_info["output_token_logprobs"] = [(BEST, token, None) for token in tokens]
        return [{"output_ids": tokens, "meta_info": meta_info} for _ in input_ids for _ in range(sampling_params["n"])]

    async def async_generate(self, input_ids: Any, sampling_params: Any, stream: bool, rid: str | None) -> Any:
        tokens = sampling_params["max_new_tokens"]
        if rid or not self._running:
            self.noted.note(rid or f"generate {tokens}")
        self._running = True

        async def answers() -> AsyncIterator[Any]:
            for count in range(1, tokens + 1):
                await asyncio.sleep(0)
                yield {"output_ids": list(range(1, count + 1)), "meta_info": {"completion_tokens": count}}
            self._running = False

        return answers()

    async def start_profile(self, request: SimpleNamespace) -> None:
        self.noted.note("trace")
        write_trace(Path(request.output_dir))

    async def flush_cache(self, timeout_s: float) -> SimpleNamespace:
        self.noted.note("empty")
        return SimpleNamespace(success=True)

    def shutdown(self) -> None:
        self.noted.note("end")


def put(monkeypatch: pytest.MonkeyPatch, **modules: dict[str, object]) -> None:
    """Modules, by name with __ for a dot, and the packages above them."""
    for written, members in modules.items():
        name = written.replace("__", ".")
        while name:
            module = ModuleType(name)
            vars(module).update(members)
            if members or name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, module)
            name, members = name.rpartition(".")[0], {}


def put_vllm(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """A package vllm."""
    noted = Noted()

    def sampling(n: int = 1, logprobs: int | None = None, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(n=n, logprobs=logprobs, **options)

    put(
        monkeypatch,
        vllm={"LLM": partial(LLM, noted), "SamplingParams": sampling},
        vllm__sampling_params={"RequestOutputKind": SimpleNamespace(DELTA="delta")},
        vllm__engine__arg_utils={"AsyncEngineArgs": dict},
        vllm__v1__engine__async_llm={"AsyncLLM": SimpleNamespace(from_engine_args=partial(AsyncLLM, noted))},
    )
    return noted


def put_sglang(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """A package sglang."""
    noted = Noted()
    kinds = SimpleNamespace(START_PROFILE="start")
    put(
        monkeypatch,
        sglang={"Engine": partial(Engine, noted)},
        sglang__srt__managers__io_struct={"ProfileReq": SimpleNamespace, "ProfileReqType": kinds},
    )
    return noted


PACKAGES = {"vllm": put_vllm, "sglang": put_sglang}


def sent(answers: Any) -> Iterator[Any]:
    """What a process has sent."""
    while answers.poll():
        yield answers.recv()
