"""Whatever is wrong with a request: OpenAI's error shape, the field, the value and what is accepted."""

import json
from typing import Any

import httpx
import pytest

from .conftest import NAME, PATIENCE, Server

CHAT = "/v1/chat/completions"
COMPLETE = "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
NO_A = {"not": {"required": ["a"]}}  # no grammar says it
TOOL_WITHOUT = {"type": "function", "function": {"name": "no_a", "parameters": {"properties": {"b": NO_A}}}}
MESSAGES = [{"role": "user", "content": "hello"}]

BAD: list[tuple[str, dict[str, Any], str | None, str]] = [
    (COMPLETE, {}, "prompt", "prompt is missing"),
    (COMPLETE, {"prompt": 5}, "prompt", "prompt=5"),
    (COMPLETE, {"prompt": None}, "prompt", "prompt is missing"),
    (COMPLETE, {"prompt": ""}, "prompt", "prompt"),
    (COMPLETE, {"prompt": []}, "prompt", "prompt=[]: expected at least one prompt"),
    (COMPLETE, {"prompt": [[]]}, "prompt", "prompt has 0 tokens: expected at least one"),
    (COMPLETE, {"prompt": [1, 257]}, "prompt", "prompt: token id=257: expected an integer from 0 to 256"),
    (COMPLETE, {"prompt": ["a", "b" * 600]}, "prompt[1]", "prompt[1] has 600 tokens: expected 1 to 511"),
    (COMPLETE, {"prompt": "x", "max_tokens": 0}, "max_tokens", "max_tokens=0: expected an integer of at least 1"),
    (COMPLETE, {"prompt": "x", "max_tokens": "7"}, "max_tokens", "max_tokens='7': input should be a valid integer"),
    (COMPLETE, {"prompt": "x", "max_tokens": True}, "max_tokens", "max_tokens=True"),
    (COMPLETE, {"prompt": "x", "temperature": -1}, "temperature", "temperature=-1: expected a finite number >= 0"),
    (COMPLETE, {"prompt": "x", "temperature": "hot"}, "temperature", "temperature='hot'"),
    (COMPLETE, {"prompt": "x", "top_p": 2}, "top_p", "top_p=2: expected a number in (0, 1]"),
    (COMPLETE, {"prompt": "x", "n": 0}, "n", "n=0: expected an integer from 1 to 128"),
    (COMPLETE, {"prompt": "x", "n": 129}, "n", "n=129: expected at most 128 answers"),
    (COMPLETE, {"prompt": ["x"] * 2, "n": 65}, "n", "n=65 for 2 prompts: expected at most 128 answers"),
    (COMPLETE, {"prompt": "x", "stop": 3}, "stop", "stop=3"),
    (COMPLETE, {"prompt": "x", "stop": ["a"] * 17}, "stop", "stop has 17 items: expected at most 16"),
    (COMPLETE, {"prompt": "x", "prompt_logprobs": 0}, "prompt_logprobs", "expected echo and logprobs"),
    (CHAT, {"messages": MESSAGES, "functions": [{"name": "f"}]}, "functions", "expected tools instead"),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "function"}},
        "tool_choice.function",
        "tool_choice.function is missing",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [{"type": "custom", "custom": {"name": "f"}}]},
        "tools[0].type",
        "tools[0].type='custom': expected 'function'",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": {"type": "allowed_tools", "allowed_tools": {}}},
        "tool_choice.type",
        "tool_choice.type='allowed_tools': expected 'auto' or 'required' as tool_choice",
    ),
    (CHAT, {"messages": MESSAGES, "tool_choice": "some"}, "tool_choice", "should be 'none', 'auto' or 'required'"),
    (COMPLETE, {"prompt": "x", "stop": ["a", ""]}, "stop", "stop='': expected a text that is not empty"),
    (COMPLETE, {"prompt": "x", "logprobs": -1}, "logprobs", "logprobs=-1"),
    (COMPLETE, {"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "logit_bias={'a': 1}: expected token ids"),
    (COMPLETE, {"prompt": "x", "logit_bias": {"5": 1, "05": 2}}, "logit_bias", "token ids as keys, each of them once"),
    (COMPLETE, {"prompt": "x", "logit_bias": {"\u0663": 1}}, "logit_bias", "expected token ids as keys"),
    (COMPLETE, {"prompt": "x", "model": "other"}, "model", "model='other': expected 'tiny'"),
    (COMPLETE, {"prompt": "x", "best_of": 2}, "best_of", "best_of=2: expected n"),
    (COMPLETE, {"prompt": "x", "suffix": "y"}, "suffix", "suffix='y': this server cannot fill in"),
    (COMPLETE, {"prompt": "x", "stream": "yes"}, "stream", "stream='yes'"),
    (
        COMPLETE,
        {"prompt": "x", "stream_options": {"include_usages": 1}},
        "stream_options.include_usages",
        "did you mean include_usage?",
    ),
    (
        COMPLETE,
        {"prompt": "x", "stream_options": {"include_usage": True}},
        "stream_options",
        "stream_options is given without stream: expected stream=true",
    ),
    (CHAT, {"messages": MESSAGES, "stream_options": {}, "stream": False}, "stream_options", "expected stream=true"),
    (COMPLETE, {"prompt": "x", "seed": 1 << 63}, "seed", "expected an integer from -9223372036854775808"),
    (COMPLETE, {"prompt": "\ud83d"}, "prompt", "expected Unicode text, and character 0"),
    (COMPLETE, {"prompt": "x", "stop": "\ud83d"}, "stop", "expected Unicode text, and this has half of a surrogate"),
    (
        COMPLETE,
        {"prompt": "x", "structured_outputs": {"regex": "a"}, "min_tokens": 5},
        None,
        "The sampling parameters forbid every token as output token 1",
    ),
    (CHAT, {}, "messages", "messages is missing"),
    (CHAT, {"messages": []}, "messages", "messages=[]: expected at least one item"),
    (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role", "messages[0].role is missing"),
    (CHAT, {"messages": [{"role": "user", "content": 3}]}, "messages[0].content", "messages[0].content=3"),
    (CHAT, {"messages": MESSAGES, "tools": "x"}, "tools", "tools='x'"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "auto"}, "tool_choice", "expected tools together with it"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, "tool_choice", "expected tools together with it"),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": TOOL | {"function": {"name": "g"}}},
        "tool_choice.function.name",
        "tool_choice.function.name='g': expected the name of one of the tools",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required", "structured_outputs": {"regex": "a"}},
        "structured_outputs",
        "structured_outputs is given with a tool_choice that forces a call: expected one of them",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "tools": [{"type": "function", "function": {"name": ""}}]},
        "tools[0].function.name",
        "tools[0].function.name='': expected a text that is not empty",
    ),
    (
        CHAT,
        {"messages": MESSAGES, "min_tokens": 5, "max_tokens": 9, "max_completion_tokens": 3},
        "min_tokens",
        "min_tokens=5: expected at most max_completion_tokens=3",
    ),
    (CHAT, {"messages": MESSAGES, "min_tokens": 512}, "min_tokens", "min_tokens=512: expected at most "),
    (
        COMPLETE,
        {"prompt": "x" * 12, "min_tokens": 501, "max_tokens": 501},
        "min_tokens",
        "min_tokens=501: expected at most 500, because prompt has 12 tokens",
    ),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 3}, "top_logprobs", "expected logprobs=true"),
    (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, "top_logprobs", "less than or equal to 20"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
    *(
        (
            path,
            prompt | {"response_format": {"type": "json_object", "schema": {"type": "foo"}}},
            "response_format",
            "response_format: json={'type': 'foo'}: expected a valid json",
        )
        for path, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETE, {"prompt": "a"}))
    ),
    (
        COMPLETE,
        {"prompt": "a", "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
        "response_format",
        "response_format is given with structured_outputs: expected one of them",
    ),
    (
        CHAT,
        {
            "messages": MESSAGES,
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "foo"}}}],
            "tool_choice": "required",
        },
        "tools",
        "tools: json={",
    ),
    *(
        (
            CHAT,
            {"messages": MESSAGES, "tools": [TOOL, TOOL_WITHOUT], "tool_choice": choice},
            "tools",
            "not at 'no_a.parameters/properties/b' cannot be compiled: write what is allowed with type, enum, const or",
        )
        for choice in ("required", {"type": "function", "function": {"name": "no_a"}})
    ),
    *(
        (path, prompt | {name: form}, name, "expected a valid json; not at '#/items' cannot be compiled: write what is")
        for path, prompt in ((CHAT, {"messages": MESSAGES}), (COMPLETE, {"prompt": "a"}))
        for name, form in (
            ("structured_outputs", {"json": {"items": NO_A}}),
            ("response_format", {"type": "json_object", "schema": {"items": NO_A}}),
            ("response_format", {"type": "json_schema", "json_schema": {"name": "x", "schema": {"items": NO_A}}}),
        )
    ),
    (COMPLETE, {"prompt": "a", "structured_outputs": {"choice": []}}, "structured_outputs.choice", "choice=[]: expect"),
    (COMPLETE, {"prompt": "a", "structured_outputs": {"regex": ""}}, "structured_outputs.regex", "regex='': expected"),
    ("/tokenize", {}, "prompt", "prompt and messages are both missing: expected one of them"),
    (
        "/tokenize",
        {"prompt": "x", "messages": MESSAGES},
        "prompt",
        "prompt and messages are given together: expected one",
    ),
    ("/tokenize", {"prompt": "a", "tools": [{"type": "function", "function": {"name": "f"}}]}, "tools", "not a prompt"),
    ("/tokenize", {"prompt": "a", "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs", "not a prompt"),
    ("/tokenize", {"prompt": "a", "add_generation_prompt": False}, "add_generation_prompt", "expected messages"),
    ("/tokenize", {"prompt": "a", "continue_final_message": True}, "continue_final_message", "expected messages"),
    ("/tokenize", {"messages": MESSAGES, "add_special_tokens": True}, "add_special_tokens", "template writes them"),
    ("/detokenize", {"tokens": [-1]}, "tokens", "token id -1: expected 0 to 256"),
]


@pytest.mark.parametrize(("path", "body", "param", "message"), BAD)
def test_a_bad_field_is_named(server: Server, path: str, body: dict[str, Any], param: str | None, message: str) -> None:
    # A lone surrogate cannot be sent as UTF-8; JSON can escape it.
    content = json.dumps(body)
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{server.url}{path}", content=content, headers=headers, timeout=PATIENCE)
    error = response.json()["error"]
    assert response.status_code == (404 if param == "model" else 400)
    assert (error["param"], error["type"].endswith("_error")) == (param, True)
    assert message in error["message"]


def test_an_image_is_refused_and_not_fetched(server: Server) -> None:
    part = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/x.png"}}
    response = server.post(CHAT, {"messages": [{"role": "user", "content": [part]}]})
    error = response.json()["error"]
    assert response.status_code == 400 and error["param"] == "messages[0].content[0].type"
    assert "'image_url'" in error["message"] and "expected 'text'" in error["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [(b"{", "not JSON"), (b"", "the body is missing"), (b"[1]", "the body=[1]"), (b"\xff", ""), (b"null", "the body")],
)
def test_a_body_that_is_no_object(server: Server, body: bytes, message: str) -> None:
    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{server.url}{COMPLETE}", content=body, headers=headers, timeout=PATIENCE)
    assert response.status_code == 400 and message in response.json()["error"]["message"]


def test_a_body_may_begin_with_a_byte_order_mark(server: Server) -> None:
    """As editors and PowerShell write files."""
    body = b"\xef\xbb\xbf" + json.dumps({"prompt": "trunk"}).encode()
    assert httpx.post(f"{server.url}/tokenize", content=body, timeout=PATIENCE).json()["count"] == 5


@pytest.mark.parametrize(
    ("method", "path", "status", "expected"),
    [
        ("GET", "/nothing", 404, "expected one of /, /detokenize"),
        ("GET", COMPLETE, 405, "expected the method POST"),
        ("POST", "/health", 405, "expected the method GET or HEAD"),
        ("PUT", "/static/live.js", 405, "expected the method GET or HEAD"),
    ],
)
def test_other_paths_and_methods_are_refused_with_what_there_is(
    server: Server, method: str, path: str, status: int, expected: str
) -> None:
    response = httpx.request(method, f"{server.url}{path}", timeout=PATIENCE)
    message = response.json()["error"]["message"]
    assert response.status_code == status and message.startswith(f"{method} {path}: ") and expected in message


def test_a_bad_request_harms_nobody(server: Server) -> None:
    good = {"model": NAME, "prompt": "The trunk", "max_tokens": 4, "temperature": 0}
    before = server.post(COMPLETE, good).json()["choices"]
    server.post(COMPLETE, good | {"temperature": -1})
    assert server.post(COMPLETE, good).json()["choices"] == before
