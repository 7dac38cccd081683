"""Continuous batching under a policy, preemption by recomputation, and forked samples. No torch here.

A policy, `chunked_prefill` or `prefill_first`, shares out the tokens of a step under one budget. Pages are allocated on
demand. When they run out, the latest arrival gives its pages back and is recomputed later (PagedAttention,
https://arxiv.org/abs/2309.06180, §4.5).
"""

import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from trunkattn.engine.config import check_budget, check_scheduler_policy
from trunkattn.engine.scheduling.pages_in_flight import PagesInFlight
from trunkattn.engine.scheduling.request import Request
from trunkattn.engine.scheduling.scheduled_batch import Sample, ScheduledBatch, ScheduledChunk
from trunkattn.engine.scheduling.step_work import StepBudget, StepPace, WorkPrices
from trunkattn.kv_cache.manager import CacheManager
from trunkattn.kv_cache.page_pool import OutOfPages

MAX_PROMPT_LOGITS: Final = 512  # rows of a step for tokens of prompts; each row is as long as the vocabulary
ROW_TOKENS: Final = 4  # of the budget of a step: what such a row costs
MAX_LOOKED_UP: Final = 1 << 16  # tokens of waiting sequences that a step compares with the prefix cache


@dataclass
class SchedulerStats:
    """Counts since the start.

    Attributes:
        preemptions: times that a sequence lost its pages.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up in the prefix cache, and found there.
    """

    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


class Scheduler:
    """Chooses what each step computes and keeps the cache manager in step with it.

    Each request must fit by itself: the cache has pages for `num_prompt_tokens + max_tokens` tokens.

    Args:
        cache: the page manager. Only the scheduler changes it.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: token budget of a step, at least `max_num_seqs`.
        policy: see `EngineConfig.scheduler_policy`.
        keys_per_token: see `WorkPrices.of_keys`; with it `chunked_prefill` shortens chunks of long prompts, so that no
            step takes longer than one whose budget is full of first tokens.
        max_step_seconds: the time that a step of `chunked_prefill` should take at most, by the steps that were `timed`:
            while it takes longer, prompts get fewer tokens, and no more sequences start. None: any.

    Raises:
        TypeError, ValueError: the budget has less than one token per sequence, or the policy is unknown.
    """

    def __init__(
        self,
        cache: CacheManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        policy: str = "chunked_prefill",
        keys_per_token: int | None = None,
        max_step_seconds: float | None = None,
    ) -> None:
        check_budget(max_num_seqs, max_num_batched_tokens)
        policy = check_scheduler_policy("policy", policy)
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._max_prompt_logits = min(MAX_PROMPT_LOGITS, max_num_batched_tokens // ROW_TOKENS)
        self._fill = POLICIES[policy]
        self._prices = WorkPrices.of_keys(keys_per_token)
        self._pace = StepPace(self._prices.of(0, max_num_batched_tokens), max_step_seconds)
        self.waiting: deque[Request] = deque()  # both in order of arrival
        self.running: list[Request] = []
        self._running_work = 0  # of the next tokens of `running`, or more if some have ended
        self.stats = SchedulerStats()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queues a request. Its children follow when its prompt is computed."""
        self.waiting.append(request)

    def finish(self, request: Request, reason: str, stop_reason: str | int | None = None) -> None:
        """Ends a request from outside (stop string, abort) and frees its pages."""
        request.finish(reason, stop_reason)
        self._discard(request)

    def schedule(self, only: frozenset[str] | None = None) -> ScheduledBatch:
        """The next step's batch. It is empty only if every request has finished.

        Args:
            only: the only users' requests that are scheduled; all others wait, without pages. None: all may be.
        """
        batch = ScheduledBatch()
        if only is None:
            self._fill(self, batch)
        else:
            for request in [request for request in reversed(self.running) if request.owner_id not in only]:
                self._preempt(request)
            held = [request for request in self.waiting if request.owner_id not in only]
            self.waiting = deque(request for request in self.waiting if request.owner_id in only)
            self._fill(self, batch)
            self.waiting = deque(sorted([*self.waiting, *held], key=Request.order))
        sampled = (chunk.request for chunk in batch.chunks if chunk.is_sampled)
        for row, request in enumerate(sampled):
            batch.samples.append(Sample(request, row))
            batch.samples.extend(Sample(child, row, parent=request) for child in request.children)
        return batch

    def update(self, batch: ScheduledBatch, token_ids: Sequence[int]) -> None:
        """Records a computed batch: commits its KV, appends the sampled tokens, forks new samples, and frees the pages
        of finished sequences.

        Args:
            token_ids: one per `batch.samples`. That of a request which has failed is not used.
        """
        for chunk in batch.chunks:
            request = chunk.request
            request.num_computed_tokens += chunk.num_tokens
            self.cache.commit(request.request_id, request.token_ids, request.num_computed_tokens)
        for sample, token_id in zip(batch.samples, token_ids, strict=True):
            if not sample.request.is_finished:
                sample.request.append(token_id)
        for sample in batch.samples:
            if sample.parent is not None and not sample.request.is_finished:
                self._fork(sample.parent, sample.request)
        for sample in batch.samples:
            sample.request.children.clear()
            if sample.request.is_finished:
                self._discard(sample.request)

    def timed(self, batch: ScheduledBatch, seconds: float) -> None:
        """Takes note of the time that a computed batch took."""
        self._pace.timed(sum(self._prices.of(chunk.start, chunk.num_tokens) for chunk in batch.chunks), seconds)

    def roll_back(self, batch: ScheduledBatch) -> None:
        """Undoes a batch that was not computed: its sequences lose their pages and wait to be recomputed."""
        for chunk in reversed(batch.chunks):
            self._preempt(chunk.request)

    def continue_running(self, batch: ScheduledBatch) -> StepBudget:
        """Schedules the missing tokens of each running sequence, oldest first, within the budget.

        Each sequence gets at least one token. Returns the rest of the budget.
        """
        prices = self._prices
        budget = StepBudget(prices, self.max_num_batched_tokens, self._pace.work)
        self._running_work = sum(prices.of(request.num_computed_tokens, 1) for request in self.running)
        budget.reserve(self._running_work)
        position = 0
        while position < len(self.running):
            request = self.running[position]
            num_later = len(self.running) - position - 1  # one token of the budget is reserved for each of them
            start = request.num_computed_tokens
            most = 1 + prices.most_tokens(start + 1, budget.work)  # the work of its first token is reserved too
            num_tokens = min(request.num_tokens - start, budget.tokens - num_later, most)
            num_tokens = self._within_logits(request, num_tokens, batch)
            if not self._extend(request, start + num_tokens, batch):
                break
            batch.chunks.append(ScheduledChunk(request, start, num_tokens))
            budget.tokens -= 1
            budget.take(start + 1, num_tokens - 1)
            position += 1
        return budget

    def _extend(self, request: Request, num_tokens: int, batch: ScheduledBatch) -> bool:
        """Makes room for `num_tokens`, if necessary by preempting the latest arrivals.

        Returns False if it had to preempt the request itself.
        """
        while True:
            try:
                batch.copies.extend(self.cache.extend(request.request_id, num_tokens))
            except OutOfPages:
                victim = self.running[-1]  # this step has not scheduled it: scheduled ones come before `request`
                self._preempt(victim)
                if victim is request:
                    return False
            else:
                return True

    def admit_waiting(self, batch: ScheduledBatch, budget: StepBudget, chunked: bool) -> None:
        """Starts waiting sequences in order until budget, sequence slots or pages run out.

        Args:
            batch: receives their chunks.
            budget: what is left of the step's.
            chunked: the last sequence may start with only the rest of the budget. Otherwise only whole ones start, and
                the first of a batch may exceed the budget. Either way a prompt whose every logits are asked for may
                start with a part.
        """
        in_flight = PagesInFlight(self.cache)
        if self.cache.enable_prefix_caching:
            for chunk in batch.chunks:
                in_flight.add(chunk)
        deferred: deque[Request] = deque()
        looked_up = 0
        while self.waiting and not budget.is_spent and self._has_room():
            if looked_up >= MAX_LOOKED_UP:
                break
            request = self.waiting.popleft()
            looked_up += request.num_tokens
            if not request.needs_prompt_logits and in_flight.holds_next_page_of(request):
                deferred.append(request)
                continue
            admitted = self._admit(request, budget, chunked, batch)
            if admitted is None:
                self.waiting.appendleft(request)
                break
            batch.chunks.append(admitted)
            if self.cache.enable_prefix_caching:
                in_flight.add(admitted)
        self.waiting.extendleft(reversed(deferred))

    def _admit(
        self, request: Request, budget: StepBudget, chunked: bool, batch: ScheduledBatch
    ) -> ScheduledChunk | None:
        """Starts a request on its cached prefix; None, with nothing changed, if the cache cannot hold all its tokens
        now."""
        reuse = not request.needs_prompt_logits
        cached = self.cache.admit(request.request_id, request.token_ids, request.cache_salt, reuse)
        num_tokens = request.num_tokens - cached
        if chunked:
            most = max(1, budget.prices.most_tokens(cached, budget.work))
            num_tokens = min(num_tokens, budget.tokens, most)
        num_tokens = self._within_logits(request, num_tokens, batch)
        is_over = num_tokens > budget.tokens and bool(batch.chunks)
        if is_over or not self.cache.can_extend(request.request_id, request.num_tokens):
            self.cache.free(request.request_id)
            return None
        batch.copies.extend(self.cache.extend(request.request_id, cached + num_tokens))
        if request.num_cached_tokens is None:
            request.num_cached_tokens, request.scheduled_time = cached, time.monotonic()
            self.stats.prefix_cache_queries += request.num_tokens if reuse else 0
            self.stats.prefix_cache_hits += cached
        request.num_computed_tokens = cached
        budget.take(cached, num_tokens)
        self._run(request)
        return ScheduledChunk(request, cached, num_tokens)

    def _within_logits(self, request: Request, num_tokens: int, batch: ScheduledBatch) -> int:
        """Tokens of a chunk, fewer if it needs logits at every token of the prompt, because a step holds a limited
        number of rows of logits."""
        if not request.needs_prompt_logits:
            return num_tokens
        used = sum(len(chunk.prompt_positions) for chunk in batch.chunks)
        return min(num_tokens, max(1, self._max_prompt_logits - used))

    def _fork(self, parent: Request, child: Request) -> None:
        """Lets a new sample share its parent's pages, or wait like any request if no more sequences may run."""
        child.num_cached_tokens = parent.num_cached_tokens
        if self._has_room():
            self.cache.fork(parent.request_id, child.request_id)
            child.num_computed_tokens = parent.num_computed_tokens
            self._run(child)
        else:
            insort(self.waiting, child, key=Request.order)

    def _has_room(self) -> bool:
        """Whether one more sequence may run: one always may."""
        return not self.running or (len(self.running) < self.max_num_seqs and self._pace.has_room(self._running_work))

    def _run(self, request: Request) -> None:
        """Puts a sequence among those that run."""
        insort(self.running, request, key=Request.order)
        self._running_work += self._prices.of(request.num_computed_tokens, 1)

    def _preempt(self, request: Request) -> None:
        """Frees a running sequence's pages. It keeps its tokens and waits ahead of every later arrival."""
        self.running.remove(request)
        self.cache.free(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.stats.preemptions += 1
        insort(self.waiting, request, key=Request.order)

    def _discard(self, request: Request) -> None:
        """Forgets a finished sequence, running or waiting."""
        if request in self.running:
            self.running.remove(request)
            self.cache.free(request.request_id)
        elif request in self.waiting:
            self.waiting.remove(request)


def chunked_prefill(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    """A token for every decode, then chunks of running prompts, then new requests.

    Source: Sarathi-Serve's stall-free batching, https://arxiv.org/abs/2403.02310, §4.2.
    """
    budget = scheduler.continue_running(batch)
    scheduler.admit_waiting(batch, budget, chunked=True)


def prefill_first(scheduler: Scheduler, batch: ScheduledBatch) -> None:
    """Whole prompts if any can start, while the decodes stall; otherwise a token for every decode.

    Source: the first vLLM, https://arxiv.org/abs/2309.06180.
    """
    scheduler.admit_waiting(batch, StepBudget(WorkPrices(), scheduler.max_num_batched_tokens), chunked=False)
    if not batch.chunks:
        scheduler.continue_running(batch)


POLICIES: Final[Mapping[str, Callable[[Scheduler, ScheduledBatch], None]]] = MappingProxyType(
    {"chunked_prefill": chunked_prefill, "prefill_first": prefill_first}
)
