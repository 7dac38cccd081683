"""Finds tool calls in a model's text: the functions that it calls, and the text that is left for the reader.

Models write calls as they were trained to. `hermes`: `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, of
Hermes, Qwen and many others. `llama3_json`: the whole answer is one JSON object with `name` and `parameters`.
`mistral`: `[TOOL_CALLS]` and a JSON list, or a name and its arguments.

Arguments are passed on as the model wrote them, so that no number and no escape changes.
"""

import json
import re
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

NO_ARGUMENTS: Final = "{}"  # also where a model writes null or nothing: clients read the arguments as JSON
_SPACE: Final = re.compile(r"[ \t\r\n]*")
_BETWEEN_CALLS: Final = re.compile(r"[ \t\r\n,;]*")
_NAMED_CALL: Final = re.compile(r"([\w.-]+)[ \t\r\n]*(?:\[CALL_ID\][\w-]*)?(?:\[ARGS\])?")


def _no_json(text: str) -> Any:
    raise ValueError(f"{text} is no JSON")


_DECODER: Final = json.JSONDecoder(parse_constant=_no_json)  # only Python reads NaN and Infinity


@dataclass(frozen=True)
class Call:
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str

    def as_json(self, call_id: str) -> dict[str, Any]:
        """The call as OpenAI's API shapes it."""
        return {"id": call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class ParsedAnswer:
    """A parsed answer. content: the text without calls. calls: the tool calls, in their order."""

    content: str
    calls: tuple[Call, ...] = ()


def _skip(pattern: re.Pattern[str], text: str, at: int) -> int:
    """The first place from `at` on after what the pattern matches there."""
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _encodable(text: str) -> str:
    """A text that UTF-8 can write: half a surrogate pair becomes its JSON escape."""
    return text.encode("utf-8", "backslashreplace").decode()


def _read_members(text: str, at: int) -> tuple[dict[str, tuple[Any, str]], int]:
    """The members of the JSON object at `at`, each with its value and its text, and the end of the object.

    Raises:
        ValueError, RecursionError: it is no JSON, or nested too deeply to be read.
    """
    members: dict[str, tuple[Any, str]] = {}
    at = _skip(_SPACE, text, at + 1)
    while text[at : at + 1] != "}":
        if members:
            if text[at : at + 1] != ",":
                raise ValueError("expected a comma")
            at = _skip(_SPACE, text, at + 1)
        name, at = _DECODER.raw_decode(text, at)
        at = _skip(_SPACE, text, at)
        if not isinstance(name, str) or text[at : at + 1] != ":":
            raise ValueError("expected a name and a colon")
        begin = _skip(_SPACE, text, at + 1)
        value, at = _DECODER.raw_decode(text, begin)
        members[name] = value, text[begin:at]
        at = _skip(_SPACE, text, at)
    return members, at + 1


def _read_call(text: str, at: int) -> tuple[Call, int]:
    """The call that the JSON object at `at` describes, and the object's end.

    Raises:
        ValueError, RecursionError: there is none.
    """
    if text[at : at + 1] != "{":
        raise ValueError("expected an object")
    members, end = _read_members(text, at)
    name, _ = members.get("name", (None, ""))
    if not isinstance(name, str) or not name:
        raise ValueError("expected a name")
    value, written = members.get("arguments", members.get("parameters", (None, "")))
    return Call(_encodable(name), _encodable(_arguments(value, written))), end


def _arguments(value: Any, written: str) -> str:
    """Arguments as JSON. A text of JSON is what it holds; any other text is JSON as the model wrote it.

    Raises:
        RecursionError: the text is nested too deeply to be read.
    """
    if value is None:
        return NO_ARGUMENTS
    if not isinstance(value, str):
        return written
    text = value.strip()
    try:
        return NO_ARGUMENTS if not text or _DECODER.decode(text) is None else text
    except ValueError:
        return written


def read_calls(text: str, at: int = 0) -> tuple[tuple[Call, ...], int]:
    """The calls that JSON objects from `at` on describe, one after another or in a list, and where they end."""
    calls: list[Call] = []
    in_list, end = False, at
    while True:
        at = _skip(_BETWEEN_CALLS if calls else _SPACE, text, at)
        if text[at : at + 1] == "[" and not in_list:
            in_list, at = True, at + 1
        elif text[at : at + 1] == "]" and in_list:
            in_list, at = False, at + 1
            end = at if calls else end
        else:
            try:
                call, at = _read_call(text, at)
            except (ValueError, RecursionError):
                return tuple(calls), end
            calls.append(call)
            end = at


def read_named_calls(text: str, at: int) -> tuple[tuple[Call, ...], int]:
    """The calls that `read_calls` finds, or one that is a name and its arguments."""
    named = _NAMED_CALL.match(text, _skip(_SPACE, text, at))
    begin = at if named is None else _skip(_SPACE, text, named.end())
    if named is None or text[begin : begin + 1] != "{":
        return read_calls(text, at)
    try:
        _, end = _read_members(text, begin)
    except (ValueError, RecursionError):
        return (), at
    return (Call(_encodable(named[1]), _encodable(text[begin:end])),), end


Reader = Callable[[str, int], tuple[tuple[Call, ...], int]]


@dataclass(frozen=True)
class Marked:
    """Calls stand between two marks, or from a mark on.

    Attributes:
        begin, end: the marks; end: "" if there is none.
        marks: all that the form consists of: a tokenizer may have them as special tokens, which are no text otherwise.
        read: the calls after the first mark, and where they end.
    """

    begin: str
    end: str = ""
    marks: tuple[str, ...] = ()
    read: Reader = read_calls

    def visible(self, text: str) -> str:
        """The beginning of an unfinished answer that is certainly not part of a call, nor the space before one."""
        at = text.find(self.begin)
        if at < 0:
            sizes = range(min(len(self.begin) - 1, len(text)), 0, -1)
            at = next((len(text) - size for size in sizes if text.endswith(self.begin[:size])), len(text))
        return text[:at].rstrip()

    def parse(self, text: str) -> ParsedAnswer:
        """A finished answer. What stands after a mark and is no call stays text."""
        content, calls, at = "", list[Call](), 0
        while (begin := text.find(self.begin, at)) >= 0:
            found, end = self.read(text, begin + len(self.begin))
            if not found:
                end = begin + len(self.begin)
                content += text[at:end]
            else:
                content += text[at:begin]
                calls += found
                closed = _skip(_SPACE, text, end)
                mark = text[closed : closed + len(self.end)]  # or its beginning, where the answer is cut off
                end = closed + len(mark) if self.end and self.end.startswith(mark) else end
            at = end
        content += text[at:]
        return ParsedAnswer(content.rstrip() if calls else text, tuple(calls))


@dataclass(frozen=True)
class WholeJson:
    """An answer that begins as a JSON value is a call; what follows it is text."""

    marks: tuple[str, ...] = ()

    def visible(self, text: str) -> str:
        """The beginning of an unfinished answer that is certainly not part of a call."""
        return "" if not text.strip() or text.lstrip()[0] in "{[" else text

    def parse(self, text: str) -> ParsedAnswer:
        """A finished answer."""
        calls, end = read_calls(text)
        return ParsedAnswer(text[end:].strip(), calls) if calls else ParsedAnswer(text)


Parser = Marked | WholeJson
TOOL_CALL_PARSERS: Final[Mapping[str, Parser]] = MappingProxyType(
    {
        "hermes": Marked("<tool_call>", "</tool_call>", ("<tool_call>", "</tool_call>")),
        "llama3_json": WholeJson(),
        "mistral": Marked("[TOOL_CALLS]", "", ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"), read_named_calls),
    }
)


def parse_forced(text: str) -> ParsedAnswer:
    """Parses an answer that its request forces into a JSON list of calls. The beginning of a call that is cut off is
    dropped: it is no content."""
    return ParsedAnswer("", read_calls(text)[0])


def new_call_id(parser: str) -> str:
    """An id of a call, which clients send back with its result. Mistral's templates refuse ids that are not nine
    letters and digits."""
    return uuid.uuid4().hex[:9] if parser == "mistral" else f"call_{uuid.uuid4().hex}"
