"""Models of a device for the planner: integers, fitted to measurements. No compiler is imported here."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class DeviceModel:
    """A device as the packing policies see it (made by `cpu/tuning.py` and `gpu/tiles.py`).

    Attributes:
        name: the name of its tile in `stats.tiles`.
        tile_rows: query rows (tokens × group size) of the tallest tile.
        row_unit: rows are computed in multiples of this, a power of two.
        num_workers: workers, each of which computes one work item of one KV head at a time.
        item_bytes: fixed cost of such an item, as the bytes of KV that are read in the same time.
        flops_per_byte: arithmetic done while one byte is read. It only balances items.
        split_above_mean: no work item is longer than the mean (PAT §6).
        split_grid: splits begin at multiples of this many tokens from a pack's start.
        by_schedule: tiles are split only if the last worker then ends sooner, the cost of partials included.
        partial_factor: with `by_schedule`, bytes of KV that are read while a byte of partials is written or read. It
            applies to splits and to whole work lists; packs are priced in plain bytes.
        merge_bytes: with `by_schedule`, fixed cost of a merge, as the bytes of KV that are read in the same time.
    """

    name: str
    tile_rows: int
    row_unit: int
    num_workers: int
    item_bytes: int
    flops_per_byte: int
    split_above_mean: bool
    split_grid: int
    by_schedule: bool = False
    partial_factor: int = 1
    merge_bytes: int = 0


class CardTimes(NamedTuple):
    """Times and rates fitted to a card, as integers (`gpu.cards`).

    bytes_per_us: memory bandwidth.
    launch_ns: time that a launch adds if it waits for another one.
    l2_bytes_per_us: bandwidth of the L2 cache.
    filled_ns: if a single round of low items reads from memory, each block takes a third longer than its chain time
    once this time has passed. Before, the loads of the items do not yet fill the memory's queues.
    arithmetic_percent: share of a block's time that is arithmetic while all CTAs run. The rest is contention for
    memory, which few items do not have.
    unhidden_part: with several rounds of items, 1/unhidden_part of the shorter of arithmetic and memory time is not
        hidden behind the longer, because rounds begin and end at different times.
    idle_percent: memory takes this many percent longer, times the share of slots that are idle.
    """

    bytes_per_us: int
    launch_ns: int
    l2_bytes_per_us: int
    filled_ns: int
    arithmetic_percent: int
    unhidden_part: int
    idle_percent: int


@dataclass(frozen=True)
class TileConfig:
    """A tile as the planner sees it. ctas_at_once, ctas_per_sm: CTAs that run at once, on the device and on an SM.

    block_ns: time of a block of full and of masked segments while all CTAs run. chain_ns: time of the same blocks, one
    after another, in a single CTA. blocks_at_once: blocks that are computed together; items are cut only between such
    groups. item_blocks: blocks that take as long as an item takes to begin and to end, if tiles may be cut into
    portions (`tiles.layout.Stage`); 0: they may not.
    """

    rows: int
    block_tokens: int
    ctas_at_once: int
    block_ns: tuple[int, int]
    chain_ns: tuple[int, int]
    subtiles: int = 1  # parts that read private segments at the same time; see `tile_list.nest`
    private_tokens: int = 32  # tokens of a subtile's block
    paired: bool = True  # may be combined with a lowest tile, which takes the nodes of few entries
    read_percent: int = 100  # percentage of the memory bandwidth that it reaches
    ctas_per_sm: int = 1
    blocks_at_once: int = 1
    item_blocks: int = 0

    def entries(self, group_size: int) -> int:
        """Query tokens that the tile holds."""
        return self.subtiles * (self.rows // self.subtiles // group_size)
