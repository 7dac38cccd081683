"""PAT's offline constraints: each one alone, with the numbers worked out by hand."""

import pytest

from trunkattn.kernels.tile_solver import ARCHITECTURES, Memory, Resources, keys_in_flight, least_keys, reasons_against
from trunkattn.kernels.tile_table import GpuTile

HOPPER = ARCHITECTURES[90]
MEMORY = Memory(latency_ns=800, bytes_per_ns=4574, processors=132)


def tile(m: int = 16, n: int = 64, warps: int = 2, stages: int = 3) -> GpuTile:
    return GpuTile(m, n, warps, stages, programs=1, block_ns=(1, 1), chain_ns=(1, 1))


@pytest.mark.parametrize(
    ("warps", "used", "programs"),
    [
        (4, Resources(128, 0, 1000), 4),  # 65,536 / (128 registers x 128 threads)
        (1, Resources(255, 0, 1000), 8),  # 255 are given out as 256
        (1, Resources(16, 0, 0), 32),
        (8, Resources(32, 0, 0), 8),  # 2,048 threads
        (4, Resources(32, 0, 75 << 10), 3),  # 228 KiB / 76 KiB
        (4, Resources(32, 0, 228 << 10), 0),
    ],
)
def test_resident_programs(warps: int, used: Resources, programs: int) -> None:
    assert HOPPER.resident(tile(warps=warps), used) == programs


def test_the_lower_bound_on_keys() -> None:
    # 800 ns x 4,574 bytes/ns = 3.66 MB in flight on the card, 27.7 kB on each of 132, 108.3 keys of 256 bytes
    assert [least_keys(programs, MEMORY, 256) for programs in (1, 2, 4)] == [109, 55, 28]


def test_keys_in_flight() -> None:
    assert [keys_in_flight(tile(n=64, stages=stages)) for stages in (2, 3, 5)] == [64, 128, 256]


@pytest.mark.parametrize(
    ("candidate", "used", "reason"),
    [
        (tile(m=24), Resources(64, 0, 1000), "m=24 is no power of two from 16"),
        (tile(n=8, stages=20), Resources(64, 0, 1000), "n=8 is no power of two from 16"),
        (tile(), Resources(64, 8, 1000), "spills 8 bytes"),
        (tile(), Resources(64, 0, 240_000), "240000 bytes of shared memory, 232448 allowed"),
        (tile(n=16, warps=4, stages=2), Resources(255, 0, 1000), "2 programs need 55 keys in flight each, 16 are"),
        (tile(warps=32), Resources(128, 0, 1000), "no program fits a multiprocessor"),
    ],
)
def test_each_constraint(candidate: GpuTile, used: Resources, reason: str) -> None:
    assert reasons_against(candidate, used, HOPPER, MEMORY, 256) == [reason]


def test_a_good_tile_has_no_reason_against_it() -> None:
    assert reasons_against(tile(), Resources(180, 0, 40_000), HOPPER, MEMORY, 256) == []
