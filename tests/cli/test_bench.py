"""`trunkattn bench`: finds the script, hands its options on, reports its exit code."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from trunkattn.cli import bench
from trunkattn.cli.app import app


@pytest.mark.parametrize("script", bench.BENCHMARKS.values())
def test_every_benchmark_is_there(script: str) -> None:
    assert (Path(__file__).parents[2] / "benchmarks" / script).is_file()


def test_options_after_the_name_are_the_scripts_own() -> None:
    command = [sys.executable, "-c", "from trunkattn.cli import main; main()", "bench", "kernels", "--heads", "3/2"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert "argument --heads: invalid choice: '3/2'" in done.stderr


def test_a_script_that_fails_fails_the_command() -> None:
    assert CliRunner().invoke(app, ["bench", "engine", "--no-such-option"]).exit_code == 2


def test_an_unknown_name_is_refused() -> None:
    result = CliRunner().invoke(app, ["bench", "kernel"])
    assert result.exit_code == 2
    assert "'kernel': expected one of kernels, workloads" in " ".join(result.output.replace("│", " ").split())
