"""What `make test` says of the tests that it skips."""

import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commands(target: str) -> str:
    """The commands of a target, as make would run them."""
    done = subprocess.run(["make", "-n", "-W", "pyproject.toml", target], cwd=ROOT, capture_output=True, text=True)
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
