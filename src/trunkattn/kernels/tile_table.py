"""Tiles per device, as data, with the measurement that chose each (PAT §5.2).

CPU: one work item is computed by blocks of BLOCK_TOKENS keys for all its query rows; inside, two register tiles do the
matrix products. A register tile of `rows` × `vectors` keeps rows·vectors accumulators in registers: as many as fit
beside the `vectors` operands and one broadcast.
"""

from dataclasses import dataclass
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
