"""Register tiles of the CPU kernels, and the CPU as the planner sees it."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import torch

from trunkattn.config import AttentionConfig
from trunkattn.planner.device import DeviceModel


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


# Tiles with as many accumulators as the registers can hold beside the operands. There are 32 registers with 16 lanes,
# 16 with 8 lanes (of which scores use 12 + 3 + 1), and 32 with 4 lanes (NEON).
REGISTER_TILES: Final = MappingProxyType(
    {
        16: RegisterTiles(lanes=16, score_keys=8, score_vectors=3, output_rows=6, output_vectors=4),
        8: RegisterTiles(lanes=8, score_keys=4, score_vectors=3, output_rows=4, output_vectors=2),
        4: RegisterTiles(lanes=4, score_keys=8, score_vectors=3, output_rows=6, output_vectors=4),
    }
)


BLOCK_TOKENS: Final = 64  # 64 keys × 96 rows of scores are 24 KiB, which stay in an L1 cache of 48 KiB


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


def unsupported(config: AttentionConfig, device: torch.device) -> list[str]:
    """Why a CPU does not run an attention; empty: it does."""
    if config.execution == "auto":
        return []
    return [f"execution={config.execution!r}: expected 'auto', for a CPU launches no GPU kernels"]
