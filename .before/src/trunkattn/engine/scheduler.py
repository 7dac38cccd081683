"""Continuous batching under a policy, preemption by recomputation and forked samples. No torch here.

A policy decides who gets tokens in a step, under one token budget: `hybrid` or `prefill_first`. Pages are taken on
demand; when they run out the latest arrival gives its own back and is computed anew later (PagedAttention, preemption
by recomputation).
"""

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from trunkattn.cache.manager import CacheManager
from trunkattn.cache.page_pool import OutOfPages, PageCopy
from trunkattn.engine.config import check_budget
from trunkattn.engine.request import Request


@dataclass(frozen=True)
class ScheduledChunk:
    """Tokens [start, start + num_tokens) of one sequence, computed in one step."""

    request: Request
    start: int
    num_tokens: int

    @property
    def is_sampled(self) -> bool:
        """Whether the step computes the logits of the sequence's next token."""
        return self.start + self.num_tokens == self.request.num_tokens


@dataclass(frozen=True)
class Sample:
    """One token to sample for `request` from logits row `row`; `parent` is the sequence it forks from, if it is new."""

    request: Request
    row: int
    parent: Request | None = None


@dataclass(frozen=True)
class Batch:
    """What one step computes.

    Attributes:
        chunks: one per sequence, oldest arrival first.
        copies: page copies (copy-on-write) to do before any KV is written.
        samples: tokens to sample; row r of the logits belongs to the r-th chunk that `is_sampled`.
    """

    chunks: list[ScheduledChunk] = field(default_factory=list)
    copies: list[PageCopy] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)


@dataclass
class SchedulerStats:
    """Counts since the start. `prefix_cache_queries` and `prefix_cache_hits` are prompt tokens looked up and found."""

    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0


class Scheduler:
    """Chooses what each step computes and keeps the cache manager in step with it.

    Args:
        cache: the page manager; the scheduler alone calls it.
        max_num_seqs: sequences that run at once.
        max_num_batched_tokens: token budget of a step, at least `max_num_seqs`.
        policy: a name in `POLICIES`.

    Every request must fit alone: `num_prompt_tokens + max_tokens` tokens within the cache's pages.

    Raises:
        TypeError, ValueError: the budget cannot hold a token of each sequence, or there is no such policy.
    """

    def __init__(
        self, cache: CacheManager, max_num_seqs: int, max_num_batched_tokens: int, policy: str = "hybrid"
    ) -> None:
        check_budget(max_num_seqs, max_num_batched_tokens)
        if policy not in POLICIES:
            raise ValueError(f"policy={policy!r}: expected one of {', '.join(POLICIES)}")
        self.cache = cache
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self._fill = POLICIES[policy]
        self.waiting: deque[Request] = deque()  # both in order of arrival
        self.running: list[Request] = []
        self.stats = SchedulerStats()

    @property
    def has_unfinished(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, request: Request) -> None:
        """Queue a request; its children follow when its prompt is computed."""
        self.waiting.append(request)

    def finish(self, request: Request, reason: str, stop_reason: str | int | None = None) -> None:
        """End a request from outside (stop string, abort) and give its pages back."""
        request.finish(reason, stop_reason)
        self._discard(request)

    def schedule(self) -> Batch:
        """The next step's batch; empty only when nothing is unfinished."""
        batch = Batch()
        self._fill(self, batch)
        sampled = (chunk.request for chunk in batch.chunks if chunk.is_sampled)
        for row, request in enumerate(sampled):
            batch.samples.append(Sample(request, row))
            batch.samples.extend(Sample(child, row, parent=request) for child in request.children)
        return batch

    def update(self, batch: Batch, token_ids: Sequence[int]) -> None:
        """Record a computed batch: commit its KV, append the sampled tokens, fork new samples, release the finished.

        Args:
            token_ids: one per `batch.samples`.
        """
        for chunk in batch.chunks:
            request = chunk.request
            request.num_computed_tokens += chunk.num_tokens
            self.cache.commit(request.request_id, request.token_ids, request.num_computed_tokens)
        for sample, token_id in zip(batch.samples, token_ids, strict=True):
            sample.request.append(token_id)
        for sample in batch.samples:
            if sample.parent is not None and not sample.request.is_finished:
                self._fork(sample.parent, sample.request)
        for sample in batch.samples:
            sample.request.children.clear()
            if sample.request.is_finished:
                self._discard(sample.request)

    def roll_back(self, batch: Batch) -> None:
        """Undo a batch that was not computed: its sequences lose their pages and wait to be computed anew."""
        for chunk in reversed(batch.chunks):
            self._preempt(chunk.request)

    def continue_running(self, batch: Batch) -> int:
        """Give each running sequence the tokens it lacks, as far as the budget goes and one at least, oldest first.

        Returns:
            The budget left.
        """
        budget = self.max_num_batched_tokens
        position = 0
        while position < len(self.running):
            request = self.running[position]
            num_later = len(self.running) - position - 1  # each keeps one token of the budget
            start = request.num_computed_tokens
            num_tokens = min(request.num_tokens - start, budget - num_later)
            if not self._extend(request, start + num_tokens, batch):
                break
            batch.chunks.append(ScheduledChunk(request, start, num_tokens))
            budget -= num_tokens
            position += 1
        return budget

    def _extend(self, request: Request, num_tokens: int, batch: Batch) -> bool:
        """Room for `num_tokens`; takes pages from the latest arrivals. False if the request itself was the latest."""
        while True:
            try:
                batch.copies.extend(self.cache.extend(request.request_id, num_tokens))
            except OutOfPages:
                victim = self.running[-1]  # never one that this step has scheduled: those stand before `request`
                self._preempt(victim)
                if victim is request:
                    return False
            else:
                return True

    def admit_waiting(self, batch: Batch, budget: int, chunked: bool) -> None:
        """Start waiting sequences in order while tokens, slots and pages last.

        Args:
            budget: most tokens.
            chunked: whether the last one may start with the part that is left of the budget. If not, only whole ones
                start, and the first of a batch though it is longer than the budget.
        """
        in_flight = PagesInFlight(self.cache.page_size)
        if self.cache.enable_prefix_caching:
            for chunk in batch.chunks:
                in_flight.add(chunk)
        deferred: deque[Request] = deque()
        while self.waiting and budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting.popleft()
            if in_flight.holds_next_page_of(request):
                deferred.append(request)
                continue
            admitted = self._admit(request, budget, chunked, batch)
            if admitted is None:
                self.waiting.appendleft(request)
                break
            budget -= admitted.num_tokens
            batch.chunks.append(admitted)
            if self.cache.enable_prefix_caching:
                in_flight.add(admitted)
        self.waiting.extendleft(reversed(deferred))

    def _admit(self, request: Request, budget: int, chunked: bool, batch: Batch) -> ScheduledChunk | None:
        """Start a request on its cached prefix; None, with nothing changed, if its tokens do not all fit now."""
        cached = self.cache.admit(request.request_id, request.token_ids)
        num_tokens = request.num_tokens - cached
        if chunked:
            num_tokens = min(num_tokens, budget)
        is_over = num_tokens > budget and bool(batch.chunks)
        if is_over or not self.cache.can_extend(request.request_id, request.num_tokens):
            self.cache.free(request.request_id)
            return None
        batch.copies.extend(self.cache.extend(request.request_id, cached + num_tokens))
        if request.num_cached_tokens is None:
            request.num_cached_tokens = cached
            self.stats.prefix_cache_queries += request.num_tokens
            self.stats.prefix_cache_hits += cached
        request.num_computed_tokens = cached
        insort(self.running, request, key=Request.order)
        return ScheduledChunk(request, cached, num_tokens)

    def _fork(self, parent: Request, child: Request) -> None:
        """Let a new sample share its parent's pages, or wait like any request when every slot is taken."""
        child.num_cached_tokens = parent.num_cached_tokens
        if len(self.running) < self.max_num_seqs:
            self.cache.fork(parent.request_id, child.request_id)
            child.num_computed_tokens = parent.num_computed_tokens
            insort(self.running, child, key=Request.order)
        else:
            insort(self.waiting, child, key=Request.order)

    def _preempt(self, request: Request) -> None:
        """Take a running sequence's pages; it waits, tokens kept, ahead of every later arrival."""
        self.running.remove(request)
        self.cache.free(request.request_id)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        self.stats.preemptions += 1
        insort(self.waiting, request, key=Request.order)

    def _discard(self, request: Request) -> None:
        """Forget a finished sequence wherever it stands."""
        if request in self.running:
            self.running.remove(request)
            self.cache.free(request.request_id)
        elif request in self.waiting:
            self.waiting.remove(request)


def hybrid(scheduler: Scheduler, batch: Batch) -> None:
    """Sarathi-Serve's stall-free batching: a token for every decode, chunks of running prompts, then new requests."""
    budget = scheduler.continue_running(batch)
    scheduler.admit_waiting(batch, budget, chunked=True)


def prefill_first(scheduler: Scheduler, batch: Batch) -> None:
    """The first vLLM's policy: whole prompts if any can start, and the decodes stall; else a token for every decode."""
    scheduler.admit_waiting(batch, scheduler.max_num_batched_tokens, chunked=False)
    if not batch.chunks:
        scheduler.continue_running(batch)


POLICIES: Final[Mapping[str, Callable[[Scheduler, Batch], None]]] = MappingProxyType(
    {"hybrid": hybrid, "prefill_first": prefill_first}
)


class PagesInFlight:
    """The page that each sequence scheduled in this step is filling: a request that shares it can wait one step.

    Without it, requests that arrive together with one long prefix would each compute it. A request only ever waits
    behind a sequence that this very step advances, so waiting ends.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._requests: dict[int, dict[tuple[int, ...], Request]] = {}  # first token of page -> its tokens -> request

    def add(self, chunk: ScheduledChunk) -> None:
        """Note the first page that the chunk computes: the pages before it are in the cache already."""
        first = chunk.start - chunk.start % self._page_size
        if first + self._page_size <= chunk.request.num_tokens:
            self._requests.setdefault(first, {})[self._page(chunk.request, first)] = chunk.request

    def holds_next_page_of(self, request: Request) -> bool:
        """Whether a scheduled sequence with the same tokens so far is filling a page that `request` could reuse."""
        for first, requests in self._requests.items():
            if first + self._page_size >= request.num_tokens:  # a request computes its last token itself
                continue
            other = requests.get(self._page(request, first))
            if other is not None and other.token_ids[:first] == request.token_ids[:first]:
                return True
        return False

    def _page(self, request: Request, first: int) -> tuple[int, ...]:
        return tuple(request.token_ids[first : first + self._page_size])
