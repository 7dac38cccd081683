"""Server-sent events, and how much of an answer they have told."""

import json
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi.responses import StreamingResponse

from trunkattn.engine.outputs import CompletionOutput
from trunkattn.server.errors import failure
from trunkattn.server.lanes import Rest, no_rest

_JSON_LEVELS: Final = 5  # of a response, down to the log-probabilities of one place
LEAST_LOGPROB: Final = -9999.0  # what OpenAI and vLLM say for tokens that are all but impossible; JSON has no -Infinity


class TextOffsets:
    """Characters of a text before each of its tokens; the parts of a character begin where it does."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def before(self, written: bytes) -> int:
        """Characters before a token that writes these bytes; the next token follows it."""
        at = self._characters
        self._characters += len(self._decoder.decode(written))
        return at


@dataclass
class Progress:
    """How much of one answer has been sent."""

    characters: int = 0
    tokens: int = 0
    ended: bool = False
    just_ended: bool = False
    begun: bool = False  # whether an event has told of it
    offsets: TextOffsets = field(default_factory=TextOffsets)

    def advance(self, answer: CompletionOutput, text: str | None = None) -> tuple[str, int]:
        """What is new: its text, and the number of its first token. text: what of the answer may be shown; None:
        all."""
        text = answer.text if text is None else text
        first_token, at = self.tokens, self.characters
        new = text[at:]
        self.characters, self.tokens = max(at, len(text)), len(answer.token_ids)
        self.just_ended = answer.finish_reason is not None and not self.ended
        self.ended = answer.finish_reason is not None
        return new, first_token


class Written(str):
    """JSON that is written already: one text in the place of small lists and mappings, among which Python looks for
    garbage with every thread stopped."""


def write_json(value: Any, rest: Rest = no_rest, levels: int = _JSON_LEVELS) -> str:
    """JSON of a response. Its upper levels are written item by item: one call for all of it would hold Python's lock
    for as long as a long list takes."""
    rest()
    if isinstance(value, Written):
        return value
    if levels and isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{json.dumps(name)}:{write_json(one, rest, levels - 1)}" for name, one in value.items())
            + "}"
        )
    if levels and isinstance(value, list):
        return "[" + ",".join(write_json(one, rest, levels - 1) for one in value) + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


class StreamWriter:
    """Events of one stream."""

    def event(self, value: dict[str, Any], rest: Rest = no_rest) -> str:
        """An event of JSON."""
        return f"data: {write_json(value, rest)}\n\n"

    def done(self) -> str:
        """The event that ends OpenAI's streams."""
        return "data: [DONE]\n\n"


async def respond(events: AsyncGenerator[str, None]) -> StreamingResponse:
    """A response that streams events. An error before the first event is a response of its own, with its status; a
    later one is the last event. When the client goes away, the generator is closed. Without events the response is
    empty."""
    first = await anext(events, "")

    async def body() -> AsyncGenerator[str, None]:
        try:
            yield first
            async for event in events:
                yield event
        except Exception as error:
            yield f"data: {failure(error).body.decode()}\n\n"  # type: ignore[union-attr]
        finally:
            await events.aclose()

    return StreamingResponse(body(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
