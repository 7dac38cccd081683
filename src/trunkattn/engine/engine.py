"""The engine: requests in, one step at a time, answers out."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import count
from typing import Any, Protocol

import numpy as np
import torch

from trunkattn.engine.answers.answers import RequestAnswers
from trunkattn.engine.answers.token_bytes import TokenBytes
from trunkattn.engine.checked_request import CheckedRequest, RequestChecks
from trunkattn.engine.outputs import RequestOutput
from trunkattn.engine.runner import StepReads
from trunkattn.engine.sampling.logits import LogitsRules
from trunkattn.engine.sampling.sampler import (
    NO_TOKEN_WANTED,
    Sampler,
    SampleSpec,
    TokenLogprobs,
    most_likely,
    token_logprobs,
)
from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.engine.scheduling.request import Request
from trunkattn.engine.scheduling.scheduled_batch import Sample, ScheduledBatch
from trunkattn.engine.scheduling.scheduler import Scheduler
from trunkattn.engine.stats import BlockTables, EngineStats
from trunkattn.engine.suspects import Suspects
from trunkattn.engine.token_rules import ModelLimits, TokenRules, error_of
from trunkattn.kv_cache.manager import CacheManager, CacheUsage


class Runner(Protocol):
    """The part of a `ModelRunner` that the engine uses."""

    last_reads: StepReads

    def execute(self, batch: ScheduledBatch, cache: CacheManager) -> torch.Tensor:
        """Logits of the sampled chunks, then of the chunks' `prompt_positions`. The next call may overwrite them."""


class Engine:
    """Continuous batching over one model: requests are added at any time, and each step computes one batch.

    Args:
        runner: computes batches.
        scheduler: chooses batches; the engine uses its cache manager.
        limits: what requests are checked against.
        tokenizer: a transformers tokenizer; None: answers have no text.
        seed: the seed of requests without one of their own; None: their answers differ from run to run.
        limited_threads: makes the context in which each step is computed, such as `ThreadLimit().applied` on a CPU.

    Attributes:
        token_rules: what parameters mean for the model. Any thread may use it.

    Example:
        >>> engine = LLM("path/to/model").engine  # doctest: +SKIP
        >>> engine.add_request([1, 2, 3], SamplingParams(max_tokens=4))  # doctest: +SKIP
        >>> while engine.has_unfinished:  # doctest: +SKIP
        ...     outputs = engine.step()
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        limits: ModelLimits,
        tokenizer: Any | None = None,
        seed: int | None = None,
        limited_threads: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.limits = limits
        self.runner = runner
        self.scheduler = scheduler
        self._sampler = Sampler(seed)
        self._tokenizer = tokenizer
        self._token_bytes = TokenBytes(tokenizer)
        self.token_rules = TokenRules(limits, tokenizer)
        self._checks = RequestChecks(limits, self.token_rules)
        self._requests: dict[str, RequestAnswers] = {}  # unfinished ones
        self._stats = EngineStats()
        self._num_arrivals = 0
        self._suspects = Suspects()
        self._failed: set[str] = set()  # see `failed_requests`
        self._limited_threads = limited_threads

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def is_unfinished(self, request_id: str) -> bool:
        """Whether a request has been added, and has neither finished nor been aborted."""
        return request_id in self._requests

    @property
    def failed_requests(self) -> frozenset[str]:
        """The requests of the last step, if it failed and `blame` has not been called since."""
        return frozenset(self._failed)

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        return replace(self._stats, **vars(self.scheduler.stats))

    def usage(self) -> CacheUsage:
        """What the KV cache holds now, and what a contiguous reservation per sequence would hold."""
        return self.scheduler.cache.usage(self.limits.max_model_len)

    def block_tables(self) -> BlockTables:
        """The pages of the running sequences, as they are between two steps."""
        cache, running = self.scheduler.cache, self.scheduler.running
        pages = [cache.pages(sequence.request_id) for sequence in running]
        table = np.zeros((len(running), max(map(len, pages), default=0)), dtype=np.int32)
        for row, own in zip(table, pages, strict=True):
            row[: len(own)] = own
        lens = np.array([cache.num_tokens(sequence.request_id) for sequence in running], dtype=np.int32)
        return BlockTables([sequence.owner_id for sequence in running], table, lens)

    def reset_prefix_cache(self) -> None:
        """Forgets every cached prefix: later requests compute their prompts from the first token."""
        self.scheduler.cache.reset_prefix_cache()

    def check_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        name: str = "prompt",
        rules: LogitsRules | None = None,
    ) -> CheckedRequest:
        """A request that can run, with all that takes time done: any thread may call it, and `add_checked` is short.

        Args:
            prompt_token_ids: the prompt.
            params: how to sample.
            name: what messages call the prompt.
            rules: what the parameters mean, by `token_rules` or another request that has them; None: they are checked.

        Raises:
            PromptTooLong: a ValueError; the prompt has more tokens than fit.
            TypeError, ValueError: naming the argument; the request cannot run.
            ImportError: the package for structured outputs is needed and missing.
        """
        return self._checks.check(prompt_token_ids, params, name, rules)

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        request_id: str | None = None,
        cache_salt: bytes = b"",
    ) -> str:
        """Queues a request. `step` computes it.

        Args:
            prompt_token_ids: the prompt.
            params: how to sample.
            prompt: its text, for the output only.
            request_id: unique among unfinished requests; None: the engine chooses one.
            cache_salt: only requests of equal salt share cached prefixes.

        Returns:
            The request id.

        Raises:
            TypeError, ValueError: see `check_request`, or an unfinished request has this id; nothing has changed then.
        """
        return self.add_checked(self.check_request(prompt_token_ids, params), prompt, request_id, cache_salt)

    def add_checked(
        self,
        checked: CheckedRequest,
        prompt: str | None = None,
        request_id: str | None = None,
        cache_salt: bytes = b"",
        arrival_time: float | None = None,
    ) -> str:
        """Queues a request that `check_request` has made. See `add_request`.

        Args:
            checked: the request.
            prompt, request_id, cache_salt: see `add_request`.
            arrival_time: when it came, on the monotonic clock; None: now.
        """
        params, num_tokens = checked.params, len(checked.token_ids)
        arrival = self._num_arrivals
        if request_id is None:  # a user's own id may be a number, too
            request_id = next(name for name in map(str, count(arrival)) if name not in self._requests)
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id!r}: expected an id that no unfinished request has")
        room = self.limits.max_model_len - num_tokens
        most = room if params.max_tokens is None else min(params.max_tokens, room)
        sequences = [
            Request(
                request_id=f"{request_id}.{index}",
                token_ids=checked.token_ids,
                num_prompt_tokens=num_tokens,
                params=params,
                max_tokens=most if checked.has_answer else 0,
                eos_token_ids=frozenset() if params.ignore_eos else self.limits.eos_token_ids,
                arrival=arrival,
                index=index,
                owner_id=request_id,
                cache_salt=cache_salt,
                arrival_time=time.monotonic() if arrival_time is None else arrival_time,
                rules=checked.rules if params.changes_logits else None,
            )
            for index in range(params.n)
        ]
        sequences[0].children.extend(sequences[1:])
        self._requests[request_id] = RequestAnswers(request_id, prompt, sequences, self._tokenizer, self._token_bytes)
        self._num_arrivals += 1
        self.scheduler.add(sequences[0])
        return request_id

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """Ends a request and frees its pages. Returns its output so far, or None if no unfinished request has this
        id."""
        answers = self._requests.pop(request_id, None)
        if answers is None:
            return None
        for sequence in answers.sequences:
            if not sequence.is_finished:
                self.scheduler.finish(sequence, "abort")
        return answers.output()

    def step(self) -> list[RequestOutput]:
        """Computes one batch; returns the requests that got a token. After an error the requests of the batch hold no
        page and wait to be recomputed; `blame` finds the one that caused it."""
        with self._limited_threads():
            return self._step()

    def _step(self) -> list[RequestOutput]:
        started = time.monotonic()
        self._failed = set()
        batch = self.scheduler.schedule(only=self._suspects.group(self._requests))
        if not batch.chunks:
            return []
        try:
            logits = self.runner.execute(batch, self.scheduler.cache)
            token_ids, logprobs = self._sample(batch, logits)
            prompt_logprobs = self._prompt_logprobs(batch, logits)
        except BaseException:
            self._failed = {chunk.request.owner_id for chunk in batch.chunks}
            self.scheduler.roll_back(batch)
            raise
        for place, sample in enumerate(batch.samples):
            if sample.request.max_tokens == 0:  # only its prompt is asked for
                token_ids[place] = NO_TOKEN_WANTED
                sample.request.finish("length")
            elif token_ids[place] < 0:
                sample.request.fail(*error_of(sample.request, token_ids[place]))
        for request, found in prompt_logprobs:
            self._requests[request.owner_id].add_prompt_logprobs(found)
            request.num_prompt_logprobs += len(found)
        self.scheduler.update(batch, token_ids)
        outputs = self._answer(batch, token_ids, logprobs)
        self._suspects.passed(sample.request.owner_id for sample in batch.samples)
        self._count(batch, sum(token_id >= 0 for token_id in token_ids), started)
        return outputs

    def blame(self, error: Exception) -> list[RequestOutput]:
        """The output of the request that caused a step to fail, which ends with the error. It is empty while several
        requests may have caused it: the next steps then compute fewer of them at a time, and no other request.

        Args:
            error: what `step` raised.
        """
        guilty = self._suspects.failed(self._failed) if self._failed else None
        self._failed = set()
        answers = None if guilty is None else self._requests.pop(guilty, None)
        if answers is None:
            return []
        for sequence in answers.sequences:
            if not sequence.is_finished:
                self.scheduler.finish(sequence, "error")
                sequence.error = f"the engine could not compute a step: {_named(error)}"
        return [answers.output()]

    def _sample(self, batch: ScheduledBatch, logits: torch.Tensor) -> tuple[list[int], list[TokenLogprobs | None]]:
        """Samples a token for each of `batch.samples`. Returns the tokens, and log-probabilities where a request wants
        them."""
        for sample in batch.samples:
            if sample.request.num_output_tokens == 0:
                sample.request.begin()
        distinct, rows = _rows_of(batch.samples)
        if distinct != list(range(len(logits))):  # rows of prompts have no sample
            logits = logits[distinct]
        specs = [
            SampleSpec(request.params, request.index, request.num_output_tokens, request.logits_state, row)
            for request, row in zip((sample.request for sample in batch.samples), rows, strict=True)
        ]
        token_ids = self._sampler.sample(logits, specs)
        return token_ids, token_logprobs(logits, specs, token_ids)

    def _prompt_logprobs(
        self, batch: ScheduledBatch, logits: torch.Tensor
    ) -> list[tuple[Request, list[TokenLogprobs]]]:
        """Log-probabilities of the prompt tokens of this step, for each request that wants them."""
        row = sum(chunk.is_sampled for chunk in batch.chunks)
        results = []
        for chunk in batch.chunks:
            if positions := chunk.prompt_positions:
                request = chunk.request
                following = request.token_ids[positions.start + 1 : positions.stop + 1]
                counts = [request.params.prompt_logprobs or 0] * len(positions)
                results.append(
                    (request, most_likely(logits[row : row + len(positions)], following, counts, range(len(positions))))
                )
                row += len(positions)
        return results

    def _answer(
        self, batch: ScheduledBatch, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> list[RequestOutput]:
        """Hands the tokens to their requests, ends answers at stop strings, and returns the requests' outputs."""
        touched: dict[str, RequestAnswers] = {}
        for sample, token_id, logprob in zip(batch.samples, token_ids, logprobs, strict=True):
            answers = self._requests[sample.request.owner_id]
            touched[answers.request_id] = answers
            if token_id < 0:
                continue
            try:
                stop_string = answers.add(sample.request, token_id, logprob)
            except Exception as error:  # whatever a tokenizer raises: it ends only this answer
                self.scheduler.finish(sample.request, "error")
                sample.request.error = f"the engine could not decode an answer: {_named(error)}"
                continue
            if stop_string is not None:
                self.scheduler.finish(sample.request, "stop", stop_string)
        for request_id, answers in touched.items():
            if answers.is_finished:
                del self._requests[request_id]
        return [answers.output() for answers in touched.values()]

    def _count(self, batch: ScheduledBatch, num_sampled: int, started: float) -> None:
        stats, cache = self._stats, self.scheduler.cache
        stats.steps += 1
        stats.computed_tokens += sum(chunk.num_tokens for chunk in batch.chunks)
        stats.generated_tokens += num_sampled
        stats.kv_tokens_read += self.runner.last_reads.kv_tokens_read
        stats.kv_tokens_per_query += self.runner.last_reads.kv_tokens_per_query
        if stats.peak_usage is None or cache.num_pages_in_use >= stats.peak_usage.pages_held:
            stats.peak_usage = self.usage()
        seconds = time.monotonic() - started
        stats.busy_seconds += seconds
        self.scheduler.timed(batch, seconds)


def _rows_of(samples: Sequence[Sample]) -> tuple[list[int], list[int]]:
    """The rows of logits that are sampled, and for each sample the place of its row among them. The first tokens of a
    request's answers come from one row, unless functions of the user change it for each answer."""
    places: dict[tuple[int, int], int] = {}
    rows = []
    for sample in samples:
        own = sample.request.index if sample.request.params.logits_processors else 0
        rows.append(places.setdefault((sample.row, own), len(places)))
    return [row for row, _ in places], rows


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
