"""Answers of a given form, through llguidance: which tokens may come next.

llguidance (https://github.com/guidance-ai/llguidance) compiles lazily, so that a form costs nothing before its first
token. It is imported when the first form is asked for.
"""

import json
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cached_property
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trunkattn.engine.sampling_params import StructuredOutputsParams

MAX_COMPILED = 64  # forms that stay compiled


class GrammarState:
    """How far one answer has come in its form. It follows the answer's tokens.

    Args:
        matcher: llguidance's matcher, at the beginning of the answer.
        num_tokens: tokens that the matcher knows.
        vocab_size: logits of a row; no row needs more tokens.
    """

    def __init__(self, matcher: Any, num_tokens: int, vocab_size: int) -> None:
        self._matcher = matcher
        self._num_tokens = num_tokens
        self._vocab_size = vocab_size
        self._num_consumed = 0

    def allowed(self, output_token_ids: Sequence[int]) -> NDArray[np.bool_]:
        """[vocab_size]: the tokens that may follow. End-of-sequence is among them exactly if the answer is complete.

        Raises:
            ValueError: the tokens leave the form, or the form needs more memory or time than llguidance allows.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        for token_id in output_token_ids[self._num_consumed :]:
            self._matcher.consume_token(token_id)
        self._num_consumed = len(output_token_ids)
        bits = allocate_token_bitmask(1, self._num_tokens)
        fill_next_token_bitmask(self._matcher, bits)
        if self._matcher.is_error():
            raise ValueError(f"structured_outputs: llguidance cannot go on ({self._matcher.get_error()})")
        return np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._vocab_size].astype(bool)


class StructuredOutputs:
    """Compiles forms for one tokenizer and keeps the newest ones. Several threads may use it.

    Args:
        tokenizer: a transformers tokenizer, or None.
        vocab_size: logits of a row.
        eos_token_ids: tokens that end a complete answer.
    """

    def __init__(self, tokenizer: Any | None, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._lock = Lock()
        self._compiled: OrderedDict[str, Any] = OrderedDict()  # grammar -> matcher at its beginning

    def check(self, form: StructuredOutputsParams) -> None:
        """Compiles a form.

        Raises:
            ImportError: llguidance is missing.
            ValueError: the form is bad, or the model's tokenizer cannot serve it.
        """
        self._matcher(form)

    def start(self, form: StructuredOutputsParams) -> GrammarState:
        """The form at the beginning of an answer. Raises what `check` raises."""
        return GrammarState(self._matcher(form).deep_copy(), self._tokens.vocab_size, self._vocab_size)

    def _matcher(self, form: StructuredOutputsParams) -> Any:
        library = self._library
        name, value, grammar = _grammar(form, library.LLMatcher)
        with self._lock:  # requests are checked in their callers' threads
            matcher = self._compiled.pop(grammar, None) or library.LLMatcher(self._tokens, grammar, log_level=0)
            if matcher.is_error():
                reason = " ".join(matcher.get_error().split())
                raise ValueError(f"structured_outputs: {name}={value!r}: expected a valid {name}; {reason}")
            self._compiled[grammar] = matcher  # the newest is last
            if len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
            return matcher

    @cached_property
    def _library(self) -> Any:
        try:
            import llguidance
            import llguidance.hf
        except ImportError as error:
            raise ImportError(
                'structured_outputs needs the package llguidance; pip install "trunkattn[structured]"'
            ) from error
        return llguidance

    @cached_property
    def _tokens(self) -> Any:
        """The tokenizer as llguidance sees it."""
        if self._tokenizer is None or not self._eos_token_ids:
            missing = "a tokenizer" if self._tokenizer is None else "an end-of-sequence token"
            raise ValueError(f"structured_outputs: expected a model with {missing}; this one has none")
        try:
            return self._library.hf.from_tokenizer(
                self._tokenizer, n_vocab=max(self._vocab_size, len(self._tokenizer)), eos_token=self._eos_token_ids
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ValueError(
                f"structured_outputs: expected a model with a fast tokenizer (tokenizer.json), and llguidance cannot "
                f"read this one ({error})"
            ) from error


def _grammar(form: StructuredOutputsParams, matcher: Any) -> tuple[str, Any, str]:
    """Name and value of the form that is given, and the form as llguidance's grammar."""
    if form.json is not None:
        return "json", form.json, matcher.grammar_from_json_schema(_schema(form.json))
    if form.json_object:
        return "json_object", True, matcher.grammar_from_json_schema({"type": "object"})
    if form.regex is not None:
        return "regex", form.regex, matcher.grammar_from_regex(form.regex)
    if form.choice is not None:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in form.choice)
        return "choice", form.choice, matcher.grammar_from_lark(f"start: {choices}")
    return "grammar", form.grammar, matcher.grammar_from_lark(form.grammar)


def _schema(given: Any) -> Any:
    """A schema as plain JSON values."""
    try:
        return json.loads(given if isinstance(given, str) else json.dumps(dict(given)))
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: json={given!r}: expected a JSON schema; {error}") from error
