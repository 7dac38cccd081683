"""Sampling parameters of requests: the model's defaults, what a body says, and the operator's limits."""

from dataclasses import fields, replace
from typing import Any, Final

from trunkattn.engine.llm import LLM
from trunkattn.engine.sampling_params import SamplingParams
from trunkattn.server.bodies.protocol import Sampling
from trunkattn.server.errors import BadRequest, bad_request
from trunkattn.server.forms.requested import form_of
from trunkattn.server.options import ServerOptions
from trunkattn.validate import written

_OTHER_SHAPES: Final = frozenset({"logprobs", "stop", "structured_outputs"})  # fields that bodies have in another shape


class SamplingReader:
    """Reads how a request wants its answers to be sampled.

    Args:
        llm: the model, which has defaults of its own.
        options: the operator's limits.
    """

    def __init__(self, llm: LLM, options: ServerOptions) -> None:
        self._llm, self._options = llm, options

    @property
    def default_max_tokens(self) -> int | None:
        """Most tokens of a chat's answer that its request does not limit, by the model's generation_config.json and
        the operator; None: the model's limit."""
        of_model = getattr(self._llm.model.generation_config, "max_new_tokens", None)
        found = (of_model, self._options.max_answer_tokens)
        return min((most for most in found if most is not None), default=None)

    def params(self, body: Sampling, **changes: Any) -> SamplingParams:
        """The sampling parameters of a request: the model's defaults, the body's fields, then `changes`. Raises
        BadRequest if they are wrong, or ask for a longer answer than the operator allows."""
        given = {field.name: getattr(body, field.name, None) for field in fields(SamplingParams)}
        values = {name: value for name, value in given.items() if value is not None and name not in _OTHER_SHAPES}
        if body.stop is not None:
            values["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
        values["structured_outputs"] = form_of(body)
        if body.stream_options is not None and not body.stream:
            raise BadRequest("stream_options is given without stream: expected stream=true", "stream_options")
        with bad_request():
            params = replace(self._defaults(), **values | changes)
        return self._limited(params, body)

    def check_count(self, num_prompts: int, body: Sampling) -> None:
        """Raises BadRequest if a request wants no answer, too many, or more prompts than may ever wait together."""
        n = body.n
        if n < 1:
            message = f"n={written(n)}: expected an integer from 1 to {self._options.max_answers}"
            raise BadRequest(message, "n")
        if num_prompts * n > self._options.max_answers:
            what = f"n={n} for {num_prompts} prompts" if num_prompts > 1 else f"n={n}"
            raise BadRequest(f"{what}: expected at most {self._options.max_answers} answers in all", "n")
        if body.best_of not in (None, n):
            raise BadRequest(f"best_of={body.best_of}: expected n, because every answer is returned", "best_of")
        if num_prompts > (most := self._options.max_waiting):
            words = f"prompt has {num_prompts} items: expected at most {most}, because no more may wait at a time"
            raise BadRequest(words, "prompt")

    def _defaults(self) -> SamplingParams:
        """The model's defaults, which may be longer than the operator allows."""
        most, defaults = self._options.max_answer_tokens, self._llm.get_default_sampling_params()
        if most is None or defaults.max_tokens is None:
            return defaults
        return replace(defaults, max_tokens=min(defaults.max_tokens, most))

    def _limited(self, params: SamplingParams, body: Sampling) -> SamplingParams:
        """The parameters with the operator's limit of an answer, if the request has none of its own."""
        most = self._options.max_answer_tokens
        if most is None:
            return params
        if params.max_tokens is not None and params.max_tokens > most:
            name = "max_tokens" if getattr(body, "max_completion_tokens", None) is None else "max_completion_tokens"
            raise BadRequest(f"{name}={params.max_tokens}: expected at most {most}", name)
        return replace(params, max_tokens=params.max_tokens or most)
