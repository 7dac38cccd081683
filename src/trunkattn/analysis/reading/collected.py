"""The requests of a log as they are read, encoded a batch at a time."""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from trunkattn.analysis.formats.base import Entry, Hashes, TokenIds
from trunkattn.analysis.reading.tally import Tally
from trunkattn.analysis.reading.tokens import Encoder, encode_hashes, encode_tokens
from trunkattn.analysis.records import Encoded, LoggedRequest, SkippedLine
from trunkattn.analysis.requests import UNKNOWN, BlocksRead, RequestsRead
from trunkattn.analysis.texts import Texts

BATCH: Final = 256  # prompts that are tokenized at once


@dataclass
class Collected:
    """Requests in the order in which they are read, with what is needed to finish a log of them.

    Attributes:
        encoder: from texts to token counts and blocks.
        tally: what is left out is counted there.
        requests: what was taken. A place is an index among them. Arrivals are on the log's own clock, a turn that the
            log does not say is `UNKNOWN`, and parts are not counted yet.
        texts: of the places that have one.
        contents: block hashes, of the requests that have them.
        calls: of each place, its number, to which a `Repeated` may refer; `UNKNOWN`: none does.
        tokens_told, tokens_found: prompt tokens by the log's own count, and by the encoder's, where there are both.
    """

    encoder: Encoder
    tally: Tally
    requests: RequestsRead = field(default_factory=RequestsRead)
    texts: Texts = field(default_factory=Texts)
    contents: BlocksRead = field(default_factory=BlocksRead)
    calls: "array[int]" = field(default_factory=lambda: array("q"))
    tokens_told: int = 0
    tokens_found: int = 0

    def take(self, entries: Iterator[Entry]) -> None:
        """Encodes entries, a batch at a time."""
        while batch := list(islice(entries, BATCH)):
            rendered: dict[int, str] = {}
            for place, entry in enumerate(batch):
                text = self._text(entry)
                if text is not None:
                    rendered[place] = text
            encoded = dict(zip(rendered, self.encoder.encode(list(rendered.values())), strict=True))
            for place, entry in enumerate(batch):
                if isinstance(entry.prompt, Hashes):
                    self.contents.append(entry.prompt.ids)
                    self._add(entry, encode_hashes(entry.prompt, len(self.requests)))
                elif isinstance(entry.prompt, TokenIds):
                    self._add(entry, encode_tokens(entry.prompt.ids, self.encoder.decode(entry.prompt.ids)))
                elif place in encoded:
                    self._add(entry, encoded[place])

    def _text(self, entry: Entry) -> str | None:
        """The text of a prompt that is to be tokenized; None if it has none, or is left out."""
        if isinstance(entry.prompt, Hashes | TokenIds):
            return None
        try:
            text = self.encoder.render(entry.prompt)
        except ValueError as error:
            self.tally.skip(SkippedLine(entry.line, str(error)))
            return None
        if not text:
            self.tally.skip(SkippedLine(entry.line, "its prompt is empty; expected a text"))
        return text or None

    def _add(self, entry: Entry, encoded: Encoded) -> None:
        if entry.num_prompt_tokens is not None and encoded.text is not None:
            self.tokens_told += entry.num_prompt_tokens
            self.tokens_found += encoded.num_tokens
        num_output_tokens = entry.num_output_tokens
        if num_output_tokens is None and entry.answer is not None:
            num_output_tokens = self.encoder.count(entry.answer)
        if encoded.text is not None:
            self.texts.fill(len(self.requests))
            self.texts.append(encoded.text)
        self.calls.append(UNKNOWN if entry.call is None else entry.call)
        self.requests.append(
            LoggedRequest(
                line=entry.line,
                arrival=entry.arrival,
                num_prompt_tokens=encoded.num_tokens,
                num_output_tokens=num_output_tokens,
                blocks=encoded.blocks,
                block_size=encoded.block_size,
                num_answers=entry.num_answers,
                session=entry.session,
                turn=UNKNOWN if entry.turn is None else entry.turn,
                model=entry.model,
            )
        )
