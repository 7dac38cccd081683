"""What the planner must know of a device: integers, from measurements. Nothing here imports a compiler."""

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class DeviceModel:
    """What the planner must know of a device; integers, from measurements (`cpu/tuning.py`, `gpu/cards.py`, the specs).

    Attributes:
        name: what `stats.tiles` calls the device's tile.
        tile_rows: query rows (tokens × group size) of the tallest tile.
        row_unit: rows are computed in multiples of this, a power of two.
        num_workers: workers, each of which computes one work item of one KV head at a time.
        item_bytes: fixed cost of such an item, in bytes of KV that are read in the same time.
        flops_per_byte: arithmetic done while one byte is read, for balance only.
        split_above_mean: no work item is longer than the mean (PAT §6).
        split_grid: splits begin at multiples of this many tokens from a pack's start.
        by_schedule: tiles are split only as far as all workers then end sooner, partials included.
        partial_factor: with `by_schedule`, bytes of KV that are read while a byte of partials is written or read. It
            prices splits and whole work lists; packs are priced in bytes alone.
        merge_bytes: with `by_schedule`, fixed cost of a merge, in bytes of KV that are read in the same time.
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
    """What is fitted to a card, in integers (`gpu.cards`).

    bytes_per_us: memory bandwidth.
    launch_ns: time that a launch adds if it waits for another one.
    l2_bytes_per_us: bandwidth of the L2 cache.
    filled_ns: where one round of low items reads memory, each block takes a third longer than its chain after this
        time. Before it the loads of few items do not fill the memory's queues.
    arithmetic_percent: share of a block's time that its arithmetic takes when all CTAs run. The rest is memory's time,
        which a few items do not need.
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
    """A tile as the planner sees it. num_programs: that run at once on the device. ctas_per_sm: on an SM.

    block_ns: time of a block of full and of masked segments when all of them run. chain_ns: of one such block after
    another in one program. blocks_at_once: blocks that are computed together, so that items are cut between them.
    """

    rows: int
    block_tokens: int
    num_programs: int
    block_ns: tuple[int, int]
    chain_ns: tuple[int, int]
    subtiles: int = 1  # that read private segments side by side, private_tokens at a time; see `tile_list.nest`
    private_tokens: int = 32
    paired: bool = True  # with a lowest tile for the nodes of few entries
    read_percent: int = 100  # of the bandwidth that it reaches
    ctas_per_sm: int = 1
    blocks_at_once: int = 1

    def entries(self, group_size: int) -> int:
        """Query tokens that it holds."""
        return self.subtiles * (self.rows // self.subtiles // group_size)
