"""SGLang's request log (--log-requests --log-requests-format json --log-requests-level 3): text, times, lengths."""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trunkattn.analysis.formats.base import (
    Entry,
    Fields,
    Format,
    Line,
    Prompt,
    epoch_seconds,
    first,
    optional_integer,
    optional_text,
    require,
    seconds,
)
from trunkattn.analysis.formats.bodies import num_answers_of, prompt_of_length, prompts_of
from trunkattn.analysis.records import SkippedLine

RECEIVED, FINISHED = "request.received", "request.finished"
# Level 2 keeps this many characters at either end, and dots between them.
CUT, DOTS = 1024, "..."


@dataclass
class _Request:
    """What is known of a request until it has finished."""

    line: int
    arrival: float | None
    fields: dict[str, Any] = field(default_factory=dict)
    out: Any = None


def recognises(fields: Fields) -> bool:
    """Whether an object is an event of a request."""
    return "rid" in fields and str(fields.get("event", "")).startswith("request.")


def parse(lines: Iterable[Line]) -> Iterator[Entry | SkippedLine]:
    """Requests, each from the events of one `rid`; those that never finish come last, without an answer."""
    pending: dict[str, _Request] = {}
    done: dict[str, bool] = {}  # that finished: whether before they were received, as the order of files may have it
    for line in lines:
        try:
            finished = _take(line, pending, done)
            if finished is not None:
                yield from _entries(finished)
        except ValueError as error:
            yield SkippedLine(line.number, str(error))
    for request in pending.values():
        try:
            yield from _entries(request)
        except ValueError as error:
            yield SkippedLine(request.line, str(error))


def _take(line: Line, pending: dict[str, _Request], done: dict[str, bool]) -> _Request | None:
    """Notes an event. Returns the request that it finishes."""
    fields = line.fields
    require(fields, "timestamp", "event", "rid")
    event, name, moment = (
        str(fields["event"]),
        json.dumps(fields["rid"]),
        epoch_seconds("timestamp", fields["timestamp"]),
    )
    told = fields.get("obj")
    told = {key: value for key, value in told.items() if value is not None} if isinstance(told, Mapping) else {}
    if event.startswith(RECEIVED):
        if not done.get(name):
            pending.setdefault(name, _Request(line.number, moment)).fields.update(told)
        return None
    if event != FINISHED:
        return None
    out = fields.get("out")
    known = pending.pop(name, None)
    if known is None and name in done:
        raise ValueError("its request finishes a second time: expected one request.finished for each that is received")
    done[name] = known is None
    if known is None:
        latency = first(_meta(out), "e2e_latency")
        since = 0.0 if latency is None else seconds("e2e_latency", latency)
        known = _Request(line.number, None if moment is None else moment - since)
    known.fields.update(told)
    known.out = out
    return known


def _entries(request: _Request) -> Iterator[Entry]:
    sampling = request.fields.get("sampling_params")
    num_answers = num_answers_of(sampling)
    outs = request.out if isinstance(request.out, list) and request.out else [request.out]
    prompts = _prompts(request)
    for number, prompt in enumerate(prompts):
        out = outs[min(number * len(outs) // len(prompts), len(outs) - 1)]
        meta = _meta(out)
        yield Entry(
            request.line,
            prompt,
            request.arrival,
            optional_integer(meta, "prompt_tokens", least=1),
            optional_integer(meta, "completion_tokens"),
            answer=out.get("text") if isinstance(out, Mapping) and isinstance(out.get("text"), str) else None,
            num_answers=num_answers,
            session=optional_text(request.fields, "session_id", "session_params.id"),
            model=optional_text(request.fields, "model"),
        )


def _prompts(request: _Request) -> list[Prompt]:
    """Text before token ids before messages: text is what the engine read, made by the chat template."""
    fields = request.fields
    chosen = next((name for name in ("text", "input_ids", "messages", "prompt") if fields.get(name)), None)
    if chosen is None:
        count = first(_meta(request.out), "prompt_tokens")
        if count is None:
            raise ValueError("obj has neither text nor input_ids: start SGLang with --log-requests-level 3")
        return [prompt_of_length("prompt_tokens", count)]
    value = fields[chosen]
    cut = value[CUT : CUT + len(DOTS)] if isinstance(value, str) and len(value) == 2 * CUT + len(DOTS) else value
    if cut == DOTS or (isinstance(value, list) and DOTS in value):
        raise ValueError(f"obj.{chosen} is cut short: start SGLang with --log-requests-level 3")
    return prompts_of({chosen: value, "tools": fields.get("tools")})


def _meta(out: Any) -> Fields:
    out = out[0] if isinstance(out, list) and out else out
    meta = out.get("meta_info") if isinstance(out, Mapping) else None
    return meta if isinstance(meta, Mapping) else {}


FORMAT = Format("sglang", "SGLang request log", recognises, parse)
