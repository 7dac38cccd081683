"""Server-sent events, and how much of an answer they have already sent."""

import json
from codecs import getincrementaldecoder
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from fastapi.responses import StreamingResponse

from trunkattn.engine.outputs import CompletionOutput, RequestOutput
from trunkattn.server.errors import failure
from trunkattn.server.lanes import Pause, no_pause

_GAP: Final = 16  # characters of a prompt that may have no token
_SLICE: Final = 1_024  # integers that are written by one call
_JSON_LEVELS: Final = 5  # of a response, down to the log-probabilities of one place
# Ends of lines to Unicode. Some clients divide a stream there, though only a line feed ends an event's line.
_LINE_ENDS: Final = MappingProxyType({0x85: "\\u0085", 0x2028: "\\u2028", 0x2029: "\\u2029"})
# Proxies must not hold events back, as nginx does until its buffer is full unless the second header forbids it.
_STREAM_HEADERS: Final = MappingProxyType({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
DONE: Final = "data: [DONE]\n\n"  # the event that ends OpenAI's streams
LEAST_LOGPROB: Final = -9999.0  # of impossible tokens, as in OpenAI's and vLLM's responses: JSON has no -Infinity


class TextOffsets:
    """Characters of a text before each of its tokens; the parts of a character begin where it does."""

    def __init__(self) -> None:
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._characters = 0

    def before(self, written: bytes) -> int:
        """Characters before a token that writes these bytes; the next token follows it."""
        if written and not 0x80 <= written[0] < 0xC0:  # it begins a character, so one that is incomplete stays so
            self._characters += len(self._decoder.decode(b"", final=True))
        at = self._characters
        self._characters += len(self._decoder.decode(written))
        return at

    def echoed(self, text: str, written: bytes) -> int:
        """Characters before a token of an echoed prompt. The prompt's text may lack what the token writes: a special
        token that the tokenizer adds, a space before the first word, or the mark of an unknown token."""
        at, new = self._characters, self._decoder.decode(written)
        found = next((one for one in (new, new.removeprefix(" ")) if text.startswith(one, at)), None)
        if found is None:
            place = text.find(new, at, at + len(new) + _GAP)
            if place < 0:
                return at
            at, found = place, new
        self._characters = at + len(found)
        return at

    def begin_answer(self, text: str) -> None:
        """Goes to the end of the echoed prompt."""
        self._decoder.reset()
        self._characters = len(text)


@dataclass
class Progress:
    """How much of one answer has been sent."""

    characters: int = 0
    tokens: int = 0
    ended: bool = False
    just_ended: bool = False
    begun: bool = False  # whether an event about it was sent
    offsets: TextOffsets = field(default_factory=TextOffsets)

    def advance(self, answer: CompletionOutput, text: str | None = None) -> tuple[str, int]:
        """Marks an answer as sent. Returns its new text, and the number of the first new token. text: the part of the
        answer that may be shown; None: all of it."""
        text = answer.text if text is None else text
        first_token, at = self.tokens, self.characters
        new = text[at:]
        self.characters, self.tokens = max(at, len(text)), len(answer.token_ids)
        self.just_ended = answer.finish_reason is not None and not self.ended
        self.ended = answer.finish_reason is not None
        return new, first_token


def num_places(output: RequestOutput, sent: Collection[Progress] = (), with_prompt: bool = False) -> int:
    """The size of what is still to be sent of an output: its tokens, and those that their log-probabilities name.

    Args:
        output: the output so far.
        sent: what has been sent of each of its answers; empty if nothing has, and then the prompt counts too.
        with_prompt: whether the token ids of the prompt are sent.
    """
    tokens = sum(len(answer.token_ids) for answer in output.outputs) - sum(one.tokens for one in sent)
    named = next((len(entry) for answer in output.outputs for entry in (answer.logprobs or ())[:1]), 0)
    prompt = () if sent else output.prompt_logprobs or ()
    places = len(prompt) * (1 + max((len(entry or ()) for entry in prompt[-1:]), default=0)) + tokens * (1 + named)
    return places + (len(output.prompt_token_ids) if with_prompt and not sent else 0)


class Written(str):
    """JSON that is already written. One text stands for many small lists and mappings, each of which Python's garbage
    collector would visit while every thread is stopped."""


def write_json(value: Any, pause: Pause = no_pause, levels: int = _JSON_LEVELS) -> str:
    """The JSON of a response. The upper levels are written item by item, because a single call would hold Python's lock
    for all of a long list."""
    pause()
    if isinstance(value, Written):
        return value
    if levels and isinstance(value, dict):
        return (
            "{"
            + ",".join(f"{json.dumps(name)}:{write_json(one, pause, levels - 1)}" for name, one in value.items())
            + "}"
        )
    if levels and isinstance(value, list):
        if value and type(value[0]) is int:  # token ids, of which a call each would take many times as long
            slices = (value[start : start + _SLICE] for start in range(0, len(value), _SLICE))
            return "[" + ",".join(write_json(part, pause, 0)[1:-1] for part in slices) + "]"
        return "[" + ",".join(write_json(one, pause, levels - 1) for one in value) + "]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def _event(written: str) -> str:
    """An event that holds JSON."""
    return f"data: {written.translate(_LINE_ENDS)}\n\n"


def write_event(value: dict[str, Any], pause: Pause = no_pause) -> str:
    """An event of JSON."""
    return _event(write_json(value, pause))


async def respond(events: AsyncGenerator[str, None], name: str) -> StreamingResponse:
    """A response that streams events. An error before the first event is a response of its own, with its status; a
    later one is the last event. When the client goes away, the generator is closed. Without events the response is
    empty. name: what the log calls the request."""
    first = await anext(events, "")

    async def body() -> AsyncGenerator[str, None]:
        try:
            yield first
            async for event in events:
                yield event
        except Exception as error:
            yield _event(failure(error, name).body.decode())  # type: ignore[union-attr]
        finally:
            await events.aclose()

    return StreamingResponse(body(), media_type="text/event-stream", headers=_STREAM_HEADERS)
