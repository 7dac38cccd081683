"""The pictures in docs/pictures are what their code draws, and they can be read in both themes."""

import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.page.pictures import chart, demo_forest, drawing
from benchmarks.page.pictures.__main__ import DRAWN, PICTURES
from benchmarks.page.pictures.performance import CHARTS, OTHER_CHARTS
from trunkattn.cli.demo.model import find_demo_model

DOCS = PICTURES.parent
SMALLEST = 15  # size of text in a picture of 600 or 400, so that it has 12 pixels where the page shows 480 or 320
METHOD = {name: draw for name, draw in DRAWN.items() if name != "demo-forest.svg"}


@pytest.mark.parametrize(("name", "draw"), METHOD.items(), ids=METHOD)
def test_a_picture_is_what_is_drawn(name: str, draw: Callable[[], drawing.Drawing]) -> None:
    assert (PICTURES / name).read_text() == draw().svg(), f"{name} is stale: run `python -m benchmarks.page.pictures`"


@pytest.mark.slow
@pytest.mark.skipif(find_demo_model() is None, reason="needs the demo's model")
def test_the_readme_has_the_forest_of_the_demo() -> None:
    found = demo_forest.demo_forest().svg()
    assert (PICTURES / "demo-forest.svg").read_text() == found, "run `python -m benchmarks.page.pictures`"


@pytest.mark.parametrize("path", sorted(PICTURES.glob("*.svg")), ids=lambda path: path.name)
def test_a_picture_has_text_that_can_be_read_and_both_themes(path: Path) -> None:
    text = path.read_text()
    root = ElementTree.fromstring(text)
    sizes = [float(element.attrib["font-size"]) for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert root.attrib["width"] == ("400" if path.stem in CHARTS else "600")
    assert sizes and min(sizes) >= SMALLEST
    assert "prefers-color-scheme: dark" in text and root.find("{http://www.w3.org/2000/svg}title") is not None


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_text_stands_out_from_what_is_behind_it(theme: str) -> None:
    """By the contrast that WCAG 2 asks of text: 4.5, and 3 of large text."""
    for name, shade in drawing.SHADES.items():
        if name not in ("ink", "soft", "rule", "white", "black"):
            over = drawing.SHADES[shade.text]
            assert contrast(getattr(shade, theme), getattr(over, theme)) >= 4, f"{shade.text} on {name}, {theme}"
    soft, card = (getattr(drawing.SHADES[name], theme) for name in ("soft", "card"))
    assert contrast(soft, card) >= 4.5


def contrast(one: str, other: str) -> float:
    """The ratio of the luminances of two colours."""
    darker, lighter = sorted(map(luminance, (one, other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_every_page_of_how_it_works_has_a_picture() -> None:
    for page in (DOCS / "nano.md", *(DOCS / "how-it-works").glob("*.md")):
        found = re.findall(r"!\[[^\]]+\]\((?:\.\./)?pictures/([\w-]+\.svg)\)", page.read_text())
        assert found and all((PICTURES / name).is_file() for name in found), page.name


def test_every_picture_is_shown_somewhere() -> None:
    pages = [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]
    shown = {name for page in pages for name in re.findall(r"pictures/([\w-]+\.\w+)", page.read_text())}
    assert {path.name for path in PICTURES.iterdir()} <= shown
    assert {*DRAWN, *(f"{name}.svg" for name in (*CHARTS, *OTHER_CHARTS))} == {
        path.name for path in PICTURES.glob("*.svg")
    }


def test_text_that_does_not_fit_is_refused() -> None:
    picture = drawing.Drawing(600, 100, "A picture")
    with pytest.raises(ValueError, match="does not fit 40: widen the box"):
        picture.box(0, 0, 40, 20, "trunk", "a long text")
    with pytest.raises(ValueError, match="expected inside 0 to 600"):
        picture.text(560, 20, "a long text")
    picture.text(514, 20, "a long text")
    with pytest.raises(ValueError, match="expected inside 0 to 600"):
        picture.text(514, 20, "a long text", bold=True)


def test_bars_are_as_long_as_their_values() -> None:
    groups = [("a", [chart.Bar("other", 10.0, "10"), chart.Bar("trunk", 5.0, "5")])]
    text = chart.bars("Title", (("other", "them"), ("trunk", "us")), groups, "A note.").svg()
    long, short = (float(each) for each in re.findall(r'x="10" y="\d+" width="([\d.]+)" height="22"', text))
    assert long == pytest.approx(2 * short, abs=0.1)
