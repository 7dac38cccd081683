"""Heads of requests as proxies and other clients write them, and connections between two requests."""

import asyncio
import json
import logging
import re
import signal
import socket
import struct
import time
from collections.abc import Callable
from contextlib import closing, nullcontext, suppress
from http.client import HTTPConnection
from urllib.parse import urlsplit

import httpx
import pytest
from fastapi import FastAPI

from trunkattn.server import ServerOptions, limits, middleware, running
from trunkattn.server.service import Caller
from trunkattn.server.stops import within

from .conftest import PATIENCE, Server, connected, count_of, wait_for, whole_answer

END = "\r\nConnection: close\r\n\r\n"


@pytest.fixture(scope="module")
def guarded(start_server: Callable[..., Server]) -> Server:
    return start_server(api_keys=("key",))


def answer(server: Server, sent: bytes | str) -> tuple[int, str]:
    """The status and the body of what the server answers to some bytes."""
    status, _, body = whole_answer(server, sent)
    return status, body


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://127.0.0.1:8000/health", "127.0.0.1", 200),
        ("HTTP://localhost/health?a=http://b/", "evil.example", 200),  # the target is before the header
        ("https://[::1]:8000/%68ealth", "127.0.0.1", 200),
        ("http://localhost", "localhost", 200),
        ("http://localhost?a", "localhost", 200),
        ("http://evil.example/health", "127.0.0.1", 421),
        ("http://me@127.0.0.1/health", "127.0.0.1", 421),
        ("http:///health", "127.0.0.1", 200),
        ("ftp://127.0.0.1/health", "127.0.0.1", 404),
        ("http://localhost/v1/completions", "localhost", 405),
        ("*", "localhost", 404),
    ],
)
def test_a_target_may_be_a_whole_address(server: Server, target: str, host: str, status: int) -> None:
    assert answer(server, f"GET {target} HTTP/1.1\r\nHost: {host}{END}")[0] == status


def test_a_whole_address_is_counted_by_its_path(server: Server) -> None:
    body = json.dumps({"prompt": "trunk"})

    def asked(target: str) -> float:
        """Asks, and returns how often that has been counted."""
        head = f"POST {target} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}{END}"
        status, answered = answer(server, head + body)
        assert status == 200 and json.loads(answered)["count"] == 5
        found = re.search(r'http_requests_total{path="/tokenize",status="200"} (\S+)', server.get("/metrics").text)
        assert found is not None
        return float(found[1])

    assert asked("http://localhost/tokenize") == asked("/tokenize") - 1


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/v1/completions", {}, 401),
        ("/nothing", {"Authorization": "Bearer key"}, 404),
        ("/health", {}, 405),
        ("/v1/completions", {"Host": "evil.example"}, 421),
        ("/v1/completions", {"Origin": "http://evil.example"}, 403),
        ("/v1/completions", {"Authorization": "Bearer key", "Content-Encoding": "gzip"}, 415),
    ],
)
def test_a_client_that_still_sends_sees_why_it_is_refused(
    guarded: Server, path: str, headers: dict[str, str], status: int
) -> None:
    where = urlsplit(guarded.url)
    with closing(HTTPConnection(str(where.hostname), where.port, timeout=PATIENCE)) as client:
        client.request("POST", path, b"a" * 12_000_000, {"Connection": "close", **headers})
        assert client.getresponse().status == status


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
def test_a_body_that_does_not_come_delays_no_answer_for_ever(
    guarded: Server, monkeypatch: pytest.MonkeyPatch, expect: str
) -> None:
    monkeypatch.setattr(middleware, "_DRAIN_SECONDS", 0.2 if not expect else 60.0)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{expect}Content-Length: 9{END}"
    assert answer(guarded, head)[0] == 401


def test_a_body_that_nobody_asked_for_is_no_part_of_the_next_request(guarded: Server) -> None:
    """A client that gets an answer in place of `100 Continue` sends no body, and may ask again at once."""
    where = urlsplit(guarded.url)
    with closing(HTTPConnection(str(where.hostname), where.port, timeout=PATIENCE)) as client:
        client.putrequest("POST", "/v1/completions")
        client.putheader("Expect", "100-continue")
        client.putheader("Content-Length", "1000")
        client.endheaders()
        refused = client.getresponse()
        assert refused.status == 401 and refused.headers["Connection"] == "close" and refused.read()
        client.request("GET", "/health")  # on a new connection
        assert client.getresponse().status == 200


def test_what_the_whole_server_can_be_asked(server: Server) -> None:
    assert answer(server, f"OPTIONS * HTTP/1.1\r\nHost: localhost{END}") == (204, "")


def counts_of(server: Server, path: str) -> list[float]:
    """How many requests of a path were answered with 499 and with 500."""
    return [count_of(server, path, status) for status in (499, 500)]


@pytest.mark.parametrize("path", ["/v1/completions", "/tokenize"])
def test_a_client_that_leaves_within_its_body_is_no_fault_of_the_server(
    server: Server, caplog: pytest.LogCaptureFixture, path: str
) -> None:
    before = counts_of(server, path)
    with caplog.at_level(logging.INFO, "trunkattn"):
        with connected(server) as connection:
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
            connection.sendall(head.encode() + b'{"prompt"')
        wait_for(lambda: counts_of(server, path) != before)
    assert counts_of(server, path) == [before[0] + 1, before[1]]
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def post_of(body: dict[str, object], *headers: str, version: str = "1.1") -> bytes:
    written = json.dumps(body)
    head = [f"POST /v1/completions HTTP/{version}", "Host: localhost", f"Content-Length: {len(written)}", *headers]
    return "\r\n".join([*head, "", written]).encode()


@pytest.mark.parametrize("lines", [b"\r\n", b"\n", b"\r\n\r\n\n", b""])
@pytest.mark.parametrize("pieces", ["together", "behind the body", "before the head", "byte by byte"])
def test_empty_lines_before_a_request_are_skipped(server: Server, lines: bytes, pieces: str) -> None:
    """RFC 9112, section 2.2."""
    first = post_of({"prompt": "x", "max_tokens": 2})
    last = b"GET /health HTTP/1.1\r\nHost: localhost" + END.encode()
    parts = {
        "together": [first + lines + last],
        "behind the body": [first + lines, last],
        "before the head": [first, lines + last],
        "byte by byte": [lines + first, *(lines[at : at + 1] for at in range(len(lines))), last],
    }
    received = b""
    with connected(server) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts[pieces]:
            connection.sendall(part)
            if part.endswith(first) or part == first + lines:
                while b'"finish_reason"' not in received:
                    received += connection.recv(1 << 16)
            else:
                time.sleep(0.01)  # so that the parts arrive one by one
        while part := connection.recv(1 << 16):
            received += part
    assert re.findall(rb"HTTP/1.1 (\d+)", received) == [b"200", b"200"] and received.endswith(b'{"status":"ok"}')


@pytest.mark.parametrize("sent", [b"\rGET / HTTP/1.1\r\n", b"\r\n\0", b"\r\n hello\r\n\r\n"])
def test_other_bytes_than_empty_lines_are_no_request(server: Server, sent: bytes) -> None:
    status, body = answer(server, sent)
    assert status == 400 and "illegal request line" in body


@pytest.mark.parametrize("behind", [b"\r\n", b"GET /health HTTP/1.1\r\n"])
def test_a_client_that_leaves_is_noticed_whatever_follows_its_request(
    server: Server, monkeypatch: pytest.MonkeyPatch, behind: bytes
) -> None:
    server.stand_still(monkeypatch)
    metrics = server.app.state.service.metrics
    with connected(server) as connection:
        connection.sendall(post_of({"prompt": "x", "max_tokens": 400, "ignore_eos": True}) + behind)
        wait_for(lambda: not server.is_idle())
    server.wait_idle()
    assert b"running_sequences 0.0" in metrics.text()


@pytest.mark.parametrize(("version", "headers"), [("1.0", ()), ("1.1", ("Connection: close",))])
def test_what_follows_the_last_request_of_a_connection_ends_no_answer(
    server: Server, monkeypatch: pytest.MonkeyPatch, version: str, headers: tuple[str, ...]
) -> None:
    go_on = server.stand_still(monkeypatch)
    with connected(server) as connection:
        body = {"prompt": "x", "max_tokens": 40, "ignore_eos": True}
        connection.sendall(post_of(body, *headers, version=version))
        wait_for(lambda: not server.is_idle())
        connection.sendall(b"\r\n")
        assert server.get("/health").status_code == 200  # in a later turn of the server's loop than those bytes
        go_on.set()
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    head, _, answered = received.partition(b"\r\n\r\n")
    assert head.split()[1] == b"200" and json.loads(answered)["usage"]["completion_tokens"] == 40


def test_a_request_arrives_with_its_last_byte(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a client takes to send it is no time of the server's."""
    arrived, submission = list[float](), server.app.state.service.submission

    async def noted(name: str, token_ids: list[int], params: object, caller: Caller, has_answer: bool) -> object:
        arrived.append(caller.arrival_time or 0.0)
        return await submission(name, token_ids, params, caller, has_answer)

    monkeypatch.setattr(server.app.state.service, "submission", noted)
    sent = post_of({"prompt": "x", "max_tokens": 2}, "Connection: close", "Expect: 100-continue")
    with connected(server) as connection:
        connection.sendall(sent[:-1])
        assert b"100" in connection.recv(1 << 16)  # the server waits for the body
        last = time.monotonic()
        connection.sendall(sent[-1:])
        while connection.recv(1 << 16):
            pass
    assert arrived[0] >= last


def test_a_client_that_would_rather_have_http2_is_answered_quietly(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = "Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA"
    with caplog.at_level(logging.WARNING):
        assert answer(server, f"GET /health HTTP/1.1\r\nHost: localhost\r\n{upgrade}\r\n\r\n")[0] == 200
    assert not caplog.records


def test_no_proxy_keeps_a_stream(server: Server) -> None:
    """nginx with its default settings holds the events back."""
    body = {"prompt": "x", "max_tokens": 2, "stream": True}
    assert server.post("/v1/completions", body).headers["X-Accel-Buffering"] == "no"
    with httpx.stream("GET", f"{server.url}/live", timeout=PATIENCE) as page:
        assert page.headers["X-Accel-Buffering"] == "no"


def test_a_connection_may_rest_longer_than_a_head_may_take(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ServerOptions.timeout_keep_alive > 60  # so long do proxies keep theirs
    monkeypatch.setattr(running, "LIMITS", limits.RequestLimits(header_seconds=0.2))
    where = urlsplit(start_server(timeout_keep_alive=20).url).netloc
    with closing(HTTPConnection(where, timeout=PATIENCE)) as connection:
        for _ in range(2):
            connection.request("GET", "/health")
            assert connection.getresponse().read() == b'{"status":"ok"}'
            time.sleep(0.6)
        connection.sock.sendall(b"GET /health HTTP/1.1\r\n")  # and no more of this head
        with suppress(ConnectionResetError):
            assert connection.sock.recv(1) == b""


@pytest.mark.parametrize("stands_still", [True, False])
def test_time_in_which_the_server_stands_still_counts_for_no_limit(stands_still: bool) -> None:
    async def waited() -> bool:
        loop, arrived = asyncio.get_running_loop(), asyncio.Event()
        loop.call_later(0.05, time.sleep, 1.6 if stands_still else 0)
        loop.call_later(0.3, arrived.set)
        return await within(0.2, arrived.wait)

    with nullcontext() if stands_still else pytest.raises(asyncio.TimeoutError):
        assert asyncio.run(waited())


def test_a_connection_does_not_rest_for_ever(start_server: Callable[..., Server]) -> None:
    server = start_server(timeout_keep_alive=0.2)
    with connected(server) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        while connection.recv(1 << 16):
            pass


def half_closed(server: Server, sent: bytes) -> bytes:
    """What the server answers to a client that sends no more, as `nc -N`."""
    with connected(server) as connection:
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    return received


def test_who_sends_no_more_still_gets_what_takes_no_engine(server: Server) -> None:
    tokens = post_of({"prompt": "trunk"}).replace(b"/v1/completions", b"/tokenize")
    received = half_closed(server, tokens + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert received.count(b"HTTP/1.1 200") == 2 and b'"count":5' in received and received.endswith(b'{"status":"ok"}')


POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "rest",
    [
        post_of({"prompt": "x"})[:-5],
        POST + b"Content-Length: 9\r\nExpect: 100-continue\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
        POST,
    ],
)
def test_who_sends_no_more_sends_no_rest_of_a_request_either(
    server: Server, monkeypatch: pytest.MonkeyPatch, rest: bytes
) -> None:
    server.stand_still(monkeypatch)  # so that the first request is answered when no more can come
    received = half_closed(server, post_of({"prompt": "x", "max_tokens": 400, "ignore_eos": True}) + rest)
    assert received.startswith(b"HTTP/1.1 499") and received.count(b"HTTP/1.1") == 1


@pytest.mark.parametrize("stream", [False, True])
def test_who_sends_no_more_is_told_that_no_answer_comes(
    server: Server, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A client that has gone away looks the same, and nobody computes for one."""
    server.stand_still(monkeypatch)
    received = half_closed(server, post_of({"prompt": "x", "max_tokens": 400, "ignore_eos": True, "stream": stream}))
    assert received.startswith(b"HTTP/1.1 499") and b"expected one that stays open" in received


def test_a_broken_stream_of_many_answers_makes_no_noise(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), connected(server) as connection:
        connection.sendall(post_of({"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True, "n": 16}))
        connection.recv(1 << 10)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # to close resets it
        connection.close()
        server.wait_idle()
    assert not caplog.records


def test_a_third_ctrl_c_breaks_the_connections_that_are_left() -> None:
    """A client that reads nothing would hold the server for a minute, and a step without an end for ever."""
    server = running.AppServer(FastAPI(), shutdown_seconds=3600)
    broken = []
    for _ in range(3):
        server.handle_exit(signal.SIGINT, None)
        broken.append(server.force_exit)
    assert broken == [False, False, True]


def test_signals_end_the_server_but_for_those_that_it_is_started_to_ignore() -> None:
    """`nohup` lets it ignore SIGHUP, and a script SIGINT where it starts the server in the background."""
    server, numbers = running.AppServer(FastAPI(), shutdown_seconds=1), (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
    before = [signal.getsignal(number) for number in numbers]
    try:
        for ignored in numbers:
            for one in numbers:
                signal.signal(one, signal.SIG_IGN if one is ignored else signal.SIG_DFL)
            with server.capture_signals():
                taken = [one for one in numbers if signal.getsignal(one) == server.handle_exit]
                assert taken == [one for one in numbers if one is not ignored]
            assert [signal.getsignal(one) is signal.SIG_IGN for one in numbers] == [one is ignored for one in numbers]
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)
