"""Clients that go away, that come too many, that have no key, or that send too much."""

import asyncio
import gzip
import socket
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from trunkattn.engine.engine import Engine
from trunkattn.server.engine_loop import EngineFailed, ServerFull

from .conftest import PATIENCE, Server, wait_for

LONG = {"prompt": "The trunk is read once.", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_pages(server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    server.stand_still(monkeypatch)
    connection = server.send(LONG | {"stream": stream, "n": 4})
    wait_for(lambda: server.llm.engine.scheduler.cache.num_pages_in_use > 0)
    connection.close()
    server.wait_idle()


def test_a_reset_connection_frees_its_pages(server: Server) -> None:
    """As after kill -9 of the client's machine: no orderly end."""
    connection = server.send(LONG | {"stream": True})
    connection.recv(1000)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    connection.close()
    server.wait_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_before_its_first_token_waits_no_longer(server: Server, stream: bool) -> None:
    release = threading.Event()
    loop = server_loop(server)
    loop.call(lambda engine: release.wait(PATIENCE) and None)
    connection = server.send(LONG | {"stream": stream})
    wait_for(lambda: loop.num_waiting == 1)
    connection.close()
    wait_for(lambda: loop.num_waiting == 0)
    release.set()
    server.wait_idle()


def test_one_request_too_many_is_told_to_come_back(start_server: Callable[..., Server]) -> None:
    server = start_server(max_waiting=1)
    entered, release = threading.Event(), threading.Event()

    def hold(engine: Engine) -> None:
        entered.set()
        release.wait(PATIENCE)

    loop = server_loop(server)
    loop.call(hold)
    assert entered.wait(PATIENCE)
    waiting = server.send(LONG | {"max_tokens": 1})
    wait_for(lambda: loop.num_waiting == 1)
    refused = server.post("/v1/completions", LONG)
    assert refused.status_code == 429 and int(refused.headers["Retry-After"]) >= 1
    error = refused.json()["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    streamed = server.post("/v1/completions", LONG | {"stream": True})
    assert streamed.status_code == 429  # before the stream begins, an error has a status of its own
    release.set()
    assert b"200 OK" in waiting.recv(100)
    server.wait_idle()


def server_loop(server: Server):  # type: ignore[no-untyped-def]
    return server.app.state.service.loop


def test_each_key_is_a_tenant(start_server: Callable[..., Server]) -> None:
    server = start_server(api_keys=("first-key", "second-key"))
    body = {"prompt": "A prefix of more than sixteen tokens.", "max_tokens": 1}
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic first-key"}):
        refused = server.post("/v1/completions", body, headers=headers)
        assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
        assert server.get("/live", headers=headers).status_code == 401
    assert server.get("/health").status_code == server.get("/metrics").status_code == server.get("/").status_code == 200

    def cached(key: str) -> int:
        answer = server.client(key).completions.create(model="tiny", **body)
        return answer.usage.prompt_tokens_details.cached_tokens

    # No tenant can tell, by time, what another one has asked.
    assert [cached("first-key"), cached("first-key"), cached("second-key"), cached("second-key")] == [0, 32, 0, 32]


def test_no_other_origin_may_call_unless_allowed(server: Server, start_server: Callable[..., Server]) -> None:
    origin = {"Origin": "https://example.org"}
    assert "access-control-allow-origin" not in server.get("/health", headers=origin).headers
    open_server = start_server(allowed_origins=("https://Example.org",))
    assert open_server.get("/health", headers=origin).headers["access-control-allow-origin"] == origin["Origin"]


@pytest.fixture(scope="module")
def open_server(start_server: Callable[..., Server]) -> Server:
    return start_server(allowed_origins=("https://example.org",), api_keys=("key",), max_body_bytes=1000)


def test_a_page_of_an_allowed_origin_may_call_a_server_at_home(open_server: Server) -> None:
    asked = {"Method": "POST", "Headers": "authorization,content-type", "Private-Network": "true"}
    headers = {"Origin": "https://example.org"} | {f"Access-Control-Request-{name}": asked[name] for name in asked}
    answer = httpx.options(f"{open_server.url}/v1/completions", headers=headers, timeout=PATIENCE)
    assert answer.status_code == 200 and answer.headers.get("access-control-allow-private-network") == "true"


@pytest.mark.parametrize("status", [400, 401, 404, 405, 413, 415, 429, 500, 503])
def test_a_page_of_an_allowed_origin_may_read_every_error(
    open_server: Server, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    server, origin = open_server, {"Origin": "https://example.org"}
    causes = {429: ServerFull("full", 1), 500: RuntimeError("a bug"), 503: EngineFailed("stopped")}
    if status in causes:

        async def fails(*_: Any, **__: Any) -> Any:
            raise causes[status]

        monkeypatch.setattr(server.app.state.service, "read", fails)
    path = {404: "/nothing", 405: "/live"}.get(status, "/tokenize")
    headers = origin | ({} if status == 401 else {"Authorization": "Bearer key"})
    headers |= {"Content-Encoding": "gzip"} if status == 415 else {}
    answer = server.post(path, {"prompt": 1, "x": "y" * (2000 if status == 413 else 0)}, headers=headers)
    assert answer.status_code == status and answer.headers["access-control-allow-origin"] == origin["Origin"]
    told = {401: "www-authenticate", 405: "allow", 429: "retry-after", 503: "retry-after"}.get(status)
    assert told is None or (
        told in answer.headers and told in answer.headers["access-control-expose-headers"].lower().split(", ")
    )
    known = "other" if status == 404 else path
    assert f'requests_total{{path="{known}",status="{status}"}} 1.0' in server.get("/metrics").text


def test_a_body_that_is_too_large(start_server: Callable[..., Server]) -> None:
    server = start_server(max_body_bytes=1000)
    large = {"prompt": "x" * 2000}
    assert server.post("/v1/completions", large).status_code == 413

    def chunks():  # type: ignore[no-untyped-def]  # without a length in the head
        yield b'{"prompt": "'
        for _ in range(20):
            yield b"x" * 100
        yield b'"}'

    headers = {"Content-Type": "application/json"}
    response = httpx.post(f"{server.url}/v1/completions", content=chunks(), headers=headers, timeout=PATIENCE)
    assert response.status_code == 413 and "at most 1000 bytes" in response.json()["error"]["message"]


def test_a_compressed_body_is_told_apart_from_a_broken_one(server: Server) -> None:
    body = gzip.compress(b'{"prompt": "x"}')
    headers = {"Content-Encoding": "gzip"}
    response = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=PATIENCE)
    assert response.status_code == 415 and "without compression" in response.json()["error"]["message"]
    plain = {"Content-Encoding": "identity"}
    assert server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, headers=plain).status_code == 200


@pytest.mark.parametrize("characters", [600, 9_000, 10_000_000])
def test_clients_see_that_a_conversation_is_too_long(server: Server, characters: int) -> None:
    """LangChain and OpenAI's SDK go by the code, LiteLLM by the words of the message, and then they shorten it."""
    for body in ({"prompt": "x" * characters}, {"messages": [{"role": "user", "content": "x" * characters}]}):
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        error = server.post(path, body).json()["error"]
        assert (error["code"], error["type"]) == ("context_length_exceeded", "invalid_request_error")
        assert "this model's maximum context length is 512 tokens" in error["message"]


@pytest.mark.parametrize("path", ["/chat/completions", "/v1/v1/chat/completions", "/v1/responses"])
def test_a_path_that_does_not_exist_is_told_which_do(server: Server, path: str) -> None:
    error = server.post(path, {"messages": []}).json()["error"]
    assert f"POST {path}: there is no such path; expected one of " in error["message"]
    assert "/v1/chat/completions, /v1/completions, /v1/models" in error["message"]


def test_limits_of_prompts_and_answers(start_server: Callable[..., Server]) -> None:
    server = start_server(max_prompt_tokens=8, max_answer_tokens=5, max_answers=2)
    for changes, message in (
        ({"prompt": "123456789"}, "prompt has 9 tokens: expected at most 8"),
        ({"max_tokens": 6}, "max_tokens=6: expected at most 5"),
        ({"n": 3}, "n=3: expected at most 2 answers"),
    ):
        body = {"prompt": "1234", "max_tokens": 5} | changes
        error = server.post("/v1/completions", body).json()["error"]
        assert message in error["message"]
        assert (error["code"] == "context_length_exceeded") == ("prompt" in changes)
    messages = [{"role": "user", "content": ""}]
    assert server.post("/v1/chat/completions", {"messages": messages}).status_code == 400


def test_a_text_that_is_far_too_long_never_reaches_the_tokenizer(server: Server) -> None:
    text = "x" * 10_000_000
    message = "characters: expected at most"
    assert message in server.post("/v1/completions", {"prompt": text}).json()["error"]["message"]
    body = {"messages": [{"role": "user", "content": text}]}
    assert message in server.post("/v1/chat/completions", body).json()["error"]["message"]


def test_connections_wait_while_the_event_loop_is_busy(server: Server) -> None:
    """The system answers them; uvicorn takes only a few at a time. One that the system drops would wait for the end."""
    entered, release = threading.Event(), threading.Event()

    def hold() -> None:
        entered.set()
        release.wait(PATIENCE)

    server.event_loop.call_soon_threadsafe(hold)
    assert entered.wait(PATIENCE)
    where = urlsplit(server.url)
    try:
        connections = [socket.create_connection((where.hostname, where.port), PATIENCE) for _ in range(64)]
    finally:
        release.set()
    for connection in connections:
        connection.close()


def test_many_clients_get_what_one_alone_would_get(server: Server) -> None:
    bodies = [LONG | {"prompt": f"The trunk is read once, leaf {i % 8}", "max_tokens": 20} for i in range(32)]

    async def ask_all() -> list[str]:
        async with httpx.AsyncClient(timeout=PATIENCE) as client:
            answers = await asyncio.gather(*(client.post(f"{server.url}/v1/completions", json=body) for body in bodies))
        return [answer.json()["choices"][0]["text"] for answer in answers]

    together = asyncio.run(ask_all())
    alone = [server.post("/v1/completions", body).json()["choices"][0]["text"] for body in bodies[:8]]
    assert together == alone * 4


def test_a_step_that_fails_ends_its_requests_alone(start_server: Callable[..., Server]) -> None:
    server = start_server()
    runner, execute = server.llm.engine.runner, server.llm.engine.runner.execute

    def fail(*_: object) -> None:
        runner.execute = execute
        raise RuntimeError("out of luck")

    runner.execute = fail
    body = LONG | {"max_tokens": 3}
    failed = server.post("/v1/completions", body)
    assert failed.status_code == 500 and "out of luck" in failed.json()["error"]["message"]
    assert server.post("/v1/completions", body).status_code == 200
    server.wait_idle()
