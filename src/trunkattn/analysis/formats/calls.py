"""Calls that are told more than once: by a gateway's span around the engine's, or because they were exported twice."""

from array import array
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.formats.base import Entry, Hashes, Repeated

_NONE = -1  # no span, or no call
_DEEPEST = 64  # spans of other work between two that tell of one call


class Calls:
    """The spans of a log, or its lines that have an id, with the spans around them. Each takes 24 bytes.

    Spans tell what is one call by their ids alone: those without one, and those that stand beside each other, are calls
    of their own.
    """

    def __init__(self) -> None:
        """Knows no span."""
        self._ids, self._parents, self._ranks = array("q"), array("q"), array("q")

    def add(self, trace: object, span: object, parent: object, entry: object = None) -> None:
        """Notes a span, whether it is a call or not, and numbers its entry.

        Args:
            trace, span, parent: ids, as the log writes them; empty ones are none. trace: what else is to be equal.
            entry: the call; anything else: the span tells of other work, or is wrong.
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
        """The calls that other ones tell, too. Of calls within each other the innermost one stays, or the innermost one
        with a text. A call that holds several is none of them."""
        ids, parents, ranks = (np.array(some, np.int64) for some in (self._ids, self._parents, self._ranks))
        order = np.lexsort((-ranks, ids))  # of the same id the best one first, and the first of the log among equals
        is_new = np.diff(ids[order], prepend=ids[order][:1] - 1) != 0
        spans, best = order[is_new], order[is_new][np.cumsum(is_new) - 1]
        again = (order != best) & (ranks[order] != _NONE)
        yield from map(Repeated, order[again].tolist(), best[again].tolist())
        around = _calls_around(ids[spans], parents[spans], ranks[spans])
        for call, kept, is_same in _around_others(around, ranks[spans]):
            yield Repeated(int(spans[call]), int(spans[kept]), is_same)


def _number(trace: object, span: object) -> int | None:
    """A number of 64 bits for a span; None: it has no id. Some programs write ids with 0x, and zeros for none."""
    names = [str(name).lower().removeprefix("0x") if isinstance(name, str | int) else "" for name in (trace, span)]
    return hash(tuple(names)) if names[1].strip("0") else None


def _calls_around(ids: NDArray[np.int64], parents: NDArray[np.int64], ranks: NDArray[np.int64]) -> NDArray[np.int64]:
    """The nearest call around each span, by its place; -1: there is none. ids: sorted."""
    places = np.minimum(np.searchsorted(ids, parents), max(0, len(ids) - 1))
    outer = np.where((ids[places] == parents) & (parents != ids), places, _NONE)
    around = outer.copy()
    for _ in range(_DEEPEST):
        passes = (around != _NONE) & (ranks[around] == _NONE)
        around[passes] = outer[around[passes]]
    around[ranks[around] == _NONE] = _NONE
    return around


def _around_others(around: NDArray[np.int64], ranks: NDArray[np.int64]) -> Iterator[tuple[int, int, bool]]:
    """The calls that are left out for those around which they are, as the fields of `Repeated`."""
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
