"""What every endpoint needs: the model behind the server, checks, tokens of prompts, and answers as they grow."""

import asyncio
import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields, replace
from typing import Any, Final, TypeVar

from trunkattn.engine.engine import CheckedRequest
from trunkattn.engine.llm import LLM
from trunkattn.engine.outputs import RequestOutput
from trunkattn.engine.prompts import ChatOptions, own_variables, render_template, unread_variables
from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.engine.token_bytes import TokenBytes, special_ids
from trunkattn.server.admission import Admission
from trunkattn.server.body import LONGEST_NAME, Reading, closest
from trunkattn.server.conversation import as_read, check_arguments
from trunkattn.server.engine_loop import EngineLoop, Submission
from trunkattn.server.errors import TOO_LONG, AnswerFailed, BadRequest, bad_request, param_of
from trunkattn.server.form_trial import FormTrial
from trunkattn.server.forms import form_of
from trunkattn.server.intake import AnyBody, read_body
from trunkattn.server.lanes import Lanes, Rest, no_rest
from trunkattn.server.limits import LIMITS
from trunkattn.server.metrics import Metrics, RequestTimes
from trunkattn.server.options import ServerOptions
from trunkattn.server.protocol import Message, Sampling, Tool
from trunkattn.server.report import request_line
from trunkattn.server.streaming import Progress
from trunkattn.server.template_clock import template_clock
from trunkattn.validate import check_text, shown, written

Result = TypeVar("Result")

_LOG: Final = logging.getLogger(__name__)
_SLICE: Final = 100_000  # characters of a text that are counted at a time
_SEAM: Final = 64  # tokens that a cut may add
_AT_ONCE: Final = 512  # places of an answer that are rendered in about a millisecond
_PLACE_BYTES: Final = 64  # of JSON
_OWN_FIELDS: Final = frozenset({"logprobs", "stop", "structured_outputs"})  # made by hand below


@dataclass(frozen=True)
class Grown:
    """An answer of one of a request's prompts has grown. prompt: the prompt's number."""

    prompt: int
    output: RequestOutput


def num_places(output: RequestOutput, told: Collection[Progress] = (), with_prompt: bool = False) -> int:
    """What is to be told of an output: tokens, with those that log-probabilities name. told: what has been, of each of
    its answers; the prompt is told first. with_prompt: its token ids are."""
    tokens = sum(len(answer.token_ids) for answer in output.outputs) - sum(one.tokens for one in told)
    named = next((len(entry) for answer in output.outputs for entry in (answer.logprobs or ())[:1]), 0)
    prompt = () if told else output.prompt_logprobs or ()
    places = len(prompt) * (1 + max((len(entry or ()) for entry in prompt[-1:]), default=0)) + tokens * (1 + named)
    return places + (len(output.prompt_token_ids) if with_prompt and not told else 0)


@dataclass(frozen=True)
class Caller:
    """The client that sent a request, and the size of what it sent.

    Attributes:
        salt: of the cached prefixes.
        tenant: whose requests they are; None: there is one tenant.
        arrival_time: of the request, on the monotonic clock.
        num_bytes: of its body.
    """

    salt: bytes = b""
    tenant: str | None = None
    arrival_time: float | None = None
    num_bytes: int = 0


class Service:
    """The model behind the server.

    Args:
        llm: the model, its tokenizer and its engine. Only `loop` drives the engine.
        loop: the engine's thread.
        options: limits of requests.
        metrics: counts requests and their times.
    """

    def __init__(self, llm: LLM, loop: EngineLoop, options: ServerOptions, metrics: Metrics) -> None:
        self.llm, self.loop, self.options, self.metrics = llm, loop, options, metrics
        self.admission = Admission(loop)
        self.lanes = Lanes("texts")
        self._compiling = Lanes("forms")
        self._trial = FormTrial(llm.engine.structured_outputs, self._compiling, LIMITS)
        vocabulary = {} if llm.tokenizer is None else llm.tokenizer.get_vocab()
        self.special_ids = special_ids(llm.tokenizer)
        self.token_bytes = TokenBytes(llm.tokenizer)
        self.model_created = int(llm.info.files.path.stat().st_mtime)
        self._most_tokens = options.max_prompt_tokens or llm.engine.limits.max_model_len
        self._most_characters = self._most_tokens * max(map(len, vocabulary), default=1)

    async def read(self, raw: bytes, model: type[AnyBody]) -> AnyBody:
        """The fields of a body. Unknown ones that are ignored go into the log."""
        reading = Reading(self.options.strict_requests)
        body = await self.lanes.run(len(raw), lambda _: read_body(raw, model, reading))
        if reading.ignored:
            _LOG.info("Ignored fields that do not exist: %s", ", ".join(sorted(map(repr, reading.ignored))))
        return body

    def special_ids_of(self, marks: Sequence[str]) -> tuple[int, ...]:
        """The special tokens among marks; the others are text anyway."""
        found = (self._tokenizer().convert_tokens_to_ids(mark) for mark in marks)
        return tuple(token_id for token_id in found if token_id in self.special_ids)

    def check_model(self, model: str | None) -> None:
        """Raises BadRequest unless a request asks for the served model, or for none."""
        name = self.options.served_model_name
        if model is not None and model != name:
            raise BadRequest(f"model={shown(model)}: expected {name!r}", "model", 404, "model_not_found")

    async def tokens(self, text: str, name: str, add_special_tokens: bool = True, truncates: bool = False) -> list[int]:
        """Token ids of a text. truncates: it may have more than a prompt, because only its end is kept."""
        self._check_length(name, len(text))
        return await self.lanes.run(len(text), lambda _: self._encode(text, name, add_special_tokens, truncates))

    async def chat_tokens(
        self,
        messages: Sequence[Message],
        num_bytes: int,
        tools: Sequence[Tool] = (),
        truncates: bool = False,
        tools_may_be_hidden: bool = False,
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation, by the model's chat template.

        Args:
            messages: the conversation.
            num_bytes: of the body.
            tools: functions that the model may call.
            truncates: see `tokens`.
            tools_may_be_hidden: see `render_template`.
            options: fields of `ChatOptions`.
        """

        def render(rest: Rest) -> str:
            check_arguments(messages, rest)
            with bad_request():
                conversation = [as_read(message, place, rest) for place, message in enumerate(messages)]
                described = [tool.model_dump(exclude_none=True) for tool in tools]
                chat = ChatOptions(tools=described or None, **options)
                chat = self._readable(chat)
                with template_clock(LIMITS.template_seconds, rest):
                    return render_template(
                        self.llm.tokenizer, conversation, chat, tools_may_be_hidden=tools_may_be_hidden
                    )

        return await self.tokens(await self.lanes.run(num_bytes, render), "messages", False, truncates)

    def _readable(self, chat: ChatOptions) -> ChatOptions:
        """The options without variables of other templates, which a request may have, unless requests are strict. Those
        go into the log."""
        tokenizer = self.llm.tokenizer
        unread = [] if tokenizer is None else unread_variables(tokenizer, chat)
        if self.options.strict_requests or not unread:
            return chat
        if len(unread) > LIMITS.unknown:  # each is compared with all that the template reads
            message = f"chat_template_kwargs names {len(unread)} variables that the model's chat template never reads"
            raise BadRequest(f"{message}: expected at most {LIMITS.unknown}", "chat_template_kwargs")
        known = own_variables(tokenizer, chat)
        foreign = {name for name in unread if closest(name, known) is None}
        if foreign:
            names = ", ".join(sorted(repr(name[:LONGEST_NAME]) for name in foreign))
            _LOG.info("Ignored variables that the chat template does not read: %s", names)
        kept = {name: value for name, value in (chat.chat_template_kwargs or {}).items() if name not in foreign}
        return replace(chat, chat_template_kwargs=kept)

    async def text(self, token_ids: list[int]) -> str:
        """The text of token ids."""
        most, longest = self.llm.info.vocab_size - 1, self.llm.engine.limits.max_model_len
        if len(token_ids) > longest:
            raise BadRequest(f"tokens has {len(token_ids)} items: expected at most {longest}", "tokens")
        tokenizer = self._tokenizer()

        def decode(_: Rest) -> str:
            for token_id in token_ids:
                if not 0 <= token_id <= most:
                    raise BadRequest(f"tokens: token id {token_id}: expected 0 to {most}", "tokens")
            return str(tokenizer.decode(token_ids))

        return await self.lanes.run(len(token_ids), decode)

    @property
    def default_max_tokens(self) -> int | None:
        """Most tokens of a chat's answer that its request does not limit: what the model's generation_config.json says;
        None: the model's limit."""
        found = (getattr(self.llm.model.generation_config, "max_new_tokens", None), self.options.max_answer_tokens)
        return min((most for most in found if most is not None), default=None)

    def params(self, body: Sampling, **changes: Any) -> SamplingParams:
        """The sampling parameters of a request: the model's defaults, the body's fields, then `changes`."""
        given = {field.name: getattr(body, field.name, None) for field in fields(SamplingParams)}
        values = {name: value for name, value in given.items() if value is not None and name not in _OWN_FIELDS}
        if body.stop is not None:
            values["stop"] = tuple([body.stop] if isinstance(body.stop, str) else body.stop)
        values["structured_outputs"] = form_of(body)
        if body.stream_options is not None and not body.stream:
            raise BadRequest("stream_options is given without stream: expected stream=true", "stream_options")
        most, defaults = self.options.max_answer_tokens, self.llm.get_default_sampling_params()
        if most is not None and defaults.max_tokens is not None:  # the model's own default may be longer
            defaults = replace(defaults, max_tokens=min(defaults.max_tokens, most))
        with bad_request():
            params = replace(defaults, **values | changes)
        if most is not None:
            if params.max_tokens is not None and params.max_tokens > most:
                name = "max_tokens" if getattr(body, "max_completion_tokens", None) is None else "max_completion_tokens"
                raise BadRequest(f"{name}={params.max_tokens}: expected at most {most}", name)
            params = replace(params, max_tokens=params.max_tokens or most)
        return params

    def check_count(self, num_prompts: int, body: Sampling) -> None:
        """Raises BadRequest if a request wants no answer, too many, or more prompts than may ever wait together."""
        n = body.n
        if n < 1:
            message = f"n={written(n)}: expected an integer from 1 to {self.options.max_answers}"
            raise BadRequest(message, "n")
        if num_prompts * n > self.options.max_answers:
            what = f"n={n} for {num_prompts} prompts" if num_prompts > 1 else f"n={n}"
            raise BadRequest(f"{what}: expected at most {self.options.max_answers} answers in all", "n")
        if body.best_of not in (None, n):
            raise BadRequest(f"best_of={body.best_of}: expected n, because every answer is returned", "best_of")
        if num_prompts > (most := self.options.max_waiting):
            words = f"prompt has {num_prompts} items: expected at most {most}, because no more may wait at a time"
            raise BadRequest(words, "prompt")

    async def submission(
        self, name: str, token_ids: list[int], params: SamplingParams, caller: Caller, has_answer: bool = True
    ) -> Submission:
        """A checked request for the engine. name: what messages call the prompt. has_answer: see `CheckedRequest`."""
        most = self.options.max_prompt_tokens
        if most is not None and len(token_ids) > most and params.truncate_prompt_tokens is None:
            raise self._too_long(name, f"{len(token_ids)} tokens", most)
        num_logprobs = self.admission.count_logprobs(len(token_ids), params)
        lanes, form_seconds = self.lanes, 0.0
        if params.structured_outputs is not None:
            with bad_request():
                form_seconds = params.n * await self._trial.check(params.structured_outputs, caller.num_bytes)
            lanes = self._compiling

        def check(_: Rest) -> CheckedRequest:
            with bad_request():
                return replace(self.loop.engine.check_request(token_ids, params, name), has_answer=has_answer)

        checked = await lanes.run(len(token_ids), check)
        return Submission(
            checked=checked,
            cache_salt=caller.salt,
            tenant=caller.tenant,
            arrival_time=caller.arrival_time,
            num_logprobs=num_logprobs,
            form_seconds=form_seconds,
        )

    async def render(self, num_places: int, work: Callable[[Rest], Result]) -> Result:
        """The result of some work on an answer, done at once if it is little. num_places: see the function."""
        return work(no_rest) if num_places <= _AT_ONCE else await self.lanes.run(num_places * _PLACE_BYTES, work)

    async def finished(self, submissions: Sequence[Submission], name: str) -> list[RequestOutput]:
        """The finished answers, one output for each submission. name: the request's id."""
        outputs: dict[int, RequestOutput] = {}
        async for grown in self.grow(submissions, name):
            outputs[grown.prompt] = grown.output
        return [outputs[prompt] for prompt in range(len(submissions))]

    async def grow(self, submissions: Sequence[Submission], name: str) -> AsyncGenerator[Grown, None]:
        """Every output of every submission. To close the generator ends what has not finished. Then the log gets a line
        about the request. name: its id."""
        with self.admission.room(submissions):
            async with aclosing(self._grow(submissions, name)) as outputs:
                async for grown in outputs:
                    yield grown

    async def _grow(self, submissions: Sequence[Submission], name: str) -> AsyncGenerator[Grown, None]:
        arrived: asyncio.Queue[Grown | BaseException | None] = asyncio.Queue(1)  # readers set the pace

        async def forward(prompt: int, outputs: AsyncGenerator[RequestOutput, None]) -> None:
            times = RequestTimes(self.metrics)
            try:
                async for output in outputs:
                    times.grown(output)
                    await arrived.put(Grown(prompt, output))
                await arrived.put(None)
            except Exception as error:
                await arrived.put(error)
            finally:
                await outputs.aclose()

        tasks = [
            asyncio.ensure_future(forward(prompt, self.loop.stream(submission)))
            for prompt, submission in enumerate(submissions)
        ]
        ended, newest = 0, dict[int, RequestOutput]()
        try:
            while ended < len(tasks):
                item = await arrived.get()
                if item is None:
                    ended += 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    newest[item.prompt] = item.output
                    _check_sound(item.output)
                    yield item
        finally:
            _LOG.info(request_line(name, submissions, list(newest.values()), ended == len(tasks)))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        """Ends the threads and processes."""
        self.lanes.close()
        self._compiling.close()
        self._trial.close()

    def _tokenizer(self) -> Any:
        if self.llm.tokenizer is None:
            raise BadRequest("prompt: expected token ids, because the model has no tokenizer", "prompt")
        return self.llm.tokenizer

    def _encode(self, text: str, name: str, add_special_tokens: bool, truncates: bool) -> list[int]:
        """Token ids of a text. One that has too many is not read to its end. On a lane."""
        tokenizer = self._tokenizer()
        with bad_request():
            check_text(name, text)
        count = 0
        for start in range(0, 0 if truncates else len(text) - _SLICE, _SLICE):
            count += len(tokenizer(text[start : start + _SLICE], add_special_tokens=False)["input_ids"]) - _SEAM
            if count > self._most_tokens:
                raise self._too_long(name, f"over {count} tokens", self._most_tokens)
        return list(tokenizer(text, add_special_tokens=add_special_tokens)["input_ids"])

    def _check_length(self, name: str, characters: int) -> None:
        """Refuses a text that has too many tokens whatever they are, before the tokenizer spends seconds on it."""
        if characters > self._most_characters:
            raise self._too_long(name, f"{characters} characters", self._most_characters)

    def _too_long(self, name: str, size: str, most: int) -> BadRequest:
        """The error of a prompt, in words that clients look for."""
        words = f"because this model's maximum context length is {self._most_tokens} tokens here; shorten it"
        return BadRequest(f"{name} has {size}: expected at most {most}, {words}", name, code=TOO_LONG)


def salt_of(api_key: str | None, cache_salt: str | None) -> bytes:
    """The salt of a tenant's cached prefixes: none without a key and a salt of the request's own."""
    if not api_key and not cache_salt:
        return b""
    return hashlib.sha256(f"{api_key or ''}\0{cache_salt or ''}".encode("utf-8", "surrogatepass")).digest()


def _check_sound(output: RequestOutput) -> None:
    """Raises what ended an answer: BadRequest where the same request would fail again."""
    for answer in output.outputs:
        if answer.finish_reason == "error":
            message = str(answer.error)
            raise BadRequest(message, param_of(message)) if answer.is_bad else AnswerFailed(message)
