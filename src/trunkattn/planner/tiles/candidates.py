"""The candidate tilings of a step on a GPU: their tiles, their launches, and what they cost."""

from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.config import Capacity
from trunkattn.planner.device import CardTimes, TileConfig
from trunkattn.planner.tiles.cost import (
    EVERY,
    LAUNCH_COLUMNS,
    LAUNCH_ITEM,
    LAUNCH_SPLITS,
    LAUNCH_STAGE,
    LAUNCH_TILE,
    Costs,
    TileTimes,
)
from trunkattn.planner.tiles.layout import Stage, stage_of
from trunkattn.planner.tiles.tile_list import Subtiles
from trunkattn.planner.work_list import TileLimits

_CUTS: Final = MappingProxyType({1: "", 4: " fine", 0: " uncut"})  # `Tiling.waves` -> what a tiling's name ends with
_MOST_WAVES: Final = max(_CUTS)
_MOST_LAUNCHES: Final = 2  # launches of a candidate: one for tall tiles, one for low tiles


@dataclass(frozen=True)
class TilingRule:
    """The tiles and costs from which tilings are made, as integers.

    tiles: in ascending heights. card_times: times fitted to the card. token_bytes: bytes of one token's keys and values
    of all heads. partial_bytes: bytes to write and read one partial of all query heads. fuse_up_to: the most partials
    that an item merges. l2_bytes: size of the L2 cache. batch_invariant: no segment is marked as full, so that a row's
    arithmetic does not depend on the other rows of its tile (the kernel's two loops may round differently).
    """

    tiles: tuple[TileConfig, ...]
    group_size: int
    num_kv_heads: int
    page_size: int
    card_times: CardTimes
    token_bytes: int
    partial_bytes: int
    fuse_up_to: int
    l2_bytes: int
    batch_invariant: bool = False

    @property
    def launch_ns(self) -> int:
        """Time that a launch adds if it waits for another one."""
        return self.card_times.launch_ns

    @property
    def bytes_per_us(self) -> int:
        """Memory bandwidth in bytes per µs."""
        return self.card_times.bytes_per_us

    @cached_property
    def segment_size(self) -> int:
        """Tokens of a segment: a power of two that divides the page and every block."""
        smallest = min(min(tile.block_tokens, tile.private_tokens) for tile in self.tiles)
        return min(smallest, self.page_size & -self.page_size)

    @cached_property
    def priced(self) -> "PricedTilings":
        """The candidates and what they cost."""
        return price(self)

    @cached_property
    def list_rule(self) -> "ListRule":
        """The part of this rule that is needed to emit tile lists."""
        subtiles = [
            Subtiles(
                tile.subtiles, tile.entries(self.group_size) // tile.subtiles, tile.private_tokens // self.segment_size
            )
            for tile in self.tiles
        ]
        is_nested = any(each.number > 1 for each in subtiles)
        return ListRule(np.array(subtiles, np.int64), is_nested, self.segment_size, self.page_size, self.fuse_up_to)

    def usable(self) -> list[int]:
        """Indices of the tiles that hold at least one query token."""
        return [index for index, tile in enumerate(self.tiles) if tile.entries(self.group_size)]


@dataclass(frozen=True)
class Tiling:
    """A candidate: tile `tall` for nodes of at least `least` entries, if it is given, and tile `low` for all others.

    low, tall: indices of tiles. per_query: a low tile holds one query token. waves: long tiles are cut into about
    `waves` items for each slot of the device (`layout.target_of`); 0: no tile is cut. even: all tiles are cut into one
    portion for each slot (`layout.Stage`)."""

    low: int
    tall: int | None = None
    least: int = EVERY
    per_query: bool = False
    waves: int = 1
    even: bool = False

    def name(self, rule: TilingRule) -> str:
        """The name that `stats` shows: rows × keys of the tiles."""
        chosen = [rule.tiles[index] for index in (self.tall, self.low) if index is not None]
        text = "+".join(f"{tile.rows}x{tile.block_tokens}" for tile in chosen)
        return text + (" per query" if self.per_query else "") + (" even" if self.even else _CUTS[self.waves])


def candidates(rule: TilingRule) -> list[Tiling]:
    """All tilings of a rule: the lowest tiles with one query token each, every single tile, and every taller paired
    tile together with every lowest one; each of them cut and uncut. Single tiles that allow it are cut into portions,
    too."""
    usable = rule.usable()
    lowest = [index for index in usable if rule.tiles[index].rows == rule.tiles[usable[0]].rows]
    least = max(2, 4 * rule.tiles[lowest[0]].rows // rule.group_size)
    taller = [index for index in usable[len(lowest) :] if rule.tiles[index].paired]
    pairs = [Tiling(low, tall, least) for tall in taller for low in lowest]
    per_query = [Tiling(low, per_query=True) for low in lowest]
    uncut = [*per_query, *(Tiling(index) for index in usable), *pairs]
    cut = [replace(each, waves=waves) for waves in _CUTS for each in uncut if waves or not each.per_query]
    return cut + [replace(each, even=True) for each in uncut if each.tall is None and rule.tiles[each.low].item_blocks]


def _stage(rule: TilingRule, tiling: Tiling, tile_index: int, least: int, below: int) -> Stage:
    shape = rule.tiles[tile_index]
    return Stage(
        height=1 if tiling.per_query else shape.entries(rule.group_size),
        least=least,
        below=below,
        block_segments=shape.blocks_at_once * shape.block_tokens // rule.segment_size,
        num_splits=max(1, shape.ctas_at_once // rule.num_kv_heads) * tiling.waves,
        subtiles=shape.subtiles,
        private_segments=shape.private_tokens // rule.segment_size,
        item_segments=shape.item_blocks * shape.block_tokens // rule.segment_size if tiling.even else 0,
    )


class TileStage(NamedTuple):
    """A stage, and the number of its tile in the rule."""

    tile_index: int
    stage: Stage


def stages_of(rule: TilingRule, tiling: Tiling) -> list[TileStage]:
    """The stage of each launch of a tiling, tall tiles first."""
    stages = [TileStage(tiling.low, _stage(rule, tiling, tiling.low, least=1, below=tiling.least))]
    if tiling.tall is not None:
        tall = _stage(rule, tiling, tiling.tall, least=tiling.least, below=EVERY)
        stages.insert(0, TileStage(tiling.tall, tall))
    return stages


class ListRule(NamedTuple):
    """The part of a rule that is needed to emit tile lists."""

    subtiles: NDArray[np.int64]  # [tiles, fields of Subtiles]
    is_nested: bool  # some tile has several subtiles
    segment_size: int
    page_size: int
    fuse_up_to: int


def stage_rows_of(rule: TilingRule, tiling: Tiling) -> NDArray[np.int64]:
    """[launches, 1 + fields of Stage] index of the tile and stage of each launch of a tiling, tall tiles first."""
    known = rule.priced.stage_rows.get(tiling)
    return _stage_rows(rule, tiling) if known is None else known


def _stage_rows(rule: TilingRule, tiling: Tiling) -> NDArray[np.int64]:
    return np.array([(tile_index, *stage) for tile_index, stage in stages_of(rule, tiling)], np.int64)


@njit(inner=True)
def stage_of_row(row):
    """The stage of a row of `stage_rows_of`."""
    return stage_of(row[1:])


class PricedTilings(NamedTuple):
    """The candidates of a rule as arrays; see `cost`."""

    tilings: list[Tiling]
    stages: NDArray[np.int64]  # [stages, fields of Stage] the distinct stages, uncut
    launches: NDArray[np.int64]  # [candidates, launches, LAUNCH_COLUMNS] see `cost`
    costs: Costs
    stage_rows: dict[Tiling, NDArray[np.int64]]  # candidate -> `stage_rows_of`


def _tile_times(rule: TilingRule, tile: TileConfig) -> TileTimes:
    (full_ns, masked_ns), (full_chain_ns, masked_chain_ns) = tile.block_ns, tile.chain_ns
    together = tile.blocks_at_once
    return TileTimes(
        full_ns=together * full_ns,
        masked_ns=together * masked_ns,
        full_chain_ns=together * full_chain_ns,
        masked_chain_ns=together * masked_chain_ns,
        num_slots=max(1, tile.ctas_at_once // rule.num_kv_heads),
        ctas_per_sm=tile.ctas_per_sm,
        read_percent=tile.read_percent,
        item_ns=tile.item_blocks * full_ns,
    )


def price(rule: TilingRule) -> PricedTilings:
    """The candidates of a rule, as the arrays from which `TiledStep.predict` computes their times."""
    tilings = candidates(rule)
    stages: dict[Stage, int] = {}
    launches = np.full((len(tilings), _MOST_LAUNCHES, LAUNCH_COLUMNS), -1, np.int64)
    for number, tiling in enumerate(tilings):
        for nth, (tile_index, stage) in enumerate(stages_of(rule, tiling)):
            launch = launches[number, nth]
            launch[LAUNCH_STAGE] = stages.setdefault(stage._replace(num_splits=0, item_segments=0), len(stages))
            launch[LAUNCH_TILE], launch[LAUNCH_SPLITS] = tile_index, stage.num_splits
            launch[LAUNCH_ITEM] = stage.item_segments
    times = rule.card_times
    costs = Costs(
        tiles=np.array([_tile_times(rule, tile) for tile in rule.tiles], np.int64),
        token_bytes=rule.token_bytes,
        partial_bytes=rule.partial_bytes,
        segment_size=rule.segment_size,
        l2_tokens=rule.l2_bytes // rule.token_bytes,
        l2_percent=100 * times.bytes_per_us // times.l2_bytes_per_us,
        bytes_per_us=times.bytes_per_us,
        launch_ns=times.launch_ns,
        filled_ns=times.filled_ns,
        arithmetic_percent=times.arithmetic_percent,
        unhidden_part=times.unhidden_part,
        idle_percent=times.idle_percent,
    )
    stage_rows = {tiling: _stage_rows(rule, tiling) for tiling in tilings}
    return PricedTilings(tilings, np.array(list(stages), np.int64), launches, costs, stage_rows)


def tile_limits(rule: TilingRule, capacity: Capacity, num_partials: int = 0) -> TileLimits:
    """Upper bounds for the tile list of any batch within the capacity, in low tiles, with room for cutting them.

    An uncut tile lists each page of its requests once. A request of n query tokens lies in at most 1 + n / height
    tiles.
    num_partials: the most partials of a query; 0 if that is unknown.
    """
    heights = [rule.tiles[index].entries(rule.group_size) for index in rule.usable()]
    slots = max(tile.ctas_at_once for tile in rule.tiles) // rule.num_kv_heads + 1
    splits = _MOST_WAVES * 3 * slots // 2  # of a launch: `layout.target_of` may make half as many again
    tokens, requests = capacity.max_query_tokens, min(capacity.max_requests, capacity.max_query_tokens)
    tiles_of_requests = min(tokens, requests + tokens // heights[0])
    segments_of_request = capacity.max_pages_per_request * (rule.page_size // rule.segment_size)
    if num_partials:
        cut = tokens * num_partials
        return TileLimits(
            items=cut,
            segments=cut * (2 + rule.tiles[-1].block_tokens // rule.segment_size) + tokens * segments_of_request,
            queries=cut,
            merged=tokens,
            slots=cut,
            query_tokens=tokens,
        )
    return TileLimits(
        items=_MOST_LAUNCHES * (tokens + splits),
        segments=(tiles_of_requests + min(splits, tiles_of_requests)) * (segments_of_request + 2),
        queries=_MOST_LAUNCHES * (tokens + splits * max(heights)),
        merged=tokens,
        slots=_MOST_LAUNCHES * tokens + splits // 2 * max(heights),
        query_tokens=tokens + capacity.max_chunk_tokens,
    )


def tiling_limits(rule: TilingRule, capacity: Capacity) -> TileLimits:
    """`tile_limits` with only as many partial slots as the candidates can need. It holds if every plan is a candidate
    of the rule and has no prompt chunks, which would use the slots that the tiles leave.

    The number of items of a tile is its size in targets (`layout.target_of`), rounded, so a tile is cut from one and a
    half targets on. Hence all cut tiles together become at most 4 / 3 of `num_splits` items, each with at most all
    entries of a tile. Where portions are cut, each of their `num_splits` ends adds an item to a tile, so all cut tiles
    together become at most twice as many. With two launches every query may have two more partials, so a rule with
    pairs of tiles keeps all slots.
    """
    limits = tile_limits(rule, capacity)
    stages = [stages_of(rule, tiling) for tiling in candidates(rule)]
    if any(len(launches) > 1 for launches in stages):
        return limits
    needed = 0
    for ((_, stage),) in stages:
        most = 2 * stage.num_splits if stage.item_segments else 4 * stage.num_splits // 3
        needed = max(needed, most * min(stage.height, capacity.max_query_tokens))
    return replace(limits, slots=min(limits.slots, needed))
