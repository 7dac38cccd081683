"""What every endpoint that generates has: a request, the client that sent it, and three steps to its response."""

import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Sequence
from typing import Any, ClassVar, Generic, TypeVar

from trunkattn.engine.outputs import RequestOutput
from trunkattn.server.bodies.protocol import Sampling, StreamOptions
from trunkattn.server.engine_loop import Submission
from trunkattn.server.service import Caller, Service

AnyRequest = TypeVar("AnyRequest", bound=Sampling)


class Endpoint(ABC, Generic[AnyRequest]):
    """One request to a path that generates.

    Args:
        service: the model.
        body: the request.
        caller: the client that sent it.

    Attributes:
        body_model: what a request's body is read as.
        id_prefix: how the ids of its responses begin.
        id: the response's.
    """

    body_model: ClassVar[type[Sampling]]
    id_prefix: ClassVar[str]

    def __init__(self, service: Service, body: AnyRequest, caller: Caller) -> None:
        self._service, self._body, self._caller = service, body, caller
        self.id, self._created = f"{self.id_prefix}-{caller.request_id}", int(time.time())
        self._options = body.stream_options or StreamOptions()

    @abstractmethod
    async def submissions(self) -> list[Submission]:
        """The checked requests of its prompts. Raises BadRequest if one cannot run."""

    @abstractmethod
    async def whole(self, submissions: Sequence[Submission]) -> str:
        """The response as JSON, once every answer is finished."""

    @abstractmethod
    def stream(self, submissions: Sequence[Submission]) -> AsyncGenerator[str, None]:
        """The response as server-sent events."""

    def _envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """A response, or an event of one, without its usage. kind: what the API calls it."""
        model = self._service.options.served_model_name
        return {"id": self.id, "object": kind, "created": self._created, "model": model, "choices": choices}

    def _ids(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """The field of an answer's tokens, if the request wants them."""
        return {"token_ids": list(token_ids)} if self._body.return_token_ids else {}

    def _prompt_ids(self, output: RequestOutput) -> dict[str, Any]:
        """The field of a prompt's tokens, if the request wants them."""
        return {"prompt_token_ids": output.prompt_token_ids} if self._body.return_token_ids else {}
