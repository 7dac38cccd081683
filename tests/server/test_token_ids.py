"""`return_token_ids`: the tokens of prompts and answers beside their texts, whole and streamed."""

import json
from collections import defaultdict
from typing import Any

import pytest

from trunkattn import LLM, SamplingParams

from .conftest import Server

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
PROMPTS = ["The trunk is read once, ", "and the leaves"]
USER: dict[str, Any] = {"role": "user", "content": "hi"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def told(server: Server, path: str, body: dict[str, Any], stream: bool) -> dict[int, list[list[int]]]:
    """Token ids of the prompt and of the answer, by the answer's number."""
    response = server.post(path, body | {"return_token_ids": True, "stream": stream})
    if not stream:
        parts = [response.json()]
    else:
        lines = response.text.splitlines()
        parts = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    found: dict[int, list[list[int]]] = defaultdict(lambda: [[], []])
    for part in parts:
        for choice in part["choices"]:
            found[choice["index"]][0] += choice.get("prompt_token_ids") or part.get("prompt_token_ids") or []
            found[choice["index"]][1] += choice["token_ids"]
    return found


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"echo": True, "logprobs": 1}, {"stop": ["e", "no such text"]}])
def test_a_completion_tells_its_tokens(server: Server, reference: LLM, more: dict[str, Any], stream: bool) -> None:
    params = SamplingParams(n=2, seed=7, max_tokens=8, stop=more.get("stop", ()))
    expected = [
        [output.prompt_token_ids, answer.token_ids]
        for output in reference.generate(PROMPTS, params)
        for answer in output.outputs
    ]
    body = {"prompt": PROMPTS, "n": 2, "seed": 7, "max_tokens": 8, "temperature": 1} | more
    assert told(server, COMPLETE, body, stream) == dict(enumerate(expected))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("logprobs", [False, True])
def test_a_chat_tells_its_tokens(server: Server, reference: LLM, logprobs: bool, stream: bool) -> None:
    params = SamplingParams(n=2, seed=7, max_tokens=8)
    (output,) = reference.chat([USER], params)
    body = {"messages": [USER], "n": 2, "seed": 7, "max_tokens": 8, "temperature": 1, "logprobs": logprobs}
    expected = {answer.index: [output.prompt_token_ids, answer.token_ids] for answer in output.outputs}
    assert told(server, CHAT, body, stream) == expected


@pytest.mark.parametrize("stream", [False, True])
def test_no_token_is_left_out_of_what_has_no_text(server: Server, stream: bool) -> None:
    alone = {"prompt": [[1, 2, 3]], "echo": True, "max_tokens": 0}
    assert told(server, COMPLETE, alone, stream) == {0: [[1, 2, 3], []]}
    forced = {"messages": [USER], "tools": [TOOL], "tool_choice": "required", "max_tokens": 8}
    ((prompt, tokens),) = told(server, CHAT, forced, stream).values()
    assert prompt and len(tokens) == 8


def test_nobody_is_told_without_asking(server: Server) -> None:
    whole = server.post(CHAT, {"messages": [USER], "max_tokens": 1}).json()
    assert "prompt_token_ids" not in whole and "token_ids" not in whole["choices"][0]
