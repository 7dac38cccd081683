"""The built site in a real browser: pages fit a screen and a phone, and pictures follow the theme."""

import functools
import http.server
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.lib.chromium import find_chromium

pytest.importorskip("mkdocs")
playwright = pytest.importorskip("playwright.sync_api")

ROOT = Path(__file__).parents[2]
CHROMIUM = find_chromium()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]
GUIDES = ("library", "analyze", "routing")
METHOD = (page.stem for page in sorted((ROOT / "docs" / "how-it-works").glob("*.md")))
PAGES = (
    *("", "performance/", "performance/vllm/", "api/attention/", "nano/"),
    *(f"guide/{name}/" for name in GUIDES),
    *(f"how-it-works/{name}/" for name in METHOD),
)
WIDE_CODE = (
    "[...document.querySelectorAll('pre > code')].filter(code => code.scrollWidth > code.clientWidth + 1).length"
)
BROKEN = "[...document.images].filter(image => !image.complete || !image.naturalWidth).map(image => image.src)"
# The colour in the upper left corner of the first picture, which is that of its background.
CORNER = """async () => {
  const image = document.querySelector('.md-content img');
  const canvas = document.createElement('canvas');
  canvas.width = canvas.height = 20;
  const context = canvas.getContext('2d');
  await image.decode();
  context.drawImage(image, 0, 0, 20, 20);
  return context.getImageData(1, 0, 1, 1).data[0];
}"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the built site."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def browser() -> Iterator[object]:
    with playwright.sync_playwright() as started:
        yield started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])


@pytest.mark.parametrize("width", [1280, 390])
def test_pages_fit_and_show_their_pictures(site: str, browser: object, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})  # type: ignore[attr-defined]
    for name in PAGES:
        page.goto(site + name)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, name
        assert page.evaluate(WIDE_CODE) == 0, f"{name}: code is cut"
        assert page.evaluate(BROKEN) == [], name
    page.close()


def test_a_picture_has_the_colours_of_the_pages_theme(site: str, browser: object) -> None:
    page = browser.new_page(color_scheme="light")  # type: ignore[attr-defined]
    page.goto(f"{site}how-it-works/row-tiles/")
    colours = []
    for scheme in ("default", "slate"):  # as the button sets it, against the system's setting
        page.evaluate(f"document.body.setAttribute('data-md-color-scheme', '{scheme}')")
        page.wait_for_timeout(200)
        colours.append(page.evaluate(CORNER))
    page.close()
    assert colours[0] > 200 > 80 > colours[1], colours
