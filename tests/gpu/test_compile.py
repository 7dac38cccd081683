"""The GPU kernels compile without a GPU, for three generations of cards, and fit them: registers and shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from trunkattn.gpu.hopper.pipeline import BAR_K_EMPTY
from trunkattn.gpu.tuning.tile_solver import ARCHITECTURES

pytestmark = pytest.mark.slow

COMPILE = Path(__file__).with_name("compile_report.py")
SOURCE = Path(__file__).parents[2] / "src"

# Bytes of a thread's stack of what is no tile for decoding, about as found with Triton 3.9: more is what this notices.
SPILLED_AT_MOST = {
    # outside of the loop over blocks without a mask, but for two reloads
    "hopper prefill": 384, "hopper prefill window": 392, "hopper prefill with all options": 624,
    "hopper decode masked": 8, "hopper decode with all options": 8,  # of producer warps
    "gathered decode": 296, "gathered decode masked": 312,  # Triton 3.6 has 64 and 160
    # outside of the two loops over blocks without a mask
    "hopper prefill and decode": 520, "hopper prefill and decode masked": 520, "hopper prefill and decode window": 528,
    "hopper prefill and decode with all options": 824,
}  # fmt: skip
PREFILL_SPILLS = {  # what does not spill is slower on an sm_90 (tile_table.py)
    (80, 256, "bf16"): 8, (80, 256, "fp8e5"): 24, (80, 256, "fp32"): 208, (90, 256, "bf16"): 88,
    (90, 256, "fp8e4nv"): 248, (90, 256, "fp32"): 16, (100, 256, "bf16"): 248, (100, 256, "fp8e4nv"): 72,
    (100, 256, "fp32"): 56,
}  # fmt: skip
DECODE_ON_HOPPER = frozenset({"hopper decode", "hopper decode masked", "hopper decode with all options"})
PROMPTS_ON_HOPPER = frozenset({"hopper prefill", "hopper prefill window", "hopper prefill with all options"})
BOTH_ON_HOPPER = frozenset({
    "hopper prefill and decode", "hopper prefill and decode masked", "hopper prefill and decode window",
    "hopper prefill and decode with all options",
})  # fmt: skip
GATHERED = frozenset({"gathered decode", "gathered decode masked"})
PORTABLE = frozenset(f"{rows}x{keys} portable" for rows in (32, 64) for keys in (32, 64))
ON_HOPPER = DECODE_ON_HOPPER | PROMPTS_ON_HOPPER | BOTH_ON_HOPPER | PORTABLE
TARGETS = (
    *((capability, 128, "bf16", "bf16") for capability in ARCHITECTURES), (90, 64, "bf16", "bf16"),
    *((capability, 256, "bf16", "bf16") for capability in ARCHITECTURES),
    (80, 128, "bf16", "fp8e5"), (90, 128, "bf16", "fp8e4nv"), (100, 128, "bf16", "fp8e4nv"),
    (80, 256, "bf16", "fp8e5"), (90, 256, "bf16", "fp8e4nv"), (100, 256, "bf16", "fp8e4nv"),
    *((capability, head_dim, "fp32", "fp32") for capability in ARCHITECTURES for head_dim in (128, 256)),
)  # fmt: skip


class Compiled(NamedTuple):
    """By kernel: registers, spilled and shared bytes, CTAs on an SM, and how many it is to hold."""

    capability: int
    head_dim: int
    kv_dtype: str
    report: dict[str, dict[str, int]]


@pytest.fixture(scope="module", params=TARGETS, ids=lambda it: f"sm{it[0]}-{it[1]}-{it[3]}")
def compiled(request: pytest.FixtureRequest) -> Compiled:
    """In a process of its own: in this one Triton may be an interpreter."""
    capability, head_dim, _, kv_dtype = request.param
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(COMPILE), *map(str, request.param)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"PYTHONPATH": str(SOURCE)})
    assert done.returncode == 0, done.stderr[-4000:]
    return Compiled(capability, head_dim, kv_dtype, json.loads(done.stdout))


def test_every_kernel_compiles(compiled: Compiled) -> None:
    tiles = {name for name in compiled.report if name[0].isdigit()}
    assert len(tiles - ON_HOPPER) == 4, "low, merging, tall, flat"
    others = {"prefill"} | ({"merge"} if compiled.kv_dtype == "bf16" else set())
    gathers = compiled.kv_dtype.startswith("fp8") or (compiled.kv_dtype == "bf16" and compiled.head_dim < 256)
    if compiled.capability == 90 and gathers:
        others |= GATHERED
    if (compiled.capability, compiled.kv_dtype) == (90, "bf16"):
        keys = 32 if compiled.head_dim == 256 else 64
        others |= DECODE_ON_HOPPER | {f"32x{keys} portable", f"64x{keys} portable"}
        others |= PROMPTS_ON_HOPPER | {"prefill portable"} | (BOTH_ON_HOPPER if compiled.head_dim == 128 else set())
    assert set(compiled.report) == tiles | others
    assert all(used["registers"] > 16 for used in compiled.report.values())


def test_shared_memory_fits_the_device(compiled: Compiled) -> None:
    for name, used in compiled.report.items():
        assert used["shared"] <= ARCHITECTURES[compiled.capability].shared_per_cta, name


def test_no_listed_tile_spills(compiled: Compiled) -> None:
    target = (compiled.capability, compiled.head_dim)
    allowed = {"prefill": PREFILL_SPILLS.get((*target, compiled.kv_dtype), 0)}
    if compiled.head_dim == 256:
        # Triton 3.6 spills nothing of the Hopper kernel with TMA, and up to 160 bytes where it gathers
        allowed |= dict.fromkeys(DECODE_ON_HOPPER, 416) | dict.fromkeys(GATHERED, 504) | {"64x32 portable": 264}
        allowed |= dict.fromkeys(PROMPTS_ON_HOPPER, 752) | {"prefill portable": 432}  # Triton 3.6 has 200 of the former
    if compiled.head_dim == 64:
        allowed |= dict.fromkeys(PROMPTS_ON_HOPPER, 216)  # Triton 3.6 has 24
    for name, used in compiled.report.items():
        assert used["spilled"] <= (SPILLED_AT_MOST | allowed).get(name, 0), name


def test_triton_leaves_the_empty_barriers_of_pipelines_alone(compiled: Compiled) -> None:
    for name in (DECODE_ON_HOPPER | PROMPTS_ON_HOPPER | BOTH_ON_HOPPER | GATHERED) & set(compiled.report):
        assert 0 < compiled.report[name]["barriers"] <= BAR_K_EMPTY.value, name


def test_producers_acquire_and_consumers_release_every_stage(compiled: Compiled) -> None:
    """The race checker does not see what TMA writes."""
    pipelines = {name: used["pipelines"] for name, used in compiled.report.items() if used["pipelines"]}
    assert set(pipelines) == {name for name in compiled.report if name.startswith("hopper")}
    for name, (fills, acquires, products, releases) in pipelines.items():
        assert acquires == fills >= 2, f"{name}: a stage is filled that its consumers have not released"
        assert releases == products >= 6, f"{name}: a product does not release its stage"


def test_as_many_ctas_share_an_sm_as_the_tile_table_says(compiled: Compiled) -> None:
    """On the cards that it was measured on; others may hold fewer low ones."""
    for name, used in compiled.report.items():
        if "expected" in used and (compiled.capability == 90 or "16x" not in name):
            assert used["ctas_per_sm"] >= used["expected"], name
