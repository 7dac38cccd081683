"""Tool calls in a model's text."""

import json

import pytest

from trunkattn.server.tool_calls import FORCED, TOOL_CALL_PARSERS

CALL = '{"name": "weather", "arguments": {"city": "Zürich"}}'
OTHER = '{"name": "time", "arguments": {}}'


@pytest.mark.parametrize(
    ("parser", "text", "content", "names"),
    [
        ("hermes", f"Let me see. <tool_call>\n{CALL}\n</tool_call>", "Let me see.", ["weather"]),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>", "", ["weather", "time"]),
        ("hermes", f"<tool_call>{CALL}", "", ["weather"]),
        ("hermes", "No call <tool_call>nonsense</tool_call>", "No call <tool_call>nonsense</tool_call>", []),
        ("hermes", "plain", "plain", []),
        ("llama3_json", CALL.replace("arguments", "parameters"), "", ["weather"]),
        ("llama3_json", f"{CALL}; {OTHER}", "", ["weather", "time"]),
        ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
        ("mistral", f"[TOOL_CALLS][{CALL}, {OTHER}]", "", ["weather", "time"]),
    ],
)
def test_a_finished_answer(parser: str, text: str, content: str, names: list[str]) -> None:
    parsed = TOOL_CALL_PARSERS[parser].parse(text)
    assert (parsed.content, [call.name for call in parsed.calls]) == (content, names)
    if names:
        assert json.loads(parsed.calls[0].arguments) == {"city": "Zürich"}
        assert len({call.id for call in parsed.calls}) == len(names)


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_what_is_shown_of_an_unfinished_answer_is_never_taken_back(parser: str) -> None:
    for text in (f"See: <tool_call>{CALL}</tool_call>", f"[TOOL_CALLS][{CALL}]", CALL, "a < b and [c]", "plain"):
        shown = ""
        for end in range(len(text) + 1):
            visible = TOOL_CALL_PARSERS[parser].visible(text[:end])
            assert visible.startswith(shown) or shown.startswith(visible)
            shown = max(shown, visible, key=len)
        content = TOOL_CALL_PARSERS[parser].parse(text).content
        assert content.startswith(shown.rstrip()), (text, shown)


def test_a_forced_answer_is_a_list_of_calls() -> None:
    parsed = FORCED(f"[{CALL}]")
    assert parsed.content == "" and [call.name for call in parsed.calls] == ["weather"]
