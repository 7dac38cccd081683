"""Logs of any known format, read a line at a time into the records that an analysis replays."""

import re
from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Final

from trunkattn.analysis.formats.base import Fields, Format, Line
from trunkattn.analysis.formats.table import FORMATS, format_named, format_of
from trunkattn.analysis.reading.collected import Collected
from trunkattn.analysis.reading.files import contents_of, files_of
from trunkattn.analysis.reading.finished_log import finished_log
from trunkattn.analysis.reading.tally import Tally
from trunkattn.analysis.reading.tokens import measured_estimate, read_tokenizer
from trunkattn.analysis.records import Log, SkippedLine
from trunkattn.analysis.settings import Progress
from trunkattn.validate import expanded

LINES_TO_RECOGNISE: Final = 100  # of which the first one that is known says the format
_NAME: Final = re.compile(r"[\w.:-]{1,40}")
ENTRIES_TO_MEASURE: Final = 1000  # by which bytes per token are estimated


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
    tally = Tally(name, contents.unit, strict)
    lines = contents.lines
    if chosen is None:
        chosen, lines = _recognised(lines, tally)
    entries = tally.entries(chosen.parse(tally.lines(lines)))
    first = list(islice(entries, ENTRIES_TO_MEASURE))
    collected = Collected(encoder or measured_estimate(first), tally)
    collected.take(chain(first, entries))
    log = finished_log(collected, chosen) if collected.requests else None
    tally.stop_at_fault()
    if log is None:
        raise ValueError(tally.nothing_taken())
    return log


def _recognised(lines: Iterator[Line | SkippedLine], tally: Tally) -> tuple[Format, Iterator[Line | SkippedLine]]:
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
