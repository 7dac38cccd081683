"""uvicorn with limits on connections, and an end that cuts nothing off without a word."""

import asyncio
import contextlib
import json
import logging
import os
import re
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any, Final

import h11
import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from trunkattn.server.errors import error_body
from trunkattn.server.limits import LIMITS
from trunkattn.server.middleware import ANSWERED, ID_HEADER, OTHER, name_request
from trunkattn.server.options import ServerOptions
from trunkattn.server.stops import stood_still

_LOG: Final = logging.getLogger(__name__)
_ACCEPTED_AT_ONCE: Final = 8  # connections that are taken before one of them is looked at
_BACKLOG: Final = 2048  # connections that the system keeps waiting
_FILES: Final = 1 << 13  # as many as it has use for; a connection for which no room is left looks at all others
_SPARE_FILES: Final = 32
_LEAST_CONNECTIONS: Final = 16
_TLS_HANDSHAKE: Final = b"\x16\x03"  # how a connection of TLS begins
_LAST_SECONDS: Final = 5  # for answers that say that the server is shutting down
_EMPTY_LINES: Final = re.compile(rb"(?:\r?\n)*")
HAS_LEFT: Final = "has_left"  # in the state of a request: an event that is set when its client sends no more
_BEHIND_BYTES: Final = 64 << 10  # that are read after a request while it is answered


class TooManyChunks(h11.RemoteProtocolError):
    """A body comes in too many small chunks."""


class LimitedConnection(h11.Connection):
    """The bytes of a connection as events. A body of too many small chunks is refused while it arrives: each takes the
    event loop as long as a large one, and all that have arrived are read at once."""

    def __init__(self) -> None:
        super().__init__(h11.SERVER)
        self._num_small = self._chunk_bytes = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_small = 0
        elif isinstance(event, h11.Data):
            self._chunk_bytes = len(event.data) + (0 if event.chunk_start else self._chunk_bytes)
            self._num_small += event.chunk_end and self._chunk_bytes < LIMITS.chunk_bytes
            if self._num_small > LIMITS.chunks:
                small = f"{LIMITS.chunks} chunks of fewer than {LIMITS.chunk_bytes} bytes"
                message = f"the body has more than {small}: expected larger ones, or a Content-Length"
                raise TooManyChunks(message, error_status_hint=413)
        return event


class LimitedProtocol(H11Protocol):
    """A connection that is closed when it sends no head of a request, or reads no answer, for too long. When there are
    too many connections, the one that has been idle longest makes room."""

    _timer: asyncio.TimerHandle | None = None  # closes the connection
    _idle_since = 0.0
    _is_refused = False  # what it sends has been answered with an error of HTTP
    most: int = 1 << 20

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.conn = LimitedConnection()
        self._left = asyncio.Event()
        self.app_state = {**self.app_state, HAS_LEFT: self._left}
        self._idle_since = self.loop.time()
        self._arm(LIMITS.header_seconds)
        if len(self.connections) > self.most:
            idle = [one for one in self.connections if isinstance(one, LimitedProtocol) and one._is_idle]
            oldest = min(idle, key=lambda one: one._idle_since, default=self)
            if oldest is self:
                self._refuse(
                    503, f"{self.most} connections are busy, as many as this server may open files for; try again"
                )
                self.transport.close()
            else:
                oldest.transport.abort()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Keeps the connection of a client that sends no more, as `nc -N` does, until what it has asked for is
        answered. One that has gone away looks the same, so what computes answers looks at `HAS_LEFT`."""
        self._left.set()
        return self._has_whole_request and not self.cycle.response_started

    def connection_lost(self, exc: Exception | None) -> None:
        self._left.set()
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused or (self._is_busy and self.conn.their_state is h11.MUST_CLOSE):
            return  # nothing that follows a connection's last request is looked at, and it ends no answer
        if not self._is_busy and self._timer is None:
            self._arm(LIMITS.header_seconds)
        super().data_received(data)

    def handle_events(self) -> None:
        if self.conn.their_state is h11.IDLE and not self._skip_empty_lines():
            return
        super().handle_events()
        if self._is_busy and not self.flow.write_paused:
            self._stop_timer()
        is_behind = self._is_busy and self.conn.their_state is h11.DONE
        if is_behind and len(self.conn.trailing_data[0]) <= _BEHIND_BYTES:
            self.flow.resume_reading()  # who reads no more does not see either that the client goes away

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._is_busy:
            self._idle_since = self.loop.time()
        if self._left.is_set() and not self._has_whole_request:  # the rest of one that has begun never comes
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._arm(LIMITS.write_seconds)

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._is_refused:
            self._stop_timer()

    def shutdown(self) -> None:
        """Ends at once what is refused: h11 may take no further event from it."""
        if self._is_refused:
            self.transport.close()
        else:
            super().shutdown()

    def send_400_response(self, msg: str) -> None:
        """Answers what is no request. The error that is being handled says more than msg, which is always the same.
        What the client still sends is dropped for a while: it would see a reset and not the answer otherwise."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        if self.conn.trailing_data[0].startswith(_TLS_HANDSHAKE):
            msg = "the client began with TLS: expected http:// in the address, or a proxy in front that ends TLS"
        elif isinstance(error, TooManyChunks):
            msg = str(error)
        elif error is not None:
            reason = str(error).partition(": bytearray")[0]
            msg = f"the bytes are not HTTP/1.1 ({reason}): expected a request line, headers with one Host, and a body"
        self._refuse(status, msg)
        self.transport.write_eof()
        self.flow.resume_reading()
        self._arm(LIMITS.header_seconds)

    def _refuse(self, status: int, message: str) -> None:
        """Answers a request that has not been understood, or whose body has not, unless an answer has begun."""
        is_named = self._is_busy
        state, sent = (self.scope["state"], self.headers) if is_named else ({}, ())
        name = name_request(state, sent)
        _LOG.warning("Request %s: its connection was closed with status %d: %s.", name, status, message)
        body = json.dumps(error_body(status, message)).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (ID_HEADER, name.encode()),
            (b"connection", b"close"),
        ]
        if status == 503:
            headers.append((b"retry-after", b"1"))
        with contextlib.suppress(h11.LocalProtocolError):  # an answer has begun
            for event in (h11.Response(status_code=status, headers=headers), h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            if is_named:
                state[ANSWERED] = status  # what counts requests looks there
            else:
                app: Any = self.config.app
                app.state.service.metrics.requests.labels(OTHER, str(status)).inc()
        if is_named:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._is_refused = True

    def _unsupported_upgrade_warning(self) -> None:
        """Says nothing. Java's clients ask for HTTP/2 with each request, and a server may ignore that."""

    def _skip_empty_lines(self) -> bool:
        """Drops empty lines before a request (RFC 9112, section 2.2), which old clients send after a body: h11 takes
        them for a request. Returns whether something else has arrived."""
        arrived, _ = self.conn.trailing_data
        if not arrived.startswith((b"\r", b"\n")):
            return True
        kept = _EMPTY_LINES.sub(b"", arrived, 1)  # the first match is at the beginning
        self.conn = LimitedConnection()  # between two requests a new one knows all that the old one does
        if kept:  # nothing would be the end of the connection
            self.conn.receive_data(kept)
        return kept not in (b"", b"\r")

    @property
    def _is_idle(self) -> bool:
        return not self._is_busy and not self.transport.is_closing()

    @property
    def _is_busy(self) -> bool:
        return not self._is_refused and self.cycle is not None and not self.cycle.response_complete

    @property
    def _has_whole_request(self) -> bool:
        return self._is_busy and not self.cycle.more_body

    def _arm(self, seconds: float) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, self._expire, seconds, self.loop.time() + seconds)

    def _expire(self, seconds: float, due: float) -> None:
        """Closes the connection, but for one that the server has had no time to read."""
        if stood_still(due):
            self._arm(seconds)
        else:
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """Closes the connection between two requests, but for one that the server has had no time to read."""
        timer = self.timeout_keep_alive_task
        if timer is not None and stood_still(timer.when()):
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        else:
            super().timeout_keep_alive_handler()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class AppServer(uvicorn.Server):
    """The server of an application of `create_app`.

    Args:
        app: the application.
        shutdown_seconds: after a signal, how long running answers may take. Then, or after a second signal, they end
            with 503.
        timeout_keep_alive: seconds that a connection stays open between two requests.
        config: further options of `uvicorn.Config`.
    """

    def __init__(
        self,
        app: FastAPI,
        shutdown_seconds: float,
        timeout_keep_alive: float = ServerOptions.timeout_keep_alive,
        **config: Any,
    ) -> None:
        self._app, self._shutdown_seconds = app, shutdown_seconds
        self._hurried = asyncio.Event()
        config["timeout_keep_alive"] = timeout_keep_alive
        config["timeout_graceful_shutdown"] = round(shutdown_seconds) + _LAST_SECONDS
        http = _limited_protocol()
        super().__init__(uvicorn.Config(app, http=http, backlog=_ACCEPTED_AT_ONCE, loop="asyncio", ws="none", **config))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listens."""
        await super().startup(sockets)
        for shared in (each for server in self.servers for each in server.sockets):
            with shared.dup() as listener:
                listener.listen(_BACKLOG)  # uvicorn's one number is for both queues

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Lets SIGHUP, which a closed terminal sends, end the server as SIGTERM does. A signal that whoever started the
        server lets it ignore, as `nohup` does, stays ignored."""
        before = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)}
        is_main = threading.current_thread() is threading.main_thread()
        with super().capture_signals():
            for number, handler in before.items() if is_main else ():
                signal.signal(number, signal.SIG_IGN if handler is signal.SIG_IGN else self.handle_exit)
            try:
                yield
            finally:
                if is_main:
                    signal.signal(signal.SIGHUP, before[signal.SIGHUP])
                for log in logging.getLogger().handlers:
                    log.flush()  # a signal that is raised again may end the process

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begins the end. A second signal waits for no answer: uvicorn would break their connections without a word.
        A third Ctrl-C breaks those that are left, as of clients that read nothing."""
        if self.should_exit and not self._hurried.is_set():
            self._hurried.set()  # the event loop sees it when it next looks whether connections are left
        else:
            super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Lets answers end, then ends them, then the connections."""
        self._app.state.live.close()
        ending = asyncio.ensure_future(self._end_answers())
        try:
            await super().shutdown(sockets)
        finally:
            ending.cancel()

    async def _end_answers(self) -> None:
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._hurried.wait(), self._shutdown_seconds)
        self._app.state.ending.set()
        await asyncio.to_thread(self._app.state.service.loop.stop)


def _limited_protocol() -> type[LimitedProtocol]:
    """The protocol, with as many connections as this process has files left."""
    allowed = _num_files()
    used = len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 64
    most = max(_LEAST_CONNECTIONS, allowed - used - _SPARE_FILES)
    return type("LimitedProtocol", (LimitedProtocol,), {"most": most})


def _num_files() -> int:
    """Files that this process may have open. The soft limit, often 1,024, protects programs that call `select`: here it
    is raised as far as the hard one and `_FILES` allow."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with contextlib.suppress(OSError, ValueError):  # some systems have yet another limit
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _FILES if soft == resource.RLIM_INFINITY else soft
