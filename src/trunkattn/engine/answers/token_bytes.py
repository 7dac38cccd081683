"""What each token of a vocabulary writes: its bytes, as they stand within a text.

To decode a token by itself loses what it writes within a text: SentencePiece drops the space before it, and part of
a character becomes U+FFFD, so that different tokens look the same.
"""

import json
import re
from typing import Any, Final

BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")  # of SentencePiece's byte fallback
ANCHOR: Final = "a"  # a token before the one in question and after it: a word's last token may write the next space


def special_ids(tokenizer: Any | None) -> frozenset[int]:
    """The tokens that `decode` leaves out with `skip_special_tokens`."""
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    return frozenset({*getattr(tokenizer, "all_special_ids", ()), *(id_ for id_, token in added if token.special)})


class TokenBytes:
    """The bytes of each token.

    Args:
        tokenizer: a transformers tokenizer; None: no token has any.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, bytes | None] = {}
        self._added = {id_: str(token) for id_, token in getattr(tokenizer, "added_tokens_decoder", {}).items()}
        self._decoder = getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None)
        self._anchor = "" if self._decoder is None else self._decoder.decode([ANCHOR, ANCHOR]).removeprefix(ANCHOR)
        kinds = set() if self._decoder is None else _kinds(json.loads(self._decoder.__getstate__()))
        self._alphabet = _byte_alphabet() if "ByteLevel" in kinds else {}
        self._has_byte_tokens = "ByteFallback" in kinds

    def of(self, token_id: int) -> bytes | None:
        """Bytes of a token; None if it has none, such as a padded row of the logits."""
        if token_id not in self._known:
            self._known[token_id] = None if self._tokenizer is None else self._find(token_id)
        return self._known[token_id]

    def _find(self, token_id: int) -> bytes | None:
        if token_id in self._added:
            return _encoded(self._added[token_id])
        if self._decoder is None:
            try:
                return _encoded(self._tokenizer.decode([token_id]))  # type: ignore[union-attr]
            except Exception:  # a tokenizer in Python may raise anything for a token that it does not have
                return None
        piece = self._tokenizer.convert_ids_to_tokens(token_id)  # type: ignore[union-attr]
        if piece is None:
            return None
        if self._alphabet and self._alphabet.keys() >= set(piece):
            return bytes(self._alphabet[character] for character in piece)
        if self._has_byte_tokens and (byte := BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        written = self._decoder.decode([ANCHOR, piece, ANCHOR]).removeprefix(ANCHOR)
        return _encoded(written.removesuffix(self._anchor))


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _kinds(decoder: Any) -> set[str]:
    """The types of a decoder and of those within it."""
    inner = [_kinds(one) for one in decoder.get("decoders", ())]
    return {decoder["type"]}.union(*inner)


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level vocabularies write bytes with: those that can be seen are themselves, and the
    others follow from U+0100 on (GPT-2)."""
    seen = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in seen]
    return {chr(byte): byte for byte in seen} | {chr(256 + place): byte for place, byte in enumerate(hidden)}
