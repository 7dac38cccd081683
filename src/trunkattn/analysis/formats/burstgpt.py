"""BurstGPT's table (https://arxiv.org/abs/2401.17644): times and lengths, and nothing about what is shared."""

from collections.abc import Iterator

from trunkattn.analysis.formats.base import (
    Entry,
    Fields,
    Format,
    Line,
    each,
    epoch_seconds,
    integer,
    optional_text,
    require,
)
from trunkattn.analysis.formats.bodies import prompt_of_length

COLUMNS = ("Timestamp", "Request tokens", "Response tokens")


def recognises(fields: Fields) -> bool:
    """Whether a row has the table's columns."""
    return all(name in fields for name in COLUMNS)


def parse(line: Line) -> Iterator[Entry]:
    """The request of a row; none where it failed, which the table tells by an answer without tokens."""
    fields = line.fields
    require(fields, *COLUMNS)
    num_output_tokens = integer("Response tokens", fields["Response tokens"], 0)
    if num_output_tokens:
        prompt = prompt_of_length("Request tokens", fields["Request tokens"])
        arrival = epoch_seconds("Timestamp", fields["Timestamp"])
        session, model = optional_text(fields, "Session ID"), optional_text(fields, "Model")
        yield Entry(line.number, prompt, arrival, prompt.num_tokens, num_output_tokens, session=session, model=model)


FORMAT = Format("burstgpt", "BurstGPT table", recognises, each(parse))
