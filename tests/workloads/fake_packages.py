"""Packages that stand for vLLM and SGLang in one process: what the adapters ask of either, answered without a model.

Every answer has the tokens 1, 2, 3, ... Each engine notes what is asked of it.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

EVENTS = [
    {"name": "our_kernel", "ts": 0, "dur": 48_000, "cat": "kernel", "args": {"device": 0}},
    {"name": "Memcpy DtoH", "ts": 0, "dur": 24, "cat": "gpu_memcpy", "args": {"device": 0}},
    {"name": "cudaEventSynchronize", "ts": 0, "dur": 24, "cat": "cuda_runtime", "args": {}},
]
SECOND_BEST, BEST = -2.0, -0.5


@dataclass
class Noted:
    """options: of the engine that was started. said: what was asked of it. look: called at each of these."""

    options: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)
    look: Callable[[str], object] = lambda what: None

    def note(self, what: str) -> None:
        self.said.append(what)
        self.look(what)


def write_trace(folder: Path) -> None:
    (folder / "rank0.trace.json").write_text(json.dumps({"traceEvents": EVENTS}))


def package(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> None:
    module = ModuleType(name)
    vars(module).update(members)
    monkeypatch.setitem(sys.modules, name, module)


def put_vllm(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """A package vllm."""
    noted = Noted()

    class LLMEngine:
        def __init__(self) -> None:
            self.requests: dict[str, list[int]] = {}
            self.engine_core = SimpleNamespace(shutdown=lambda: noted.note("end"))

        def add_request(self, name: str, prompt: dict[str, list[int]], sampling: Any) -> None:
            if not self.requests:
                noted.note(f"generate {sampling.max_tokens}")
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
            noted.note("trace")

        def stop_profile(self) -> None:
            write_trace(Path(noted.options["profiler_config"]["torch_profiler_dir"]))

    class LLM:
        def __init__(self, model: str, **options: Any) -> None:
            noted.options = {"model": model, **options}
            noted.note("start")
            self.llm_engine = LLMEngine()

        def generate(self, prompts: list[Any], sampling: Any, use_tqdm: bool) -> list[Any]:
            noted.note(f"answers {len(prompts)}")
            tokens = list(range(1, sampling.max_tokens + 1))
            steps = [
                {token: SimpleNamespace(logprob=BEST), token + 1: SimpleNamespace(logprob=SECOND_BEST)}
                for token in tokens
            ]
            output = SimpleNamespace(token_ids=tokens, logprobs=steps if sampling.logprobs else None)
            return [SimpleNamespace(outputs=[output] * sampling.n, num_cached_tokens=5) for _ in prompts]

        def reset_prefix_cache(self) -> None:
            noted.note("empty")

    class AsyncLLM:
        @classmethod
        def from_engine_args(cls, options: dict[str, Any]) -> "AsyncLLM":
            noted.options = options
            noted.note("start")
            return cls()

        async def generate(self, prompt: Any, sampling: Any, name: str) -> AsyncIterator[Any]:
            noted.note(name)
            for _ in range(sampling.max_tokens):
                await asyncio.sleep(0)
                yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1])])

        async def reset_prefix_cache(self) -> None:
            noted.note("empty")

        def shutdown(self) -> None:
            noted.note("end")

    def sampling(n: int = 1, logprobs: int | None = None, **options: Any) -> SimpleNamespace:
        return SimpleNamespace(n=n, logprobs=logprobs, **options)

    package(monkeypatch, "vllm", LLM=LLM, SamplingParams=sampling)
    package(monkeypatch, "vllm.sampling_params", RequestOutputKind=SimpleNamespace(DELTA="delta"))
    package(monkeypatch, "vllm.engine")
    package(monkeypatch, "vllm.engine.arg_utils", AsyncEngineArgs=dict)
    package(monkeypatch, "vllm.v1")
    package(monkeypatch, "vllm.v1.engine")
    package(monkeypatch, "vllm.v1.engine.async_llm", AsyncLLM=AsyncLLM)
    return noted


def put_sglang(monkeypatch: pytest.MonkeyPatch) -> Noted:
    """A package sglang."""
    noted = Noted()

    class Engine:
        def __init__(self, **options: Any) -> None:
            noted.options = options
            noted.note("start")
            self.loop, self.tokenizer_manager = asyncio.new_event_loop(), self
            self._running = False

        def get_server_info(self) -> dict[str, int]:
            return {"max_total_num_tokens": noted.options["max_total_tokens"]}

        def generate(self, input_ids: list[Any], sampling_params: dict[str, Any], **wanted: Any) -> list[Any]:
            noted.note(f"answers {len(input_ids)}")
            tokens = list(range(1, sampling_params["max_new_tokens"] + 1))
            told: dict[str, Any] = {"cached_tokens": 5, "num_retractions": 1}
            if wanted:
                told["output_top_logprobs"] = [
                    [(BEST, token, None), (SECOND_BEST, token + 1, None)] for token in tokens
                ]
                told["output_token_logprobs"] = [(BEST, token, None) for token in tokens]
            return [{"output_ids": tokens, "meta_info": told} for _ in input_ids for _ in range(sampling_params["n"])]

        async def async_generate(self, input_ids: Any, sampling_params: Any, stream: bool, rid: str | None) -> Any:
            tokens = sampling_params["max_new_tokens"]
            if rid or not self._running:
                noted.note(rid or f"generate {tokens}")
            self._running = True

            async def answers() -> AsyncIterator[Any]:
                for count in range(1, tokens + 1):
                    await asyncio.sleep(0)
                    yield {"output_ids": list(range(1, count + 1)), "meta_info": {"completion_tokens": count}}
                self._running = False

            return answers()

        async def start_profile(self, request: SimpleNamespace) -> None:
            noted.note("trace")
            write_trace(Path(request.output_dir))

        async def flush_cache(self, timeout_s: float) -> SimpleNamespace:
            noted.note("empty")
            return SimpleNamespace(success=True)

        def shutdown(self) -> None:
            noted.note("end")

    package(monkeypatch, "sglang", Engine=Engine)
    for name in ("sglang.srt", "sglang.srt.managers"):
        package(monkeypatch, name)
    kinds = SimpleNamespace(START_PROFILE="start")
    package(monkeypatch, "sglang.srt.managers.io_struct", ProfileReq=SimpleNamespace, ProfileReqType=kinds)
    return noted


PACKAGES = {"vllm": put_vllm, "sglang": put_sglang}


def sent(answers: Any) -> Iterator[Any]:
    """What a process has sent."""
    while answers.poll():
        yield answers.recv()
