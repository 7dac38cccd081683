"""Prefill tiles."""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from trunkattn.gpu.tuning.cards import TIMED_CAPABILITY
from trunkattn.gpu.tuning.decode import WIDE, Tile
from trunkattn.planner.work_list import DeviceModel


@dataclass(frozen=True)
class PrefillTile(Tile):
    """A tile of prompt chunks.

    Attributes:
        above_rows: requests with more rows (query tokens × group size) take it.
        hopper: the Hopper kernel computes its items, where it can read the tensors; otherwise `prefill_kernel` does.
    """

    above_rows: int = 64  # about what the tallest decode tile holds: up to there one tile reads a request's KV once
    hopper: bool = False


# The largest tile that compiles for an sm_90 without spilling at a head_dim of 128. The Hopper kernel takes the same
# items.
PREFILL_TILE: Final = PrefillTile(128, 64, 8, 3, ctas_per_sm=1)


# For a head_dim over 128. It spills a little and is still faster than smaller tiles, which do not.
PREFILL_TILE_WIDE: Final = PrefillTile(64, 64, 8, 2, ctas_per_sm=1)


# The same for the Hopper kernel, whose items have 128 rows.
PREFILL_TILE_HOPPER_WIDE: Final = PrefillTile(128, 32, 8, 2, ctas_per_sm=1, hopper=True)


# For float32, and for a head_dim over 128 on cards that were not timed.
PREFILL_TILE_SMALL: Final = PrefillTile(64, 32, 8, 2, ctas_per_sm=1)


# An sm_80 keeps the queries in registers too and would spill with 64 keys.
_PREFILL_TILE_UNTIMED: Final = replace(PREFILL_TILE, block_n=32)


def prefill_tile(kv_itemsize: int, width: int, hopper: bool = False, capability: int = TIMED_CAPABILITY) -> PrefillTile:
    """The tile of an attention; arguments as of `decode_tiles`. Its rows hold any group that those tiles hold."""
    timed = capability == TIMED_CAPABILITY
    if hopper:
        return PREFILL_TILE_HOPPER_WIDE if width > WIDE else replace(PREFILL_TILE, hopper=True)
    if kv_itemsize > 2:
        return PREFILL_TILE_SMALL
    if width > WIDE:
        return PREFILL_TILE_WIDE if timed else PREFILL_TILE_SMALL
    return PREFILL_TILE if timed else _PREFILL_TILE_UNTIMED


# Under so short a window an item of a wide group has two or three blocks, and little but waits: two CTAs wait beside
# each other.
SHORT_WINDOW: Final = 128  # tokens; longer ones were not timed
SHORT_HEAD_DIM: Final = 64  # two CTAs have too few registers for larger heads


def tile_under(tile: PrefillTile, head_dim: int, window: int) -> PrefillTile:
    """The tile under a window of so many tokens: of the Hopper kernel two CTAs share an SM if it is short."""
    short = tile.hopper and head_dim == SHORT_HEAD_DIM and window <= SHORT_WINDOW
    return replace(tile, ctas_per_sm=2) if short else tile


class _Costs(NamedTuple):
    """In bytes of KV that an SM reads in the same time: an item's begin and end, a byte of partials that is written or
    read, and a merge."""

    item: int
    partial: int
    merge: int


# An item takes about 4 µs to begin and to end. What is between takes the Hopper kernel half as long as the other, so
# these 4 µs, and partials, weigh more; and its merge begins while items end.
_COSTS, _HOPPER_COSTS = _Costs(120_000, 1, 240_000), _Costs(240_000, 6, 0)


def prefill_device(num_sms: int, tile: PrefillTile) -> DeviceModel:
    """A GPU as the planner of prompt chunks sees it. A tile takes the same time however many of its rows are used. That
    two CTAs share an SM under a short window is left out: its items are too small to cut."""
    costs = _HOPPER_COSTS if tile.hopper else _COSTS
    return DeviceModel(
        name=f"{tile.block_m}x{tile.block_n} prefill",
        tile_rows=tile.block_m,
        row_unit=tile.block_m,
        num_workers=num_sms * tile.ctas_per_sm,
        item_bytes=costs.item,
        flops_per_byte=170,
        split_above_mean=False,
        split_grid=128,
        by_schedule=True,
        partial_factor=costs.partial,
        merge_bytes=costs.merge,
    )


# Decode tiles of the kernel that computes prompt chunks and decodes at once
PREFILL_DECODE_ROWS: Final = 16
PREFILL_DECODE_NARROW_ROWS: Final = 8  # of those that it computes faster
PREFILL_DECODE_KEYS: Final = 64  # of a block of one
