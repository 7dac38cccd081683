"""Every field of log-probabilities, of both endpoints, whole and streamed.

Source: https://platform.openai.com/docs/api-reference/chat/object, .../completions/object
"""

import gc
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

from trunkattn.engine.outputs import CompletionOutput, Logprob
from trunkattn.engine.sampling.sampler import TokenLogprobs
from trunkattn.server.endpoints.chat import _logprobs as logprobs_of
from trunkattn.server.endpoints.streaming import TextOffsets, write_json
from trunkattn.server.lanes import no_pause

MESSAGES = [{"role": "user", "content": "hi"}]
TEXT = "aé😀 b"


def pieces(server: Any, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The choices of an answer's events."""
    lines = server.post(path, {**body, "stream": True}).text.splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [choice for event in events for choice in event["choices"]]


@pytest.fixture
def speaking(start_server: Callable[..., Any]) -> Any:
    server = start_server()
    server.say(TEXT)
    return server


def test_chat_has_the_bytes_of_every_token(speaking: Any) -> None:
    body = {"messages": MESSAGES, "max_tokens": 20, "logprobs": True, "top_logprobs": 3}
    choice = speaking.post("/v1/chat/completions", body).json()["choices"][0]
    assert choice["message"]["content"] == TEXT
    content = choice["logprobs"]["content"]
    assert bytes(byte for one in content[:-1] for byte in one["bytes"]).decode() == TEXT
    assert [one["token"] for one in content[:3]] == ["a", "\\xc3", "\\xa9"]
    assert choice["logprobs"]["refusal"] is None
    for one in content:
        assert len(one["top_logprobs"]) == 3 and one["logprob"] <= 0
        values = [top["logprob"] for top in one["top_logprobs"]]
        assert values == sorted(values, reverse=True) and one.keys() == {"token", "logprob", "bytes", "top_logprobs"}
    streamed = pieces(speaking, "/v1/chat/completions", body)
    assert [one for piece in streamed for one in (piece["logprobs"] or {"content": []})["content"]] == content


def test_chat_without_top_logprobs_has_empty_lists(speaking: Any) -> None:
    body = {"messages": MESSAGES, "max_tokens": 2, "logprobs": True}
    for top in ({}, {"top_logprobs": 0}):
        content = speaking.post("/v1/chat/completions", {**body, **top}).json()["choices"][0]["logprobs"]["content"]
        assert [one["top_logprobs"] for one in content] == [[], []]
    plain = speaking.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 2}).json()["choices"][0]
    assert plain["logprobs"] is None


def test_completions_offsets_point_into_the_text(speaking: Any) -> None:
    body = {"prompt": "x", "max_tokens": 20, "logprobs": 2}
    choice = speaking.post("/v1/completions", body).json()["choices"][0]
    found = choice["logprobs"]
    assert choice["text"] == TEXT
    assert found["text_offset"] == [0, 1, 1, 2, 2, 2, 2, 3, 4, 5]  # the last is the end-of-sequence token
    assert found["tokens"][:3] == ["a", "bytes:\\xc3", "bytes:\\xa9"] and found["tokens"][-1] == "<end>"
    for token, value, top in zip(found["tokens"], found["token_logprobs"], found["top_logprobs"], strict=True):
        assert 2 <= len(top) <= 3 and top[token] == value
    streamed = pieces(speaking, "/v1/completions", body)
    for name, values in found.items():
        assert [one for piece in streamed for one in (piece["logprobs"] or {name: []})[name]] == values, name


def test_completions_with_zero_have_the_tokens_own(speaking: Any) -> None:
    found = speaking.post("/v1/completions", {"prompt": "x", "max_tokens": 3, "logprobs": 0}).json()["choices"][0]
    assert [len(top) for top in found["logprobs"]["top_logprobs"]] == [1, 1, 1]
    plain = speaking.post("/v1/completions", {"prompt": "x", "max_tokens": 3}).json()["choices"][0]
    assert plain["logprobs"] is None


def test_what_is_impossible_is_a_number_in_json(start_server: Callable[..., Any], monkeypatch: Any) -> None:
    server = start_server()
    server.say("ab")

    def likely(logits: torch.Tensor, specs: Any, token_ids: Any) -> Any:
        return [TokenLogprobs([token, 65], [float("-inf"), 0.0], [257, 1]) for token in token_ids]

    monkeypatch.setattr("trunkattn.engine.engine.token_logprobs", likely)
    found = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1, "logprobs": 1}).json()["choices"][0]
    assert found["logprobs"]["token_logprobs"] == [-9999.0]
    body = {"messages": MESSAGES, "max_tokens": 1, "logprobs": True, "top_logprobs": 1}
    found = server.post("/v1/chat/completions", body).json()["choices"][0]
    assert found["logprobs"]["content"][0]["logprob"] == -9999.0


def test_parts_of_a_character_have_its_offset() -> None:
    offsets = TextOffsets()
    assert [offsets.before(part) for part in (b"a", b"\xc3", b"\xa9", b"", b"bc", b"d")] == [0, 1, 1, 2, 2, 4]
    broken = TextOffsets()
    parts = [b"\xf0", b"a", b"\xe2\x82", b"\xf9", b"\xc3", b"", b"bc", b"d"]
    at = [broken.before(part) for part in parts]
    assert at == [0, 1, 2, 3, 4, 4, 5, 7]
    text = b"".join(parts).decode("utf-8", "replace")
    assert [text[place] for place in (at[1], at[6], at[7])] == ["a", "b", "d"]


def test_offsets_of_an_echo_follow_its_text(server: Any) -> None:
    body = {"prompt": [64, 256, 65], "echo": True, "logprobs": 0, "max_tokens": 1}
    choice = server.post("/v1/completions", body).json()["choices"][0]
    assert choice["text"].startswith("a<end>b") and choice["logprobs"]["text_offset"] == [0, 1, 6, 7]


@pytest.mark.parametrize(
    ("text", "written", "expected"),
    [
        ("So x", ["<s>", " So", " x"], [0, 0, 2]),  # the tokenizer adds <s>, and a space before the first word
        ("<s>So x", ["<s>", " So", " x"], [0, 3, 5]),
        ("a漢b c", ["a", "<unk>", "b", " c"], [0, 1, 2, 3]),
        ("é", [b"\xc3", b"\xa9"], [0, 0]),
    ],
)
def test_offsets_of_a_prompt_whose_tokens_write_more(text: str, written: list[Any], expected: list[int]) -> None:
    offsets = TextOffsets()
    parts = [part.encode() if isinstance(part, str) else part for part in written]
    assert [offsets.echoed(text, part) for part in parts] == expected
    offsets.begin_answer(text)
    assert offsets.before(b"!") == len(text)


def test_places_of_a_chat_are_one_text_and_not_searched_for_garbage() -> None:
    entry = {token: Logprob(-1.0 - token, 1 + token, chr(97 + token), bytes([97 + token])) for token in range(20)}
    answer = CompletionOutput(0, "a" * 500, [0] * 500, logprobs=[entry] * 500)
    made = []
    for _ in range(3):
        gc.collect()
        before = len(gc.get_objects())
        places = logprobs_of(answer, 0, 20, no_pause)
        made.append(len(gc.get_objects()) - before)
    assert min(made) < 100, "other threads of the process make some too"
    written = json.loads(write_json({"content": places}))["content"]
    assert len(written) == 500 and written[0] == written[499]
    assert [top["token"] for top in written[0]["top_logprobs"]] == [chr(97 + token) for token in range(20)]
    assert written[0]["token"] == "a" and written[0]["bytes"] == [97]
    own = {"token": "a", "logprob": -1.0, "bytes": [97]}
    assert json.loads(logprobs_of(answer, 499, 1, no_pause) or "") == [own | {"top_logprobs": [own]}]
    assert logprobs_of(answer, 500, 1, no_pause) is None
