"""FlashAttention's training kernels compile without a GPU, for three generations of cards, and fit them."""

from pathlib import Path

import pytest

from benchmarks.kernels.tile_solver import ARCHITECTURES

from ..compiling import compile_report

pytestmark = pytest.mark.slow

COMPILE = str(Path(__file__).with_name("compile_report.py"))

# Bytes of a thread's stack, about as found with Triton 3.9: more is what this notices. Gradients of keys and values
# hold two accumulators of 128 × 128 in registers, and one pass also a part of dq. Those of trees are compiled for any
# number of tokens, and spill more than those for whole 16. With Triton 3.6 they are as fast on an H200 (the lab note
# one-kernel-for-every-tree).
SPILLED_AT_MOST = {
    (80, 128): {
        "forward": 48, "keys": 24, "queries": 80, "one_pass": 64, "forward tree": 16, "keys tree": 64,
        "queries tree": 104, "one_pass tree": 160,
    },
    (90, 64): {"one_pass": 8},
    (90, 128): {
        "keys": 104, "one_pass": 288, "keys packed": 240, "keys tree": 128, "queries tree": 40,
        "one_pass tree": 376, "keys all": 128, "one_pass all": 360,
    },
    (100, 128): {"forward": 72, "keys": 400, "forward tree": 128},
}  # fmt: skip


FEW = ("forward tree", "one_pass all", "queries")  # all others are left to `make test-compile`
MORE = [pytest.param(*target, (), marks=pytest.mark.compile) for target in ((80, 128), (90, 64), (90, 128), (100, 128))]


@pytest.mark.parametrize(("capability", "head_dim", "names"), [(90, 128, FEW), *MORE])
def test_passes_compile_and_fit_the_card(capability: int, head_dim: int, names: tuple[str, ...]) -> None:
    limit = ARCHITECTURES[capability].shared_per_cta
    report = compile_report(COMPILE, str(capability), str(head_dim), str(limit), *names)
    assert set(report) >= (set(names) or {"forward", "keys", "queries", "one_pass"})
    allowed = SPILLED_AT_MOST.get((capability, head_dim), {})
    for name, used in report.items():
        assert used["registers"] > 16 and used["shared"] <= limit, name  # what does not fit compiles to a trap
        assert used["spilled"] <= allowed.get(name, 0), name


@pytest.mark.parametrize(
    "names", [("forward all", "one_pass all", "queries all", "prepare"), pytest.param((), marks=pytest.mark.compile)]
)
def test_passes_compile_with_the_oldest_triton(names: tuple[str, ...]) -> None:
    limit = ARCHITECTURES[90].shared_per_cta
    for used in compile_report(COMPILE, "90", "128", str(limit), *names, oldest=True).values():
        assert used["registers"] > 16 and used["shared"] <= limit
