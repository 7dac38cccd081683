"""Langfuse's observations, as its export writes them (snake_case) and as its interface returns them (camelCase)."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from trunkattn.analysis.formats.base import (
    Entry,
    Fields,
    Format,
    Line,
    Prompt,
    answer_text,
    attempt,
    decoded,
    epoch_seconds,
    first,
    first_named,
    optional_integer,
    optional_text,
)
from trunkattn.analysis.formats.bodies import num_answers_of, prompt_of_length, prompts_of
from trunkattn.analysis.formats.calls import Calls, each_call
from trunkattn.analysis.records import SkippedLine

STARTS = ("start_time", "startTime")
TRACES = ("trace_id", "traceId")
PARENTS = ("parent_observation_id", "parentObservationId")
USAGES = ("usage_details", "usageDetails", "usage")


def recognises(fields: Fields) -> bool:
    """Whether an object is an observation, or a page of them."""
    page = fields.get("data")
    if isinstance(page, list) and page and isinstance(page[0], Mapping):
        return recognises(page[0])
    return "type" in fields and first(fields, *STARTS) is not None and ("trace_id" in fields or "traceId" in fields)


def _generations(calls: Calls, line: Line) -> Iterator[Entry | SkippedLine]:
    """The generations of a line: one, none for other observations, or those of a page."""
    page = line.fields.get("data")
    rows = page if isinstance(page, list) else [line.fields]
    for number, fields in enumerate(rows, start=1):
        if not isinstance(fields, Mapping):
            continue
        entry = None
        if fields.get("type") == "GENERATION" and not _failed(fields):
            part = f"observation {number}: " if rows is page else ""
            entry = attempt(line.number, partial(_entry, line.number, fields), part)
        trace, parent = first(fields, *TRACES), first(fields, *PARENTS)
        calls.add(trace, fields.get("id"), parent, entry)
        if entry is not None:
            yield entry


def _failed(fields: Fields) -> bool:
    """Whether an observation tells of an error and of no answer."""
    return fields.get("level") == "ERROR" and fields.get("output") is None


def _entry(number: int, fields: Fields) -> Entry:
    usage = decoded(first(fields, *USAGES))
    usage = usage if isinstance(usage, Mapping) else {}
    parameters = decoded(first(fields, "model_parameters", "modelParameters"))
    num_inputs = _count(usage, "input", "promptTokens", "prompt_tokens") or None
    num_outputs = _count(usage, "output", "completionTokens", "completion_tokens")
    num_answers = num_answers_of(parameters)
    start_name, start = first_named(fields, *STARTS)
    if start is None:
        raise ValueError("start_time missing: expected it as YYYY-MM-DD HH:MM:SS")
    return Entry(
        number,
        _prompt(decoded(fields.get("input")), parameters, num_inputs),
        epoch_seconds(start_name, start),
        num_inputs,
        None if num_outputs is None else -(-num_outputs // num_answers),
        answer=answer_text(decoded(fields.get("output"))),
        num_answers=num_answers,
        session=optional_text(fields, "session_id", "sessionId"),
        model=optional_text(fields, "provided_model_name", "providedModelName", "model"),
    )


def _count(usage: Fields, kind: str, *others: str) -> int | None:
    """Tokens of a kind. Langfuse counts apart what was cached or reasoned, by names such as input_cached_tokens and
    cache_read_input_tokens."""
    count = optional_integer(usage, kind, *others)
    if first(usage, kind) is None or count is None:
        return count
    parts = [name for name in usage if name != kind and kind in name.split("_")]
    return count + sum(optional_integer(usage, name) or 0 for name in parts)


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
    return prompt_of_length("usage_details.input", num_tokens)


FORMAT = Format("langfuse", "Langfuse observations", recognises, each_call(_generations))
