"""/v1/completions: prompts in, texts out."""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from trunkattn.engine.outputs import CompletionOutput, RequestOutput
from trunkattn.server.engine_loop import Submission
from trunkattn.server.errors import BadRequest, shown
from trunkattn.server.protocol import CompletionRequest
from trunkattn.server.service import Service, usage_of
from trunkattn.server.streaming import Progress, StreamWriter


class Completion:
    """One request to /v1/completions.

    Args:
        service: the model.
        body: the request.
        salt: of its cached prefixes.
    """

    def __init__(self, service: Service, body: CompletionRequest, salt: bytes) -> None:
        self._service, self._body, self._salt = service, body, salt
        self.id, self._created = f"cmpl-{uuid.uuid4().hex}", int(time.time())
        self._echoed: list[str] = []

    async def submissions(self) -> list[Submission]:
        """The checked requests of its prompts."""
        service, body = self._service, self._body
        service.check_model(body.model)
        prompts = _prompts(body.prompt)
        service.check_count(len(prompts), body.n)
        if body.echo and body.logprobs is not None:
            raise BadRequest("echo=True: expected no logprobs together with echo; leave one of them out", "echo")
        params = service.params(body, **({} if body.logprobs is None else {"logprobs": body.logprobs}))
        checked = []
        for position, prompt in enumerate(prompts):
            name = "prompt" if len(prompts) == 1 else f"prompt[{position}]"
            token_ids = await service.tokens(prompt, name) if isinstance(prompt, str) else prompt
            checked.append(await service.submission(name, token_ids, params, self._salt))
            if body.echo:
                self._echoed.append(prompt if isinstance(prompt, str) else service.text(token_ids))
        return checked

    async def whole(self, submissions: Sequence[Submission]) -> dict[str, Any]:
        """The response, once every answer is finished."""
        outputs = await self._service.finished(submissions)
        choices = [
            self._choice(prompt, answer, answer.text, answer.logprobs is not None and _logprobs(answer, 0, 0))
            for prompt, output in enumerate(outputs)
            for answer in output.outputs
        ]
        return self._envelope(choices) | {"usage": usage_of(outputs).as_json()}

    async def stream(self, submissions: Sequence[Submission]) -> AsyncGenerator[str, None]:
        """The response as server-sent events."""
        writer, newest = StreamWriter(), dict[int, RequestOutput]()
        progress: dict[tuple[int, int], Progress] = {}
        async for grown in self._service.grow(submissions):
            newest[grown.prompt] = grown.output
            for answer in grown.output.outputs:
                sent = progress.setdefault((grown.prompt, answer.index), Progress())
                text, first_token, at = sent.advance(answer)
                has_logprobs = answer.logprobs is not None and len(answer.logprobs) > first_token
                if text or has_logprobs or sent.just_ended:
                    logprobs = has_logprobs and _logprobs(answer, first_token, at)
                    yield writer.event(self._envelope([self._choice(grown.prompt, answer, text, logprobs, at == 0)]))
        if self._body.stream_options and self._body.stream_options.include_usage:
            usage = usage_of([newest[prompt] for prompt in range(len(submissions))])
            yield writer.event(self._envelope([]) | {"usage": usage.as_json()})
        yield writer.done()

    def _choice(
        self, prompt: int, answer: CompletionOutput, text: str, logprobs: Any, begins: bool = True
    ) -> dict[str, Any]:
        if begins and self._echoed:
            text = self._echoed[prompt] + text
        return {
            "index": prompt * self._body.n + answer.index,
            "text": text,
            "logprobs": logprobs or None,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }

    def _envelope(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        model = self._service.options.served_model_name
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self._created,
            "model": model,
            "choices": choices,
        }


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a request: texts, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequest(f"prompt={shown(prompt)}: expected at least one prompt", "prompt")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


def _logprobs(answer: CompletionOutput, first_token: int, offset: int) -> dict[str, Any]:
    """Log-probabilities of tokens from `first_token` on. offset: characters of the answer before them."""
    tokens, own, top, offsets = [], [], [], []
    for token_id, entry in zip(answer.token_ids[first_token:], (answer.logprobs or [])[first_token:], strict=True):
        text = entry[token_id].decoded_token or ""
        tokens.append(text)
        own.append(entry[token_id].logprob)
        top.append({logprob.decoded_token or str(token): logprob.logprob for token, logprob in entry.items()})
        offsets.append(offset)
        offset += len(text)
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": offsets}
