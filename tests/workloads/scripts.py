"""Runs a benchmark's script with arguments that it must refuse."""

import subprocess
import sys
from pathlib import Path


def refusal(script: str, arguments: list[str]) -> str:
    """What it says on standard error before it ends with status 2."""
    path = Path(__file__).parents[2] / "benchmarks" / script
    done = subprocess.run([sys.executable, str(path), *arguments], capture_output=True, text=True)
    assert done.returncode == 2
    return done.stderr
