"""The outputs of a request. The names and fields are vLLM's."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """Log-probability (natural log) of a token under the unmodified logits, and its rank from 1.

    Attributes:
        decoded_token: what the token writes within a text, a leading space included; part of a character is U+FFFD.
            None without a tokenizer.
        token_bytes: the same as UTF-8, where the parts of a character are told apart.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None
    token_bytes: bytes | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One answer so far.

    Attributes:
        index: number of the answer among the request's `n`.
        text: the answer without special tokens, stop string or stop token, unless the request asks for them; "" without
            a tokenizer. Until the answer is finished, an end that could become a stop string or is part of a character
            is held back.
        token_ids: generated tokens, including the one that ended the answer.
        cumulative_logprob: sum of the tokens' log-probabilities; None unless the request has `logprobs`.
        logprobs: per token, token id -> Logprob of the most likely tokens and the sampled one; None unless the request
            has `logprobs`.
        finish_reason: "stop", "length", "abort", or "error" when no next token exists; None while unfinished.
        stop_reason: the stop string or stop token id; None for end-of-sequence and other reasons.
        error: with the finish_reason "error" why, in one sentence: the model's logits are not finite, the sampling
            parameters forbid every token, or a part of the engine failed. The tokens before it are good.
        is_bad: whether the request's own parameters caused the error: the same request would fail again.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: Sequence[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    is_bad: bool = False


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds on the monotonic clock; None while the first token, the end or the first step has not come."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None
    scheduled_time: float | None = None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token of any answer (TTFT)."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True)
class RequestOutput:
    """A request and its answers.

    Attributes:
        request_id: as returned by `add_request`.
        prompt: the text; None for a prompt given as token ids.
        prompt_token_ids: the prompt's tokens.
        outputs: `n` answers in order of their index.
        finished: whether all answers are finished.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        metrics: times of arrival, first token and end.
        prompt_logprobs: per prompt token, token id -> Logprob of the most likely tokens and the prompt's own; None for
            the first token. None unless the request has `prompt_logprobs`.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    prompt_logprobs: Sequence[dict[int, Logprob] | None] | None = None

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between tokens of the longest answer after its first (TPOT); None before two tokens."""
        start, end = self.metrics.first_token_time, self.metrics.finished_time
        steps = max(len(output.token_ids) for output in self.outputs) - 1
        return None if start is None or end is None or steps < 1 else (end - start) / steps
