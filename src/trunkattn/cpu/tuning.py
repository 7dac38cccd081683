"""Register tiles of the CPU kernels, and the CPU as the planner sees it."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from trunkattn.planner.work_list import DeviceModel


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


def cpu_device(num_threads: int) -> DeviceModel:
    """The CPU as the planner sees it. 10 GB/s and 250 GFLOP/s per core give 25 FLOP/byte; a work item costs 1.5 µs."""
    return DeviceModel(
        name="cpu",
        tile_rows=512,
        row_unit=16,
        num_workers=num_threads,
        item_bytes=16_384,
        flops_per_byte=25,
        split_above_mean=False,
        split_grid=256,
    )
