"""The standard error of a server, for which nobody waits."""

import contextlib
import io
import logging
import os
import sys
import threading
from collections.abc import Iterator

import pytest

from trunkattn.cli.log import QueuedStream, queued_stderr


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Where a pipe is read and written."""
    reading, writing = os.pipe()
    yield reading, writing
    for file in (reading, writing):
        with contextlib.suppress(OSError):
            os.close(file)


def read_to_end(reading: int) -> str:
    with open(reading, "rb", closefd=False) as file:
        return file.read().decode()


def test_lines_that_nobody_reads_are_dropped_and_counted(pipe: tuple[int, int]) -> None:
    reading, writing = pipe
    stream, line = QueuedStream(writing), b"x" * 999 + b"\n"
    for _ in range(3000):
        stream.write(line)  # it would wait after 64 KiB
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(read_to_end(reading)))
    reader.start()
    stream.wait()
    stream.write(b"the last line\n")
    stream.wait()
    os.close(writing)
    reader.join()
    *before, last = read[0].splitlines()
    told = [number for number, text in enumerate(before) if text.startswith("WARNING:")]
    assert last == "the last line" and told[0] > 1000  # it stands where the missing lines would
    assert sum(int(before[number].split()[1]) for number in told) + before.count("x" * 999) == 3000


@pytest.mark.parametrize("blocking", [True, False])
def test_all_arrives_in_order_where_somebody_reads(pipe: tuple[int, int], blocking: bool) -> None:
    """A pipe that another program has too may be one that takes what fits and no more."""
    reading, writing = pipe
    os.set_blocking(writing, blocking)
    stream = QueuedStream(writing)
    lines = [f"line {number} {'x' * 60}\n" for number in range(5000)]
    for line in lines:
        stream.write(line.encode())
    read: list[str] = []
    reader = threading.Thread(target=lambda: read.append(read_to_end(reading)))
    reader.start()
    stream.wait()
    os.close(writing)
    reader.join()
    assert read == ["".join(lines)]


def test_what_libraries_write_goes_the_same_way(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = pipe
    with open(writing, "w", encoding="ascii", errors="backslashreplace") as file:
        monkeypatch.setattr(sys, "stderr", file)
        with queued_stderr() as log:
            writer = sys.stderr
            with contextlib.redirect_stderr(io.StringIO()):  # as while a model is loaded
                log.handle(logging.makeLogRecord({"msg": "Größe"}))
            print("careful", file=writer)
        assert sys.stderr is file
    found = read_to_end(reading)
    assert found == "Gr\\xf6\\xdfe\ncareful\n"
