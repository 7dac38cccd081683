"""What a request gives back; the names and fields are vLLM's."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Logprob:
    """Log-probability (natural log) of a token under the unmodified logits, its rank from 1, and its text."""

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass(frozen=True)
class CompletionOutput:
    """One answer, as far as it goes.

    Attributes:
        index: which of the `n` answers.
        text: the answer without special tokens, stop string or stop token; "" without a tokenizer. While unfinished, an
            end that could still become a stop string or part of a character is held back.
        token_ids: generated tokens, the one that ended the answer included.
        cumulative_logprob: sum over the tokens' log-probabilities; None unless `logprobs` was asked for.
        logprobs: per token, token id -> Logprob: the most likely tokens and the sampled one; None unless asked for.
        finish_reason: "stop", "length", "abort", or None while unfinished.
        stop_reason: the stop string or stop token id; None for end-of-sequence and other reasons.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """Times in seconds on the monotonic clock; the first token's and the end's are None until they are known."""

    arrival_time: float
    first_token_time: float | None
    finished_time: float | None

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from arrival to the first token of any answer (TTFT)."""
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(frozen=True)
class RequestOutput:
    """A request and its answers.

    Attributes:
        request_id: as returned by `add_request`.
        prompt: the text, or None for a prompt given as token ids.
        prompt_token_ids: the tokens that were computed.
        outputs: `n` answers in order of their index.
        finished: whether all answers are.
        num_cached_tokens: prompt tokens whose KV came from the prefix cache.
        metrics: when things happened.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics

    @property
    def time_per_output_token(self) -> float | None:
        """Mean seconds between tokens of the longest answer after its first (TPOT); None before two tokens."""
        start, end = self.metrics.first_token_time, self.metrics.finished_time
        steps = max(len(output.token_ids) for output in self.outputs) - 1
        return None if start is None or end is None or steps < 1 else (end - start) / steps
