"""Draws docs/pictures/analyze-report.png: the report of `trunkattn analyze` on an invented log, in a browser.

    python -m benchmarks.page.report_example

A shop's assistant answers customers: one system prompt, a guide for each of three departments, and questions. Requests
of one client program begin with the time, which parts them from all others.
"""

import json
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import sync_playwright

from benchmarks.lib.chromium import find_chromium
from benchmarks.lib.options import no_options
from benchmarks.page.common import ROOT
from trunkattn.analysis.analyze import analyze
from trunkattn.analysis.reading.log import read_log
from trunkattn.analysis.reports.html import to_html
from trunkattn.analysis.settings import Settings

PICTURE: Final = ROOT / "docs" / "pictures" / "analyze-report.png"
NUM_REQUESTS: Final = 600
PER_SECOND: Final = 16.0
WITH_TIME: Final = 0.25  # share of the requests that begin with the time
DEPARTMENTS: Final = (("furniture", 110), ("garden", 60), ("kitchen", 30))  # paragraphs of each guide
SIZE: Final = (1000, 1345)  # pixels that the picture shows
SETTINGS: Final = Settings(concurrencies=(1, 4, 16, 64, 128))


def requests() -> Iterator[dict[str, Any]]:
    """The log."""
    numbers = random.Random(0)
    rules = " ".join(f"Rule {number}: be brief, and name the page of the guide." for number in range(120))
    guides = [
        " ".join(
            f"The {name} guide, part {part}: sizes, prices and care of article {part * 37}." for part in range(parts)
        )
        for name, parts in DEPARTMENTS
    ]
    second = 1_790_000_000.0
    for number in range(NUM_REQUESTS):
        second += numbers.expovariate(PER_SECOND)
        guide = numbers.choices(guides, (5, 3, 2))[0]
        begin = f"It is {second:.3f} seconds past the epoch. " if numbers.random() < WITH_TIME else ""
        question = " ".join(numbers.choices(("what", "does", "this", "cost", "in", "green", "please"), k=12))
        messages = [
            {"role": "system", "content": f"{begin}{rules} {guide}"},
            {"role": "user", "content": f"Customer {number * 7919} asks: {question}"},
        ]
        yield {"timestamp": round(second, 3), "messages": messages, "output_tokens": numbers.randint(80, 500)}


def report() -> str:
    """The report as HTML."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "shop.jsonl"
        path.write_text("".join(json.dumps(request) + "\n" for request in requests()), encoding="utf-8")
        return to_html(analyze(read_log(path), SETTINGS))


def main() -> None:
    chromium = find_chromium()
    if chromium is None:
        print(f"{PICTURE.relative_to(ROOT)} stays as it is: there is no Chromium on this machine")
        return
    width, height = SIZE
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        path = Path(folder) / "report.html"
        path.write_text(report(), encoding="utf-8")
        page = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"]).new_page(
            viewport={"width": width, "height": height}, color_scheme="light"
        )
        page.goto(path.as_uri())
        page.screenshot(path=PICTURE, clip={"x": 0, "y": 0, "width": width, "height": height}, full_page=True)
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    no_options(__doc__)
    main()
