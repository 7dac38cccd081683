"""Schemas whose values never end, because each must hold another one."""

import json
import re
from itertools import pairwise
from typing import Any

import pytest

from trunkattn.engine import StructuredOutputsParams
from trunkattn.engine.forms.ends import check_ends
from trunkattn.engine.forms.grammar import check_grammar, grammar_of
from trunkattn.engine.forms.limits import FormLimits

ROOT = {"$ref": "#"}


def list_of(items: Any, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


def object_of(required: Any, **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"next": required}, "required": ["next"], **more}


NODE = {"$ref": "#/$defs/node"}
ENDLESS = {"node": object_of(NODE)}


@pytest.mark.parametrize(
    ("schema", "name"),
    [
        (ROOT, "#"),
        ({"allOf": [{"type": "object"}, ROOT]}, "#"),
        (object_of(ROOT), "#"),
        (object_of(list_of(ROOT, minItems=1)), "#"),
        (
            {
                "type": ["array", "object"],
                "minItems": 1,
                "items": ROOT,
                "required": ["a"],
                "additionalProperties": ROOT,
            },
            "#",
        ),
        ({"type": "object", "minProperties": 1, "additionalProperties": ROOT}, "#"),
        ({"type": "object", "minProperties": 1, "properties": {"a": ROOT}, "additionalProperties": False}, "#"),
        (list_of(True, minItems=2, prefixItems=[{}, ROOT]), "#"),
        (list_of([ROOT], minItems=1), "#"),  # as early drafts have it
        ({"anyOf": [object_of(ROOT), list_of(ROOT, minItems=1), False]}, "#"),
        ({"oneOf": [object_of(ROOT), list_of(ROOT, minItems=1)]}, "#"),
        (list_of(NODE) | {"$defs": ENDLESS}, "#/$defs/node"),
        (list_of({"$ref": "#n"}) | {"$defs": {"node": object_of({"$ref": "#n"}, **{"$anchor": "n"})}}, "#n"),
        ({"properties": {"a": NODE}, "$defs": ENDLESS}, "#/$defs/node"),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "items": {"$ref": "#/$defs/a"}},
            "#/$defs/b",
        ),
    ],
    ids=json.dumps,
)
def test_values_without_an_end_are_refused_by_the_name_of_their_schema(schema: Any, name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"a value of '{name}' never ends, because it must")):
        grammar_of(StructuredOutputsParams(json=schema), FormLimits())
    if "$anchor" not in json.dumps(schema):
        with pytest.raises(ValueError, match="never ends"):
            check_grammar(StructuredOutputsParams(grammar=f'start: "a" %json {json.dumps(schema)}'), FormLimits())


@pytest.mark.parametrize(
    "schema",
    [
        list_of(ROOT),
        object_of({"anyOf": [ROOT, {"type": "null"}]}),
        object_of(list_of(ROOT)),
        object_of({"type": ["object", "null"], **object_of(ROOT) | {"type": ["object", "null"]}}),
        {"type": "object", "additionalProperties": {"anyOf": [{}, ROOT]}, "minProperties": 1},
        {
            "type": "object",
            "required": ["a"],
            "patternProperties": {"a": {"type": "null"}},
            "additionalProperties": ROOT,
        },
        list_of(ROOT, minItems=1, prefixItems=[{"type": "null"}]),
        {"$ref": "#/$defs/node", "$defs": {"node": {"anyOf": [{"type": "string"}, list_of(NODE, minItems=1)]}}},
        {"$defs": ENDLESS, "type": "null"},  # nobody refers to it
        {"type": "array", "maxItems": 0, "items": {"enum": [{"$ref": "#"}]}},
    ],
    ids=json.dumps,
)
def test_schemas_that_let_a_value_end_are_compiled(schema: Any) -> None:
    check_grammar(StructuredOutputsParams(json=schema), FormLimits())


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": 5, "type": [{}], "required": [[]], "properties": [], "items": 5, "minItems": "x", "anyOf": {}},
        {"type": ["object", {}], "required": 5, "minProperties": None, "patternProperties": [], "oneOf": [5, None]},
        {"type": "array", "prefixItems": {}, "minItems": 10**30, "$anchor": {}, "additionalItems": []},
        {"$ref": "http://example.com/x", "$defs": []},
        {"$ref": "#/default", "default": {"$ref": "#/enum/0"}, "enum": [5]},
        [],
        True,
    ],
    ids=json.dumps,
)
def test_what_is_no_schema_is_left_to_llguidance(schema: Any) -> None:
    check_ends(schema)


def test_the_time_is_linear_in_the_references() -> None:
    names = [f"n{number}" for number in range(2_000)]
    chain = {name: object_of({"$ref": f"#/$defs/{after}"}) for name, after in pairwise(names)}
    check_ends({"$ref": "#/$defs/n0", "$defs": {**chain, names[-1]: {"type": "null"}}})
