"""The scheduler with a cache manager and no model: budgets, chunks, preemption, prefix sharing and forks."""

from collections.abc import Sequence
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trunkattn.engine.config import SCHEDULER_POLICIES
from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.engine.scheduling.pages_in_flight import PagesInFlight
from trunkattn.engine.scheduling.request import Request
from trunkattn.engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledChunk
from trunkattn.engine.scheduling.scheduler import MAX_PROMPT_LOGITS, POLICIES, ROW_TOKENS, Scheduler
from trunkattn.kv_cache.manager import CacheManager

PAGE_SIZE = 4
ARRIVALS = count()


def make_scheduler(
    num_pages: int = 100, max_num_seqs: int = 8, budget: int = 64, policy: str = "chunked_prefill"
) -> Scheduler:
    return Scheduler(CacheManager(num_pages, PAGE_SIZE), max_num_seqs, budget, policy)


def make_request(prompt: Sequence[int], max_tokens: int = 8, n: int = 1) -> Request:
    arrival = next(ARRIVALS)
    first, *children = (
        Request(
            f"{arrival}.{index}",
            list(prompt),
            len(prompt),
            SamplingParams(n=n),
            max_tokens,
            arrival=arrival,
            index=index,
        )
        for index in range(n)
    )
    first.children.extend(children)
    return first


def step(scheduler: Scheduler, token_id: int = 1) -> ScheduledBatch:
    """One step in which every sample is `token_id`."""
    batch = scheduler.schedule()
    scheduler.update(batch, [token_id] * len(batch.samples))
    scheduler.cache.check_integrity()
    return batch


def lengths(batch: ScheduledBatch) -> list[int]:
    return [chunk.num_tokens for chunk in batch.chunks]


def finish_all(scheduler: Scheduler, most_steps: int = 500) -> int:
    steps = 0
    while scheduler.has_unfinished:
        assert step(scheduler).chunks, "a step with unfinished requests computes something"
        steps += 1
        assert steps < most_steps
    assert scheduler.cache.num_pages_in_use == 0
    return steps


def test_a_prompt_is_followed_by_one_token_per_step() -> None:
    scheduler = make_scheduler()
    request = make_request(range(10), max_tokens=3)
    scheduler.add(request)
    assert [lengths(step(scheduler)) for _ in range(3)] == [[10], [1], [1]]
    assert request.finish_reason == "length" and request.output_token_ids == [1, 1, 1]
    assert not scheduler.has_unfinished and step(scheduler).chunks == []
    assert scheduler.cache.num_pages_in_use == 0


def test_a_long_prompt_is_chunked_and_the_others_decode_beside_it() -> None:
    scheduler = make_scheduler(budget=10)
    scheduler.add(make_request([7] * 3))
    step(scheduler)
    scheduler.add(make_request(range(100, 125)))
    batches = [step(scheduler) for _ in range(4)]
    assert [lengths(batch) for batch in batches] == [[1, 9], [1, 9], [1, 7], [1, 1]]
    assert [len(batch.samples) for batch in batches] == [1, 1, 2, 2]


def test_a_chunk_leaves_one_token_for_each_later_sequence() -> None:
    scheduler = make_scheduler(budget=12)
    first, second = make_request(range(100, 150)), make_request(range(8))
    scheduler.add(first)
    scheduler.add(second)
    assert lengths(step(scheduler)) == [12]
    scheduler.finish(first, "abort")
    step(scheduler)
    late = make_request(range(100, 140))
    late.arrival = -1  # as after a preemption: an early arrival with much to compute again
    scheduler.add(late)
    assert lengths(step(scheduler)) == [1, 11]
    assert lengths(step(scheduler)) == [11, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_budget_below_the_decodes_is_refused(policy: str) -> None:
    with pytest.raises(ValueError, match="max_num_batched_tokens=3: expected at least max_num_seqs=4"):
        make_scheduler(max_num_seqs=4, budget=3, policy=policy)
    scheduler = make_scheduler(max_num_seqs=3, budget=3, policy=policy)
    for value in range(5):
        scheduler.add(make_request([value]))
    assert lengths(step(scheduler)) == [1, 1, 1]
    assert len(scheduler.waiting) == 2
    finish_all(scheduler)


def test_an_unknown_policy_is_refused() -> None:
    assert tuple(POLICIES) == SCHEDULER_POLICIES
    with pytest.raises(ValueError, match="policy='fifo': expected one of chunked_prefill, prefill_first"):
        make_scheduler(policy="fifo")


def test_prompts_come_first_and_stall_the_decodes() -> None:
    scheduler = make_scheduler(budget=10, policy="prefill_first")
    first = make_request([7] * 3)
    scheduler.add(first)
    batches = [step(scheduler), step(scheduler)]
    for value in (20, 30, 40):
        scheduler.add(make_request(range(value, value + 5)))
    scheduler.add(make_request(range(100, 125)))
    batches += [step(scheduler) for _ in range(4)]
    # Two prompts fill the budget. The third leaves no room for the long one, which exceeds the budget and goes alone.
    assert [lengths(batch) for batch in batches] == [[3], [1], [5, 5], [5], [25], [1] * 5]
    assert first.num_output_tokens == 3, "no token while the prompts were computed"
    finish_all(scheduler)


def test_decodes_go_on_while_no_prompt_can_start() -> None:
    scheduler = make_scheduler(num_pages=6, max_num_seqs=2, policy="prefill_first")
    running = [make_request(range(8), max_tokens=4), make_request(range(50, 54), max_tokens=2)]
    waiting = [make_request(range(70, 86), max_tokens=2), make_request([3], max_tokens=2)]
    for request in running + waiting:
        scheduler.add(request)
    steps = []
    while scheduler.has_unfinished:
        steps.append([(chunk.request, chunk.num_tokens) for chunk in step(scheduler).chunks])
    first, second = running
    assert steps[:4] == [[(first, 8), (second, 4)], [(first, 1), (second, 1)], [(first, 1)], [(first, 1)]]
    assert steps[4:] == [[(waiting[0], 16), (waiting[1], 1)], [(waiting[0], 1), (waiting[1], 1)]]


@pytest.mark.parametrize(("budget", "most"), [(4, 4), (5, 4), (9, 4), (8, 8)])
def test_no_decode_waits_whatever_arrives(budget: int, most: int) -> None:
    scheduler = make_scheduler(num_pages=400, max_num_seqs=most, budget=budget)
    early, *others = requests = [make_request(range(100 * i, 100 * i + max(1, 30 - 9 * i))) for i in range(most)]
    for request in others:
        scheduler.add(request)
    for number in range(40):
        if number == 6:
            scheduler.add(early)  # as after a preemption: the first in order, with a whole prompt to compute
        decoding = [request for request in scheduler.running if request.num_output_tokens]
        batch = step(scheduler)
        assert sum(lengths(batch)) <= budget
        assert {(chunk.request, chunk.num_tokens) for chunk in batch.chunks} >= {(one, 1) for one in decoding}
    finish_all(scheduler)
    assert all(request.num_output_tokens == 8 for request in requests)


def test_a_shared_prefix_that_arrives_at_once_is_computed_once() -> None:
    scheduler = make_scheduler(num_pages=400, max_num_seqs=32, budget=64)
    trunk = list(range(1000, 1160))
    requests = [make_request([*trunk, 2000 + i, 2001 + i, 2002 + i]) for i in range(32)]
    for request in requests:
        scheduler.add(request)
    computed = 0
    while scheduler.waiting:
        computed += sum(lengths(step(scheduler)))
    decoded = sum(request.num_output_tokens for request in requests)
    assert computed <= len(trunk) + 32 * 3 + decoded
    assert [request.num_cached_tokens for request in requests] == [0] + 31 * [len(trunk)]
    finish_all(scheduler)


def test_a_request_waits_only_while_its_prefix_is_computed() -> None:
    scheduler = make_scheduler(budget=12)
    leader, follower, stranger = make_request(range(19)), make_request(range(20)), make_request([99] * 3)
    for request in (leader, follower, stranger):
        scheduler.add(request)
    assert lengths(step(scheduler)) == [12]
    batch = step(scheduler)  # the leader fills the last page that the follower can use; the stranger passes by
    assert [(chunk.request, chunk.start) for chunk in batch.chunks] == [(leader, 12), (stranger, 0)]
    batch = step(scheduler)
    assert [(chunk.request, chunk.start) for chunk in batch.chunks] == [(leader, 19), (stranger, 3), (follower, 16)]
    assert follower.num_cached_tokens == 16
    assert scheduler.running == [leader, follower, stranger], "in order of arrival, not of admission"
    finish_all(scheduler)


def test_equal_pages_after_different_prefixes_do_not_wait() -> None:
    scheduler = make_scheduler(budget=10)
    first, second = make_request([*[1] * 8, *[5] * 8, 6]), make_request([*[2] * 8, *[5] * 8, 6])
    scheduler.add(first)
    assert lengths(step(scheduler)) == [10]
    scheduler.add(second)
    assert lengths(step(scheduler)) == [7, 3], "the first one fills the page of fives from token 8 on"
    finish_all(scheduler)


TEXTS = st.lists(st.integers(0, 1), min_size=1, max_size=4).map(lambda pages: [one for one in pages for _ in "four"])


@given(computing=st.lists(st.tuples(TEXTS, st.integers(0, 15)), max_size=6), waiting=TEXTS)
def test_who_waits_has_begun_like_one_that_computes(computing: list[tuple[list[int], int]], waiting: list[int]) -> None:
    """The texts have few kinds of pages, so that those that begin otherwise have equal ones in the same places."""
    in_flight, request, wanted = PagesInFlight(CacheManager(100, PAGE_SIZE)), make_request(waiting), False
    for text, start in computing:
        start = min(start, len(text) - 1)
        in_flight.add(ScheduledChunk(make_request(text), start, 1))
        end = start - start % PAGE_SIZE + PAGE_SIZE
        wanted |= end < len(waiting) and text[:end] == waiting[:end]
    assert in_flight.holds_next_page_of(request) == wanted


def test_nobody_waits_for_a_page_that_holds_the_last_token() -> None:
    scheduler = make_scheduler(budget=20)
    scheduler.add(make_request(range(30)))
    step(scheduler)
    short = make_request(range(24))
    scheduler.add(short)
    batch = step(scheduler)  # the page of tokens 20 to 23 is in flight, but a request computes its last token itself
    assert [(chunk.start, chunk.num_tokens) for chunk in batch.chunks] == [(20, 10), (20, 4)]
    finish_all(scheduler)


def test_nobody_waits_for_a_page_that_is_cached() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(range(12)))
    finish_all(scheduler)
    scheduler.add(make_request(range(12)))  # computes its last page again, because it needs its last token
    scheduler.add(make_request(range(15)))
    assert [(chunk.start, chunk.num_tokens) for chunk in step(scheduler).chunks] == [(8, 4), (12, 3)]
    finish_all(scheduler)
    whole = make_request(range(12))
    whole.params = SamplingParams(prompt_logprobs=0)  # computes all of them again
    scheduler.add(whole)
    scheduler.add(make_request(range(15)))
    queries = scheduler.stats.prefix_cache_queries
    assert [(chunk.start, chunk.num_tokens) for chunk in step(scheduler).chunks] == [(0, 12), (12, 3)]
    assert scheduler.stats.prefix_cache_queries == queries + 15, "the one that computes all has looked nothing up"
    finish_all(scheduler)


def test_without_prefix_caching_nobody_waits() -> None:
    scheduler = Scheduler(CacheManager(100, PAGE_SIZE, enable_prefix_caching=False), 8, 64)
    for _ in range(3):
        scheduler.add(make_request(range(12)))
    assert lengths(step(scheduler)) == [12, 12, 12]
    finish_all(scheduler)


def test_the_latest_arrival_is_preempted_and_computed_anew() -> None:
    scheduler = make_scheduler(num_pages=5)
    old, young = make_request(range(8), max_tokens=9), make_request(range(50, 58), max_tokens=9)
    scheduler.add(old)
    scheduler.add(young)
    step(scheduler)
    batch = step(scheduler)  # each needs a third page; there is one
    assert [chunk.request for chunk in batch.chunks] == [old]
    assert list(scheduler.waiting) == [young] and young.num_preemptions == 1
    assert young.num_tokens == 9 and young.num_computed_tokens == 0
    finish_all(scheduler)
    assert [old.num_output_tokens, young.num_output_tokens] == [9, 9]
    assert scheduler.stats.preemptions >= 1


def test_a_preempted_request_finds_its_pages_again() -> None:
    scheduler = make_scheduler(num_pages=6)
    old, young = make_request(range(8), max_tokens=9), make_request(range(50, 60), max_tokens=3)
    scheduler.add(old)
    scheduler.add(young)
    step(scheduler)
    scheduler.roll_back(scheduler.schedule())
    assert scheduler.cache.num_pages_in_use == 0
    assert [chunk.start for chunk in step(scheduler).chunks] == [8, 8]
    finish_all(scheduler)


def test_a_preempted_request_goes_before_later_arrivals() -> None:
    scheduler = make_scheduler(num_pages=5)
    requests = [make_request(range(8)), make_request(range(50, 58)), make_request([3])]
    scheduler.add(requests[0])
    scheduler.add(requests[1])
    step(scheduler)
    scheduler.add(requests[2])
    assert [chunk.request for chunk in step(scheduler).chunks] == [requests[0]]
    finish_all(scheduler)


def test_samples_fork_after_the_prompt() -> None:
    scheduler = make_scheduler()
    parent = make_request(range(6), n=3)
    children = list(parent.children)
    scheduler.add(parent)
    batch = scheduler.schedule()
    assert [(sample.request, sample.row) for sample in batch.samples] == [
        (parent, 0),
        (children[0], 0),
        (children[1], 0),
    ]
    scheduler.update(batch, [11, 12, 13])
    assert [child.output_token_ids for child in children] == [[12], [13]]
    assert [child.num_cached_tokens for child in children] == [0, 0]
    assert scheduler.cache.num_pages_in_use == 2
    batch = step(scheduler)
    assert lengths(batch) == [1, 1, 1]
    assert len(batch.copies) == 2, "the last holder writes into the shared page itself"
    assert scheduler.cache.num_pages_in_use == 4
    finish_all(scheduler)


def test_samples_without_a_slot_wait_and_find_the_prompt_cached() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    parent = make_request(range(9), n=4, max_tokens=5)
    children = list(parent.children)
    scheduler.add(parent)
    step(scheduler, token_id=17)
    assert scheduler.running == [parent, children[0]] and list(scheduler.waiting) == children[1:]
    assert all(child.output_token_ids == [17] for child in children)
    finish_all(scheduler)
    assert [child.num_output_tokens for child in children] == [5, 5, 5]


def test_samples_that_end_at_their_first_token_are_never_forked() -> None:
    scheduler = make_scheduler()
    parent = make_request(range(6), n=3, max_tokens=1)
    children = list(parent.children)
    scheduler.add(parent)
    step(scheduler)
    assert not scheduler.has_unfinished and scheduler.cache.num_pages_in_use == 0
    assert [child.finish_reason for child in children] == ["length", "length"]


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
def test_a_request_can_be_finished_from_outside_at_any_time(steps: int) -> None:
    scheduler = make_scheduler(budget=8)
    request, other = make_request(range(12)), make_request(range(90, 95))
    scheduler.add(request)
    scheduler.add(other)
    for _ in range(steps):
        step(scheduler)
    scheduler.finish(request, "abort")
    scheduler.cache.check_integrity()
    finish_all(scheduler)
    assert request.finish_reason == "abort" and other.finish_reason == "length"


def test_a_rolled_back_batch_is_scheduled_again() -> None:
    scheduler = make_scheduler()
    first, second = make_request(range(6), n=2), make_request([40, 41])
    scheduler.add(first)
    scheduler.add(second)
    scheduler.roll_back(scheduler.schedule())
    assert list(scheduler.waiting) == [first, second] and scheduler.cache.num_pages_in_use == 0
    assert lengths(step(scheduler)) == [6, 2]
    finish_all(scheduler)
    assert len(first.output_token_ids) == 8


def test_only_the_requests_of_some_users_are_computed_and_the_others_wait_in_their_order() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    requests = [make_request(range(20 * place, 20 * place + 9)) for place in range(5)]
    for place, request in enumerate(requests):
        request.owner_id = str(place)
        scheduler.add(request)
    step(scheduler)
    batch = scheduler.schedule(only=frozenset("134"))
    assert [chunk.request for chunk in batch.chunks] == [requests[1], requests[3]]
    assert list(scheduler.waiting) == [requests[0], requests[2], requests[4]]
    assert [request.num_preemptions for request in requests] == [1, 0, 0, 0, 0]


@pytest.mark.parametrize("budget", [2, 16, 64, 4096])
def test_a_step_holds_few_rows_of_logits_for_tokens_of_prompts(budget: int) -> None:
    """Each prompt whose logits are asked for gets a row at least, and waits for no other's pages."""
    scheduler = make_scheduler(num_pages=1000, max_num_seqs=2, budget=budget)
    requests = [make_request(range(700), max_tokens=800) for _ in range(2)]
    for request in requests:
        request.params = SamplingParams(prompt_logprobs=0)
        scheduler.add(request)
    most = max(1, min(MAX_PROMPT_LOGITS, budget // ROW_TOKENS))
    while any(request.num_output_tokens == 0 for request in requests):
        batch = scheduler.schedule()
        rows = [len(chunk.prompt_positions) for chunk in batch.chunks]
        assert sum(rows) <= most + 1 and len(lengths(batch)) == 2 and all(lengths(batch))
        for chunk, number in zip(batch.chunks, rows, strict=True):
            chunk.request.num_prompt_logprobs += number
        scheduler.update(batch, [1] * len(batch.samples))
