"""The engine's thread when it ends: whoever waits is told."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from trunkattn import LLM, SamplingParams
from trunkattn.engine.engine import Engine
from trunkattn.server import engine_loop
from trunkattn.server.engine_loop import EngineFailed, EngineLoop, Submission

from .conftest import PATIENCE


def asks(loop: EngineLoop) -> "asyncio.Task[None]":
    """A task that reads a long answer to its end."""

    async def read() -> None:
        checked = loop.engine.check_request([1, 2, 3], SamplingParams(max_tokens=400, ignore_eos=True))
        async for _ in loop.stream(Submission(checked)):
            pass

    return asyncio.ensure_future(read())


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def errors_of(work: Any) -> list[str]:
    """The messages of EngineFailed with which the tasks end that some work returns."""

    async def run() -> list[str]:
        tasks = await work()
        _, waiting = await asyncio.wait(tasks, timeout=PATIENCE / 10)
        for task in waiting:
            task.cancel()
        assert not waiting, "somebody waits for ever"
        found = [task.exception() for task in tasks]
        assert all(isinstance(error, EngineFailed) for error in found)
        return [str(error) for error in found]

    return asyncio.run(run())


def test_a_request_that_comes_in_the_last_step_is_told(reference: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, step = reference.engine, reference.engine.step
    in_step, go_on = threading.Event(), threading.Event()

    def slow_step() -> Any:
        in_step.set()
        go_on.wait(PATIENCE)
        return step()

    monkeypatch.setattr(engine, "step", slow_step)

    async def work() -> list[Any]:
        loop = EngineLoop(engine, max_waiting=8)
        loop.start()
        tasks = [asks(loop)]
        await until(in_step.is_set)
        tasks.append(asks(loop))
        await until(loop._commands.qsize)
        stopping = asyncio.ensure_future(asyncio.to_thread(loop.stop))
        await until(lambda: loop._stopping)
        tasks.append(asks(loop))
        go_on.set()
        await stopping
        return tasks

    assert errors_of(work) == ["the server is shutting down"] * 2 + ["the engine has stopped"]
    assert not engine.has_unfinished and engine.scheduler.cache.num_pages_in_use == 0


def test_a_request_that_comes_between_a_look_and_the_end_is_told(
    reference: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = EngineLoop(reference.engine, max_waiting=8)
    loop.start()

    async def work() -> list[Any]:
        looks = iter([True])
        with monkeypatch.context() as patches:
            loop.stop()
            patches.setattr(EngineLoop, "is_running", property(lambda _: next(looks, False)))
            tasks = [asks(loop)]
            await asyncio.sleep(0)
        return tasks

    assert errors_of(work) == ["the server is shutting down"]


def test_a_thread_that_fails_tells_everybody(reference: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = reference.engine

    def fail(*_: object) -> None:
        raise MemoryError

    async def work() -> list[Any]:
        loop = EngineLoop(engine, 8)
        loop.start()
        tasks = [asks(loop), asks(loop)]
        await until(lambda: len(loop._inboxes) == 2)
        for name in ("abort_request", "blame", "step"):  # nothing of the engine is left
            patches.setattr(engine, name, fail)
        await asyncio.to_thread(loop._thread.join)
        return tasks

    with monkeypatch.context() as patches:
        patches.setattr(threading, "excepthook", lambda _: None)
        assert errors_of(work) == ["the engine has stopped"] * 2
    for request_id in list(engine._requests):
        engine.abort_request(request_id)
    assert not engine.has_unfinished


def test_who_looks_at_the_engine_ends_no_answer(reference: LLM, caplog: pytest.LogCaptureFixture) -> None:
    looks: list[Engine] = []

    def look(engine: Engine) -> None:
        looks.append(engine)
        raise TypeError("a tokenizer without a text for a token")

    async def work() -> None:
        loop = EngineLoop(reference.engine, 8)
        loop.start(look)
        try:
            loop.call(look)
            await asks(loop)
            assert loop.is_running
        finally:
            await asyncio.to_thread(loop.stop)

    asyncio.run(work())
    assert len(looks) >= 2 and "a tokenizer without" in caplog.text


def test_the_time_to_a_first_token_is_the_first_ones(reference: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """`Retry-After` says it. A long answer makes nobody wait longer."""
    monkeypatch.setattr(engine_loop, "_FIRST_TOKEN_WEIGHT", 1.0)

    async def work() -> None:
        loop = EngineLoop(reference.engine, 8)
        loop.start()
        try:
            checked = loop.engine.check_request([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
            outputs = [output async for output in loop.stream(Submission(checked))]
            assert loop._first_token_s == outputs[-1].metrics.time_to_first_token
        finally:
            await asyncio.to_thread(loop.stop)

    asyncio.run(work())
