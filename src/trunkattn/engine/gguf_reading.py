"""Reading a GGUF file's header once while a model is loaded.

transformers reads it for the configuration, for the tokenizer and for the weights, each time for seconds, and asks for
the architecture's table of tensor names at every module of the model. Both come from the package `gguf`, whose names it
looks up at each call, so that they can stand for cached ones as long as a model is loaded.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from threading import RLock
from typing import Any

import numpy as np

_loading = RLock()  # one model at a time: the names belong to the whole process


@contextmanager
def gguf_read_once() -> Iterator[None]:
    """While it lasts, the header of a GGUF file is read once. It may be entered again within; other threads wait."""
    try:
        import gguf
    except ImportError:  # then no GGUF file can be read, which transformers says
        yield
        return
    with _loading:
        if isinstance(gguf.GGUFReader, partial):
            yield
            return
        names: dict[str, Any] = {"GGUFReader": partial(_reader, {}, _plain(gguf.GGUFReader))}
        names["get_tensor_name_map"] = cache(gguf.get_tensor_name_map)
        own = {name: getattr(gguf, name) for name in names}
        try:
            vars(gguf).update(names)
            yield
        finally:
            vars(gguf).update(own)


def _reader(known: dict[tuple[int, ...], Any], reader: Any, path: str | os.PathLike[str], mode: str = "r") -> Any:
    """The file's reader, made at the first call. Temporary links to one file are that file."""
    if mode != "r":
        return reader(path, mode)
    status = os.stat(path)
    place = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    if place not in known:
        known[place] = reader(path)
    return known[place]


def _plain(reader: Any) -> Any:
    """The reader with its memory map seen as a plain array, of which it takes a million slices in a third of the
    time."""

    class PlainReader(reader):
        def _get(self, *args: Any, **options: Any) -> Any:
            self.data: Any = np.asarray(self.data)
            return super()._get(*args, **options)

    return PlainReader
