"""Tool calls in a model's text: what of it is for the reader, and which functions it calls.

Models write calls as they were trained to. `hermes`: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, of
Hermes, Qwen and many others. `llama3_json`: the whole answer is one JSON object with `name` and `parameters`.
`mistral`: `[TOOL_CALLS]` and a JSON list.
"""

import json
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final


@dataclass(frozen=True)
class Call:
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex}")

    def as_json(self) -> dict[str, Any]:
        """The call as OpenAI's API shapes it."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ParsedAnswer:
    """content: the text without calls; calls: in their order."""

    content: str
    calls: tuple[Call, ...] = ()


def call_of(value: Any) -> Call | None:
    """The call that a JSON value describes; None if it describes none."""
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters", {}))
    return Call(value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False))


def calls_of(text: str) -> tuple[Call, ...]:
    """The calls that a text of JSON values describes, one after another or in a list. What is no JSON ends them."""
    calls: list[Call] = []
    decoder, at = json.JSONDecoder(), 0
    while at < len(text):
        if text[at] in " \t\r\n,;":
            at += 1
            continue
        try:
            value, at = decoder.raw_decode(text, at)
        except ValueError:
            break
        found = [call_of(item) for item in (value if isinstance(value, list) else [value])]
        calls += [call for call in found if call is not None]
    return tuple(calls)


@dataclass(frozen=True)
class Marked:
    """Calls stand between two marks, or from a mark to the end."""

    begin: str
    end: str | None = None

    def visible(self, text: str) -> str:
        """The beginning of an unfinished answer that is certainly not part of a call."""
        at = text.find(self.begin)
        if at >= 0:
            return text[:at].rstrip()
        for length in range(min(len(self.begin) - 1, len(text)), 0, -1):
            if text.endswith(self.begin[:length]):
                return text[:-length].rstrip()
        return text

    def parse(self, text: str) -> ParsedAnswer:
        """A finished answer."""
        content, *rest = text.split(self.begin)
        calls: list[Call] = []
        for part in rest:
            inside, _, after = part.partition(self.end) if self.end else (part, "", "")
            found = calls_of(inside)
            if not found:  # not a call: the reader gets to see what the model wrote
                return ParsedAnswer(text)
            calls += found
            content += after
        return ParsedAnswer(content.rstrip() if calls else text, tuple(calls))


@dataclass(frozen=True)
class WholeJson:
    """An answer that begins as a JSON value is a call."""

    def visible(self, text: str) -> str:
        """The beginning of an unfinished answer that is certainly not part of a call."""
        return "" if not text.strip() or text.lstrip()[0] in "{[" else text

    def parse(self, text: str) -> ParsedAnswer:
        """A finished answer."""
        calls = calls_of(text.strip()) if self.visible(text) == "" else ()
        return ParsedAnswer("", calls) if calls else ParsedAnswer(text)


Parser = Marked | WholeJson
TOOL_CALL_PARSERS: Final[Mapping[str, Parser]] = MappingProxyType(
    {
        "hermes": Marked("<tool_call>", "</tool_call>"),
        "llama3_json": WholeJson(),
        "mistral": Marked("[TOOL_CALLS]"),
    }
)
# What an answer is parsed by if the request forces a call: it is a JSON list of calls then.
FORCED: Final[Callable[[str], ParsedAnswer]] = WholeJson().parse
