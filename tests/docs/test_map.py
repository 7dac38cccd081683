"""The map and the table of where things go name what there is, and the map leaves no file out."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "trunkattn"
MAP = (ROOT / "docs" / "map.md").read_text(encoding="utf-8")
# Folders whose row says what their files are together.
AS_A_WHOLE = {"analysis/formats", "gpu/device_planner", "gpu/hopper", "gpu/mla", "gpu/portable"}
# The text of each section about one folder.
SECTIONS = dict(re.findall(r"^## `([a-z_]+)/`[^\n]*\n(.*?)(?=^## |\Z)", MAP, re.MULTILINE | re.DOTALL))
CHANGES = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").partition("## Where the next thing goes")[2]
# change, files, what to do there
ROWS = [row for row in re.findall(r"^\| (.*?) \| (.*?) \| (.*?) \|$", CHANGES, re.MULTILINE) if row[0] != "change"]


@pytest.mark.parametrize("folder", SECTIONS)
def test_the_map_names_each_file_of_a_folder(folder: str) -> None:
    named = set(re.findall(r"`(?:[a-z_]+/)*([a-z_]+\.py)`", SECTIONS[folder]))
    files = (SOURCE / folder).rglob("*.py")
    there = {file.name for file in files if str(file.parent.relative_to(SOURCE)) not in AS_A_WHOLE} - {"__init__.py"}
    assert [name for name in sorted(there - named) if f"`{folder}/{name}`" not in MAP] == []
    assert named - {file.name for file in (SOURCE / folder).rglob("*.py")} == set()


def test_the_map_has_a_section_for_each_folder_with_files_of_its_own() -> None:
    elsewhere = {"cli", "integrations", "ops", "training"}  # rows of the last tables
    assert {file.parent.name for file in SOURCE.glob("*/*.py")} == set(SECTIONS) | elsewhere
    assert all(f"`{folder}/" in MAP for folder in elsewhere)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_row_of_contributing_names_files_and_names_that_exist(row: tuple[str, str, str]) -> None:
    _, files, what = row
    texts = []
    for name in re.findall(r"`([\w./*]+/|[\w./*]+\.py|Makefile)`", files):
        places = [found for root in (SOURCE, ROOT, SOURCE / "analysis" / "formats") for found in root.glob(name)]
        assert places, name
        inner = [file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place])]
        texts += [file.read_text(encoding="utf-8") for file in inner]
    for name in re.findall(r"`([A-Za-z_]+)`", what):
        assert re.search(rf"\b{name}\b", "\n".join(texts)), name
