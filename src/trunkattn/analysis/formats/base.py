"""What every format of a log has: entries, how a line becomes one, and how fields are read and refused."""

import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any, Final, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.records import SkippedLine

Fields: TypeAlias = Mapping[str, Any]

MOST_TOKENS: Final = 100_000_000  # tokens of a prompt or an answer: no model takes more, and blocks take memory
MILLISECONDS: Final = ("milliseconds", 1e3)  # the arguments `unit` and `per_second` of `seconds`
MOST_ID: Final = (1 << 63) - 1
_NO_WORDS: Final = re.compile(r"[0-9TZ:./+ -]{0,40}")  # numbers and dates, which may be quoted: they are no prompt
# ISO 8601 with and without signs between digits. Python 3.10 reads few of its forms, such as no zone +0000.
_MOMENT: Final = re.compile(
    r"(?P<year>\d{4})-?(?P<month>\d\d)-?(?P<day>\d\d)"
    r"(?:[T ](?P<hour>\d\d):?(?P<minute>\d\d)(?::?(?P<second>\d\d)(?:[.,](?P<fraction>\d+))?)?"
    r"\s*(?:Z|UTC|GMT|(?P<hours>[+-]\d\d)(?::?(?P<minutes>\d\d))?)?)?",
    re.ASCII | re.IGNORECASE,
)
_LATEST: Final = 1e11  # a larger number of seconds, as a duration or since 1970, must have another unit


@dataclass(frozen=True, slots=True)
class Hashes:
    """A prompt of which only block hashes are known.

    Attributes:
        ids: int64, one number per block; the last block may be incomplete or left out. Empty if it is unknown what the
            prompt shares.
        block_size: tokens of a block.
        num_tokens: tokens of the prompt.
    """

    ids: NDArray[np.int64]
    block_size: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A prompt as token ids, int64."""

    ids: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Chat:
    """A prompt as messages, each with a role and a content, and the tools that the model may call."""

    messages: Sequence[Fields]
    tools: Sequence[Any] = ()


Prompt: TypeAlias = Hashes | TokenIds | Chat | str


@dataclass(slots=True)
class Entry:
    """A request as it stands in a log.

    Attributes:
        line: its line.
        prompt: its prompt.
        arrival: seconds on any clock; None: the log does not say.
        num_prompt_tokens: tokens of the prompt by the log's own count; None: the log does not count them.
        num_output_tokens: tokens of one answer by the log's own count; None: the log does not count them.
        answer: text of one answer, whose tokens are counted if `num_output_tokens` is None.
        num_answers, session, model: as in `LoggedRequest`.
        turn: number in the session; None: the reader counts.
        call: number to which a `Repeated` may refer; None: none does.
    """

    line: int
    prompt: Prompt
    arrival: float | None = None
    num_prompt_tokens: int | None = None
    num_output_tokens: int | None = None
    answer: str | None = None
    num_answers: int = 1
    session: str | None = None
    turn: int | None = None
    model: str | None = None
    call: int | None = None


class Repeated(NamedTuple):
    """A call that is not counted. call, kept: `Entry.call` of this one and of the one that counts instead. is_same:
    both are the same call; otherwise this one contains several calls, `kept` among them."""

    call: int
    kept: int
    is_same: bool = True


class Line(NamedTuple):
    """A line, or another unit of a log, and the JSON object in it."""

    number: int
    fields: Fields


Told: TypeAlias = Entry | SkippedLine | Repeated
Parse: TypeAlias = Callable[[Iterable[Line]], Iterator[Told]]


@dataclass(frozen=True)
class Format:
    """A format of logs.

    Attributes:
        name: what `format=` takes.
        title: its name for people.
        recognises: whether an object is a line of this format.
        parse: turns lines into entries. A bad line becomes a `SkippedLine`. If a log has a call twice, a `Repeated`
            follows both entries.
    """

    name: str
    title: str
    recognises: Callable[[Fields], bool]
    parse: Parse


def attempt(number: int, make: Callable[[], Entry], part: str = "") -> Entry | SkippedLine:
    """The entry that a function makes, or why there is none. part: which of the line's entries it is, for people; the
    others are kept."""
    try:
        return make()
    except ValueError as error:
        return SkippedLine(number, f"{part}{error}")


def each(parse_line: Callable[[Line], Iterable[Entry | SkippedLine]]) -> Parse:
    """Makes a parser of lines, each by itself. `parse_line` raises ValueError where a line is wrong."""

    def parse(lines: Iterable[Line]) -> Iterator[Told]:
        for line in lines:
            try:
                yield from parse_line(line)
            except ValueError as error:
                yield SkippedLine(line.number, str(error))

    return parse


def first_named(fields: Fields, *names: str) -> tuple[str, Any]:
    """The name and the value of the first of these fields that is present and not null; the first name and None if all
    are absent. A dot leads into an inner object."""
    is_mapping = type(fields) is dict or isinstance(fields, Mapping)  # the latter takes ten times as long
    for name in names:
        value: Any = fields
        if "." not in name:
            value = fields.get(name) if is_mapping else None
        else:
            for part in name.split("."):
                value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return name, value
    return names[0], None


def first(fields: Fields, *names: str) -> Any:
    """The value that `first_named` finds."""
    return first_named(fields, *names)[1]


def require(fields: Fields, *names: str) -> None:
    """Raises ValueError that names what is missing of `names`."""
    missing = [name for name in names if name not in fields]
    if missing:
        raise ValueError(f"{', '.join(missing)} missing: expected {', '.join(names)}")


def integer(name: str, value: Any, least: int, most: int = MOST_TOKENS) -> int:
    """A whole number from `least` to `most`, also where it is written as 7.0."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={brief(value)}: expected an integer of at least {least}")
    if value > most:
        raise ValueError(f"{name}={brief(value)}: expected an integer of at most {most}")
    return value


def seconds(name: str, value: Any, unit: str = "seconds", per_second: float = 1.0) -> float:
    """A duration in seconds. unit: name of the unit of `value`; per_second: how many of it make a second."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value < _LATEST * per_second:
        raise ValueError(f"{name}={brief(value)}: expected {unit} of at least 0 and below {_LATEST * per_second:g}")
    return float(value) / per_second


def optional_integer(fields: Fields, *names: str, least: int = 0) -> int | None:
    """The first present field as a whole number; None if all are absent."""
    name, value = first_named(fields, *names)
    return None if value is None else integer(name, value, least)


def optional_text(fields: Fields, *names: str) -> str | None:
    """The first present field as a text, also if it is a finite number; None if all are absent or it is empty."""
    value = first(fields, *names)
    is_id = isinstance(value, str | int) or (isinstance(value, float) and math.isfinite(value))
    return str(value) if is_id and str(value) else None


def hash_ids(name: str, value: Any) -> NDArray[np.int64]:
    """A list of whole numbers from 0 to 2**64 - 1 as int64; those over 2**63 - 1 wrap around."""
    if not isinstance(value, list | np.ndarray):
        raise ValueError(f"{name}={brief(value)}: expected a list of integers")
    if all(type(number) is int and 0 <= number < 1 << 64 for number in value):
        return np.array(value, dtype=np.uint64).view(np.int64)
    wrong = next(number for number in value if type(number) is not int or not 0 <= number < 1 << 64)
    raise ValueError(f"{name}={brief(wrong)}: expected an integer of at least 0 and below 2**64")


def token_ids(name: str, value: Any) -> TokenIds:
    """A prompt of token ids."""
    ids = hash_ids(name, value)
    if not len(ids):
        raise ValueError(f"{name}=[]: expected at least one token id")
    return TokenIds(ids)


def check_blocks(prompt: Hashes, names: tuple[str, str]) -> Hashes:
    """The prompt, if it has one hash per block or one per full block. names: the fields of its hashes and its length.

    Raises:
        ValueError: it has another number of hashes.
    """
    most = -(-prompt.num_tokens // prompt.block_size)
    if not prompt.num_tokens // prompt.block_size <= len(prompt.ids) <= most:
        raise ValueError(
            f"{names[0]} has {len(prompt.ids)} entries: expected {most}, one per {prompt.block_size} tokens of "
            f"{names[1]}={prompt.num_tokens}"
        )
    return prompt


def epoch_seconds(name: str, value: Any) -> float | None:
    """Seconds since 1970 from a date and time as text (UTC unless it names a zone), or from a number of s, ms, µs or ns
    since 1970, told apart by size. None stays None."""
    if value is None:
        return None
    if isinstance(value, datetime):
        return (value if value.tzinfo else value.replace(tzinfo=timezone.utc)).timestamp()
    number = value
    if isinstance(value, str):
        try:
            number = float(value)
        except ValueError:
            return _from_text(name, value)
    units = ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3), (0, 1))
    if isinstance(number, bool) or not isinstance(number, int | float) or not 0 <= number < _LATEST * units[0][1]:
        raise ValueError(f"{name}={brief(value)}: expected a time, as seconds or as YYYY-MM-DD HH:MM:SS")
    return next(number / unit for least, unit in units if number >= least)


def _from_text(name: str, value: str) -> float:
    written = _MOMENT.fullmatch(value.strip())
    try:
        if written is None:
            raise ValueError
        date = "-".join(written.group("year", "month", "day"))
        clock = ":".join(part or "00" for part in written.group("hour", "minute", "second"))
        zone = f"{written['hours'] or '+00'}:{written['minutes'] or '00'}"
        whole = datetime.fromisoformat(f"{date} {clock}{zone}")
        return whole.timestamp() + float(f"0.{written['fraction'] or 0}")
    except ValueError:
        raise ValueError(f"{name}={brief(value)}: expected a time, as seconds or as YYYY-MM-DD HH:MM:SS") from None


def answer_text(message: Any) -> str | None:
    """Text of an answer with its reasoning and its tool calls, from a string, a message, or a list of messages or
    parts. None if there is none."""
    if isinstance(message, str):
        return message
    if isinstance(message, Mapping):
        thought = first(message, "reasoning_content", "reasoning")
        text = answer_text(first(message, "content", "text", "message", "parts", "choices"))
        found = [thought if isinstance(thought, str) else None, text, called_tools(message)]
    elif isinstance(message, list):
        found = [answer_text(part) for part in message]
    else:
        return None
    return "\n".join(filter(None, found)) if any(part is not None for part in found) else None


def called_tools(message: Fields) -> str | None:
    """The tools that a message calls, as text; None: it calls none."""
    calls = first(message, "tool_calls", "function_call")
    return json.dumps(calls, ensure_ascii=False) if calls else None


def decoded(value: Any) -> Any:
    """A value, parsed if it is a text that holds JSON, as in tables and attributes."""
    if isinstance(value, str) and value[:1] in ("[", "{", '"'):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return value
    return value


def brief(value: Any) -> str:
    """A value for an error message, shortened. A text with words is not quoted, because it may be somebody's prompt."""
    if isinstance(value, bytes):
        return "bytes"
    if isinstance(value, str) and not _NO_WORDS.fullmatch(value):
        return "a text"
    if isinstance(value, Mapping | list | tuple):
        return f"{'an object' if isinstance(value, Mapping) else 'a list'} of {len(value)} entries"
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
