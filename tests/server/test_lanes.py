"""Work on threads beside the engine: how much of it holds Python's lock between two rests, counted and never timed."""

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from trunkattn.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from trunkattn.server import lanes as lanes_module
from trunkattn.server.chat import Chat
from trunkattn.server.lanes import Lanes, Pace
from trunkattn.server.protocol import ChatCompletionRequest, Reading
from trunkattn.server.service import Caller

from .conftest import Server

SLICE, RESTS, LONGEST = (getattr(lanes_module, name) for name in ("_SLICE_S", "_RESTS", "_LONGEST_REST_S"))


class Times:
    """A thread's clock that work moves on, and the rests that it has."""

    def __init__(self) -> None:
        self.computed = self.monotonic = 0.0
        self.pieces: list[float] = [0.0]  # computed between two rests
        self.rests: list[float] = []
        self.pace = Pace(lambda: self.computed, lambda: self.monotonic, self.sleep)

    def work(self, seconds: float) -> None:
        self.computed += seconds
        self.monotonic += seconds
        self.pieces[-1] += seconds

    def sleep(self, seconds: float) -> None:
        if seconds:
            self.monotonic += seconds
            self.rests.append(seconds)
            self.pieces.append(0.0)


def test_a_thread_in_python_rests_three_times_as_long_as_it_computes() -> None:
    times, call = Times(), 1e-5
    with times.pace.kept(holds_lock=True):
        for _ in range(100_000):
            times.work(call)
    assert max(times.pieces) <= SLICE + 64 * call, "nothing of the length of the work happens without a rest"
    assert sum(times.rests) >= RESTS * (times.computed - 2 * SLICE)
    assert len(times.rests) > 100


def test_one_long_call_is_followed_by_a_rest_that_ends() -> None:
    times = Times()
    with times.pace.kept(holds_lock=True):
        times.work(10.0)
        for _ in range(64):
            times.work(0.0)
    assert times.rests == [LONGEST]


@pytest.mark.parametrize(("holds_lock", "rests"), [(True, RESTS), (False, 1)])
def test_the_next_piece_begins_after_a_rest_that_nobody_waits_for_who_comes_later(holds_lock: bool, rests: int) -> None:
    times = Times()
    with times.pace.kept(holds_lock):
        times.work(0.02)
    assert times.rests == [], "the result of the work is there at once"
    with times.pace.kept(holds_lock):
        assert times.rests == [pytest.approx(rests * 0.02)]
        times.work(0.02)
    times.monotonic += 100.0
    with times.pace.kept(holds_lock):
        assert len(times.rests) == 1


def test_short_pieces_count_together() -> None:
    times = Times()
    for _ in range(60):
        with times.pace.kept(holds_lock=True):
            times.work(0.001)
    assert max(times.pieces) <= SLICE + 0.002 and sum(times.rests) >= RESTS * 0.05


def test_work_in_a_library_is_not_looked_at() -> None:
    def profile() -> Any:
        return sys.getprofile()

    async def both() -> tuple[Any, Any, Any]:
        first = await lanes.run(1, profile, holds_lock=False)
        second = await lanes.run(1, profile)
        return first, second, await lanes.run(1, profile, holds_lock=False)

    lanes = Lanes("test")
    first, second, third = asyncio.run(both())
    lanes.close()
    assert first is third is None and second is not None


def test_an_error_ends_the_work_alone() -> None:
    async def run() -> list[Any]:
        found = []
        for work in (lambda: 1 / 0, threading.current_thread):
            try:
                found.append(await lanes.run(1, work))
            except ZeroDivisionError as error:
                found.append(error)
        return found

    lanes = Lanes("test")
    error, thread = asyncio.run(run())
    lanes.close()
    assert isinstance(error, ZeroDivisionError) and thread.name.startswith("trunkattn-test-short")


def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often a thread has looked whether a rest is due."""
    count = 0
    due = Pace._due

    def counted(self: Pace, rests: int) -> float:
        nonlocal count
        count += 1
        return due(self, rests)

    monkeypatch.setattr(Pace, "_due", counted)
    return lambda: count


def test_a_conversation_of_many_calls_is_read_in_slices(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    count, messages = looks(monkeypatch), 20
    call = {"function": {"name": "f", "arguments": "{}"}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call] * 128}] * messages, "max_tokens": 1}
    assert server.post("/v1/chat/completions", body).status_code == 200
    assert count() > messages, "a look for less than a message"


def test_many_log_probabilities_are_written_in_slices(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    service, places = server.app.state.service, 2000
    entry = {token: Logprob(-1.0, 1 + token, "a", b"a") for token in range(20)}
    answer = CompletionOutput(0, "a" * places, [0] * places, logprobs=[entry] * places, finish_reason="length")
    output = RequestOutput("0", None, [1], [answer], True, 0, RequestMetrics(0.0, 0.0, 0.0))
    count = looks(monkeypatch)
    body = ChatCompletionRequest.model_validate(
        {"messages": [{"role": "user", "content": "x"}], "logprobs": True, "top_logprobs": 20}, context=Reading(False)
    )

    async def finished(*rest: Any) -> list[RequestOutput]:
        return [output]

    monkeypatch.setattr(service, "finished", finished)
    written = asyncio.run(Chat(service, body, Caller()).whole([]))
    assert len(json.loads(written)["choices"][0]["logprobs"]["content"]) == places
    assert count() > places / 10
