"""The kernels of latent attention compile without a GPU, and fit the cards: registers and shared memory."""

from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels.tile_solver import ARCHITECTURES
from trunkattn.gpu.mla.blocks import BAR_EMPTY

from ..compiling import compile_report

pytestmark = pytest.mark.slow

COMPILE = str(Path(__file__).with_name("latent_compile_report.py"))
# Bytes of a thread's stack, about as found with Triton 3.9: more is what this notices. 64 rows are where the portable
# kernel stands in for the Hopper kernel.
SPILLED = {"hopper": 280, "portable 64": 680}
# With Triton 3.6, which cards run; none of them in the loop over blocks without a mask.
OLDEST_SPILLED = 24


FEW = ("hopper masked", "hopper fp8 bf16", "sm90 portable 16", "sm90 merge")


@pytest.fixture(scope="module", params=[FEW, pytest.param((), marks=pytest.mark.compile)], ids=["few", "all"])
def report(request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    return compile_report(COMPILE, *request.param)


def test_kernels_fit_the_cards(report: dict[str, dict[str, Any]]) -> None:
    assert len(report) in (len(FEW), 24)
    for name, used in report.items():
        capability = 90 if name.startswith("hopper") else int(name.split()[0].removeprefix("sm"))
        assert used["shared"] <= ARCHITECTURES[capability].shared_per_cta, name
        allowed = next((most for kind, most in SPILLED.items() if kind in name), 0)
        assert used["spilled"] <= allowed, name


def test_triton_leaves_the_named_barriers_of_the_hopper_kernel_alone(report: dict[str, dict[str, Any]]) -> None:
    taken = [used["barriers"] for name, used in report.items() if name.startswith("hopper")]
    assert taken and max(taken) <= BAR_EMPTY.value


def test_no_matrix_product_of_the_hopper_kernel_waits_for_the_one_before(report: dict[str, dict[str, Any]]) -> None:
    assert [name for name, used in report.items() if used["serialized"]] == []


@pytest.mark.parametrize("names", [FEW[1:], pytest.param(FEW, marks=pytest.mark.compile)])
def test_kernels_compile_with_the_oldest_triton(names: tuple[str, ...]) -> None:
    report = compile_report(COMPILE, *names, oldest=True)
    assert set(report) == set(names) and all(used["registers"] > 16 for used in report.values())
    for name, used in report.items():
        assert used["spilled"] <= (OLDEST_SPILLED if name.startswith("hopper") else 0), name
        assert not used["serialized"], name
