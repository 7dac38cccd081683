"""Server-sent events, and how much of an answer they have told."""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from fastapi.responses import StreamingResponse

from trunkattn.engine.outputs import CompletionOutput
from trunkattn.server.errors import failure


@dataclass
class Progress:
    """How much of one answer has been sent."""

    characters: int = 0
    tokens: int = 0
    ended: bool = False
    just_ended: bool = False

    def advance(self, answer: CompletionOutput, text: str | None = None) -> tuple[str, int, int]:
        """What is new: its text, the number of its first token, and of its first character. text: what of the answer
        may be shown; None: all."""
        text = answer.text if text is None else text
        first_token, at = self.tokens, self.characters
        new = text[at:]
        self.characters, self.tokens = max(at, len(text)), len(answer.token_ids)
        self.just_ended = answer.finish_reason is not None and not self.ended
        self.ended = answer.finish_reason is not None
        return new, first_token, at


class StreamWriter:
    """Events of one stream."""

    def event(self, value: dict[str, Any]) -> str:
        """An event of JSON."""
        return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"

    def done(self) -> str:
        """The event that ends OpenAI's streams."""
        return "data: [DONE]\n\n"


async def respond(events: AsyncGenerator[str, None]) -> StreamingResponse:
    """A response that streams events. An error before the first event is a response of its own, with its status; a
    later one is the last event. When the client goes away, the generator is closed."""
    first = await anext(events)

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
