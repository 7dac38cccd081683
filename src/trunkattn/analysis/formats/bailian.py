"""Usage traces of Alibaba's Bailian: blocks of 16 tokens, seconds, chats and their turns."""

from collections.abc import Iterable, Iterator

from trunkattn.analysis.formats.base import (
    MOST_ID,
    Entry,
    Fields,
    Format,
    Hashes,
    Line,
    check_blocks,
    each,
    first,
    hash_ids,
    integer,
    optional_integer,
    require,
    seconds,
)
from trunkattn.analysis.records import SkippedLine

BLOCK_SIZE = 16
NO_PARENT = -1


def recognises(fields: Fields) -> bool:
    """Whether an object has block hashes and a chat."""
    return "hash_ids" in fields and "chat_id" in fields


def parse(lines: Iterable[Line]) -> Iterator[Entry | SkippedLine]:
    """Requests of a trace. Each turn of a chat has a chat_id of its own; the root's names the session."""
    roots: dict[int, int] = {}
    return each(lambda line: [_entry(line, roots)])(lines)


def _entry(line: Line, roots: dict[int, int]) -> Entry:
    fields = line.fields
    require(fields, "chat_id", "timestamp", "input_length", "output_length", "hash_ids")
    arrival = seconds("timestamp", fields["timestamp"])
    num_tokens = integer("input_length", fields["input_length"], 1)
    num_output_tokens = integer("output_length", fields["output_length"], 0)
    prompt = Hashes(hash_ids("hash_ids", fields["hash_ids"]), BLOCK_SIZE, num_tokens)
    check_blocks(prompt, ("hash_ids", "input_length"))
    chat = integer("chat_id", fields["chat_id"], 0, MOST_ID)
    parent = first(fields, "parent_chat_id")
    parent = NO_PARENT if parent is None else integer("parent_chat_id", parent, NO_PARENT, MOST_ID)
    roots[chat] = root = chat if parent == NO_PARENT else roots.get(parent, parent)
    turn = optional_integer(fields, "turn")
    return Entry(
        line.number,
        prompt,
        arrival,
        num_tokens,
        num_output_tokens,
        session=str(root),
        turn=None if turn is None else max(0, turn - 1),  # the trace counts from 1
    )


FORMAT = Format("bailian", "Bailian usage trace", recognises, parse)
