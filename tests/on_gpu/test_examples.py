"""The examples on a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "command",
    [["cuda_graph.py"], ["mixed_step.py", "--device", "cuda"], ["training.py", "--device", "cuda"]],
    ids=lambda command: command[0],
)
def test_an_example_runs_on_a_gpu(command: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    script = [sys.executable, str(ROOT / "examples" / command[0]), *command[1:]]
    done = subprocess.run(script, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout
