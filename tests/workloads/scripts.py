"""Runs a benchmark's script with arguments that it must refuse."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def refusal(module: str, arguments: list[str]) -> str:
    """What it says on standard error before it ends with status 2."""
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    return done.stderr
