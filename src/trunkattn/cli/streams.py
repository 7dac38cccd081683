"""Reads and writes the files, folders, pipes and standard streams that commands name."""

import codecs
import io
import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO, cast

import typer

from trunkattn.interrupts import temporary_folder

STANDARD_STREAM: Final = Path("-")


class _Whole(io.RawIOBase):
    """Writes all that it is given to another stream. One without a buffer (PYTHONUNBUFFERED) writes as much as fits."""

    def __init__(self, stream: io.TextIOWrapper) -> None:
        self._stream = stream  # kept alive, because it closes its buffer when it goes

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, data: Any) -> int:
        left, buffer = memoryview(data), cast(Any, self._stream.buffer)
        while left:
            left = left[buffer.write(left) or 0 :]
        buffer.flush()
        return len(data)


class _WithoutErrors(_Whole):
    """Drops what the other stream cannot write."""

    def write(self, data: Any) -> int:
        with suppress(OSError):
            super().write(data)
        return len(data)


def prepare_standard_streams() -> None:
    """Makes the standard streams safe, so that a command fails only if its work does.

    Characters that the encoding of a stream lacks are escaped. What a stream without a buffer writes in part is gone on
    with, so that a full disk is an error there, too. Errors of standard error are ignored, such as a full
    disk, because a progress bar is not worth an answer. A closed stream is replaced by /dev/null, also at the level of
    file descriptors: otherwise the next file or connection would get its number, and libraries would write into that.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest free number
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 it stays open
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    if isinstance(sys.stdout, io.TextIOWrapper) and isinstance(sys.stdout.buffer, io.RawIOBase):
        sys.stdout = text_of(_Whole(sys.stdout), sys.stdout)
    if isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = text_of(_WithoutErrors(sys.stderr), sys.stderr)


def text_of(raw: Any, stream: TextIO) -> io.TextIOWrapper:
    """A stream of text over one of bytes, which gets it at once. stream: the one that it stands for."""
    return io.TextIOWrapper(raw, stream.encoding, stream.errors, write_through=True)


@contextmanager
def as_file(path: Path) -> Iterator[Path]:
    """The path of a file or folder. Data from a pipe or standard input ("-") is first copied to a temporary file, which
    lives as long as the context, because a log is read more than once.

    Raises:
        ValueError: the disk is full, or standard input is closed.
    """
    if path != STANDARD_STREAM and (path.is_file() or path.is_dir()):
        yield path
        return
    if path == STANDARD_STREAM and sys.stdin is None:
        raise ValueError(f"log={str(path)!r}: expected standard input that is open, and it is closed")
    with temporary_folder() as folder:
        copy = folder / ("standard input" if path == STANDARD_STREAM else path.name)
        try:
            with sys.stdin.buffer if path == STANDARD_STREAM else path.open("rb") as source, copy.open("wb") as target:
                shutil.copyfileobj(source, target)
        except OSError as error:
            raise ValueError(
                f"log={str(path)!r}: it was not read to its end ({error.strerror}); give a file, or set TMPDIR to a "
                f"folder with room for a copy"
            ) from error
        yield copy


def check_writable(name: str, path: Path | None, others: Mapping[Path, str]) -> None:
    """Raises ValueError unless a file can be written there, before any work is done.

    Args:
        name: field of the option.
        path: what it says; None: nothing is written.
        others: other files of the command, and what names each of them.
    """
    if path is None:
        return
    same = next((said for other, said in others.items() if other.resolve() == path.resolve()), None)
    if same is not None:
        raise ValueError(f"{name}={str(path)!r}: expected another file than {same} names")
    if path == STANDARD_STREAM:
        return
    if path.is_dir():
        raise ValueError(f"{name}={str(path)!r}: expected a file, and this is a folder")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"{name}={str(path)!r}: expected a file in a folder that exists")
    try:
        if path.exists():
            path.open("ab").close()
        if path.is_file() or not path.exists():
            part = _part_of(path)
            part.touch()
            part.unlink()
    except OSError as error:
        raise ValueError(
            f"{name}={str(path)!r}: it cannot be written: {error.strerror}; choose another file"
        ) from error


def write(path: Path, text: str) -> None:
    """Writes a text in UTF-8, to standard output if the path is "-". A file has all of it, or stays as it was. What is
    not Unicode, such as a byte in the name of a file, becomes a question mark."""
    written = text.encode("utf-8", "replace")
    if path == STANDARD_STREAM:
        typer.echo(written, nl=False)
        return
    try:
        if path.exists() and not path.is_file():  # a pipe or a device
            path.write_bytes(written)
            return
        part = _part_of(path)
        try:
            part.write_bytes(written)
            os.replace(part, path.resolve())
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        typer.echo(f"trunkattn: {path} was not written: {error.strerror}", err=True)
        raise typer.Exit(1) from error


def print_json(value: object) -> None:
    """Prints JSON, in plain ASCII where the encoding of standard output is not UTF-8."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    is_plain = codecs.lookup(encoding).name != "utf-8"
    typer.echo(json.dumps(value, indent=1, ensure_ascii=is_plain, allow_nan=False))


def _part_of(path: Path) -> Path:
    """The file that becomes `path` when all is written."""
    whole = path.resolve()
    return whole.with_name(f".{whole.name}.part")
