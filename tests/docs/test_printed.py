"""What pages show of a command's output is what it prints."""

from pathlib import Path

import pytest

from benchmarks.page.printed import BLOCK, PAGES, renewed

SHOWN = [page for page in PAGES if BLOCK.search(page.read_text())]


def test_some_page_shows_output() -> None:
    assert SHOWN


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.name)
def test_a_page_shows_what_commands_print(page: Path) -> None:
    assert page.read_text() == renewed(page.read_text()), (
        f"{page.name} is stale: run `python -m benchmarks.page.printed`"
    )
