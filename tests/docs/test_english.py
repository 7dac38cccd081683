"""Phrases at which a reader stumbles do not come back into pages, docstrings and comments. docs/lab is frozen."""

import ast
import io
import re
import tokenize
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
    r"\b(?:of|as) so (?:many|much)\b",
    r"\bas of (?:a|an|the)?[ `]",
    r"so many of",
    r"of before\b",
    r"in the mean\b",
    r"\bthat (?:is|are) there\b",
    r"\banew\b",
    r"of those the\b",
    r"\bcopy engine\b",
    r"\bwarps with roles\b",
    r"\bas above\.",
    r"under way on the card",
    r"\w alone(?:[.;)]|$)",
    r"\blos(?:e|es|ing) (?:its|their|some) bits\b",
    r"\bnobody describes\b",
    r"\bone behind the other\b",
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_have_no_phrase_that_readers_stumble_over(page: Path) -> None:
    text = " ".join(page.read_text().split())
    found = stumbles(text, STUMBLES)
    assert not found, f"{page.name}: {found}"


def stumbles(text: str, patterns: tuple[str, ...]) -> list[str]:
    return [match[0] for pattern in patterns for match in re.finditer(pattern, text, re.IGNORECASE)]


def prose(source: str) -> str:
    """Docstrings and comments of a source file, without its strings and code."""
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, documented)]
    docstrings = [ast.get_docstring(node) or "" for node in nodes]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return " ".join(" ".join([*docstrings, *comments]).split())


def test_no_stumbling_in_the_source() -> None:
    files = sorted(file for folder in ("src", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py"))
    assert len(files) > 400
    found = {str(file.relative_to(ROOT)): stumbles(prose(file.read_text()), STUMBLES) for file in files}
    assert not {name: phrases for name, phrases in found.items() if phrases}


def test_a_phrase_in_a_docstring_or_a_comment_is_found() -> None:
    source = 'def f():\n    """Writes the table anew."""\n    return "anew"  # so many of\n'
    assert stumbles(prose(source), STUMBLES) == ["so many of", "anew"]


def test_the_readme_has_at_most_150_lines() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
