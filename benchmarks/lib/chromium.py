"""The Chromium that pages are looked at with."""

import shutil
from functools import cache
from pathlib import Path
from typing import Final

NAMES: Final = ("chromium", "chromium-browser", "google-chrome")


@cache
def find_chromium() -> str | None:
    """The path of the system's Chromium, or else of the one that `playwright install chromium` brings. None: there is
    neither."""
    if found := next(filter(None, map(shutil.which, NAMES)), None):
        return found
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:  # it keeps its browsers in a folder of its own, which is not on the PATH
        its_own = playwright.chromium.executable_path
    return its_own if Path(its_own).exists() else None
