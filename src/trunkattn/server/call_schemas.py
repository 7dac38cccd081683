"""The JSON schema of an answer that must call tools: a list of calls, each with the arguments of its tool."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from trunkattn.engine.form_schema import DATA, NAMED
from trunkattn.server.lanes import Pause, no_pause
from trunkattn.server.protocol import Tool

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


def told_of_tools(message: str, names: Sequence[str]) -> str:
    """A message about `calls_schema` whose places are those in the parameters of tools, which have these names."""
    return _PLACE.sub(lambda found: f"{names[int(found[1])]}.parameters", message)


def rerooted(schema: Mapping[str, Any], root: str, pause: Pause = no_pause) -> dict[str, Any]:
    """A copy of a schema that stands at `root` of another one: its references lead to the same places. Those within a
    part that has an `$id` lead from that part anyway. pause: called at every mapping and list."""
    whole: dict[str, Any] = {}
    waiting: list[tuple[Any, Any, bool]] = [
        (schema, whole, False)
    ]  # what to copy, into what, and whether keys are names
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
    """Whether references within a part of a schema lead from it. An `$id` that is only a fragment is a name in it."""
    name = part.get("$id")
    return isinstance(name, str) and not name.startswith("#")
