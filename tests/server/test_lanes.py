"""Work on threads beside the engine: how much of it holds Python's lock between two pauses, counted and never timed."""

import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkattn.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from trunkattn.server import app
from trunkattn.server import lanes as lanes_module
from trunkattn.server.bodies.body import Reading
from trunkattn.server.bodies.protocol import ChatCompletionRequest
from trunkattn.server.endpoints import chat as chat_module
from trunkattn.server.endpoints.call_schemas import calls_schema
from trunkattn.server.endpoints.chat import Chat
from trunkattn.server.endpoints.streaming import _SLICE, write_json
from trunkattn.server.errors import BadRequest
from trunkattn.server.lanes import Lanes, Pace, Pause, Pauses
from trunkattn.server.service import Caller

from .conftest import Server

SLICE, RATIO, LONGEST = (getattr(lanes_module, name) for name in ("_SLICE_S", "_PAUSE_RATIO", "_LONGEST_PAUSE_S"))


class Times:
    """A thread's clock that work moves on, and the pauses that it has."""

    def __init__(self) -> None:
        self.computed = self.monotonic = 0.0
        self.pieces: list[float] = [0.0]  # computed between two pauses
        self.pauses: list[float] = []
        self.of_all = Pauses(lambda: self.monotonic)
        self.pace = Pace(self.of_all, False, lambda: self.computed, self.sleep)

    def work(self, seconds: float) -> None:
        self.computed += seconds
        self.monotonic += seconds
        self.pieces[-1] += seconds

    def sleep(self, seconds: float) -> None:
        if seconds:
            self.monotonic += seconds
            self.pauses.append(seconds)
            self.pieces.append(0.0)


def test_a_thread_in_python_rests_three_times_as_long_as_it_computes() -> None:
    times, turn = Times(), 1e-4
    with times.pace.kept():
        for _ in range(10_000):
            times.work(turn)
            times.pace.pause()
    assert max(times.pieces) <= SLICE + turn, "nothing of the length of the work happens without a pause"
    assert sum(times.pauses) >= RATIO * (times.computed - SLICE - turn)


def test_one_long_call_is_followed_by_a_rest_that_ends() -> None:
    times = Times()
    with times.pace.kept():
        times.work(10.0)
        times.pace.pause()
        times.pace.pause()
    assert times.pauses == [LONGEST]


def test_the_next_piece_begins_after_a_rest_and_who_comes_later_waits_for_nothing() -> None:
    times = Times()
    with times.pace.kept():
        times.work(0.02)
    assert times.pauses == [], "the result of the work is there at once"
    with times.pace.kept():
        assert times.pauses == [pytest.approx(RATIO * 0.02)]
        times.work(0.02)
    times.monotonic += 100.0
    with times.pace.kept():
        assert len(times.pauses) == 1


def test_short_pieces_count_together() -> None:
    times = Times()
    for _ in range(60):
        with times.pace.kept():
            times.work(0.001)
    assert max(times.pieces) <= SLICE + 0.002 and sum(times.pauses) >= RATIO * 0.05


@given(turns=st.lists(st.tuples(st.integers(0, 3), st.floats(0.001, 0.05)), min_size=1, max_size=50))
def test_several_threads_rest_as_long_as_one_would(turns: list[tuple[int, float]]) -> None:
    """They compute in any order, and each goes on when its own pause has ended."""
    now = 0.0
    of_all = Pauses(lambda: now)
    clocks, ready = [0.0] * 4, [0.0] * 4
    paces = [Pace(of_all, False, lambda at=at: clocks[at], lambda seconds: None) for at in range(4)]
    for at, seconds in turns:
        now = max(now, ready[at]) + seconds
        clocks[at] += seconds
        paces[at].pause()
        ready[at] = of_all._end
    rested, computed = of_all._end, sum(clocks)
    assert rested >= RATIO * (computed - 4 * SLICE)


def test_the_first_piece_of_a_thread_waits_for_no_other() -> None:
    times = Times()
    times.of_all.add(0.5, False)
    with times.pace.kept():
        times.work(0.02)
    assert times.pauses == []
    with times.pace.kept():
        assert times.pauses == [pytest.approx(0.5 + (RATIO - 1) * 0.02)]


def test_short_work_waits_for_other_short_work_alone_and_long_work_for_all_but_not_for_ever() -> None:
    of_all = Pauses(lambda: 100.0)
    assert of_all.add(0.2, False) == pytest.approx(100.2)
    assert [of_all.add(0.1, True), of_all.add(0.1, True)] == [pytest.approx(100.1), pytest.approx(100.2)]
    assert of_all.add(0.2, False) == pytest.approx(100.6)
    assert max(of_all.add(LONGEST, False) for _ in range(50)) == pytest.approx(101.0)
    assert of_all.add(0.1, True) == pytest.approx(100.3)


def test_an_error_ends_the_work_alone() -> None:
    async def run() -> list[Any]:
        found = []
        for work in (lambda pause: 1 / 0, lambda pause: threading.current_thread()):
            try:
                found.append(await lanes.run(1, work))
            except ZeroDivisionError as error:
                found.append(error)
        return found

    lanes = Lanes("test", Pauses())
    error, thread = asyncio.run(run())
    lanes.close()
    assert isinstance(error, ZeroDivisionError) and thread.name.startswith("trunkattn-test-short")


def looks(monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """How often a thread has looked whether a pause is due."""
    count = 0
    due = Pace._due

    def counted(self: Pace) -> float:
        nonlocal count
        count += 1
        return due(self)

    monkeypatch.setattr(Pace, "_due", counted)
    return lambda: count


def test_a_conversation_of_many_calls_is_read_in_slices(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    count, messages = looks(monkeypatch), 20
    call = {"function": {"name": "f", "arguments": "{}"}}
    body = {"messages": [{"role": "assistant", "tool_calls": [call] * 128}] * messages, "max_tokens": 1}
    assert server.post("/v1/chat/completions", body).status_code == 200
    assert count() > 2 * 128 * messages, "a look at every call, checked and copied"


def test_the_form_of_forced_calls_is_made_in_slices(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[str] = []

    def refused(tools: Any, only_one: bool, pause: Pause) -> Any:
        threads.append(threading.current_thread().name)
        calls_schema(tools, only_one, pause)
        raise BadRequest("enough")

    count, number = looks(monkeypatch), 500
    monkeypatch.setattr(chat_module, "calls_schema", refused)
    schema = {"type": "object", "properties": {f"p{place}": {"type": "integer"} for place in range(number)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": [tool], "tool_choice": "required"}
    assert server.post("/v1/chat/completions", body).json()["error"]["message"] == "enough"
    assert threads == ["trunkattn-texts-short_0"] and count() > number


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

    monkeypatch.setattr(service, "finished_outputs", finished)
    written = asyncio.run(Chat(service, body, Caller()).whole([]))
    assert len(json.loads(written)["choices"][0]["logprobs"]["content"]) == places
    assert count() > places


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_many_token_ids_are_neither_read_nor_written_on_the_event_loop(
    start_server: Callable[..., Server], save_tiny_model: Callable[..., None], tmp_path: Path, path: str
) -> None:
    save_tiny_model(tmp_path, num_positions=4 * _SLICE)
    server = start_server(path=tmp_path)
    texts: list[str] = []
    written = app.write_json

    def noted(value: Any, pause: Pause) -> str:
        texts.append(threading.current_thread().name)
        return written(value, pause)

    token_ids = server.llm.tokenizer("ab" * _SLICE)["input_ids"]
    body = {"prompt": "ab" * _SLICE} if path == "/tokenize" else {"tokens": token_ids}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(app, "write_json", noted)
        count = looks(patch)
        answered = server.post(path, body)
    if path == "/tokenize":
        assert answered.json() == {"count": 2 * _SLICE, "max_model_len": 4 * _SLICE, "tokens": token_ids}
        assert count() > 2, "a look at every slice"
    else:
        assert answered.json() == {"prompt": "ab" * _SLICE}
    assert answered.headers["content-type"] == "application/json"
    assert [name.startswith("trunkattn-texts") for name in texts] == [True]


@pytest.mark.parametrize("count", [0, 1, _SLICE, _SLICE + 1, 3 * _SLICE - 1])
def test_integers_are_written_in_slices(count: int) -> None:
    pauses: list[None] = []
    value = {"tokens": list(range(count)), "logprobs": [None, -1.5]}
    assert json.loads(write_json(value, lambda: pauses.append(None))) == value
    assert len(pauses) == 5 + -(-count // _SLICE), "at the mapping, its two lists, two items and every slice"
