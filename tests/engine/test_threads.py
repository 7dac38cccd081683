"""Several threads on one LLM: every one gets its own answers, and none is left behind."""

import gc
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trunkattn import LLM, SamplingParams

PATIENCE = 300  # seconds until a test gives up
GREEDY = SamplingParams(temperature=0, max_tokens=20)


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[[str], Any]) -> LLM:
    return LLM(tiny_model("llama").path, num_pages=128)


def run_all(work: Callable[[int], None], count: int) -> None:
    failures: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert not failures, failures


def test_answers_are_those_of_one_thread(llm: LLM) -> None:
    prompts = [[[i + 1, 2, 3, 4], [5, i + 1, 7]] for i in range(6)]
    alone = [[output.outputs[0].token_ids for output in llm.generate(pair, GREEDY)] for pair in prompts]
    found: dict[int, Any] = {}

    def work(i: int) -> None:
        for _ in range(3):
            found[i] = [output.outputs[0].token_ids for output in llm.generate(prompts[i], GREEDY)]

    run_all(work, len(prompts))
    assert [found[i] for i in range(len(prompts))] == alone
    assert llm.engine.scheduler.cache.num_pages_in_use == 0
    llm.engine.scheduler.cache.check_integrity()


def test_every_stream_goes_on(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """No thread takes the engine's turns alone: both streams see tokens while the other one runs."""
    order, ended, step = list[int](), threading.Event(), llm.engine.step

    def step_while_the_other_one_waits() -> Any:
        end = time.monotonic() + PATIENCE
        while len(llm._shared.turn._inside) < 2 and not ended.is_set():
            assert time.monotonic() < end
            time.sleep(0.001)
        return step()

    def work(i: int) -> None:
        try:
            for _ in llm.stream([i + 1, 2, 3], GREEDY):
                order.append(i)
        finally:
            ended.set()

    monkeypatch.setattr(llm.engine, "step", step_while_the_other_one_waits)

    run_all(work, 2)
    first_end = min(len(order) - 1 - order[::-1].index(i) for i in (0, 1))
    assert set(order[: first_end + 1]) == {0, 1}


def test_a_thread_that_stops_early_harms_nobody(llm: LLM) -> None:
    expected = llm.generate([9, 8, 7], GREEDY)[0].outputs[0].token_ids
    found: list[Any] = []

    def work(i: int) -> None:
        if i == 0:
            found.append(llm.generate([9, 8, 7], GREEDY)[0].outputs[0].token_ids)
        else:
            stream = llm.stream([i, 1, 1], GREEDY)
            next(stream)
            stream.close()

    run_all(work, 4)
    assert found == [expected] and llm.engine.scheduler.cache.num_pages_in_use == 0


def test_an_iterator_that_becomes_garbage_within_a_step_ends_its_request(llm: LLM) -> None:
    stream = llm.stream([1, 2, 3], GREEDY)
    next(stream)
    cycle: list[Any] = [stream]
    cycle.append(cycle)
    del stream, cycle

    def collect(_: list[int], logits: torch.Tensor) -> torch.Tensor:
        gc.collect()
        return logits

    params = SamplingParams(temperature=0, max_tokens=3, logits_processors=[collect])
    run_all(lambda _: llm.generate([4, 5], params), 1)
    assert not llm.engine.has_unfinished and llm.engine.scheduler.cache.num_pages_in_use == 0


def test_a_processor_that_asks_its_own_engine_is_refused(llm: LLM) -> None:
    def ask(_: list[int], logits: torch.Tensor) -> torch.Tensor:
        llm.generate([1, 2], GREEDY)
        return logits

    found: list[Any] = []
    params = SamplingParams(temperature=0, max_tokens=3, logits_processors=[ask])
    run_all(lambda _: found.extend(llm.generate([4, 5], params)[0].outputs), 1)
    assert found[0].finish_reason == "error" and "such as a logits processor, can use it" in found[0].error
    assert len(llm.generate([4, 5], GREEDY)[0].outputs[0].token_ids) == 20
    assert not llm.engine.has_unfinished and llm.engine.scheduler.cache.num_pages_in_use == 0
