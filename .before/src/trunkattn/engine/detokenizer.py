"""Text of an answer as its tokens arrive: whole characters only, up to the first stop string."""

from collections.abc import Sequence
from typing import Protocol

NUM_CONTEXT_TOKENS = 6  # tokens of the prompt decoded along, so that a leading space is not lost
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # what a tokenizer decodes part of a character to


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that is used here."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ...) -> str: ...


class Detokenizer:
    """Decodes one answer incrementally; a character whose bytes span tokens appears when its last token does.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_token_ids: the prompt.
        stop: stop strings.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stop: Sequence[str] = ()) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._token_ids = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._start = 0  # tokens [_start, _read) are decoded already; they are the context of what follows
        self._read = len(self._token_ids)
        self._context = self._decode(self._token_ids)
        self._hold = max((len(string) - 1 for string in self._stop), default=0)
        self._complete = False
        self._text = ""

    @property
    def text(self) -> str:
        """Text that no further token can change: before `flush`, without an end that might become a stop string."""
        return self._text if self._complete or not self._hold else self._text[: -self._hold]

    def append(self, token_id: int) -> str | None:
        """Add a token; returns the stop string that it completed, and then the text ends before that string."""
        self._token_ids.append(token_id)
        decoded = self._decode(self._token_ids[self._start :])
        if len(decoded) <= len(self._context) or decoded.endswith(INCOMPLETE):
            return None
        self._start, self._read = self._read, len(self._token_ids)
        return self._extend(decoded)

    def flush(self) -> None:
        """The answer is finished: an end that was held back is text, and so is part of a character."""
        if not self._complete:
            self._extend(self._decode(self._token_ids[self._start :]))
            self._complete = True

    def _extend(self, decoded: str) -> str | None:
        new, searched = decoded[len(self._context) :], len(self._text)
        self._context = self._decode(self._token_ids[self._start : self._read])
        self._text += new
        found = [(self._text.find(string, max(0, searched - len(string) + 1)), string) for string in self._stop]
        found = [(position, string) for position, string in found if position >= 0]
        if not found:
            return None
        position, string = min(found, key=lambda hit: hit[0])
        self._text, self._complete = self._text[:position], True
        return string

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)
