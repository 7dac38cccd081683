"""Compares prompts that part at one place: which field varies between them, and which text after it is equal again."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.reading.tokens import mixed
from trunkattn.analysis.spoilers.varying import (
    CONTEXT,
    Example,
    common_length,
    is_reordered,
    kind_of,
    order_kind,
    word_rest,
    word_start,
)
from trunkattn.analysis.texts import to_bytes

ANCHOR: Final = 32  # characters that must match to find where a shared part begins
MIN_SHARED: Final = 256  # the shortest shared part that is reported, in characters
MAX_VARYING: Final = 1024  # the longest field, in characters; longer text belongs to the prompt itself
# Retrieved documents are about equally long, so one document before another must not count as a field. The text shared
# after a field of unknown kind must therefore be this many times as long as the field.
_TIMES: Final = 4
MAX_REORDERED: Final = 1 << 15  # the longest part that is compared for its order, in characters
MAX_SHARED: Final = 1 << 18  # characters of a shared part that are compared
MAX_FIELDS: Final = 8  # fields of one group of prompts
_WINDOW: Final = 4096  # characters after the parting that decide which group a prompt belongs to
_SPARSE: Final = 8  # one substring in eight is hashed


@dataclass(frozen=True)
class Field:
    """A part that varies between the prompts of a group, followed by a part that does not.

    Attributes:
        kind: see `Spoiler.kind`.
        start: its first character in the group's model prompt.
        end: one past its last character in that prompt.
        shared: the text after it that all prompts have.
        is_order: whether all prompts have the same words there in different orders. Sorting mends that, not moving.
        is_bound: whether it must stay before the text that is not shared, because the prompt ends in another message.
    """

    kind: str
    start: int
    end: int
    shared: str
    is_order: bool = False
    is_bound: bool = False


class Span(NamedTuple):
    """The characters [start, end) of one prompt are a field, and [end, stop) the shared part after it."""

    start: int
    end: int
    stop: int


def groups_of(texts: Sequence[str], children: Sequence[int]) -> Iterator[list[int]]:
    """Groups of texts that have something in common after the place where they part, largest first, as positions.

    Prompts of different applications may part at the same place. Prompts of one application share substrings, so all
    texts that contain the same substring are a group, if they come from at least two children.
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
    """Hashes of a sample of a text's substrings. Whether a substring is sampled depends on its characters only."""
    data = np.frombuffer(to_bytes(text), dtype=np.uint8).astype(np.uint64)
    if len(data) < ANCHOR:
        return np.zeros(0, dtype=np.uint64)
    factors = mixed(np.arange(1, ANCHOR + 1, dtype=np.uint64))
    hashes = mixed(np.lib.stride_tricks.sliding_window_view(data, ANCHOR) @ factors)
    return np.unique(hashes[hashes % np.uint64(_SPARSE) == 0])


def fields_of(texts: Sequence[str]) -> list[Field]:
    """The fields that vary in a group of texts, in their order, as long as each is followed by a shared part.

    The first text is the group's model prompt. A field may begin at another place in another text, because the fields
    before it differ in length.
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
    """The field where the texts part, and its end in each text. None if no long shared part follows soon."""
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
    """The longest text that all texts have in common from their places on."""
    rests = [text[place : place + MAX_SHARED] for text, place in zip(texts, places, strict=True)]
    return rests[0][: common_length(rests)]


def _reordered(texts: Sequence[str], places: list[int]) -> tuple[Field, list[int]] | None:
    """The part where the texts part that holds the same words in different orders, and its end in each text.

    Reordering keeps the length, so the texts are equal again at the same distance from where they part.
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
    """The places of a group's fields in a text: all fields up to the first one that the text lacks."""
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
    """The end of a field that begins at `place`; -1 if the shared part does not follow soon."""
    return text.find(field.shared[:ANCHOR], place, place + MAX_VARYING + CONTEXT + ANCHOR)


def moved(text: str, spans: Sequence[Span], fields: Sequence[Field], model: str) -> str:
    """The text with its fields moved to the end, or after the last shared part if they are bound. Reordered parts get
    the model prompt's order. At the end, fields part neither these prompts nor those that share still more."""
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
