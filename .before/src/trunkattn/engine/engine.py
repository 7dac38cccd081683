"""The engine: requests in, one step at a time, answers out."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from trunkattn.cache.manager import CacheManager, CacheUsage
from trunkattn.engine.answers import RequestAnswers
from trunkattn.engine.config import SamplingParams, check_int
from trunkattn.engine.outputs import RequestOutput
from trunkattn.engine.request import Request
from trunkattn.engine.runner import StepReads
from trunkattn.engine.sampling import Sampler, SampleSpec, TokenLogprobs, token_logprobs
from trunkattn.engine.scheduler import Batch, Scheduler
from trunkattn.engine.stats import EngineStats


class Runner(Protocol):
    """What the engine needs of a `ModelRunner`."""

    last_reads: StepReads

    def execute(self, batch: Batch, cache: CacheManager) -> torch.Tensor:
        """Logits of the chunks that are sampled; they need not outlive the next call."""


@dataclass(frozen=True)
class ModelLimits:
    """What requests are checked against.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: most tokens of a sequence, prompt and output; the cache holds that many.
        eos_token_ids: tokens that end an answer.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()


class Engine:
    """Continuous batching over one model (PagedAttention; Sarathi-Serve).

    Args:
        runner: computes batches.
        scheduler: chooses them; its cache manager is the engine's.
        limits: what requests are checked against.
        tokenizer: a transformers tokenizer; None: answers have no text.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, limits: ModelLimits, tokenizer: Any | None = None) -> None:
        self.limits = limits
        self.runner = runner
        self.scheduler = scheduler
        self._sampler = Sampler()
        self._tokenizer = tokenizer
        self._requests: dict[str, RequestAnswers] = {}  # unfinished ones
        self._stats = EngineStats()
        self._num_arrivals = 0

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    @property
    def stats(self) -> EngineStats:
        """A snapshot of the counters."""
        return replace(self._stats, **vars(self.scheduler.stats))

    def usage(self) -> CacheUsage:
        """What the KV cache holds now, and what a contiguous reservation per sequence would."""
        return self.scheduler.cache.usage(self.limits.max_model_len)

    def check_request(self, prompt_token_ids: Sequence[int], params: SamplingParams, name: str = "prompt") -> None:
        """Raises TypeError or ValueError, naming the argument (`name` for the prompt), unless the request can run."""
        limit = self.limits.max_model_len - 1
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params={params!r}: expected SamplingParams")
        if not 1 <= len(prompt_token_ids) <= limit:
            raise ValueError(
                f"{name} has {len(prompt_token_ids)} tokens: expected 1 to {limit}, one less than max_model_len, which "
                f"is what the model, the option and the KV cache's num_pages allow"
            )
        highest = self.limits.vocab_size - 1
        if not all(type(token_id) is int and 0 <= token_id <= highest for token_id in prompt_token_ids):
            for token_id in prompt_token_ids:  # one of them is bad, or an integer of another type
                check_int(f"{name}: token id", token_id, 0, highest)
        if params.logprobs is not None:
            check_int("logprobs", params.logprobs, 0, self.limits.vocab_size)
        if params.stop_strings and self._tokenizer is None:
            raise ValueError(f"stop={params.stop!r}: expected none, because the model folder has no tokenizer")

    def add_request(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        request_id: str | None = None,
    ) -> str:
        """Queue a request; nothing is computed before `step`.

        Args:
            prompt_token_ids: the prompt.
            params: how to sample.
            prompt: its text, for the output only.
            request_id: unique among unfinished requests; None: the engine's choice.

        Returns:
            The request id.

        Raises:
            TypeError, ValueError: see `check_request`; nothing has changed then.
        """
        self.check_request(prompt_token_ids, params)
        arrival = self._num_arrivals
        request_id = str(arrival) if request_id is None else request_id
        if request_id in self._requests:
            raise ValueError(f"request_id={request_id!r}: expected one that no unfinished request has")
        num_tokens = len(prompt_token_ids)
        room = self.limits.max_model_len - num_tokens
        sequences = [
            Request(
                request_id=f"{request_id}.{index}",
                token_ids=[int(token_id) for token_id in prompt_token_ids],
                num_prompt_tokens=num_tokens,
                params=params,
                max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
                eos_token_ids=frozenset() if params.ignore_eos else self.limits.eos_token_ids,
                arrival=arrival,
                index=index,
                owner_id=request_id,
            )
            for index in range(params.n)
        ]
        sequences[0].children.extend(sequences[1:])
        self._requests[request_id] = RequestAnswers(request_id, prompt, sequences, self._tokenizer)
        self._num_arrivals += 1
        self.scheduler.add(sequences[0])
        return request_id

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request and give its pages back; returns what it has, None if there is no such unfinished request."""
        answers = self._requests.pop(request_id, None)
        if answers is None:
            return None
        for sequence in answers.sequences:
            if not sequence.is_finished:
                self.scheduler.finish(sequence, "abort")
        return answers.output()

    def step(self) -> list[RequestOutput]:
        """Compute one batch; returns the requests that got a token. After an error they all wait and hold no page."""
        started = time.monotonic()
        batch = self.scheduler.schedule()
        if not batch.chunks:
            return []
        try:
            logits = self.runner.execute(batch, self.scheduler.cache)
            token_ids, logprobs = self._sample(batch, logits)
        except BaseException:
            self.scheduler.roll_back(batch)
            raise
        self.scheduler.update(batch, token_ids)
        outputs = self._answer(batch, token_ids, logprobs)
        self._count(batch, started)
        return outputs

    def _sample(self, batch: Batch, logits: torch.Tensor) -> tuple[list[int], list[TokenLogprobs | None]]:
        """A token and perhaps log-probabilities for each of `batch.samples`."""
        rows = [sample.row for sample in batch.samples]
        if len(rows) != len(logits):  # new samples draw from their parent's row
            logits = logits[rows]
        specs = [
            SampleSpec(sample.request.params, sample.request.index, sample.request.num_output_tokens)
            for sample in batch.samples
        ]
        token_ids = self._sampler.sample(logits, specs)
        return token_ids, token_logprobs(logits, specs, token_ids)

    def _answer(
        self, batch: Batch, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs | None]
    ) -> list[RequestOutput]:
        """Hand the tokens to their requests, stop at stop strings, and report every request that got one."""
        touched: dict[str, RequestAnswers] = {}
        for sample, token_id, logprob in zip(batch.samples, token_ids, logprobs, strict=True):
            answers = self._requests[sample.request.owner_id]
            touched[answers.request_id] = answers
            stop_string = answers.add(sample.request, token_id, logprob)
            if stop_string is not None:
                self.scheduler.finish(sample.request, "stop", stop_string)
        for request_id, answers in touched.items():
            if answers.is_finished:
                del self._requests[request_id]
        return [answers.output() for answers in touched.values()]

    def _count(self, batch: Batch, started: float) -> None:
        stats, cache = self._stats, self.scheduler.cache
        stats.steps += 1
        stats.computed_tokens += sum(chunk.num_tokens for chunk in batch.chunks)
        stats.generated_tokens += len(batch.samples)
        stats.kv_tokens_read += self.runner.last_reads.kv_tokens_read
        stats.kv_tokens_per_query += self.runner.last_reads.kv_tokens_per_query
        if stats.peak_usage is None or cache.num_pages_in_use >= stats.peak_usage.pages_held:
            stats.peak_usage = self.usage()
        stats.busy_seconds += time.monotonic() - started
