"""Every result file is read: by a page or a test, or it is named by a lab note."""

import re
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

from benchmarks.page import common, performance_page
from benchmarks.page.plots.__main__ import PLOTS

ROOT = Path(__file__).parents[2]
LAB = ROOT / "docs" / "lab"
RESULTS = {path.stem for path in common.RESULTS.glob("*.json")}


def read_by_pages(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    found, read = set[str](), common.read

    def note(path: Path) -> str:
        found.add(path.stem)
        return read(path)

    monkeypatch.setattr(common, "read", note)
    performance_page.expected()
    return found


def named_by_tests() -> set[str]:
    text = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("*.py"))
    return {name for name in RESULTS if f'"{name}"' in text or f'"{name}.json"' in text}


def listed() -> Iterator[str]:
    """What the index of the lab notes says of result files: names, or patterns of names."""
    for line in (LAB / "index.md").read_text().splitlines():
        if line.startswith("| 20"):
            yield from re.findall(r"`([^`]+)`", line.strip("| ").split("|")[-1])


def named_by_notes() -> set[str]:
    text = "\n".join(path.read_text() for path in LAB.glob("*.md"))
    patterns = list(listed())
    return {name for name in RESULTS if f"{name}.json" in text or any(fnmatch(name, each) for each in patterns)}


def test_every_result_is_read_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {plot.result for plot in PLOTS.values()}
    unknown = RESULTS - read_by_pages(monkeypatch) - drawn - named_by_tests() - named_by_notes()
    assert not unknown, f"delete {sorted(unknown)}, or name them in a lab note's row of docs/lab/index.md"


def test_the_index_lists_results_that_there_are() -> None:
    missing = [each for each in listed() if not any(fnmatch(name, each) for name in RESULTS)]
    assert not missing
