"""Text of an answer as its tokens arrive: whole characters only, up to the first stop string.

`tokenizers.decoders.DecodeStream` also decodes token by token, but only with the fast tokenizers of that library; a
SentencePiece or Python tokenizer needs this one. It also ends an answer that stops within a character as `decode` does,
where DecodeStream returns no text.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from trunkattn.engine.answers.token_bytes import special_ids

NUM_CONTEXT_TOKENS = 6  # prompt tokens that are decoded with the answer, so that its leading space is not lost
MAX_PENDING_TOKENS = 8  # more than the bytes of a character, so that the last ones show whether it is complete
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # a tokenizer's text for part of a character


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that the detokenizer uses."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = ..., **options: bool) -> str: ...


class Detokenizer:
    """Decodes one answer incrementally; a character whose bytes span tokens appears when its last token does.

    The time is linear in the number of tokens. Tokens without text, such as special ones, are forgotten. Bytes that
    never make a character are decoded together once, when the first character after them is complete.

    Args:
        tokenizer: a transformers tokenizer.
        prompt_token_ids: the prompt.
        stop: stop strings.
        skip_special_tokens, spaces_between_special_tokens: what the tokenizer makes of special tokens.
        include_stop: the text ends after the stop string.
        min_tokens: a stop string counts only in the text after this many tokens.
        kept_special_token_ids: special tokens that the text has even if it skips the others.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
        kept_special_token_ids: Collection[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden: frozenset[int] = frozenset()  # special tokens that are removed before decoding
        if kept_special_token_ids and skip_special_tokens:
            self._hidden = special_ids(tokenizer).difference(kept_special_token_ids)
            skip_special_tokens = False
        self._options = {"skip_special_tokens": skip_special_tokens}
        if not spaces_between_special_tokens:  # only tokenizers in Python know it, and others put no spaces there
            self._options["spaces_between_special_tokens"] = False
        if getattr(tokenizer, "clean_up_tokenization_spaces", False):  # it takes back spaces that have been shown
            self._options["clean_up_tokenization_spaces"] = False
        self._stop = tuple(stop)
        self._include_stop = include_stop
        self._num_before_stops = min_tokens
        self._searched_from = 0  # no stop string is looked for in the text before it
        self._token_ids = list(prompt_token_ids[-NUM_CONTEXT_TOKENS:])
        self._start = 0  # tokens [_start, _read) are decoded: they are the context of the tokens after them
        self._read = len(self._token_ids)
        self._context = self._decode(self._token_ids)
        self._hold = 0 if include_stop else max((len(string) - 1 for string in self._stop), default=0)
        self._complete = False
        self._text = ""
        self._silent: dict[int, bool] = {}  # tokens that completed no text -> whether they never have any

    @property
    def text(self) -> str:
        """Text that no further token can change: before `flush` an end that might become a stop string is missing."""
        return self._text if self._complete or not self._hold else self._text[: -self._hold]

    def append(self, token_id: int) -> str | None:
        """Adds a token; returns the stop string that it completed, if any. The text then ends before that string.

        Raises:
            Exception: what the tokenizer raises. The token is left out then.
        """
        self._num_before_stops -= 1
        if self._silent.get(token_id):
            return None
        self._token_ids.append(token_id)
        try:
            return self._advance(token_id)
        except Exception:
            self._token_ids.pop()
            raise

    def _advance(self, token_id: int) -> str | None:
        """Shows the text that the newest token completes."""
        decoded = self._decode(self._token_ids[self._first_needed() :])
        is_complete = not decoded.endswith(INCOMPLETE)
        if is_complete and self._first_needed() != self._start:
            decoded = self._decode(self._token_ids[self._start :])
            is_complete = not decoded.endswith(INCOMPLETE)
        if not is_complete or self._context.startswith(decoded):
            if self._is_silent(token_id):
                self._token_ids.pop()
            return None
        return self._extend(decoded)

    def flush(self) -> str | None:
        """Ends the answer: the text that was held back is added, part of a character included. Returns the stop string
        that it completed, if any."""
        if self._complete:
            return None
        found = self._extend(self._decode(self._token_ids[self._start :]))
        self._complete = True
        return found

    def _first_needed(self) -> int:
        """First of the tokens that show whether the last character is complete."""
        is_long = len(self._token_ids) - self._read > MAX_PENDING_TOKENS
        return len(self._token_ids) - MAX_PENDING_TOKENS if is_long else self._start

    def _is_silent(self, token_id: int) -> bool:
        """Whether the token has no text: neither by itself, as a leading space has, nor between others."""
        if token_id not in self._silent:
            context = self._token_ids[self._start : self._read]
            between = self._decode([*context, token_id, *context]) == self._decode([*context, *context])
            self._silent[token_id] = between and not self._decode([token_id] * 3)
        return self._silent[token_id]

    def _extend(self, decoded: str) -> str | None:
        without_context, searched = self._decode(self._token_ids[self._read :]), len(self._text)
        # Bytes that make no character spoil those before them, too, if the vocabulary falls back to bytes. Those have
        # been shown.
        self._text += decoded.removeprefix(self._context) if decoded.startswith(self._context) else without_context
        self._start, self._read, self._context = self._read, len(self._token_ids), without_context
        if self._num_before_stops >= 0:
            self._searched_from = len(self._text)
            return None
        found = [
            (self._text.find(string, max(self._searched_from, searched - len(string) + 1)), string)
            for string in self._stop
        ]
        found = [(position, string) for position, string in found if position >= 0]
        if not found:
            return None
        position, string = min(found, key=lambda hit: hit[0])
        self._text = self._text[: position + len(string) if self._include_stop else position]
        self._complete = True
        return string

    def _decode(self, token_ids: Sequence[int]) -> str:
        if self._hidden:
            token_ids = [token_id for token_id in token_ids if token_id not in self._hidden]
        return self._tokenizer.decode(token_ids, **self._options)
