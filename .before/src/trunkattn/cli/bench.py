"""`trunkattn bench`: runs a benchmark script of the checkout that this package is installed from."""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Final

import typer

BENCHMARKS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "kernels": "kernels.py",
        "workloads": "workloads_gpu.py",
        "ablation": "ablation.py",
        "relay": "relay.py",
        "prefill": "prefill.py",
        "hybrid": "hybrid.py",
        "hybrid-power": "hybrid_power.py",
        "training": "flash_training.py",
        "attention": "cpu_attention.py",
        "engine": "cpu_engine.py",
        "serving": "serving.py",
        "planner": "planner.py",
        "equality": "equality.py",
    }
)


def run_bench(name: str, arguments: Sequence[str]) -> int:
    """Exit code of the script. Raises BadParameter for an unknown name, or without a checkout."""
    if name not in BENCHMARKS:
        raise typer.BadParameter(f"{name!r}: expected one of {', '.join(BENCHMARKS)}")
    script = Path(__file__).parents[3] / "benchmarks" / BENCHMARKS[name]
    if not script.is_file():
        raise typer.BadParameter(f"{name!r}: {script} is missing: expected an installation from a checkout (pip -e)")
    return subprocess.run([sys.executable, str(script), *arguments]).returncode
