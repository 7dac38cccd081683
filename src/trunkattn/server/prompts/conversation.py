"""The conversation of a request as chat templates read it, checked before Python reads what it holds."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trunkattn.engine.forms.limits import depth_of
from trunkattn.engine.prompts import ChatOptions, read_arguments
from trunkattn.server.bodies.json_size import json_size
from trunkattn.server.bodies.protocol import ChatCompletionRequest, Message, TokenizeRequest, Tool
from trunkattn.server.errors import BadRequest
from trunkattn.server.lanes import Pause
from trunkattn.server.limits import LIMITS
from trunkattn.validate import shown


@dataclass(frozen=True)
class Conversation:
    """What a chat's prompt is made of.

    Attributes:
        messages: the messages, oldest first.
        tools: functions that the model may call.
        add_generation_prompt, continue_final_message, chat_template_kwargs: see `ChatOptions`.
    """

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, body: ChatCompletionRequest | TokenizeRequest, has_tools: bool = True) -> "Conversation":
        """The conversation of a body. has_tools: False: its tools are not shown to the model."""
        return cls(
            body.messages or (),
            (body.tools or ()) if has_tools else (),
            body.add_generation_prompt,
            body.continue_final_message,
            body.chat_template_kwargs,
        )

    def options(self) -> ChatOptions:
        """The options for the chat template. Raises what `ChatOptions` raises."""
        tools = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return ChatOptions(
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            tools=tools or None,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    def as_read(self, pause: Pause) -> list[dict[str, Any]]:
        """The messages as chat templates read them: a content is a text, and the arguments of a call are a mapping.
        pause: called at every tool call."""
        return [_as_read(message, place, pause) for place, message in enumerate(self.messages)]

    def check_arguments(self, pause: Pause) -> None:
        """Raises BadRequest if the arguments of all calls together hold too much to be read, copied and written. pause:
        called at every tool call."""
        total = 0
        for place, message in enumerate(self.messages):
            for number, call in enumerate(message.tool_calls or ()):
                pause()
                given = call.function.arguments
                if not isinstance(given, str):
                    continue
                size = json_size(given.encode("utf-8", "surrogatepass"), LIMITS.nodes, LIMITS.digits)
                total += size.values + size.nodes
                name = _name(place, number)
                if total > LIMITS.nodes:
                    raise BadRequest(f"{name}: expected at most {LIMITS.nodes} values in all calls", name)
                if size.has_long_number:
                    raise BadRequest(f"{name}: expected numbers of at most {LIMITS.digits} digits", name)


def _as_read(message: Message, place: int, pause: Pause) -> dict[str, Any]:
    values = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        parts = [part.refusal if part.type == "refusal" else part.text for part in message.content]
        values["content"] = "\n".join(parts)
    values.setdefault("content", "")
    for number, call in enumerate(values.get("tool_calls", ())):
        pause()
        given = call["function"]["arguments"]
        if isinstance(given, str):
            call["function"]["arguments"] = _arguments(_name(place, number), given)
    return values


def _name(place: int, number: int) -> str:
    """What errors call the arguments of a call."""
    return f"messages[{place}].tool_calls[{number}].function.arguments"


def _arguments(name: str, text: str) -> Any:
    """The arguments of a call as `read_arguments` reads them, of as many levels as any JSON of a request."""
    found = read_arguments(name, text)
    if depth_of(found, LIMITS.depth) > LIMITS.depth:
        raise BadRequest(f"{name}={shown(text)}: expected JSON of at most {LIMITS.depth} levels", name)
    return found
