"""Processes of back ends: started, listened to until each has ended, whatever becomes of the others.

What the scripts for vLLM and SGLang share, of time per token and of serving.
"""

import multiprocessing
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

LOOK_SECONDS = 1.0  # between looks at processes that send nothing


class Started(NamedTuple):
    """A back end's process, and what it sends."""

    name: str
    process: BaseProcess
    answers: Connection


def start(name: str, target: Callable[..., None], *arguments: Any) -> Started:
    """Starts a process. target: its function, which gets the arguments and a connection for its answers."""
    context = multiprocessing.get_context("spawn")
    answers, sender = context.Pipe(duplex=False)
    process = context.Process(target=target, args=(*arguments, sender))
    process.start()
    sender.close()
    return Started(name, process, answers)


def collect(started: Sequence[Started], receive: Callable[[str, Any], None]) -> None:
    """Passes on what processes send, until all have ended. receive: of a name and an answer, or None at its end."""
    waiting = list(started)
    try:
        while waiting:
            wait([each.answers for each in waiting], LOOK_SECONDS)
            for each in list(waiting):
                if not _drain(each, receive):
                    waiting.remove(each)
                    receive(each.name, None)
    except BaseException:
        for each in started:
            each.process.terminate()  # nobody listens: it would wait to send, and this process for it
        raise
    finally:
        for each in started:
            each.process.join()


def _drain(each: Started, receive: Callable[[str, Any], None]) -> bool:
    """Passes on what has come; whether more may come."""
    # The connection does not tell: what an engine has forked may live on and hold its other end open. The process is
    # looked at first, since one that has ended has sent all that it ever will.
    alive = each.process.is_alive()
    while each.answers.poll():
        try:
            answer = each.answers.recv()
        except (EOFError, OSError):  # OSError: it ended amid an answer
            return False
        receive(each.name, answer)
    return alive
