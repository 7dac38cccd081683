"""What a request's parameters mean for one model: checked against its vocabulary, and turned into token ids."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trunkattn.engine.forms.grammar import FormGrammar
from trunkattn.engine.forms.structured_output import GrammarState, StructuredOutputs
from trunkattn.engine.sampling.logits import LogitsRules
from trunkattn.engine.sampling.sampler import NOT_FINITE
from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.engine.scheduling.request import Request
from trunkattn.validate import check_int, shown


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
        limits: the model's.
        tokenizer: a transformers tokenizer, or None.

    Attributes:
        structured_outputs: the compiled forms of answers.
    """

    def __init__(self, limits: ModelLimits, tokenizer: Any | None) -> None:
        self._limits = limits
        self._tokenizer = tokenizer
        self.structured_outputs = StructuredOutputs(tokenizer, limits.vocab_size, limits.eos_token_ids)

    def check(self, params: SamplingParams, form: FormGrammar | None = None) -> LogitsRules:
        """What the parameters do to logits, for every answer of a request: bad words as tokens, the form compiled.

        Args:
            params: the parameters.
            form: what `StructuredOutputs.source` has made of their form; None: it is made here.

        Raises:
            TypeError, ValueError: naming the parameter: the model cannot follow the parameters.
            ImportError: the package for structured outputs is needed and missing.
        """
        if not isinstance(params, SamplingParams):
            raise TypeError(f"sampling_params={params!r}: expected SamplingParams")
        size = self._limits.vocab_size
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(params, name) is not None:
                check_int(name, getattr(params, name), 0, size)
        for name in ("stop_token_ids", "kept_special_token_ids", "allowed_token_ids", "logit_bias"):
            for token_id in getattr(params, name) or ():
                check_int(f"{name}: token id", token_id, 0, size - 1)
        for name, instead in (("stop", "stop_token_ids"), ("bad_words", "logit_bias")):
            if getattr(params, name) and self._tokenizer is None:
                raise ValueError(
                    f"{name}={shown(getattr(params, name))}: expected no {name} strings, because the model folder has "
                    f"no tokenizer; use {instead}"
                )
        eos = () if params.ignore_eos else self._limits.eos_token_ids
        allowed = np.unique(np.array(tuple(params.allowed_token_ids or ()), dtype=np.int64))
        rules = LogitsRules((*eos, *params.stop_ids), self._bad_words(params.bad_words), allowed)
        if params.structured_outputs is None:
            return rules
        grammar = self.structured_outputs.start(form or params.structured_outputs)
        self._check_first_token(grammar, params, allowed)
        return replace(rules, grammar=grammar)

    def _check_first_token(self, grammar: GrammarState, params: SamplingParams, allowed: NDArray[np.int64]) -> None:
        """Raises ValueError if a form has no first token, or none that `allowed_token_ids` leaves."""
        first = grammar.allowed(())
        if len(allowed):
            first = first & np.isin(np.arange(len(first)), allowed)
            if not first.any():
                raise ValueError(
                    f"allowed_token_ids={shown(params.allowed_token_ids)}: expected a token that structured_outputs "
                    f"can begin with; leave one of the two out"
                )
        if not first.any():
            raise ValueError("structured_outputs: expected a form that some text has; no token can begin it")

    def truncate(self, prompt_token_ids: Sequence[int], params: SamplingParams) -> Sequence[int]:
        """The prompt's last tokens, as many as `truncate_prompt_tokens` keeps."""
        most = params.truncate_prompt_tokens
        if most is None:
            return prompt_token_ids
        return prompt_token_ids[-(self._limits.max_model_len - 1 if most == -1 else most) :]

    def _bad_words(self, words: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The words' tokens at the beginning of a text and after a space.

        vLLM drops the second if their numbers differ, and then does not find " Paris", one token, for "Paris", two.
        """
        found: list[tuple[int, ...]] = []
        for word in words:
            plain, spaced = (self._encode(prefix + word.lstrip()) for prefix in ("", " "))
            if not plain or not spaced:
                raise ValueError(f"bad_words={shown(word)}: expected a word that the model's tokenizer has tokens for")
            found.append(plain)
            if spaced[-len(plain) :] != plain:
                found.append(spaced)
        return tuple(found)

    def _encode(self, text: str) -> tuple[int, ...]:
        assert self._tokenizer is not None, "check refuses words without a tokenizer"
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))


def error_of(request: Request, code: int) -> tuple[str, bool]:
    """Why a request has no next token, in one sentence, and whether its own parameters are the cause.

    Args:
        request: it.
        code: what the sampler gives in place of a token.
    """
    place = request.num_output_tokens
    if code == NOT_FINITE:
        return (
            f"The model computed NaN or infinity for output token {place}: expected finite logits; try "
            f"dtype='float32', or another checkpoint"
        ), False
    if request.logits_state is not None and request.logits_state.error is not None:
        return request.logits_state.error, True
    return (
        f"The sampling parameters forbid every token as output token {place}: expected one that is left to choose; "
        f"relax structured_outputs, allowed_token_ids, bad_words, min_tokens or logits_processors"
    ), True
