"""/v1/completions: prompts in, texts out."""

from collections.abc import AsyncGenerator, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, NamedTuple

from trunkattn.engine.answers.token_bytes import TokenBytes
from trunkattn.engine.outputs import CompletionOutput, Logprob, RequestOutput
from trunkattn.server.bodies.protocol import CompletionRequest
from trunkattn.server.endpoints.endpoint import Endpoint
from trunkattn.server.endpoints.streaming import (
    DONE,
    LEAST_LOGPROB,
    Progress,
    TextOffsets,
    num_places,
    write_event,
    write_json,
)
from trunkattn.server.endpoints.usage import usage_of, usage_so_far
from trunkattn.server.engine_loop import Submission
from trunkattn.server.errors import BadRequest, about_field
from trunkattn.server.forms.requested import field_of_form
from trunkattn.server.lanes import Pause
from trunkattn.server.service import Caller, Service

_KIND: Final = "text_completion"  # what the API calls a response, and an event of one


class Piece(NamedTuple):
    """New text of an answer, the number of its first token, where its tokens begin in the text, and whether nothing of
    the answer has been sent."""

    text: str
    first_token: int
    offsets: TextOffsets
    begins: bool = True


class Completion(Endpoint[CompletionRequest]):
    """One request to /v1/completions."""

    body_model = CompletionRequest
    id_prefix = "cmpl"

    def __init__(self, service: Service, body: CompletionRequest, caller: Caller) -> None:
        super().__init__(service, body, caller)
        self._echoed: list[str] = []
        self._has_no_answer = body.echo and body.max_tokens == 0
        self._tells_tokens = body.return_token_ids or body.logprobs is not None
        self._hidden = () if body.skip_special_tokens is False else service.tokenization.special_ids

    async def submissions(self) -> list[Submission]:
        """The checked requests of its prompts."""
        service, body = self._service, self._body
        service.check_model(body.model)
        prompts = _prompts(body.prompt)
        service.sampling.check_count(len(prompts), body)
        params = service.sampling.params(body, **self._changes())
        with about_field(field_of_form(body)):
            meaning = await service.meaning(params, self._caller)
        checked = []
        for position, prompt in enumerate(prompts):
            name = "prompt" if len(prompts) == 1 else f"prompt[{position}]"
            token_ids = await self._tokens(prompt, name, params.truncate_prompt_tokens is not None)
            submission = await service.submission(name, token_ids, meaning, self._caller, not self._has_no_answer)
            meaning = replace(meaning, rules=submission.checked.rules)  # it is the same for all prompts
            checked.append(submission)
            if body.echo:
                self._echoed.append(await self._echo(prompt, token_ids, submission.checked.token_ids))
        return checked

    async def _tokens(self, prompt: str | list[int], name: str, truncates: bool) -> list[int]:
        """The tokens of a prompt. name, truncates: see `Tokenization.tokens`."""
        if not isinstance(prompt, str):
            return prompt
        return await self._service.tokenization.tokens(prompt, name, self._body.add_special_tokens, truncates)

    async def _echo(self, prompt: str | list[int], token_ids: list[int], kept: list[int]) -> str:
        """The text of a prompt in its response: the prompt itself, or the text of the tokens that are kept of it."""
        if isinstance(prompt, str) and kept == token_ids:
            return prompt
        return await self._service.tokenization.text(kept)

    def _changes(self) -> dict[str, Any]:
        """Sampling parameters that are not the body's fields: `echo` with `logprobs` asks for those of the prompt, and
        `max_tokens` may be 0 with it."""
        changes: dict[str, Any] = {}
        if self._body.logprobs is not None:
            changes["logprobs"] = self._body.logprobs
            if self._body.echo:
                changes["prompt_logprobs"] = self._body.logprobs
        if self._has_no_answer:
            changes["max_tokens"] = 1
        return changes

    async def whole(self, submissions: Sequence[Submission]) -> str:
        """The response as JSON, once every answer is finished."""
        with about_field(field_of_form(self._body)):
            outputs = await self._service.finished_outputs(submissions, self.id)

        def response(pause: Pause) -> str:
            choices = [
                self._choice(
                    prompt, output, answer, Piece(text=answer.text, first_token=0, offsets=TextOffsets()), pause
                )
                for prompt, output in enumerate(outputs)
                for answer in output.outputs
            ]
            return write_json(self._envelope(_KIND, choices) | {"usage": usage_of(outputs).as_json()}, pause)

        places = sum(num_places(output, with_prompt=self._body.return_token_ids) for output in outputs)
        return await self._service.render(places, response)

    async def stream(self, submissions: Sequence[Submission]) -> AsyncGenerator[str, None]:
        """The response as server-sent events."""
        newest = dict[int, RequestOutput]()
        progress: dict[int, dict[int, Progress]] = {prompt: {} for prompt in range(len(submissions))}
        with about_field(field_of_form(self._body)):
            async for grown in self._service.growing_outputs(submissions, self.id):
                output = newest[grown.prompt] = grown.output
                sent = progress[grown.prompt]
                usage = usage_so_far(list(newest.values()), self._options)
                work = partial(self._events, grown.prompt, output, sent, usage)
                places = num_places(output, sent.values(), self._body.return_token_ids)
                if events := await self._service.render(places, work):
                    yield "".join(events)  # one write: a connection that has broken is seen between two
        if self._options.include_usage:
            whole = usage_of(list(newest.values()))
            yield write_event(self._envelope(_KIND, []) | {"usage": whole.as_json()})
        yield DONE

    def _events(
        self,
        prompt: int,
        output: RequestOutput,
        progress: dict[int, Progress],
        usage: dict[str, Any],
        pause: Pause,
    ) -> list[str]:
        """Events of what is new of a prompt's output. usage: the field of that name."""
        events = []
        for answer in output.outputs:
            sent = progress.setdefault(answer.index, Progress())
            text, first_token = sent.advance(answer)
            piece = Piece(text=text, first_token=first_token, offsets=sent.offsets, begins=not sent.begun)
            has_tokens = self._tells_tokens and len(answer.token_ids) > piece.first_token
            if piece.text or has_tokens or sent.just_ended:
                sent.begun = True
                event = self._envelope(_KIND, [self._choice(prompt, output, answer, piece, pause)])
                events.append(write_event(event | usage, pause))
        return events

    def _choice(
        self, prompt: int, output: RequestOutput, answer: CompletionOutput, piece: Piece, pause: Pause
    ) -> dict[str, Any]:
        """A piece of an answer. The first piece has the prompt, if it is echoed."""
        echo = self._echoed[prompt] if self._echoed and piece.begins else ""
        logprobs = None
        if answer.logprobs is not None:
            places = LogprobLists(self._service.tokenization.token_bytes, self._hidden, piece.offsets, pause)
            if self._echoed and piece.begins:
                places.add(output.prompt_token_ids, output.prompt_logprobs or [], echo)
            new = range(piece.first_token, len(answer.token_ids))
            places.add(answer.token_ids[piece.first_token :], (answer.logprobs[place] for place in new))
            logprobs = places.as_json()
        choice = {
            "index": prompt * self._body.n + answer.index,
            "text": echo + piece.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish_reason,
            "stop_reason": answer.stop_reason,
        }
        choice |= self._ids(answer.token_ids[piece.first_token :])
        return choice | (self._prompt_ids(output) if piece.begins else {})


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a request: texts, or lists of token ids."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequest("prompt=[]: expected at least one prompt", "prompt")
    return [prompt] if isinstance(prompt[0], int) else list(prompt)


class LogprobLists:
    """Log-probabilities of consecutive tokens as four lists, as the API shapes them.

    Args:
        token_bytes: what each token writes.
        hidden: tokens that write nothing into the text.
        offsets: characters of the text before each token.
        pause: called at every token.
    """

    def __init__(self, token_bytes: TokenBytes, hidden: Collection[int], offsets: TextOffsets, pause: Pause) -> None:
        self._token_bytes, self._hidden, self._offsets, self._pause = token_bytes, hidden, offsets, pause
        self._tokens: list[str] = []
        self._own: list[float | None] = []
        self._top: list[dict[str, float] | None] = []
        self._at: list[int] = []

    def add(
        self, token_ids: Sequence[int], logprobs: Iterable[Mapping[int, Logprob] | None], echo: str | None = None
    ) -> None:
        """Adds tokens. None in the place of one's log-probabilities: it follows nothing, and has none. echo: the
        prompt's text, if they are its tokens."""
        for token_id, entry in zip(token_ids, logprobs, strict=True):
            self._pause()
            written = self._token_bytes.of(token_id)
            self._tokens.append(_shown(written, token_id))
            if echo is None:
                self._at.append(self._offsets.before(b"" if token_id in self._hidden else written or b""))
            else:
                self._at.append(self._offsets.echoed(echo, written or b""))
            if entry is None:
                self._own.append(None)
                self._top.append(None)
                continue
            self._own.append(max(entry[token_id].logprob, LEAST_LOGPROB))
            likely: dict[str, float] = {}
            for other, logprob in entry.items():  # the token itself comes first, and nothing replaces it
                likely.setdefault(_shown(logprob.token_bytes, other), max(logprob.logprob, LEAST_LOGPROB))
            self._top.append(likely)
        if echo is not None:
            self._offsets.begin_answer(echo)

    def as_json(self) -> dict[str, Any]:
        """The four lists."""
        return {
            "tokens": self._tokens,
            "token_logprobs": self._own,
            "top_logprobs": self._top,
            "text_offset": self._at,
        }


def _shown(written: bytes | None, token_id: int) -> str:
    """A token as text. Part of a character is written as its bytes, as OpenAI does."""
    if written is None:
        return f"token_id:{token_id}"
    try:
        return written.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in written)
