"""As a user runs it: the installed plug-in, found by its entry point, in the processes that SGLang starts."""

import os
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "sglang_offline.py"


def run_example(*arguments: str) -> tuple[list[str], str]:
    """(the answers, everything that was said)

    SGLang chooses a free port and binds it seconds later, so another program may take it: then once more.
    """
    small = ["--dtype", "float32", "--max-tokens", "12", "--questions", "4", "--repeat", "8"]
    command = [sys.executable, str(EXAMPLE), *arguments, *small, "--context-length", "2048"]
    environment = {name: value for name, value in os.environ.items() if name != "PROMETHEUS_MULTIPROC_DIR"}
    for _ in range(3):
        result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
        said = result.stdout + result.stderr
        if "EADDRINUSE" not in said:
            break
    assert result.returncode == 0, said
    return [line for line in result.stdout.splitlines() if "?" in line], said


def test_the_entry_point_is_installed() -> None:
    (found,) = entry_points(group="sglang.srt.plugins", name="trunkattn")
    assert found.value == "trunkattn.integrations.sglang:register"


def test_the_example_in_processes_that_sglang_starts(model: Callable[[str], Path]) -> None:
    answers, said = run_example(str(model("llama")))
    assert "TrunkAttention runs prompts and decoding in 4 layers (8/2 heads of 32, torch.float32; pages of 16" in said
    assert len(answers) == 4
    assert "ours: " in said and "stock: " in said and "ms a token, 4 requests on one document" in said
    assert "4 of 4 answers are equal" in said


def test_the_example_with_sglangs_own_attention_alone(model: Callable[[str], Path]) -> None:
    answers, said = run_example(str(model("llama")), "--only", "stock")
    assert "TrunkAttention" not in said
    assert len(answers) == 4
