"""Which row tiles a step takes on a GPU: candidates by predicted time, and the tile list of the best."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trunkattn.plan_format import TileList, WorkList
from trunkattn.planner import tiles
from trunkattn.planner.forest import Forest

_EVERY = 1 << 30  # more entries than any node has


@dataclass(frozen=True)
class TileKind:
    """A tile height as the planner sees it. programs: of the whole device at once; block_ns: time of a block then."""

    rows: int
    block_tokens: int
    programs: int
    block_ns: int


@dataclass(frozen=True)
class TilingRule:
    """Integers, from the tile table and the device.

    kinds: ascending heights. launch_ns: of a launch that waits for another. bytes_per_us: memory bandwidth. head_bytes:
    keys and values of one token and head. partial_bytes: one partial state of all query heads, written and read.
    fuse_up_to: partials that an item may merge.
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

    @property
    def run(self) -> int:
        """Tokens of a run: a power of two that divides the page and every block."""
        smallest = min(kind.block_tokens for kind in self.kinds)
        return min(smallest, self.page_size & -self.page_size)

    def usable(self) -> list[int]:
        """Heights that hold at least one query token."""
        return [index for index, kind in enumerate(self.kinds) if kind.rows >= self.group_size]


@dataclass(frozen=True)
class Tiling:
    """One way to tile a step: a height for all nodes, or a tall one for nodes of at least `least` entries as well."""

    low: int
    tall: int | None = None
    least: int = _EVERY

    def name(self, rule: TilingRule) -> str:
        """For `stats.reason`."""
        low = f"{rule.kinds[self.low].rows} rows"
        return low if self.tall is None else f"{rule.kinds[self.tall].rows} and {low}"


def candidates(rule: TilingRule) -> list[Tiling]:
    """Every height alone, and every pair with the lowest."""
    usable = rule.usable()
    low = usable[0]
    pairs = [Tiling(low, tall, max(2, rule.kinds[usable[0]].rows * 4 // rule.group_size)) for tall in usable[1:]]
    return [Tiling(index) for index in usable] + pairs


def _stage(rule: TilingRule, kind: int, least: int, below: int) -> tiles.Stage:
    shape = rule.kinds[kind]
    items = max(1, shape.programs // rule.num_kv_heads)
    return tiles.Stage(shape.rows // rule.group_size, least, below, shape.block_tokens // rule.run, items)


def _stages(rule: TilingRule, tiling: Tiling) -> list[tuple[int, tiles.Stage]]:
    low = (tiling.low, _stage(rule, tiling.low, 1, tiling.least))
    return [low] if tiling.tall is None else [(tiling.tall, _stage(rule, tiling.tall, tiling.least, _EVERY)), low]


def predict_ns(rule: TilingRule, tiling: Tiling, forest: Forest, entries: tiles.Entries, window: int) -> int:
    """Time of a tiling: each stage is bound by its slots, its longest item or memory."""
    total = 0
    for kind, stage in _stages(rule, tiling):
        shape = rule.kinds[kind]
        count, blocks, most = tiles.stage_load(forest, entries, stage, window, rule.run)
        if not count:
            continue
        longest = most
        if count < stage.num_parts:  # tiles are cut: partials for their rows
            longest = max(2, -(-blocks // stage.num_parts))
            total += rule.launch_ns + stage.num_parts * stage.height * rule.partial_bytes * 1000 // rule.bytes_per_us
        elif stage.least > 1:
            total += rule.launch_ns + len(entries.query) * rule.partial_bytes * 1000 // rule.bytes_per_us
        waves = blocks * rule.num_kv_heads * shape.block_ns // shape.programs
        sizes = entries.node_end - entries.node_start
        mine = (sizes >= stage.least) & (sizes < stage.below)
        tokens = int((forest.token_end[mine].astype(np.int64) - forest.token_start[mine]).sum())
        memory = tokens * rule.head_bytes * rule.num_kv_heads * 1000 // rule.bytes_per_us
        total += max(waves, longest * shape.block_ns // 2, memory)
    return int(total)


def choose(rule: TilingRule, forest: Forest, batch: tuple, window: int) -> tuple[Tiling, dict[str, int]]:
    """The tiling of least predicted time (ties: the first), and all times in ns. batch: seq_lens, query_start_loc."""
    entries = tiles.make_entries(forest, *batch)
    times = {tiling: predict_ns(rule, tiling, forest, entries, window) for tiling in candidates(rule)}
    best = min(times, key=lambda tiling: times[tiling])
    return best, {tiling.name(rule): time for tiling, time in times.items()}


def tile_forest(
    rule: TilingRule, tiling: Tiling, forest: Forest, batch: tuple[NDArray, NDArray, NDArray], window: int
) -> TileList:
    """The tile list of a tiling. batch: block_table, seq_lens, query_start_loc."""
    table, seq_lens, starts = batch
    entries = tiles.make_entries(forest, seq_lens, starts)
    stages = _stages(rule, tiling)
    emitted = [tiles.emit_stage(forest, entries, table, stage, window, rule.run, rule.page_size) for _, stage in stages]
    return _join(rule, emitted, [kind for kind, _ in stages], int(starts[-1]))


def tile_work(rule: TilingRule, work: WorkList, batch: tuple[NDArray, NDArray, NDArray], window: int) -> TileList:
    """A work list of one of the packing policies as a tile list: each item in the lowest tile that holds it."""
    table, seq_lens, starts = batch
    row_of = np.repeat(np.arange(len(seq_lens)), np.diff(starts))
    positions = (seq_lens[row_of] - starts[row_of + 1] + np.arange(len(row_of))).astype(np.int32)
    rows = (work.items[:, 4] - work.items[:, 3]) * rule.group_size
    kinds = np.searchsorted([kind.rows for kind in rule.kinds], rows).astype(np.int32)
    block_runs = np.array([kind.block_tokens // rule.run for kind in rule.kinds], np.int32)[kinds]
    emitted = tiles.items_of_work(
        (work.items, work.queries), table, positions, window, rule.run, rule.page_size, block_runs
    )
    return _list(rule, emitted, kinds, int(starts[-1]))


def _join(rule: TilingRule, emitted: list[tiles.Items], kinds: list[int], num_queries: int) -> TileList:
    runs = np.cumsum([0] + [len(part.runs) for part in emitted])
    queries = np.cumsum([0] + [len(part.queries) for part in emitted])
    offsets = [np.array([r, r, r, q, q], np.int32) for r, q in zip(runs, queries, strict=True)]
    joined = tiles.Items(
        np.concatenate([part.items + offset for part, offset in zip(emitted, offsets, strict=False)]),
        np.concatenate([part.runs for part in emitted]),
        np.concatenate([part.queries for part in emitted]),
        np.concatenate([part.uncut for part in emitted]),
    )
    bucket = np.repeat(np.array(kinds, np.int32), [len(part.items) for part in emitted])
    return _list(rule, joined, bucket, num_queries)


def _list(rule: TilingRule, emitted: tiles.Items, bucket: NDArray[np.int32], num_queries: int) -> TileList:
    return TileList(*tiles.finish(emitted, bucket, len(rule.kinds), num_queries, rule.fuse_up_to))
