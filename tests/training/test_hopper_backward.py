"""The backward kernel for Hopper without one: what it refuses, and what it compiles to; on a card:
tests/on_gpu/test_flash_attention.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.kernels.tile_solver import ARCHITECTURES
from trunkattn.gpu.kernel import Work, choose
from trunkattn.training.spec import TrainingConfig

from ..compiling import compile_report
from ..gpu.kernel_cases import make_card

COMPILE = str(Path(__file__).with_name("hopper_compile_report.py"))
KINDS = ("causal", "full", "packed", "tree")
ALL = tuple(f"{head_dim} {group_size} {kind}" for head_dim in (64, 128) for group_size in (1, 4) for kind in KINDS)
FEW = ("128 4 causal", "64 1 packed")
# Bytes of a thread's stack, about as found with Triton 3.9: addresses and descriptors, which a loop reads again.
SPILLED_AT_MOST = {64: 520, 128: 320}


@pytest.mark.slow
@pytest.mark.parametrize("oldest", [False, True])
@pytest.mark.parametrize("names", [FEW, pytest.param(ALL, marks=pytest.mark.compile)])
def test_it_compiles_to_overlapped_products_and_fits_the_card(names: tuple[str, ...], oldest: bool) -> None:
    """C7510 and its kind say that ptxas waits for every matrix product."""
    report = compile_report(COMPILE, *names, oldest=oldest)
    assert set(report) == set(names)
    for name, used in report.items():
        assert used["serialized"] == [], name
        assert used["registers"] > 16 and used["shared"] <= ARCHITECTURES[90].shared_per_cta, name
        assert used["spilled"] <= SPILLED_AT_MOST[int(name.split()[0])], name


def test_what_it_refuses_goes_to_the_portable_kernel() -> None:
    def chosen(capability: int = 90, **changes: Any) -> tuple[str, str]:
        card = make_card(capability=capability)
        choice = choose(Work.BACKWARD, TrainingConfig(128, torch.bfloat16, 128)._replace(**changes), card)
        assert choice.kernel
        return choice.kernel.name, "; ".join(choice.reasons)

    for changes in ({}, {"dtype": torch.float16}, {"head_dim": 40, "head_dim_v": 128}):
        assert chosen(**changes) == ("Hopper backward", "")
    portable = {
        "compute capability 8.0: expected 9.0": {"capability": 80},
        "dtype torch.float32: expected torch.float16 or torch.bfloat16": {"dtype": torch.float32},
        "head_dim 192, of values 128: expected multiples of 8 from 40 to 128": {"head_dim": 192},
        "head_dim 128, of values 32: expected multiples of 8 from 40 to 128": {"head_dim_v": 32},
        "deterministic is given: the Hopper backward kernel has none": {"options": ("deterministic",)},
        "sinks is given: the Hopper backward kernel has none": {"options": ("sinks",)},
    }
    for reason, changes in portable.items():
        assert chosen(**changes) == ("portable backward", reason)
