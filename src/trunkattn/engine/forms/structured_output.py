"""Answers of a given form, through llguidance: which tokens may come next.

llguidance (https://github.com/guidance-ai/llguidance) compiles lazily, so that a form costs little before its first
token. It is imported when the first form is asked for.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from importlib import import_module
from threading import Lock
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from trunkattn.engine.forms.grammar import FormGrammar, grammar_of, library, reason_of
from trunkattn.engine.forms.limits import FormLimits
from trunkattn.engine.sampling_params import StructuredOutputsParams
from trunkattn.interrupts import interruptible

# What a compiled form may hold, estimated from its text: llguidance does not say.
_BASE_BYTES: Final = 64 << 10
_BYTES_PER_CHARACTER: Final = 32
_REMEMBERED_FAILURES: Final = 256


def digest(grammar: str) -> bytes:
    """What a grammar, which may be long, is remembered by."""
    return hashlib.sha256(grammar.encode("utf-8", "surrogatepass")).digest()


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

    def copy(self) -> "GrammarState":
        """The state of another answer that has come as far."""
        copy = GrammarState(self._matcher.deep_copy(), self._num_tokens, self._vocab_size)
        copy._num_consumed = self._num_consumed
        return copy

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
            raise ValueError(
                f"structured_outputs: llguidance cannot go on ({reason_of(self._matcher)}); ask for a simpler form"
            )
        return np.unpackbits(bits.view(np.uint8), bitorder="little")[: self._vocab_size].astype(bool)


class StructuredOutputs:
    """Compiles forms for one tokenizer and keeps the newest ones. Several threads may use it, and none of them waits
    for what another one compiles.

    Args:
        tokenizer: a transformers tokenizer, or None.
        vocab_size: logits of a row.
        eos_token_ids: tokens that end a complete answer.
        limits: of each form, and of the memory for all of them.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        vocab_size: int,
        eos_token_ids: Iterable[int],
        limits: FormLimits | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = sorted(eos_token_ids)
        self._limits = limits or FormLimits()
        self._lock = Lock()  # of the two dictionaries; nothing is compiled under it
        self._compiled: OrderedDict[str, Any] = OrderedDict()  # grammar -> matcher at its beginning; the newest is last
        self._weights: dict[str, int] = {}  # grammar -> bytes, where somebody has measured them
        self._failed: OrderedDict[bytes, str] = OrderedDict()  # digest of a grammar -> what is wrong with it

    def warm_up(self) -> None:
        """Lets llguidance read the vocabulary now. The first form does it otherwise, and no other thread runs Python
        meanwhile. Does nothing without llguidance, or if it cannot read the tokenizer: `start` says so."""
        with suppress(Exception):
            library()
            _ = self._tokens, self._tokenizer_json

    def start(self, form: StructuredOutputsParams | FormGrammar) -> GrammarState:
        """The form at the beginning of an answer, compiled unless it is kept.

        Args:
            form: it, or what `source` has made of it.

        Raises:
            ImportError: llguidance is missing.
            ValueError: the form is bad or over a limit, or the model's tokenizer cannot serve it.
        """
        found = form if isinstance(form, FormGrammar) else grammar_of(form, self._limits)
        grammar = found.grammar
        with self._lock:
            matcher, failure = self._compiled.get(grammar), self._failed.get(digest(grammar))
        if matcher is None and failure is None:
            compiler, tokens = library().LLMatcher, self._tokens
            matcher = interruptible(lambda: compiler(tokens, grammar, log_level=0))
            if matcher.is_error():
                matcher, failure = None, reason_of(matcher)
        if matcher is None:
            self._remember(self._failed, digest(grammar), failure)
            raise ValueError(found.refusal(failure))
        state = GrammarState(matcher.deep_copy(), self._tokens.vocab_size, self._vocab_size)
        self._remember(self._compiled, grammar, matcher)
        return state

    def source(self, form: StructuredOutputsParams) -> FormGrammar:
        """What a form is compiled from. Raises what `start` raises."""
        found = grammar_of(form, self._limits)
        with self._lock:
            failure = self._failed.get(digest(found.grammar))
            if failure is not None:
                raise ValueError(found.refusal(failure))
        return found

    def has_compiled(self, grammar: str) -> bool:
        """Whether the compiled form of a grammar is kept."""
        with self._lock:
            return grammar in self._compiled

    def refuse(self, grammar: str, reason: str) -> None:
        """Remembers that a grammar cannot be used, so that it is not compiled again."""
        self._remember(self._failed, digest(grammar), reason)

    def weigh(self, grammar: str, num_bytes: int) -> None:
        """Notes what a compiled form takes, which its text may not show."""
        with self._lock:
            self._weights[grammar] = num_bytes

    def tokenizer_source(self) -> tuple[str, int, list[int]]:
        """What another process needs for llguidance's tokenizer: its JSON, the number of tokens, and the tokens that
        end an answer. Raises what `start` raises."""
        self._check_tokenizer()
        return self._tokenizer_json, self._num_vocab, self._eos_token_ids

    def _remember(self, among: OrderedDict[Any, Any], key: Any, what: Any) -> None:
        """Puts an entry in as the newest, and drops the oldest ones that do not fit any more."""
        with self._lock:
            among[key] = what
            among.move_to_end(key)
            while len(self._failed) > _REMEMBERED_FAILURES:
                self._failed.popitem(last=False)
            while len(self._compiled) > 1 and sum(map(self._bytes_of, self._compiled)) > self._limits.cache_bytes:
                self._compiled.popitem(last=False)
            self._weights = {one: size for one, size in self._weights.items() if one in self._compiled}

    def _bytes_of(self, grammar: str) -> int:
        return max(self._weights.get(grammar, 0), _BASE_BYTES + _BYTES_PER_CHARACTER * len(grammar))

    @property
    def _num_vocab(self) -> int:
        assert self._tokenizer is not None
        return max(self._vocab_size, len(self._tokenizer))

    def _check_tokenizer(self) -> None:
        if self._tokenizer is None or not self._eos_token_ids:
            missing = "a tokenizer" if self._tokenizer is None else "an end-of-sequence token"
            raise ValueError(f"structured_outputs: expected a model with {missing}; this one has none")

    @cached_property
    def _tokenizer_json(self) -> str:
        fast = getattr(self._tokenizer, "backend_tokenizer", None)
        if fast is None:
            raise _unread(f"{type(self._tokenizer).__name__} is one in Python")
        text: str = fast.to_str()
        return text

    @cached_property
    def _tokens(self) -> Any:
        """The tokenizer as llguidance sees it."""
        self._check_tokenizer()
        try:
            return import_module("llguidance.hf").from_tokenizer(
                self._tokenizer, n_vocab=self._num_vocab, eos_token=self._eos_token_ids
            )
        except (ValueError, TypeError, NotImplementedError) as error:
            raise _unread(str(error)) from error


def _unread(reason: str) -> ValueError:
    """The error of a tokenizer that llguidance cannot read."""
    return ValueError(
        f"structured_outputs: expected a model with a fast tokenizer (tokenizer.json), and llguidance cannot read this "
        f"one ({reason})"
    )
