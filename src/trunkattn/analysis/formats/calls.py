"""Calls that a log has more than once: a gateway's span contains the engine's, or a call was exported twice."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.formats.base import Entry, Hashes, Line, Parse, Repeated, Told, each
from trunkattn.analysis.records import SkippedLine

_NONE = -1  # no span, or no call
_DEEPEST = 64  # the most spans of other work between two spans of one call


class Calls:
    """The spans of a log, or its lines with ids, and the spans that contain them. Each takes 24 bytes.

    Only ids show that two spans are one call. Spans without an id, and sibling spans, are different calls.
    """

    def __init__(self) -> None:
        """Knows no span."""
        self._ids, self._parents, self._ranks = array("q"), array("q"), array("q")

    def add(self, trace: object, span: object, parent: object, entry: object = None) -> None:
        """Notes a span, whether it is a call or not, and numbers its entry.

        Args:
            trace, span, parent: ids as the log writes them; an empty id counts as none. Spans are the same only if
                `trace` is equal, too.
            entry: the call. Anything else means that the span is other work, or has a fault.
        """
        number = _number(trace, span)
        if number is None:
            return
        rank = _NONE
        if isinstance(entry, Entry):
            entry.call, rank = len(self._ids), int(not isinstance(entry.prompt, Hashes))
        around = _number(trace, parent)
        self._ids.append(number)
        self._parents.append(number if around is None else around)
        self._ranks.append(rank)

    def repeated(self) -> Iterator[Repeated]:
        """The calls that repeat another one. Of nested calls the innermost counts, or the innermost one with a text. A
        call that contains several calls does not count itself."""
        ids, parents, ranks = (np.array(some, np.int64) for some in (self._ids, self._parents, self._ranks))
        order = np.lexsort((-ranks, ids))  # by id; the best one first, and among equals the first of the log
        is_new = np.diff(ids[order], prepend=ids[order][:1] - 1) != 0
        spans, best = order[is_new], order[is_new][np.cumsum(is_new) - 1]
        again = (order != best) & (ranks[order] != _NONE)
        yield from map(Repeated, order[again].tolist(), best[again].tolist())
        around = _calls_around(ids[spans], parents[spans], ranks[spans])
        for call, kept, is_same in _around_others(around, ranks[spans]):
            yield Repeated(int(spans[call]), int(spans[kept]), is_same)


def each_call(parse_line: Callable[[Calls, Line], Iterable[Entry | SkippedLine]]) -> Parse:
    """Makes a parser of logs that may have a call twice, for example in two exports in one folder. `parse_line` parses
    a line by itself, as in `each`, and adds its spans to the calls."""

    def parse(lines: Iterable[Line]) -> Iterator[Told]:
        calls = Calls()
        yield from each(partial(parse_line, calls))(lines)
        yield from calls.repeated()

    return parse


def _number(trace: object, span: object) -> int | None:
    """A 64-bit number for a span; None if it has no id. Some programs write ids with 0x, or zeros where there is
    none."""
    names = [str(name).lower().removeprefix("0x") if isinstance(name, str | int) else "" for name in (trace, span)]
    return hash(tuple(names)) if names[1].strip("0") else None


def _calls_around(ids: NDArray[np.int64], parents: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The place of the innermost call that contains each span; -1 if there is none. ids: sorted."""
    places = np.minimum(np.searchsorted(ids, parents), max(0, len(ids) - 1))
    outer = np.where((ids[places] == parents) & (parents != ids), places, _NONE)
    around = outer.copy()
    for _ in range(_DEEPEST):
        passes = (around != _NONE) & (ranks[around] == _NONE)
        around[passes] = outer[around[passes]]
    around[ranks[around] == _NONE] = _NONE
    return around


def _around_others(around: NDArray[np.int64], ranks: NDArray[np.int64]) -> Iterator[tuple[int, int, bool]]:
    """The calls that contain other calls and do not count because of them, as the fields of `Repeated`."""
    is_call = ranks != _NONE
    inner = np.bincount(around[is_call & (around != _NONE)], minlength=len(around))
    held: set[int] = set()
    for call in np.flatnonzero(is_call & (inner == 0)).tolist():
        same, outer = [call], int(around[call])
        while outer != _NONE and inner[outer] == 1:
            same.append(outer)
            outer = int(around[outer])
        kept = max(same, key=ranks.__getitem__)
        yield from ((each, kept, True) for each in same if each != kept)
        while outer != _NONE and outer not in held:
            held.add(outer)
            yield outer, kept, False
            outer = int(around[outer])
