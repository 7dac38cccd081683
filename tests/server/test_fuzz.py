"""Wrong values of every kind for every field of every body, and the largest that are allowed, beside a witness.

The witness is a stream that must neither change nor stand still; the strict bound on its pauses is
`benchmarks/engines/serve_hostile.py`'s, because the machine of a test may do anything else.
"""

import json
import threading
import time
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

import httpx
import pytest
from pydantic import BaseModel

from trunkattn.server.limits import LIMITS
from trunkattn.server.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)

from .conftest import Server

PATHS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "x", "max_tokens": 1}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}),
    "/tokenize": (TokenizeRequest, {"prompt": "x"}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
WRONG: tuple[Any, ...] = (
    True, -1, 0, 10**30, -(10**400), 1e308, 0.5, "", "x", "\ud83d", "\0", "9" * 5000, [], [[]], ["x"], [1, "x"], [None],
    {}, {"": 1}, {"a": {"b": []}}, [{}] * 3000, ["y"] * 5000, [7] * 20_000, {str(i): i for i in range(3000)},
    [[1]] * 3000,
)  # fmt: skip
BOUND_S = 20.0  # of a pause of the witness; generous, because a busy machine may pause everything


def fields(model: type[BaseModel], place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every field of a body, those of its parts included."""
    for name, field in model.model_fields.items():
        here = (*place, field.alias or name)
        yield here
        for inner in models_in(field.annotation):
            yield from fields(inner, (*here, "0") if "list" in str(field.annotation) else here)


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, UnionType, Annotated, list):
        return [found for part in get_args(annotation) for found in models_in(part)]
    return []


def with_value(body: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A body with a value in a place; what lies on the way is made."""
    body = json.loads(json.dumps(body))
    at: Any = body
    for step, following in zip(place, (*place[1:], None), strict=True):
        key: Any = 0 if step == "0" else step
        if following is None:
            at[key] = value
        else:
            empty: Any = [{}] if following == "0" else {}
            if isinstance(at, dict) and not isinstance(at.get(key), type(empty)):
                at[key] = empty
            at = at[key]
    return body


class Witness:
    """A stream that goes on for as long as it is watched: its texts, and its longest pause."""

    def __init__(self, server: Server) -> None:
        self._server, self._over = server, threading.Event()
        self.texts: list[str] = []
        self.longest_s = 0.0
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> "Witness":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        body = {"prompt": "The trunk", "max_tokens": 200, "temperature": 0, "ignore_eos": True, "stream": True}
        while not self._over.is_set():
            text, last = "", time.monotonic()
            with httpx.stream("POST", f"{self._server.url}/v1/completions", json=body, timeout=120) as response:
                for line in response.iter_lines():
                    now = time.monotonic()
                    self.longest_s, last = max(self.longest_s, now - last), now
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
            self.texts.append(text)


def post(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content, headers={"Content-Type": "application/json"})


def check(witness: Witness, server: Server) -> None:
    assert len(set(witness.texts)) == 1 and witness.longest_s < BOUND_S
    server.wait_idle(60)
    assert server.get("/health").status_code == 200


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_wrong_values_of_every_kind(start_server: Callable[..., Server], path: str) -> None:
    server = start_server(max_answers=4)
    model, good = PATHS[path]
    places = list(fields(model))
    assert len(places) > 1
    with Witness(server) as witness, httpx.Client(base_url=server.url, timeout=120) as client:
        for place in places:
            for value in WRONG:
                response = post(client, path, with_value(good, place, value))
                assert response.status_code in (200, 400, 404), (place, repr(value)[:80], response.text[:300])
                if response.status_code != 200:
                    error = response.json()["error"]
                    assert error["message"] and len(error["message"]) < 1100, (place, repr(value)[:80])
    check(witness, server)


LARGEST: dict[str, dict[str, Any]] = {
    "prompts": {"prompt": ["x"] * 128},
    "token ids": {"prompt": [5] * 511},
    "text": {"prompt": "x" * 511},
    "answers": {"n": 128, "temperature": 1},
    "stop": {"stop": [f"{i:03}" + "s" * (LIMITS.stop_characters - 3) for i in range(LIMITS.stop)], "max_tokens": 50},
    "stop_token_ids": {"stop_token_ids": [*range(LIMITS.stop_token_ids)]},
    "allowed_token_ids": {"allowed_token_ids": [5, 6] * (LIMITS.allowed_token_ids // 2), "n": 64},
    "logit_bias": {"logit_bias": {str(i): LIMITS.bias for i in range(257)}, "n": 64},
    "bad_words": {"bad_words": [chr(97 + i % 26) * (1 + i % 200) for i in range(LIMITS.bad_words)], "n": 32},
    "logprobs": {"logprobs": LIMITS.logprobs, "n": 32, "echo": True, "prompt": "x" * 400},
    "cache_salt": {"cache_salt": "s" * LIMITS.label},
    "user": {"user": "u" * LIMITS.label},
    "choice": {"structured_outputs": {"choice": [f"{i:0120}" for i in range(LIMITS.forms.max_enum_values)]}},
    "regex": {"structured_outputs": {"regex": "[ab]?" * (LIMITS.forms.max_regex_characters // 5)}},
    "json": {"structured_outputs": {"json": {"properties": {f"p{i:04}": {"type": "null"} for i in range(4900)}}}},
    "grammar": {"structured_outputs": {"grammar": "start: " + " | ".join(f'"{i:05}"' for i in range(10_000))}},
}


@pytest.mark.slow
def test_the_largest_that_is_allowed(start_server: Callable[..., Server]) -> None:
    server = start_server(num_pages=2000)
    with Witness(server) as witness, httpx.Client(base_url=server.url, timeout=300) as client:
        for name, change in LARGEST.items():
            body = {"prompt": "x", "max_tokens": 4, "ignore_eos": True, "temperature": 0} | change
            response = post(client, "/v1/completions", body)
            assert response.status_code in (200, 400), (name, response.text[:300])
            is_form = "structured_outputs" in change  # a form of the largest size may need more time than it may take
            assert is_form or response.status_code == 200, (name, response.text[:300])
        messages = [{"role": "user", "content": "x"}] * 100
        tools = [
            {"type": "function", "function": {"name": f"f{i}", "description": "d" * 100}} for i in range(LIMITS.tools)
        ]
        chat = {"messages": messages * 20, "tools": tools, "max_tokens": 1}
        assert post(client, "/v1/chat/completions", chat).status_code == 400  # more tokens than the model takes
        raw = b'{"prompt": "' + b"x" * (16_000_000) + b'"}'
        assert post(client, "/v1/completions", raw).status_code == 400
    check(witness, server)
