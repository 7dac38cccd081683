"""The requests of a log as arrays: a `LoggedRequest` is made when it is asked for, so a million take little memory.

Processes that replay a log are forks of the one that read it, and share its arrays. Objects they could not share: a
look at one changes its count of references, so the memory around it is copied.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from struct import Struct
from typing import Any, Final, overload

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.records import LoggedRequest

UNKNOWN: Final = -1  # a number, or the place of a name, that the log does not say
# The fields of a request besides its blocks. `session` and `model` are places in a list of names; `arrival` is not a
# number where the log has no time; `start` and `end` are those of its blocks among all blocks.
_ROW: Final = np.dtype(
    [
        *((name, "<i8") for name in ("line", "start", "end")),
        ("arrival", "<f8"),
        *((name, "<i8") for name in ("num_prompt_tokens", "num_output_tokens")),
        *((name, "<i4") for name in ("block_size", "num_answers", "turn", "part", "session", "model")),
    ]
)
_PACKED: Final = Struct("<qqqdqqiiiiii")


class Blocks(Sequence[NDArray[np.int64]]):
    """The block numbers of many prompts, in one array.

    Attributes:
        numbers: int64, of all prompts.
        starts, ends: [prompts] where those of each prompt begin and end.
    """

    def __init__(self, numbers: NDArray[np.int64], starts: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        self.numbers, self.starts, self.ends = numbers, starts, ends

    @classmethod
    def joined(cls, prompts: Sequence[NDArray[np.int64]]) -> "Blocks":
        """The blocks of all prompts; they themselves if they are joined."""
        if isinstance(prompts, Blocks):
            return prompts
        ends = np.cumsum([0, *map(len, prompts)])
        return cls(np.concatenate([np.zeros(0, np.int64), *prompts]), ends[:-1], ends[1:])

    def __len__(self) -> int:
        return len(self.starts)

    @overload
    def __getitem__(self, place: int) -> NDArray[np.int64]: ...
    @overload
    def __getitem__(self, place: slice | NDArray[np.int64]) -> "Blocks": ...
    def __getitem__(self, place: int | slice | NDArray[np.int64]) -> "NDArray[np.int64] | Blocks":
        if isinstance(place, slice | np.ndarray):
            return Blocks(self.numbers, self.starts[place], self.ends[place])
        return self.numbers[self.starts[place] : self.ends[place]]


class Requests(Sequence[LoggedRequest]):
    """Requests in some order.

    Attributes:
        rows: [requests] their fields, by the names of `LoggedRequest`.
        blocks: their blocks.
    """

    def __init__(self, rows: NDArray[Any], numbers: NDArray[np.int64], names: Sequence[str]) -> None:
        """Takes the fields, the blocks of all requests, and the names of sessions and models."""
        self.rows, self.blocks = rows, Blocks(numbers, rows["start"], rows["end"])
        self._names = names

    @classmethod
    def of(cls, requests: Sequence[LoggedRequest]) -> "Requests":
        """The requests as arrays; they themselves if they are."""
        if isinstance(requests, Requests):
            return requests
        read = RequestsRead()
        for request in requests:
            read.append(request)
        return read.done()

    def with_rows(self, rows: NDArray[Any]) -> "Requests":
        """Requests of these, with other fields besides their blocks."""
        return Requests(rows, self.blocks.numbers, self._names)

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, place: int) -> LoggedRequest: ...
    @overload
    def __getitem__(self, place: slice | NDArray[Any]) -> "Requests": ...
    def __getitem__(self, place: int | slice | NDArray[Any]) -> "LoggedRequest | Requests":
        if isinstance(place, slice | np.ndarray):
            return self.with_rows(self.rows[place])
        line, start, end, arrival, num_prompt_tokens, num_output_tokens, *others = self.rows[place].item()
        block_size, num_answers, turn, part, session, model = others
        return LoggedRequest(
            line=line,
            arrival=None if isnan(arrival) else arrival,
            num_prompt_tokens=num_prompt_tokens,
            num_output_tokens=None if num_output_tokens == UNKNOWN else num_output_tokens,
            blocks=self.blocks.numbers[start:end],
            block_size=block_size,
            num_answers=num_answers,
            session=None if session == UNKNOWN else self._names[session],
            turn=turn,
            model=None if model == UNKNOWN else self._names[model],
            part=part,
        )


@dataclass
class RequestsRead:
    """Requests as they are read: `append` takes one, and `done` gives them all."""

    packed: bytearray = field(default_factory=bytearray)
    blocks: "BlocksRead" = field(default_factory=lambda: BlocksRead())
    names: dict[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.blocks)

    def append(self, request: LoggedRequest) -> None:
        """Adds a request."""
        start = len(self.blocks.numbers)
        self.blocks.append(request.blocks)
        self.packed += _PACKED.pack(
            request.line,
            start,
            len(self.blocks.numbers),
            nan if request.arrival is None else request.arrival,
            request.num_prompt_tokens,
            UNKNOWN if request.num_output_tokens is None else request.num_output_tokens,
            request.block_size,
            request.num_answers,
            request.turn,
            request.part,
            self._name(request.session),
            self._name(request.model),
        )

    def done(self) -> Requests:
        """All of them, in the order in which they were read. Nothing can be added while they are in use."""
        return Requests(np.frombuffer(self.packed, _ROW), self.blocks.done().numbers, [*self.names])

    def _name(self, name: str | None) -> int:
        return UNKNOWN if name is None else self.names.setdefault(name, len(self.names))


@dataclass
class BlocksRead:
    """Blocks as they are read: `append` takes those of a prompt, and `done` gives them all."""

    numbers: "array[int]" = field(default_factory=lambda: array("q"))
    ends: "array[int]" = field(default_factory=lambda: array("q", [0]))

    def __len__(self) -> int:
        return len(self.ends) - 1

    def append(self, blocks: NDArray[np.int64]) -> None:
        """Adds the blocks of a prompt."""
        self.numbers.frombytes(np.ascontiguousarray(blocks, np.int64).tobytes())
        self.ends.append(len(self.numbers))

    def done(self) -> Blocks:
        """All of them. Nothing can be added while they are in use."""
        ends = np.array(self.ends, np.int64)
        return Blocks(np.frombuffer(self.numbers, np.int64), ends[:-1], ends[1:])
