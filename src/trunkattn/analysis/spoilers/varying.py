"""Kinds of text that varies from prompt to prompt: times, dates, ids, versions, names, or an order."""

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)[a-z]*\.?"
_DAY = r"(?:\d{4}-\d{1,2}-\d{1,2}|\d{1,2}[./]\d{1,2}[./]\d{2,4}|\d{4}/\d\d/\d\d"
_DATE = rf"{_DAY}|{_MONTH} \d{{1,2}}(?:st|nd|rd|th)?,? \d{{4}}|\d{{1,2}}\.? {_MONTH} \d{{4}})"
_WEEKDAY = r"(?:(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?,? )?"
_CLOCK = r"\d{1,2}:\d\d(?::\d\d(?:[.,]\d+)?)?(?: ?[AaPp][Mm])?(?: ?(?:Z|UTC|GMT|[+-]\d\d:?\d\d))?"
_UUID = r"[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}"
_ID_LABEL = r"(?i:\bid|request|trace|session|conversation|ticket|nonce|token|key)(?: (?:id|ID|Id|number|no\.?))?"
_LABELLED_ID = rf"{_ID_LABEL}[\"']?\s*(?:[:=#]|is)?\s*[\"']?(?P<id>[\w-]*\d[\w-]*)"
_NAME = r"[^\W\d_][\w'.-]*(?: [^\W\d_][\w'.-]*){0,3}"
_LABEL = r"(?:(?:user|User|name|Name|customer|Customer|client|Client|account|assisting|helping|Hello|Dear|with)\s*)+"
_NAMED = rf"{_LABEL}(?:is|named|called|:|=)?\s*[\"']?(?P<id>{_NAME})"

# The first that nearly all examples match is the kind. A group named `id` is what varies after its label.
PATTERNS: Final = (
    (
        "timestamp",
        re.compile(rf"{_WEEKDAY}{_DATE}(?:T|,? (?:at )?){_CLOCK}|{_CLOCK}|\b1[5-9]\d{{8}}(?:\d{{3}})?(?:\.\d+)?\b"),
    ),
    ("date", re.compile(_WEEKDAY + _DATE)),
    (
        "request id",
        re.compile(rf"{_UUID}|\b[A-Za-z]{{2,10}}[-_](?=\w*\d)\w{{6,}}|\b(?=\w*\d)[0-9a-f]{{12,64}}\b|{_LABELLED_ID}"),
    ),
    ("version", re.compile(r"\b[vV]\.?\d+(?:[.\d]*\d)?(?:-\w+)?|\b[vV]ersion:? ?\d[\w.-]*|\b\d+\.\d+\.\d+(?:-\w+)?")),
    ("user name", re.compile(rf"[\w.+-]+@[\w-]+\.[\w.]+|{_NAMED}")),
)
CONTEXT: Final = 40  # characters in front of what varies that may belong to it, or are its label
_BEHIND: Final = 32
_USUAL: Final = 0.9  # share of the examples that match a kind
_COVERED: Final = 0.6  # share of what varies that the match covers
_WORDS: Final = re.compile(r"\w+|[^\w\s]")
_INNER: Final = re.compile(r"[\w:.+/-]")
_REST: Final = re.compile(r"\w*(?:[:.+/-]\w+)*")
_NAMES: Final = re.compile(r"\"name\":\s*\"([^\"]*)\"")


class Example(NamedTuple):
    """A text, and the characters of it that vary."""

    text: str
    start: int
    end: int


def common_length(texts: Sequence[str]) -> int:
    """Length in characters of the longest common prefix of the texts."""
    first, last = min(texts), max(texts)  # in sorted order, what the first and the last have in common all have
    low, high = 0, min(len(first), len(last))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if first[:middle] == last[:middle] else (low, middle - 1)
    return low


def kind_of(examples: Sequence[Example]) -> tuple[str, int]:
    """The kind of a varying part, and how many characters before `start`, equal in all texts, belong to it.

    Args:
        examples: texts that are equal in the characters right before `start`.
    """
    filled = [example for example in examples if example.end > example.start]
    head = 0
    if len(filled) < len(examples):  # prompts that lack the field lack the words around it, too
        head, filled = _inner(filled)
    for kind, pattern in PATTERNS:
        leads = [_lead(pattern, example) for example in filled]
        matching = [lead for lead in leads if lead is not None]
        if len(matching) >= _USUAL * len(filled):
            return kind, max(0, max(matching) - head)
    return "text", examples[0].start - word_start(examples[0].text, examples[0].start)


def _inner(examples: Sequence[Example]) -> tuple[int, list[Example]]:
    """The examples narrowed to what varies among them, and how many characters later that begins."""
    parts = [example.text[example.start : example.end] for example in examples]
    head = common_length(parts)
    tail = common_length([part[head:][::-1] for part in parts])
    if any(len(part) == head + tail for part in parts):
        return 0, list(examples)
    return head, [Example(each.text, each.start + head, each.end - tail) for each in examples]


def word_start(text: str, place: int) -> int:
    """The beginning of the word that contains `place`, at most `CONTEXT` characters before it."""
    start = place
    while start > max(0, place - CONTEXT) and (text[start - 1].isalnum() or text[start - 1] in "_-"):
        start -= 1
    return start


def word_rest(before: Sequence[str], behind: str) -> int:
    """Number of characters after a varying part that still belong to it, such as minutes that are equal by chance.

    Args:
        before: the last character of the varying part in each text; empty at the beginning of a text.
        behind: the text that follows the varying part in all texts.
    """
    return _REST.match(behind).end() if any(_INNER.fullmatch(last) for last in before) else 0  # type: ignore[union-attr]


def _lead(pattern: re.Pattern[str], example: Example) -> int | None:
    """How many characters before the varying part the match begins that covers most of it; None without such a
    match."""
    offset = max(0, example.start - CONTEXT)
    window = example.text[offset : example.end + _BEHIND]
    start, end = example.start - offset, example.end - offset
    for match in pattern.finditer(window):
        first, last = match.span("id") if "id" in pattern.groupindex and match["id"] else match.span()
        covered = min(last, end) - max(first, start)
        if covered > 0 and covered >= _COVERED * (end - start):
            return max(0, start - first)
    return None


def is_reordered(texts: Sequence[str]) -> bool:
    """Whether texts consist of the same words and signs, at least two words, in different orders."""
    words = [_WORDS.findall(text) for text in texts]
    expected = sorted(words[0])
    return len(set(expected)) > 2 and len(set(texts)) > 1 and all(sorted(some) == expected for some in words)


def order_kind(texts: Sequence[str]) -> str:
    """The kind of reordering between texts that consist of the same words."""
    names = [tuple(_NAMES.findall(text)) for text in texts]
    if len(set(names)) > 1:
        return "order of tools"
    return "order of keys" if all('":' in text for text in texts) else "order of parts"
