"""Prefill tiles."""

from dataclasses import dataclass, replace
from typing import Final

from trunkattn.gpu.tuning.cards import TIMED_CAPABILITY
from trunkattn.gpu.tuning.decode import WIDE, Tile
from trunkattn.planner.work_list import DeviceModel


@dataclass(frozen=True)
class PrefillTile(Tile):
    """A tile of `prefill_kernel`. above_rows: requests with more rows (query tokens × group size) take it."""

    above_rows: int = 64  # about what the tallest decode tile holds: up to there one tile reads a request's KV once


# 128 rows × 64 keys in 8 warps: the largest that compiles for sm_90 without spilling (head_dim 128). 370 to 396 TFLOP/s
# on long cells of an H200 (results/prefill-h200.json), where 64x32 in 4 warps reached 344 to 369 (docs/performance.md);
# others were not timed. `hopper.prefill` takes the items of 128 rows, too.
PREFILL_TILE: Final = PrefillTile(128, 64, 8, 3, programs=1)


# head_dim over 128: this spills 88 bytes on an sm_90 and reaches 200 TFLOP/s; 64x32, which spills 16, 146; of what
# does not, 32x32 in 4 warps 136, 32x64 in 8 102 and 64x16 90 (2,048 tokens behind 8k, head_dim 256, an H100)
PREFILL_TILE_WIDE: Final = PrefillTile(64, 64, 8, 2, programs=1)


# float32 (11 TFLOP/s; 32x32: 6), and heads over 128 on cards that were not timed
PREFILL_TILE_SMALL: Final = PrefillTile(64, 32, 8, 2, programs=1)


# An sm_80 keeps the queries in registers too, and would spill some 230 bytes a thread: half the keys do not
_PREFILL_TILE_UNTIMED: Final = replace(PREFILL_TILE, block_n=32)


def prefill_tile(kv_itemsize: int, width: int, capability: int = TIMED_CAPABILITY) -> PrefillTile:
    """The tile of an attention; arguments as of `decode_tiles`. Its rows hold any group that those tiles hold."""
    timed = capability == TIMED_CAPABILITY
    if kv_itemsize > 2:
        return PREFILL_TILE_SMALL
    if width > WIDE:
        return PREFILL_TILE_WIDE if timed else PREFILL_TILE_SMALL
    return PREFILL_TILE if timed else _PREFILL_TILE_UNTIMED


def prefill_device(processors: int, tile: PrefillTile) -> DeviceModel:
    """A GPU as the planner of prompt chunks sees it: a tile is computed whole, whatever rows it has; an item takes 4 µs
    to begin and to end, in which a multiprocessor reads 120 kB (128x64 on an H200: 7.5 µs of a launch of one item for
    each multiprocessor do not depend on its keys; results/prefill-h200.json)."""
    return DeviceModel(
        name=f"{tile.block_m}x{tile.block_n} prefill",
        tile_rows=tile.block_m,
        row_unit=tile.block_m,
        num_slots=processors * tile.programs,
        item_bytes=120_000,
        flops_per_byte=170,
        split_above_mean=False,
        split_grid=128,
        by_schedule=True,
    )


HYBRID_ROWS: Final = 16  # of a decode tile of the hybrid kernel


HYBRID_NARROW: Final = 8  # of those that it computes faster


HYBRID_KEYS: Final = 64  # of a block of one
