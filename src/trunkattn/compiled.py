"""The project's `njit`: Numba's, with a cache where one can be kept, and with a notice when compiling takes long.

Numba keeps compiled code beside the sources or in a folder of the user, or in the folder that NUMBA_CACHE_DIR names.
Its own cache notices a change of the file that defines a function, but not of files whose functions it calls. So here
the cache depends on every source that is compiled. Damaged files of it, a full disk and what else keeps it from being
read or written cost time, and no call fails.
"""

import hashlib
import logging
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias

import numba
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache, IndexDataCacheFile

from trunkattn.interrupts import finished, held_interrupts

_LOG: Final = logging.getLogger(__name__)
_PACKAGE: Final = Path(__file__).parent
# The files and folders with compiled functions, and with constants that these are compiled with.
COMPILED_SOURCES: Final = (
    "compiled.py",
    "cpu",
    "dtypes.py",
    "step_inputs.py",
    "numerics.py",
    "ops",
    "planner",
)
_Function: TypeAlias = Callable[..., Any]

_SAYS_AFTER_S: Final = 0.3  # seconds of compiling before the notice appears: one small function needs none


def njit(function: _Function | None = None, *, inner: bool = False, by_address: bool = False, **options: Any) -> Any:
    """`numba.njit` for functions of this package; all of its options but `cache`.

    A wrapper costs as much to compile as a small function, so each function has only the one that it is called through.
    inner: only compiled functions call it, so it needs neither a wrapper nor a cache of its own; Python cannot call it.
    by_address: it is called by its address, as C would, and not from Python.
    """
    wrappers: dict[str, Any] = {"no_cpython_wrapper": inner or by_address, "no_cfunc_wrapper": not by_address}

    def compile_lazily(function: _Function) -> Any:
        dispatcher = numba.njit(**wrappers, **options)(function)
        if not numba.config.DISABLE_JIT:  # type: ignore[attr-defined]  # Numba sets it at run time
            dispatcher.compile = _uninterrupted(dispatcher.compile)
        if not inner and cache_folder() is not None:
            dispatcher._cache = _PackageCache(function)
        return dispatcher

    return compile_lazily if function is None else compile_lazily(function)


def _uninterrupted(compile_one: _Function) -> _Function:
    """Numba's method that compiles or loads a function, for whose end interrupts wait: an interrupted compiler frees
    memory twice."""

    def compile_without_interrupts(signature: Any) -> Any:
        with held_interrupts():
            return compile_one(signature)

    return compile_without_interrupts


@cache
def cache_folder() -> str | None:
    """Where Numba keeps this package's compiled code; None if it finds no folder that can be written."""
    try:
        own = _PackageCache(njit).cache_path
    except RuntimeError:  # what Numba raises then
        return None
    return str(numba.config.CACHE_DIR or own)  # type: ignore[attr-defined]  # Numba sets it at run time


@cache
def source_stamp() -> str:
    """A hash of every source that is compiled."""
    files = [file for name in COMPILED_SOURCES for file in (_PACKAGE / name, *(_PACKAGE / name).rglob("*.py"))]
    contents = hashlib.sha256()
    for file in sorted(file for file in files if file.is_file()):
        contents.update(file.read_bytes())
    return contents.hexdigest()


class _PackageCacheImpl(CompileResultCacheImpl):
    """Numba's cache with a stamp of all sources in the place of one file's."""

    def __init__(self, function: _Function) -> None:
        super().__init__(function)
        self._locator.get_source_stamp = source_stamp


class _PackageCacheFile(IndexDataCacheFile):
    """Numba's files of one function: an index, and code, which has the stamp of its sources here, too. Numba writes the
    index first. If the disk is full or the process ends then, the index names a file with the code of an older
    version."""

    def save(self, key: Any, data: Any) -> None:
        """Keeps compiled code with its stamp."""
        super().save(key, (self._source_stamp, data))

    def load(self, key: Any) -> Any:
        """Compiled code of these sources; None if none is kept."""
        found = super().load(key)
        return found[1] if found is not None and found[0] == self._source_stamp else None


class _PackageCache(FunctionCache):
    _impl_class = _PackageCacheImpl

    def __init__(self, function: _Function) -> None:
        super().__init__(function)
        self._cache_file = _PackageCacheFile(self.cache_path, self._impl.filename_base, source_stamp())

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Compiled code for a signature; None if none is kept. Files that cannot be read are given up: those of another
        version of this package may name classes that this one does not have, and those of a machine that lost its power
        may be cut off, of which pickle raises anything."""
        try:
            return super().load_overload(sig, target_context)
        except Exception:
            with suppress(OSError):
                self.flush()
            return None

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keeps compiled code, or warns that it could not. A signal waits, because it would leave a part of a file."""
        try:
            with finished():
                super().save_overload(sig, data)
        except Exception as error:
            _warn_unkept(getattr(error, "strerror", None) or str(error))  # without the file's name


@cache
def _warn_unkept(reason: str) -> None:
    """Warns that compiled code is not kept. Once: the reason is the same for every function."""
    warnings.warn(
        f"trunkattn could not keep what it compiled in {cache_folder()} ({reason}), so later processes compile it "
        f"again; make room there, or set NUMBA_CACHE_DIR to another folder",
        RuntimeWarning,
        stacklevel=2,
    )


class Announcer(event.Listener):
    """Announces once that functions of this package are being compiled. Numba reports each function that is not
    cached."""

    def __init__(self) -> None:
        self._depth = 0  # compiling a function compiles those that it calls
        self._begin = self._spent_s = 0.0
        self._said = False

    def on_start(self, event: Any) -> None:
        """Notes the start of a compilation, and announces it if compiling already took long."""
        if not self._said and _is_ours(event):
            if self._depth == 0:
                self._begin = time.perf_counter()
                self._said = self._spent_s >= _SAYS_AFTER_S
                if self._said:
                    announce(cache_folder())
            self._depth += 1

    def on_end(self, event: Any) -> None:
        """Notes that a compilation ended or failed."""
        if not self._said and _is_ours(event):
            self._depth -= 1
            if self._depth == 0:
                self._spent_s += time.perf_counter() - self._begin


def _is_ours(event: Any) -> bool:
    module: str = event.data["dispatcher"].py_func.__module__
    return module.startswith(f"{__package__}.")


def announce(folder: str | None) -> None:
    """Logs that code is being compiled, or warns that every process will compile it again. The level of the log entry
    is WARNING, the lowest one that Python shows where nobody has configured logging."""
    if folder is None:
        warnings.warn(
            "trunkattn compiles what runs on the CPU, 10 to 40 s, and finds no folder to keep it in, so every process "
            "compiles it again; set NUMBA_CACHE_DIR to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
    else:
        _LOG.warning("trunkattn compiles what runs on the CPU, 10 to 40 s once, and keeps it in %s", folder)


event.register("numba:compile", Announcer())
