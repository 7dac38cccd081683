"""The GPU kernels compile without a GPU, for three generations of cards, and fit them: registers and shared memory."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from trunkattn.kernels.gpu import persistent_launch
from trunkattn.kernels.tile_solver import ARCHITECTURES
from trunkattn.kernels.tile_table import GpuTile, decode_tiles, prefill_tile

COMPILE = Path(__file__).with_name("compile_report.py")
SOURCE = Path(__file__).parents[2] / "src"

# Bytes of a thread's stack, about as found with Triton 3.9: more is what this notices. The tiles were measured on an
# sm_90, where none spills up to head_dim 128 unless one launch holds both; other cards, and wider heads, take theirs as
# they come.
SPILLED_AT_MOST = {
    (80, 128): {"64x64": 16, "persistent": 32, "prefill": 232},
    (90, 128): {
        "persistent": 8, "prefill hopper": 392, "prefill hopper window": 400,  # outside of its inner loop
        "decode hopper masked": 8,  # of warps that bring keys and values
        "hybrid": 592, "hybrid masked": 592, "hybrid window": 600,  # outside of its two inner loops
    },
    (90, 256): {"16x64 merging": 160, "persistent": 24, "prefill": 32},
    (100, 128): {"64x64": 32, "64x64 merging": 128, "persistent": 40},
    (100, 256): {"16x64 merging": 160, "32x64 merging": 64, "prefill": 256},
}  # fmt: skip
ON_HOPPER = frozenset({
    "prefill hopper", "prefill hopper window", "hybrid", "hybrid masked", "hybrid window", "decode hopper",
    "decode hopper masked",
})  # fmt: skip


class Compiled(NamedTuple):
    """By kernel: registers, spilled and shared bytes, programs on a multiprocessor."""

    capability: int
    head_dim: int
    report: dict[str, dict[str, int]]

    @property
    def tiles(self) -> tuple[GpuTile, ...]:
        """Of a 16-bit cache and groups of 4 heads."""
        tiles = decode_tiles(2, self.head_dim, 4)
        return (*tiles, *decode_tiles(2, 128, 4, hopper=True)[1:]) if self.on_hopper else tiles

    @property
    def on_hopper(self) -> bool:
        """Whether there are kernels of its own."""
        return (self.capability, self.head_dim) == (90, 128)


@pytest.fixture(
    scope="module",
    params=[(80, 128), (90, 64), (90, 128), (90, 256), (100, 128), (100, 256)],
    ids=lambda it: f"sm{it[0]}-{it[1]}",
)
def compiled(request: pytest.FixtureRequest) -> Compiled:
    """In a process of its own: in this one Triton may be an interpreter."""
    capability, head_dim = request.param
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(COMPILE), str(capability), str(head_dim)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment | {"PYTHONPATH": str(SOURCE)})
    assert done.returncode == 0, done.stderr[-4000:]
    return Compiled(capability, head_dim, json.loads(done.stdout))


def test_every_kernel_compiles(compiled: Compiled) -> None:
    tiles = {f"{tile.block_m}x{tile.block_n}{' flat' * tile.hopper}" for tile in compiled.tiles}
    hopper = ON_HOPPER if compiled.on_hopper else set()
    others = {"merge", "persistent", "prefill"} | hopper
    merging = {f"{tile.block_m}x{tile.block_n} merging" for tile in compiled.tiles if not tile.hopper}
    assert set(compiled.report) == others | tiles | merging
    assert all(used["registers"] > 16 for used in compiled.report.values())


def test_shared_memory_fits_the_device(compiled: Compiled) -> None:
    for name, used in compiled.report.items():
        assert used["shared"] <= ARCHITECTURES[compiled.capability].shared_per_program, name


def test_registers_suffice(compiled: Compiled) -> None:
    allowed = SPILLED_AT_MOST.get((compiled.capability, compiled.head_dim), {})
    for name, used in compiled.report.items():
        assert used["spilled"] <= allowed.get(name, 0), name


def test_a_persistent_launch_fits_the_card(compiled: Compiled) -> None:
    """It is cooperative: it fails unless all of its programs run at once."""
    programs, _ = persistent_launch(compiled.tiles, compiled.capability >= 90)
    assert programs <= compiled.report["persistent"]["programs"]


def test_as_many_programs_share_a_multiprocessor_as_the_tile_table_says(compiled: Compiled) -> None:
    """On the card that it was measured on; others may hold fewer."""
    if compiled.capability == 90 and compiled.head_dim <= 128:
        for tile in compiled.tiles:
            used = compiled.report[f"{tile.block_m}x{tile.block_n}{' flat' * tile.hopper}"]
            assert tile.programs <= used["programs"], used
            if tile.hopper:
                assert tile.programs <= compiled.report["decode hopper masked"]["programs"]
    if compiled.capability == 90:
        assert prefill_tile(2, compiled.head_dim).programs <= compiled.report["prefill"]["programs"]
