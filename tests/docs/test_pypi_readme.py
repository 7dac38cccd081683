"""The README that goes into the package has no link that breaks on a package index."""

import re
import sys
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
RELATIVE = re.compile(r'\]\((?!https?:|#)[^)]+\)|src="(?!https?:)')


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """hatch_build.py, with a stand-in for the build tool, which the tests' environment does not have."""
    interface = ModuleType("hatchling.metadata.plugin.interface")
    interface.MetadataHookInterface = object  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec and spec.loader
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_are_relative_in_the_repository() -> None:
    assert RELATIVE.search(README)


def test_without_a_repository_no_relative_link_is_left(hook: ModuleType) -> None:
    text = hook.standalone(README, None)
    assert not RELATIVE.search(text)
    assert "library guide" in text and "<img" not in text


def test_with_a_repository_links_and_pictures_point_there(hook: ModuleType) -> None:
    text = hook.standalone(README, "https://example.org/trunkattn/")
    assert not RELATIVE.search(text)
    assert "](https://example.org/trunkattn/blob/main/docs/performance.md)" in text
    assert 'src="https://example.org/trunkattn/raw/main/docs/pictures/demo-forest.svg"' in text


def test_relative_links_of_the_readme_lead_to_files() -> None:
    for path in re.findall(r"\]\((?!https?:|#)([^)#]+)\)", README):
        assert (ROOT / path).exists(), path
