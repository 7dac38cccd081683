"""The kernels of latent attention compile without a GPU, and fit the cards: registers and shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels.tile_solver import ARCHITECTURES
from trunkattn.gpu.mla.blocks import BAR_EMPTY

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[2]
# Bytes of a thread's stack, about as found with Triton 3.9: more is what this notices. Triton 3.6 has 24 of the Hopper
# kernel, none of them in the loop over blocks without a mask; 64 rows are where the portable kernel stands in for it.
SPILLED = {"hopper": 280, "portable 64": 680}


FEW = ("hopper masked", "sm90 portable 16", "sm90 merge")


@pytest.fixture(scope="module", params=[FEW, pytest.param((), marks=pytest.mark.compile)], ids=["few", "all"])
def report(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """From a process of its own: in this one Triton may be an interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join((str(PROJECT / "src"), str(PROJECT)))
    command = [sys.executable, str(Path(__file__).with_name("latent_compile_report.py")), *request.param]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


def test_kernels_fit_the_cards(report: dict[str, dict[str, Any]]) -> None:
    assert len(report) in (len(FEW), 19)
    for name, used in report.items():
        capability = 90 if name.startswith("hopper") else int(name.split()[0].removeprefix("sm"))
        assert used["shared"] <= ARCHITECTURES[capability].shared_per_cta, name
        allowed = next((most for kind, most in SPILLED.items() if kind in name), 0)
        assert used["spilled"] <= allowed, name


def test_triton_leaves_the_named_barriers_of_the_hopper_kernel_alone(report: dict[str, dict[str, Any]]) -> None:
    taken = [used["barriers"] for name, used in report.items() if name.startswith("hopper")]
    assert taken and max(taken) <= BAR_EMPTY.value
