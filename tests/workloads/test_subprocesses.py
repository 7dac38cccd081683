"""A process that fails, ends or hangs costs its caller one call."""

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import pytest

from benchmarks.lib.subprocesses import Apart, Lost

from . import generators

PATIENCE = 60


@pytest.fixture
def process() -> Iterator[Apart]:
    made = Apart()
    yield made
    made.stop()


def count(process: Apart) -> int:
    """Asks twice, and returns the id of the process that answered."""
    found = [answer for _ in range(2) for answer in process.ask(generators.count, 3, patience=PATIENCE)]
    assert [number for number, _ in found] == [0, 1, 2, 0, 1, 2]
    (pid,) = {pid for _, pid in found}
    return pid


@pytest.mark.parametrize(
    ("function", "arguments", "patience", "reason"),
    [
        (generators.fail, (), PATIENCE, "ValueError: not here"),
        (generators.die, (3,), PATIENCE, "the process ended with exit code 3"),
        (generators.hang, (), 1, "no answer in 1 s"),
    ],
)
def test_a_lost_process_is_started_again(
    process: Apart, function: Callable[..., Any], arguments: tuple[int, ...], patience: float, reason: str
) -> None:
    first, answers = count(process), []
    with pytest.raises(Lost, match=reason):
        for answer in process.ask(function, *arguments, patience=patience):
            answers.append(answer)
    assert answers == [1], "what came before is kept"
    assert count(process) != first


def test_no_answer_is_waited_for_after_a_moment(process: Apart) -> None:
    count(process)
    begin = monotonic()
    with pytest.raises(Lost, match="no answer in 1 s"):
        list(process.ask(generators.hang, patience=PATIENCE, until=begin + 1))
    assert monotonic() - begin < 30


def test_a_process_that_is_left_in_the_middle_of_a_call_is_ended(process: Apart) -> None:
    first = count(process)
    answers = process.ask(generators.count, 3, patience=PATIENCE)
    next(answers)
    answers.close()  # type: ignore[attr-defined]
    assert count(process) != first


def test_a_process_that_was_never_asked_is_stopped() -> None:
    Apart().stop()
