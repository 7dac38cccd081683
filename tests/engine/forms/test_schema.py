"""Schemas with keywords that llguidance has not: what they accept if they are rewritten, and what is said if not."""

import json
from typing import Any

import llguidance
import pytest

from trunkattn.engine import StructuredOutputsParams
from trunkattn.engine.forms.grammar import check_grammar, grammar_of
from trunkattn.engine.forms.limits import FormLimits

BYTES = llguidance.LLTokenizer("byte")
VALUES: list[Any] = [None, False, True, 0, 1, 2, 1.5, "", "a", [], [1], {}, {"a": 1}, {"a": None}, {"b": 1}]
TREE = {"type": "array", "items": {"$dynamicRef": "#node"}, "$dynamicAnchor": "node"}
LIST = {"$defs": {"node": TREE}, "$dynamicRef": "#node"}


def accepts(schema: Any, value: Any) -> bool:
    grammar = grammar_of(StructuredOutputsParams(json=schema), FormLimits()).grammar
    matcher = llguidance.LLMatcher(BYTES, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = BYTES.tokenize_str(json.dumps(value))
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize(
    ("schema", "accepted"),
    [
        ({"not": False}, VALUES),
        ({"not": {"type": "null"}}, VALUES[1:]),
        ({"not": {"type": ["null", "number"], "title": "x"}}, [False, True, *VALUES[7:]]),
        ({"type": ["string", "null"], "not": {"type": "null"}}, ["", "a"]),
        ({"type": ["integer", "string"], "not": {"type": "number"}}, ["", "a"]),
        ({"type": ["integer", "null"], "not": {"type": "integer"}}, [None]),
        ({"type": "boolean", "not": {"const": True}}, [False]),
        ({"type": ["null", "boolean"], "not": {"enum": [True, 1]}}, [None, False]),
        ({"enum": [1, 2, "a"], "not": {"const": 1.0}}, [2, "a"]),
        ({"enum": [1, True, 0.5, "0.5"], "not": {"enum": [True, 0.5]}}, [1]),
        ({"enum": [1.5, 2, "a"], "not": {"type": "integer"}}, [1.5, "a"]),
        ({"enum": [1, "a", "b"], "not": {"type": "string", "enum": [1, "a"]}}, [1]),
        ({"enum": [{"a": 1, "b": 2}, {"a": None}], "not": {"const": {"b": 2.0, "a": 1}}}, [{"a": None}]),
        ({"const": "a", "not": {"const": "b"}}, ["a"]),
        ({"anyOf": [{"not": {}}, {"type": "string"}]}, ["", "a"]),
        ({"anyOf": [{"const": 1, "not": {"type": "number"}}, {"const": 2}]}, [2]),
        ({"type": "object", "properties": {"a": {"not": True}}}, [{}, {"b": 1}]),
        ({"type": "object", "properties": {"not": {"not": {}}}, "additionalProperties": {"not": {}}}, [{}]),
        ({"enum": [{"not": {}}, 1]}, [1]),
        ({"not": {"type": "null"}, "$defs": {"not": {"type": "null"}}}, VALUES[1:]),
        (LIST, [[]]),
        (LIST | {"$schema": "http://json-schema.org/draft-07/schema#"}, VALUES),  # has no such keyword
    ],
    ids=json.dumps,
)
def test_what_is_rewritten_accepts_what_it_says(schema: Any, accepted: list[Any]) -> None:
    as_text = [json.dumps(value) for value in accepted]
    assert [json.dumps(value) for value in VALUES if accepts(schema, value)] == as_text
    assert not accepts(LIST, [[[], 1]]) and accepts(LIST, [[[]], []])


BRANCHES = "write what is allowed with type, enum, const or anyOf"


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "string", "not": {"const": "a"}}, f"not at '#' cannot be compiled: {BRANCHES}"),
        ({"not": {"type": "integer"}}, f"not at '#' cannot be compiled: {BRANCHES}"),
        (
            {"type": "object", "properties": {"a/b": {"items": [{}, {"not": {"required": ["a"]}}]}}},
            f"not at '#/properties/a~1b/items/1' cannot be compiled: {BRANCHES}",
        ),
        ({"items": {"if": {}, "then": {}}}, f"if at '#/items' and then at '#/items' cannot be compiled: {BRANCHES}"),
        (
            {"anyOf": [{"oneOf": [{}, {}]}]},
            f"oneOf at '#/anyOf/0' cannot be compiled where its branches overlap: {BRANCHES}",
        ),
        ({"oneOf": 5}, "expected a valid json; oneOf must be an array"),
        ({"items": {"uniqueItems": True}}, "uniqueItems at '#/items' cannot be compiled: leave it out"),
        (
            {"properties": {name: {"uniqueItems": True} for name in "abcd"}},
            "uniqueItems at '#/properties/a, #/properties/b, #/properties/c', … cannot be compiled: leave it out",
        ),
        ({"$recursiveRef": "#"}, "$recursiveRef at '#' cannot be compiled: write $ref and $defs"),
        (
            {"properties": {"a": {"$id": "x", "$dynamicRef": "#a"}}},
            "$dynamicRef at '#/properties/a' cannot be compiled: write $ref and $defs",
        ),
        (
            {"type": "string", "not": {"enum": ["a"]}, "anyOf": [{"$ref": "#/not"}]},
            f"not at '#' cannot be compiled: {BRANCHES}",
        ),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "not": {"const": 1}}, "not at '#' cannot be compiled"),
        ({"properties": {"a": {"id": "#x"}, "b": {"$ref": "#x"}}}, "expected a valid json; Anchor 'x' does not exist"),
        ({"not": {}}, "expected a valid json; no value follows it: "),
        (
            {"type": "integer", "minimum": 1.2, "maximum": 1.8},
            "expected a valid json; no value follows it: integer interval [1.2, 1.8] contains no integer values",
        ),
        (
            {"type": "string", "pattern": "^abc$", "maxLength": 2},
            "expected a valid json; no value follows it: no text has such a pattern, format and length",
        ),
    ],
)
def test_a_refusal_names_keyword_and_place_and_what_to_do(schema: Any, message: str) -> None:
    with pytest.raises(ValueError) as refused:
        check_grammar(StructuredOutputsParams(json=schema), FormLimits())
    assert message in str(refused.value) and "start:" not in str(refused.value)


def test_a_place_of_long_names_takes_no_memory() -> None:
    schema: Any = {"not": {"required": []}}
    for _ in range(20):
        schema = {"properties": {"x" * 5_000: schema}}
    with pytest.raises(ValueError, match=r"not at '#/properties/x{64}/prop.* cannot be compiled") as refused:
        check_grammar(StructuredOutputsParams(json=schema), FormLimits())
    assert len(str(refused.value)) < 800
