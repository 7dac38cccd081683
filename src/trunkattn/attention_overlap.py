"""Which decodes of a step run beside its prompt chunks on a GPU (POD-Attention §4), by predicted time."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.attention_config import AttentionConfig
from trunkattn.kernels.tile_table import HYBRID_KEYS, HYBRID_NARROW, MEASURED_CARD, HybridTimes, Shares, hybrid_times
from trunkattn.plan_format import QUERY_END, QUERY_START, RUN_END, RUN_FULL, RUN_START, TileList
from trunkattn.planner import tile_costs
from trunkattn.planner.build import Batch
from trunkattn.planner.tiling import Tiling, TilingRule, stages_of

# Percent of the serial time that overlapping is to take at most, by a prediction whose spread is 4 % on an H200
_WORTH_PERCENT: Final = 96


class Beside(NamedTuple):
    """The first `items` of a tile list's first bucket run beside the chunks. total_ns: predicted of the whole step."""

    items: int
    total_ns: int


@dataclass(frozen=True)
class Overlap:
    """What a card's hybrid kernel does with a step.

    Attributes:
        times: of the card.
        rule: its tiles; the first is that of decodes.
        flops_per_pair: of a query token and a token that it sees, all heads.
        processors: multiprocessors.
        chunk_queries: query tokens of a chunk's work item.
        forced: whatever the prediction says.
    """

    times: HybridTimes
    rule: TilingRule
    flops_per_pair: int
    processors: int
    chunk_queries: int
    forced: bool

    def chunks_ns(self, chunks: Batch) -> int:
        """Time of prompt chunks that share nothing, alone: of all of them, or of the longest work item."""
        lens, query_lens = chunks.seq_lens.astype(np.int64), np.diff(chunks.query_start_loc).astype(np.int64)
        seen = np.minimum(lens - query_lens // 2, chunks.window)  # by a query token in the mean
        flops = int((seen * query_lens).sum()) * self.flops_per_pair
        return max(flops // self.times.flops_per_ns, self._longest_ns(chunks))

    def _longest_ns(self, chunks: Batch) -> int:
        """Time of the longest work item of prompt chunks that are not cut."""
        queries = np.minimum(np.diff(chunks.query_start_loc).astype(np.int64), self.chunk_queries)
        longest = int((np.minimum(chunks.seq_lens, chunks.window + queries) * queries).max()) * self.flops_per_pair
        return longest // self.rule.num_kv_heads * self.processors // self.times.flops_per_ns

    def fills(self, chunks: Batch, decode_ns: int) -> bool:
        """Whether decodes of that time fill what whole chunk items leave of the card at their end, at most the time of
        the longest one. Cutting those gains nothing then: chunks of 768 tokens take as long (within 1 %, overlapped;
        hybrid-h200.json), or took 1 to 7 % longer (in earlier runs)."""
        tasks = int((-(-np.diff(chunks.query_start_loc) // self.chunk_queries)).sum()) * self.rule.num_kv_heads
        return tasks >= self.processors and decode_ns >= self._longest_ns(chunks)

    def worth(self, together_ns: int, serial_ns: int) -> bool:
        """Whether to overlap, by predicted time."""
        return self.forced or together_ns * 100 < serial_ns * _WORTH_PERCENT

    def beside(self, tiles: TileList, chunk_ns: int) -> Beside:
        """Which items of a tile list of low tiles alone to compute while the chunks are, by predicted time: all, or as
        many as fit whole rounds of the multiprocessors that end with the chunks, or one round more.

        chunk_ns: of the chunks alone.
        """
        number = int(tiles.counts[1] - tiles.counts[0])
        blocks = self._blocks(tiles.items[:number])
        until = self._until_ns(blocks[:, :2].sum(axis=1))
        queries = np.diff(tiles.items[:number, [QUERY_START, QUERY_END]])[:, 0]
        rows = np.maximum.accumulate(queries) * self.rule.group_size
        shares = self._shares(rows[-1])
        within = _both_ns(chunk_ns, shares) * shares.decode_percent // 100
        most = int(np.searchsorted(until, within, side="right"))
        heads = self.rule.num_kv_heads
        rounds = most * heads // self.processors
        counts = [number, *((rounds + more) * self.processors // heads for more in range(2))]
        found = [
            Beside(count, together_ns + self._after_ns(blocks[count:]))
            for count in counts
            if 0 < count <= number
            for together_ns in (self._together_ns(chunk_ns, int(until[count - 1]), self._shares(rows[count - 1])),)
        ]
        best = min(found, key=lambda each: each.total_ns)
        states_ns = tiles.num_slots * self.rule.partial_bytes * 1000 // self.rule.bytes_per_us
        merge_ns = self.rule.launch_ns + states_ns if tiles.num_slots else 0
        return best._replace(total_ns=best.total_ns + merge_ns)

    def _blocks(self, items: NDArray[np.int32]) -> NDArray[np.int64]:
        """[items, 3] blocks that all rows see, and others; runs."""
        block_runs = HYBRID_KEYS // self.rule.run
        full = (items[:, RUN_FULL] - items[:, RUN_START]).astype(np.int64) // block_runs
        runs = (items[:, RUN_END] - items[:, RUN_START]).astype(np.int64)
        return np.stack([full, -(-runs // block_runs) - full, runs], axis=1)

    def _shares(self, rows: int) -> Shares:
        """Beside items of at most so many rows."""
        return self.times.narrow if rows <= HYBRID_NARROW else self.times.wide

    def _until_ns(self, blocks: NDArray[np.int64]) -> NDArray[np.int64]:
        """ns until the hybrid kernel, without chunks, has computed an item and those before it: their share of every
        multiprocessor, or as many of the longest as some have."""
        heads, tasks = self.rule.num_kv_heads, np.arange(1, len(blocks) + 1) * self.rule.num_kv_heads
        each = blocks * self.times.block_ns + self.times.item_ns
        until = np.maximum(each.cumsum() * heads // self.processors, -(-tasks // self.processors) * each)
        return np.maximum.accumulate(until)

    def _together_ns(self, chunk_ns: int, decode_ns: int, shares: Shares) -> int:
        """Of chunks and decodes that take so long in the kernel without the other: while both run, each has a share of
        its speed."""
        both_ns = _both_ns(chunk_ns, shares)
        beside_ns = decode_ns * 100 // shares.decode_percent
        if beside_ns > both_ns:
            return self.times.fixed_ns + both_ns + decode_ns - both_ns * shares.decode_percent // 100
        return self.times.fixed_ns + chunk_ns + beside_ns * (100 - shares.chunk_percent) // 100

    def _after_ns(self, blocks: NDArray[np.int64]) -> int:
        """Of items that are left for a launch of their own."""
        if not len(blocks):
            return 0
        ((kind, stage),) = stages_of(self.rule, Tiling(0, waves=0))
        tokens = int(blocks[:, 2].sum()) * self.rule.run
        return int(tile_costs.stage_ns(blocks, tokens, 0, stage, kind, True, self.rule.priced.costs))


def ways_beside(ways: list[Tiling], times: dict[Tiling, int], group_size: int) -> list[Tiling]:
    """Of those of low tiles, the fastest: of all, of the finest, whose many items fill the time that chunks leave best,
    and both of one query token an item, if the kernel computes those faster."""
    low = [way for way in ways if way.tall is None and way.low == 0]
    found = list[Tiling]()
    for some in (low, [way for way in low if way.alone and group_size <= HYBRID_NARROW]):
        finest = max((way.waves for way in some), default=0)
        for fast in (some, [way for way in some if way.waves == finest]):
            found += sorted(fast, key=lambda way: times[way])[:1]
    return list(dict.fromkeys(found))


def _both_ns(chunk_ns: int, shares: Shares) -> int:
    """Of the chunks, beside decodes all the time."""
    return chunk_ns * 100 // shares.chunk_percent


def make_overlap(
    config: AttentionConfig, card: str, processors: int, chunk_rows: int, rule: TilingRule
) -> Overlap | None:
    """None: the kernel does not compute this attention, another execution was asked for, or `auto` on a card of which
    nothing is known. chunk_rows: of a chunk's work item."""
    if not config.on_hopper or config.execution not in ("auto", "overlapped"):
        return None
    forced = config.execution == "overlapped"
    times = hybrid_times(card) or (hybrid_times(MEASURED_CARD) if forced else None)
    if times is None:
        return None
    flops = 2 * (config.head_dim + config.value_dim) * config.num_qo_heads
    queries = chunk_rows * config.num_kv_heads // config.num_qo_heads
    return Overlap(times, rule, flops, processors, queries, forced)
