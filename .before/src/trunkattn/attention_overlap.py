"""Which decodes of a step run beside its prompt chunks on a GPU (POD-Attention §4), by predicted time."""

from dataclasses import dataclass
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np

from trunkattn.attention_config import AttentionConfig
from trunkattn.kernels.tile_table import HYBRID_KEYS, HYBRID_NARROW, MEASURED_CARD, HybridTimes, hybrid_times
from trunkattn.plan_format import TileList
from trunkattn.planner.beside import BesideTimes, choose_beside
from trunkattn.planner.build import Batch
from trunkattn.planner.tiles import Stage
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

    def reads_ns(self, chunks: Batch) -> int:
        """Time for which decodes wait while memory gives the keys and values that prompt chunks see."""
        lens, query_lens = chunks.seq_lens.astype(np.int64), np.diff(chunks.query_start_loc).astype(np.int64)
        tokens = int(np.minimum(lens, chunks.window + query_lens).sum())
        size = tokens * self.rule.head_bytes * self.rule.num_kv_heads
        return size * 1000 // self.rule.bytes_per_us * self.times.reads_percent // 100

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

    @cached_property
    def _beside_times(self) -> BesideTimes:
        narrow, wide = self.times.narrow, self.times.wide
        return BesideTimes(
            chunk_percent=(narrow.chunk_percent, wide.chunk_percent),
            decode_percent=(narrow.decode_percent, wide.decode_percent),
            narrow_rows=HYBRID_NARROW,
            block_ns=self.times.block_ns,
            block_runs=HYBRID_KEYS // self.rule.run,
            item_ns=self.times.item_ns,
            fixed_ns=self.times.fixed_ns,
            group_size=self.rule.group_size,
            num_kv_heads=self.rule.num_kv_heads,
            processors=self.processors,
        )

    @cached_property
    def _after(self) -> tuple[int, Stage]:
        """Tile kind and stage of a launch for the items that are not beside the chunks."""
        (launch,) = stages_of(self.rule, Tiling(0, waves=0))
        return launch

    def beside(self, tiles: TileList, chunk_ns: int, reads_ns: int) -> Beside:
        """Which items of a tile list of low tiles alone to compute while the chunks are, as `choose_beside` predicts.

        chunk_ns: of the chunks alone; reads_ns: of reading their keys and values.
        """
        items = tiles.items[: tiles.counts[1] - tiles.counts[0]]
        assert len(items), "of low tiles alone, and items that merge have others' partials to merge"
        kind, stage = self._after
        times, costs = self._beside_times, self.rule.priced.costs
        number, total_ns = choose_beside(items, (chunk_ns, reads_ns), times, stage, kind, costs)
        states_ns = tiles.num_slots * self.rule.partial_bytes * 1000 // self.rule.bytes_per_us
        return Beside(number, total_ns + (self.rule.launch_ns + states_ns if tiles.num_slots else 0))


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
