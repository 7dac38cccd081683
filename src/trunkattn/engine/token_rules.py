"""What a request's parameters mean for one model: checked against its vocabulary, and turned into token ids."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trunkattn.engine.logits import BannedTokens, LogitsState
from trunkattn.engine.request import Request
from trunkattn.engine.sampling import NOT_FINITE
from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.engine.structured_output import StructuredOutputs
from trunkattn.validate import check_int


@dataclass(frozen=True)
class ModelLimits:
    """The limits that requests are checked against.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: most tokens of a sequence, prompt and output. The cache can hold one such sequence.
        eos_token_ids: tokens that end an answer.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int] = frozenset()


class TokenRules:
    """Parameters in terms of one model.

    Args:
        limits: of the model.
        tokenizer: a transformers tokenizer, or None.
    """

    def __init__(self, limits: ModelLimits, tokenizer: Any | None) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self._structured_outputs = StructuredOutputs(tokenizer, limits.vocab_size, limits.eos_token_ids)

    def check(self, params: SamplingParams) -> None:
        """Raises TypeError or ValueError, naming the parameter, unless the model can follow the parameters.

        Raises ImportError if the package for structured outputs is needed and missing.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params={params!r}: expected SamplingParams")
        size = self._limits.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                check_int(name, getattr(params, name), 0, size)
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                check_int(f"{name}: token id", token_id, 0, size - 1)
        for name, instead in (("stop", "stop_token_ids"), ("bad_words", "logit_bias")):
            if getattr(params, name) and self._tokenizer is None:
                raise ValueError(
                    f"{name}={getattr(params, name)!r}: expected no {name} strings, because the model folder has no "
                    f"tokenizer; use {instead}"
                )
        if params.structured_outputs is not None:
            self._structured_outputs.check(params.structured_outputs)

    def truncate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """The prompt's last tokens, as many as `truncate_prompt_tokens` keeps."""
        most = params.truncate_prompt_tokens
        if most is None:
            return prompt_token_ids
        return prompt_token_ids[-(self._limits.max_model_len - 1 if most == -1 else most) :]

    def logits_state(self, params: SamplingParams, token_ids: list[int], num_prompt_tokens: int) -> LogitsState | None:
        """What the parameters do to the logits of a new sequence; None: nothing.

        Args:
            params: checked parameters.
            token_ids: the sequence's own list, with the prompt.
            num_prompt_tokens: tokens of the prompt.
        """
        if not params.changes_logits:
            return None
        eos = () if params.ignore_eos else self._limits.eos_token_ids
        banned = BannedTokens((*eos, *params.stop_ids), self._bad_words(params.bad_words))
        form = params.structured_outputs
        grammar = None if form is None else self._structured_outputs.start(form)
        return LogitsState(params, banned, token_ids, num_prompt_tokens, grammar)

    def _bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The words' tokens at the beginning of a text and after a space.

        vLLM drops the second if their numbers differ, and then does not find " Paris", one token, for "Paris", two.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            plain, spaced = (self._encode(prefix + word.lstrip()) for prefix in ("", " "))
            found.append(plain)
            if spaced[-len(plain) :] != plain:
                found.append(spaced)
        return tuple(found)

    def _encode(self, text: str) -> tuple[int, ...]:
        assert self._tokenizer is not None, "check refuses words without a tokenizer"
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def error_of(request: Request, code: int) -> str:
    """Why a request has no next token, in one sentence.

    Args:
        request: it.
        code: what the sampler gives in place of a token.
    """
    place = request.num_output_tokens
    if code == NOT_FINITE:
        return (
            f"logits of output token {place}: expected finite numbers, and the model computed NaN or infinity; try "
            f"dtype='float32', or another checkpoint"
        )
    if request.logits_state is not None and request.logits_state.error is not None:
        return request.logits_state.error
    return (
        f"logits of output token {place}: expected a token that is left to choose, and the sampling parameters forbid "
        f"all of them; relax structured_outputs, allowed_token_ids, bad_words, min_tokens or logits_processors"
    )
