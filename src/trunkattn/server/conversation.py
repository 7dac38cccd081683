"""The messages of a request as chat templates read them, checked before Python reads what they hold."""

from collections.abc import Sequence
from typing import Any

from trunkattn.engine.form_limits import depth_of
from trunkattn.engine.prompts import read_arguments
from trunkattn.server.errors import BadRequest
from trunkattn.server.json_size import json_size
from trunkattn.server.lanes import Rest
from trunkattn.server.limits import LIMITS
from trunkattn.server.protocol import Message
from trunkattn.validate import shown


def as_read(message: Message, place: int, rest: Rest) -> dict[str, Any]:
    """A message as chat templates read it: its content is a text, and the arguments of a call are a mapping."""
    values = message.model_dump(exclude_none=True)
    if isinstance(message.content, list):
        parts = [part.refusal if part.type == "refusal" else part.text for part in message.content]
        values["content"] = "\n".join(parts)
    values.setdefault("content", "")
    for number, call in enumerate(values.get("tool_calls", ())):
        rest()
        given = call["function"]["arguments"]
        name = f"messages[{place}].tool_calls[{number}].function.arguments"
        if isinstance(given, str):
            call["function"]["arguments"] = _arguments(name, given)
    return values


def check_arguments(messages: Sequence[Message], rest: Rest) -> None:
    """Raises BadRequest if the arguments of all calls together hold too much to be read, copied and written."""
    total = 0
    for place, message in enumerate(messages):
        for number, call in enumerate(message.tool_calls or ()):
            rest()
            given = call.function.arguments
            if not isinstance(given, str):
                continue
            size = json_size(given.encode("utf-8", "surrogatepass"), LIMITS.nodes, LIMITS.digits)
            total += size.values + size.nodes
            name = f"messages[{place}].tool_calls[{number}].function.arguments"
            if total > LIMITS.nodes:
                raise BadRequest(f"{name}: expected at most {LIMITS.nodes} values in all calls", name)
            if size.has_long_number:
                raise BadRequest(f"{name}: expected numbers of at most {LIMITS.digits} digits", name)


def _arguments(name: str, text: str) -> Any:
    """The arguments of a call as `read_arguments` reads them, of as many levels as any JSON of a request."""
    found = read_arguments(name, text)
    if depth_of(found, LIMITS.depth) > LIMITS.depth:
        raise BadRequest(f"{name}={shown(text)}: expected JSON of at most {LIMITS.depth} levels", name)
    return found
