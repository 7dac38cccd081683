"""Engines start side by side and take turns to measure, over one lock file.

Most of a benchmark's time is engines that start, each mostly on a few of the host's cores, and several engines fit on
one card. So those of a command, and of several commands that are given the same file, start at once. A measurement
wants the machine for itself: nothing else may measure meanwhile, and nothing may start.

A process that starts an engine holds the file shared, from its first moment until the engine is ready; a measurement
holds it exclusively. So a measurement waits for all that have begun to start, and what begins later waits for it.
"""

# This module imports no engine and nothing that lies beside it at its top: engines' processes import it early.

import argparse
import fcntl
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path


class _Lock:
    """A lock that only this process holds, until it releases it or dies.

    A forked process would share the lock, and keep it when this one dies: engines fork. So it closes its copy, which
    leaves the lock as it is here. A process that runs another program never gets a copy (O_CLOEXEC).
    """

    def __init__(self, path: Path, kind: int) -> None:
        self._file: int | None = None
        os.register_at_fork(after_in_child=self._forget)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(self._file, kind)

    def _forget(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def release(self) -> None:
        if self._file is not None:
            fcntl.flock(self._file, fcntl.LOCK_UN)  # whoever else has a copy: closing would not be enough
            self._forget()


@contextmanager
def _held(path: Path | None, kind: int) -> Iterator[None]:
    if path is None:
        yield
        return
    lock = _Lock(path, kind)
    try:
        yield
    finally:
        lock.release()


def starting(path: Path | None) -> AbstractContextManager[None]:
    """An engine starts meanwhile; None: nobody is told. A turn inside would wait for itself: flock changes a shared
    lock into an exclusive one only by giving it up first."""
    return _held(path, fcntl.LOCK_SH)


def turn(path: Path | None) -> AbstractContextManager[None]:
    """Nobody else measures or starts meanwhile; None: nobody is asked."""
    return _held(path, fcntl.LOCK_EX)


def add_options(parser: argparse.ArgumentParser, turns_beside: argparse._ActionsContainer | None = None) -> None:
    """--turns and --kv-gib. turns_beside: a group whose other options exclude --turns."""
    from benchmarks.lib.options import positive

    (turns_beside or parser).add_argument(
        "--turns", type=Path, metavar="FILE",
        help="back ends start side by side, together with those of other commands that are given the same file, and "
        "take turns to measure",
    )  # fmt: skip
    parser.add_argument(
        "--kv-gib", type=positive, metavar="N",
        help="GiB of each engine's KV cache on a card; without, an engine takes what it finds free",
    )  # fmt: skip


def check_options(parser: argparse.ArgumentParser, arguments: argparse.Namespace, engines: int) -> None:
    """Refuses what cannot run. engines: how many start at once with --turns."""
    if arguments.turns is None:
        return
    if not arguments.turns.parent.is_dir():
        parser.error(f"argument --turns: {arguments.turns.parent} is no folder")
    if engines > 1 and arguments.kv_gib is None and getattr(arguments, "device", "cuda") != "cpu":
        parser.error("argument --turns: several engines on one card need --kv-gib, or the first takes all its memory")
