"""LiteLLM's standard logging payload, and rows of its table of spending, which hold text only where that is stored."""

from collections.abc import Iterator, Mapping

from trunkattn.analysis.formats.base import (
    Entry,
    Fields,
    Format,
    Line,
    Prompt,
    decoded,
    epoch_seconds,
    first,
    optional_integer,
    optional_text,
    require,
)
from trunkattn.analysis.formats.bodies import facts_of_response, num_answers_of, prompt_of_length, prompts_of
from trunkattn.analysis.formats.calls import Calls, each_call

# What stands for messages that LiteLLM was told to leave out of its logs. All would seem to be the same prompt.
_NO_TEXT = "redacted-by-litellm"
REDACTED = (_NO_TEXT, [{"role": "user", "content": _NO_TEXT}])
GENERATES = ("completion", "responses", "generate_content", "messages")


def recognises(fields: Fields) -> bool:
    """Whether an object has LiteLLM's names."""
    return "call_type" in fields and "startTime" in fields


def _requests(calls: Calls, line: Line) -> Iterator[Entry]:
    """The request of a line; none for other calls, failures, and answers that no model computed."""
    fields = line.fields
    require(fields, "startTime", "call_type")
    failed = str(fields.get("status", "success")) == "failure"
    cached = str(fields.get("cache_hit", "")).lower() == "true"
    if failed or cached or not any(word in str(fields["call_type"]) for word in GENERATES):
        return
    parameters = first(fields, "model_parameters", "optional_params")
    parameters = parameters if isinstance(parameters, Mapping) else {}
    outcome = facts_of_response(decoded(fields.get("response")), num_asked=num_answers_of(parameters))
    num_answers = outcome.num_answers or num_answers_of(parameters)
    num_outputs = optional_integer(fields, "completion_tokens")
    entry = Entry(
        line.number,
        _prompt(fields, parameters),
        epoch_seconds("startTime", fields["startTime"]),
        optional_integer(fields, "prompt_tokens") or None,
        outcome.num_output_tokens if num_outputs is None else -(-num_outputs // num_answers),
        answer=outcome.answer,
        num_answers=num_answers,
        session=optional_text(fields, "session_id", "trace_id"),
        model=optional_text(fields, "model", "model_group"),
    )
    calls.add(str(entry.arrival), first(fields, "id", "request_id"), None, entry)  # some servers repeat ids
    yield entry


def _prompt(fields: Fields, parameters: Fields) -> Prompt:
    messages = decoded(fields.get("messages"))
    if messages and messages not in REDACTED:
        name = "messages" if isinstance(messages, list) and isinstance(messages[0], Mapping) else "prompt"
        if isinstance(messages, Mapping):
            return prompts_of({"tools": parameters.get("tools"), **messages})[0]
        return prompts_of({name: messages, "tools": parameters.get("tools")})[0]
    require(fields, "prompt_tokens")
    return prompt_of_length("prompt_tokens", fields["prompt_tokens"])


FORMAT = Format("litellm", "LiteLLM log", recognises, each_call(_requests))
