"""Tiles as data (PAT §5.2): what a spec lists, and what the planner must know of them. No compiler is imported."""

from dataclasses import dataclass, replace
from typing import Final

from trunkattn.planner.device import DeviceModel, TileConfig

PORTABLE_DECODE: Final = "portable decode"  # the kernel of a tile that names no other
SHORT_WINDOW: Final = 128  # tokens; longer windows were not timed


@dataclass(frozen=True)
class Tile:
    """A tile of BLOCK_M query rows × BLOCK_N keys, which one CTA computes.

    Attributes:
        warps, stages: how it is compiled.
        ctas_per_sm: CTAs that run at once on an SM.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    ctas_per_sm: int


@dataclass(frozen=True)
class GpuTile(Tile):
    """A tile of a decode kernel, and what the planner must know of it.

    Attributes:
        block_ns: time of a block of keys when all CTAs run: of one that all rows see whole, and of one with a mask.
        chain_ns: the same for one block after another in one CTA.
        subtiles: equal parts of the rows that read keys of their own side by side. Blocks with a mask are theirs.
        private_n: keys of a subtile's block.
        flat_n: BLOCK_N without subtiles.
        kernel: the name of the kernel that computes it.
        one_launch: in a plan of fixed size one launch computes all such tiles. They leave no nodes to another tile, and
            their times are those of their own head_dim.
        read_percent: share of the bandwidth that it reaches.
        blocks_at_once: that its kernel computes together: items are cut between them.
        queued_per_sm: CTAs on an SM in plans of fixed size, more than run at once, if all taller tiles share a launch:
            nothing is left to merge then, and a card that starts a CTA where another one ends deals the tasks out more
            evenly than CTAs that take turns. 0: as many as run at once.
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

    @property
    def merges(self) -> bool:
        """Whether its items may merge partial states of other launches. Tiles of more rows would spill, and a launch of
        several tiles cannot wait for some of its own."""
        return self.block_m == 16 and not self.one_launch


@dataclass(frozen=True)
class PrefillTile(Tile):
    """A tile of prompt chunks, and what the planner must know of it.

    Attributes:
        above_rows: requests with more rows (query tokens × group size) take it.
        persistent: its CTAs stay on their SMs and take one item after the other, instead of an item each.
        ctas_under_short_window: CTAs that run at once on an SM under a window of up to `SHORT_WINDOW` tokens, where an
            item has two or three blocks and little but waits; None: `ctas_per_sm`.
        item_bytes, partial_factor, merge_bytes: as in `DeviceModel`.
    """

    above_rows: int = 64  # about what the tallest decode tile holds: up to there one tile reads a request's KV once
    persistent: bool = False
    ctas_under_short_window: int | None = None
    item_bytes: int = 120_000  # about 4 µs to begin and to end
    partial_factor: int = 1
    merge_bytes: int = 240_000

    def under(self, window: int) -> "PrefillTile":
        """The tile under a window of so many tokens."""
        short = self.ctas_under_short_window if window <= SHORT_WINDOW else None
        return replace(self, ctas_per_sm=short) if short else self


@dataclass(frozen=True)
class MergeTile:
    """Tasks of the merge kernel, and its CTAs.

    Attributes:
        heads: of a task that has several; they divide all heads. Tasks have several where more than half of the CTAs
            get one.
        slices: of a head, each a task, where there are few heads. A task adds blocks of partials one after the other,
            and of fewer dims a block has more.
        sliced_up_to: heads of all query tokens, together; 0: they always stay whole.
        warps: of a CTA.
        ctas_per_sm: so many are launched.
    """

    heads: int
    slices: int
    sliced_up_to: int
    warps: int
    ctas_per_sm: int

    def most_tasks(self, num_heads: int) -> int:
        """How many tasks so many heads of query tokens make at most."""
        return num_heads * self.slices if num_heads <= self.sliced_up_to else num_heads


def gpu_device(num_sms: int, rows: int) -> DeviceModel:
    """A GPU as the packing policies see it: rows of the tallest tile, 2 CTAs on an SM, 170 FLOP in the time of a
    byte."""
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
    """A tile as the planner sees it. key_bytes: of a key and its value. The times of a tile are for 512, unless
    `one_launch` says that they are those of its own head_dim."""
    scale = 512 if tile.one_launch else key_bytes
    return TileConfig(
        rows=tile.block_m,
        block_tokens=tile.block_n,
        num_programs=num_sms * tile.ctas_per_sm,
        block_ns=(tile.block_ns[0] * scale // 512, tile.block_ns[1] * scale // 512),
        chain_ns=(tile.chain_ns[0] * scale // 512, tile.chain_ns[1] * scale // 512),
        subtiles=tile.subtiles,
        private_tokens=tile.private_n,
        paired=not tile.one_launch,
        read_percent=tile.read_percent,
        ctas_per_sm=tile.ctas_per_sm,
        blocks_at_once=tile.blocks_at_once,
    )


def prefill_device(num_sms: int, tile: PrefillTile) -> DeviceModel:
    """A GPU as the planner of prompt chunks sees it. A tile takes the same time however many of its rows are used. That
    two CTAs share an SM under a short window is left out: its items are too small to cut."""
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
