"""benchmarks/lib/turn_lock.py and processes.py, with processes that stand for engines."""

import argparse
import fcntl
import os
import signal
from collections.abc import Iterator
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines.processes import collect, start
from benchmarks.lib import turn_lock
from benchmarks.lib.turn_lock import starting, turn

from . import fake_engines
from .fake_engines import PATIENCE, free_for

SPAWN = get_context("spawn")


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def process(target: Any, *arguments: Any) -> BaseProcess:
    made = SPAWN.Process(target=target, args=arguments)
    made.start()
    return made


def test_engines_start_together_and_nobody_measures_meanwhile(lock: Path) -> None:
    with starting(lock):
        assert free_for(lock, fcntl.LOCK_SH)
        assert not free_for(lock, fcntl.LOCK_EX)
        with starting(lock):
            pass
        assert not free_for(lock, fcntl.LOCK_EX), "another one starts still"
    assert free_for(lock, fcntl.LOCK_EX)


def test_nobody_measures_or_starts_beside_a_measurement(lock: Path) -> None:
    with pytest.raises(ValueError), turn(lock):
        assert not free_for(lock, fcntl.LOCK_SH)
        raise ValueError
    assert free_for(lock, fcntl.LOCK_EX), "a measurement that fails has had its turn"


def test_without_a_file_nobody_waits(tmp_path: Path) -> None:
    with starting(None), turn(None), turn(None):
        assert not list(tmp_path.iterdir())


def test_a_measurement_waits_until_all_that_start_are_ready(lock: Path, tmp_path: Path) -> None:
    log, asked, measured = tmp_path / "log", SPAWN.Event(), SPAWN.Event()
    begun, go = [SPAWN.Event(), SPAWN.Event()], [SPAWN.Event(), SPAWN.Event()]
    processes = [process(fake_engines.start_slowly, lock, log, begun[at], go[at]) for at in range(2)]
    assert all(each.wait(PATIENCE) for each in begun)
    processes.append(process(fake_engines.measure_once, lock, log, asked, measured))
    assert asked.wait(PATIENCE)
    go[0].set()
    processes[0].join(PATIENCE)
    assert not measured.wait(0.3)
    go[1].set()
    for each in processes:
        each.join(PATIENCE)
    assert log.read_text().split() == ["ready", "ready", "measured"]


def test_measurements_exclude_each_other(lock: Path, tmp_path: Path) -> None:
    processes = [process(fake_engines.measure_often, lock, tmp_path / "marker") for _ in range(3)]
    for each in processes:
        each.join(PATIENCE)
    assert [each.exitcode for each in processes] == [0, 0, 0]


def test_a_process_that_dies_while_it_starts_holds_up_nobody(lock: Path) -> None:
    born, sender = SPAWN.Pipe(duplex=False)
    engine = process(fake_engines.fork_and_die, lock, sender)
    child = born.recv()
    try:
        engine.join()
        assert engine.exitcode == -signal.SIGKILL
        assert free_for(lock, fcntl.LOCK_EX), "its child does not keep the lock"
    finally:
        os.kill(child, signal.SIGKILL)


def test_what_an_engine_forks_or_starts_takes_no_lock_along(lock: Path) -> None:
    with starting(lock):
        child = os.fork()
        if not child:
            os._exit(0 if not any(os.readlink(f"/proc/self/fd/{fd}") == str(lock) for fd in open_files()) else 1)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert not free_for(lock, fcntl.LOCK_EX), "this process has it still"
        (held,) = [fd for fd in open_files() if os.readlink(f"/proc/self/fd/{fd}") == str(lock)]
        assert not os.get_inheritable(held)


def open_files() -> Iterator[int]:
    for name in os.listdir("/proc/self/fd"):
        if os.path.lexists(f"/proc/self/fd/{name}"):
            yield int(name)


def heard(*started: Any) -> dict[str, list[Any]]:
    """What `collect` passes on, by name."""
    found: dict[str, list[Any]] = {}
    collect(started, lambda name, answer: found.setdefault(name, []).append(answer))
    return found


def test_each_process_is_heard_until_it_ends(tmp_path: Path) -> None:
    children = tmp_path / "child"
    leaves = start("leaves", fake_engines.die_and_leave_a_child, children)
    try:
        found = heard(
            start("dies", fake_engines.die, ("a",)), leaves, start("answers", fake_engines.answer, ("a", "b"))
        )
    finally:
        os.kill(int(children.read_text()), signal.SIGKILL)
    card, figures = ("card", {"card": "cpu"}), fake_engines.FIGURES
    assert found == {
        "dies": [card, ("a", figures), None],
        "leaves": [None],
        "answers": [card, ("a", figures), ("b", figures), ("", fake_engines.FACTS), None],
    }


def test_processes_end_if_nobody_can_listen() -> None:
    begun = start("waits", fake_engines.meet, SPAWN.Barrier(2), ("a",)), start("dies", fake_engines.die, ("a",))

    def fail(name: str, answer: object) -> None:
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        collect(begun, fail)
    assert not any(each.process.is_alive() for each in begun)


@pytest.mark.parametrize(
    ("given", "engines", "message"),
    [
        (["--turns", "/nowhere/lock", "--kv-gib", "8"], 2, "argument --turns: /nowhere is no folder"),
        (["--turns", "lock"], 2, "several engines on one card need --kv-gib"),
        (["--kv-gib", "0"], 1, "argument --kv-gib: expected a finite number above 0"),
        (["--turns", "lock"], 1, ""),
        (["--turns", "lock", "--kv-gib", "0.5"], 2, ""),
        ([], 2, ""),
    ],
)
def test_options(given: list[str], engines: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    turn_lock.add_options(parser)
    try:
        turn_lock.check_options(parser, parser.parse_args(given), engines)
    except SystemExit:
        assert message and message in capsys.readouterr().err
    else:
        assert not message
