"""The JSON schema of an answer that must call tools: a list of calls, each with the arguments of its tool."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trunkattn.engine.forms.schema import DATA, NAMED
from trunkattn.server.bodies.protocol import Tool
from trunkattn.server.lanes import Pause, no_pause

_PLACE: Final = re.compile(r"#/items/anyOf/(\d+)/properties/arguments")


def calls_schema(tools: Sequence[Tool], only_one: bool, pause: Pause = no_pause) -> dict[str, Any]:
    """The schema of a list of calls of these tools. only_one: it has one call. pause: see `rerooted`."""
    items = []
    for place, tool in enumerate(tools):
        arguments = rerooted(
            tool.function.parameters or {"type": "object"}, f"#/items/anyOf/{place}/properties/arguments", pause
        )
        items.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool.function.name}, "arguments": arguments},
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "items": {"anyOf": items}, "minItems": 1}
    return {**schema, "maxItems": 1} if only_one else schema


def about_tools(message: str, names: Sequence[str]) -> str:
    """Rewrites a message about `calls_schema`, so that it names places in the parameters of the tools. names: of the
    tools."""
    return _PLACE.sub(lambda found: f"{names[int(found[1])]}.parameters", message)


def rerooted(schema: Mapping[str, Any], root: str, pause: Pause = no_pause) -> dict[str, Any]:
    """A copy of a schema for a place within another schema, with its references rewritten so that they lead to the same
    parts as before. References within a part with an `$id` start at that part and stay as they are.

    Args:
        schema: the schema.
        root: the place, as a JSON pointer that begins with "#".
        pause: called at every mapping and list.
    """
    whole: dict[str, Any] = {}
    # what to copy, where to, and whether its keys are names that the schema's author chose
    waiting: list[tuple[Any, Any, bool]] = [(schema, whole, False)]
    while waiting:
        pause()
        source, target, has_names = waiting.pop()
        is_schema = isinstance(source, Mapping) and not has_names
        if is_schema and _has_own_root(source):
            target.update(source)
            continue
        pairs = source.items() if isinstance(source, Mapping) else enumerate(source)
        for key, value in pairs:
            copied = value
            if is_schema and key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
                copied = root + value[1:]
            elif isinstance(value, Mapping | list) and not (is_schema and key in DATA):
                copied = {} if isinstance(value, Mapping) else [None] * len(value)
                waiting.append((value, copied, is_schema and key in NAMED))
            target[key] = copied
    return whole


def _has_own_root(part: Mapping[str, Any]) -> bool:
    """Whether references within a part of a schema start at the part. An `$id` that is only a fragment does not move
    their start: it is a name."""
    name = part.get("$id")
    return isinstance(name, str) and not name.startswith("#")
