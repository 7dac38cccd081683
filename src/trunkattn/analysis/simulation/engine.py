"""An engine that computes nothing: the real scheduler and cache manager say what each step would compute, and which
pages it would read.

Steps in which nothing but decodes happens are taken many at a time. The cache manager still sees every page that is
taken and every page that becomes full, step by step and in the scheduler's order, so hits and pages are those of the
real engine.
"""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.records import LoggedRequest
from trunkattn.analysis.simulation.sequences import LoggedTokens, TokenSource
from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.engine.scheduling.pages_in_flight import PagesInFlight
from trunkattn.engine.scheduling.request import Request
from trunkattn.engine.scheduling.scheduled_batch import ScheduledBatch, ScheduledChunk
from trunkattn.engine.scheduling.scheduler import Scheduler
from trunkattn.kv_cache.manager import CacheManager

MAX_STRETCH: Final = 256  # steps taken at once, so that prices and pictures keep up
_PARAMS: Final = SamplingParams(ignore_eos=True, detokenize=False)


@dataclass(frozen=True)
class EngineSize:
    """The bounds of an engine; see `EngineConfig`.

    keys_per_token: of our own engine, which shortens late chunks of long prompts; see `Scheduler`. None: chunks have as
    many tokens as a step allows, as in vLLM.
    """

    num_pages: int
    page_size: int = 16
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    scheduler_policy: str = "chunked_prefill"
    enable_prefix_caching: bool = True
    keys_per_token: int | None = None

    def fits(self, num_tokens: NDArray[np.int64], num_answers: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Whether answers can be generated at all, by numbers of tokens, of a prompt with an answer, and of answers to
        it."""
        pages = -(-num_tokens // self.page_size)
        return (pages <= self.num_pages) & (num_answers <= self.max_num_seqs)


@dataclass(eq=False)
class Job:
    """A request of the log in an engine. num_output_tokens: of each answer; num_unfinished: answers that go on."""

    logged: LoggedRequest
    num_output_tokens: int
    num_unfinished: int = 0


@dataclass(frozen=True)
class Steps:
    """Steps that come next.

    Attributes:
        decodes: sequences that decode, in each of them.
        chunks: prompt chunks; only a single step has any.
        tokens: [steps] tokens that the decodes see, summed over sequences.
        unique_tokens: [steps] the same with each shared page counted once.
    """

    decodes: list[Request]
    chunks: list[ScheduledChunk]
    tokens: NDArray[np.int64]
    unique_tokens: NDArray[np.int64]

    @property
    def decoding(self) -> int:
        """Number of sequences that decode."""
        return len(self.decodes)

    @property
    def count(self) -> int:
        """Number of steps."""
        return len(self.tokens)


class Ends(NamedTuple):
    """Sequences that generated their first token in a step, those that ended in it, and jobs whose answers all have."""

    started: list[tuple[Request, Job]]
    ended: list[Request]
    finished: list[Job]


class SimulatedEngine:
    """An engine that computes nothing.

    `schedule` and `update` together are one step, as in the engine. While nothing but decodes can happen, `decodes`
    describes the next steps, and `run` computes as many of them as the caller wants.
    """

    def __init__(self, size: EngineSize, source: TokenSource) -> None:
        self.cache = CacheManager(size.num_pages, size.page_size, size.enable_prefix_caching)
        self.scheduler = Scheduler(
            self.cache,
            size.max_num_seqs,
            size.max_num_batched_tokens,
            size.scheduler_policy,
            size.keys_per_token,
        )
        self._source = source
        self._jobs: dict[str, Job] = {}
        self._num_sequences = 0
        self._batch = ScheduledBatch()
        self._is_quiet = False

    @property
    def is_full(self) -> bool:
        """Whether a request that arrives now waits for a sequence to end."""
        return len(self.scheduler.running) >= self.scheduler.max_num_seqs

    def keys(self, requests: list[Request]) -> list[tuple[int, int]]:
        """Lines and parts of the log that running sequences come from."""
        return [self._jobs[request.owner_id].logged.key for request in requests]

    def add(self, job: Job) -> None:
        """Queues a request for which `EngineSize.fits` is true."""
        logged, first = job.logged, self._num_sequences
        self._num_sequences += logged.num_answers
        sequences = [
            Request(
                request_id=f"{number}",
                token_ids=cast(list[int], LoggedTokens(self._source, logged, number, job.num_output_tokens)),
                num_prompt_tokens=logged.num_prompt_tokens,
                params=_PARAMS,
                max_tokens=job.num_output_tokens,
                arrival=first,
                index=number - first,
                owner_id=f"{first}",
            )
            for number in range(first, self._num_sequences)
        ]
        sequences[0].children.extend(sequences[1:])
        job.num_unfinished = len(sequences)
        self._jobs[f"{first}"] = job
        self.scheduler.add(sequences[0])
        self._is_quiet = self._is_quiet and self.is_full

    def schedule(self) -> Steps:
        """The next step, which `update` completes."""
        waiting = len(self.scheduler.waiting)
        self._batch = batch = self.scheduler.schedule()
        decodes = [chunk.request for chunk in batch.chunks if _is_decode(chunk)]
        prompts = [chunk for chunk in batch.chunks if not _is_decode(chunk)]
        forks = any(sample.parent is not None for sample in batch.samples)
        is_same = len(self.scheduler.waiting) == waiting and not prompts and not forks
        self._is_quiet = is_same and (not waiting or self.is_full or self._is_blocked(batch))
        ends = _computed(decodes) + 1
        unique = self._unique_tokens(ends, self._num_pages_of(decodes))
        return Steps(decodes, prompts, np.array([ends.sum()]), np.array([unique]))

    def update(self) -> Ends:
        """Ends the step that `schedule` began."""
        batch = self._batch
        self.scheduler.update(batch, [0] * len(batch.samples))
        new = [sample.request for sample in batch.samples if sample.request.num_output_tokens == 1]
        started = [(request, self._jobs[request.owner_id]) for request in new]
        ended = [sample.request for sample in batch.samples if sample.request.is_finished]
        finished = []
        for request in ended:
            self._is_quiet = False
            job = self._jobs[request.owner_id]
            job.num_unfinished -= 1
            if job.num_unfinished == 0:
                del self._jobs[request.owner_id]
                finished.append(job)
        return Ends(started, ended, finished)

    def decodes(self) -> Steps | None:
        """The next steps, if the running sequences decode in them and nothing else happens while pages are left. None
        if something else may happen in the next step."""
        running = self.scheduler.running
        if not self._is_quiet or not running:
            return None
        count = min(MAX_STRETCH, min(request.max_tokens - request.num_output_tokens for request in running) - 1)
        if count < 1:
            return None
        seen = _computed(running)[:, None] + np.arange(1, count + 1)
        new_pages = ((seen - 1) % self.cache.page_size == 0).sum(axis=0).cumsum()
        unique = self._unique_tokens(seen, self.cache.num_pages_in_use + new_pages)
        return Steps(list(running), [], seen.sum(axis=0), unique)

    def run(self, count: int) -> int:
        """Computes up to `count` steps of `decodes`, fewer if pages run out. Returns how many."""
        running, page_size = self.scheduler.running, self.cache.page_size
        computed = _computed(running)
        phases = (-computed) % page_size  # steps until a sequence needs a page
        by_phase = [np.nonzero(phases == phase)[0].tolist() for phase in range(page_size)]
        done = 0
        while done < count:
            growing, filling = by_phase[done % page_size], by_phase[(done + 1) % page_size]
            if len(growing) > self.cache.num_free_pages:
                break
            for place in growing:
                self.cache.extend(running[place].request_id, int(computed[place]) + done + 1)
            done += 1
            for place in filling:
                self._fill_page(running[place], int(computed[place]) + done)
        for request, before in zip(running, computed.tolist(), strict=True):
            end = before + done
            _tokens(request).grow(end + 1 - len(request.token_ids))
            request.num_computed_tokens = end
        self._is_quiet = self._is_quiet and done == count
        return done

    def _fill_page(self, request: Request, num_tokens: int) -> None:
        _tokens(request).grow(num_tokens + 1 - len(request.token_ids))
        self.cache.extend(request.request_id, num_tokens)
        self.cache.commit(request.request_id, request.token_ids, num_tokens)

    def _num_pages_of(self, decodes: list[Request]) -> int:
        """Distinct pages of the sequences that decode in a step. Those of all other ones are fewer, so these are
        looked at."""
        if not decodes:
            return 0
        reading = {request.request_id for request in decodes}
        others = [each.request_id for each in self.scheduler.running if each.request_id not in reading]
        return self.cache.num_pages_in_use - self.cache.num_pages_only_of(others)

    def _unique_tokens(self, ends: NDArray[np.int64], pages: NDArray[np.int64] | int) -> Any:
        """Tokens in `pages` pages if no sequence shares its last page. ends: [sequences, ...] lengths."""
        return pages * self.cache.page_size - (-ends % self.cache.page_size).sum(axis=0)

    def _is_blocked(self, batch: ScheduledBatch) -> bool:
        """Whether the first waiting request waits until pages are freed. It was refused in this step, and the number of
        free pages only falls. If it waits for a page that is being computed, it is not blocked."""
        if self._source.knows_answers:
            return False
        in_flight = PagesInFlight(self.cache)
        for chunk in batch.chunks:
            in_flight.add(chunk)
        return not in_flight.holds_next_page_of(self.scheduler.waiting[0])


def _computed(requests: list[Request]) -> NDArray[np.int64]:
    return np.fromiter((request.num_computed_tokens for request in requests), np.int64, len(requests))


def _tokens(request: Request) -> LoggedTokens:
    return cast(LoggedTokens, request.token_ids)


def _is_decode(chunk: ScheduledChunk) -> bool:
    return chunk.num_tokens == 1 and chunk.start >= chunk.request.num_prompt_tokens
