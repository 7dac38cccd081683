"""Where the result of a benchmark goes."""

import json
import os
import threading
from pathlib import Path

import pytest

from benchmarks.lib import report


@pytest.fixture(autouse=True)
def _from_no_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BENCHMARK_COMMIT", "0123456")


def test_a_link_stays_one_and_a_file_is_replaced_whole(tmp_path: Path) -> None:
    """/dev/stdout is a link: to put a file in its place would take it from every other program."""
    link, target = tmp_path / "link", tmp_path / "target.json"
    link.symlink_to(target)
    target.touch()  # as a shell makes it
    assert report.read_result("x", link) == {}
    for number in (1, 2):
        assert report.write_result("x", {"number": number}, path=link) == target
        assert link.is_symlink() and report.read_result("x", link)["number"] == number
    assert sorted(tmp_path.iterdir()) == [link, target]


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    assert report.read_result("x", pipe) == {}
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    report.write_result("x", {"number": 1}, path=pipe)
    reader.join()
    assert json.loads(read[0])["number"] == 1 and list(tmp_path.iterdir()) == [pipe]
