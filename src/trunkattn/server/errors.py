"""Errors as OpenAI's API shapes them: {"error": {"message", "type", "param", "code"}}."""

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from trunkattn.engine.config import shown
from trunkattn.server.engine_loop import EngineFailed, QueueFull

_LOG: Final = logging.getLogger(__name__)
_TYPES: Final = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error"}
_CODES: Final = {401: "invalid_api_key", 429: "rate_limit_exceeded"}


class BadRequest(Exception):
    """A request that cannot be answered. message: `name=value: expected ...`; param: the field it is about."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.param, self.status, self.code = param, status, code


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """The JSON of an error."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code or _CODES.get(status)}}


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
    """The name in a message of the library: `name=value: expected ...` or `name[0] has ...`."""
    match = re.match(r"([A-Za-z_]\w*(?:\[\d+\]|\.\w+)*)[ =:]", message)
    return match[1] if match else None


def failure(error: Exception) -> JSONResponse:
    """The response for an error of the engine or of a request's checks."""
    match error:
        case BadRequest():
            return error_response(error.status, str(error), error.param, error.code)
        case QueueFull():
            return error_response(429, str(error), headers={"Retry-After": str(error.retry_after_s)})
        case EngineFailed():
            return error_response(503, f"{error}; try again")
        case TypeError() | ValueError():
            return error_response(400, str(error), param_of(str(error)))
    _LOG.error("A request failed.", exc_info=error)
    return error_response(500, f"the server failed: {type(error).__name__}")


def _name(location: Sequence[Any]) -> str:
    """("body", "messages", 0, "role") -> "messages[0].role". Names of alternatives of a union are left out."""
    name = ""
    for part in location[1:]:
        if isinstance(part, int):
            name += f"[{part}]"
        elif re.fullmatch(r"[a-z_]\w*", part) and part not in {"str", "int", "float", "bool", "list", "dict"}:
            name += f".{part}" if name else part
    return name


def _validation(error: RequestValidationError) -> JSONResponse:
    first = error.errors()[0]
    name, reason = _name(first["loc"]), first["msg"]
    match first["type"]:
        case "json_invalid":
            return error_response(400, f"the body is not JSON ({first['ctx']['error']}): expected a JSON object")
        case "extra_forbidden":
            message = f"{name}={shown(first['input'])}: there is no such field; leave it out"
        case "missing":
            message = f"{name or 'the body'} is missing: expected a value"
        case _:
            message = f"{name or 'the body'}={shown(first['input'])}: {reason[:1].lower()}{reason[1:]}"
    return error_response(400, message, name or None)


def add_handlers(app: FastAPI) -> None:
    """Makes every error of the application one of OpenAI's shape."""

    @app.exception_handler(RequestValidationError)
    async def bad_field(request: Request, error: RequestValidationError) -> JSONResponse:
        return _validation(error)

    @app.exception_handler(HTTPException)
    async def no_such_path(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{request.method} {request.url.path}: {error.detail}"
        return error_response(error.status_code, message, headers=error.headers)

    async def any_other(request: Request, error: Exception) -> JSONResponse:
        return failure(error)

    for kind in (BadRequest, QueueFull, EngineFailed, TypeError, ValueError, Exception):
        app.add_exception_handler(kind, any_other)
