"""What a request has answered so far: text and log-probabilities of each of its sequences, assembled into outputs."""

from collections.abc import Sequence
from typing import Any

from trunkattn.engine.detokenizer import Detokenizer
from trunkattn.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from trunkattn.engine.request import Request
from trunkattn.engine.sampling import TokenLogprobs


class Answer:
    """Text and log-probabilities of one sequence."""

    def __init__(self, sequence: Request, tokenizer: Any | None) -> None:
        prompt = sequence.token_ids[: sequence.num_prompt_tokens]
        self._sequence = sequence
        self._tokenizer = tokenizer
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt, sequence.params.stop_strings)
        self._logprobs: list[dict[int, Logprob]] | None = None if sequence.params.logprobs is None else []
        self._cumulative_logprob = 0.0

    def add(self, token_id: int, logprobs: TokenLogprobs | None) -> str | None:
        """Take the sequence's newest token; returns the stop string that it completed."""
        if self._logprobs is not None and logprobs is not None:
            self._cumulative_logprob += logprobs.logprobs[0]
            self._logprobs.append(self._entry(logprobs))
        if self._detokenizer is None or self._sequence.finish_reason == "stop":  # the token that ends it is not text
            return None
        return self._detokenizer.append(token_id)

    def output(self) -> CompletionOutput:
        """The answer as far as it goes."""
        sequence = self._sequence
        if sequence.is_finished and self._detokenizer is not None:
            self._detokenizer.flush()
        has_logprobs = self._logprobs is not None
        return CompletionOutput(
            index=sequence.index,
            text="" if self._detokenizer is None else self._detokenizer.text,
            token_ids=list(sequence.output_token_ids),
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
            logprobs=None if self._logprobs is None else list(self._logprobs),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
        )

    def _entry(self, logprobs: TokenLogprobs) -> dict[int, Logprob]:
        entry: dict[int, Logprob] = {}
        for token_id, value, rank in zip(logprobs.token_ids, logprobs.logprobs, logprobs.ranks, strict=True):
            if token_id not in entry:
                text = None if self._tokenizer is None else self._tokenizer.decode([token_id])
                entry[token_id] = Logprob(value, rank, text)
        return entry


class RequestAnswers:
    """One user request: its `n` sequences and their answers.

    Args:
        request_id: the user's handle.
        prompt: its text, None if it came as token ids.
        sequences: the first one and the children to fork from it.
        tokenizer: a transformers tokenizer or None.
    """

    def __init__(
        self, request_id: str, prompt: str | None, sequences: Sequence[Request], tokenizer: Any | None
    ) -> None:
        self.request_id = request_id
        self.sequences = tuple(sequences)
        self._prompt = prompt
        self._prompt_token_ids = sequences[0].token_ids[: sequences[0].num_prompt_tokens]
        self._answers = tuple(Answer(sequence, tokenizer) for sequence in sequences)

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    def add(self, sequence: Request, token_id: int, logprobs: TokenLogprobs | None) -> str | None:
        """Take a sequence's newest token; returns the stop string that it completed."""
        return self._answers[sequence.index].add(token_id, logprobs)

    def output(self) -> RequestOutput:
        """The request as far as it goes."""
        first = self.sequences[0]
        started = [sequence.first_token_time for sequence in self.sequences if sequence.first_token_time is not None]
        ended = [sequence.finished_time for sequence in self.sequences if sequence.finished_time is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[answer.output() for answer in self._answers],
            finished=self.is_finished,
            num_cached_tokens=first.num_cached_tokens or 0,
            metrics=RequestMetrics(
                arrival_time=first.arrival_time,
                first_token_time=min(started, default=None),
                finished_time=max(ended) if self.is_finished else None,
            ),
        )
