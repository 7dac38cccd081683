"""Several threads on one LLM: every one gets its own answers, and none is left behind."""

import threading
from collections.abc import Callable
from typing import Any

import pytest

from trunkattn import LLM, SamplingParams

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
        thread.join(60)
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


def test_every_stream_goes_on(llm: LLM) -> None:
    """No thread takes the engine's turns alone: both streams see tokens while the other one runs."""
    order: list[int] = []

    def work(i: int) -> None:
        for _ in llm.stream([i + 1, 2, 3], GREEDY):
            order.append(i)

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
