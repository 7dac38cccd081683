"""/v1/completions: prompts in, texts out."""

import time
import uuid
from collections.abc import AsyncGenerator, Collection, Sequence
from typing import Any

from trunkattn.engine.outputs import CompletionOutput, Logprob, RequestOutput
from trunkattn.server.engine_loop import Submission
from trunkattn.server.errors import BadRequest, shown
from trunkattn.server.protocol import CompletionRequest
from trunkattn.server.service import Service, usage_of
from trunkattn.server.streaming import LEAST_LOGPROB, Progress, StreamWriter, TextOffsets


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
            self._choice(prompt, answer, answer.text, self._logprobs(answer, 0, TextOffsets()))
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
                    logprobs = self._logprobs(answer, first_token, sent.offsets) if has_logprobs else None
                    yield writer.event(self._envelope([self._choice(grown.prompt, answer, text, logprobs, at == 0)]))
        if self._body.stream_options and self._body.stream_options.include_usage:
            usage = usage_of([newest[prompt] for prompt in range(len(submissions))])
            yield writer.event(self._envelope([]) | {"usage": usage.as_json()})
        yield writer.done()

    def _logprobs(self, answer: CompletionOutput, first_token: int, offsets: TextOffsets) -> dict[str, Any] | None:
        if answer.logprobs is None:
            return None
        hidden = () if self._body.skip_special_tokens is False else self._service.special_ids
        return _logprobs(answer, first_token, offsets, hidden)

    def _choice(
        self, prompt: int, answer: CompletionOutput, text: str, logprobs: Any, begins: bool = True
    ) -> dict[str, Any]:
        if begins and self._echoed:
            text = self._echoed[prompt] + text
        return {
            "index": prompt * self._body.n + answer.index,
            "text": text,
            "logprobs": logprobs,
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


def _logprobs(
    answer: CompletionOutput, first_token: int, offsets: TextOffsets, hidden: Collection[int]
) -> dict[str, Any]:
    """Log-probabilities of tokens from `first_token` on. hidden: tokens that write nothing into the text."""
    tokens, own, top, places = [], [], [], []
    for token_id, entry in zip(answer.token_ids[first_token:], (answer.logprobs or [])[first_token:], strict=True):
        tokens.append(_shown(entry[token_id], token_id))
        own.append(max(entry[token_id].logprob, LEAST_LOGPROB))
        likely: dict[str, float] = {}
        for other, logprob in entry.items():  # the token itself comes first, and nothing replaces it
            likely.setdefault(_shown(logprob, other), max(logprob.logprob, LEAST_LOGPROB))
        top.append(likely)
        places.append(offsets.before(b"" if token_id in hidden else entry[token_id].token_bytes or b""))
    return {"tokens": tokens, "token_logprobs": own, "top_logprobs": top, "text_offset": places}


def _shown(logprob: Logprob, token_id: int) -> str:
    """A token as text. Part of a character is written as its bytes, as OpenAI does."""
    written = logprob.token_bytes
    if written is None:
        return f"token_id:{token_id}"
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)
