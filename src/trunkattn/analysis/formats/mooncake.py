"""Mooncake's traces (https://arxiv.org/abs/2407.00079), and the spellings of Dynamo's data generator."""

from collections.abc import Iterable, Iterator

from trunkattn.analysis.formats.base import (
    MILLISECONDS,
    Entry,
    Fields,
    Format,
    Hashes,
    Line,
    Told,
    check_blocks,
    each,
    first,
    hash_ids,
    integer,
    optional_text,
    require,
    seconds,
)

BLOCK_SIZE = 512
ARRIVALS = ("timestamp", "created_time")  # milliseconds from the beginning of the trace
INPUTS = ("input_length", "input_tokens")
OUTPUTS = ("output_length", "output_tokens")
DELAYS = ("delay", "delay_ms")  # milliseconds after the turn before; such a turn has no time of its own


def recognises(fields: Fields) -> bool:
    """Whether an object has block hashes and lengths under one of their names."""
    return "hash_ids" in fields and first(fields, *INPUTS) is not None


def parse(lines: Iterable[Line]) -> Iterator[Told]:
    """Requests of a trace. A turn that has a delay arrives that long after the turn before it."""
    latest: dict[str, float] = {}
    return each(lambda line: [_entry(line, latest)])(lines)


def _entry(line: Line, latest: dict[str, float]) -> Entry:
    fields = line.fields
    arrival_name, input_name, output_name = (_spelling(fields, names) for names in (ARRIVALS, INPUTS, OUTPUTS))
    session = optional_text(fields, "session_id")
    follows = arrival_name not in fields and session in latest
    require(fields, *([] if follows else [arrival_name]), input_name, output_name, "hash_ids")
    if follows:
        assert session is not None
        delay_name = _spelling(fields, DELAYS)
        arrival = latest[session] + seconds(delay_name, fields.get(delay_name, 0), *MILLISECONDS)
    else:
        arrival = seconds(arrival_name, fields[arrival_name], *MILLISECONDS)
    num_tokens = integer(input_name, fields[input_name], 1)
    num_output_tokens = integer(output_name, fields[output_name], 0)
    prompt = Hashes(hash_ids("hash_ids", fields["hash_ids"]), BLOCK_SIZE, num_tokens)
    check_blocks(prompt, ("hash_ids", input_name))
    if session is not None:
        latest[session] = arrival
    return Entry(line.number, prompt, arrival, num_tokens, num_output_tokens, session=session)


def _spelling(fields: Fields, names: tuple[str, ...]) -> str:
    """The name that an object uses; the first one if it uses none."""
    return next((name for name in names if name in fields), names[0])


FORMAT = Format("mooncake", "Mooncake trace", recognises, parse)
