"""A request's answers so far: text and log-probabilities of each of its sequences, assembled into outputs."""

from collections.abc import Sequence
from typing import Any

from trunkattn.engine.answers.detokenizer import NUM_CONTEXT_TOKENS, Detokenizer
from trunkattn.engine.answers.flat_logprobs import FlatLogprobs
from trunkattn.engine.answers.token_bytes import TokenBytes
from trunkattn.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from trunkattn.engine.sampling.sampler import TokenLogprobs
from trunkattn.engine.scheduling.request import Request


class Answer:
    """Text and log-probabilities of one sequence."""

    def __init__(self, sequence: Request, tokenizer: Any | None, token_bytes: TokenBytes) -> None:
        self._sequence = sequence
        self._tokenizer = tokenizer if sequence.params.detokenize else None
        self._detokenizer: Detokenizer | None = None  # from the first token on
        asked = sequence.params.logprobs is not None
        self._logprobs = FlatLogprobs[dict[int, Logprob]](token_bytes) if asked else None
        self._cumulative_logprob = 0.0
        self._output: CompletionOutput | None = None  # the newest one

    def _begin(self, tokenizer: Any) -> Detokenizer:
        params, end = self._sequence.params, self._sequence.num_prompt_tokens
        return Detokenizer(
            tokenizer,
            self._sequence.token_ids[max(0, end - NUM_CONTEXT_TOKENS) : end],
            params.stop_strings,
            skip_special_tokens=params.skip_special_tokens,
            spaces_between_special_tokens=params.spaces_between_special_tokens,
            include_stop=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
            kept_special_token_ids=tuple(params.kept_special_token_ids),
        )

    def add(self, token_id: int, logprobs: TokenLogprobs | None) -> str | None:
        """Adds the sequence's newest token; returns the stop string that it completed, if any."""
        if self._logprobs is not None and logprobs is not None:
            self._cumulative_logprob += logprobs.logprobs[0]
            self._logprobs.append(logprobs)
        if self._tokenizer is None:
            return None
        self._detokenizer = self._detokenizer or self._begin(self._tokenizer)
        ends_it = self._sequence.finish_reason == "stop"
        if not ends_it or self._sequence.params.include_stop_str_in_output:  # else it has no text
            found = self._detokenizer.append(token_id)
            if found is not None or not self._sequence.is_finished:
                return found
        return self._detokenizer.flush()  # what was held back may have a stop string, too

    def output(self) -> CompletionOutput:
        """The answer so far. One that has not changed is the same object: most of many answers have ended, or wait."""
        sequence = self._sequence
        now = sequence.num_output_tokens, sequence.finish_reason
        if self._output is not None and (len(self._output.token_ids), self._output.finish_reason) == now:
            return self._output
        if sequence.is_finished and self._detokenizer is not None:
            self._detokenizer.flush()
        has_logprobs = self._logprobs is not None
        self._output = CompletionOutput(
            index=sequence.index,
            text="" if self._detokenizer is None else self._detokenizer.text,
            token_ids=list(sequence.output_token_ids),
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
            logprobs=None if self._logprobs is None else self._logprobs.so_far(),
            finish_reason=sequence.finish_reason,
            stop_reason=sequence.stop_reason,
            error=sequence.error,
            is_bad=sequence.is_bad,
        )
        return self._output


class RequestAnswers:
    """One user request: its `n` sequences and their answers.

    Args:
        request_id: the request's id.
        prompt: its text; None for a prompt given as token ids.
        sequences: the first sequence, then the children that fork from it.
        tokenizer: a transformers tokenizer or None.
        token_bytes: what its tokens write.
    """

    def __init__(
        self,
        request_id: str,
        prompt: str | None,
        sequences: Sequence[Request],
        tokenizer: Any | None,
        token_bytes: TokenBytes,
    ) -> None:
        self.request_id = request_id
        self.sequences = tuple(sequences)
        self._prompt = prompt
        self._prompt_token_ids = sequences[0].token_ids[: sequences[0].num_prompt_tokens]
        self._answers = tuple(Answer(sequence, tokenizer, token_bytes) for sequence in sequences)
        self._prompt_logprobs: FlatLogprobs[dict[int, Logprob] | None] | None = None
        if sequences[0].params.prompt_logprobs is not None:
            self._prompt_logprobs = FlatLogprobs(token_bytes)
            self._prompt_logprobs.append(None)

    @property
    def is_finished(self) -> bool:
        return all(sequence.is_finished for sequence in self.sequences)

    def add(self, sequence: Request, token_id: int, logprobs: TokenLogprobs | None) -> str | None:
        """Adds a sequence's newest token; returns the stop string that it completed, if any."""
        return self._answers[sequence.index].add(token_id, logprobs)

    def add_prompt_logprobs(self, logprobs: Sequence[TokenLogprobs]) -> None:
        """Adds the log-probabilities of the next prompt tokens."""
        if self._prompt_logprobs is not None:
            for one in logprobs:
                self._prompt_logprobs.append(one)

    def output(self) -> RequestOutput:
        """The request's output so far."""
        first = self.sequences[0]
        started = [sequence.first_token_time for sequence in self.sequences if sequence.first_token_time is not None]
        ended = [sequence.finished_time for sequence in self.sequences if sequence.finished_time is not None]
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=self._prompt_token_ids,
            outputs=[answer.output() for answer in self._answers],
            finished=self.is_finished,
            prompt_logprobs=None if self._prompt_logprobs is None else self._prompt_logprobs.so_far(),
            num_cached_tokens=first.num_cached_tokens or 0,
            metrics=RequestMetrics(
                arrival_time=first.arrival_time,
                first_token_time=min(started, default=None),
                finished_time=max(ended) if self.is_finished else None,
                scheduled_time=first.scheduled_time,
            ),
        )
