"""JSON schemas for llguidance, which lacks some keywords. `not` and dynamic references are rewritten where other
keywords say exactly the same. Errors say where the remaining ones stand.

Source: https://json-schema.org/draft/2020-12/json-schema-core, and -validation.
"""

import json
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Optional

from trunkattn.validate import shown

# Keywords whose values map names to schemas, and keywords whose values are data, not schemas.
NAMED: Final = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
DATA: Final = frozenset({"const", "enum", "default", "examples"})

_SAYS_NOTHING: Final = frozenset({"title", "description", "$comment", "default", "examples", "deprecated"})
_TYPES: Final = ("null", "boolean", "object", "array", "string", "number")
_FINITE: Final = MappingProxyType({"null": (None,), "boolean": (False, True)})
_OF_PYTHON: Final = MappingProxyType(
    {type(None): "null", bool: "boolean", dict: "object", list: "array", str: "string", int: "number", float: "number"}
)
_DYNAMIC: Final = MappingProxyType({"$dynamicRef": "$ref", "$dynamicAnchor": "$anchor"})
_EARLY: Final = re.compile(r"draft-0[34]")  # drafts without `const`, in which `integer` means something else
_MOST_PLACES: Final = 3
_LONGEST_KEY: Final = 64  # characters of a key in a place
_FAILED: Final = re.compile(r"failed to compile JSON schema: (.*?)(?: while processing .*| \d+ \| .*|$)")
_EMPTY_REGEX: Final = re.compile(r"Regex is empty: .*")
_UNKNOWN: Final = re.compile(r"Unimplemented keys: (\[[^\]]*\])")
_CONDITIONS: Final = ("not", "if", "then", "else", "oneOf", "dependencies", "dependentRequired", "dependentSchemas")
_INSTEAD: Final = MappingProxyType(
    {
        **dict.fromkeys(_CONDITIONS, "write what is allowed with type, enum, const or anyOf"),
        **dict.fromkeys(("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor"), "write $ref and $defs"),
    }
)


class Place(NamedTuple):
    """The place of a part of a schema: that of the object or list which contains it, and its key there."""

    above: Optional["Place"]
    key: str | int

    def __str__(self) -> str:
        """The place as a JSON pointer, such as "#/properties/name"."""
        keys, place = list[str](), Place(self, "")
        while place.above is not None:
            place = place.above
            keys.append(str(place.key)[:_LONGEST_KEY].replace("~", "~0").replace("/", "~1"))
        return "/".join(reversed(keys))


def parts(schema: Any) -> Iterator[tuple[Place, dict[str, Any]]]:
    """The schema and every part of it that is a schema, each with its place."""
    waiting: list[tuple[Place, Any, bool]] = [(Place(None, "#"), schema, False)]  # the last: keys are names
    while waiting:
        place, value, has_names = waiting.pop()
        is_schema = isinstance(value, dict) and not has_names
        if is_schema:
            yield place, value
        pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        within = [
            (Place(place, key), inner, is_schema and key in NAMED)
            for key, inner in pairs
            if isinstance(inner, dict | list) and not (is_schema and key in DATA)
        ]
        waiting.extend(reversed(within))


def rewrite(schema: Any) -> None:
    """Replaces `not` and dynamic references in a schema by keywords that say exactly the same, if there are any. A
    schema of drafts 3 and 4, or one with references into a `not`, stays as it is."""
    found = [part for _, part in parts(schema)]
    drafts = [str(part["$schema"]) for part in found if "$schema" in part]
    references = [part[name] for part in found for name in ("$ref", "$dynamicRef") if name in part]
    if any(map(_EARLY.search, drafts)) or "/not" in str(references):
        return
    for part in found:
        if "not" in part and "$ref" not in part:  # drafts before 2019 ignore everything beside a reference
            _rewrite_not(part)
    has_both = any(dynamic in part and plain in part for part in found for dynamic, plain in _DYNAMIC.items())
    if not has_both and not any("$id" in part for part in found[1:]) and all("2020-12" in draft for draft in drafts):
        for part in found:
            for dynamic in _DYNAMIC.keys() & part.keys():
                part[_DYNAMIC[dynamic]] = part.pop(dynamic)


def _rewrite_not(part: dict[str, Any]) -> None:
    """Replaces `not` in a part by a shorter list of values or types, which may be empty."""
    given: Any = {} if part["not"] is True else part["not"]
    if given is False:
        del part["not"]
    if not isinstance(given, dict):
        return
    rule = {name: value for name, value in given.items() if name not in _SAYS_NOTHING}
    types = _types(rule)
    if not rule.keys() <= {"const", "enum", "type"} or types is None or not isinstance(rule.get("enum", []), list):
        return
    values = _values(part) if rule else []
    if values is not None:
        listed = [rule[name] if name == "enum" else [rule[name]] for name in ("enum", "const") if name in rule]
        texts = [set(map(_text, each)) for each in listed]
        part["enum"] = [
            value
            for value in values
            if _kinds(value).isdisjoint(types) or not all(_text(value) in each for each in texts)
        ]
    elif rule.keys() == {"type"} and (others := _other_types(part, types)) is not None:
        part["type"] = others
    else:
        return
    del part["not"]


def _types(part: Mapping[str, Any]) -> list[str] | None:
    """The types that a part allows: all types if it names none. None if it names something that is not a type."""
    given = part.get("type", list(_TYPES))
    names = [given] if isinstance(given, str) else given
    return names if isinstance(names, list) and all(one in (*_TYPES, "integer") for one in names) else None


def _values(part: Mapping[str, Any]) -> list[Any] | None:
    """A list that contains every value that a part allows; None if there are infinitely many."""
    if "const" in part:
        return [part["const"]]
    if isinstance(part.get("enum"), list):
        return list(part["enum"])
    types = _types(part)
    if types is None or not set(types) <= _FINITE.keys():
        return None
    return [value for name, values in _FINITE.items() if name in types for value in values]


def _kinds(value: Any) -> set[str]:
    """The types that a value has."""
    is_whole = type(value) is int or (isinstance(value, float) and value.is_integer())
    return {_OF_PYTHON[type(value)], *(("integer",) if is_whole else ())}


def _text(value: Any) -> str:
    """A text that is the same for equal values of JSON: 1 equals 1.0, and the order of names does not matter."""
    return json.dumps(json.loads(json.dumps(value), parse_float=_number), sort_keys=True)


def _number(text: str) -> int | float:
    number = float(text)
    return int(number) if number.is_integer() else number


def _other_types(part: Mapping[str, Any], excluded: list[str]) -> list[str] | None:
    """The types of a part without the excluded ones. None if the part names something that is not a type, or if numbers
    without integers remain, for which there is no name."""
    types = _types(part)
    if types is None or ("number" in types and "integer" in excluded and "number" not in excluded):
        return None
    gone = {*excluded, "integer"} if "number" in excluded else {*excluded}
    return [name for name in types if name not in gone]


def explain(schema: Any, reason: str) -> str:
    """Rewrites llguidance's error about a schema: without the grammar, and for keywords that llguidance lacks with
    their places and what to write instead."""
    failed = _FAILED.search(reason)
    if failed is None:
        return reason
    unknown = _UNKNOWN.match(failed[1])
    names = json.loads(unknown[1]) if unknown else ["oneOf"] if failed[1].startswith("oneOf constraints") else []
    if not names:
        told = failed[1].replace("\\'", "'").replace("Unsatisfiable schema: ", "no value follows it: ")
        return _EMPTY_REGEX.sub("no text has such a pattern, format and length", told)
    found = []
    for name in names:
        places = [str(path) for path, part in parts(schema) if name in part]
        found.append(f"{name} at {shown(', '.join(places[:_MOST_PLACES]))}{', …' * (len(places) > _MOST_PLACES)}")
    where = "" if unknown else " where its branches overlap"
    return f"{' and '.join(found)} cannot be compiled{where}: {_INSTEAD.get(names[0], 'leave it out')}"
