"""Prompts to token counts and chained block numbers: from hashes, token ids, or text with or without a tokenizer."""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.formats.base import Chat, Entry, Fields, Hashes, called_tools
from trunkattn.analysis.records import Encoded
from trunkattn.analysis.texts import to_bytes
from trunkattn.engine.model.path import TOKENIZER_FILES
from trunkattn.names import install_command
from trunkattn.validate import expanded

BLOCK_SIZE: Final = 16
BYTES_PER_TOKEN: Final = 4.0
MEDIA: Final = ("image", "audio", "video", "file", "blob", "document")  # parts of messages that are no text
# Multipliers and shifts of splitmix64's finalizer, and its step (https://doi.org/10.1145/2714064.2660195).
_STEP: Final = 0x9E3779B97F4A7C15
_FEWEST_PLACES: Final = 1 << 12
_MIXING: Final = tuple(
    (np.uint64(shift), np.uint64(factor)) for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
)
_LAST_SHIFT: Final = np.uint64(31)


class Encoder(Protocol):
    """Turns texts into tokens and blocks."""

    @property
    def tokens_from(self) -> str:
        """Where the counts come from, for people."""
        ...

    def render(self, prompt: Chat | str) -> str:
        """The text that the model reads. Raises ValueError where a chat template refuses the messages."""
        ...

    def decode(self, ids: NDArray[np.int64]) -> str | None:
        """The text of token ids; None if their tokenizer is unknown."""
        ...

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Rendered texts with their counts and blocks."""
        ...

    def count(self, text: str) -> int:
        """Tokens of an answer."""
        ...


def mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Each number with its bits mixed by splitmix64's finalizer."""
    for shift, factor in _MIXING:
        values = values ^ (values >> shift)
        values *= factor
    return values ^ (values >> _LAST_SHIFT)


def chained(units: NDArray[np.int64], per_block: int = 1) -> NDArray[np.int64]:
    """A number for each block. Two numbers are equal if the blocks, and all blocks before them, are equal.

    The number of a block is a sum over all units up to its end, each mixed with its place, so that one cumulative sum
    gives all numbers.

    Args:
        units: contents of the blocks: tokens, bytes or other hashes, int64.
        per_block: units per block; the last block may have fewer.
    """
    places = _places(max(_FEWEST_PLACES, len(units)).bit_length())[: len(units)]
    sums = np.cumsum(mixed(places ^ mixed(units.view(np.uint64))), dtype=np.uint64)
    if per_block > 1:
        whole = sums[per_block - 1 :: per_block]
        sums = whole if len(units) % per_block == 0 else np.append(whole, sums[-1:])
    return mixed(sums).view(np.int64)


@cache
def _places(bits: int) -> NDArray[np.uint64]:
    """Mixed numbers of 2**bits places."""
    return mixed(np.arange(1, (1 << bits) + 1, dtype=np.uint64) * np.uint64(_STEP))


def encode_hashes(prompt: Hashes, number: int) -> Encoded:
    """A prompt of block hashes. A block that the log leaves out is shared with no other prompt. number: of the prompt
    in the log."""
    missing = -(-prompt.num_tokens // prompt.block_size) - len(prompt.ids)
    ids = prompt.ids
    if missing:
        private = mixed(np.arange(number << 27, (number << 27) + missing, dtype=np.uint64)).view(np.int64)
        ids = np.concatenate([ids, private])
    return Encoded(prompt.num_tokens, chained(ids), prompt.block_size)


def encode_tokens(ids: NDArray[np.int64], text: str | None = None) -> Encoded:
    """A prompt of token ids."""
    return Encoded(len(ids), chained(ids, BLOCK_SIZE), BLOCK_SIZE, text)


@dataclass(frozen=True)
class ByteEstimate:
    """An encoder for logs whose tokenizer is unknown: a fixed number of UTF-8 bytes counts as a token.

    Attributes:
        bytes_per_token: a multiple of 0.5, so that a block is a whole number of 8-byte words.
        is_measured: whether the number comes from the log's own counts.
    """

    bytes_per_token: float = BYTES_PER_TOKEN
    is_measured: bool = False

    @property
    def tokens_from(self) -> str:
        """Where the counts come from, for people."""
        source = ", which the log's own counts give" if self.is_measured else ""
        return f"an estimate of {self.bytes_per_token:g} bytes per token{source}"

    def render(self, prompt: Chat | str) -> str:
        """The tools, then each message with its role, as most chat templates order them."""
        if isinstance(prompt, str):
            return prompt
        tools = [f"<|tools|>\n{json.dumps(list(prompt.tools), ensure_ascii=False)}\n"] if prompt.tools else []
        messages = [f"<|{message['role']}|>\n{message['content']}\n" for message in map(plain_message, prompt.messages)]
        return "".join([*tools, *messages, "<|assistant|>\n"])

    def decode(self, ids: NDArray[np.int64]) -> str | None:
        """Returns None: without a tokenizer, ids have no text."""
        return None

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Texts with their counts and blocks."""
        return [self._encoded(text) for text in texts]

    def count(self, text: str) -> int:
        """Tokens of an answer."""
        return -int(-len(to_bytes(text)) // self.bytes_per_token)

    def _encoded(self, text: str) -> Encoded:
        data = to_bytes(text)
        units = np.zeros(-(-len(data) // 8), dtype=np.int64)
        units.view(np.uint8)[: len(data)] = np.frombuffer(data, dtype=np.uint8)
        per_block = int(BLOCK_SIZE * self.bytes_per_token) // 8
        return Encoded(-int(-len(data) // self.bytes_per_token), chained(units, per_block), BLOCK_SIZE, text)


def measured_estimate(entries: Iterable[Entry]) -> ByteEstimate:
    """An estimate from the entries that have both a text and a count; 4 bytes per token if there are none."""
    default = ByteEstimate()
    num_bytes = num_tokens = 0
    for entry in entries:
        if isinstance(entry.prompt, Chat | str) and entry.num_prompt_tokens:
            with suppress(ValueError):  # messages that are wrong; their line is left out later
                num_bytes += len(to_bytes(default.render(entry.prompt)))
                num_tokens += entry.num_prompt_tokens
    if not num_bytes:
        return default
    return ByteEstimate(max(1, round(2 * num_bytes / num_tokens)) / 2, is_measured=True)


@dataclass(frozen=True)
class TokenizerEncoder:
    """An encoder by a tokenizer of transformers and its chat template.

    Attributes:
        tokenizer: the tokenizer.
        name: for people.
        beginning: what the tokenizer puts before a prompt that no template made.
    """

    tokenizer: Any
    name: str
    beginning: str = ""

    @property
    def tokens_from(self) -> str:
        """Where the counts come from, for people."""
        return f"the tokenizer of {self.name}"

    def render(self, prompt: Chat | str) -> str:
        """The text that the model reads: the template's, or the prompt after what the tokenizer puts first."""
        if isinstance(prompt, str):
            return self.beginning + prompt
        if not self.tokenizer.chat_template:
            return self.beginning + ByteEstimate().render(prompt)
        messages = [plain_message(message) for message in prompt.messages]
        try:
            tools = list(prompt.tools) or None
            text: str = self.tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # a template is a program, and may raise anything
            said = str(error)
            is_its_own = said in str(self.tokenizer.chat_template)  # else it may quote the messages
            why = f": {said[:120]!r}" if is_its_own else f", with a {type(error).__name__}"
            raise ValueError(f"messages: the chat template refuses them{why}") from error
        return text

    def decode(self, ids: NDArray[np.int64]) -> str | None:
        """The text of token ids; None if the tokenizer lacks one of them."""
        if ids.min() < 0 or ids.max() >= len(self.tokenizer):
            return None
        text: str = self.tokenizer.decode(ids)
        return text

    def encode(self, texts: Sequence[str]) -> list[Encoded]:
        """Texts with their counts and blocks."""
        if not texts:
            return []
        found = self._ids([to_bytes(text).decode() for text in texts])
        return [encode_tokens(np.array(ids, dtype=np.int64), text) for ids, text in zip(found, texts, strict=True)]

    def count(self, text: str) -> int:
        """Tokens of an answer."""
        return len(self._ids([to_bytes(text).decode()])[0])

    def _ids(self, texts: list[str]) -> list[list[int]]:
        """The token ids of texts without half surrogate pairs, which no tokenizer takes."""
        found: list[list[int]] = self.tokenizer(texts, add_special_tokens=False)["input_ids"]
        return found


def read_tokenizer(path: str | Path) -> TokenizerEncoder:
    """The encoder by the tokenizer of a folder or a GGUF file.

    Raises:
        ValueError: naming what is missing: the path, a tokenizer in it, or the packages that read it.
    """
    place = check_tokenizer(path)
    try:
        from trunkattn.engine.model.files import ModelFiles
        from trunkattn.engine.model.loading import load_tokenizer
    except ImportError as error:
        raise ValueError(
            f"tokenizer={str(path)!r}: the package {error.name} is missing; run {install_command('engine')}, or leave "
            "the tokenizer out for an estimate"
        ) from error
    try:
        tokenizer = load_tokenizer(ModelFiles(place, None) if place.is_dir() else ModelFiles(place.parent, place.name))
    except ValueError as error:
        raise ValueError(str(error).replace("model=", "tokenizer=", 1)) from error
    assert tokenizer is not None  # `check_tokenizer` found its files
    first_ids = tokenizer("")["input_ids"][:1]
    has_bos = bool(first_ids) and first_ids[0] == tokenizer.bos_token_id
    return TokenizerEncoder(tokenizer, place.name, tokenizer.bos_token if has_bos else "")


def check_tokenizer(path: str | Path) -> Path:
    """The path of a file, or of a folder with a tokenizer. Raises ValueError before anything large is loaded."""
    place = expanded(path)
    if not place.exists():
        raise ValueError(f"tokenizer={str(path)!r}: there is no such folder; expected one with a tokenizer.json")
    if place.is_dir() and not any((place / name).is_file() for name in TOKENIZER_FILES):
        raise ValueError(f"tokenizer={str(path)!r}: the folder has no tokenizer; expected a tokenizer.json in it")
    return place


def plain_message(message: Fields) -> dict[str, Any]:
    """A message whose content is one text: its parts and the calls of tools, one after the other."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ValueError("messages: expected objects, each with a role and a content")
    content = message.get("content", message.get("parts"))
    if isinstance(content, list):
        content = "\n".join(_part(part) for part in content)
    if content is not None and not isinstance(content, str):
        content = json.dumps(content, ensure_ascii=False)
    return {"role": message["role"], "content": "\n".join(filter(None, (content, called_tools(message))))}


def _part(part: Any) -> str:
    """A part of a message. What is no text becomes its type and a word that only the same content has, so that prompts
    with other pictures part there."""
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise ValueError("messages: expected a content of texts and objects with a type")
    kind = str(part.get("type", "part"))
    for key in ("text", "content") if kind != "blob" else ():
        if isinstance(text := part.get(key), str):
            return text
    written = json.dumps(part, ensure_ascii=False, default=str)
    if not any(word in kind for word in MEDIA) and not any(name in part for name in ("inline_data", "inlineData")):
        return written
    digest = hashlib.blake2b(to_bytes(written), digest_size=8).digest()
    letters = "".join(chr(ord("a") + half) for byte in digest for half in divmod(byte, 16))
    return f"[{kind} {letters}]"
