"""NVIDIA Dynamo's request trace (DYN_REQUEST_TRACE=1): block hashes, times and sessions."""

from collections.abc import Iterator, Mapping

from trunkattn.analysis.formats.base import (
    MILLISECONDS,
    Entry,
    Fields,
    Format,
    Hashes,
    Line,
    check_blocks,
    first,
    first_named,
    hash_ids,
    integer,
    optional_integer,
    optional_text,
    seconds,
)
from trunkattn.analysis.formats.calls import Calls, each_call

SCHEMA = "dynamo.request.trace."


def _unwrapped(fields: Fields) -> Fields:
    """The record itself: some sinks wrap it in `event`."""
    inner = fields.get("event")
    return inner if isinstance(inner, Mapping) else fields


def recognises(fields: Fields) -> bool:
    """Whether an object names Dynamo's schema."""
    return str(_unwrapped(fields).get("schema", "")).startswith(SCHEMA)


def _requests(calls: Calls, line: Line) -> Iterator[Entry]:
    """The request of a record that tells of a request's end; other records hold none."""
    fields = _unwrapped(line.fields)
    if fields.get("event_type", "request_end") != "request_end":
        return
    request = fields.get("request")
    if not isinstance(request, Mapping):
        raise ValueError("request missing: expected an object with replay and request_received_ms")
    ids = first(request, "replay.input_sequence_hashes")
    if ids is None:
        raise ValueError("request.replay.input_sequence_hashes missing: expected the hashes of the prompt's blocks")
    block_size = integer(*first_named(request, "replay.trace_block_size"), 1)
    length_name, length = first_named(request, "replay.input_length", "input_tokens")
    num_tokens = integer(length_name, length, 1)
    prompt = Hashes(hash_ids("input_sequence_hashes", ids), block_size, num_tokens)
    entry = Entry(
        line.number,
        check_blocks(prompt, ("input_sequence_hashes", length_name)),
        _arrival(fields, request),
        num_tokens,
        optional_integer(request, "output_tokens"),
        session=optional_text(fields, "agent_context.session_id"),
        model=optional_text(request, "model"),
    )
    calls.add(str(entry.arrival), first(request, "request_id"), None, entry)
    yield entry


def _arrival(fields: Fields, request: Fields) -> float | None:
    """When the request came; where that is not told, its end less its time."""
    received = first(request, "request_received_ms")
    if received is not None:
        return seconds("request_received_ms", received, *MILLISECONDS)
    end, total = first(fields, "event_time_unix_ms"), first(request, "total_time_ms")
    if end is None or total is None:
        raise ValueError("request_received_ms missing: expected it, or event_time_unix_ms and total_time_ms")
    return seconds("event_time_unix_ms", end, *MILLISECONDS) - seconds("total_time_ms", total, *MILLISECONDS)


FORMAT = Format("dynamo", "Dynamo request trace", recognises, each_call(_requests))
