"""What every endpoint needs: the model behind the server, checks, tokens of prompts, and answers as they grow."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from trunkattn.engine.config import check_text
from trunkattn.engine.llm import LLM
from trunkattn.engine.outputs import RequestOutput
from trunkattn.engine.sampling_params import SamplingParams, StructuredOutputsParams
from trunkattn.engine.token_bytes import special_ids
from trunkattn.server.engine_loop import EngineFailed, EngineLoop, Submission
from trunkattn.server.errors import BadRequest, shown
from trunkattn.server.metrics import Metrics
from trunkattn.server.options import ServerOptions
from trunkattn.server.protocol import Message, Sampling

_OWN_FIELDS: Final = frozenset({"logit_bias", "logprobs", "stop", "structured_outputs"})  # made by hand below


@dataclass(frozen=True)
class Grown:
    """An answer of one of a request's prompts has grown. prompt: the prompt's number."""

    prompt: int
    output: RequestOutput


@dataclass(frozen=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def as_json(self) -> dict[str, Any]:
        """The counts as OpenAI's API shapes them."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def usage_of(outputs: Sequence[RequestOutput]) -> Usage:
    """Tokens of a request's prompts and answers."""
    return Usage(
        sum(len(output.prompt_token_ids) for output in outputs),
        sum(len(answer.token_ids) for output in outputs for answer in output.outputs),
        sum(output.num_cached_tokens for output in outputs),
    )


class Service:
    """The model behind the server.

    Args:
        llm: the model, its tokenizer and its engine. `loop` alone drives the engine.
        loop: the engine's thread.
        options: limits of requests.
        metrics: counts requests and their times.
    """

    def __init__(self, llm: LLM, loop: EngineLoop, options: ServerOptions, metrics: Metrics) -> None:
        self.llm, self.loop, self.options, self.metrics = llm, loop, options, metrics
        self._tokenizing = ThreadPoolExecutor(1, "trunkattn-tokenizer")  # a long prompt must not stall the answers
        vocabulary = {} if llm.tokenizer is None else llm.tokenizer.get_vocab()
        self.special_ids = special_ids(llm.tokenizer)
        most = options.max_prompt_tokens or llm.engine.limits.max_model_len
        self._most_characters = most * max(map(len, vocabulary), default=1)

    def special_ids_of(self, marks: Sequence[str]) -> tuple[int, ...]:
        """The special tokens among marks; the others are text anyway."""
        found = (self._tokenizer().convert_tokens_to_ids(mark) for mark in marks)
        return tuple(token_id for token_id in found if token_id in self.special_ids)

    def check_model(self, model: str | None) -> None:
        """Raises BadRequest unless a request asks for the served model, or for none."""
        name = self.options.served_model_name
        if model is not None and model != name:
            raise BadRequest(f"model={shown(model)}: expected {name!r}", "model", 404, "model_not_found")

    async def tokens(self, text: str, name: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text."""
        tokenizer = self._tokenizer()
        self._check_length(name, len(text))
        check_text(name, text)
        encoded = await self._on_thread(lambda: tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])
        return list(encoded)

    async def chat_tokens(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] | None = None, **options: Any
    ) -> list[int]:
        """Token ids of a conversation, by the model's chat template. options: see `LLM.chat`."""
        conversation = [_message(message) for message in messages]
        self._check_length("messages", sum(len(str(message.get("content", ""))) for message in conversation))
        return list(await self._on_thread(lambda: self.llm.render_chat(conversation, tools=tools, **options)))

    def text(self, token_ids: list[int]) -> str:
        """The text of token ids."""
        self._check_token_ids("tokens", token_ids)
        return str(self._tokenizer().decode(token_ids))

    def params(self, body: Sampling, **changes: Any) -> SamplingParams:
        """The sampling parameters of a request: the model's defaults, the body's fields, then `changes`."""
        given = {field.name: getattr(body, field.name, None) for field in fields(SamplingParams)}
        values = {name: value for name, value in given.items() if value is not None and name not in _OWN_FIELDS}
        if body.stop is not None:
            values["stop"] = tuple([body.stop] if isinstance(body.stop, str) else body.stop)
        if body.logit_bias is not None:
            values["logit_bias"] = _logit_bias(body.logit_bias)
        if body.structured_outputs is not None:
            form = body.structured_outputs
            values["structured_outputs"] = StructuredOutputsParams(form.json_, form.regex, form.choice, form.grammar)
        params = replace(self.llm.get_default_sampling_params(), **values | changes)
        most = self.options.max_answer_tokens
        if most is not None:
            if params.max_tokens is not None and params.max_tokens > most:
                raise BadRequest(f"max_tokens={params.max_tokens}: expected at most {most}", "max_tokens")
            params = replace(params, max_tokens=params.max_tokens or most)
        return params

    def check_count(self, num_prompts: int, n: int) -> None:
        """Raises BadRequest if a request wants too many answers."""
        if num_prompts * n > self.options.max_answers:
            what = f"n={n} for {num_prompts} prompts" if num_prompts > 1 else f"n={n}"
            raise BadRequest(f"{what}: expected at most {self.options.max_answers} answers in all", "n")

    async def submission(self, name: str, token_ids: list[int], params: SamplingParams, salt: bytes) -> Submission:
        """A checked request for the engine. name: what messages call the prompt.

        The checks run on the tokenizer's thread, because to compile the form of an answer takes time.
        """
        most = self.options.max_prompt_tokens
        if most is not None and len(token_ids) > most and params.truncate_prompt_tokens is None:
            raise BadRequest(f"{name} has {len(token_ids)} tokens: expected at most {most}", name)
        await self._on_thread(lambda: self.loop.engine.check_request(token_ids, params, name))
        return Submission(token_ids, params, cache_salt=salt)

    async def finished(self, submissions: Sequence[Submission]) -> list[RequestOutput]:
        """The finished answers, one output for each submission."""
        outputs: dict[int, RequestOutput] = {}
        async for grown in self.grow(submissions):
            outputs[grown.prompt] = grown.output
        return [outputs[prompt] for prompt in range(len(submissions))]

    async def grow(self, submissions: Sequence[Submission]) -> AsyncGenerator[Grown, None]:
        """Every output of every submission. To close the generator ends what has not finished."""
        arrived: asyncio.Queue[Grown | BaseException | None] = asyncio.Queue(1)  # readers set the pace

        async def forward(prompt: int, outputs: AsyncIterator[RequestOutput]) -> None:
            try:
                async for output in outputs:
                    self.metrics.grown(output)
                    await arrived.put(Grown(prompt, output))
                await arrived.put(None)
            except Exception as error:
                await arrived.put(error)
            finally:
                await outputs.aclose()  # type: ignore[attr-defined]

        tasks = [
            asyncio.ensure_future(forward(prompt, self.loop.stream(submission)))
            for prompt, submission in enumerate(submissions)
        ]
        try:
            ended = 0
            while ended < len(tasks):
                item = await arrived.get()
                if item is None:
                    ended += 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    _check_sound(item.output)
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Ends the tokenizer's thread."""
        self._tokenizing.shutdown(wait=False)

    def _tokenizer(self) -> Any:
        if self.llm.tokenizer is None:
            raise BadRequest("prompt: expected token ids, because the model has no tokenizer", "prompt")
        return self.llm.tokenizer

    def _check_length(self, name: str, characters: int) -> None:
        """Refuses a text that has too many tokens whatever they are, before the tokenizer spends seconds on it."""
        if characters > self._most_characters:
            raise BadRequest(f"{name} has {characters} characters: expected at most {self._most_characters}", name)

    def _check_token_ids(self, name: str, token_ids: Sequence[int]) -> None:
        most = self.llm.info.vocab_size - 1
        for token_id in token_ids:
            if not 0 <= token_id <= most:
                raise BadRequest(f"{name}: token id {token_id}: expected 0 to {most}", name)

    async def _on_thread(self, function: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._tokenizing, function)


def salt_of(api_key: str | None, cache_salt: str | None) -> bytes:
    """The salt of a tenant's cached prefixes: none without a key and a salt of the request's own."""
    if not api_key and not cache_salt:
        return b""
    return hashlib.sha256(f"{api_key or ''}\0{cache_salt or ''}".encode("utf-8", "surrogatepass")).digest()


def _check_sound(output: RequestOutput) -> None:
    for answer in output.outputs:
        if answer.finish_reason == "error":
            raise EngineFailed(f"an answer ended with an error: {answer.error}")


def _message(message: Message) -> dict[str, Any]:
    """A message as chat templates read it: the arguments of a call are a mapping, not JSON text."""
    values = message.model_dump(exclude_none=True)
    for call in values.get("tool_calls", ()):
        with contextlib.suppress(ValueError):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return values


def _logit_bias(bias: dict[str, Any]) -> dict[int, float]:
    if not all(token_id.isdecimal() for token_id in bias):
        raise BadRequest(f"logit_bias={shown(bias)}: expected token ids as keys", "logit_bias")
    return {int(token_id): float(value) for token_id, value in bias.items()}
