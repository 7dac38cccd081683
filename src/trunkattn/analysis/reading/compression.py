"""The bytes of a file: decompressed where it is compressed by gzip or Zstandard, which its contents tell."""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final

COMPRESSED: Final = frozenset({".gz", ".zst", ".zstd"})
READ_BYTES: Final = 1 << 20
GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
_SKIPPED: Final = b"\x50\x2a\x4d\x18"  # a frame of Zstandard that holds no data, with any half byte for the first 0

Read = Callable[[int], None]
"""Called with the bytes of the file that have been read."""


def plain(file: Path) -> BinaryIO:
    """The file as it is. Raises ValueError if it cannot be read."""
    try:
        stream = file.open("rb")
        stream.peek(1)  # a file of a broken disk or mount opens, and only a read fails
        return stream
    except OSError as error:
        raise ValueError(f"{file}: it cannot be read: {error.strerror}; expected a file that you may read") from error


@contextmanager
def opened(file: Path, read: Read) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file. read: is called with the bytes of the file that have been read.

    Raises:
        ValueError: the file is damaged, or needs a package.
    """
    with plain(file) as stored:
        start = stored.read(4)
        stored.seek(0)
        counted: Any = io.BufferedReader(_Counted(stored, read), READ_BYTES)
        try:
            if start[:2] == GZIP:
                with gzip.open(counted) as stream:
                    yield stream  # type: ignore[misc]  # GzipFile has what is used of BinaryIO
            elif start == ZSTD or (start[1:] == _SKIPPED[1:] and start[0] & 0xF0 == _SKIPPED[0]):
                with _zstd(file, counted) as stream:
                    yield stream
            else:
                yield counted
        except (EOFError, OSError, zlib.error) as error:
            raise ValueError(f"{file}: it cannot be read to its end ({error}); copy or download it again") from error


class _Counted(io.RawIOBase):
    """A file that tells how much of it has been read."""

    def __init__(self, file: BinaryIO, read: Read) -> None:
        self._file, self._read = file, read

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._read(count)
        return count


@contextmanager
def _zstd(file: Path, stream: BinaryIO) -> Iterator[BinaryIO]:
    """The decompressed bytes of a file of Zstandard. Raises OSError where they are damaged."""
    try:
        import zstandard
    except ImportError as error:
        raise ValueError(
            f"{file}: it is compressed by Zstandard, and the package zstandard is missing; run pip install zstandard, "
            f"or decompress the file"
        ) from error
    try:
        yield io.BufferedReader(_Frames(stream, zstandard.ZstdDecompressor()), READ_BYTES)
    except zstandard.ZstdError as error:
        raise OSError(error) from error


class _Frames(io.RawIOBase):
    """Decompressed frames of Zstandard, one after the other. Zstandard's own reader takes a cut frame for a whole."""

    def __init__(self, stream: BinaryIO, decompressor: Any) -> None:
        self._stream, self._decompressor = stream, decompressor
        self._frame: Any = None
        self._packed, self._ready = b"", memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            self._packed = self._packed or self._stream.read(READ_BYTES)
            if not self._packed:
                if self._frame is not None:
                    raise EOFError("its last frame is cut")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._ready = memoryview(self._frame.decompress(self._packed))
            self._packed = self._frame.unused_data if self._frame.eof else b""
            self._frame = None if self._frame.eof else self._frame
        count = min(len(buffer), len(self._ready))
        buffer[:count], self._ready = self._ready[:count], self._ready[count:]
        return count
