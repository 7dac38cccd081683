"""Parts of a JSON schema that no value with an end follows, because each value would have to hold another one of them.

llguidance finds bounds that contradict each other, but follows such references for ever. They are found as the symbols
of a grammar are that derive no text (Knuth, https://doi.org/10.1016/0020-0190(77)90002-3).
"""

from collections.abc import Iterable, Iterator
from typing import Any, Final

from trunkattn.engine.forms.limits import leads_away, part_at
from trunkattn.engine.forms.schema import DATA, NAMED, parts
from trunkattn.validate import shown

_DEFINITIONS: Final = frozenset({"$defs", "definitions"})


def check_ends(schema: Any) -> None:
    """Raises ValueError if a schema, or a part that its references name, has only values without an end."""
    endless = _Ends(schema).endless()
    if endless is not None:
        raise ValueError(
            f"structured_outputs: json: a value of {shown(endless)} never ends, because it must hold another one, and "
            f"so on: expected a schema that lets it hold none"
        )


class _Ends:
    """Finds the parts whose values have an end. A condition, which is a number, holds as soon as enough others do.

    Args:
        schema: the whole schema.
    """

    def __init__(self, schema: Any) -> None:
        self._schema = schema
        self._missing: list[int] = []  # of each condition: how many others must still come to hold
        self._users: list[list[int]] = []  # of each condition: those that it is one of the others of
        self._always = self._all_of(())
        self._of_part: dict[int, int] = {}
        self._unread: list[dict[str, Any]] = []
        self._named: dict[str, int] = {}  # the condition of the schema, and of each part that a reference names
        self._anchors = {f"#{part['$anchor']}": part for _, part in parts(schema) if "$anchor" in part}

    def endless(self) -> str | None:
        """A part that a reference names, else the schema, if its values have no end; None if there is none."""
        self._named["#"] = self._has_end(self._schema)
        while self._unread:
            part = self._unread.pop()
            self._users[self._all_of(self._needs(part))].append(self._of_part[id(part)])
            for inner in _schemas_in(part):
                self._has_end(inner)
        holding = [condition for condition, missing in enumerate(self._missing) if missing == 0]
        while holding:
            for user in self._users[holding.pop()]:
                self._missing[user] -= 1
                if self._missing[user] == 0:
                    holding.append(user)
        return next((name for name in reversed(self._named) if self._missing[self._named[name]] > 0), None)

    def _all_of(self, others: Iterable[int]) -> int:
        found = list(others)
        return self._condition(found, len(found))

    def _any_of(self, others: Iterable[int]) -> int:
        return self._condition(list(others), 1)

    def _condition(self, others: list[int], enough: int) -> int:
        self._missing.append(enough)
        self._users.append([])
        for other in others:
            self._users[other].append(len(self._missing) - 1)
        return len(self._missing) - 1

    def _has_end(self, part: Any) -> int:
        """The condition that some value of a part has an end. What has no values at all is left to llguidance."""
        if not isinstance(part, dict):
            return self._always
        if id(part) not in self._of_part:
            self._of_part[id(part)] = self._any_of(())
            self._unread.append(part)
        return self._of_part[id(part)]

    def _needs(self, part: dict[str, Any]) -> Iterator[int]:
        """Conditions that all hold if some value of a part has an end."""
        reference = part.get("$ref")
        if isinstance(reference, str):  # early drafts ignore everything beside it
            named = self._anchors.get(reference) if leads_away(reference) else part_at(self._schema, reference)
            self._named[reference] = self._has_end(named)
            yield self._named[reference]
            return
        yield from map(self._has_end, _list(part, "allOf"))
        yield from self._some_have(_list(part, "anyOf"))
        yield from self._some_have(_list(part, "oneOf"))
        types = [part["type"]] if isinstance(part.get("type"), str) else _list(part, "type")
        if types and all(one in ("object", "array") for one in types) and not part.keys() & {"const", "enum"}:
            yield self._any_of(self._all_of((self._object if one == "object" else self._array)(part)) for one in types)

    def _some_have(self, among: list[Any]) -> Iterator[int]:
        """The condition that some value of one of several parts has an end, if any of them allows a value."""
        allowing = [part for part in among if part is not False]
        if allowing:
            yield self._any_of(map(self._has_end, allowing))

    def _object(self, part: dict[str, Any]) -> Iterator[int]:
        """Conditions that all hold if some object of a part has an end."""
        properties, patterns = _mapping(part, "properties"), _mapping(part, "patternProperties")
        others = part.get("additionalProperties")
        for name in _list(part, "required"):
            if isinstance(name, str) and (name in properties or not patterns):
                yield self._has_end(properties.get(name, others))
        if _least(part, "minProperties") > 0:
            yield from self._some_have([*properties.values(), *patterns.values(), others])

    def _array(self, part: dict[str, Any]) -> Iterator[int]:
        """Conditions that all hold if some array of a part has an end."""
        first, others = _list(part, "prefixItems"), part.get("items")
        if isinstance(others, list):  # as early drafts have it
            first, others = others, part.get("additionalItems")
        least = _least(part, "minItems")
        yield from map(self._has_end, first[:least])
        if least > len(first):
            yield self._has_end(others)


def _schemas_in(part: dict[str, Any]) -> Iterator[Any]:
    """The schemas directly within a part, but for those that only references reach."""
    for key, value in part.items():
        if key in NAMED:
            yield from () if key in _DEFINITIONS or not isinstance(value, dict) else value.values()
        elif key not in DATA:
            yield from value if isinstance(value, list) else (value,)


def _list(part: dict[str, Any], key: str) -> list[Any]:
    return part[key] if isinstance(part.get(key), list) else []


def _mapping(part: dict[str, Any], key: str) -> dict[str, Any]:
    return part[key] if isinstance(part.get(key), dict) else {}


def _least(part: dict[str, Any], key: str) -> int:
    """A least number of values; 0 if there is none, and also for what is no number, which llguidance refuses."""
    return int(part[key]) if isinstance(part.get(key), int) else 0
