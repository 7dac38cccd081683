"""Which row tiles a step takes on a GPU: candidates by predicted time, and the tile list of the best."""

from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.plan_format import Capacity, TileLimits, TileList, WorkList
from trunkattn.planner import tile_costs, tiles
from trunkattn.planner.forest import Forest

_CUTS: Final = MappingProxyType({1: "", 4: " fine", 0: " uncut"})


@dataclass(frozen=True)
class TileKind:
    """A tile as the planner sees it. programs: of the whole device at once. together: of a multiprocessor.

    block_ns: time of a block of full and of masked runs when all of them run. chain_ns: of one such block after another
    in one program.
    """

    rows: int
    block_tokens: int
    programs: int
    block_ns: tuple[int, int]
    chain_ns: tuple[int, int]
    subtiles: int = 1  # that read private runs side by side, private_tokens at a time; see `tiles.nest`
    private_tokens: int = 32
    paired: bool = True  # with a lowest tile for the nodes of few entries
    read_percent: int = 100  # of the bandwidth that it reaches
    together: int = 1

    def entries(self, group_size: int) -> int:
        """Query tokens that it holds."""
        return self.subtiles * (self.rows // self.subtiles // group_size)


@dataclass(frozen=True)
class TilingRule:
    """Integers, from the tile table and the device.

    kinds: ascending heights. launch_ns: of a launch that waits for another. bytes_per_us: memory bandwidth. head_bytes:
    keys and values of one token and head. partial_bytes: one partial state of all query heads, written and read.
    fuse_up_to: partials that an item may merge. l2_bytes: of the L2 cache. uniform: no run is marked as full, so that a
    row's arithmetic does not depend on the rows beside it (the two loops of the kernel may round differently).
    """

    kinds: tuple[TileKind, ...]
    group_size: int
    num_kv_heads: int
    page_size: int
    launch_ns: int
    bytes_per_us: int
    head_bytes: int
    partial_bytes: int
    fuse_up_to: int
    l2_bytes: int
    uniform: bool = False

    @cached_property
    def run(self) -> int:
        """Tokens of a run: a power of two that divides the page and every block."""
        smallest = min(min(kind.block_tokens, kind.private_tokens) for kind in self.kinds)
        return min(smallest, self.page_size & -self.page_size)

    @cached_property
    def priced(self) -> "PricedWays":
        """The candidates and what they cost."""
        return price(self)

    def usable(self) -> list[int]:
        """Heights that hold at least one query token."""
        return [index for index, kind in enumerate(self.kinds) if kind.entries(self.group_size)]


@dataclass(frozen=True)
class Tiling:
    """One way to tile a step: `low` for all nodes, or `tall` for those of at least `least` entries. alone: a low tile
    holds one query token. waves: long tiles are cut until there are about so many items for each of the device's slots;
    0: none is."""

    low: int
    tall: int | None = None
    least: int = tile_costs.EVERY
    alone: bool = False
    waves: int = 1

    def name(self, rule: TilingRule) -> str:
        """For `stats`: rows × keys of the tiles."""
        kinds = [rule.kinds[index] for index in (self.tall, self.low) if index is not None]
        text = "+".join(f"{kind.rows}x{kind.block_tokens}" for kind in kinds)
        return text + (" per query" if self.alone else "") + _CUTS[self.waves]


def candidates(rule: TilingRule) -> list[Tiling]:
    """The lowest tiles with one query token; every tile, and every taller one, if paired, with every lowest one; cut or
    not."""
    usable = rule.usable()
    lowest = [index for index in usable if rule.kinds[index].rows == rule.kinds[usable[0]].rows]
    least = max(2, 4 * rule.kinds[lowest[0]].rows // rule.group_size)
    taller = [index for index in usable[len(lowest) :] if rule.kinds[index].paired]
    pairs = [Tiling(low, tall, least) for tall in taller for low in lowest]
    alone = [Tiling(low, alone=True) for low in lowest]
    ways = [*alone, *(Tiling(index) for index in usable), *pairs]
    return [replace(way, waves=waves) for waves in _CUTS for way in ways if waves or not way.alone]


def _stage(rule: TilingRule, tiling: Tiling, kind: int, limits: tuple[int, int]) -> tiles.Stage:
    shape = rule.kinds[kind]
    height = 1 if tiling.alone else shape.entries(rule.group_size)
    items = max(1, shape.programs // rule.num_kv_heads) * tiling.waves
    blocks = (shape.block_tokens // rule.run, items, shape.subtiles, shape.private_tokens // rule.run)
    return tiles.Stage(height, *limits, *blocks)


def stages_of(rule: TilingRule, tiling: Tiling) -> list[tuple[int, tiles.Stage]]:
    """(kind, stage) of each launch of a tiling, tall tiles first."""
    stages = [(tiling.low, _stage(rule, tiling, tiling.low, (1, tiling.least)))]
    if tiling.tall is not None:
        stages.insert(0, (tiling.tall, _stage(rule, tiling, tiling.tall, (tiling.least, tile_costs.EVERY))))
    return stages


class PricedWays(NamedTuple):
    """The candidates of a rule as arrays; see `tile_costs`."""

    ways: list[Tiling]
    stages: NDArray[np.int64]  # [stages, fields of Stage] those that are not alike when uncut
    uses: NDArray[np.int64]  # [ways, 2, 3]
    costs: tile_costs.Costs


def price(rule: TilingRule) -> PricedWays:
    """What `predict` needs of a rule."""
    ways = candidates(rule)
    stages: dict[tiles.Stage, int] = {}
    uses = np.full((len(ways), 2, 3), -1, np.int64)
    for number, way in enumerate(ways):
        for nth, (kind, stage) in enumerate(stages_of(rule, way)):
            uses[number, nth] = stages.setdefault(stage._replace(num_parts=0), len(stages)), kind, stage.num_parts
    token_bytes = rule.head_bytes * rule.num_kv_heads
    costs = tile_costs.Costs(
        np.array([kind.block_ns for kind in rule.kinds], np.int64),
        np.array([kind.chain_ns for kind in rule.kinds], np.int64),
        np.array([max(1, kind.programs // rule.num_kv_heads) for kind in rule.kinds], np.int64),
        np.array([kind.together for kind in rule.kinds], np.int64),
        np.array([kind.read_percent for kind in rule.kinds], np.int64),
        rule.launch_ns, rule.bytes_per_us, token_bytes, rule.partial_bytes, rule.l2_bytes // token_bytes,
        100 * rule.bytes_per_us // tile_costs.L2_BYTES_PER_US, rule.run,
    )  # fmt: skip
    return PricedWays(ways, np.array(list(stages), np.int64), uses, costs)


def predict(rule: TilingRule, forest: Forest, batch: tuple, window: int) -> dict[Tiling, int]:
    """Predicted ns of every candidate. batch: seq_lens, query_start_loc."""
    ways, stages, uses, costs = rule.priced
    entries = tiles.make_entries(forest, *batch)
    loads = tile_costs.stage_loads(forest, entries, stages, costs.l2_tokens, window, rule.run)
    return dict(zip(ways, tile_costs.ways_ns(loads, stages, uses, costs).tolist(), strict=True))


def ways_within(rule: TilingRule, limits: TileLimits, forest: Forest, batch: tuple, window: int) -> list[Tiling]:
    """The candidates that surely keep within limits, as the planner on the device knows it. batch: as of `predict`."""
    ways, stages, uses, _ = rule.priced
    entries = tiles.make_entries(forest, *batch)
    most = np.array([limits.items, limits.runs, limits.slots], np.int64)
    fit = tile_costs.ways_fit(forest, entries, stages, uses, most, window, rule.run)
    return [way for way, fits in zip(ways, fit, strict=True) if fits]


def tile_limits(rule: TilingRule, capacity: Capacity, pieces: int = 0) -> TileLimits:
    """What every batch of a capacity keeps in low tiles that are not cut, and room for cutting.

    Such a tile lists a page of its requests once, and a request has query tokens in at most so many tiles. pieces: most
    that the plan of a query is cut into, where that is known; 0: it is not.
    """
    heights = [rule.kinds[index].entries(rule.group_size) for index in rule.usable()]
    slots = max(kind.programs for kind in rule.kinds) // rule.num_kv_heads + 1
    parts = 6 * slots  # of fine cuts, which have at most half as many again as they want
    tokens, requests = capacity.max_query_tokens, min(capacity.max_requests, capacity.max_query_tokens)
    tiles_of_requests = min(tokens, requests + tokens // heights[0])
    runs_of_page = capacity.max_pages_per_request * (rule.page_size // rule.run)
    if pieces:
        cut = tokens * pieces
        return TileLimits(cut, cut * 2 + tokens * runs_of_page, cut, tokens, cut, tokens)
    entries = 2 * (tokens + parts * max(heights))
    return TileLimits(
        items=2 * (tokens + parts),
        runs=(tiles_of_requests + min(parts, tiles_of_requests)) * (runs_of_page + 2),
        queries=entries,
        merged=tokens,
        slots=2 * tokens + 3 * slots * max(heights),
        query_tokens=tokens,
    )


def tile_forest(
    rule: TilingRule, tiling: Tiling, forest: Forest, batch: tuple[NDArray, NDArray, NDArray], window: int
) -> TileList:
    """The tile list of a tiling. batch: block_table, seq_lens, query_start_loc."""
    table, seq_lens, starts = batch
    entries = tiles.make_entries(forest, seq_lens, starts)
    stages = stages_of(rule, tiling)
    emitted = [tiles.emit_stage(forest, entries, table, stage, window, rule.run, rule.page_size) for _, stage in stages]
    return _join(rule, emitted, [kind for kind, _ in stages], int(starts[-1]))


def query_positions(seq_lens: NDArray[np.int32], query_start_loc: NDArray[np.int32]) -> NDArray[np.int32]:
    """[num_query_tokens] each query token's place in its sequence."""
    row_of = np.repeat(np.arange(len(seq_lens)), np.diff(query_start_loc))
    return (seq_lens[row_of] - query_start_loc[row_of + 1] + np.arange(len(row_of))).astype(np.int32)


def tile_work(rule: TilingRule, work: WorkList, batch: tuple[NDArray, NDArray, NDArray], window: int) -> TileList:
    """A work list of one of the packing policies as a tile list: each item in the lowest tile that holds it."""
    table, seq_lens, starts = batch
    positions = query_positions(seq_lens, starts)
    heights = [kind.entries(rule.group_size) for kind in rule.kinds]
    kinds = np.searchsorted(heights, work.items[:, 4] - work.items[:, 3]).astype(np.int32)
    per_kind = [tile_costs.EVERY if rule.uniform else kind.block_tokens // rule.run for kind in rule.kinds]
    block_runs = np.array(per_kind, np.int32)[kinds]
    emitted = tiles.items_of_work(
        (work.items, work.queries), table, positions, window, rule.run, rule.page_size, block_runs
    )
    return _list(rule, emitted, kinds, int(starts[-1]), merges_taller=False)


def _join(rule: TilingRule, emitted: list[tiles.Items], kinds: list[int], num_queries: int) -> TileList:
    bucket = np.repeat(np.array(kinds, np.int32), [len(part.items) for part in emitted])
    if len(emitted) == 1:
        return _list(rule, emitted[0], bucket, num_queries, merges_taller=True)
    runs = np.cumsum([0] + [len(part.runs) for part in emitted])
    queries = np.cumsum([0] + [len(part.queries) for part in emitted])
    offsets = [np.array([r, r, r, q, q], np.int32) for r, q in zip(runs, queries, strict=True)]
    joined = tiles.Items(
        np.concatenate([part.items + offset for part, offset in zip(emitted, offsets, strict=False)]),
        np.concatenate([part.runs for part in emitted]),
        np.concatenate([part.queries for part in emitted]),
        np.concatenate([part.uncut for part in emitted]),
    )
    return _list(rule, joined, bucket, num_queries, merges_taller=True)  # an item that is not cut has no other rest


def _list(
    rule: TilingRule, emitted: tiles.Items, bucket: NDArray[np.int32], num_queries: int, *, merges_taller: bool
) -> TileList:
    if any(kind.subtiles > 1 for kind in rule.kinds):
        shapes = [
            (kind.subtiles, kind.entries(rule.group_size) // kind.subtiles, kind.private_tokens // rule.run)
            for kind in rule.kinds
        ]
        emitted = tiles.nest(emitted, bucket, np.array(shapes, np.int64))
    items, runs, queries, slots, parts, counts, merge_queries, merge_ranges, num_slots = tiles.finish(
        emitted, bucket, len(rule.kinds), num_queries, rule.fuse_up_to
    )
    return TileList(items, runs, queries, slots, parts, counts, merge_queries, merge_ranges, num_slots, merges_taller)
