"""What every endpoint needs: the model behind the server, checked requests for the engine, and answers as they grow."""

import hashlib
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, TypeVar

from trunkattn.engine.checked_request import CheckedRequest
from trunkattn.engine.llm import LLM
from trunkattn.engine.outputs import RequestOutput
from trunkattn.engine.sampling.logits import LogitsRules
from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.server.admission import Admission
from trunkattn.server.bodies.body import Reading
from trunkattn.server.bodies.intake import AnyBody, read_body
from trunkattn.server.engine_loop import EngineLoop, Submission
from trunkattn.server.errors import AnswerFailed, BadRequest, bad_request, param_of
from trunkattn.server.forms.trial import FormTrial
from trunkattn.server.lanes import Lanes, Pause, Pauses, no_pause
from trunkattn.server.limits import LIMITS
from trunkattn.server.merged_streams import merged
from trunkattn.server.monitoring.log_lines import request_line
from trunkattn.server.monitoring.metrics import Metrics, RequestTimes
from trunkattn.server.options import ServerOptions
from trunkattn.server.prompts.tokenization import Tokenization
from trunkattn.server.sampling import SamplingReader
from trunkattn.validate import shown

Result = TypeVar("Result")

_LOG: Final = logging.getLogger(__name__)
_AT_ONCE: Final = 512  # places of an answer that are rendered in about a millisecond
_PLACE_BYTES: Final = 64  # of a place in JSON, about


class Grown(NamedTuple):
    """An answer of one of a request's prompts has grown. prompt: the prompt's number."""

    prompt: int
    output: RequestOutput


@dataclass(frozen=True)
class Meaning:
    """What the sampling parameters of a request mean, for each of its prompts.

    Attributes:
        params: the parameters.
        rules: what they mean for the model; None: the first prompt's check finds it out.
        form_seconds: the part of a step that the slowest tokens of a prompt's answers may take; 0 without a form.
    """

    params: SamplingParams
    rules: LogitsRules | None = None
    form_seconds: float = 0.0


@dataclass(frozen=True)
class Caller:
    """The client that sent a request, and the size of what it sent.

    Attributes:
        salt: only requests of equal salt share cached prefixes.
        tenant: whose requests they are; None: there is one tenant.
        arrival_time: when the request arrived, on the monotonic clock.
        num_bytes: the size of its body.
        request_id: how the id of its response ends.
    """

    salt: bytes = b""
    tenant: str | None = None
    arrival_time: float | None = None
    num_bytes: int = 0
    request_id: str = ""


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
        pauses = Pauses()
        self.lanes = Lanes("texts", pauses)
        self.tokenization = Tokenization(llm, options, self.lanes)
        self.sampling = SamplingReader(llm, options)
        self._compiling = Lanes("forms", pauses)
        self._trial = FormTrial(llm.engine.token_rules.structured_outputs, self._compiling, LIMITS)
        self.model_created = int(llm.info.files.path.stat().st_mtime)

    async def read(self, raw: bytes, model: type[AnyBody]) -> AnyBody:
        """The fields of a body. Unknown ones that are ignored go into the log."""
        reading = Reading(self.options.strict_requests)
        body = await self.lanes.run(len(raw), lambda _: read_body(raw, model, reading))
        if reading.ignored:
            _LOG.info("Ignored fields that do not exist: %s", ", ".join(sorted(map(repr, reading.ignored))))
        return body

    def check_model(self, model: str | None) -> None:
        """Raises BadRequest unless a request asks for the served model, or for none."""
        name = self.options.served_model_name
        if model is not None and model != name:
            raise BadRequest(f"model={shown(model)}: expected {name!r}", "model", 404, "model_not_found")

    async def meaning(self, params: SamplingParams, caller: Caller) -> Meaning:
        """What a request's parameters mean, with their form compiled. Raises BadRequest if a form cannot be compiled
        within the limits, or if the model cannot follow it."""
        if params.structured_outputs is None:
            return Meaning(params)
        with bad_request():
            form, seconds = await self._trial.check(params.structured_outputs, caller.num_bytes)
            check = self.llm.engine.token_rules.check
            rules = await self._compiling.run(caller.num_bytes, lambda _: check(params, form))
        return Meaning(params, rules, params.n * seconds)

    async def submission(
        self, name: str, token_ids: list[int], meaning: Meaning, caller: Caller, has_answer: bool = True
    ) -> Submission:
        """A checked request for the engine. name: what messages call the prompt. has_answer: see `CheckedRequest`."""
        params = meaning.params
        if params.truncate_prompt_tokens is None:
            self.tokenization.check_length(name, len(token_ids))
        num_logprobs = self.admission.count_logprobs(len(token_ids), params)

        def check(_: Pause) -> CheckedRequest:
            with bad_request():
                checked = self.loop.engine.check_request(token_ids, params, name, meaning.rules)
            return replace(checked, has_answer=has_answer)

        checked = await self.lanes.run(len(token_ids), check)
        return Submission(
            checked=checked,
            cache_salt=caller.salt,
            tenant=caller.tenant,
            arrival_time=caller.arrival_time,
            num_logprobs=num_logprobs,
            form_seconds=meaning.form_seconds,
        )

    async def render(self, num_places: int, work: Callable[[Pause], Result]) -> Result:
        """The result of some work on an answer: at once if it is little, otherwise on a thread. num_places: about how
        many tokens or characters the work goes through."""
        return work(no_pause) if num_places <= _AT_ONCE else await self.lanes.run(num_places * _PLACE_BYTES, work)

    async def finished_outputs(self, submissions: Sequence[Submission], request_id: str) -> list[RequestOutput]:
        """The finished answers, one output for each submission. request_id: for the log."""
        outputs: dict[int, RequestOutput] = {}
        async for grown in self.growing_outputs(submissions, request_id):
            outputs[grown.prompt] = grown.output
        return [outputs[prompt] for prompt in range(len(submissions))]

    async def growing_outputs(self, submissions: Sequence[Submission], request_id: str) -> AsyncGenerator[Grown, None]:
        """Every output of every submission. To close the generator ends what has not finished. Then the log gets a line
        about the request."""
        newest, is_whole = dict[int, RequestOutput](), False
        streams = [self._stream(submission) for submission in submissions]
        with self.admission.room(submissions):
            try:
                async with aclosing(merged(streams)) as outputs:
                    async for prompt, output in outputs:
                        newest[prompt] = output
                        _check_sound(output)
                        yield Grown(prompt, output)
                is_whole = True
            finally:
                _LOG.info(request_line(request_id, submissions, list(newest.values()), is_whole))

    async def _stream(self, submission: Submission) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a submission, whose times are counted."""
        times = RequestTimes(self.metrics, submission.checked.params)
        async with aclosing(self.loop.stream(submission)) as outputs:
            async for output in outputs:
                times.grown(output)
                yield output

    async def close(self) -> None:
        """Ends the threads and processes."""
        self.lanes.close()
        self._compiling.close()
        await self._trial.close()


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
