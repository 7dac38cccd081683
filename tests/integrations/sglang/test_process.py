"""As a user runs it: the installed plug-in, found by its entry point, in the processes that SGLang starts."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "sglang_offline.py"


def run_example(*arguments: str) -> tuple[list[str], str]:
    """(the answers, everything that was said)"""
    command = [sys.executable, str(EXAMPLE), *arguments, "--dtype", "float32", "--max-tokens", "12"]
    environment = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said
    return [line for line in result.stdout.splitlines() if "?" in line], said


def test_the_entry_point_is_installed() -> None:
    (found,) = entry_points(group="sglang.srt.plugins", name="trunkattn")
    assert found.value == "trunkattn.integrations.sglang:register"


def test_the_example_in_processes_that_sglang_starts(model: Callable[[str], Path]) -> None:
    folder = str(model("llama"))
    ours, said = run_example(folder)
    assert "TrunkAttention runs prompts and decoding in 4 layers (8/2 heads of 32, torch.float32; pages of 16" in said
    stock, said = run_example(folder, "--stock")
    assert "TrunkAttention" not in said
    assert len(stock) == 4
    assert ours == stock
