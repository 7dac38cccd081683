"""Tiles as data (PAT §5.2): records that a spec lists and the planner reads. No compiler is imported."""

from dataclasses import dataclass, replace
from typing import Final

from trunkattn.planner.device import DeviceModel, TileConfig

PORTABLE_DECODE: Final = "portable decode"  # the default kernel of a tile
SHORT_WINDOW: Final = 128  # tokens; longer windows were not timed


@dataclass(frozen=True)
class Tile:
    """A tile of BLOCK_M query rows × BLOCK_N keys, which one CTA computes.

    Attributes:
        warps, stages: warps of a CTA and pipeline stages, with which it is compiled.
        ctas_per_sm: CTAs that run at once on an SM.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    ctas_per_sm: int


@dataclass(frozen=True)
class GpuTile(Tile):
    """A tile of a decode kernel, with the times that the planner needs.

    Attributes:
        block_ns: ns per block of keys while all CTAs run: for a block that all rows see, and for a masked block.
        chain_ns: ns per block, one after another, in a single CTA: the latency of the same two kinds of blocks.
        subtiles: equal parts of the rows, each of which reads its own private keys at the same time. They compute the
            masked blocks.
        private_n: keys of a subtile's block.
        flat_n: BLOCK_N of the tile without subtiles.
        kernel: the name of the kernel that computes it.
        one_launch: in a plan of fixed size, one launch computes all such tiles. They are never paired with another
            tile, and their times are measured with their own head_dim.
        read_percent: the percentage of the memory bandwidth that it reaches.
        blocks_at_once: blocks that its kernel computes together. Items are cut only between such groups.
        item_blocks: as in `TileConfig`.
        queued_per_sm: CTAs launched per SM in plans of fixed size if all taller tiles share a launch; more than run at
            once. Nothing is left to merge then, and the card, which starts a CTA whenever another one ends, balances
            the tasks better than persistent CTAs do. 0: as many as run at once.
    """

    block_ns: tuple[int, int]
    chain_ns: tuple[int, int]
    subtiles: int = 1
    private_n: int = 32
    flat_n: int = 64
    kernel: str = PORTABLE_DECODE
    one_launch: bool = False
    read_percent: int = 100
    queued_per_sm: int = 0
    blocks_at_once: int = 1
    item_blocks: int = 0

    @property
    def merges(self) -> bool:
        """Whether its items may merge partials of other launches. Taller tiles would spill, and a launch that computes
        several tiles cannot wait for a part of itself."""
        return self.block_m == 16 and not self.one_launch


@dataclass(frozen=True)
class PrefillTile(Tile):
    """A tile of prompt chunks, with the costs that the planner needs.

    Attributes:
        above_rows: requests with more rows (query tokens × group size) use it.
        persistent: each CTA stays on its SM and computes one item after the other, instead of one item.
        ctas_under_short_window: CTAs that run at once on an SM if the window has at most `SHORT_WINDOW` tokens: an item
            has only two or three blocks then and mostly waits; None: `ctas_per_sm`.
        item_bytes, partial_factor, merge_bytes: as in `DeviceModel`.
    """

    above_rows: int = 64  # about the rows of the tallest decode tile, which reads the KV of smaller requests once
    persistent: bool = False
    ctas_under_short_window: int | None = None
    item_bytes: int = 120_000  # read in about the time that an item takes to begin and to end
    partial_factor: int = 1
    merge_bytes: int = 240_000

    def under(self, window: int) -> "PrefillTile":
        """The tile for a sliding window of `window` tokens."""
        short = self.ctas_under_short_window if window <= SHORT_WINDOW else None
        return replace(self, ctas_per_sm=short) if short else self


@dataclass(frozen=True)
class MergeTile:
    """How the merge kernel divides its work into tasks.

    Attributes:
        heads: query heads of a task if there are many; a divisor of all heads. It is used if more than half of the CTAs
            still get a task.
        slices: tasks of one head if there are few heads. Each merges a slice of the dims, so its blocks hold more
            partials.
        sliced_up_to: the most heads, over all query tokens, that are cut into slices; 0: none ever is.
        warps: warps of a CTA.
        ctas_per_sm: CTAs that are launched per SM.
    """

    heads: int
    slices: int
    sliced_up_to: int
    warps: int
    ctas_per_sm: int

    def most_tasks(self, num_heads: int) -> int:
        """The most tasks that `num_heads` heads of query tokens make."""
        return num_heads * self.slices if num_heads <= self.sliced_up_to else num_heads


def gpu_device(num_sms: int, rows: int) -> DeviceModel:
    """The model of a GPU for the packing policies. rows: of the tallest tile. It assumes 2 CTAs on an SM, and 170 FLOP
    in the time in which a byte is read."""
    return DeviceModel(
        name="gpu",
        tile_rows=rows,
        row_unit=16,
        num_workers=2 * num_sms,
        item_bytes=12_000,
        flops_per_byte=170,
        split_above_mean=True,
        split_grid=64,
    )


def tile_config(tile: GpuTile, num_sms: int, key_bytes: int = 512) -> TileConfig:
    """The planner's description of a tile. key_bytes: bytes of a key and its value. A tile's times are given for 512
    bytes and scaled, unless `one_launch` says that they were measured with its own head_dim."""
    scale = 512 if tile.one_launch else key_bytes
    return TileConfig(
        rows=tile.block_m,
        block_tokens=tile.block_n,
        ctas_at_once=num_sms * tile.ctas_per_sm,
        block_ns=(tile.block_ns[0] * scale // 512, tile.block_ns[1] * scale // 512),
        chain_ns=(tile.chain_ns[0] * scale // 512, tile.chain_ns[1] * scale // 512),
        subtiles=tile.subtiles,
        private_tokens=tile.private_n,
        paired=not tile.one_launch,
        read_percent=tile.read_percent,
        ctas_per_sm=tile.ctas_per_sm,
        blocks_at_once=tile.blocks_at_once,
        item_blocks=tile.item_blocks,
    )


def prefill_device(num_sms: int, tile: PrefillTile) -> DeviceModel:
    """The model of a GPU for prompt chunks. A tile takes the same time however many of its rows are used. It ignores
    that more CTAs share an SM under a short window, because items are too small to be cut there."""
    return DeviceModel(
        name=f"{tile.block_m}x{tile.block_n} prefill",
        tile_rows=tile.block_m,
        row_unit=tile.block_m,
        num_workers=num_sms * tile.ctas_per_sm,
        item_bytes=tile.item_bytes,
        flops_per_byte=170,
        split_above_mean=False,
        split_grid=128,
        by_schedule=True,
        partial_factor=tile.partial_factor,
        merge_bytes=tile.merge_bytes,
    )
