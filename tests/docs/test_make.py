"""What `make` runs, and what it says of the tests that it skips."""

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
from playwright.sync_api import sync_playwright

from benchmarks.lib.chromium import find_chromium

ROOT = Path(__file__).parents[2]


def commands(target: str, folder: Path = ROOT) -> str:
    """The commands of a target, as make would run them."""
    done = subprocess.run(["make", "-n", "-W", "pyproject.toml", target], cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_tests_of_a_cpu_hide_the_gpu_and_give_the_reason_of_each_skip() -> None:
    for target in ("test", "test-fast"):
        (line,) = [line for line in commands(target).splitlines() if "pytest" in line]
        assert line.startswith("CUDA_VISIBLE_DEVICES= ") and " -rs " in line


def test_the_command_that_brings_what_is_missing_is_named() -> None:
    makefile = (ROOT / "Makefile").read_text()
    words = makefile.partition("define SKIPPED")[2].partition("endef")[0]
    for command in ("playwright install chromium", "make test-gpu", "make test-vllm", "make test-models"):
        assert command in words
    assert 'echo "$$SKIPPED"' in commands("test") or 'echo "$SKIPPED"' in commands("test")


def test_a_browser_that_is_brought_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("PLAYWRIGHT_BROWSERS_PATH", str(tmp_path))
    assert find_chromium.__wrapped__() is None
    with sync_playwright() as playwright:
        brought = Path(playwright.chromium.executable_path)
    assert brought.is_relative_to(tmp_path)
    brought.parent.mkdir(parents=True)
    brought.touch()
    assert find_chromium.__wrapped__() == str(brought)


def test_a_folder_s_name_may_have_spaces(tmp_path: Path) -> None:
    folder = tmp_path / "my clone"
    needed = ("Makefile", "pyproject.toml", "constraints.txt", "tests/clients/requirements.txt")
    plugins = [
        f"tests/integrations/{name}" for name in ("vllm/requirements.txt", "vllm/overlay.py", "sglang/requirements.txt")
    ]
    for name in (*needed, *plugins):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    targets = re.findall(r"^(test[a-z-]*|demo|fuzz|docs|pictures|lint):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    for target in [*targets, "test-vllm-0.33.0"]:
        for line in commands(target, folder).replace("\\\n", " ").splitlines():
            assert "clone" not in [part.partition("/")[0] for part in shlex.split(line)], line
