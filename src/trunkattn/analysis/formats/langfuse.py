"""Langfuse's observations, as its export writes them (snake_case) and as its interface returns them (camelCase)."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from trunkattn.analysis.formats.base import (
    Entry,
    Fields,
    Format,
    Line,
    Prompt,
    answer_text,
    each,
    epoch_seconds,
    first,
    optional_integer,
    optional_text,
)
from trunkattn.analysis.formats.bodies import length_alone, num_answers_of, prompts_of

STARTS = ("start_time", "startTime")
USAGES = ("usage_details", "usageDetails", "usage")


def recognises(fields: Fields) -> bool:
    """Whether an object is an observation, or a page of them."""
    page = fields.get("data")
    if isinstance(page, list) and page and isinstance(page[0], Mapping):
        return recognises(page[0])
    return "type" in fields and first(fields, *STARTS) is not None and ("trace_id" in fields or "traceId" in fields)


def parse(line: Line) -> Iterator[Entry]:
    """The generations of a line: one, none for other observations, or those of a page."""
    page = line.fields.get("data")
    for fields in page if isinstance(page, list) else [line.fields]:
        if isinstance(fields, Mapping) and fields.get("type") == "GENERATION":
            yield _entry(line.number, fields)


def _entry(number: int, fields: Fields) -> Entry:
    usage = first(fields, *USAGES)
    usage = usage if isinstance(usage, Mapping) else {}
    parameters = _decoded(first(fields, "model_parameters", "modelParameters"))
    num_inputs = optional_integer(usage, "input", "promptTokens", "prompt_tokens") or None
    start = first(fields, *STARTS)
    if start is None:
        raise ValueError("start_time missing: expected it as YYYY-MM-DD HH:MM:SS")
    return Entry(
        number,
        _prompt(_decoded(fields.get("input")), parameters, num_inputs),
        epoch_seconds("start_time", start),
        num_inputs,
        optional_integer(usage, "output", "completionTokens", "completion_tokens"),
        answer=answer_text(_decoded(fields.get("output"))),
        num_answers=num_answers_of(parameters),
        session=optional_text(fields, "session_id", "sessionId"),
        model=optional_text(fields, "provided_model_name", "providedModelName", "model"),
    )


def _prompt(value: Any, parameters: Any, num_tokens: int | None) -> Prompt:
    tools = parameters.get("tools") if isinstance(parameters, Mapping) else None
    if isinstance(value, Mapping):
        return prompts_of({"tools": tools, **value})[0]
    if isinstance(value, list) and value and isinstance(value[0], Mapping):
        return prompts_of({"messages": value, "tools": tools})[0]
    if isinstance(value, str) and value:
        return value
    if num_tokens is None:
        raise ValueError("input missing: expected messages or a text, or usage_details with the number of input tokens")
    return length_alone("usage_details.input", num_tokens)


def _decoded(value: Any) -> Any:
    """A value that may be JSON within a text, as the export writes it."""
    if isinstance(value, str) and value[:1] in ("[", "{", '"'):
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value


FORMAT = Format("langfuse", "Langfuse observations", recognises, each(parse))
