"""The application: its paths, and what happens when it starts and stops."""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from inspect import signature
from types import MappingProxyType
from typing import Any, Final, TypeVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.middleware.cors import CORSMiddleware
from starlette.staticfiles import StaticFiles
from starlette.types import Receive, Scope, Send

from trunkattn.engine.llm import LLM
from trunkattn.server.bodies.protocol import DetokenizeRequest, TokenizeRequest
from trunkattn.server.endpoints.chat import Chat
from trunkattn.server.endpoints.completions import Completion
from trunkattn.server.endpoints.endpoint import Endpoint
from trunkattn.server.endpoints.streaming import respond, write_json
from trunkattn.server.engine_loop import EngineLoop
from trunkattn.server.errors import CLIENT_CLOSED, BadRequest, add_handlers, error_response
from trunkattn.server.middleware import (
    REQUEST_ID,
    AnswerErrors,
    CheckHost,
    CountRequests,
    LimitBody,
    NameRequests,
    ReadRest,
    ReadTarget,
    RequireKey,
)
from trunkattn.server.monitoring.live import Live
from trunkattn.server.monitoring.log_lines import report
from trunkattn.server.monitoring.metrics import Metrics
from trunkattn.server.options import ServerOptions
from trunkattn.server.prompts.conversation import Conversation
from trunkattn.server.running import HAS_LEFT
from trunkattn.server.service import Caller, Service, salt_of

Result = TypeVar("Result")

_LOG: Final = logging.getLogger(__name__)
_READ: Final = ("GET", "HEAD")
_STATIC: Final = files("trunkattn.server") / "static"
# The page asks no other host for anything, and no other page may hold it in a frame.
_PAGE_HEADERS: Final = MappingProxyType(
    {
        "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; style-src 'self' 'unsafe-inline'; "
        "frame-ancestors 'none'"
    }
)
# Headers of answers that a page of another origin may read beside those that every page may.
_EXPOSED: Final = ("Allow", "Retry-After", "WWW-Authenticate", "X-Request-Id")
_JSON: Final = "application/json"
_LEFT_EARLY: Final = "the client closed its connection for sending: expected one that stays open until the answer comes"
_PROMETHEUS: Final = "text/plain; version=0.0.4; charset=utf-8"


def create_app(llm: LLM, options: ServerOptions) -> FastAPI:
    """The ASGI application over a model. While it runs, nothing else may use the model.

    Args:
        llm: the model.
        options: see `ServerOptions`.

    Example:
        >>> app = create_app(LLM("path/to/model"), ServerOptions("my-model"))  # doctest: +SKIP
        >>> uvicorn.run(app)  # doctest: +SKIP
    """
    metrics = Metrics(options.served_model_name)
    loop = EngineLoop(llm.engine, options.max_waiting, metrics.step_tokens.observe)
    live = Live(llm, metrics, loop)
    metrics.watch(llm.engine, lambda: loop.num_waiting)
    service = Service(llm, loop, options, metrics)
    app = FastAPI(title="TrunkAttention", lifespan=_lifespan(service, live), openapi_url=None, redirect_slashes=False)
    app.state.service, app.state.live, app.state.ending = service, live, asyncio.Event()
    add_handlers(app)
    _add_model_paths(app, service)
    _add_text_paths(app, service)
    _add_watch_paths(app, service, live)
    _add_middleware(app, options, metrics)
    return app


def _lifespan(service: Service, live: Live) -> Callable[[FastAPI], contextlib.AbstractAsyncContextManager[None]]:
    """What FastAPI enters when the application starts: the engine's thread runs, and the log reports, until it ends."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop = service.loop
        loop.start(live.watch)
        reporting = asyncio.ensure_future(report(loop.engine, lambda: loop.num_waiting))
        try:
            yield
        finally:
            reporting.cancel()
            await asyncio.to_thread(loop.stop)
            await service.close()

    return lifespan


def _add_middleware(app: FastAPI, options: ServerOptions, metrics: Metrics) -> None:
    """Adds what stands before the endpoints. The last one that is added sees a request first."""
    app.add_middleware(LimitBody, max_bytes=options.max_body_bytes)
    app.add_middleware(RequireKey, api_keys=options.api_keys)
    app.add_middleware(AnswerErrors)
    if options.allowed_origins:
        # Browsers ask before a page of the internet calls a server at home. An older Starlette lets them pass.
        is_known = "allow_private_network" in signature(CORSMiddleware).parameters
        private: Any = {"allow_private_network": True} if is_known else {}
        app.add_middleware(
            CORSMiddleware,
            allow_origins=options.allowed_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=_EXPOSED,
            **private,
        )
    app.add_middleware(CheckHost, options=options)
    app.add_middleware(ReadTarget)
    app.add_middleware(CountRequests, metrics=metrics, routes=app.routes)
    app.add_middleware(ReadRest, ending=app.state.ending)
    app.add_middleware(NameRequests)


def _add_model_paths(app: FastAPI, service: Service) -> None:
    """The paths that compute answers."""

    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await _answer(service, request, Completion)

    @app.post("/v1/chat/completions")
    async def chat_completions(request: Request) -> Response:
        return await _answer(service, request, Chat)

    @app.api_route("/v1/models", methods=[*_READ])
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_model(service)]}

    @app.api_route("/v1/models/{name:path}", methods=[*_READ])
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return _model(service)


def _add_text_paths(app: FastAPI, service: Service) -> None:
    """The paths that need only the tokenizer."""

    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        raw = await request.body()
        with service.loop.waiting_place():
            body = await service.read(raw, TokenizeRequest)
            service.check_model(body.model)
            if (body.prompt is None) == (body.messages is None):
                given = "both missing" if body.prompt is None else "given together"
                raise BadRequest(f"prompt and messages are {given}: expected one of them", "prompt")
            if body.prompt is not None:
                adds = body.add_special_tokens is not False
                token_ids = await service.tokenization.tokens(body.prompt, "prompt", adds)
            else:
                token_ids = await service.tokenization.chat_tokens(Conversation.of(body), len(raw))
        most = service.llm.engine.limits.max_model_len
        answer = {"count": len(token_ids), "max_model_len": most, "tokens": token_ids}
        return await _json_response(service, len(token_ids), answer)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        raw = await request.body()
        with service.loop.waiting_place():
            body = await service.read(raw, DetokenizeRequest)
            service.check_model(body.model)
            text = await service.tokenization.text(body.tokens)
        return await _json_response(service, max(len(text), len(body.tokens)), {"prompt": text})


async def _json_response(service: Service, num_places: int, answer: dict[str, Any]) -> Response:
    """The response of JSON. num_places: about how many tokens or characters it has."""
    written = await service.render(num_places, lambda pause: write_json(answer, pause))
    return Response(written, media_type=_JSON)


def _add_watch_paths(app: FastAPI, service: Service, live: Live) -> None:
    """The paths that show how the server does."""

    @app.api_route("/health", methods=[*_READ])
    async def health() -> Response:
        if service.loop.is_running:
            return JSONResponse({"status": "ok"})
        return error_response(503, "the engine has stopped")

    @app.api_route("/metrics", methods=[*_READ])
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=_PROMETHEUS)

    @app.api_route("/", methods=[*_READ])
    async def page() -> Response:
        return HTMLResponse((_STATIC / "index.html").read_text(encoding="utf-8"), headers=_PAGE_HEADERS)

    @app.get("/live")
    async def events(request: Request) -> Response:
        return await respond(live.events(_tenant(request, service.options)), "A live page")

    app.mount("/static", _WholeFiles(directory=str(_STATIC)))


class _WholeFiles(StaticFiles):
    """Files that are sent whole, whatever range a request asks for: what Starlette says of a bad one has another shape
    than the server's errors."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        others = [header for header in scope["headers"] if header[0] != b"range"]
        await super().__call__({**scope, "headers": others}, receive, send)

    def file_response(self, *args: Any, **options: Any) -> Response:
        """The response of a file."""
        response = super().file_response(*args, **options)
        response.headers["accept-ranges"] = "none"
        return response


async def _answer(service: Service, request: Request, endpoint_type: type[Endpoint[Any]]) -> Response:
    """The response of an endpoint that computes, unless the client goes away before it begins."""
    raw, arrived = await request.body(), time.monotonic()  # with its last byte
    response = await _unless_disconnected(request, _respond(service, request, raw, arrived, endpoint_type))
    return error_response(CLIENT_CLOSED, _LEFT_EARLY) if response is None else response


async def _respond(
    service: Service, request: Request, raw: bytes, arrived: float, endpoint_type: type[Endpoint[Any]]
) -> Response:
    """The response to a body: whole, or as a stream, which begins with its first event."""
    with service.loop.waiting_place():  # who waits for the tokenizer waits
        body = await service.read(raw, endpoint_type.body_model)
        key: str | None = getattr(request.state, "api_key", None)
        tenant, name = _tenant(request, service.options), getattr(request.state, REQUEST_ID)
        caller = Caller(salt_of(key, body.cache_salt), tenant, arrived, len(raw), name)
        endpoint = endpoint_type(service, body, caller)
        submissions = await endpoint.submissions()
    if body.user is not None:
        _LOG.info("%s is for user %r", endpoint.id, body.user)
    if body.stream:
        return await respond(endpoint.stream(submissions), endpoint.id)
    return Response(await endpoint.whole(submissions), media_type=_JSON)


async def _unless_disconnected(request: Request, work: Awaitable[Result]) -> Result | None:
    """The result of some work; None, and the work is cancelled, if the client goes away or sends no more first."""
    has_left: asyncio.Event = getattr(request.state, HAS_LEFT, asyncio.Event())
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_disconnected(request)), asyncio.ensure_future(has_left.wait())
    try:
        await asyncio.wait((working, *leaving), return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, *leaving):
            task.cancel()
        await asyncio.gather(working, *leaving, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _tenant(request: Request, options: ServerOptions) -> str | None:
    """Whose request it is: the key that it has; None if the server has one tenant."""
    key: str | None = getattr(request.state, "api_key", None)
    return key if len(options.api_keys) > 1 else None


def _model(service: Service) -> dict[str, Any]:
    limit = service.llm.engine.limits.max_model_len
    name = service.options.served_model_name
    return {
        "id": name,
        "object": "model",
        "created": service.model_created,
        "owned_by": "trunkattn",
        "max_model_len": limit,
    }
