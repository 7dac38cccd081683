"""/v1/chat/completions: a conversation in, the next message out, as text or as tool calls."""

from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from trunkattn.engine.outputs import CompletionOutput, Logprob, RequestOutput
from trunkattn.engine.sampling_params import StructuredOutputsParams
from trunkattn.server.bodies.protocol import ChatCompletionRequest, NamedToolChoice, Tool
from trunkattn.server.endpoints.call_schemas import about_tools, calls_schema
from trunkattn.server.endpoints.endpoint import Endpoint
from trunkattn.server.endpoints.streaming import (
    DONE,
    LEAST_LOGPROB,
    Progress,
    Written,
    num_places,
    write_event,
    write_json,
)
from trunkattn.server.endpoints.usage import usage_of, usage_so_far
from trunkattn.server.engine_loop import Submission
from trunkattn.server.errors import BadRequest, about_field
from trunkattn.server.forms.requested import field_of_form
from trunkattn.server.lanes import Pause
from trunkattn.server.limits import LIMITS
from trunkattn.server.prompts.conversation import Conversation
from trunkattn.server.service import Caller, Service
from trunkattn.server.tool_calls import TOOL_CALL_PARSERS, ParsedAnswer, new_call_id, parse_forced
from trunkattn.validate import shown


class Chat(Endpoint[ChatCompletionRequest]):
    """One request to /v1/chat/completions."""

    body_model = ChatCompletionRequest
    id_prefix = "chatcmpl"

    def __init__(self, service: Service, body: ChatCompletionRequest, caller: Caller) -> None:
        super().__init__(service, body, caller)
        self._parser = TOOL_CALL_PARSERS[service.options.tool_call_parser]
        self._calls_are_forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedToolChoice)
        self._num_top = body.top_logprobs or 0
        self._may_call = bool(body.tools) and body.tool_choice != "none"

    async def submissions(self) -> list[Submission]:
        """The checked request of its conversation: a list of one."""
        service, body = self._service, self._body
        service.check_model(body.model)
        service.sampling.check_count(1, body)
        forced = await service.lanes.run(self._caller.num_bytes, self._forced_calls)
        params = service.sampling.params(body, **self._changes(forced))
        token_ids = await service.tokenization.chat_tokens(
            Conversation.of(body, has_tools=self._may_call),
            self._caller.num_bytes,
            truncates=params.truncate_prompt_tokens is not None,
            tools_may_be_hidden=self._calls_are_forced or body.structured_outputs is not None,  # it may describe calls
        )
        with about_field(self._form, reword=self._places_in_tools):
            meaning = await service.meaning(params, self._caller)
        return [await service.submission("messages", token_ids, meaning, self._caller)]

    async def whole(self, submissions: Sequence[Submission]) -> str:
        """The response as JSON, once every answer is finished."""
        with about_field(self._form):
            outputs = await self._service.finished_outputs(submissions, self.id)
        places = num_places(outputs[0], with_prompt=self._body.return_token_ids)
        return await self._service.render(places, lambda pause: self._response(outputs, pause))

    def _response(self, outputs: Sequence[RequestOutput], pause: Pause) -> str:
        choices = []
        for answer in outputs[0].outputs:
            parsed = self._parse(answer.text)
            message: dict[str, Any] = {"role": "assistant", "content": parsed.content, "refusal": None}
            if parsed.calls:
                message |= {"content": parsed.content or None, "tool_calls": self._calls_with_ids(parsed)}
            logprobs: dict[str, Any] | None = None
            if answer.logprobs is not None:
                logprobs = {"content": _logprobs(answer, 0, self._num_top, pause) or [], "refusal": None}
            choice = {"index": answer.index, "message": message, "logprobs": logprobs}
            choices.append(choice | self._ids(answer.token_ids) | _ending(answer, bool(parsed.calls)))
        whole = self._envelope("chat.completion", choices) | self._prompt_ids(outputs[0])
        return write_json(whole | {"usage": usage_of(outputs).as_json()}, pause)

    async def stream(self, submissions: Sequence[Submission]) -> AsyncGenerator[str, None]:
        """The response as server-sent events."""
        progress, newest = dict[int, Progress](), list[RequestOutput]()
        with about_field(self._form):
            async for grown in self._service.growing_outputs(submissions, self.id):
                newest = [grown.output]
                work = partial(self._events, grown.output, progress)
                places = num_places(grown.output, progress.values(), self._body.return_token_ids)
                if events := await self._service.render(places, work):
                    yield "".join(events)  # one write: a connection that has broken is seen between two
        if self._options.include_usage:
            yield write_event(self._envelope("chat.completion.chunk", []) | {"usage": usage_of(newest).as_json()})
        yield DONE

    @property
    def _form(self) -> str:
        """The field of the request that determines the form of the answer."""
        if self._calls_are_forced:
            return "tools"
        return field_of_form(self._body)

    def _events(self, output: RequestOutput, progress: dict[int, Progress], pause: Pause) -> list[str]:
        """Events with the new parts of an output."""
        events = []
        for answer in output.outputs:
            if answer.index not in progress:
                progress[answer.index] = Progress()
                first = self._chunk(answer, {"role": "assistant", "content": ""}) | self._prompt_ids(output)
                events.append(write_event(first | usage_so_far([output], self._options), pause))
            if progress[answer.index].ended:  # all of it was sent; parsing it again in every step would take time
                continue
            for chunk in self._chunks(answer, progress[answer.index], pause):
                events.append(write_event(chunk | usage_so_far([output], self._options), pause))
        return events

    def _chunks(self, answer: CompletionOutput, sent: Progress, pause: Pause) -> list[dict[str, Any]]:
        """Chunks with the new parts of an answer. A tool call is sent when it is complete."""
        ended = answer.finish_reason is not None
        parsed = self._parse(answer.text) if ended else ParsedAnswer(self._visible(answer.text))
        text, first_token = sent.advance(answer, parsed.content)
        logprobs = _logprobs(answer, first_token, self._num_top, pause)
        chunks = []
        token_ids = answer.token_ids[first_token:]
        if text or logprobs or (token_ids and self._body.return_token_ids):
            chunks.append(self._chunk(answer, {"content": text}, logprobs, token_ids))
        if sent.just_ended:
            if parsed.calls:
                calls = [{"index": number, **call} for number, call in enumerate(self._calls_with_ids(parsed))]
                chunks.append(self._chunk(answer, {"tool_calls": calls}))
            chunks.append(self._chunk(answer, {}, ending=_ending(answer, bool(parsed.calls))))
        return chunks

    def _changes(self, forced: StructuredOutputsParams | None) -> dict[str, Any]:
        """Sampling parameters that are not fields of the body under the same name and in the same shape. forced: the
        form of an answer that must be tool calls; None: it need not."""
        body = self._body
        changes: dict[str, Any] = {"max_tokens": self._max_tokens()}
        if body.top_logprobs and not body.logprobs:
            raise BadRequest("top_logprobs is given without logprobs: expected logprobs=true", "top_logprobs")
        if body.logprobs:
            if self._num_top < 0:
                raise BadRequest(f"top_logprobs={self._num_top}: expected 0 to {LIMITS.logprobs}", "top_logprobs")
            changes["logprobs"] = self._num_top
        if self._may_call and not self._calls_are_forced:
            changes["kept_special_token_ids"] = self._service.tokenization.special_ids_of(self._parser.marks)
        if forced is not None:
            changes["structured_outputs"] = forced
        return changes

    def _max_tokens(self) -> int | None:
        """Most tokens of an answer, by the newer name if the body has both; None: the model's limit."""
        body, most = self._body, self._body.max_completion_tokens
        if most is None:
            return self._service.sampling.default_max_tokens if body.max_tokens is None else body.max_tokens
        if most < 1:
            message = f"max_completion_tokens={most}: expected an integer of at least 1"
            raise BadRequest(message, "max_completion_tokens")
        if (least := body.min_tokens or 0) > most:
            raise BadRequest(f"min_tokens={least}: expected at most max_completion_tokens={most}", "min_tokens")
        return most

    def _forced_calls(self, pause: Pause) -> StructuredOutputsParams | None:
        """The form of an answer that must be a JSON list of tool calls; None unless the request forces calls. pause:
        called within the schemas of the tools."""
        choice, tools = self._body.tool_choice, self._body.tools or []
        if choice in ("auto", "required") and not tools:
            raise BadRequest(f"tool_choice={choice!r}: expected tools together with it", "tool_choice")
        if self._may_call and self._body.function_call == "none":
            raise BadRequest("function_call='none': expected tool_choice='none' where there are tools", "function_call")
        if not self._calls_are_forced:
            return None
        tools = self._callable()
        if isinstance(choice, NamedToolChoice) and not tools:
            message = f"tool_choice.function.name={shown(choice.function.name)}: expected the name of one of the tools"
            raise BadRequest(message, "tool_choice.function.name")
        if self._body.structured_outputs is not None:
            message = "structured_outputs is given with a tool_choice that forces a call: expected one of them"
            raise BadRequest(message, "structured_outputs")
        only_one = isinstance(choice, NamedToolChoice) or self._body.parallel_tool_calls is False
        return StructuredOutputsParams(json=calls_schema(tools, only_one, pause))

    def _callable(self) -> list[Tool]:
        """The tools that a forced call may call."""
        choice, tools = self._body.tool_choice, self._body.tools or []
        name = choice.function.name if isinstance(choice, NamedToolChoice) else None
        return [tool for tool in tools if name is None or tool.function.name == name]

    def _places_in_tools(self, message: str) -> str:
        """Rewrites a message about the form of calls as one about the tools."""
        return about_tools(message, [tool.function.name for tool in self._callable()])

    def _visible(self, text: str) -> str:
        if self._calls_are_forced:
            return ""
        return self._parser.visible(text) if self._may_call else text

    def _parse(self, text: str) -> ParsedAnswer:
        if self._calls_are_forced:
            return parse_forced(text)
        parsed = self._parser.parse(text) if self._may_call else ParsedAnswer(text)
        if self._body.parallel_tool_calls is False:  # the model may write more calls than the client takes
            return replace(parsed, calls=parsed.calls[:1])
        return parsed

    def _calls_with_ids(self, parsed: ParsedAnswer) -> list[dict[str, Any]]:
        """The calls of an answer, each with an id."""
        return [call.as_json(new_call_id(self._service.options.tool_call_parser)) for call in parsed.calls]

    def _chunk(
        self,
        answer: CompletionOutput,
        delta: dict[str, Any],
        logprobs: Written | None = None,
        token_ids: Sequence[int] = (),
        ending: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        content = {"content": logprobs, "refusal": None} if logprobs else None
        choice = {"index": answer.index, "delta": delta, "logprobs": content, "finish_reason": None, **(ending or {})}
        return self._envelope("chat.completion.chunk", [choice | self._ids(token_ids)])


def _ending(answer: CompletionOutput, calls: bool) -> dict[str, Any]:
    reason = "tool_calls" if calls and answer.finish_reason == "stop" else answer.finish_reason
    return {"finish_reason": reason, "stop_reason": answer.stop_reason}


def _logprobs(answer: CompletionOutput, first_token: int, num_top: int, pause: Pause) -> Written | None:
    """A JSON list with the log-probabilities of the tokens from `first_token` on, each with those of the `num_top` most
    likely tokens in its place. None if there are none. pause: called at every token."""
    new = range(first_token, len(answer.token_ids))
    if answer.logprobs is None or not new:
        return None
    places = (_place(answer.token_ids[place], answer.logprobs[place], num_top) for place in new)
    return Written("[" + ",".join(write_json(place, pause, levels=0) for place in places) + "]")


def _place(token_id: int, entry: Mapping[int, Logprob], num_top: int) -> dict[str, Any]:
    """Log-probabilities of a token and of the most likely ones in its place."""
    likely = [_logprob(top) for top in _by_rank(entry.values())[:num_top] if top.rank <= num_top]
    return _logprob(entry[token_id]) | {"top_logprobs": likely}


def _by_rank(logprobs: Iterable[Logprob]) -> list[Logprob]:
    return sorted(logprobs, key=lambda logprob: logprob.rank)


def _logprob(logprob: Logprob) -> dict[str, Any]:
    written = logprob.token_bytes
    text = "" if written is None else written.decode("utf-8", "backslashreplace")
    value = max(logprob.logprob, LEAST_LOGPROB)
    return {"token": text, "logprob": value, "bytes": None if written is None else list(written)}
