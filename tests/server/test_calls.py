"""Tool calls through the server: marks that are special tokens, streams, and the schemas of forced calls."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from trunkattn.server.bodies.protocol import Tool
from trunkattn.server.endpoints import chat
from trunkattn.server.endpoints.call_schemas import calls_schema, rerooted
from trunkattn.server.tool_calls import TOOL_CALL_PARSERS, ParsedAnswer

MESSAGES = [{"role": "user", "content": "hi"}]
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in "fg"]
BODY = {"messages": MESSAGES, "tools": TOOLS, "max_tokens": 200}
CHAT = "/v1/chat/completions"


def whole(server: Any, **body: Any) -> dict[str, Any]:
    return server.post(CHAT, {**BODY, **body}).json()["choices"][0]


def streamed(server: Any, **body: Any) -> tuple[str, list[Any], str | None]:
    """Content, calls and the reason of the end that a stream has."""
    lines = server.post(CHAT, {**BODY, **body, "stream": True}).text.splitlines()
    assert [line for line in lines if line][-1] == "data: [DONE]"
    choices = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    content = "".join(choice["delta"].get("content") or "" for choice in choices)
    return (
        content,
        [call for choice in choices for call in choice["delta"].get("tool_calls", ())],
        choices[-1]["finish_reason"],
    )


ANSWERS = {
    "hermes": 'Yes. \n<tool_call>{"name": "f", "arguments": {"a": "<tool_call>"}}</tool_call>\n',
    "mistral": 'Yes. \n[TOOL_CALLS] [{"name": "f", "arguments": {"a": "<tool_call>"}}]',
}


@pytest.mark.parametrize("special", [True, False], ids=["special", "plain"])
@pytest.mark.parametrize("parser", ANSWERS)
def test_calls_are_found_whatever_the_marks_are(
    start_server: Callable[..., Any], save_tiny_model: Callable[..., None], tmp_path: Path, parser: str, special: bool
) -> None:
    marks = ["<tool_call>", "</tool_call>"] if parser == "hermes" else ["[TOOL_CALLS]"]
    save_tiny_model(tmp_path, [AddedToken(mark, special=special, normalized=False) for mark in marks])
    server = start_server(path=tmp_path, tool_call_parser=parser)
    server.say(ANSWERS[parser])
    choice = whole(server)
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", {"a": "<tool_call>"})
    assert choice["message"]["content"] == "Yes." and choice["finish_reason"] == "tool_calls"
    content, calls, reason = streamed(server)
    assert (content, reason) == ("Yes.", "tool_calls") and calls[0]["function"] == call["function"]
    plain = whole(server, tool_choice="none")["message"]["content"]  # nothing is a call then
    assert plain == (without(ANSWERS[parser], marks) if special else ANSWERS[parser])


def without(text: str, marks: list[str]) -> str:
    for mark in marks:
        text = text.replace(mark, "")
    return text


# What the templates of Mistral's models do with the ids of a history.
CHECKS_IDS = (
    "{% for message in messages %}{% for call in message.tool_calls or [] %}"
    '{% if call.id | length != 9 %}{{ raise_exception("Tool call IDs should be alphanumeric strings with length 9!") }}'
    "{% endif %}{{ call.id }}{% endfor %}{% endfor %}{{ tools }}"
)


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_ids_of_mistrals_calls_are_such_as_its_templates_take(
    start_server: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, choice: str
) -> None:
    server = start_server(tool_call_parser="mistral")
    server.say(("[TOOL_CALLS]" if choice == "auto" else "") + '[{"name": "f", "arguments": {}}]' * 2)
    monkeypatch.setattr(server.llm.tokenizer, "chat_template", CHECKS_IDS)
    message = whole(server, tool_choice=choice)["message"]
    calls = [*message["tool_calls"], *streamed(server, tool_choice=choice)[1]]
    assert len({call["id"] for call in calls}) == len(calls) > 1 and all(call["id"].isalnum() for call in calls)
    history = [*MESSAGES, message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "1"}]
    answer = server.post(CHAT, BODY | {"messages": history})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("said", ['[{"name": "f", "arguments": {}}, {"name": "g", "argu', '[{"name": "f", "argu'])
def test_what_is_left_of_a_forced_call_is_no_content(server: Any, said: str) -> None:
    server.say(said)
    try:
        message = whole(server, tool_choice="required")["message"]
        content, calls, _ = streamed(server, tool_choice="required")
    finally:
        del server.llm.engine._sampler.sample
    names = ["f"] if "{}" in said else []
    assert not message["content"] and not content
    assert [call["function"]["name"] for call in message.get("tool_calls", ())] == names
    assert [call["function"]["name"] for call in calls] == names


def test_half_a_surrogate_pair_and_infinity_pass(server: Any) -> None:
    arguments = '{"a": "\\ud83d", "b": 1e999}'
    server.say(f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>')
    try:
        assert whole(server)["message"]["tool_calls"][0]["function"]["arguments"] == arguments
        (call,) = streamed(server)[1]
    finally:
        del server.llm.engine._sampler.sample
    assert call["function"]["arguments"] == arguments
    history = [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}]
    assert server.post(CHAT, {**BODY, "messages": history, "max_tokens": 1}).status_code == 200


def test_one_call_where_the_client_takes_no_more(server: Any) -> None:
    server.say("".join(f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>' for name in "fg"))
    try:
        for parallel, names in ((None, ["f", "g"]), (True, ["f", "g"]), (False, ["f"])):
            calls = whole(server, parallel_tool_calls=parallel)["message"]["tool_calls"]
            assert [call["function"]["name"] for call in calls] == names
            calls = streamed(server, parallel_tool_calls=parallel)[1]
            assert [(call["index"], call["function"]["name"]) for call in calls] == list(enumerate(names))
    finally:
        del server.llm.engine._sampler.sample


CITY = {
    "type": "object",
    "properties": {"name": {"enum": ["A", "B"]}},
    "required": ["name"],
    "additionalProperties": False,
}
NESTED = {
    "$defs": {"City": CITY},
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "g"}}])
def test_schemas_with_definitions_force_calls(server: Any, choice: Any, stream: bool) -> None:
    tools = [{"type": "function", "function": {"name": name, "parameters": NESTED}} for name in "fg"]
    spaces = server.llm.tokenizer(" \n\t\r")["input_ids"]  # a random model writes nothing else
    body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False, "seed": 3}
    body["logit_bias"] = {str(token_id): -100 for token_id in spaces}
    (call,) = streamed(server, **body)[1] if stream else whole(server, **body)["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"]["name"] in ("A", "B")


def test_an_answer_that_has_ended_is_parsed_once(server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others of the same request go on for many steps, and each would parse all that have ended."""
    parsed: list[str] = []
    parser = TOOL_CALL_PARSERS["hermes"]

    class Noted:
        marks = parser.marks
        visible = staticmethod(parser.visible)

        def parse(self, text: str) -> ParsedAnswer:
            parsed.append(text)
            return parser.parse(text)

    monkeypatch.setattr(chat, "TOOL_CALL_PARSERS", {"hermes": Noted()})
    streamed(server, n=4, max_tokens=40, seed=3, stop=list("aeiou"))
    assert len(parsed) == 4


@pytest.mark.parametrize("name", ["https://a.example/b.json", "b"])
def test_schemas_with_names_of_their_own_force_calls(server: Any, name: str) -> None:
    """Their references lead from the name, wherever they stand."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"$id": name, **NESTED}}}
    assert server.post(CHAT, {**BODY, "tools": [tool], "tool_choice": "required", "max_tokens": 3}).status_code == 200


@pytest.mark.parametrize("reference", ["#", "#/properties/again/anyOf/0"])
def test_schemas_that_refer_to_themselves_are_taken(server: Any, reference: str) -> None:
    again = {"anyOf": [{"type": "null"}, {"$ref": reference}]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"again": again}}}}
    assert server.post(CHAT, {**BODY, "tools": [tool], "tool_choice": "required", "max_tokens": 3}).status_code == 200


def test_references_lead_to_the_same_places() -> None:
    schema = {
        "$defs": {"a": {"$ref": "#"}, "$ref": {"$ref": "#/$defs/a"}},
        "properties": {"$ref": {"const": {"$ref": "#/x"}}, "const": {"$ref": "#/$defs/a"}},
        "allOf": [{"$ref": "other.json#/a"}, {"$ref": "#anchor"}, {"enum": [{"$ref": "#"}]}],
    }
    assert rerooted(schema, "#/b") == {
        "$defs": {"a": {"$ref": "#/b"}, "$ref": {"$ref": "#/b/$defs/a"}},
        "properties": {"$ref": {"const": {"$ref": "#/x"}}, "const": {"$ref": "#/b/$defs/a"}},
        "allOf": [{"$ref": "other.json#/a"}, {"$ref": "#anchor"}, {"enum": [{"$ref": "#"}]}],
    }
    named = {"properties": {"$id": {"$ref": "#"}}, "items": {"$id": "x", "$ref": "#"}}
    assert rerooted(named, "#/b") == {"properties": {"$id": {"$ref": "#/b"}}, "items": {"$id": "x", "$ref": "#"}}
    deep: dict[str, Any] = {}
    for _ in range(5000):
        deep = {"items": deep}
    rerooted(deep, "#/b")
    whole_schema = calls_schema([Tool.model_validate(tool) for tool in TOOLS], only_one=True)
    assert whole_schema["maxItems"] == 1 and len(whole_schema["items"]["anyOf"]) == 2
