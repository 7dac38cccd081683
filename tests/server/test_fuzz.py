"""Wrong values of every kind for every field of every body, and the largest that are allowed, beside a witness.

The witness is a stream that must neither change nor stand still. Its pauses are counted in this process's own processor
time, because the machine of a test may do anything else; `benchmarks/engines/serve_hostile.py` bounds what a clock
shows. What a process does once, as to compile, is done before.
"""

import gc
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import httpx
import pytest
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trunkattn.server.bodies.json_size import json_size
from trunkattn.server.bodies.protocol import (
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    ResponseFormat,
    TokenizeRequest,
)
from trunkattn.server.limits import LIMITS

from .conftest import PATIENCE, Server

MESSAGE = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "x", "parameters": {"type": "object"}}}
PATHS: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "x", "max_tokens": 1}),
    "/v1/chat/completions": (ChatCompletionRequest, {"messages": [MESSAGE], "tools": [TOOL], "max_tokens": 1}),
    "/tokenize": (TokenizeRequest, {"messages": [MESSAGE]}),
    "/detokenize": (DetokenizeRequest, {"tokens": [1]}),
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
WRONG: tuple[Any, ...] = (
    True, -1, 0, 10**30, -(10**400), 1e308, 0.5, "", "x", "\ud83d", "\0", "9" * 5000, [], [[]], ["x"], [1, "x"], [None],
    {}, {"": 1}, {"a": {"b": []}}, [{}] * 3000, ["y"] * 5000, [7] * 20_000, {str(i): i for i in range(3000)},
    [[1]] * 3000,
)  # fmt: skip
BOUND_S = 1.0  # of the processor's time within a pause of the witness
# The template writes all of a request, so that a wrong value goes as far as one can.
WRITES_ALL = "{{ messages | tojson }}{% if tools %}{{ tools | tojson }}{% endif %}"


def example(annotation: Any) -> Any:
    """A small right value of a type; of a model, with the fields that it needs."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation is ResponseFormat:
        return FORMAT
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        needed = {name: field for name, field in annotation.model_fields.items() if field.is_required()}
        return {field.alias or name: example(field.annotation) for name, field in needed.items()}
    if origin in (Union, UnionType, Annotated, list):
        return [example(inner[0])] if origin is list else example(inner[0])
    if origin is Literal:
        return inner[0]
    return {str: "x", int: 1, float: 1.0, bool: False}.get(annotation, {})


def models_in(annotation: Any, is_list: bool = False) -> Iterator[tuple[type[BaseModel], bool]]:
    """The models of a field's parts, and whether they stand in a list."""
    origin = get_origin(annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, is_list
    elif origin in (Union, UnionType, Annotated, list):
        for part in get_args(annotation):
            yield from models_in(part, origin is list)


def bodies(
    model: type[BaseModel], right: dict[str, Any], values: Callable[[FieldInfo], Iterable[Any]]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Right values of a model but for one field, or one field of its parts: its place, and the values."""
    for name, field in model.model_fields.items():
        key = field.alias or name
        for value in values(field):
            yield key, right | {key: value}
        for inner, is_list in models_in(field.annotation):
            for place, part in bodies(inner, example(inner), values):
                yield f"{key}.{place}", right | {key: [part] if is_list else part}


def limit(metadata: Sequence[Any], name: str) -> Any:
    """A limit that the notes on a type have; None: there is none."""
    notes = [note for one in metadata for note in (one.metadata if isinstance(one, FieldInfo) else [one])]
    return next((getattr(note, name) for note in notes if hasattr(note, name)), None)


def largest(annotation: Any, metadata: Sequence[Any] = ()) -> Iterator[Any]:
    """The largest values of a type, one of each of its alternatives."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        for one in inner:
            yield from largest(one, metadata)
    elif origin is Annotated:
        yield from largest(inner[0], inner[1:])
    elif origin is list:
        one = example(inner[0])
        size = json_size(json.dumps(one).encode(), LIMITS.nodes, LIMITS.digits)
        most = MOST_VALUES if one == 1 else MOST_NODES // (1 + size.values + size.nodes)
        room = min(most, MOST_BYTES // (2 + len(json.dumps(one))))
        yield [one] * min(room, limit(metadata, "max_length") or room)
    elif origin is dict:
        one = example(inner[1]) or 1
        yield {str(i): one for i in range(limit(metadata, "max_length") or MOST_NODES // 2)}
        if limit(metadata, "max_length") is None:
            yield {"enum": [1] * MOST_NODES}
    elif annotation is str:
        yield "x" * (limit(metadata, "max_length") or MOST_BYTES)
    elif annotation in (int, float):
        yield limit(metadata, "le") or 2**62
    elif origin is Literal or annotation is bool:
        yield from inner or (True,)
    else:
        assert annotation is NoneType or issubclass(annotation, BaseModel), annotation


MOST_VALUES, MOST_NODES = LIMITS.values - 100, LIMITS.nodes - 100
MOST_BYTES = 4_000_000  # of one text; `test_the_largest_that_is_allowed` sends the largest bodies


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
            text, last = "", time.process_time()
            with httpx.stream("POST", f"{self._server.url}/v1/completions", json=body, timeout=PATIENCE) as response:
                for line in response.iter_lines():
                    now = time.process_time()
                    self.longest_s, last = max(self.longest_s, now - last), now
                    if line.startswith("data: {"):
                        text += json.loads(line[6:])["choices"][0]["text"]
            self.texts.append(text)


def post(client: httpx.Client, path: str, body: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return client.post(path, content=content, headers={"Content-Type": "application/json"})


def check(witness: Witness, server: Server) -> None:
    assert len(set(witness.texts)) == 1 and witness.longest_s < BOUND_S
    server.wait_idle()
    assert server.get("/health").status_code == 200


def check_answer(response: httpx.Response, place: str, most_characters: int = 1100) -> None:
    assert response.status_code in (200, 400, 404), (place, response.text[:300])
    if response.status_code != 200:
        message = response.json()["error"]["message"]
        assert message and len(message) < most_characters, (place, message[:300])


@pytest.fixture(scope="module", autouse=True)
def warm(start_server: Callable[..., Server]) -> Iterator[None]:
    """Compiles and loads all that requests need, and lets garbage collection leave out what lives on, as `serve` does:
    the modules of a test's process are many."""
    server = start_server(num_pages=2000)
    server.llm.tokenizer.chat_template = WRITES_ALL  # type: ignore[union-attr]
    with Witness(server), httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        for change in LARGEST.values():
            post(client, "/v1/completions", largest_completion(change))
        for path, (_, right) in PATHS.items():
            post(client, path, right)
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_wrong_values_of_every_kind_are_refused(start_server: Callable[..., Server], path: str) -> None:
    server = start_server(max_answers=4)
    server.llm.tokenizer.chat_template = WRITES_ALL  # type: ignore[union-attr]
    model, right = PATHS[path]
    # where fields are many, one gets one half of the values and the next one the other
    values = itertools.cycle((WRONG[::2], WRONG[1::2]) if path.startswith("/v1/") else (WRONG,))
    statuses = post_all(server, path, bodies(model, right, lambda field: next(values)))
    assert {200, 400} <= set(statuses) and len(statuses) > len(WRONG)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_the_largest_value_of_every_field_is_answered(start_server: Callable[..., Server], path: str) -> None:
    server = start_server()
    server.llm.tokenizer.chat_template = WRITES_ALL  # type: ignore[union-attr]
    model, right = PATHS[path]
    assert post_all(server, path, bodies(model, right, lambda field: largest(field.annotation, field.metadata)))


def post_all(server: Server, path: str, all_bodies: Iterable[tuple[str, dict[str, Any]]]) -> list[int]:
    """Sends the bodies beside a witness; the statuses."""
    statuses = []
    with Witness(server) as witness, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        for place, body in all_bodies:
            response = post(client, path, body)
            check_answer(response, place)
            statuses.append(response.status_code)
    check(witness, server)
    return statuses


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


def largest_completion(change: dict[str, Any]) -> dict[str, Any]:
    return {"prompt": "x", "max_tokens": 4, "ignore_eos": True, "temperature": 0} | change


@pytest.mark.slow
def test_the_largest_that_is_allowed(start_server: Callable[..., Server]) -> None:
    server = start_server(num_pages=2000)
    with Witness(server) as witness, httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        for name, change in LARGEST.items():
            response = post(client, "/v1/completions", largest_completion(change))
            assert response.status_code in (200, 400), (name, response.text[:300])
            is_form = "structured_outputs" in change  # a form of the largest size may need more time than it may take
            assert is_form or response.status_code == 200, (name, response.text[:300])
        messages = [{"role": "user", "content": "x"}] * 100
        tools = [
            {"type": "function", "function": {"name": f"f{i}", "description": "d" * 100}} for i in range(LIMITS.tools)
        ]
        chat = {"messages": messages * 20, "tools": tools, "max_tokens": 1}
        assert post(client, "/v1/chat/completions", chat).status_code == 400  # more tokens than the model takes
        chat = {"messages": [{"role": "user", "content": "x" * 15_000_000}], "max_tokens": 1}
        assert post(client, "/v1/chat/completions", chat).status_code == 400
        raw = b'{"prompt": "' + b"x" * (16_000_000) + b'"}'
        assert post(client, "/v1/completions", raw).status_code == 400
    check(witness, server)
