"""`njit` as the project uses it: Numba's, with a cache, one word to whoever waits, and no cache where none can be kept.

Numba keeps compiled code beside the sources or in a folder of the user; NUMBA_CACHE_DIR names another. Its own cache
notices a change of the file that a function stands in, but not of the files whose functions it calls, so here the
cache is bound to every source that is compiled.
"""

import hashlib
import sys
import time
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import numba
from numba.core import event
from numba.core.caching import CompileResultCacheImpl, FunctionCache

_PACKAGE: Final = Path(__file__).parent
# What holds compiled functions, and the constants that they are compiled with.
COMPILED_SOURCES: Final = ("compiled.py", "cpu", "dtypes.py", "gpu/prefill_plan.py", "inputs.py", "ops", "planner")
_SAYS_AFTER_S: Final = 0.3  # of compiling: one small function is not worth a word


def njit(function: Callable | None = None, *, cached: bool = True, **options: Any) -> Any:
    """`numba.njit` for functions of this package; all of its options but `cache`.

    cached: whether compiled code is kept. Not needed of a function that only compiled functions call.
    """
    options.setdefault("no_cfunc_wrapper", True)

    def compile_lazily(function: Callable) -> Any:
        dispatcher = numba.njit(**options)(function)
        if cached:
            try:
                dispatcher._cache = _PackageCache(function)
            except RuntimeError:  # no folder that Numba knows can be written
                _warn_without_cache()
        return dispatcher

    return compile_lazily if function is None else compile_lazily(function)


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

    def __init__(self, function: Callable) -> None:
        super().__init__(function)
        self._locator.get_source_stamp = source_stamp


class _PackageCache(FunctionCache):
    _impl_class = _PackageCacheImpl


@cache
def _warn_without_cache() -> None:
    warnings.warn(
        "trunkattn finds no folder that it can write compiled CPU kernels to, so every process compiles them again, "
        "which takes about 10 s: set NUMBA_CACHE_DIR to a folder that can be written",
        RuntimeWarning,
        stacklevel=3,
    )


class _Announcer(event.Listener):
    """Says once, on stderr, that functions of this package are being compiled."""

    def __init__(self) -> None:
        self._depth = 0  # functions compile the functions that they call
        self._begin = self._spent = 0.0
        self._said = False

    def on_start(self, event: Any) -> None:
        if not event.data["dispatcher"].py_func.__module__.startswith(f"{__package__}."):
            return
        if self._depth == 0:
            self._begin = time.perf_counter()
            if self._spent >= _SAYS_AFTER_S and not self._said:
                self._announce(event.data["dispatcher"])
        self._depth += 1

    def on_end(self, event: Any) -> None:
        if not event.data["dispatcher"].py_func.__module__.startswith(f"{__package__}."):
            return
        self._depth -= 1
        if self._depth == 0:
            self._spent += time.perf_counter() - self._begin

    def _announce(self, dispatcher: Any) -> None:
        self._said = True
        folder = dispatcher._cache.cache_path
        kept = "this process alone, for no cache folder can be written" if folder is None else folder
        print(f"trunkattn: compiling the CPU kernels, about 10 s once; they are kept in {kept}", file=sys.stderr)


event.register("numba:compile", _Announcer())
