"""What stands before the endpoints: ids, errors, targets, hosts, keys, the size of bodies, and the count of requests.

It is plain ASGI.
"""

import asyncio
import hmac
import re
import socket
import time
import uuid
from collections.abc import Iterable, Sequence
from ipaddress import ip_address
from typing import Any, Final
from urllib.parse import unquote

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkattn.server.engine_loop import EngineFailed
from trunkattn.server.errors import error_response, failure
from trunkattn.server.limits import LIMITS
from trunkattn.server.monitoring.metrics import Metrics
from trunkattn.server.options import ServerOptions
from trunkattn.server.stops import stood_still, within

# What anybody may read: whether the server lives, what it counts, and the page without its data.
_OPEN_PATHS: Final = ("/", "/health", "/metrics", "/static/")
_ABSOLUTE: Final = re.compile(rb"https?://([^/]*)(/.*)?", re.IGNORECASE)
_METHODS: Final = "GET, HEAD, OPTIONS, POST"
_UNCOUNTED_BYTES: Final = 64 << 10  # bodies up to here are let in whatever else is being read
_TOO_SLOW: Final = 408
REQUEST_ID: Final = "request_id"  # in the state of a request
ANSWERED: Final = "answered"  # there too: the status with which its connection has answered before the application
ID_HEADER: Final = b"x-request-id"
OTHER: Final = "other"  # the route of requests without one
_OTHERS_ID: Final = re.compile(rb"[!-~]{1,128}")
_DRAINED_BYTES: Final = 256 << 20
_DRAIN_SECONDS: Final = 10.0


class ReadRest:
    """Reads the rest of a request's body before the answer begins.

    If the server closed a connection on which a client still sends, the client would see a reset and not the answer. A
    body is not waited for if the client sends it only when asked to (Expect: 100-continue), or sends it too slowly. One
    that nobody has asked for never comes, so its connection ends with the answer: the next request would be read as
    this body. A request whose body has not arrived when the server ends gets 503.

    Args:
        app: the application behind it.
        ending: set when the server ends its answers.
    """

    def __init__(self, app: ASGIApp, ending: asyncio.Event) -> None:
        self._app, self._ending = app, ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        is_held_back = headers.get(b"expect", b"").lower() == b"100-continue"
        is_complete = b"transfer-encoding" not in headers and headers.get(b"content-length", b"0") == b"0"

        async def read() -> Message:
            nonlocal is_held_back, is_complete
            is_held_back = False
            part = await (receive() if is_complete else self._arrived(receive))
            is_complete = is_complete or not part.get("more_body", False)
            return part

        async def begin(message: Message) -> None:
            if message["type"] == "http.response.start" and not is_complete:
                if is_held_back:
                    message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
                elif message["status"] != _TOO_SLOW:
                    await _drain(read)
            await send(message)

        await self._app(scope, read, begin)

    async def _arrived(self, receive: Receive) -> Message:
        """The next message of the connection. Raises EngineFailed if the server ends before it."""
        arriving, ending = asyncio.ensure_future(receive()), asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait((arriving, ending), return_when=asyncio.FIRST_COMPLETED)
            if not arriving.done():
                raise EngineFailed("the server is shutting down")
            return arriving.result()
        finally:
            arriving.cancel()
            ending.cancel()


def name_request(state: dict[str, Any], headers: Iterable[tuple[bytes, bytes]] = ()) -> str:
    """The id of a request, which its state keeps: the one that the client sends in a header, or a new one."""
    given = dict(headers).get(ID_HEADER, b"")
    name: str = state.setdefault(REQUEST_ID, given.decode() if _OTHERS_ID.fullmatch(given) else uuid.uuid4().hex)
    return name


class NameRequests:
    """Gives each request an id: the one that the client, or a proxy before it, sends in a header, or a new one. The
    response has it in the same header, and its JSON and its lines of the log have it after a prefix."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        own = name_request(scope.setdefault("state", {}), scope["headers"]).encode()

        async def begin(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (ID_HEADER, own)]}
            await send(message)

        await self._app(scope, receive, begin)


class CountRequests:
    """Counts every request by its route and the status that its client gets. Paths that do not exist count as one
    route, so that nobody can fill the memory with them."""

    def __init__(self, app: ASGIApp, metrics: Metrics, routes: Sequence[BaseRoute]) -> None:
        self._app, self._metrics, self._routes = app, metrics, routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def count(message: Message) -> None:
            await send(message)
            if message["type"] == "http.response.start":
                status = scope.get("state", {}).get(ANSWERED, message["status"])
                self._metrics.requests.labels(self._route(scope), str(status)).inc()

        await self._app(scope, receive, count)

    def _route(self, scope: Scope) -> str:
        """The route of a request, such as /v1/models/{name}."""
        asked = {**scope, "root_path": ""}  # a mounted folder sets root_path to its own name
        found = (route for route in self._routes if route.matches(asked)[0] is not Match.NONE)
        return next((route.path_format for route in found if isinstance(route, Route | Mount)), OTHER)


class AnswerErrors:
    """Answers 500 if an endpoint raises an unexpected error. The CORS headers are added to this answer too, because a
    page of another origin could not read it otherwise."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        started = False

        async def begin(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, begin)
        except Exception as error:
            response = failure(error, f"Request {scope['state'][REQUEST_ID]}")
            if not started:
                await response(scope, receive, send)


class ReadTarget:
    """Handles request targets that are not paths (RFC 9112, section 3.2). From `http://host/path`, which clients send
    to a proxy, it takes host and path. It answers `OPTIONS *` for the whole server. Versions other than HTTP/1 get
    505."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            if scope["http_version"] not in ("1.0", "1.1"):  # such as the preface of HTTP/2 without TLS
                message = f"HTTP/{scope['http_version']}: expected HTTP/1.1"
                return await error_response(505, message, headers={"Connection": "close"})(scope, receive, send)
            if (scope["method"], scope["path"]) == ("OPTIONS", "*"):
                return await Response(status_code=204, headers={"Allow": _METHODS})(scope, receive, send)
            if absolute := _ABSOLUTE.fullmatch(scope["raw_path"]):
                host, path = absolute[1], absolute[2] or b"/"
                others = [header for header in scope["headers"] if header[0] != b"host"]
                scope.update(path=unquote(path.decode("ascii")), raw_path=path, headers=[(b"host", host), *others])
        await self._app(scope, receive, send)


class CheckHost:
    """Answers 421 to a name that is not this server's, and 403 to pages of other origins.

    A web page may point its own name at this machine, and the browser then takes the page and the server for one origin
    (DNS rebinding). Addresses are always accepted: nobody can point them elsewhere. A dot at the end of a name
    says only that it is whole.
    """

    def __init__(self, app: ASGIApp, options: ServerOptions) -> None:
        self._app = app
        names = {"localhost", socket.gethostname().lower(), options.host.lower(), *options.allowed_hosts}
        self._names = {name.removesuffix(".") for name in names}
        self._origins = frozenset(options.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = dict(scope["headers"])
            host = headers.get(b"host", b"").decode("latin-1").lower()
            if host and not self._is_ours(host, (scope.get("server") or ("",))[0]):
                message = f"Host: {host[:100]}: expected a name of this server; allow it with --allowed-host"
                return await error_response(421, message)(scope, receive, send)
            origin = headers.get(b"origin", b"").decode("latin-1")
            if origin and not self._may_call(origin, host):
                message = f"Origin: {origin[:100]}: expected this server's page; allow others with --allowed-origin"
                return await error_response(403, message)(scope, receive, send)
        await self._app(scope, receive, send)

    def _is_ours(self, host: str, own_address: str) -> bool:
        name = re.sub(r"\.?(:\d*)?$", "", host, count=1).strip("[]")
        if "*" in self._names or name in self._names or name == own_address:
            return True
        try:
            ip_address(name)
        except ValueError:
            return False
        return True

    def _may_call(self, origin: str, host: str) -> bool:
        return "*" in self._origins or origin.lower() in self._origins or origin.lower().partition("://")[2] == host


class RequireKey:
    """Answers 401 unless a request has one of the keys as its bearer token, and leaves the key for the endpoints.

    Every key is compared in a time that does not depend on it.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._keys:
            key = self._key(scope)
            if key is None and not self._is_open(scope):
                message = "Authorization: expected 'Bearer KEY' with a key of this server"
                response = error_response(401, message, headers={"WWW-Authenticate": "Bearer"})
                return await response(scope, receive, send)
            scope.setdefault("state", {})["api_key"] = key
        await self._app(scope, receive, send)

    def _key(self, scope: Scope) -> str | None:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, token = given.partition(b" ")
        matches = [hmac.compare_digest(token.strip(), key) for key in self._keys]
        return token.strip().decode() if scheme.lower() == b"bearer" and any(matches) else None

    def _is_open(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return scope["method"] == "OPTIONS" or any(
            path == allowed or (allowed != "/" and allowed.endswith("/") and path.startswith(allowed))
            for allowed in _OPEN_PATHS
        )


class LimitBody:
    """Answers 413 to a body that is larger than allowed, whatever its headers say, 415 to a compressed one, 408 to one
    that comes too slowly, and 503 to a large one while others fill the room for all of them."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes
        self._held = 0  # bytes of all bodies that count

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        encoding = headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding.strip().lower() not in ("", "identity"):
            message = f"Content-Encoding: {encoding[:100]}: expected a body without compression; leave the header out"
            return await error_response(415, message)(scope, receive, send)
        declared = headers.get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._max_bytes:
            return await error_response(413, self._too_large)(scope, receive, send)
        body = _Arriving(receive)

        async def limited() -> Message:
            part = await body.part()
            counts = body.size if body.size > _UNCOUNTED_BYTES else 0
            self._held += counts - body.counted
            body.counted = counts
            if body.size > self._max_bytes:
                raise HTTPException(413, self._too_large)  # FastAPI lets it through while it reads a body
            if self._held > LIMITS.bodies:
                raise HTTPException(503, "too many large bodies at a time; try again", {"Retry-After": "1"})
            return part

        try:
            await self._app(scope, limited, send)
        finally:
            self._held -= body.counted

    @property
    def _too_large(self) -> str:
        return f"the body is larger than this server allows: expected at most {self._max_bytes} bytes"


class _Arriving:
    """A body as it arrives. size: its bytes so far. counted: how many of them the room for all bodies counts."""

    def __init__(self, receive: Receive) -> None:
        self.size = self.counted = 0
        self._receive = receive
        self._deadline = time.monotonic() + LIMITS.body_seconds
        self._complete = False

    async def part(self) -> Message:
        """The next message of the connection; raises 408 if the body is late."""
        if self._complete:
            return await self._receive()
        if stood_still(self._deadline):
            self._deadline = time.monotonic() + LIMITS.body_seconds
        try:
            part = await within(max(0.0, self._deadline - time.monotonic()), self._receive)
        except asyncio.TimeoutError:
            message = (
                f"the body did not arrive within {LIMITS.body_seconds} s: expected all of it by then; send it again"
            )
            raise HTTPException(_TOO_SLOW, message, {"Connection": "close"}) from None
        self.size += len(part.get("body", b""))
        self._complete = not part.get("more_body", False)
        return part


async def _drain(receive: Receive) -> None:
    """Reads a body that nobody wants. Not for ever."""
    size, deadline = 0, time.monotonic() + _DRAIN_SECONDS
    while size < _DRAINED_BYTES and time.monotonic() < deadline:
        try:
            part = await asyncio.wait_for(receive(), deadline - time.monotonic())
        except (asyncio.TimeoutError, EngineFailed):
            return
        size += len(part.get("body", b""))
        if not part.get("more_body", False):
            return
