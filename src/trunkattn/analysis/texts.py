"""The texts of a log, compressed in an unnamed temporary file, because they are large and each is read rarely."""

import os
import tempfile
import weakref
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import IO, overload

import numpy as np
from numpy.typing import NDArray


class _File:
    """Bytes appended to a file that no other program can open and that vanishes with this process.

    Forked processes can read it at the same time, because each read names its place.
    """

    def __init__(self) -> None:
        """Begins empty. The file is made when the first bytes are appended."""
        self._end = 0

    @cached_property
    def _file(self) -> IO[bytes]:
        """The file, in the folder of temporary files. It is closed when this object goes: Python warns of files that
        are left to it."""
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115
        weakref.finalize(self, file.close)
        return file

    def append(self, data: bytes) -> int:
        """Adds bytes and returns their place.

        Raises:
            ValueError: the disk is full, or there is no such folder.
        """
        place = self._end
        try:
            written = os.pwrite(self._file.fileno(), data, place)
        except OSError:
            written = 0
        if written < len(data):
            raise ValueError(
                f"{tempfile.gettempdir()}: there is no room for the texts of the log; expected as much as the log "
                "takes, compressed: name a folder on a larger disk in TMPDIR"
            )
        self._end += written
        return place

    def read(self, place: int, length: int) -> bytes:
        """The `length` bytes at `place`."""
        return os.pread(self._file.fileno(), length, place)


class Texts(Sequence[str]):
    """A sequence of texts that keeps only 16 bytes of each text in memory."""

    def __init__(self, texts: Iterable[str] = ()) -> None:
        """Keeps some texts."""
        self._file = _File()
        self._places, self._lengths = array("q"), array("q")
        for text in texts:
            self.append(text)

    def append(self, text: str) -> None:
        """Adds a text. Raises ValueError where the disk is full."""
        data = zlib.compress(to_bytes(text), level=1) if text else b""
        self._places.append(self._file.append(data))
        self._lengths.append(len(data))

    def fill(self, length: int) -> None:
        """Adds empty texts until there are `length`."""
        for _ in range(length - len(self)):
            self.append("")

    def taken(self, order: Sequence[int] | NDArray[np.int64]) -> "Texts":
        """The texts at some places, in that order, without a copy of them."""
        chosen = Texts.__new__(Texts)
        chosen._file = self._file
        chosen._places = array("q", np.array(self._places)[np.asarray(order, np.int64)].tobytes())
        chosen._lengths = array("q", np.array(self._lengths)[np.asarray(order, np.int64)].tobytes())
        return chosen

    def replaced(self, new: Mapping[int, str]) -> "Texts":
        """All texts, of which some are others."""
        changed = self.taken(range(len(self)))
        for place, text in new.items():
            changed.append(text)
            changed._places[place], changed._lengths[place] = changed._places.pop(), changed._lengths.pop()
        return changed

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, place: int) -> str: ...
    @overload
    def __getitem__(self, place: slice) -> "Texts": ...
    def __getitem__(self, place: int | slice) -> "str | Texts":
        if isinstance(place, slice):
            return self.taken(range(*place.indices(len(self))))
        data = self._file.read(self._places[place], self._lengths[place])
        return zlib.decompress(data).decode("utf-8") if data else ""


def to_bytes(text: str) -> bytes:
    """UTF-8, with a mark for each half of a surrogate pair that JSON left by itself."""
    return text.encode("utf-8", errors="replace")
