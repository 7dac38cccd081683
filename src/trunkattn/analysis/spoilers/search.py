"""What spoils sharing: prompts that part early because of one field, although they are equal again after it."""

import re
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.records import Log, Spoiler
from trunkattn.analysis.requests import Requests
from trunkattn.analysis.settings import Progress
from trunkattn.analysis.spoilers.alignment import MIN_SHARED, Field, Span, fields_of, groups_of, moved, spans_in
from trunkattn.analysis.spoilers.block_spoilers import BlockFinding, find_in_blocks, without_blocks
from trunkattn.analysis.spoilers.partings import Parting, num_leaving, partings

MOST: Final = 20  # spoilers that are reported
# The fewest requests outside the largest group at a place that is reported: as a number, and as a share of the log.
LEAST_REQUESTS: Final = 4
LEAST_SHARE: Final = 1 / 1000
_SAMPLE: Final = 48  # requests of a parting that are compared, in addition to two of each of the largest children
_LARGEST: Final = 16
_TRIED: Final = 8  # groups of a parting without a field after which the search there ends
_ROUNDS: Final = 32  # samples of one parting
_EXAMPLES: Final = 3
_EXAMPLE_LENGTH: Final = 200
_BATCH: Final = 256  # prompts that are encoded at once
# The marks with which chat templates, and our own rendering, begin a message of a role.
_ROLE: Final = re.compile(
    r"(?:<\|(?:im_start\|>|start_header_id\|>|start\|>)?|<start_of_turn>|<\uff5c)"
    r"(?P<role>system|developer|user|assistant|model|tool)|(?P<asks>\[INST\])|(?P<answers>\[/INST\])",
    re.IGNORECASE,
)
_SPOKEN: Final = frozenset({"user", "assistant", "model"})


@dataclass(frozen=True)
class TextFinding:
    """A spoiler, and what is needed to replay the log without it.

    Attributes:
        spoiler: the report's entry.
        members: positions in the log of the requests that have it, int64.
        fields: the fields that precede the finding's own in the same prompts and spoil more, then its own.
        model: the model prompt, in which the fields have their places.
    """

    spoiler: Spoiler
    members: NDArray[np.int64] = field(repr=False)
    fields: tuple[Field, ...] = field(repr=False)
    model: str = field(repr=False)


Finding: TypeAlias = TextFinding | BlockFinding


def find_spoilers(log: Log, progress: Progress | None = None) -> list[Finding]:
    """Finds fields that keep prompts from sharing what follows them.

    At each place where many prompts part, a sample of them is compared. A field is reported where a short part varies
    and at least as much text after it is equal again. Prompts that part because their own text begins have no such
    field. The gains are not filled in: `rewritten` makes the log whose replay shows them.

    Returns:
        At most `MOST` findings, the most expensive first. In a log without texts the findings are blocks, and there are
        some only if its hashes depend on a block's contents only.
    """
    least = max(LEAST_REQUESTS, int(len(log.requests) * LEAST_SHARE))
    found: list[Finding] = []
    if log.texts is not None:
        search = _Search(log, log.texts, least, np.zeros(len(log.requests), dtype=np.int64))
        places = partings(Requests.of(log.requests).blocks, least)
        for number, parting in enumerate(places):
            found += search.at(parting)
            if progress is not None:
                progress("aligning prompts", (number + 1) / len(places))
    elif log.contents is not None:
        found += find_in_blocks(log, least)
    worst_first = sorted(found, key=lambda it: -it.spoiler.num_requests * it.spoiler.shared_after)
    return worst_first[:MOST]


def rewritten(log: Log, finding: Finding, max_requests: int | None = None) -> Log:
    """The log as if the finding's field, and those before it in the same prompts, came after all that is shared.

    Fields move to the end of the prompt, or to the end of what all share within the message of a user.

    Args:
        log: the log in which the finding was found.
        finding: one of `find_spoilers`.
        max_requests: only the first `max_requests` requests are rewritten, because only these are replayed; None: all.
    """
    members = finding.members[finding.members < (max_requests or len(log.requests))].tolist()
    if isinstance(finding, BlockFinding):
        return without_blocks(log, finding, members)
    assert log.texts is not None and log.encode is not None
    new: dict[int, str] = {}
    for member in members:
        text = log.texts[member]
        new[member] = moved(text, spans_in(text, finding.model, finding.fields), finding.fields, finding.model)
    requests = list(log.requests)
    waiting = iter(new.items())
    while batch := list(islice(waiting, _BATCH)):
        for (member, _), encoded in zip(batch, log.encode([text for _, text in batch]), strict=True):
            requests[member] = replace(requests[member], num_prompt_tokens=encoded.num_tokens, blocks=encoded.blocks)
    return replace(log, requests=requests, texts=log.texts.replaced(new))


@dataclass
class _Search:
    """The search in one log.

    Attributes:
        log, texts: the log and its prompts.
        least: the fewest requests outside the largest group at a place that is searched.
        claimed: for each request, the end of the last field that was found in it, in characters. A parting before that
            end belongs to the same field.
    """

    log: Log
    texts: Sequence[str]
    least: int
    claimed: NDArray[np.int64]

    def at(self, parting: Parting) -> list[TextFinding]:
        """The findings at one place. If many applications part there, those with few requests are found in later
        samples, after the requests of the others have been taken out."""
        found: list[TextFinding] = []
        for _ in range(_ROUNDS):
            more = self._in_sample(parting)
            found += more
            explained = np.concatenate([np.zeros(0, np.int64), *(finding.members for finding in more)])
            rest = ~np.isin(parting.members, explained)
            parting = Parting(parting.depth, parting.members[rest], parting.children[rest])
            if not more or num_leaving(parting) < self.least:
                break
        return found

    def _in_sample(self, parting: Parting) -> list[TextFinding]:
        """The findings of which a sample of a parting's requests tells."""
        places = _sampled(parting)
        sample = [self.texts[parting.members[place]] for place in places]
        children = [int(parting.children[place]) for place in places]
        found: list[TextFinding] = []
        taken: set[int] = set()
        failed = 0
        for group in groups_of(sample, children):
            rest = [place for place in group if place not in taken]
            if len({children[place] for place in rest}) < 2:
                continue
            texts = [sample[place] for place in rest]
            fields = _movable(fields_of(texts), texts[0])
            group_found = self._findings(parting, fields, texts[0]) if fields else []
            if group_found:
                taken.update(rest)
                found += group_found
            elif (failed := failed + 1) == _TRIED:
                break
        return found

    def _findings(self, parting: Parting, fields: list[Field], model: str) -> list[TextFinding]:
        """A finding for each field that is in enough of a parting's requests, and varies in enough of them."""
        spans: dict[int, list[Span]] = {}
        varying: list[Counter[str]] = [Counter() for _ in fields]
        examples: list[dict[str, int]] = [{} for _ in fields]
        for member in parting.members.tolist():
            if self.claimed[member] > fields[0].start:
                continue
            text = self.texts[member]
            spans[member] = spans_in(text, model, fields)
            for counts, known, span in zip(varying, examples, spans[member], strict=False):
                part = text[span.start : span.end]
                counts[part] += 1
                if len(known) < _EXAMPLES:
                    known.setdefault(part, member)
        found = []
        for number, (counts, known) in enumerate(zip(varying, examples, strict=True)):
            if counts.total() - max(counts.values(), default=0) < self.least:
                break
            members = np.array([member for member, some in spans.items() if len(some) > number], dtype=np.int64)
            self.claimed[members] = [spans[member][number].end for member in members.tolist()]
            chosen = tuple(fields[: number + 1])
            spoiler = self._spoiler(members, [spans[member][number] for member in members.tolist()], chosen, model)
            lines = [self.log.requests[member].line for member in known.values()]
            found.append(
                TextFinding(
                    replace(spoiler, examples=[part[:_EXAMPLE_LENGTH] for part in known], lines=lines),
                    members,
                    chosen,
                    model,
                )
            )
        return found

    def _spoiler(self, members: NDArray[np.int64], spans: list[Span], fields: tuple[Field, ...], model: str) -> Spoiler:
        assert self.log.encode is not None
        lengths = np.array([self.log.requests[member].num_prompt_tokens for member in members.tolist()])
        num_characters = np.array([len(self.texts[member]) for member in members.tolist()])
        rates = lengths / num_characters
        last = fields[-1]
        shared = round(float(np.mean(rates * [span.stop - span.end for span in spans])))
        before = model[: last.start]
        token = self.log.encode([before])[0].num_tokens if before else 0
        end = "within its message" if last.is_bound else "best to the end of the prompt"
        moving = f"Move it after the {shared:,} tokens that follow it, which are equal in all of these prompts, {end}."
        if len(fields) > 1:
            moving += " Move what varies before it, too."
        return Spoiler(
            kind=last.kind,
            where=f"{_role(before) or 'prompt'}, token {token:,} of {round(float(lengths.mean())):,}",
            num_requests=len(members),
            token=token,
            shared_after=shared,
            varying_tokens=float(np.mean(rates * [span.end - span.start for span in spans])),
            examples=[],
            lines=[],
            advice="Write it in the same order in every prompt, such as sorted." if last.is_order else moving,
        )


def _sampled(parting: Parting) -> list[int]:
    """The members of a parting that are compared: some at equal distances, and two of each large child."""
    count = len(parting.members)
    chosen = set(np.linspace(0, count - 1, min(count, _SAMPLE)).round().astype(int).tolist())
    sizes = np.bincount(parting.children)
    for child in np.argsort(-sizes, kind="stable")[:_LARGEST]:
        chosen.update(np.flatnonzero(parting.children == child)[:2].tolist())
    return sorted(chosen)


def _movable(fields: list[Field], model: str) -> list[Field]:
    """The fields up to the last that can be moved. A field in a message of the user or the model stays in its
    message."""
    for number, one in enumerate(fields):
        if _role(model[: one.start]) not in {f"{role} message" for role in _SPOKEN}:
            continue
        border = _ROLE.search(one.shared)
        if border is None:
            continue
        cut = replace(one, shared=one.shared[: border.start()], is_bound=True)
        return [*fields[:number], *([cut] if len(cut.shared) >= MIN_SHARED else [])]
    return fields


def _role(text: str) -> str | None:
    """The message in which a text ends, such as "user message"; None if the text has no mark of a chat template."""
    last = deque(_ROLE.finditer(text), maxlen=1)
    if not last:
        return None
    role = last[0]["role"] or ("user" if last[0]["asks"] else "assistant")
    return "tools" if role.lower() == "tool" else f"{role.lower()} message"
