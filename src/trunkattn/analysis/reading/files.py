"""Files of logs: lines, JSON arrays and documents, tables, folders; compressed or not, told by their contents."""

import csv
import io
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from trunkattn.analysis.formats.base import Line, decoded
from trunkattn.analysis.reading.compression import COMPRESSED, GZIP, READ_BYTES, ZSTD, Read, opened, plain
from trunkattn.analysis.reading.parquet import rows_of
from trunkattn.analysis.records import SkippedLine

LOG_SUFFIXES: Final = frozenset({".jsonl", ".ndjson", ".json", ".log", ".csv", ".parquet"})
_PARQUET, _MARK = b"PAR1", b"\xef\xbb\xbf"
_COLUMNS: Final = frozenset(
    {b"Timestamp", b"timestamp", b"prompt", b"messages", b"hash_ids", b"startTime", b"start_time"}
)
_TEXTS: Final = frozenset({"prompt", "text", "answer", "completion", "generated_text"})  # columns of a table
_TEXTS_OR_BODIES: Final = _TEXTS | {"input", "output", "response"}
_NUMBER: Final = re.compile(r"-?(0|[1-9][0-9]{0,399})(\.[0-9]{1,99})?([eE][+-]?[0-9]{1,2})?")
_DEPTH: Final = MappingProxyType({"[": 1, "]": -1})  # how a bracket changes the number of lists that are open
_AFTER_ALL: Final = "\U0010ffff"  # the last character in the order of texts
_OBJECT: Final = "expected a JSON object"
_END: Final = "nothing after it is read"
_MOST_CHARACTERS: Final = (1 << 31) - 1  # of a table's cell; csv's own limit is less than a long prompt


class Contents(NamedTuple):
    """What a file or a folder holds: its lines, and what they are called, for people."""

    unit: str
    lines: Iterator[Line | SkippedLine]


def files_of(path: Path) -> list[Path]:
    """The file, or the files of a folder and of the folders in it, in order of their names; hidden ones are left out.

    A name that goes on, such as app.log.1, is that of an older file, which comes before app.log. A file with two names,
    by a link such as latest.jsonl, is taken once. Where some names are those of logs, other files are left out.

    Raises:
        ValueError: there is no such file, or the folder is empty, or one in it cannot be read, or what has the name of
            a log is no file.
    """
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: {_no_file(path)}; expected a log")
    inner = (file.relative_to(path) for file in _inside(path) if file.is_file() or is_log(file))
    found = [path / file for file in sorted(inner, key=lambda file: f"{file}{_AFTER_ALL}")]
    if not found:
        raise ValueError(f"{path}: the folder is empty; expected logs, or texts that are one prompt each")
    found = [file for file in found if is_log(file)] or found
    for file in found:
        if not file.is_file():
            raise ValueError(f"{file}: {_no_file(file)}; expected a file, or no such name in the folder")
    own_names_first = sorted(found, key=Path.is_symlink)
    kept = {(file.stat().st_dev, file.stat().st_ino): file for file in reversed(own_names_first)}
    return [file for file in found if file in kept.values()]


def _no_file(path: Path) -> str:
    """Why nothing can be read at a path."""
    if path.is_symlink() and not path.exists():
        return "it is a link that leads to no file"
    return "it is no file, but a pipe or a device" if path.exists() else "there is no such file or folder"


def _inside(folder: Path) -> Iterator[Path]:
    """All files in a folder and in the folders in it, but hidden ones and those that a disk's repair has found. Raises
    ValueError if a folder cannot be read."""

    def refuse(error: OSError) -> None:
        raise ValueError(
            f"{error.filename}: it cannot be read: {error.strerror}; expected a folder that you may read"
        ) from error

    for inner, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name != "lost+found"]
        yield from (Path(inner, name) for name in names if not name.startswith("."))


def is_log(file: Path) -> bool:
    """Whether a file's name says that it is a log, not a text."""
    suffixes = [suffix.lower() for suffix in file.suffixes if suffix.lower() not in COMPRESSED]
    return any(suffix in LOG_SUFFIXES for suffix in suffixes)


def contents_of(path: Path, read: Read = lambda count: None) -> Contents:
    """Reads a log of one or several files, a line at a time.

    Raises:
        ValueError: there is nothing to read. Later, from the iterator: a file is damaged, or needs a package.
    """
    files = files_of(path)
    if path.is_file():
        return _of_file(path, read)
    return Contents("line", _chained(files, read)) if is_log(files[0]) else Contents("file", _texts(files, read))


def _chained(files: list[Path], read: Read) -> Iterator[Line | SkippedLine]:
    """Lines of all files, counted on from file to file."""
    before = 0
    for file in _without_copies(files, read):
        number = 0
        for line in _of_file(file, read).lines:
            number = line.number if isinstance(line, Line) else line.line
            if isinstance(line, Line):
                yield Line(before + number, line.fields)
            else:
                yield SkippedLine(before + number, line.reason)
        before += number


def _texts(files: list[Path], read: Read) -> Iterator[Line | SkippedLine]:
    """Each file is one prompt."""
    for number, file in enumerate(_without_copies(files, read), start=1):
        try:
            with opened(file, read) as stream:
                text = stream.read().decode("utf-8-sig")
        except UnicodeDecodeError:
            yield SkippedLine(number, "it is not a text in UTF-8")
            continue
        yield Line(number, {"prompt": text}) if text else SkippedLine(number, "it is empty")


def _without_copies(files: list[Path], read: Read) -> Iterator[Path]:
    """The files without copies: of those with the same contents whose names differ only by compression, such as a.log
    and a.log.gz, the first stays. The bytes of the others count as read."""
    by_name: dict[Path, list[Path]] = {}
    for file in files:
        known = by_name.setdefault(file.with_suffix("") if file.suffix.lower() in COMPRESSED else file, [])
        if any(_holds_the_same(file, other) for other in known):
            read(file.stat().st_size)
            continue
        known.append(file)
        yield file


def _holds_the_same(file: Path, other: Path) -> bool:
    """Whether two files hold the same bytes once they are decompressed."""
    with opened(file, lambda count: None) as first, opened(other, lambda count: None) as second:
        while (part := first.read(READ_BYTES)) == second.read(READ_BYTES):
            if not part:
                return True
    return False


def _of_file(file: Path, read: Read) -> Contents:
    with plain(file) as stream:
        start = stream.read(4)
    if start == _PARQUET:
        return Contents("row", _rows(file, read))
    with opened(file, lambda count: None) as stream:
        head = stream.read(READ_BYTES).removeprefix(_MARK).lstrip()
    if head.startswith((_PARQUET, GZIP, ZSTD)):
        raise ValueError(
            f"{file} holds a compressed file or a Parquet file: expected the text of a log; unpack it first"
        )
    if _begins_array(head) or _begins_document(head):
        return Contents("entry", _entries(file, read))
    if _begins_table(head, ".csv" in file.name.lower()):
        return Contents("row", _table(file, read))
    return Contents("line", _lines(file, read))


def _begins_array(head: bytes) -> bool:
    """Whether a file begins with a JSON array. A line of a program's log may begin with a time in brackets."""
    return head[:1] == b"[" and head[1:].lstrip()[:1] in (b"{", b"[", b"]", b'"', b"")


def _begins_table(head: bytes, is_named: bool) -> bool:
    """Whether a file begins with the names of a table's columns. Where its own name does not say so, such as that of
    standard input, there are several, and one of them is known."""
    line, _, _ = head.partition(b"\n")
    if head[:1] in (b"{", b""):
        return False
    cells = line.split(b",")
    return is_named or (len(cells) > 1 and not _COLUMNS.isdisjoint(cell.strip(b' "\r') for cell in cells))


def _begins_document(head: bytes) -> bool:
    """Whether a file begins with an object that goes on after its first line."""
    line, newline, rest = head.partition(b"\n")
    if not newline or line[:1] != b"{":
        return False
    return rest.lstrip()[:1] == b'"' if line.strip() == b"{" else _ends_behind(head, len(line))


def _ends_behind(head: bytes, place: int) -> bool:
    """Whether the object with which a file begins is a whole one that ends after a place."""
    try:
        text = head.decode("utf-8", "replace")
        return len(text[: json.JSONDecoder().raw_decode(text)[1]].encode()) > place
    except (ValueError, RecursionError):
        return False


def _lines(file: Path, read: Read) -> Iterator[Line | SkippedLine]:
    """Lines of JSON; empty ones are left out."""
    with opened(file, read) as stream:
        for number, line in enumerate(stream, start=1):
            text = line.removeprefix(_MARK).strip()  # files that were joined have several marks
            if text:
                yield _parsed(number, text)


def _parsed(number: int, text: bytes) -> Line | SkippedLine:
    try:
        return _line(number, json.loads(text.decode("utf-8")))
    except (ValueError, RecursionError) as error:
        place = f", column {error.colno}" if isinstance(error, json.JSONDecodeError) else ""
        return SkippedLine(number, f"{_not_json(error, place)}; {_OBJECT}")


def _not_json(error: ValueError | RecursionError, place: str = "") -> str:
    """What is wrong with something that is to be JSON, without any of it. place: where, for people."""
    if isinstance(error, UnicodeDecodeError):
        return "it is not text in UTF-8"
    if isinstance(error, json.JSONDecodeError):
        return f"it is not JSON ({error.msg}{place})"
    deep = isinstance(error, RecursionError)
    return f"it is not JSON ({'lists or objects within each other, too deep' if deep else 'a number too long'})"


def _line(number: int, value: Any) -> Line | SkippedLine:
    if isinstance(value, dict):
        return Line(number, value)
    kind = {list: "a list", str: "a text", type(None): "null"}.get(type(value), "a number")
    return SkippedLine(number, f"it is {kind}; {_OBJECT}")


def _entries(file: Path, read: Read) -> Iterator[Line | SkippedLine]:
    """The objects of a JSON array, or JSON objects one after the other, each over any number of lines. Where one that
    is wrong ends is not known, so it is the last."""
    number = 0
    with opened(file, read) as stream:
        try:
            for value in _values(io.TextIOWrapper(stream, encoding="utf-8-sig")):
                number += 1
                yield _line(number, value)
        except (ValueError, RecursionError) as error:
            yield SkippedLine(number + 1, f"{_not_json(error)}; {_OBJECT}, and {_END}")


def _values(stream: io.TextIOBase) -> Iterator[Any]:
    """JSON values between brackets, commas and spaces. A value that is cut is tried again with twice as much text.
    Raises ValueError where one is wrong, or if the brackets do not close: then values may be missing."""
    decoder = json.JSONDecoder()
    text, start, size, depth = "", 0, READ_BYTES, 0
    while True:
        more = stream.read(size)
        text, start = text[start:] + more, 0
        while True:
            while start < len(text) and text[start] in " \t\r\n,[]":
                depth += _DEPTH.get(text[start], 0)
                start += 1
            if start == len(text):
                break
            try:
                value, start = decoder.raw_decode(text, start)
            except json.JSONDecodeError:
                if not more:
                    raise
                break
            size = READ_BYTES
            yield value
        if not more and depth > 0:
            raise json.JSONDecodeError("its list does not end", text, start)
        if not more:
            return
        size = max(READ_BYTES, len(text) - start)


def _table(file: Path, read: Read) -> Iterator[Line | SkippedLine]:
    """Rows of a table in CSV, by the names in its first line."""
    csv.field_size_limit(_MOST_CHARACTERS)
    number = 0
    with opened(file, read) as stream:
        try:
            table = csv.DictReader(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""), strict=True)
            _check_commas(file, table.fieldnames or ())
            for row in table:
                number += 1
                if any(row.pop(None, ())):
                    yield SkippedLine(number, "it has more cells than there are names; expected quotes around a comma")
                else:
                    yield Line(number, {str(name): _cell(str(name), value) for name, value in row.items()})
        except (UnicodeDecodeError, csv.Error) as error:
            wrong = "text in UTF-8" if isinstance(error, UnicodeDecodeError) else f"CSV ({error})"
            yield SkippedLine(number + 1, f"it is not {wrong}; expected a row, and {_END}")


def _check_commas(file: Path, names: Sequence[str]) -> None:
    """Raises ValueError if other signs than commas separate the names of a table's columns."""
    for sign, called in ((";", "semicolons"), ("\t", "tabs")):
        if len(names) == 1 and sign in names[0]:
            raise ValueError(f"{file}: {called} separate the names of its columns; expected commas")


def _cell(name: str, value: Any) -> Any:
    """A cell of a table in CSV: a number where the column may hold one, nothing where the cell is empty, or JSON. What
    no number is written as, such as the id 007, stays a text."""
    if value == "":
        return None
    if isinstance(value, str) and name not in _TEXTS_OR_BODIES and _NUMBER.fullmatch(value.strip()):
        return float(value) if set(value) & set(".eE") else int(value)
    return _without_json(name, value)


def _rows(file: Path, read: Read) -> Iterator[Line | SkippedLine]:
    """Rows of a table in Parquet."""
    for number, row in enumerate(rows_of(file), start=1):
        yield Line(number, {name: _without_json(name, value) for name, value in row.items()})
    read(file.stat().st_size)


def _without_json(name: str, value: Any) -> Any:
    """A cell. Tables hold messages and the like as JSON, which is parsed, but a prompt or an answer in JSON is a text:
    only messages and token ids may stand in its place."""
    if not isinstance(value, str) or value[-1:] not in ("]", "}"):
        return value
    inner = decoded(value)
    stands_for_text = isinstance(inner, list) and all(isinstance(item, Mapping | int) for item in inner)
    return inner if name not in _TEXTS or stands_for_text else value
