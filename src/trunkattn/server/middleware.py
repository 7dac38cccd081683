"""What stands before the endpoints: keys, the size of bodies, and the count of requests by status. Plain ASGI."""

import hmac
from collections.abc import Sequence
from typing import Any, Final

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trunkattn.server.errors import error_response
from trunkattn.server.metrics import Metrics

# What anybody may read: whether the server lives, what it counts, and the page without its data.
_OPEN_PATHS: Final = ("/", "/health", "/metrics", "/static/")


class CountRequests:
    """Counts every request by its path and status. Paths that do not exist count as one, or anybody could fill the
    memory with them."""

    def __init__(self, app: ASGIApp, metrics: Metrics, paths: Sequence[str]) -> None:
        self._app, self._metrics, self._paths = app, metrics, frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        path = scope["path"] if scope["path"] in self._paths else "other"

        async def count(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._metrics.requests.labels(path, str(message["status"])).inc()
            await send(message)

        await self._app(scope, receive, count)


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
    """Answers 413 if a body is larger than allowed, whatever its headers say."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        message = f"the body is larger than this server allows: expected at most {self._max_bytes} bytes"
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if not declared.isdigit() or int(declared) > self._max_bytes:
            return await error_response(413, message)(scope, receive, send)
        received = 0

        async def limited() -> Message:
            nonlocal received
            part: Any = await receive()
            received += len(part.get("body", b""))
            if received > self._max_bytes:
                raise HTTPException(413, message)  # FastAPI lets it through while it reads a body
            return part

        await self._app(scope, limited, send)
