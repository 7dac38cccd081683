"""OpenTelemetry's spans of generative AI: OTLP as JSON, and spans with flat attributes; OpenInference's names too."""

import re
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
    integer,
    optional_text,
)
from trunkattn.analysis.formats.bodies import chat_of, prompt_of_length, prompts_of
from trunkattn.analysis.formats.calls import Calls, each_call
from trunkattn.analysis.records import SkippedLine

STARTS = ("startTimeUnixNano", "start_time_unix_nano", "start_time", "startTime", "timestamp")
TRACES = ("traceId", "trace_id", "context.trace_id")
SPANS = ("spanId", "span_id", "context.span_id")
PARENTS = ("parentSpanId", "parent_span_id", "parent_id")
INPUT_MESSAGES = ("gen_ai.input.messages", "gen_ai.prompt", "input.value")
OUTPUT_MESSAGES = ("gen_ai.output.messages", "gen_ai.completion", "output.value")
INPUT_TOKENS = ("gen_ai.usage.input_tokens", "gen_ai.usage.prompt_tokens", "llm.token_count.prompt")
OUTPUT_TOKENS = ("gen_ai.usage.output_tokens", "gen_ai.usage.completion_tokens", "llm.token_count.completion")
CHOICES = ("gen_ai.request.choice.count", "gen_ai.request.n")
SESSIONS = ("gen_ai.conversation.id", "session.id")
MODELS = ("gen_ai.response.model", "gen_ai.request.model", "llm.model_name")
TOOLS = ("gen_ai.tool.definitions", "llm.request.functions")
GENERATES = ("chat", "text_completion", "generate_content", "completion", "llm_request")
# One attribute per part of a message: OpenInference's names, and older ones of OpenTelemetry.
NUMBERED = re.compile(
    r"(?:llm\.input_messages\.(\d+)\.message|gen_ai\.prompt\.(\d+))\.(role|content|contents\.\d+\.message_content\.text)"
)
ANSWERS = ("llm.output_messages.0.message.content", "gen_ai.completion.0.content")
WHOLE = re.compile(r"-?[0-9]{1,19}")
ERRORS = ("2", "ERROR", "STATUS_CODE_ERROR")  # a span's status
MARKS = ("gen_ai.", "llm.", "openinference.")


def recognises(fields: Fields) -> bool:
    """Whether an object is an OTLP export, or a span with one of the attributes."""
    if "resourceSpans" in fields or "resource_spans" in fields:
        return True
    return any(name.startswith(MARKS) for name in _attributes(fields))


def _calls(calls: Calls, line: Line) -> Iterator[Entry | SkippedLine]:
    """The model's calls among the spans of a line."""
    is_span = first(line.fields, "resourceSpans", "resource_spans") is None
    for number, span in enumerate(_spans(line.fields), start=1):
        attributes, entry = _attributes(span), None
        if _is_call(attributes) and not _failed(span, attributes):
            part = "" if is_span else f"span {number}: "
            entry = attempt(line.number, partial(_entry, line.number, span, attributes), part)
        calls.add(_id(span, TRACES), _id(span, SPANS), _id(span, PARENTS), entry)
        if entry is not None:
            yield entry


def _id(span: Fields, names: tuple[str, ...]) -> Any:
    """An id of a span. Tables have a dot in the last of its names."""
    return first(span, *names) or span.get(names[-1])


def _failed(span: Fields, attributes: Fields) -> bool:
    """Whether a span tells of an error and of no answer."""
    wrong = "error.type" in attributes or str(first(span, "status.code", "status.status_code")) in ERRORS
    return wrong and not any(attributes.get(name) for name in (*ANSWERS, *OUTPUT_MESSAGES, *OUTPUT_TOKENS))


def _spans(fields: Fields) -> Iterator[Fields]:
    resources = first(fields, "resourceSpans", "resource_spans")
    if resources is None:
        yield fields
        return
    for resource in _objects(resources):
        for scope in _objects(first(resource, "scopeSpans", "scope_spans", "instrumentationLibrarySpans")):
            yield from _objects(scope.get("spans"))


def _objects(value: Any) -> list[Fields]:
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def _attributes(span: Fields) -> dict[str, Any]:
    """All attributes of a span and of its events, by their full names."""
    found = _flat(span.get("attributes"))
    found.update((name, value) for name, value in span.items() if name.startswith(MARKS))
    found.update((name.removeprefix("attributes."), v) for name, v in span.items() if name.startswith("attributes."))
    for event in _objects(span.get("events")):
        found.update(_flat(event.get("attributes")))
    return found


def _flat(attributes: Any, before: str = "") -> dict[str, Any]:
    if isinstance(attributes, list):
        return {str(item.get("key")): _value(item.get("value")) for item in _objects(attributes)}
    found: dict[str, Any] = {}
    for name, value in attributes.items() if isinstance(attributes, Mapping) else ():
        if isinstance(value, Mapping):
            found.update(_flat(value, f"{before}{name}."))
        else:
            found[f"{before}{name}"] = value
    return found


def _value(value: Any) -> Any:
    """A value of OTLP, which names its type. Whole numbers are texts there."""
    if not isinstance(value, Mapping):
        return value
    name, inner = next(iter(value.items()), ("", None))
    if name == "intValue" and isinstance(inner, str) and WHOLE.fullmatch(inner):
        return int(inner)
    if name in ("arrayValue", "kvlistValue"):
        values = inner.get("values") if isinstance(inner, Mapping) else None
        if name == "kvlistValue":
            return _flat(values) if isinstance(values, list) else {}
        return [_value(item) for item in values] if isinstance(values, list) else []
    return inner


def _is_call(attributes: Fields) -> bool:
    operation, kind = attributes.get("gen_ai.operation.name"), attributes.get("openinference.span.kind")
    if operation is not None:
        return str(operation) in GENERATES
    if kind is not None:
        return str(kind).upper() == "LLM"
    return any(name in attributes for name in (*INPUT_TOKENS, *INPUT_MESSAGES[:2])) or bool(_numbered(attributes))


def _entry(number: int, span: Fields, attributes: Fields) -> Entry:
    num_inputs = _count(attributes, INPUT_TOKENS, 1)
    answer = decoded(next((attributes[name] for name in (*ANSWERS, *OUTPUT_MESSAGES) if name in attributes), None))
    num_answers = _count(attributes, CHOICES, 1) or 1
    num_outputs = _count(attributes, OUTPUT_TOKENS, 0)
    return Entry(
        number,
        _prompt(attributes, num_inputs),
        epoch_seconds(*first_named(span, *STARTS)),
        num_inputs,
        None if num_outputs is None else -(-num_outputs // num_answers),
        answer=answer_text(answer),
        num_answers=num_answers,
        session=next((text for name in SESSIONS if (text := _text(attributes, name))), None),
        model=next((text for name in MODELS if (text := _text(attributes, name))), None),
    )


def _count(attributes: Fields, names: tuple[str, ...], least: int) -> int | None:
    name = next((name for name in names if attributes.get(name) is not None), None)
    return None if name is None else integer(name, attributes[name], least)


def _text(attributes: Fields, name: str) -> str | None:
    return optional_text({"value": attributes.get(name)}, "value")


def _prompt(attributes: Fields, num_tokens: int | None) -> Prompt:
    tools = decoded(next((attributes[name] for name in TOOLS if name in attributes), None))
    messages: Any = _numbered(attributes) or decoded(
        next((attributes[name] for name in INPUT_MESSAGES if attributes.get(name)), None)
    )
    system = decoded(attributes.get("gen_ai.system_instructions"))
    if isinstance(messages, Mapping):
        return prompts_of({"tools": tools, **messages})[0]
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}] if system else messages
    if isinstance(messages, list):
        head = [{"role": "system", "content": system}] if system else []
        return chat_of(head + messages, tools)
    if isinstance(messages, str):
        return messages
    if num_tokens is None:
        raise ValueError("gen_ai.input.messages missing: expected it, or gen_ai.usage.input_tokens")
    return prompt_of_length("gen_ai.usage.input_tokens", num_tokens)


def _numbered(attributes: Fields) -> list[dict[str, Any]]:
    """Messages whose parts are attributes of their own, in order."""
    found: dict[int, dict[str, Any]] = {}
    for name, value in attributes.items():
        match = NUMBERED.fullmatch(name)
        if match:
            message = found.setdefault(int(match[1] or match[2]), {"role": "user", "content": ""})
            key = match[3].split(".")[0]
            message[key.rstrip("s") if key == "contents" else key] = value
    return [found[number] for number in sorted(found)]


FORMAT = Format("opentelemetry", "OpenTelemetry spans", recognises, each_call(_calls))
