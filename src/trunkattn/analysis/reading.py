"""Logs of any known format, read a line at a time into the records that an analysis replays."""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkattn.analysis.figures import plural
from trunkattn.analysis.files import contents_of, files_of
from trunkattn.analysis.formats.base import Entry, Fields, Format, Hashes, Line, Repeated, TokenIds, Told
from trunkattn.analysis.formats.table import FORMATS, format_named, format_of
from trunkattn.analysis.records import Encoded, Log, LoggedRequest, SkippedLine
from trunkattn.analysis.settings import Progress
from trunkattn.analysis.texts import Texts
from trunkattn.analysis.tokens import (
    ByteEstimate,
    Encoder,
    encode_hashes,
    encode_tokens,
    measured_estimate,
    mixed,
    read_tokenizer,
)
from trunkattn.validate import expanded

LINES_TO_RECOGNISE: Final = 100  # of which the first one that is known says the format
_NAME: Final = re.compile(r"[\w.:-]{1,40}")
ENTRIES_TO_MEASURE: Final = 1000  # by which bytes per token are estimated
BATCH: Final = 256  # prompts that are tokenized at once
SKIPPED_KEPT: Final = 20
SAMPLED_HASHES: Final = 1 << 20  # by which one sees whether hashes depend on what precedes their block


def read_log(
    path: str | Path,
    *,
    format: str = "auto",
    tokenizer: str | Path | None = None,
    strict: bool = False,
    progress: Progress | None = None,
) -> Log:
    """Reads a log of requests.

    Args:
        path: a file (JSON lines, a JSON array, CSV or Parquet; plain, gzip or Zstandard, told by its contents), a
            folder of such files, or a folder of texts that are one prompt each.
        format: name of the format, one of `formats.table.FORMATS`; "auto": the lines tell.
        tokenizer: folder of a tokenizer of transformers, or a GGUF file, for logs with text; None: an estimate.
        strict: whether the first line that is wrong ends the reading, and times that run backwards do. Else such lines
            are left out and counted, and requests are sorted by their times.
        progress: see `Progress`.

    Returns:
        The log, its requests in order of arrival.

    Raises:
        ValueError: one sentence that names the file and the line: nothing is there, the format is not known, no line
            could be taken, a package is missing, or, with `strict`, a line is wrong.
    """
    place = expanded(path)
    name = place.name or str(place.resolve())
    chosen = None if format == "auto" else format_named(format)
    total = sum(file.stat().st_size for file in files_of(place))
    done = 0

    def read(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(f"reading {name}", min(1.0, done / max(1, total)))

    encoder = None if tokenizer is None else read_tokenizer(tokenizer)
    contents = contents_of(place, read)
    tally = _Tally(name, contents.unit, strict)
    lines = contents.lines
    if chosen is None:
        chosen, lines = _recognised(lines, tally)
    entries = tally.entries(chosen.parse(tally.lines(lines)))
    first = list(islice(entries, ENTRIES_TO_MEASURE))
    collected = _Collected(encoder or measured_estimate(first), tally)
    collected.take(chain(first, entries))
    log = collected.log(chosen) if collected.requests else None
    tally.stop_at_fault()
    if log is None:
        raise ValueError(tally.nothing_taken())
    return log


def _recognised(lines: Iterator[Line | SkippedLine], tally: "_Tally") -> tuple[Format, Iterator[Line | SkippedLine]]:
    """The format of the first line that is known, and the lines from the first that holds an object on."""
    seen: list[Line | SkippedLine] = []
    objects: list[Line] = []
    for line in lines:
        if not objects and not isinstance(line, Line):
            tally.count(line)
            tally.stop_at_fault()
            continue
        seen.append(line)
        if isinstance(line, Line):
            objects.append(line)
            found = format_of(line.fields)
            if found is not None:
                return found, chain(seen, lines)
        if len(objects) == LINES_TO_RECOGNISE:
            break
    if not objects:
        raise ValueError(tally.nothing_taken())
    names = ", ".join(known.name for known in FORMATS)
    raise ValueError(
        f"{tally.source}: no known format; {tally.unit} {objects[0].number} has {_names(objects[0].fields)}; expected "
        f"one of {names}"
    )


def _names(fields: Fields) -> str:
    """Some fields' names. What has spaces is not quoted: a table without names has texts in their place."""
    names = [name if _NAME.fullmatch(name) else "a text" for name in fields][:8]
    return f"the fields {', '.join(names)}{', …' if len(fields) > 8 else ''}" if names else "no fields"


@dataclass
class _Tally:
    """Lines that were seen and lines that were left out.

    With `strict`, reading ends at the first line with a fault. That line is reported only after all requests before it
    have been checked, because some of them still wait in a batch and may have a fault, too.
    """

    source: str
    unit: str
    strict: bool
    fault: SkippedLine | None = None
    num_lines: int = 0
    num_skipped: int = 0
    skipped: list[SkippedLine] = field(default_factory=list)
    repeated: list[Repeated] = field(default_factory=list)

    def skip(self, line: SkippedLine) -> None:
        """Counts a line that is left out."""
        self.find(line)
        self.num_skipped += 1
        if len(self.skipped) < SKIPPED_KEPT:
            self.skipped.append(line)

    def find(self, line: SkippedLine) -> None:
        """Notes a fault if reading is strict and no earlier line has one."""
        if self.strict and (self.fault is None or line.line < self.fault.line):
            self.fault = line

    def stop_at_fault(self) -> None:
        """Raises ValueError that names the first line with a fault and how many stand before it, if there is one."""
        if self.fault is not None:
            right = f"strict ends the reading here, after {plural(self.fault.line - 1, self.unit)} without a fault"
            raise ValueError(f"{self.source}, {self.unit} {self.fault.line}: {self.fault.reason}; {right}")

    def lines(self, lines: Iterable[Line | SkippedLine]) -> Iterator[Line]:
        """The lines that hold an object."""
        for line in lines:
            self.count(line)
            if self.fault is not None:
                return
            if isinstance(line, Line):
                yield line

    def count(self, line: Line | SkippedLine) -> None:
        """Counts a line."""
        self.num_lines += 1
        if isinstance(line, SkippedLine):
            self.skip(line)

    def entries(self, entries: Iterable[Told]) -> Iterator[Entry]:
        """The entries of lines without a fault. Iteration ends at a fault, so a format's final remarks about repeated
        calls, which need all lines, are not read then."""
        for entry in entries:
            if self.fault is not None:
                return
            if isinstance(entry, Entry):
                yield entry
            elif isinstance(entry, Repeated):
                self.repeated.append(entry)
            else:
                self.skip(entry)

    def nothing_taken(self) -> str:
        """Why there is no log, in a sentence."""
        if not self.num_lines:
            return f"{self.source}: it is empty; expected a log with a request on each line"
        units = plural(self.num_lines, self.unit)
        if not self.skipped:
            return f"{self.source}: none of its {units} holds a request"
        worst = self.skipped[0]
        count = f"none of its {units} could be taken" if self.num_lines > 1 else "nothing taken"
        return f"{self.source}: {count}; {self.unit} {worst.line}: {worst.reason}"


@dataclass
class _Collected:
    """Requests in the order in which they are read, with what is needed to finish a log of them."""

    encoder: Encoder
    tally: _Tally
    requests: list[LoggedRequest] = field(default_factory=list)
    arrivals: list[float | None] = field(default_factory=list)
    turns: list[int | None] = field(default_factory=list)
    texts: Texts = field(default_factory=Texts)
    contents: list[NDArray[np.int64]] = field(default_factory=list)
    places: dict[int, int] = field(default_factory=dict)  # call number -> place among the requests
    parts: dict[int, int] = field(default_factory=dict)  # number of the newest request of each line, from 0
    tokens_told: int = 0
    tokens_found: int = 0

    def take(self, entries: Iterator[Entry]) -> None:
        """Encodes entries, a batch at a time."""
        while batch := list(islice(entries, BATCH)):
            rendered: dict[int, str] = {}
            for place, entry in enumerate(batch):
                text = self._text(entry)
                if text is not None:
                    rendered[place] = text
            encoded = dict(zip(rendered, self.encoder.encode(list(rendered.values())), strict=True))
            for place, entry in enumerate(batch):
                if isinstance(entry.prompt, Hashes):
                    self.contents.append(entry.prompt.ids)
                    self._add(entry, encode_hashes(entry.prompt, len(self.requests)))
                elif place in encoded:
                    self._add(entry, encoded[place])
                elif isinstance(entry.prompt, TokenIds):
                    self._add(entry, encode_tokens(entry.prompt.ids))

    def _text(self, entry: Entry) -> str | None:
        """The text of a prompt; None if it has only hashes or token ids, or is left out."""
        if isinstance(entry.prompt, Hashes):
            return None
        if isinstance(entry.prompt, TokenIds):
            return self.encoder.decode(entry.prompt.ids)
        try:
            text = self.encoder.render(entry.prompt)
        except ValueError as error:
            self.tally.skip(SkippedLine(entry.line, str(error)))
            return None
        if not text:
            self.tally.skip(SkippedLine(entry.line, "its prompt is empty; expected a text"))
        return text or None

    def _add(self, entry: Entry, encoded: Encoded) -> None:
        if entry.num_prompt_tokens is not None and encoded.text is not None:
            self.tokens_told += entry.num_prompt_tokens
            self.tokens_found += encoded.num_tokens
        num_output_tokens = entry.num_output_tokens
        if num_output_tokens is None and entry.answer is not None:
            num_output_tokens = self.encoder.count(entry.answer)
        self.arrivals.append(entry.arrival)
        self.turns.append(entry.turn)
        if encoded.text is not None:
            self.texts.fill(len(self.requests))
            self.texts.append(encoded.text)
        if entry.call is not None:
            self.places[entry.call] = len(self.requests)
        part = self.parts[entry.line] = self.parts.get(entry.line, -1) + 1
        self.requests.append(
            LoggedRequest(
                line=entry.line,
                arrival=None,
                num_prompt_tokens=encoded.num_tokens,
                num_output_tokens=num_output_tokens,
                blocks=encoded.blocks,
                block_size=encoded.block_size,
                num_answers=entry.num_answers,
                session=entry.session,
                model=entry.model,
                part=part,
            )
        )

    def log(self, chosen: Format) -> Log:
        """The log of all that was taken."""
        if self.texts:
            self.texts.fill(len(self.requests))
        has_contents = len(self.contents) == len(self.requests) and depend_on_contents_alone(self.contents)
        repeated = self._repeated()
        order = self._order(repeated)
        late = self._late(order)
        return Log(
            source=self.tally.source,
            format=chosen.title,
            requests=self._finished(order),
            num_lines=self.tally.num_lines,
            unit=self.tally.unit,
            num_out_of_order=len(late),
            num_skipped=self.tally.num_skipped,
            skipped=sorted(self.tally.skipped, key=lambda skipped: skipped.line),
            tokens_from=self._tokens_from(),
            assumptions=self._assumptions(has_contents, late, len(repeated)),
            texts=self.texts.taken(order) if self.texts else None,
            encode=self.encoder.encode if self.texts else None,
            contents=[self.contents[place] for place in order] if has_contents else None,
        )

    def _tokens_from(self) -> str:
        """Where counts and blocks come from, for people."""
        if self.texts:
            return self.encoder.tokens_from
        if len(self.contents) < len(self.requests):
            return "token ids"
        return "block hashes" if any(len(ids) for ids in self.contents) else "the log's own counts"

    def _repeated(self) -> set[int]:
        """The places of calls that repeat another call. Each first gives that call the fields that it lacks."""
        found: set[int] = set()
        for call, kept, is_same in self.tally.repeated:
            place, other = self.places.get(call), self.places.get(kept)
            if place is None or other is None:
                continue
            found.add(place)
            if is_same:
                mine, its = self.requests[place], self.requests[other]
                known = mine.num_output_tokens if its.num_output_tokens is None else its.num_output_tokens
                session, model = its.session or mine.session, its.model or mine.model
                self.requests[other] = replace(its, num_output_tokens=known, session=session, model=model)
        return found

    def _order(self, repeated: set[int]) -> list[int]:
        """The places of the requests that stay, in order of arrival; requests of one moment keep the log's order. If
        some requests have times, those without are left out, because their place is unknown."""
        places = [place for place in range(len(self.requests)) if place not in repeated]
        timed = [place for place in places if self.arrivals[place] is not None]
        if not timed:
            return places
        for place in places:
            if self.arrivals[place] is None:
                line = self.requests[place].line
                self.tally.skip(SkippedLine(line, "it has no time, and other requests of the log have one"))
        return sorted(timed, key=lambda place: (self.arrivals[place] or 0.0, self.requests[place].key))

    def _finished(self, order: Sequence[int]) -> list[LoggedRequest]:
        """The requests in order, with their turns and their times since the first request."""
        start = self.arrivals[order[0]]
        counts: dict[str, int] = {}
        finished = []
        for place in order:
            request, arrival, turn = self.requests[place], self.arrivals[place], self.turns[place]
            if request.session is not None:
                turn = counts.get(request.session, 0) if turn is None else turn
                counts[request.session] = turn + 1
            since = None if arrival is None or start is None else arrival - start
            finished.append(replace(request, arrival=since, turn=turn or 0))
        return finished

    def _late(self, order: Sequence[int]) -> list[int]:
        """The lines of requests that arrived before a request further up. The first of them is noted as a fault."""
        by_line = sorted(order, key=lambda place: self.requests[place].line)
        arrivals = np.array([self.arrivals[place] or 0.0 for place in by_line])
        latest = np.maximum.accumulate(arrivals) if len(arrivals) else arrivals
        late = np.flatnonzero(arrivals < latest).tolist()
        for place in late[:1]:
            back = f"its time is {latest[place] - arrivals[place]:g} s before that of a request further up"
            line = self.requests[by_line[place]].line
            self.tally.find(SkippedLine(line, f"{back}; expected times that do not run backwards"))
        return [self.requests[by_line[place]].line for place in late]

    def _assumptions(self, has_contents: bool, late: Sequence[int], num_repeated: int) -> list[str]:
        found = []
        if num_repeated:
            found.append(
                "Each call counts once: what tells of one again, by the same id or as a span around it, is left out "
                f"({plural(num_repeated, 'time')})."
            )
        if late:
            found.append(
                f"{plural(len(late), 'request')} out of order, the first in {self.tally.unit} {late[0]:,}: all are "
                "replayed in the order of their times."
            )
        told, counted = self.tokens_told, self.tokens_found
        if not isinstance(self.encoder, ByteEstimate) and told and abs(counted / told - 1) > 0.02:
            found.append(
                f"The log counts {told:,} prompt tokens, and {self.encoder.tokens_from} counts {counted:,}; the latter "
                f"are used."
            )
        if not any(len(ids) for ids in self.contents) and self.contents and not self.texts:
            found.append("The log has neither prompts nor block hashes, so no prompt is known to be shared.")
        elif self.contents and not self.texts and not has_contents:
            found.append(
                "The log's hashes are of all that precedes a block, so they tell no field that spoils sharing."
            )
        if any(arrival is None for arrival in self.arrivals[:1]):
            found.append("The log has no times, so it says nothing about which requests ran together.")
        return found


def depend_on_contents_alone(blocks: Sequence[NDArray[np.int64]]) -> bool:
    """Whether a log's hashes depend on a block's contents only: then a hash recurs after different predecessors."""
    ids = np.concatenate([np.zeros(0, np.int64), *blocks])
    before = np.roll(ids, 1)
    starts = np.cumsum([0, *(len(some) for some in blocks)])
    before[starts[starts < len(ids)]] = -1
    rarely = np.uint64(max(1, len(ids) // SAMPLED_HASHES))
    sampled = mixed(ids.view(np.uint64)) % rarely == 0
    ids, before = ids[sampled], before[sampled]
    order = np.lexsort((before, ids))
    comes_again = np.diff(ids[order]) == 0
    behind_other = comes_again & (np.diff(before[order]) != 0)
    return int(behind_other.sum()) > 0.01 * int(comes_again.sum())
