"""A request as the scheduler sees it: one sequence of tokens, and how many of them have their KV. No torch here."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from trunkattn.engine.sampling.logits import LogitsRules, LogitsState
from trunkattn.engine.sampling_params import SamplingParams


class PromptTooLong(ValueError):
    """A prompt has more tokens than the model or its KV cache takes."""


@dataclass(eq=False)
class Request:
    """One sequence: a prompt and one of its `n` answers.

    There is no prefill or decode phase: in each step `num_computed_tokens` approaches `num_tokens`, by a chunk of the
    prompt or by one token.

    Attributes:
        request_id: unique among the engine's sequences.
        token_ids: prompt and generated tokens. Until `begin` the list is the request's, which nobody changes.
        num_prompt_tokens: tokens of the prompt.
        params: sampling parameters.
        max_tokens: most tokens to generate, within `max_model_len`; 0: the request ends with its prompt.
        eos_token_ids: end-of-sequence ids of the model; empty with `ignore_eos`.
        arrival: rank in the order of arrival. The last arrival is preempted first.
        index: number of the answer among the request's `n`.
        owner_id: id of the user's request.
        cache_salt: only requests of equal salt share cached prefixes.
        children: sequences that fork from this one once the prompt is computed (parallel sampling).
        num_computed_tokens: tokens whose KV is in the cache; 0 after a preemption.
        num_cached_tokens: prompt tokens found in the prefix cache at the first scheduling; None before.
        num_preemptions: times that the sequence lost its pages.
        finish_reason: "stop", "length", "abort" or "error"; None while unfinished.
        stop_reason: the stop string or stop token id that ended the answer; None for end-of-sequence.
        error: why the sequence could not go on; None unless that is its finish_reason.
        is_bad: whether the request's own parameters caused the error.
        rules: what its parameters mean for the model; None: they change no logits.
        logits_state: what they do to its logits, from `begin` on; None: nothing.
        num_prompt_logprobs: prompt tokens whose log-probabilities are known, when they are asked for.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    max_tokens: int
    eos_token_ids: frozenset[int] = frozenset()
    arrival: int = 0
    index: int = 0
    owner_id: str = ""
    cache_salt: bytes = b""
    children: list["Request"] = field(default_factory=list)
    num_computed_tokens: int = 0
    num_cached_tokens: int | None = None
    num_preemptions: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    is_bad: bool = False
    rules: LogitsRules | None = None
    logits_state: LogitsState | None = None
    num_prompt_logprobs: int = 0
    arrival_time: float = field(default_factory=time.monotonic)
    scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def needs_prompt_logits(self) -> bool:
        """Whether log-probabilities of prompt tokens are still to come. The sequence then computes its whole prompt."""
        asked = self.params.prompt_logprobs is not None and self.index == 0
        return asked and self.num_prompt_logprobs < self.num_prompt_tokens - 1

    def order(self) -> tuple[int, int]:
        """Sort key: earlier arrivals first."""
        return self.arrival, self.index

    def begin(self) -> None:
        """Gives the sequence what its answer changes, before its first token: answers that wait share all they can."""
        self.token_ids = list(self.token_ids)
        if self.rules is not None:
            self.logits_state = LogitsState(self.params, self.rules, self.token_ids, self.num_prompt_tokens)

    def append(self, token_id: int) -> None:
        """Adds a generated token; finishes the request at an end-of-sequence or stop token or at `max_tokens`."""
        self.token_ids.append(token_id)
        if self.first_token_time is None:
            self.first_token_time = time.monotonic()
        if token_id in self.params.stop_ids:
            self.finish("stop", token_id)
        elif token_id in self.eos_token_ids:
            self.finish("stop")
        elif self.num_output_tokens >= self.max_tokens:
            self.finish("length")

    def fail(self, error: str, is_bad: bool = False) -> None:
        """Ends the request because of an error, now. is_bad: the request's own parameters are the cause."""
        self.finish("error")
        self.error, self.is_bad = error, is_bad

    def finish(self, reason: str, stop_reason: str | int | None = None) -> None:
        """Marks the request as finished, now."""
        self.finish_reason = reason
        self.stop_reason = stop_reason
        self.finished_time = time.monotonic()
