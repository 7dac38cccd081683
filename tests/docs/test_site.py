"""The documentation site: what the API pages show, the link to the repository, and what its search leaves out."""

import importlib.util
import re
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api"
ENTRY = re.compile(r"^::: ([\w.]+)(?:\n    options:\n      members: \[([^\]]*)\])?", re.MULTILINE)


def entries() -> list[tuple[str, str]]:
    """(name of what is documented, the members that are shown) of every API page."""
    return [match for page in sorted(API.glob("*.md")) for match in ENTRY.findall(page.read_text())]


@pytest.fixture
def hooks() -> ModuleType:
    if sys.version_info < (3, 11):
        pytest.skip("needs tomllib")
    spec = importlib.util.spec_from_file_location("mkdocs_hooks", ROOT / "mkdocs_hooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("name", "members"), entries(), ids=lambda text: str(text))
def test_what_the_reference_names_is_there(name: str, members: str) -> None:
    pytest.importorskip("transformers")
    try:
        found = import_module(name)
    except ModuleNotFoundError:
        module, _, attribute = name.rpartition(".")
        found = getattr(import_module(module), attribute)
    for member in filter(None, members.split(", ")):
        assert hasattr(found, member), f"docs/api shows {name}.{member}, which is not there"


def test_the_reference_leaves_internals_out() -> None:
    """`BatchAttention`, `Plan` and `AttentionConfig` have members that only plug-ins and back ends call."""
    shown = {name.rpartition(".")[2]: set(filter(None, members.split(", "))) for name, members in entries()}
    assert shown["BatchAttention"] == {"plan", "run", "check"}
    assert shown["Plan"] == {"stats", "num_query_tokens", "check"}
    assert shown["AttentionConfig"] == {"supports"}


def test_the_repository_is_named_in_one_place(hooks: ModuleType) -> None:
    assert hooks.repository_of("[project]\nname = 'x'") is None
    named = "[project.urls]\nRepository = 'https://example.org/a/trunkattn'"
    assert hooks.repository_of(f"[project]\nname = 'x'\n{named}") == "https://example.org/a/trunkattn"
    assert "repo_url" not in (ROOT / "mkdocs.yml").read_text()


def test_the_search_leaves_lab_notes_out(hooks: ModuleType) -> None:
    for name, left_out in (("lab/2026-11-21-decode-cpu.md", True), ("lab/index.md", False), ("index.md", False)):
        page = SimpleNamespace(file=SimpleNamespace(src_uri=name), meta={})
        assert hooks.on_page_markdown("text", page) == "text"
        assert ("search" in page.meta) == left_out


def test_no_line_ends_within_the_dashes_of_an_option(hooks: ModuleType) -> None:
    page = '<p>a --b <code class="x--y">serve --max-seqs a--b <span>--c</span></code></p>'
    assert hooks.on_page_content(page) == (
        '<p>a --b <code class="x--y">serve <span class="option">--max</span>-seqs a--b '
        '<span><span class="option">--c</span></span></code></p>'
    )
