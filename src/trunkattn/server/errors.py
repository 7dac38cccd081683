"""Errors as OpenAI's API shapes them: {"error": {"message", "type", "param", "code"}}."""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.routing import Route

from trunkattn.engine.scheduling.request import PromptTooLong
from trunkattn.server.engine_loop import EngineFailed, ServerFull

_LOG: Final = logging.getLogger(__name__)
_LONGEST: Final = 1000  # characters of a message
_TYPES: Final = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
CLIENT_CLOSED: Final = 499  # nginx's status for a client that has gone away; it may still read
TOO_LONG: Final = "context_length_exceeded"  # OpenAI's code, at which clients shorten a conversation
_CODES: Final = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


class BadRequest(Exception):
    """A request that cannot be answered. message: `name=value: expected ...`; param: the field it is about."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


class AnswerFailed(Exception):
    """An answer ended because something in the server failed. The message says what."""


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…"
    message, param = _sendable(message), None if param is None else _sendable(param)
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or _CODES.get(status)}}


def _sendable(text: str) -> str:
    """A text that can be sent: half of a surrogate pair, which a request may name a field with, is a question mark."""
    return text.encode("utf-8", "replace").decode()


def error_response(
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    """The response of an error."""
    return JSONResponse(error_body(status, message, param, code), status, dict(headers or {}))


def param_of(message: str) -> str | None:
    """The name in a message of the library: `name=value: expected ...` or `name[0] has ...`. It begins with a small
    letter; a message that begins with a capital one is about no field."""
    match = re.match(r"([a-z_]\w*(?:\[\d+\]|\.\w+)*)[ =:]", message)
    return match[1] if match else None


def failure(error: BaseException, name: str = "A request") -> JSONResponse:
    """The response for an error: a status from 400 on if the request is wrong, 503 if another try may help, and 500 for
    everything else, which is the server's fault. name: what the log calls the request."""
    match error:
        case BadRequest():
            return error_response(error.status, str(error), error.param, error.code)
        case ServerFull():
            return error_response(429, str(error), headers={"Retry-After": str(error.retry_after_s)})
        case EngineFailed():
            return error_response(503, f"{error}; try again", headers={"Retry-After": "1"})
        case AnswerFailed():
            return error_response(500, str(error))
        case ClientDisconnect():
            return error_response(CLIENT_CLOSED, "the client went away before its body was complete")
    _LOG.error("%s failed.", name, exc_info=error)
    return error_response(500, f"the server failed: {type(error).__name__}")


@contextmanager
def bad_request(field: str = "") -> Iterator[None]:
    """Context in which the library's errors `name=value: expected ...` become errors of the request. It is only for
    checks of a request, because elsewhere such an error is the server's fault. field: the field of the request that
    contains the named ones, or "" if they stand at the top."""
    try:
        yield
    except (TypeError, ValueError) as error:
        message = str(error) if str(error).startswith(field) else f"{field}.{error}"
        code = TOO_LONG if isinstance(error, PromptTooLong) else None
        raise BadRequest(message, param_of(message), code=code) from error


@contextmanager
def about_field(
    field: str, name: str = "structured_outputs", reword: Callable[[str], str] = lambda message: message
) -> Iterator[None]:
    """Context in which errors of the request call a field by the request's own name.

    Args:
        field: the request's name for it.
        name: the library's name for it.
        reword: makes further changes to the message.
    """
    try:
        yield
    except BadRequest as error:
        if error.param is None or not error.param.startswith(name):
            raise
        param, message = (field + text.removeprefix(name) for text in (error.param, str(error)))
        raise BadRequest(reword(message), param, error.status, error.code) from error


def add_handlers(app: FastAPI) -> None:
    """Makes every error that an endpoint raises one of OpenAI's shape. `AnswerErrors` does it for the rest."""

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        if error.status_code == 404:
            known = {route.path for route in app.routes if isinstance(route, Route)}
            paths = ", ".join(sorted(path for path in known if "{" not in path))
            message = f"{request.method} {request.url.path}: there is no such path; expected one of {paths}"
        if error.status_code == 405:
            methods = " or ".join(sorted((error.headers or {}).get("Allow", "").split(", ")))
            message = f"{request.method} {request.url.path}: expected the method {methods} for this path"
        return error_response(error.status_code, message, headers=error.headers)

    async def any_other(request: Request, error: Exception) -> JSONResponse:
        return failure(error)

    for kind in (BadRequest, ServerFull, EngineFailed, AnswerFailed):
        app.add_exception_handler(kind, any_other)
