"""Tiles per device, as data, with the measurement that chose each (PAT §5.2).

CPU: one work item is computed by blocks of BLOCK_TOKENS keys for all its query rows; inside, two register tiles do the
matrix products. A register tile of `rows` × `vectors` keeps rows·vectors accumulators in registers: as many as fit
beside the `vectors` operands and one broadcast.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from trunkattn.plan_format import DeviceModel


@dataclass(frozen=True)
class RegisterTiles:
    """Register tiles for one vector width: scores are keys × query rows, the output query rows × values.

    lanes: float32 per vector; the widths are in vectors.
    """

    lanes: int
    score_keys: int
    score_vectors: int
    output_rows: int
    output_vectors: int


# 2 Zen 5 cores at 16 lanes: 470 GFLOP/s for the scores, 250 per core for the output, against 110 per core for the
# BLAS that torch 2.13 calls there. 8 lanes: 16 registers hold 12 + 3 + 1. 4 lanes (NEON) has 32 registers again.
REGISTER_TILES: Final = MappingProxyType(
    {
        16: RegisterTiles(lanes=16, score_keys=8, score_vectors=3, output_rows=6, output_vectors=4),
        8: RegisterTiles(lanes=8, score_keys=4, score_vectors=3, output_rows=4, output_vectors=2),
        4: RegisterTiles(lanes=4, score_keys=8, score_vectors=3, output_rows=6, output_vectors=4),
    }
)

BLOCK_TOKENS: Final = 64  # 64 keys × 96 rows of scores (24 KiB) stay in a 48 KiB L1; 128 was no faster

# A token of a batch-invariant plan is always computed in the same chunk of its sequence, whatever it is batched with.
INVARIANT_CHUNK_TOKENS: Final = 256


def cpu_device(num_threads: int) -> DeviceModel:
    """The CPU as the planner sees it. 10 GB/s and 250 GFLOP/s per core give 25 FLOP/byte; a work item costs 1.5 µs."""
    return DeviceModel(
        name="cpu",
        tile_rows=512,
        row_unit=16,
        num_slots=num_threads,
        item_bytes=16_384,
        flops_per_byte=25,
        split_above_mean=False,
        split_grid=256,
    )


@dataclass(frozen=True)
class GpuTile:
    """BLOCK_M query rows × BLOCK_N keys of one program, and what the planner must know of it.

    warps, stages, max_registers (0: no limit): how it is compiled. programs: that run at once on a multiprocessor.
    block_ns: time of a block of keys when all those programs run: one that all rows see whole, and one with a mask.
    chain_ns: the same of one block after another in one program.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    max_registers: int
    programs: int
    block_ns: tuple[int, int]
    chain_ns: tuple[int, int]


# Measured on an H200 (head_dim 128, bf16, page 16), out of 12 tall and 16 low tiles (docs/performance.md). The times
# are a fit to 290 runs (benchmarks/calibrate.py, results/calibration-h200.json): the choice loses 2.5 % in the mean.
DECODE_TILES: Final = (
    # 256 × 4096 private tokens at 0.97 of the bandwidth; best under a trunk, where many low tiles run
    GpuTile(16, 32, 1, 4, max_registers=0, programs=6, block_ns=(1440, 3120), chain_ns=(650, 2020)),
    # best for short suffixes (1,256_256,32: 26.3 µs, the others 28.1 and 29.5)
    GpuTile(16, 64, 2, 3, max_registers=0, programs=4, block_ns=(2270, 4170), chain_ns=(1240, 2130)),
    # shortest chain per token: few requests with long contexts (1,2,64: 36.6 µs, the others 44.7 and 59.1)
    GpuTile(16, 128, 4, 2, max_registers=128, programs=3, block_ns=(2910, 6300), chain_ns=(1960, 4610)),
    # 32 or 128 keys were slower everywhere
    GpuTile(64, 64, 4, 2, max_registers=0, programs=2, block_ns=(2210, 2860), chain_ns=(540, 3030)),
    # 128 registers let two programs share a multiprocessor: 1,1024_2048,32 in 146 µs, without the limit 193
    GpuTile(128, 64, 8, 2, max_registers=128, programs=2, block_ns=(3710, 4160), chain_ns=(1220, 1720)),
)
_WIDE: Final = 128  # above this head_dim the tallest tile needs more than 128 registers and does not compile


def decode_tiles(batch_invariant: bool, kv_itemsize: int, width: int) -> tuple[GpuTile, ...]:
    """The tiles of a plan, ascending. kv_itemsize in bytes; width: the larger of head_dim and head_dim_v."""
    tiles: tuple[GpuTile, ...] = DECODE_TILES
    if width > _WIDE:
        tiles = tuple(replace(tile, max_registers=0) for tile in DECODE_TILES[:-1])
    if batch_invariant:  # one tile for every row: another would sum the same numbers in another order
        return tiles[-1:]
    # 8-bit keys are converted by every warp: 256_1024 takes 232 µs with four warps, 258 with one, 326 with two
    return tiles if kv_itemsize > 1 else tiles[2:]


@dataclass(frozen=True)
class GpuLimits:
    """Of a card. launch_ns: between dependent launches of one graph. reason: for `stats.reason`."""

    bytes_per_us: int
    launch_ns: int
    reason: str


_LIMITS: Final = MappingProxyType(
    {
        "NVIDIA H200": GpuLimits(4_540_000, 780, "NVIDIA H200"),  # measured: a reduction over 4 GiB
        "NVIDIA H100": GpuLimits(3_000_000, 780, "NVIDIA H100"),  # measured elsewhere: decode at 3.0 TB/s
    }
)
_OTHER_CARD: Final = GpuLimits(2_000_000, 3000, "an unmeasured card (2 TB/s assumed)")


def gpu_limits(name: str) -> GpuLimits:
    """Limits of the card that CUDA calls `name`; a card that was not measured gets a cautious default that says so."""
    return next((limits for card, limits in _LIMITS.items() if name.startswith(card)), _OTHER_CARD)


def gpu_device(processors: int) -> DeviceModel:
    """A GPU as the packing policies see it: 128 rows, 2 programs a multiprocessor, 170 FLOP in the time of a byte."""
    return DeviceModel(
        name="gpu",
        tile_rows=128,
        row_unit=16,
        num_slots=2 * processors,
        item_bytes=12_000,
        flops_per_byte=170,
        split_above_mean=True,
        split_grid=64,
    )
