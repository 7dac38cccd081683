"""Phrases at which a reader stumbles do not come back into the documentation. docs/lab is frozen and left out."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(path for path in (ROOT / "docs").rglob("*.md") if "lab" not in path.parts),
    ]
)
STUMBLES = (
    r"so many of",
    r"of so (?:many|much)",
    r"of before\b",
    r"in the mean\b",
    r"\bthat (?:is|are) there\b",
    r"\banew\b",
    r"of those the\b",
    r"\bcopy engine\b",
    r"\bwarps with roles\b",
    r"\bas above\.",
    r"under way on the card",
    r"\blos(?:e|es|ing) (?:its|their|some) bits\b",
    r"\bnobody describes\b",
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_stumbling(page: Path) -> None:
    text = " ".join(page.read_text().split())
    found = [match[0] for pattern in STUMBLES for match in re.finditer(pattern, text, re.IGNORECASE)]
    assert not found, f"{page.name}: {found}"


def test_lengths() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
