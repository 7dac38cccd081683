"""The formats that are known. A new format is one file and one row here."""

from typing import Final

from trunkattn.analysis.formats import (
    bailian,
    burstgpt,
    chat,
    dynamo,
    langfuse,
    litellm,
    mooncake,
    openai_batch,
    opentelemetry,
    sglang,
)
from trunkattn.analysis.formats.base import Fields, Format

# The first that recognises an object takes it, so those with the more special fields stand first.
FORMATS: Final[tuple[Format, ...]] = (
    bailian.FORMAT,
    mooncake.FORMAT,
    dynamo.FORMAT,
    sglang.FORMAT,
    openai_batch.FORMAT,
    litellm.FORMAT,
    langfuse.FORMAT,
    opentelemetry.FORMAT,
    burstgpt.FORMAT,
    chat.FORMAT,
)


def format_of(fields: Fields) -> Format | None:
    """The first format that recognises an object; None: none does."""
    return next((known for known in FORMATS if known.recognises(fields)), None)


def format_named(name: str) -> Format:
    """The format of a name. Raises ValueError that lists all names."""
    for known in FORMATS:
        if known.name == name:
            return known
    raise ValueError(f"format={name!r}: expected auto, {', '.join(known.name for known in FORMATS)}")
