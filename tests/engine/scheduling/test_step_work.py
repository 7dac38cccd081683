"""Work of steps, counted: no step takes longer because prompts are long, many, or known already."""

from collections.abc import Callable
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from trunkattn.engine.assembly import keys_per_token
from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.engine.scheduling.request import Request
from trunkattn.engine.scheduling.scheduled_batch import ScheduledBatch
from trunkattn.engine.scheduling.scheduler import MAX_LOOKED_UP, Scheduler
from trunkattn.engine.scheduling.step_work import LEAST_SHARE, PROMPT_SHARE, StepPace, WorkPrices
from trunkattn.kv_cache.manager import CacheManager

PAGE_SIZE = 16
ARRIVALS = count()


def make_request(num_tokens: int, max_tokens: int = 8, first: int = 0) -> Request:
    arrival = next(ARRIVALS)
    prompt = list(range(first, first + num_tokens))
    return Request(f"{arrival}", prompt, num_tokens, SamplingParams(), max_tokens, arrival=arrival)


def step(scheduler: Scheduler) -> ScheduledBatch:
    batch = scheduler.schedule()
    scheduler.update(batch, [1] * len(batch.samples))
    scheduler.cache.check_integrity()
    return batch


def work_of(prices: WorkPrices, batch: ScheduledBatch) -> int:
    return sum(prices.of(chunk.start, chunk.num_tokens) for chunk in batch.chunks)


@given(
    token=st.integers(1, 10**6),
    key=st.sampled_from([0, 1]),
    start=st.integers(0, 10**7),
    work=st.integers(-(10**12), 10**15),
)
def test_the_most_tokens_are_those_whose_work_just_fits(token: int, key: int, start: int, work: int) -> None:
    prices = WorkPrices(token, key)
    most = prices.most_tokens(start, work)
    assert most >= 0 and (most == 0 or prices.of(start, most) <= work)
    assert prices.of(start, most + 1) > work


@given(start=st.integers(0, 10_000), parts=st.lists(st.integers(1, 500), min_size=1, max_size=6))
def test_the_work_of_tokens_is_the_sum_of_its_parts(start: int, parts: list[int]) -> None:
    prices, at, total = WorkPrices.of_keys(3456), start, 0
    for part in parts:
        total += prices.of(at, part)
        at += part
    assert total == prices.of(start, sum(parts))


def chunk_lengths(scheduler: Scheduler, tokens: int, see: Callable[[ScheduledBatch], None]) -> list[int]:
    """The lengths of the chunks in which a prompt is computed beside an answer. see: is called with each batch."""
    witness = make_request(3, max_tokens=2000, first=9000)
    scheduler.add(witness)
    step(scheduler)
    scheduler.add(make_request(tokens))
    lengths: list[int] = []
    while sum(lengths) < tokens:
        batch = step(scheduler)
        assert batch.chunks[0].request is witness, "a token of the witness in every step"
        lengths.append(batch.chunks[-1].num_tokens)
        see(batch)
    return lengths


def test_chunks_of_a_long_prompt_grow_shorter_and_take_no_more_work_than_the_first() -> None:
    prices, budget = WorkPrices.of_keys(500), 64
    scheduler = Scheduler(CacheManager(1000, PAGE_SIZE), 8, budget, keys_per_token=500)

    def see(batch: ScheduledBatch) -> None:
        assert work_of(prices, batch) <= prices.of(0, budget)

    lengths = chunk_lengths(scheduler, 4000, see)
    assert lengths[0] == 63 and sum(lengths) == 4000
    assert lengths[:-1] == sorted(lengths[:-1], reverse=True)
    assert lengths[-2] < 9


def test_without_a_price_of_keys_a_chunk_is_as_long_as_the_budget() -> None:
    scheduler = Scheduler(CacheManager(1000, PAGE_SIZE), 8, 64)
    scheduler.add(make_request(640, max_tokens=1))
    lengths = [step(scheduler).chunks[0].num_tokens for _ in range(10)]
    assert lengths == [64] * 10 and not scheduler.has_unfinished


@pytest.mark.parametrize("first", [500_000, 0])
def test_prompts_go_on_beside_answers_that_take_more_than_the_whole_budget(first: int) -> None:
    """From 0 on the prompt begins like the first one: each of its tokens then takes more than a step has left."""
    prices, budget = WorkPrices.of_keys(10), 16
    scheduler = Scheduler(CacheManager(1000, PAGE_SIZE), 16, budget, keys_per_token=10)
    answering = [make_request(1000, max_tokens=400, first=10_000 * place) for place in range(8)]
    for request in answering:
        scheduler.add(request)
    while any(request.num_output_tokens == 0 for request in answering):
        step(scheduler)
    late = make_request(200 if first else 1040, first=first)
    scheduler.add(late)
    while late.num_output_tokens == 0:
        batch = step(scheduler)
        own = [chunk for chunk in batch.chunks if chunk.request is late]
        others = [chunk for chunk in batch.chunks if chunk.request is not late]
        assert len(others) == 8 and all(chunk.num_tokens == 1 for chunk in others)
        assert len(own) == 1 and prices.of(own[0].start + 1, own[0].num_tokens - 1) <= prices.of(0, budget)
        assert own[0].num_tokens and sum(chunk.num_tokens for chunk in batch.chunks) <= budget
    assert late.num_cached_tokens == (0 if first else 1000 - 1000 % PAGE_SIZE)
    assert late.num_computed_tokens == late.num_prompt_tokens


@given(
    keys=st.integers(1, 5000),
    lens=st.lists(st.integers(1, 600), min_size=1, max_size=10),
    room=st.integers(0, 60),
)
def test_no_step_takes_more_than_running_answers_and_a_budget(keys: int, lens: list[int], room: int) -> None:
    prices, budget = WorkPrices.of_keys(keys), 4 + room
    # Pages for the four longest requests, because each step's check of the cache looks at all of them.
    scheduler = Scheduler(CacheManager(4 * 38, PAGE_SIZE), 4, budget, keys_per_token=keys)
    for place, length in enumerate(lens):
        scheduler.add(make_request(length, max_tokens=3, first=1000 * place))
    steps = 0
    while scheduler.has_unfinished:
        reserved = sum(prices.of(request.num_computed_tokens, 1) for request in scheduler.running)
        batch = step(scheduler)
        assert batch.chunks and sum(chunk.num_tokens for chunk in batch.chunks) <= budget
        first = max((prices.of(chunk.start, 1) for chunk in batch.chunks), default=0)
        rest = max(prices.of(0, budget) - reserved, prices.of(0, budget) // PROMPT_SHARE)
        assert work_of(prices, batch) <= reserved + rest + first
        steps += 1
        assert steps < 10_000
    assert scheduler.cache.num_pages_in_use == 0


@pytest.mark.parametrize("shared", [True, False])
def test_a_step_looks_up_few_of_the_sequences_that_wait(shared: bool) -> None:
    length = 8000
    scheduler = Scheduler(CacheManager(20_000, PAGE_SIZE), 64, 128)
    leader = make_request(length, max_tokens=200)
    scheduler.add(leader)
    while leader.num_output_tokens == 0:
        step(scheduler)
    requests = [make_request(length, max_tokens=200, first=0 if shared else 10_000 * (i + 1)) for i in range(40)]
    for request in requests:
        scheduler.add(request)
    looked_up: list[Any] = []
    admit = scheduler.cache.admit
    scheduler.cache.admit = lambda name, tokens, *rest: looked_up.append(tokens) or admit(name, tokens, *rest)  # type: ignore[func-returns-value,method-assign]
    most = 0
    for _ in range(12):
        looked_up.clear()
        step(scheduler)
        most = max(most, sum(map(len, looked_up)))
    assert most <= MAX_LOOKED_UP + length
    if shared:
        assert all(request.num_cached_tokens for request in requests), "each was admitted with what is known"


def test_a_crowd_that_waits_for_a_prefix_is_not_compared_with_it_in_every_step() -> None:
    length, compared = 8000, 0
    scheduler = Scheduler(CacheManager(5000, PAGE_SIZE), 64, 128)
    scheduler.add(make_request(length))

    class Counted(list[int]):
        def __getitem__(self, place: Any) -> Any:
            nonlocal compared
            found = super().__getitem__(place)
            compared += len(found) if isinstance(found, list) else 1
            return found

    for _ in range(500):
        request = make_request(length)
        request.token_ids = Counted(request.token_ids)
        scheduler.add(request)
    for _ in range(20):
        compared = 0
        step(scheduler)
        assert compared <= MAX_LOOKED_UP + length + 2 * PAGE_SIZE * 500


def info(hidden_size: int, heads: int, head_dim: int, windows: tuple[int | None, ...]) -> Any:
    layer = SimpleNamespace(num_qo_heads=heads, head_dim=head_dim)
    config = LlamaConfig(hidden_size=hidden_size)
    return SimpleNamespace(geometry=SimpleNamespace(layer=layer, windows=windows), config=config)


def test_a_models_price_of_keys_follows_from_its_sizes() -> None:
    assert keys_per_token(info(576, 9, 64, (None,) * 30)) == 5 * 576
    assert keys_per_token(info(1024, 16, 128, (None,) * 28)) == 5 * 512, "heads that are wider than the model"
    assert keys_per_token(info(576, 9, 64, (None, 512) * 15)) == 10 * 576, "a layer with a window sees few keys"
    assert keys_per_token(info(576, 9, 64, (512,) * 30)) is None


@given(
    most=st.integers(1, 10**12),
    seconds=st.floats(1e-3, 100),
    steps=st.lists(st.tuples(st.integers(1, 10**12), st.floats(0, 1e4)), max_size=30),
)
def test_a_step_may_take_a_sixteenth_to_all_of_the_work_whatever_was_timed(
    most: int, seconds: float, steps: list[tuple[int, float]]
) -> None:
    pace, free = StepPace(most, seconds), StepPace(most)
    for work, took in steps:
        before = pace.work
        pace.timed(work, took)
        free.timed(work, took)
        assert max(1, most // LEAST_SHARE) <= pace.work <= most and type(pace.work) is int
        assert pace.work <= before if took > seconds else pace.work >= before
        assert before // 2 <= pace.work <= 2 * before
        assert free.work == most


@pytest.mark.parametrize("rate", [1e-4, 1e-3, 4e-3])
def test_steps_take_the_time_that_they_may_however_fast_the_machine_is(rate: float) -> None:
    pace, most, seconds = StepPace(1600, 0.25), 1600, 0.25
    for _ in range(20):
        pace.timed(pace.work, 0.02 + pace.work * rate)
    assert 0.02 + pace.work * rate <= seconds or pace.work == most // LEAST_SHARE
    assert pace.work == most or 0.02 + 2 * pace.work * rate >= seconds


@pytest.mark.parametrize("slow", [True, False])
def test_prompts_get_fewer_tokens_of_a_step_while_steps_take_longer_than_they_may(slow: bool) -> None:
    scheduler = Scheduler(CacheManager(1000, PAGE_SIZE), 8, 64, max_step_seconds=0.25)
    lengths = chunk_lengths(scheduler, 640, lambda batch: scheduler.timed(batch, 1.0 if slow else 0.001))
    assert set(lengths[:-1]) == {3} if slow else lengths[:5] == [3, 7, 15, 31, 63]


def test_prompts_go_on_however_long_steps_of_many_answers_take() -> None:
    scheduler = Scheduler(CacheManager(1000, PAGE_SIZE), 16, 64, max_step_seconds=0.25)
    for place in range(10):
        scheduler.add(make_request(20, max_tokens=300, first=10_000 * place))
    while any(request.num_output_tokens == 0 for request in scheduler.running) or scheduler.waiting:
        scheduler.timed(step(scheduler), 60.0)
    late = make_request(50, first=500_000)
    scheduler.add(late)
    for _ in range(50):
        scheduler.timed(step(scheduler), 60.0)
    assert late.num_output_tokens > 0


def test_no_more_answers_start_while_a_step_has_no_time_for_them() -> None:
    scheduler = Scheduler(CacheManager(256, PAGE_SIZE), 64, 256, max_step_seconds=0.5)
    for _ in range(64):
        scheduler.add(make_request(1, first=next(ARRIVALS), max_tokens=1000))
    numbers = []
    for _ in range(12):
        batch = step(scheduler)
        numbers.append(len(batch.chunks))
        scheduler.timed(batch, 0.02 * len(batch.chunks))  # 25 answers take half a second
    assert numbers[-1] == numbers[-2] == 19  # and a quarter of a step is for prompts
    assert len(scheduler.waiting) == 64 - 19


def test_samples_wait_while_a_step_has_no_time_for_them() -> None:
    scheduler = Scheduler(CacheManager(256, PAGE_SIZE), 64, 256, max_step_seconds=0.5)
    parent = make_request(40)
    children = [make_request(40) for _ in range(63)]
    parent.children.extend(children)
    scheduler.add(parent)
    most = 0
    while scheduler.has_unfinished:
        batch = step(scheduler)
        most = max(most, len(batch.chunks))
        scheduler.timed(batch, 0.02 * sum(chunk.num_tokens for chunk in batch.chunks))
    assert most == 19
    assert all(child.num_output_tokens == 8 for child in children)


def test_one_sequence_always_runs_however_long_its_steps_take() -> None:
    scheduler = Scheduler(CacheManager(256, PAGE_SIZE), 64, 64, keys_per_token=1, max_step_seconds=1e-6)
    requests = [make_request(1000, first=next(ARRIVALS)) for _ in range(2)]
    for request in requests:
        scheduler.add(request)
    while scheduler.has_unfinished:
        scheduler.timed(step(scheduler), 1.0)
    assert [request.num_output_tokens for request in requests] == [8, 8]


def test_answers_to_long_prompts_start_where_there_is_time_for_more_work_than_a_prompt_gets() -> None:
    scheduler = Scheduler(CacheManager(4096, PAGE_SIZE), 64, 64, keys_per_token=1, max_step_seconds=1.0)
    for _ in range(32):
        scheduler.add(make_request(500, first=1000 * next(ARRIVALS), max_tokens=1000))
    for _ in range(1000):
        batch = step(scheduler)
        scheduler.timed(batch, 1e-9)
    assert len(scheduler.running) == 32
