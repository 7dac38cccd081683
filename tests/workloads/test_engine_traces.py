"""What benchmarks/engines/traces.py makes of traces, with events that a profiler could have written."""

import asyncio
import gzip
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.engines import sglang
from benchmarks.engines.interface import Offline, Traced
from benchmarks.engines.pace import LONG, SHORT, TRACED, traced, traced_or_why
from benchmarks.engines.traces import NAME_LENGTH, busy, busy_us, events_in


def event(name: str, ts: float, dur: float, device: int = 0, cat: str = "kernel") -> dict[str, Any]:
    return {"name": name, "ts": ts, "dur": dur, "cat": cat, "args": {"device": device}}


def test_kernels_that_overlap_count_once() -> None:
    events = [event("b", 30, 5), event("a", 0, 10), event("a", 4, 2), event("c", 8, 7), event("d", 31, 1)]
    assert busy_us(events) == 20
    assert busy_us([]) == 0


def test_a_step_of_one_card_by_kernel() -> None:
    long = "k" * (NAME_LENGTH + 9)
    events = [
        event(long, 0, 3000), event("copy", 3000, 500, cat="gpu_memcpy"), event(long, 4000, 3000),
        event("launch", 0, 9000, cat="cuda_runtime"), event("other card", 0, 9000, device=1), {"name": "process_name"},
        event("forward", 0, 9000, cat="cpu_op"), event("wait", 0, 400, cat="cuda_driver"),
    ]  # fmt: skip
    kernels, calls = {long[:NAME_LENGTH]: 3.0, "copy": 0.25}, {"launch": 4.5, "wait": 0.2}
    assert busy(events, 2) == {"busy_ms": 3.25, "kernels_ms": kernels, "calls_ms": calls}


def test_traces_are_read_once(tmp_path: Path) -> None:
    (tmp_path / "rank0.pt.trace.json").write_text(json.dumps({"traceEvents": [event("a", 0, 1000)]}))
    below = tmp_path / "below"
    below.mkdir()
    packed = gzip.compress(json.dumps({"traceEvents": [event("b", 1000, 3000)]}).encode())
    (below / "rank1.trace.json.gz").write_bytes(packed)
    (tmp_path / "table.txt").write_text("not a trace")
    assert sorted(each["name"] for each in events_in(tmp_path)) == ["a", "b"]
    assert traced(tmp_path, 4) == {"busy_ms": 1.0, "kernels_ms": {"b": 0.75, "a": 0.25}, "calls_ms": {}}
    with pytest.raises(RuntimeError, match="wrote no trace of whole steps"):
        traced(tmp_path, 4)


def test_a_trace_without_a_card_is_no_idle_card(tmp_path: Path) -> None:
    (tmp_path / "rank0.trace.json").write_text(json.dumps({"traceEvents": [event("a", 0, 1000, cat="cpu_op")]}))

    class Decoding:
        def generate(self, prompts: object, tokens: int) -> None: ...

        def trace(self, prompts: object, span: object, folder: Path) -> Traced:
            return Traced(4, 8)

    found = traced_or_why(cast(Offline, Decoding()), [[1]], tmp_path)
    assert found == {"busy_missing": "RuntimeError: the engine's profiler saw no kernel of a card"}


class Engine:
    """An SGLang engine whose profiler writes `events`, if any, after its requests have ended."""

    def __init__(self, events: list[dict[str, Any]]) -> None:
        self.events, self.loop, self.asked = events, asyncio.new_event_loop(), list[int]()
        self.tokenizer_manager = self

    async def async_generate(self, input_ids: list[int], sampling_params: dict[str, Any], **_: object) -> Any:
        self.asked.append(sampling_params["max_new_tokens"])

        async def answers() -> AsyncIterator[dict[str, list[int]]]:
            for count in range(1, sampling_params["max_new_tokens"] + 1):
                await asyncio.sleep(0)
                yield {"output_ids": [7] * count}

        return answers()

    async def start_profile(self, request: Path) -> None:
        async def write() -> None:
            await asyncio.sleep(0.2)
            (request / "TP-0.trace.json").write_text(json.dumps({"traceEvents": self.events}))

        if self.events:
            self.writing = asyncio.ensure_future(write())


@pytest.fixture(autouse=True)
def profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "WRITE_SECONDS", 1)
    monkeypatch.setattr(sglang, "profile_request", lambda folder, device, steps: folder)


def test_sglang_is_traced_while_it_decodes(tmp_path: Path) -> None:
    engine = Engine([event("a", 0, 24_000 * TRACED)])
    assert traced_or_why(sglang.Offline(engine, "cuda"), [[1], [2]], tmp_path)["busy_ms"] == 24.0
    assert engine.asked == [SHORT, SHORT, LONG, LONG]


def test_sglang_may_write_no_trace(tmp_path: Path) -> None:
    found = traced_or_why(sglang.Offline(Engine([]), "cuda"), [[1]], tmp_path)
    assert found == {"busy_missing": "RuntimeError: the engine's profiler wrote no trace of whole steps"}
