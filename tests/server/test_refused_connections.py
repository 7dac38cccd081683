"""Connections that are refused before the application sees a request, or while it waits for a body."""

import json
import logging
from collections.abc import Callable

import pytest

from trunkattn.server import limits, running

from .conftest import Server, connected, count_of, wait_for, whole_answer


@pytest.mark.parametrize(
    ("sent", "status", "message"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64), 400, "TLS"),
        (b"hello\n\n", 400, "illegal request line"),
        (b"\0\0\0\0", 400, "illegal request line"),
        (b"GET /health HTTP/1.1\r\n\r\n", 400, "Host"),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 100_000, 431, "too long"),
        (b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n", 501, "Transfer-Encoding"),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505, "expected HTTP/1.1"),
    ],
)
def test_bytes_that_are_no_request_are_told_why(
    server: Server, caplog: pytest.LogCaptureFixture, sent: bytes, status: int, message: str
) -> None:
    before = count_of(server, "other", status)
    with caplog.at_level(logging.WARNING, "trunkattn"):
        answered, headers, body = whole_answer(server, sent)
    error = json.loads(body)["error"]["message"]
    assert answered == status and message in error and "expected" in error and "bytearray" not in error
    assert status == 505 or headers["x-request-id"] in caplog.text  # a request of another version is understood
    assert headers["x-request-id"] and count_of(server, "other", status) == before + 1


@pytest.mark.parametrize("behind", ["with the head", "later"])
@pytest.mark.parametrize(("chunks", "status"), [("zz\r\n", 400), ("1\r\nx\r\n" * (limits.LIMITS.chunks + 1), 413)])
def test_a_refused_body_is_named_and_counted_as_its_client_sees_it(
    server: Server, chunks: str, status: int, behind: str
) -> None:
    before = [count_of(server, "/tokenize", each) for each in (status, 499)]
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: mine\r\nTransfer-Encoding: chunked\r\n"
    sent = f"{head}Expect: 100-continue\r\n\r\n" if behind == "later" else f"{head}\r\n{chunks}"
    with connected(server) as connection:
        connection.sendall(sent.encode())
        if behind == "later":
            assert b"100" in connection.recv(1 << 16)  # the application waits for the body
            connection.sendall(chunks.encode())
        received = b""
        while part := connection.recv(1 << 16):
            received += part
    assert received.startswith(f"HTTP/1.1 {status} ".encode()) and received.count(b"x-request-id: mine\r\n") == 1
    wait_for(lambda: count_of(server, "/tokenize", status) == before[0] + 1)
    assert count_of(server, "/tokenize", 499) == before[1]


def test_a_body_comes_in_so_many_small_chunks_and_no_more(server: Server) -> None:
    """Each takes the event loop as long as a large one, and all other clients wait meanwhile."""
    most, small = limits.LIMITS.chunks, limits.LIMITS.chunk_bytes - 1
    head = "POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    body = json.dumps({"prompt": "trunk"})
    for num_chunks, size in ((most, 1), (most, small), (3 * most, small + 1), (most + 1, small), (10 * most, 1)):
        text = body.ljust(num_chunks * size)
        chunks = (text[at : at + size] for at in range(0, len(text), size))
        sent = head + "".join(f"{size:x}\r\n{chunk}\r\n" for chunk in chunks) + "0\r\n\r\n"
        status, _, answered = whole_answer(server, sent)
        assert status == (413 if num_chunks > most and size <= small else 200), answered
    expected = f"more than {most} chunks of fewer than {small + 1} bytes: expected larger ones"
    assert expected in json.loads(answered)["error"]["message"]


def test_who_is_refused_within_a_body_does_not_stay(
    start_server: Callable[..., Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may send for a while, so that it sees why, and is then closed."""
    monkeypatch.setattr(running, "LIMITS", limits.RequestLimits(header_seconds=1.0))
    with connected(start_server()) as connection:
        connection.sendall(b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
        received = b""
        while part := connection.recv(1 << 16):
            received += part
        assert received.startswith(b"HTTP/1.1 400")

        def is_closed() -> bool:
            try:
                connection.sendall(b"1\r\nx\r\n")
            except (BrokenPipeError, ConnectionResetError):
                return True
            return False

        wait_for(is_closed)
