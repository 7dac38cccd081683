"""Reports of compiled kernels, from scripts that run in a process of their own: in this one Triton may interpret."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
OLDEST_TRITON = ROOT / ".venv" / "triton-3.6.0"  # pyproject.toml accepts it; `make test` puts it there


def compile_report(*command: str, oldest: bool = False) -> dict[str, dict[str, Any]]:
    """The JSON that `python COMMAND` prints: kernel -> what it needs of a card. oldest: compiled by the oldest Triton
    that is accepted, whose front end takes less than the newest's."""
    paths = [str(ROOT / "src"), str(ROOT)]
    if oldest:
        if not OLDEST_TRITON.exists():
            pytest.skip("the oldest Triton is not installed: run `make test` once")
        paths.insert(0, str(OLDEST_TRITON))
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return report
