"""Tasks in processes of their own, as many at once as there are cores, with one progress for all."""

import gc
import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, wait
from typing import Any, Final, TypeVar

from trunkattn.interrupts import usual_signals

# After which garbage is looked for. A cache has an object for each of its pages: to look at them often takes as long as
# the replay.
_NEW_OBJECTS: Final = 100_000

Result = TypeVar("Result")
Task = Callable[[Callable[[float], None]], Result]
"""A task calls its argument with the share that is done, and returns a value that a process can send."""


def run_all(
    tasks: Sequence[Task[Result]], weights: Sequence[float], progress: Callable[[float], None], num_workers: int
) -> list[Result]:
    """The results of tasks, in order.

    Args:
        tasks: what is to be done.
        weights: expected time of each, in any unit.
        progress: called with the share of all tasks that is done.
        num_workers: processes; with 1 this process runs all tasks.

    Raises:
        Exception: the one that the first failing task raised. The other tasks are stopped then.
        RuntimeError: a process was killed.
    """
    done = [0.0] * len(tasks)

    def note(number: int, share: float) -> None:
        done[number] = share
        progress(sum(map(float.__mul__, done, map(float, weights))) / max(1e-9, sum(weights)))

    if num_workers == 1 or len(tasks) == 1:
        return [task(partial(note, number)) for number, task in enumerate(tasks)]
    results: dict[int, Result] = {}
    running: dict[Connection, tuple[int, Any]] = {}
    waiting = sorted(range(len(tasks)), key=lambda number: -weights[number])
    try:
        while waiting or running:
            while waiting and len(running) < num_workers:
                number = waiting.pop(0)
                running.update([_start(number, tasks[number])])
            for connection in wait(list(running)):
                assert isinstance(connection, Connection)
                number, process = running[connection]
                kind, value = _receive(connection, process)
                if kind == "share":
                    note(number, value)
                    continue
                del running[connection]
                process.join()
                if kind == "error":
                    raise value
                results[number] = value
                note(number, 1.0)
    finally:
        for _, process in running.values():
            process.terminate()
            process.join()
    return [results[number] for number in range(len(tasks))]


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start(number: int, task: Task[Any]) -> tuple[Connection, tuple[int, Any]]:
    """A process that has this one's memory, so that no log is copied."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_work, args=(task, sender), daemon=True)
    process.start()
    sender.close()
    return receiver, (number, process)


def _work(task: Task[Any], sender: Connection) -> None:
    if usual_signals():
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to every process; the parent ends this one
    gc.freeze()  # what the process was given needs no second look, which would also copy its memory
    gc.set_threshold(_NEW_OBJECTS)
    try:
        sender.send(("result", task(lambda share: sender.send(("share", share)))))
    except Exception as error:  # whatever it is, the caller raises it
        sender.send(("error", error))


def _receive(connection: Connection, process: Any) -> tuple[str, Any]:
    try:
        message: tuple[str, Any] = connection.recv()
    except EOFError:
        process.join()
        raise RuntimeError(
            f"a process of the replay ended with exit code {process.exitcode}, probably for want of memory: expected "
            "a result; give fewer requests"
        ) from None
    return message
