"""PAT's offline constraints: each one alone, with the numbers worked out by hand; and which tiles are listed."""

import pytest
import torch

from benchmarks.kernels.tile_solver import (
    ARCHITECTURES,
    Memory,
    Resources,
    keys_in_flight,
    least_keys,
    reasons_against,
)
from trunkattn import AttentionConfig
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles
from trunkattn.gpu.portable.spec import without_subtiles
from trunkattn.gpu.tiles import GpuTile

HOPPER = ARCHITECTURES[90]
MEMORY = Memory(latency_ns=800, bytes_per_ns=4574, num_sms=132)


def tile(m: int = 16, n: int = 64, warps: int = 2, stages: int = 3) -> GpuTile:
    return GpuTile(m, n, warps, stages, ctas_per_sm=1, block_ns=(1, 1), chain_ns=(1, 1))


@pytest.mark.parametrize(
    ("warps", "used", "ctas_per_sm"),
    [
        (4, Resources(128, 0, 1000), 4),  # 65,536 / (128 registers x 128 threads)
        (1, Resources(255, 0, 1000), 8),  # 255 are given out as 256
        (1, Resources(16, 0, 0), 32),
        (8, Resources(32, 0, 0), 8),  # 2,048 threads
        (4, Resources(32, 0, 75 << 10), 3),  # 228 KiB / 76 KiB
        (4, Resources(32, 0, 228 << 10), 0),
    ],
)
def test_resident_ctas_are_limited_by_each_resource(warps: int, used: Resources, ctas_per_sm: int) -> None:
    assert HOPPER.resident(tile(warps=warps), used) == ctas_per_sm


def test_the_lower_bound_on_keys_is_shared_by_the_ctas() -> None:
    # 800 ns x 4,574 bytes/ns = 3.66 MB in flight on the card, 27.7 kB on each of 132, 108.3 keys of 256 bytes
    assert [least_keys(ctas_per_sm, MEMORY, 256) for ctas_per_sm in (1, 2, 4)] == [109, 55, 28]


def test_keys_in_flight_are_those_of_all_stages_but_one() -> None:
    assert [keys_in_flight(tile(n=64, stages=stages)) for stages in (2, 3, 5)] == [64, 128, 256]


@pytest.mark.parametrize(
    ("candidate", "used", "reason"),
    [
        (tile(m=24), Resources(64, 0, 1000), "m=24 is no power of two from 16"),
        (tile(n=8, stages=20), Resources(64, 0, 1000), "n=8 is no power of two from 16"),
        (tile(), Resources(64, 8, 1000), "spills 8 bytes"),
        (tile(), Resources(64, 0, 240_000), "240000 bytes of shared memory, 232448 allowed"),
        (tile(n=16, warps=4, stages=2), Resources(255, 0, 1000), "2 CTAs on an SM need 55 keys in flight each, 16 are"),
        (tile(warps=32), Resources(128, 0, 1000), "no CTA fits an SM"),
    ],
)
def test_each_constraint_has_its_reason(candidate: GpuTile, used: Resources, reason: str) -> None:
    assert reasons_against(candidate, used, HOPPER, MEMORY, 256) == [reason]


def test_a_good_tile_has_no_reason_against_it() -> None:
    assert reasons_against(tile(), Resources(180, 0, 40_000), HOPPER, MEMORY, 256) == []


# bytes of an element, the larger of head_dim and head_dim_v, the largest group
@pytest.mark.parametrize(
    ("kv_itemsize", "width", "largest"),
    [(2, 64, 64), (2, 128, 64), (1, 128, 64), (2, 129, 32), (1, 256, 32), (4, 64, 32)],
)
def test_every_group_has_tiles_that_the_kernel_can_run(kv_itemsize: int, width: int, largest: int) -> None:
    for group in range(1, largest + 1):
        tiles = decode_tiles(kv_itemsize, width, group)
        assert [it.block_m for it in tiles] == sorted({it.block_m for it in tiles if it.block_m >= group})
        for it in tiles:
            rows = it.block_m // it.subtiles
            sizes = (it.block_m, it.block_n, rows, it.private_n)
            assert all(size >= 16 and size & (size - 1) == 0 for size in sizes), "of a matrix product"
            assert rows >= group and it.block_n % it.private_n == 0
        assert any(it.subtiles > 1 for it in tiles) == (group <= 16)
        assert all(it.subtiles == 1 for it in without_subtiles(tiles))
    assert decode_tiles(kv_itemsize, width, largest + 1) == ()


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, torch.bfloat16), (192, torch.bfloat16), (64, torch.float32)])
def test_a_group_that_fits_no_tile_is_not_supported(head_dim: int, dtype: torch.dtype) -> None:
    for group in (1, 32, 33, 64, 65, 128):
        reasons = AttentionConfig(group, 1, head_dim, 16, dtype).supports("cuda")
        fits = bool(decode_tiles(dtype.itemsize, head_dim, group))
        assert any("query heads per KV head: expected at most" in reason for reason in reasons) != fits
