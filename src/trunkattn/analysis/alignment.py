"""Prompts laid beside each other: what varies between them, and what is equal again behind it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.texts import to_bytes
from trunkattn.analysis.tokens import mixed
from trunkattn.analysis.varying import (
    CONTEXT,
    Example,
    common_length,
    is_reordered,
    kind_of,
    order_kind,
    word_rest,
    word_start,
)

ANCHOR: Final = 32  # characters by which a shared part is found again
MIN_SHARED: Final = 256  # characters of a shared part that are worth a word
MAX_VARYING: Final = 1024  # characters of a field; what is longer is a prompt's own text
# Documents that were looked up for a prompt are about as long as each other, so one in front of another is no field.
_TIMES: Final = 4  # as much must be shared behind what is of no known kind
MAX_REORDERED: Final = 1 << 15  # characters of a list of tools
MAX_SHARED: Final = 1 << 18  # characters of a shared part that are compared
MAX_FIELDS: Final = 8  # that follow each other in one group of prompts
_WINDOW: Final = 4096  # characters behind the parting by which groups are told apart
_SPARSE: Final = 8  # one of so many substrings is looked at


@dataclass(frozen=True)
class Field:
    """A part of a group's prompts that varies, with a part behind it that does not.

    Attributes:
        kind: see `Spoiler.kind`.
        start: first character of it, in the prompt that is the model of the group.
        end: character of that prompt behind it.
        shared: text behind it that all have.
        is_order: whether it is the same text in another order, which is mended by ordering it, not by moving it.
        is_bound: whether it stays in front of what is not shared, because the end of the prompt is another message.
    """

    kind: str
    start: int
    end: int
    shared: str
    is_order: bool = False
    is_bound: bool = False


class Span(NamedTuple):
    """Where a field and the shared part behind it are in one prompt, in characters: [start, end) and [end, stop)."""

    start: int
    end: int
    stop: int


def groups_of(texts: Sequence[str], children: Sequence[int]) -> Iterator[list[int]]:
    """Positions of texts that have something in common behind the place where they part, largest groups first.

    Prompts of different applications may part at the same place. Those of one have substrings in common, so the texts
    that contain one are a group, if they come from at least two children.
    """
    start = common_length(texts)
    grams = [_grams(text[start : start + _WINDOW]) for text in texts]
    owners = np.concatenate([np.full(len(some), place) for place, some in enumerate(grams)])
    _, inverse, counts = np.unique(np.concatenate(grams), return_inverse=True, return_counts=True)
    owners, ends = owners[np.argsort(inverse, kind="stable")], np.cumsum(counts)
    seen: set[tuple[int, ...]] = set()
    for gram in np.argsort(-counts, kind="stable")[: int(np.count_nonzero(counts > 1))]:
        members = tuple(owners[ends[gram] - counts[gram] : ends[gram]].tolist())
        if members not in seen and len({children[place] for place in members}) > 1:
            seen.add(members)
            yield list(members)


def _grams(text: str) -> NDArray[np.uint64]:
    """Hashes of some of a text's substrings, the same ones wherever they stand."""
    data = np.frombuffer(to_bytes(text), dtype=np.uint8).astype(np.uint64)
    if len(data) < ANCHOR:
        return np.zeros(0, dtype=np.uint64)
    factors = mixed(np.arange(1, ANCHOR + 1, dtype=np.uint64))
    hashes = mixed(np.lib.stride_tricks.sliding_window_view(data, ANCHOR) @ factors)
    return np.unique(hashes[hashes % np.uint64(_SPARSE) == 0])


def fields_of(texts: Sequence[str]) -> list[Field]:
    """The fields that vary in a group of texts, one after the other, while each has a shared part behind it.

    The first text is the group's model. Places in the others may differ, because fields have different lengths.
    """
    places = [common_length(texts)] * len(texts)
    found: list[Field] = []
    while len(found) < MAX_FIELDS:
        step = _reordered(texts, places) or _moving(texts, places)
        if step is None:
            break
        field, ends = step
        if found:  # what a field begins with may be equal in all
            lead = places[0] - field.start
            found[-1] = replace(found[-1], shared=found[-1].shared[: len(found[-1].shared) - lead])
        found.append(field)
        places = [end + len(field.shared) for end in ends]
    return found


def _moving(texts: Sequence[str], places: list[int]) -> tuple[Field, list[int]] | None:
    """The field at the places where texts part, and its end in each; None: nothing long is shared soon behind it."""
    windows = [text[place : place + MAX_VARYING + ANCHOR] for text, place in zip(texts, places, strict=True)]
    for offset in range(max(0, len(windows[0]) - ANCHOR + 1)):
        anchor = windows[0][offset : offset + ANCHOR]
        ends = []
        for place, window in zip(places, windows, strict=True):
            at = window.find(anchor)
            if at < 0:
                break
            ends.append(place + at)
        if len(ends) < len(texts):
            continue
        rest = word_rest([text[:end][-1:] for text, end in zip(texts, ends, strict=True)], windows[0][offset:])
        ends = [end + rest for end in ends]
        shared = _shared(texts, ends)
        mean_length = (sum(ends) - sum(places)) / len(ends)
        if len(shared) >= max(MIN_SHARED, mean_length):
            kind, lead = kind_of([Example(*example) for example in zip(texts, places, ends, strict=True)])
            if kind == "text" and len(shared) < _TIMES * mean_length:
                return None
            return Field(kind, places[0] - lead, ends[0], shared), ends
    return None


def _shared(texts: Sequence[str], places: Sequence[int]) -> str:
    """What all texts have from their places on."""
    rests = [text[place : place + MAX_SHARED] for text, place in zip(texts, places, strict=True)]
    return rests[0][: common_length(rests)]


def _reordered(texts: Sequence[str], places: list[int]) -> tuple[Field, list[int]] | None:
    """The part at the places where texts part that is the same in another order, and its end in each.

    An order changes no length, so behind such a part the texts are equal at equal distances again.
    """
    starts = [word_start(text, place) for text, place in zip(texts, places, strict=True)]
    windows = [text[start : start + MAX_REORDERED] for text, start in zip(texts, starts, strict=True)]
    length = min(map(len, windows))
    codes = np.array([np.frombuffer(window[:length].encode("utf-32-le", "replace"), np.uint32) for window in windows])
    differing = np.flatnonzero((codes != codes[0]).any(axis=0))
    gaps = np.append(np.diff(differing), length - differing[-1:])
    for last in differing[gaps > MIN_SHARED][:MAX_FIELDS].tolist():
        end = last + 1
        while end < length and (windows[0][end].isalnum() or windows[0][end] == "_"):
            end += 1
        parts = [window[:end] for window in windows]
        if is_reordered(parts):
            ends = [start + end for start in starts]
            return Field(order_kind(parts), starts[0], ends[0], _shared(texts, ends), is_order=True), ends
    return None


def spans_in(text: str, model: str, fields: Sequence[Field]) -> list[Span]:
    """Where the fields of a group are in a text, as many of them as it has, from the first on."""
    place = fields[0].start
    if text[:place] != model[:place]:
        return []
    found: list[Span] = []
    for field in fields:
        end = place + field.end - field.start if field.is_order else _end_of(text, place, field)
        reordered = (text[place:end], model[field.start : field.end])
        if end < 0 or (field.is_order and len(set(reordered)) > 1 and not is_reordered(reordered)):
            break
        stop = end + common_length([text[end : end + len(field.shared)], field.shared])
        if stop - end < min(MIN_SHARED, len(field.shared)):
            break
        found.append(Span(place, end, stop))
        if stop - end < len(field.shared):
            break
        place = stop
    return found


def _end_of(text: str, place: int, field: Field) -> int:
    """Where a field ends that begins at a place; -1: what all share is not soon behind it."""
    return text.find(field.shared[:ANCHOR], place, place + MAX_VARYING + CONTEXT + ANCHOR)


def moved(text: str, spans: Sequence[Span], fields: Sequence[Field], model: str) -> str:
    """A text whose fields stand at its end, or behind the last part that is shared if they are bound; what was in
    another order is in the model's. At the end they part neither these prompts nor those that share still more."""
    shared: list[str] = []
    behind: list[str] = []
    last: list[str] = []
    for span, field in zip(spans, fields, strict=False):
        if field.is_order:
            shared.append(model[field.start : field.end])
        else:
            (behind if field.is_bound else last).append(text[span.start : span.end])
        shared.append(text[span.end : span.stop])
    return "".join([text[: spans[0].start], *shared, *behind, text[spans[-1].stop :], *last])
