"""Fewer threads beside other work: as many as have a processor for themselves."""

import math
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from trunkattn import other_work
from trunkattn.cpu import thread_limit, threads
from trunkattn.cpu.thread_limit import ThreadLimit


class Machine:
    """Four processors, a clock, and a count of processor seconds that others and this process have taken."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.now, self.spent, self.spent_nicely, self._stat = 100.0, 1000.0, 1000.0, folder / "stat"
        patch.setattr(other_work, "_STAT", self._stat)
        patch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3})
        clock = SimpleNamespace(monotonic=lambda: self.now, clock_gettime=time.clock_gettime)
        for module in (other_work, thread_limit):  # not Python's own, by which other threads of this process wait
            patch.setattr(module, "time", clock)
        self._own = time.process_time()
        self.passes(0.0, 0.0)

    def passes(self, seconds: float, others: float, nice_others: float = 0.0) -> None:
        """Lets time pass in which others keep this number of processors busy."""
        own, self._own = time.process_time() - self._own, time.process_time()
        self.now += seconds
        self.spent += seconds * others + own
        self.spent_nicely += seconds * nice_others
        ticks, nice = (round(spent * os.sysconf("SC_CLK_TCK")) for spent in (self.spent, self.spent_nicely))
        self._stat.write_text(f"cpu  1 2\ncpu0 {ticks} 0 0 5 0 0 0 0\ncpu1 0 {nice} 0 9 7 0 0 0\n")


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield Machine(tmp_path, monkeypatch)
    torch.set_num_threads(before)


def threads_of(limit: ThreadLimit) -> int:
    with limit.applied():
        found = torch.get_num_threads()
        assert len(set(threads.team(4))) <= 4
    assert torch.get_num_threads() == 4
    return found


@pytest.mark.parametrize(("others", "expected"), [(0.0, 4), (0.3, 4), (0.8, 3), (1.0, 3), (2.2, 2), (3.0, 1), (4.0, 1)])
def test_as_many_threads_as_have_a_processor(machine: Machine, others: float, expected: int) -> None:
    limit = ThreadLimit()
    assert threads_of(limit) == 4  # nothing is known yet
    machine.passes(10.0, others)
    assert threads_of(limit) == expected
    machine.passes(0.1, 4.0)
    assert threads_of(limit) == expected  # not long enough to know
    machine.passes(10.0, 0.0)
    assert threads_of(limit) == 4


def test_a_limit_stays_while_others_compute(machine: Machine) -> None:
    """Loops of fewer threads end the others, of whose time nothing is known then."""
    limit = ThreadLimit()
    threads_of(limit)
    for others, expected in ((1.0, 3), (1.0, 3), (2.0, 2), (2.0, 2), (3.0, 1), (3.0, 1), (1.0, 3), (0.0, 4)):
        machine.passes(10.0, others)
        with limit.applied():
            assert torch.get_num_threads() == expected
            threads.team(expected)  # as a loop does


def test_threads_that_have_ended_are_looked_for_again(machine: Machine) -> None:
    limit = ThreadLimit()
    threads_of(limit)
    threads.team(2)  # of a caller that wanted fewer for a while
    waited = time.monotonic() + 60
    while not math.isnan(limit._team.seconds()) and time.monotonic() < waited:
        time.sleep(0.001)  # the system ends them a moment later
    for expected in (4, 3):  # nothing is known of the window in which they ended
        machine.passes(10.0, 1.0)
        assert threads_of(limit) == expected


def test_it_starts_no_more_threads_than_torch_has(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(thread_limit, "team", lambda num_threads: asked.append(num_threads) or [])
    torch.set_num_threads(2)
    limit = ThreadLimit()
    for others in (0.0, 3.0):
        with limit.applied():
            machine.passes(10.0, others)
    with limit.applied():
        assert torch.get_num_threads() == 1 and asked == [2, 1]


def test_its_own_threads_are_not_others(machine: Machine) -> None:
    limit = ThreadLimit()
    threads_of(limit)
    end = time.process_time() + 1.0
    while time.process_time() < end:
        torch.randn(256, 256) @ torch.randn(256, 256)
    machine.passes(0.5, 0.0)
    assert threads_of(limit) == 4


def test_other_threads_of_this_process_are_others(machine: Machine) -> None:
    limit = ThreadLimit()
    threads_of(limit)
    before = time.process_time()

    def compute() -> None:
        while time.process_time() < before + 2.0:
            pass

    other = threading.Thread(target=compute)
    other.start()
    other.join()
    machine.passes(2.0, 0.0)
    assert threads_of(limit) == 3


def test_another_thread_may_compute_the_next_step(machine: Machine) -> None:
    limit, found = ThreadLimit(), []
    threads_of(limit)
    machine.passes(10.0, 0.0)

    def compute() -> None:
        torch.set_num_threads(4)
        found.append(threads_of(limit))
        end = time.thread_time() + 0.3
        while time.thread_time() < end:
            pass
        machine.passes(0.3, 0.0)
        found.append(threads_of(limit))

    other = threading.Thread(target=compute)
    other.start()
    other.join()
    assert found == [4, 4]


def test_after_an_error_the_threads_are_back(machine: Machine) -> None:
    limit = ThreadLimit()
    threads_of(limit)
    machine.passes(10.0, 3.0)
    with pytest.raises(KeyError), limit.applied():
        assert torch.get_num_threads() == 1
        raise KeyError
    assert torch.get_num_threads() == 4


def test_a_system_that_does_not_tell(machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(other_work, "_STAT", tmp_path / "absent")
    limit = ThreadLimit()
    for _ in range(3):
        machine.passes(10.0, 4.0)
        assert threads_of(limit) == 4


def test_programs_that_give_way_take_no_processor(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    for priority, expected in ((0, 4), (5, 2)):  # this process may be one of them
        monkeypatch.setattr(os, "getpriority", lambda *_, priority=priority: priority)
        limit = ThreadLimit()
        threads_of(limit)
        machine.passes(10.0, 0.0, nice_others=2.0)
        assert threads_of(limit) == expected


def test_one_thread_stays_one(machine: Machine) -> None:
    torch.set_num_threads(1)
    limit = ThreadLimit()
    for _ in range(2):
        machine.passes(10.0, 1.0)
        with limit.applied():
            assert torch.get_num_threads() == 1
