"""Limits of structured outputs, which hold before anything is compiled.

A compiler recurses along references and nesting, and a stack that overflows ends the process. So chains are counted
here, without recursion.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from trunkattn.engine.sampling_params import StructuredOutputsParams

_RULE: Final = re.compile(r"^\s*[?!]?([A-Za-z_]\w*)\s*(?:\[[^\]\n]*\])?\s*(?:\.\s*-?\d+)?\s*:", re.MULTILINE)
_WORD: Final = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class FormLimits:
    """The largest form that is compiled. The values for schemas are OpenAI's, where it has some.

    Attributes:
        max_characters: characters of all names and texts of a schema, of all choices, or of a grammar. OpenAI: 120,000.
        max_properties: properties of a schema, in all. OpenAI: 5,000.
        max_enum_values: values of all enums of a schema, or choices. OpenAI: 1,000.
        max_depth: levels of lists and mappings within a schema.
        max_chain: definitions of a schema, or rules of a grammar, that name one another in a row.
        max_rules: rules of a grammar.
        max_regex_characters: characters of a regular expression, and of each pattern of a schema.
        cache_bytes: memory for compiled forms, estimated from their sizes.
    """

    max_characters: int = 120_000
    max_properties: int = 5_000
    max_enum_values: int = 1_000
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
        _at_most("regex", len(form.regex), limits.max_regex_characters, "characters")
    if form.choice is not None:
        choices = list(form.choice)
        _at_most("choice", len(choices), limits.max_enum_values, "texts")
        _at_most("choice", sum(map(len, choices)), limits.max_characters, "characters")
    if form.grammar is not None:
        _check_grammar(form.grammar, limits)


def _at_most(name: str, count: int, most: int, what: str) -> None:
    if count > most:
        raise ValueError(f"structured_outputs.{name} has {count} {what}: expected at most {most}")


def depth_of(value: Any, most: int) -> int:
    """Levels of lists and mappings in a value of JSON, counted up to `most` + 1. A scalar has none."""
    level, depth = [value], 0
    while depth <= most:
        inner = [one for outer in level for one in _inside(outer)]
        if not any(isinstance(one, Mapping | list) for one in level):
            return depth
        level, depth = inner, depth + 1
    return depth


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, Mapping):
        return value.values()
    return value if isinstance(value, list) else ()


def _check_schema(schema: Any, limits: FormLimits) -> None:
    _at_most("json", depth_of(schema, limits.max_depth), limits.max_depth, "levels of nesting")
    properties = enums = characters = 0
    for part in _mappings(schema):
        properties += len(part["properties"]) if isinstance(part.get("properties"), Mapping) else 0
        enums += len(part["enum"]) if isinstance(part.get("enum"), list) else 0
        characters += sum(len(name) for name in part)
        characters += sum(len(text) for value in part.values() for text in _texts(value))
        if isinstance(part.get("pattern"), str):
            _at_most("json: a pattern", len(part["pattern"]), limits.max_regex_characters, "characters")
    _at_most("json", properties, limits.max_properties, "properties")
    _at_most("json", enums, limits.max_enum_values, "values of enums")
    _at_most("json", characters, limits.max_characters, "characters")
    _at_most("json", longest_chain(_references(schema)), limits.max_chain, "references in a row")


def _texts(value: Any) -> Iterator[str]:
    """The texts of a value of a schema that no mapping inside it holds."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        yield from (text for text in value if isinstance(text, str))


def _mappings(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every mapping within a value of JSON, itself included."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            yield one
        waiting.extend(_inside(one))


def _references(schema: Any) -> dict[str, list[str]]:
    """Place of each part of a schema that a reference names -> the references within it. The whole schema is "#"."""
    wanted = {one["$ref"] for one in _mappings(schema) if isinstance(one.get("$ref"), str)}
    found = {"#": schema} | {name: _at(schema, name) for name in wanted}
    return {
        name: [one["$ref"] for one in _mappings(part) if isinstance(one.get("$ref"), str)]
        for name, part in found.items()
    }


def _at(schema: Any, pointer: str) -> Any:
    """What a reference names; None if nothing is there."""
    for step in pointer.removeprefix("#").split("/")[1:]:
        key = step.replace("~1", "/").replace("~0", "~")
        schema = schema.get(key) if isinstance(schema, Mapping) else None
    return schema


def _check_grammar(grammar: str, limits: FormLimits) -> None:
    _at_most("grammar", len(grammar), limits.max_characters, "characters")
    rules = list(_RULE.finditer(grammar))
    _at_most("grammar", len(rules), limits.max_rules, "rules")
    ends = [rule.start() for rule in rules[1:]] + [len(grammar)]
    names = {rule[1] for rule in rules}
    graph = {
        rule[1]: [word for word in _WORD.findall(grammar, rule.end(), end) if word in names]
        for rule, end in zip(rules, ends, strict=True)
    }
    _at_most("grammar", longest_chain(graph), limits.max_chain, "rules that name one another in a row")


def longest_chain(graph: Mapping[str, Sequence[str]]) -> int:
    """Nodes of the longest path that a depth-first search follows. An edge back to the path adds nothing.

    Args:
        graph: node -> nodes that it names. Names without a node of their own count as ends.
    """
    length: dict[str, int] = {}
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
