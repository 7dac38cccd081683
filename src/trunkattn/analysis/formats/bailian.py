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
    """Requests of a trace. Each turn of a chat has a chat_id of its own; the root's names the session. A turn of which
    no line so far tells the root comes last, when all lines have told what they know."""
    parents: dict[int, int] = {}
    waiting: list[tuple[int, Entry]] = []
    for line in lines:
        try:
            chat, entry = _entry(line, parents)
        except ValueError as error:
            yield SkippedLine(line.number, str(error))
            continue
        root = _root(chat, parents)
        entry.session = str(root)
        if parents.get(root) == NO_PARENT:
            yield entry
        else:
            waiting.append((chat, entry))
    for chat, entry in waiting:
        entry.session = str(_root(chat, parents))
        yield entry


def _entry(line: Line, parents: dict[int, int]) -> tuple[int, Entry]:
    """The chat_id and the request of a line. parents: of each chat_id, to which it adds its own."""
    fields = line.fields
    require(fields, "chat_id", "timestamp", "input_length", "output_length", "hash_ids")
    arrival = seconds("timestamp", fields["timestamp"])
    num_tokens = integer("input_length", fields["input_length"], 1)
    num_output_tokens = integer("output_length", fields["output_length"], 0)
    prompt = Hashes(hash_ids("hash_ids", fields["hash_ids"]), BLOCK_SIZE, num_tokens)
    check_blocks(prompt, ("hash_ids", "input_length"))
    chat = integer("chat_id", fields["chat_id"], 0, MOST_ID)
    parent = first(fields, "parent_chat_id")
    parents[chat] = NO_PARENT if parent is None else integer("parent_chat_id", parent, NO_PARENT, MOST_ID)
    turn = optional_integer(fields, "turn")
    turn = None if turn is None else max(0, turn - 1)  # the trace counts from 1
    return chat, Entry(line.number, prompt, arrival, num_tokens, num_output_tokens, turn=turn)


def _root(chat: int, parents: dict[int, int]) -> int:
    """The first turn of a chat, or, where the trace does not tell it, the first one that it names. The turns on the way
    have it as their parent from then on, so that a long chat takes no longer for each turn."""
    on_the_way: set[int] = set()
    while (parent := parents.get(chat, NO_PARENT)) != NO_PARENT and chat not in on_the_way:
        on_the_way.add(chat)
        chat = parent
    parents.update(dict.fromkeys(on_the_way - {chat}, chat))
    return chat


FORMAT = Format("bailian", "Bailian usage trace", recognises, parse)
