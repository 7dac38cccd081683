"""Numbers of JSON schemas that llguidance reads as others."""

import json
import re
from typing import Any

import llguidance
import pytest

from trunkattn.engine import StructuredOutputsParams
from trunkattn.engine.forms.grammar import grammar_of
from trunkattn.engine.forms.limits import FormLimits
from trunkattn.engine.forms.numbers import separate_bounds

BYTES = llguidance.LLTokenizer("byte")
SMALL = {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}


def accepted(schema: Any, texts: list[str]) -> list[str]:
    """The texts that are answers of a schema."""
    grammar = grammar_of(StructuredOutputsParams(json=schema), FormLimits()).grammar
    start, found = llguidance.LLMatcher(BYTES, grammar, log_level=0), []
    assert not start.is_error(), start.get_error()
    for text in texts:
        matcher, tokens = start.deep_copy(), BYTES.tokenize_str(text)
        if matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting():
            found.append(text)
    return found


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"const": 2**53 + 1}, "const at '#'"),
        ({"type": "integer", "const": 10**20}, "const at '#'"),
        ({"properties": {"id": {"enum": ["a", 1234567890123456789]}}}, "enum at '#/properties/id'"),
        ({"anyOf": [{"const": {"id": [-(2**60) - 1]}}]}, "const at '#/anyOf/0'"),
        ({"type": "integer", "minimum": 2**53 + 1}, "minimum at '#'"),
        ({"type": "integer", "maximum": 2**53 + 3}, "maximum at '#'"),
        ({"type": "integer", "exclusiveMinimum": 2**53}, "exclusiveMinimum at '#'"),
        ({"minimum": float(2**53), "exclusiveMinimum": True}, "exclusiveMinimum at '#'"),
        ({"type": "integer", "maximum": -(10**400)}, "maximum at '#'"),
    ],
    ids=json.dumps,
)
def test_numbers_that_would_change_are_refused(schema: Any, place: str) -> None:
    written = json.dumps(schema)
    for form in ({"json": schema}, {"json": written}, {"grammar": f"start: %json {written}"}):
        with pytest.raises(ValueError, match=re.escape(place) + r".*: expected a number between"):
            grammar_of(StructuredOutputsParams(**form), FormLimits())


def test_the_largest_numbers_that_are_followed() -> None:
    limits = {"type": "integer", "minimum": 1 - 2**53, "maximum": 2**64 - 1, "default": 10**30}
    assert accepted(limits, [str(1 - 2**53), str(-(2**53)), str(2**63 - 1), str(2**64)]) == [
        str(1 - 2**53),
        str(2**63 - 1),
    ]
    listed = {"enum": [2**53 - 1, 1 - 2**53]}
    assert accepted(listed, [str(2**53 - 1), str(2**53 - 2), str(1 - 2**53)]) == [str(2**53 - 1), str(1 - 2**53)]


@pytest.mark.parametrize(
    ("schema", "numbers"),
    [
        (SMALL, ["0.5", "0.25"]),
        ({"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 0.5}, ["0.5", "0.25"]),
        ({"allOf": [{"type": "number", "exclusiveMinimum": 0.0}, {"exclusiveMaximum": 0.5}]}, ["0.25"]),
        ({"$ref": "#/$defs/a", "exclusiveMinimum": 0, "$defs": {"a": SMALL}}, ["0.5", "0.25"]),
        ({"type": "number", "minimum": 0.25, "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.25"]),
        ({"type": "number", "exclusiveMinimum": -0.5, "exclusiveMaximum": 0}, ["-0.25"]),
        ({"type": "number", "exclusiveMinimum": 2, "maximum": 2.5}, ["2.5"]),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["0.5", "0.25", "1"]),
        ({"type": "integer", "exclusiveMinimum": 0, "anyOf": [{"maximum": 0.5}, {"maximum": 2}]}, ["1", "2"]),
    ],
    ids=json.dumps,
)  # fmt: skip
def test_an_integer_beyond_a_strict_bound_is_not_allowed(schema: Any, numbers: list[str]) -> None:
    tried = ["0", "0.0", "-0", "0.5", "0.25", "1", "2", "2.0", "2.5", "-0.25", "-0.5", "3"]
    assert accepted(schema, tried) == numbers


@pytest.mark.parametrize("bound", [1, 2, 7, 10, 16, 99, 100, 1000, 12345, 10**6, 10**9, 10**12])
def test_a_strict_bound_of_any_size_is_not_allowed(bound: int) -> None:
    """llguidance reads 100.00000000000001 as 100."""
    above = {"type": "number", "exclusiveMinimum": bound, "maximum": bound + 0.75}
    below = {"type": "number", "exclusiveMaximum": -bound, "minimum": -bound - 0.75}
    for schema, sign in ((above, 1), (below, -1)):
        half = str(sign * (bound + 0.5))
        assert accepted(schema, [str(sign * bound), half]) == [half]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_large_strict_bound_leaves_the_next_integer(sign: int) -> None:
    """From 2^51 on float64 has no four numbers between it and the bound."""
    names = ("exclusiveMinimum", "minimum", "maximum") if sign > 0 else ("exclusiveMaximum", "maximum", "minimum")
    strict, plain, other = names
    schema: Any = {"type": "integer", strict: sign * 2**51, "anyOf": [{other: sign * (2**51 + 0.5)}, {}]}
    assert separate_bounds(schema)
    assert schema[plain] == sign * (2**51 + 1) and strict not in schema


def test_a_grammar_writes_such_bounds_itself() -> None:
    with pytest.raises(ValueError, match=r"structured_outputs\.grammar: .*: expected minimum or maximum there"):
        grammar_of(StructuredOutputsParams(grammar=f"start: %json {json.dumps(SMALL)}"), FormLimits())


class Counted(int):
    """Counts how often such numbers are compared."""

    compared = 0

    def __lt__(self, other: int) -> bool:
        Counted.compared += 1
        return int(self) < other


def test_thousands_of_bounds_are_not_compared_with_one_another() -> None:
    count = 2_000
    bounds = [(Counted(place), Counted(place + 20_000)) for place in range(count)]
    assert not separate_bounds({"anyOf": [{"exclusiveMinimum": low, "maximum": high} for low, high in bounds]})
    assert 0 < Counted.compared < 50 * count
