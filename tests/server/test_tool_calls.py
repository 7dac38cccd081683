"""Tool calls in a model's text."""

import json
import random
import time

import pytest

from trunkattn.server.tool_calls import TOOL_CALL_PARSERS, parse_forced

CALL = '{"name": "weather", "arguments": {"city": "Zürich"}}'
OTHER = '{"name": "time", "arguments": {}}'


@pytest.mark.parametrize(
    ("parser", "text", "content", "names"),
    [
        ("hermes", f"Let me see. <tool_call>\n{CALL}\n</tool_call>", "Let me see.", ["weather"]),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{OTHER}</tool_call>", "", ["weather", "time"]),
        ("hermes", f"<tool_call>{CALL}", "", ["weather"]),
        ("hermes", f"Yes. <tool_call>{CALL}\n</tool_", "Yes.", ["weather"]),  # cut off
        ("hermes", "No call <tool_call>nonsense</tool_call>", "No call <tool_call>nonsense</tool_call>", []),
        ("hermes", "plain", "plain", []),
        ("llama3_json", CALL.replace("arguments", "parameters"), "", ["weather"]),
        ("llama3_json", f"{CALL}; {OTHER}", "", ["weather", "time"]),
        ("llama3_json", '{"answer": 42}', '{"answer": 42}', []),
        ("llama3_json", f"{CALL} I looked.", "I looked.", ["weather"]),
        ("llama3_json", f"[{CALL}]", "", ["weather"]),
        ("mistral", f"[TOOL_CALLS][{CALL}, {OTHER}]", "", ["weather", "time"]),
        ("mistral", f"[TOOL_CALLS] [{CALL}] Done.", " Done.", ["weather"]),
        ("mistral", '[TOOL_CALLS]weather{"city": "Zürich"}', "", ["weather"]),
        ("mistral", '[TOOL_CALLS]weather[ARGS]{"city": "Zürich"}[TOOL_CALLS]time[ARGS]{}', "", ["weather", "time"]),
        ("mistral", '[TOOL_CALLS]weather[CALL_ID]a1b2[ARGS]{"city": "Zürich"}', "", ["weather"]),
        (
            "hermes",
            f"<tool_call>{CALL}</tool_call> and <tool_call>{OTHER[:8]}",
            " and <tool_call>" + OTHER[:8],
            ["weather"],
        ),
        ("hermes", f"<tool_call>no</tool_call><tool_call>{CALL}</tool_call>", "<tool_call>no</tool_call>", ["weather"]),
        ("hermes", f"<tool_call>[{CALL}]</tool_call>", "", ["weather"]),
        ("hermes", '<tool_call>{"name": 3}</tool_call>', '<tool_call>{"name": 3}</tool_call>', []),
    ],
)
def test_a_finished_answer_parts_into_text_and_calls(parser: str, text: str, content: str, names: list[str]) -> None:
    parsed = TOOL_CALL_PARSERS[parser].parse(text)
    assert (parsed.content, [call.name for call in parsed.calls]) == (content, names)
    if names:
        assert json.loads(parsed.calls[0].arguments) == {"city": "Zürich"}


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


ARGUMENTS = {
    '{"a": "a <tool_call> mark </tool_call>"}': '{"a": "a <tool_call> mark </tool_call>"}',
    '{"a": 1e999, "b": 1.50, "c": 12345678901234567890}': '{"a": 1e999, "b": 1.50, "c": 12345678901234567890}',
    '{"a": "\\ud83d", "b": "\\u00fc ü"}': '{"a": "\\ud83d", "b": "\\u00fc ü"}',
    r'"{\"a\": \"\ud83d\"}"': r'{"a": "\ud83d"}',  # arguments as a text of JSON
    "[1, 2]": "[1, 2]",
    '"in Berlin"': '"in Berlin"',  # a text that is no JSON: clients read the arguments as JSON
    r'"{\"a\": NaN}"': r'"{\"a\": NaN}"',
}


@pytest.mark.parametrize("written", ARGUMENTS)
@pytest.mark.parametrize("parser", ["hermes", "mistral", "llama3_json"])
def test_arguments_are_what_the_model_wrote(parser: str, written: str) -> None:
    call = f'{{"arguments": {written}, "name": "f"}}'
    text = {"hermes": f"<tool_call>\n{call}\n</tool_call>", "mistral": f"[TOOL_CALLS][{call}]", "llama3_json": call}[
        parser
    ]
    parsed = TOOL_CALL_PARSERS[parser].parse(text)
    assert (parsed.content, [one.arguments for one in parsed.calls]) == ("", [ARGUMENTS[written]])
    parsed.calls[0].arguments.encode()


@pytest.mark.parametrize("written", ["null", '""', '" "', '"null"', None])
def test_no_arguments_are_an_empty_object(written: str | None) -> None:
    """Clients read them as JSON, and pass them on by name."""
    call = '{"name": "f"}' if written is None else f'{{"name": "f", "arguments": {written}}}'
    (found,) = TOOL_CALL_PARSERS["hermes"].parse(f"<tool_call>{call}</tool_call>").calls
    assert found.arguments == "{}"


def test_a_call_has_a_name() -> None:
    text = '<tool_call>{"name": "", "arguments": {}}</tool_call>'
    assert TOOL_CALL_PARSERS["hermes"].parse(text).calls == ()


@pytest.mark.parametrize("arguments", ["NaN", '{"a": -Infinity}', "[" * 5000, '{"a": 1', '{"a" 1}', '{"a": 1,}'])
def test_what_is_no_json_is_text(arguments: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {arguments}}}</tool_call>'
    assert TOOL_CALL_PARSERS["hermes"].parse(text).content == text


def test_a_name_that_is_no_unicode_can_be_sent() -> None:
    (call,) = parse_forced('[{"name": "f\\ud83d", "arguments": {}}]').calls
    assert call.name.encode() == b"f\\ud83d"


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
@pytest.mark.parametrize(
    "text",
    [
        f"Yes. \n<tool_call>{CALL}</tool_call>",
        f" \n <tool_call>{CALL}</tool_call> \n ",
        f"One <tool_call>{CALL}</tool_call> two \n<tool_call>{OTHER}</tool_call> three ",
        f"One <tool_call> two <tool_call>{OTHER}</tool_call>\n",
        f"Ah [TOOL_CALLS] [{CALL}] \n",
        f"  {CALL} and so on ",
        f",;{CALL}",
        f" ; {CALL}; {OTHER}",
        "plain text \n ",
        "a <tool_ca",
    ],
)
def test_a_stream_sends_the_content_of_the_whole(parser: str, text: str) -> None:
    sent = ""
    for end in range(len(text) + 1):
        visible = TOOL_CALL_PARSERS[parser].visible(text[:end])
        sent += visible[len(sent) :]
    content = TOOL_CALL_PARSERS[parser].parse(text).content
    assert content.startswith(sent), (content, sent)


@pytest.mark.parametrize("parser", TOOL_CALL_PARSERS)
def test_a_stream_of_anything_sends_the_content_of_the_whole(parser: str) -> None:
    words = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", CALL, OTHER, "[", "]", "{", ",", ";", " ", "\n"]
    chance = random.Random(0)
    for _ in range(300):
        text = "".join(word[: chance.choice((1, 3, 999, 999))] for word in chance.choices([*words, "text"], k=7))
        test_a_stream_sends_the_content_of_the_whole(parser, text)


def test_a_forced_answer_is_a_list_of_calls() -> None:
    for cut, names in (
        ("", []),
        (CALL, ["weather"]),
        (f"{CALL}, \n{{", ["weather"]),
        (f"{CALL},{CALL}]", ["weather"] * 2),
    ):
        parsed = parse_forced("[" + cut)
        assert parsed.content == "" and [call.name for call in parsed.calls] == names


def test_long_stretches_of_space_take_no_time() -> None:
    began = time.thread_time()
    for text in ("[TOOL_CALLS]name" + " " * 100_000, "[TOOL_CALLS]" + " " * 100_000 + "name {"):
        assert TOOL_CALL_PARSERS["mistral"].parse(text).calls == ()
    assert time.thread_time() - began < 2
