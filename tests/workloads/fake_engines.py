"""Processes that stand for engines: they start, answer and end as tests want it."""

import fcntl
import os
import time
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from typing import Any

from benchmarks.lib.turn_lock import starting, turn

PATIENCE = 300  # seconds until a test gives up
FACTS = {"card": "cpu", "counters": {}}
FIGURES = {"tpot_ms": 10.0, "tpot_ms_each": [10.0], "tokens": [[1] * 16]}


def free_for(path: Path, kind: int) -> bool:
    """Whether somebody else gets the lock now."""
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(file)
    return True


def start_slowly(lock: Path, log: Path, begun: Event, go: Event) -> None:
    with starting(lock):
        begun.set()
        assert go.wait(PATIENCE)
        with log.open("a") as file:
            file.write("ready\n")


def measure_once(lock: Path, log: Path, asked: Event, measured: Event) -> None:
    asked.set()
    with turn(lock), log.open("a") as file:
        file.write("measured\n")
    measured.set()


def measure_often(lock: Path, marker: Path) -> None:
    """Ends with an error if another one measures meanwhile."""
    for _ in range(20):
        with turn(lock):
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
            time.sleep(0.001)
            marker.unlink()


def fork_and_die(lock: Path, born: Connection) -> None:
    """Dies while it starts; what it has forked lives on, as an engine's processes may."""
    with starting(lock):
        if not os.fork():
            born.send(os.getpid())  # it has no lock any more
            time.sleep(PATIENCE)
            os._exit(0)
        os.kill(os.getpid(), 9)


def meet(barrier: Barrier, workloads: tuple[str, ...], answers: Connection) -> None:
    """Answers once as many as the barrier is for have started."""
    barrier.wait(PATIENCE)
    answer(workloads, answers)


def send_figures(workloads: tuple[str, ...], answers: Connection) -> None:
    answers.send(("card", {"card": "cpu"}))
    for name in workloads:
        answers.send((name, FIGURES))


def answer(workloads: tuple[str, ...], answers: Connection) -> None:
    send_figures(workloads, answers)
    answers.send(("", FACTS))


def die(workloads: tuple[str, ...], answers: Connection) -> None:
    send_figures(workloads, answers)
    os._exit(3)


def die_or_answer(dies: bool, workloads: tuple[str, ...], answers: Connection) -> None:
    (die if dies else answer)(workloads, answers)


def die_and_leave_a_child(children: Path, answers: Connection) -> None:
    """The child keeps the connection open."""
    child = os.fork()
    if not child:
        time.sleep(PATIENCE)
        os._exit(0)
    children.write_text(str(child))
    os._exit(3)


def alone(marker: Path, workloads: tuple[str, ...], answers: Connection) -> None:
    """Ends with an error if another one runs meanwhile."""
    os.close(os.open(marker, os.O_CREAT | os.O_EXCL))
    time.sleep(0.2)
    marker.unlink()
    answer(workloads, answers)


def serve_runs(task: Any, answers: Connection) -> None:
    """A back end of the serving scripts: its options say whom it meets first, and after how many runs it dies."""
    answers.send(("", {"card": "cpu"}))
    task.start.options["barrier"].wait(PATIENCE)
    for number, name in enumerate(task.runs):
        if number == task.start.options["dies_after"]:
            os._exit(3)
        answers.send((name, {"ttft": number, "tpot": 1, "latency": 2}))
