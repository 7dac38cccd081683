"""How busy other programs keep the machine, and what the demo says of it."""

import os
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from trunkattn import other_work
from trunkattn.cli.demo.report import busy_words
from trunkattn.other_work import OtherWork


def write(file: Path, busy_seconds: float, idle_seconds: float) -> None:
    """Two processors that share the work; a third one, which this process may not use, is always busy."""
    ticks = os.sysconf("SC_CLK_TCK")
    one = f"{round(busy_seconds * ticks / 2)} 0 0 {round(idle_seconds * ticks / 2)} 0 0 0 0 0 0"
    file.write_text(f"cpu  1 2 3\ncpu0 {one}\ncpu1 {one}\ncpu2 {round(time.monotonic() * ticks)} 0 0 0\nintr 1\n")


@pytest.fixture(autouse=True)
def two_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})


def test_it_counts_what_others_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat, clock = tmp_path / "stat", [100.0]
    monkeypatch.setattr(other_work, "_STAT", stat)
    monkeypatch.setattr(other_work, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    write(stat, 1000.0, 5000.0)
    work = OtherWork()
    clock[0] += 100.0
    write(stat, 1150.0, 5050.0)
    assert work.cores() == pytest.approx(1.5, abs=0.1)  # this process computes for a moment of them


def test_its_own_work_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stat = tmp_path / "stat"
    monkeypatch.setattr(other_work, "_STAT", stat)
    write(stat, 1000.0, 5000.0)
    work, before = OtherWork(), time.process_time()
    while time.process_time() < before + 0.3:
        pass
    write(stat, 1000.0 + time.process_time() - before, 5000.0)
    cores = work.cores()
    assert cores is not None and cores < 0.2


def test_nobody_knows_without_the_systems_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(other_work, "_STAT", tmp_path / "absent")
    assert OtherWork().cores() is None


def test_a_busy_machine_is_told_and_an_idle_one_is_not() -> None:
    assert busy_words(None, 2) == busy_words(0.1, 2) == ""
    assert "1.3 of 2 cores" in busy_words(1.3, 2)
