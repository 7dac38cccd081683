"""Docstrings begin with a noun or a verb, so that a reader need not guess what is returned."""

import ast
import doctest
import re
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Beginnings without a subject, such as "Of a layer.", "As on a CPU." and "items: pointer to the first."
NO_SUBJECT = re.compile(
    r"(After|As|At|Before|Behind|By|During|For|From|If|In|It|Its|Like|None|Not|Of|On|Only|Per|See|So|Such|Than|That"
    r"|The other way|The same|Then|These|Those|To|Under|Until|Up|While|With|Within|Without)\b|[a-z_, ]+:"
)


def without_subject(source: str) -> list[str]:
    """Line and beginning of every docstring that begins with neither a noun nor a verb."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and NO_SUBJECT.match(text):
                found.append(f"{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    return found


def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    files = sorted(file for folder in ("src", "benchmarks", "examples") for file in (ROOT / folder).rglob("*.py"))
    assert len(files) > 400
    found = [f"{file.relative_to(ROOT)}:{line}" for file in files for line in without_subject(file.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "file",
    [file for file in sorted((ROOT / "src").rglob("*.py")) if ">>>" in file.read_text()],
    ids=lambda file: file.stem,
)
def test_examples_in_docstrings_print_what_they_say(file: Path) -> None:
    module = import_module(".".join(file.relative_to(ROOT / "src").with_suffix("").parts))
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    "docstring",
    [
        "Of a layer.",
        "The same by TMA.",
        "The other way.",
        "By the plan's execution.",
        "From packs to work items.",
        "As in `GpuTile`.",
        "See PlanStats.",
        "In elements.",
        "None: there is nothing to compute.",
        "items: pointer to the first.",
        "k_page, v_page: strides.",
        "After a step that failed.",
        "Such a block.",
        "Those of a batch.",
    ],
)
def test_a_docstring_without_a_subject_is_found(docstring: str) -> None:
    for source in (
        f'"""{docstring}"""',
        f'def f():\n    """{docstring}"""',
        f'class A:\n    """{docstring}"""',
        f'class A:\n    async def f(self):\n        """\n        {docstring}\n        """',
    ):
        assert len(without_subject(source)) == 1


@pytest.mark.parametrize(
    "docstring",
    ["Returns the strides.", "Offsets of a page.", "Bytes: a count.", "Inputs of a step.", "Sees a key.", "dq of a q."],
)
def test_a_docstring_with_a_subject_passes(docstring: str) -> None:
    assert without_subject(f'x = "Of a layer."\ndef f():\n    """{docstring}"""  # Of a layer.') == []
