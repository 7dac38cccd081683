"""Standard error that nobody waits for, and the log of a server, which is written there."""

import io
import logging
import os
import select
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final, TextIO

from trunkattn.cli.streams import text_of

_MOST_BYTES: Final = 1 << 20  # that wait to be written
_AT_ONCE: Final = 4096
_LAST_SECONDS: Final = 2.0


class QueuedStream(io.RawIOBase):
    """Lets a thread write what the stream is given. If nobody reads a pipe, or Ctrl+S stops a terminal, only this
    thread waits. When too much waits to be written, lines are dropped, and a line in their place says how many.

    Args:
        file: the descriptor that is written to. A failure such as a full disk costs lines and nothing else.
    """

    def __init__(self, file: int) -> None:
        self._file, self._waiting, self._num_dropped = file, bytearray(), 0
        self._changed = threading.Condition()
        threading.Thread(target=self._write_all, name="trunkattn-log", daemon=True).start()

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return os.isatty(self._file)

    def fileno(self) -> int:
        return self._file

    def write(self, data: Any) -> int:
        """Hands lines to the thread."""
        lines = bytes(data)
        with self._changed:
            if self._num_dropped or len(self._waiting) + len(lines) > _MOST_BYTES:
                self._num_dropped += lines.count(b"\n")
            else:
                self._waiting += lines
            self._changed.notify_all()
        return len(lines)

    def wait(self) -> None:
        """Waits until all is written, but not for long."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, _LAST_SECONDS)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._num_dropped)
                some = bytes(self._waiting[:_AT_ONCE])
            written = self._write_some(some)
            with self._changed:
                del self._waiting[:written]
                if self._num_dropped:
                    told = "lines of the log were dropped, because nobody read those before them."
                    self._waiting += f"WARNING:  {self._num_dropped} {told}\n".encode()
                    self._num_dropped = 0
                self._changed.notify_all()

    def _write_some(self, some: bytes) -> int:
        """How many bytes are done with."""
        try:
            return os.write(self._file, some)
        except BlockingIOError:  # another program that has the same pipe or terminal lets it wait for nobody
            select.select((), (self._file,), ())
            return 0
        except OSError:
            return len(some)


class _Log(logging.Handler):
    """Writes lines to a stream. It is asked only at the end to wait for them."""

    def __init__(self, text: TextIO, stream: QueuedStream) -> None:
        super().__init__()
        self._text, self._stream = text, stream

    def emit(self, record: logging.LogRecord) -> None:
        """Writes a line."""
        try:
            self._text.write(f"{self.format(record)}\n")
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Waits until all lines are written, but not for long."""
        self._stream.wait()


@contextmanager
def queued_stderr() -> Iterator[logging.Handler]:
    """Context in which nobody waits for standard error, whatever library writes to it. Its value writes a log there."""
    before, stream = sys.stderr, QueuedStream(sys.stderr.fileno())
    sys.stderr = text_of(stream, before)
    try:
        yield _Log(sys.stderr, stream)
    finally:
        stream.wait()
        sys.stderr = before
