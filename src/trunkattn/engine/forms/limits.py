"""Limits of structured outputs, which hold before anything is compiled.

A compiler recurses along references and nesting, and a stack that overflows ends the process. So chains are counted
here, without recursion.
"""

import json
import re
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar
from urllib.parse import unquote

from trunkattn.engine.forms.numbers import check_numbers, separate_bounds
from trunkattn.engine.sampling_params import StructuredOutputsParams

# No two of its parts can match the same space, so that its time is linear in the text.
_RULE: Final = re.compile(r"^[^\S\n]*[?!]?([A-Za-z_]\w*)\s*(?:\[[^\]\n]*\]\s*)?(?:\.\s*-?\d+\s*)?:", re.MULTILINE)
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_WORD: Final = re.compile(r"[A-Za-z_]\w*")
_JSON_RULE: Final = re.compile(r"%json\s*")  # a schema within a grammar follows
_LONGEST_INTEGER: Final = 300  # digits; Python refuses integers of thousands
_DECODER: Final = json.JSONDecoder(parse_int=lambda text: (int if len(text) < _LONGEST_INTEGER else float)(text))

Node = TypeVar("Node", bound=Hashable)


@dataclass(frozen=True)
class FormLimits:
    """The largest form that is compiled. The values for schemas are OpenAI's, where it has some.

    Attributes:
        max_characters: characters of all names and texts of a schema, of all choices, or of a grammar. OpenAI: 120,000.
        max_properties: properties of a schema, in all. OpenAI: 5,000.
        max_enum_values: values of all enums of a schema, or choices. OpenAI: 1,000.
        max_values: values of a schema, of any kind, in all. Their digits count as characters, too, by themselves.
        max_text: characters of a schema that is given as JSON text.
        max_depth: levels of lists and mappings within a schema.
        max_chain: definitions of a schema, or rules of a grammar, that name one another in a row; and references that
            are no paths within their schema, which may be a chain.
        max_rules: rules of a grammar.
        max_regex_characters: characters of a regular expression, and of each pattern of a schema.
        cache_bytes: memory for compiled forms, estimated from their sizes.
    """

    max_characters: int = 120_000
    max_properties: int = 5_000
    max_enum_values: int = 1_000
    max_values: int = 50_000
    max_text: int = 1 << 20
    max_depth: int = 64
    max_chain: int = 100
    max_rules: int = 1_000
    max_regex_characters: int = 8_192
    cache_bytes: int = 64 << 20


def check_form(form: StructuredOutputsParams, schema: Any, limits: FormLimits) -> None:
    """Raises ValueError, naming the form and the limit, if a form is over one of its limits.

    Args:
        form: the form.
        schema: its JSON schema as plain values; None if it has none.
        limits: see `FormLimits`.
    """
    if schema is not None:
        _check_schema(schema, limits)
    if form.regex is not None:
        _check_pattern("regex", form.regex, limits)
    if form.choice is not None:
        choices = list(form.choice)
        _at_most("choice", len(choices), limits.max_enum_values, "texts")
        _at_most("choice", sum(map(len, choices)), limits.max_characters, "characters")
    if form.grammar is not None:
        _check_grammar(form.grammar, limits)


def _at_most(name: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise ValueError(f"structured_outputs.{name} has {count} {what}: expected at most {most}")


def _check_pattern(name: str, pattern: str, limits: FormLimits) -> None:
    _at_most(name, len(pattern), limits.max_regex_characters, "characters")
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:  # llguidance drops it, and another expression is left
        raise ValueError(f"structured_outputs.{name} ends in a backslash: expected a character after it")


def depth_of(value: Any, most: int) -> int:
    """Levels of lists and mappings in a value of JSON, counted up to `most` + 1. A scalar has none."""
    depth = 0
    for depth, _ in enumerate(_levels(value), 1):
        if depth > most:
            break
    return depth


def _levels(value: Any) -> Iterator[list[Any]]:
    """The lists and mappings of each level of a value of JSON. Scalars, of which there may be many, are told by their
    types, which is quick."""
    level: list[Any] = [value]
    while level := [one for one in level if type(one) not in _SCALARS and isinstance(one, Mapping | list)]:
        yield level
        level = [one for outer in level for one in _inside(outer)]


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def check_size(schema: Any, limits: FormLimits) -> None:
    """Raises ValueError if a schema, as JSON text or as values, is too large to be read or written."""
    if isinstance(schema, str):
        _at_most("json", len(schema), limits.max_text, "characters of JSON")
    else:
        _at_most("json", _count_values(schema, limits.max_values), limits.max_values, "values or more")
        _at_most("json", sum(map(_num_digits, _values(schema))), limits.max_characters, "digits")


def _num_digits(value: Any) -> int:
    """About as many digits as an integer has, without writing it, which takes quadratic time."""
    return value.bit_length() * 3 // 10 if isinstance(value, int) else 0


def _count_values(value: Any, most: int) -> int:
    """Values within a value of JSON, itself included. Counting ends above `most`."""
    count = 1
    for level in _levels(value):
        count += sum(map(len, level))
        if count > most:
            break
    return count


def _check_schema(schema: Any, limits: FormLimits) -> None:
    check_size(schema, limits)
    _at_most("json", depth_of(schema, limits.max_depth), limits.max_depth, "levels of nesting or more")
    properties = enums = 0
    for part in _mappings(schema):
        properties += len(part["properties"]) if isinstance(part.get("properties"), Mapping) else 0
        enums += len(part["enum"]) if isinstance(part.get("enum"), list) else 0
        for pattern in _patterns(part):
            _check_pattern("json: a pattern", pattern, limits)
    _at_most("json", properties, limits.max_properties, "properties")
    _at_most("json", enums, limits.max_enum_values, "values of enums")
    _at_most("json", sum(map(len, _texts(schema))), limits.max_characters, "characters")
    _at_most("json", sum(map(leads_away, _names(schema))), limits.max_chain, "references that are no paths within it")
    _at_most("json", longest_chain(_references(schema)), limits.max_chain, "references in a row")
    check_numbers(schema)


def _patterns(part: Mapping[str, Any]) -> Iterator[str]:
    """The regular expressions of one part of a schema."""
    if isinstance(part.get("pattern"), str):
        yield part["pattern"]
    if isinstance(part.get("patternProperties"), Mapping):
        yield from part["patternProperties"]


def _texts(schema: Any) -> Iterator[str]:
    """Every name and every text of a schema."""
    for value in _values(schema):
        if isinstance(value, str):
            yield value
        elif isinstance(value, Mapping):
            yield from value


def _values(value: Any) -> Iterator[Any]:
    """Every value within a value of JSON, itself included."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        yield one
        waiting.extend(_inside(one))


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping within a value of JSON, itself included."""
    return (one for one in _values(value) if isinstance(one, Mapping))


def _names(part: Any) -> set[str]:
    """The references within a part of a schema."""
    return {one["$ref"] for one in _mappings(part) if isinstance(one.get("$ref"), str)}


def _references(schema: Any) -> dict[int, list[int]]:
    """The graph of references in a schema: its nodes are the whole schema and each part that a reference names, and its
    edges lead to the parts that references within a node name. A node is the `id` of a part, because a part may have
    several names."""
    named = {name: part_at(schema, name) for name in _names(schema)}
    parts = {id(part): part for part in (schema, *named.values())}
    return {number: list({id(named[name]) for name in _names(part)}) for number, part in parts.items()}


def leads_away(reference: str) -> bool:
    """Whether a reference is an anchor or an address, and not a path within its schema."""
    return reference != "#" and not reference.startswith("#/")


def part_at(schema: Any, pointer: str) -> Any:
    """The part of a schema that a reference names; None if there is none."""
    for step in unquote(pointer).removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(key)] if key.isascii() and key.isdecimal() and int(key) < len(schema) else None
        else:
            schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _check_grammar(grammar: str, limits: FormLimits) -> None:
    _at_most("grammar", len(grammar), limits.max_characters, "characters")
    rules = list(_RULE.finditer(grammar))
    _at_most("grammar", len(rules), limits.max_rules, "rules")
    ends = [*(rule.start() for rule in rules[1:]), len(grammar)][: len(rules)]
    names = {rule[1] for rule in rules}
    graph = {
        rule[1]: [word for word in _WORD.findall(grammar, rule.end(), end) if word in names]
        for rule, end in zip(rules, ends, strict=True)
    }
    _at_most("grammar", longest_chain(graph), limits.max_chain, "rules that name one another in a row")
    for schema in schemas_within(grammar):
        _check_schema(schema, limits)
        if separate_bounds(schema):
            raise ValueError(
                "structured_outputs.grammar: a schema in it has an integer as exclusiveMinimum or exclusiveMaximum, "
                "less than 1 before another bound: expected minimum or maximum there, because llguidance would allow "
                "the integer"
            )


def schemas_within(grammar: str) -> Iterator[Any]:
    """The JSON schemas within a grammar. Whatever is not JSON is skipped: llguidance refuses it, or it is part of a
    quoted text."""
    for found in _JSON_RULE.finditer(grammar):
        with suppress(ValueError, RecursionError):
            schema, _ = _DECODER.raw_decode(grammar, found.end())
            yield schema


def longest_chain(graph: Mapping[Node, Sequence[Node]]) -> int:
    """Nodes of the longest path that a depth-first search follows. An edge back to the path adds nothing.

    Args:
        graph: node -> nodes that it names. Names without a node of their own count as ends.
    """
    length: dict[Node, int] = {}
    for start in graph:
        if start in length:
            continue
        length[start] = 1
        path, on_path = [(start, iter(graph[start]))], {start}
        while path:
            node, rest = path[-1]
            following = next(rest, None)
            if following is None:
                path.pop()
                on_path.remove(node)
                if path:
                    above = path[-1][0]
                    length[above] = max(length[above], length[node] + 1)
            elif following not in length:
                length[following] = 1
                path.append((following, iter(graph.get(following, ()))))
                on_path.add(following)
            elif following not in on_path:
                length[node] = max(length[node], length[following] + 1)
    return max(length.values(), default=0)
