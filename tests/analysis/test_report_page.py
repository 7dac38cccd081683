"""The HTML report in a real browser: no request, no error, nothing cut, on a screen, a phone and paper."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from benchmarks.lib.chromium import find_chromium
from trunkattn.analysis.reports.html import to_html

from .analyses import busy_analysis, quiet_analysis

CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
SCREENS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]
# Visible text that is smaller than 12 px, and visible elements that reach over an edge of the page.
SMALL = """() => [...document.querySelectorAll('body *')].filter(one => one.checkVisibility()
  && [...one.childNodes].some(node => node.nodeType === 3 && node.data.trim()) && one.tagName !== 'title'
  && parseFloat(getComputedStyle(one).fontSize) < 12).map(one => one.outerHTML.slice(0, 90))"""
OUTSIDE = """() => [...document.querySelectorAll('body *')].filter(one => one.checkVisibility()).filter(one => {
  const at = one.getBoundingClientRect();
  return at.width > 0 && (at.left < -1 || at.right > innerWidth + 1) && !one.matches('thead, thead *, .pick');
}).map(one => one.outerHTML.slice(0, 90))"""
CONTRAST = """() => {
  const light = colour => { const [r, g, b] = colour.match(/[\\d.]+/g).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const behind = one => { const colour = getComputedStyle(one).backgroundColor;
    return colour === 'rgba(0, 0, 0, 0)' && one.parentElement ? behind(one.parentElement) : colour; };
  return [...document.querySelectorAll('p, span, td, th, li, b, h1, h2, h3, label')].filter(one => one.checkVisibility()
    && one.textContent.trim()).filter(one => { const [a, b] = [light(getComputedStyle(one).color), light(behind(one))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5; }).map(one => one.outerHTML.slice(0, 90));
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.fixture
def open_report(browser: Browser, tmp_path: Path) -> Iterator[object]:
    """Opens a report without a network; afterwards it must have asked for nothing, and have had no error."""
    pages, problems = [], list[str]()

    def open_it(html: str, width: int = 1280, scheme: str = "light", scripts: bool = True) -> Page:
        path = tmp_path / "report.html"
        path.write_text(html, encoding="utf-8")
        context = browser.new_context(
            viewport={"width": width, "height": 900},
            color_scheme=scheme,  # type: ignore[arg-type]
            offline=True,
            java_script_enabled=scripts,
        )
        page = context.new_page()
        pages.append(page)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text))
        page.on("request", lambda asked: None if asked.url in (path.as_uri(), "data:,") else problems.append(asked.url))
        page.goto(path.as_uri())
        return page

    yield open_it
    for page in pages:
        page.context.close()
    assert not problems, problems


@pytest.mark.parametrize("show_text", [False, True])
@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_it_fits_and_can_be_read(open_report, width: int, scheme: str, show_text: bool) -> None:  # type: ignore[no-untyped-def]
    page = open_report(to_html(busy_analysis(), show_text=show_text), width, scheme)
    expect(page.locator(".verdict")).to_have_text("At 58 requests at a time sharing gains 17 %.")
    assert page.title().startswith("What sharing is worth: log of <script>")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(OUTSIDE) == [] and page.evaluate(SMALL) == [] and page.evaluate(CONTRAST) == []


@pytest.mark.parametrize(("width", "scheme"), SCREENS)
def test_a_report_of_nothing_fits(open_report, width: int, scheme: str) -> None:  # type: ignore[no-untyped-def]
    page = open_report(to_html(quiet_analysis()), width, scheme)
    expect(page.locator(".verdict")).to_have_text("At 3 requests at a time, 1 % gained.")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert page.evaluate(OUTSIDE) == [] and page.evaluate(SMALL) == []


def test_a_moment_is_chosen_without_a_script(open_report) -> None:  # type: ignore[no-untyped-def]
    page = open_report(to_html(busy_analysis()), scripts=False)
    shown = page.locator(".view:visible")
    expect(shown).to_have_count(1)
    expect(shown.locator(".label").first).to_contain_text("2,048 tokens × 20")
    page.locator(".moments label").last.click()
    expect(shown).to_have_count(1)
    expect(shown.locator(".label").first).to_contain_text("2,048 tokens × 38")
    page.keyboard.press("ArrowLeft")
    expect(shown.locator(".label").first).to_contain_text("2,048 tokens × 32")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_on_paper_it_is_whole(open_report, scheme: str) -> None:  # type: ignore[no-untyped-def]
    page = open_report(to_html(busy_analysis()), 720, scheme)
    page.emulate_media(media="print")
    for name in ("verdict", "figures", "forest", "plot", "spoilers"):
        expect(page.locator(f".{name}").locator("visible=true").first).to_be_visible()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth") and page.evaluate(SMALL) == []
    assert page.evaluate(CONTRAST) == []
    breaks = "names => names.map(name => getComputedStyle(document.querySelector(name)).breakAfter)"
    assert page.evaluate(breaks, ["h2", ".note"]) == ["avoid"] * 2, "a heading stays with what it is of"
    assert page.pdf().startswith(b"%PDF")
