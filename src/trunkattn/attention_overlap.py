"""Which decodes of a step run beside its prompt chunks on a GPU (POD-Attention §4), by predicted time."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trunkattn.attention_config import AttentionConfig
from trunkattn.kernels.tile_table import HYBRID_KEYS, MEASURED_CARD, HybridTimes, hybrid_times
from trunkattn.plan_format import TileList
from trunkattn.planner.build import Batch


class Beside(NamedTuple):
    """The first `items` of a tile list's first bucket run beside the chunks. total_ns: predicted of the whole step."""

    items: int
    total_ns: int


@dataclass(frozen=True)
class Overlap:
    """What a card's hybrid kernel does with a step.

    Attributes:
        times: of the card.
        flops_per_pair: of a query token and a token that it sees, all heads.
        num_kv_heads: a work item is a task for each.
        processors: multiprocessors.
        chunk_queries: query tokens of a chunk's work item.
        forced: whatever the prediction says.
    """

    times: HybridTimes
    flops_per_pair: int
    num_kv_heads: int
    processors: int
    chunk_queries: int
    forced: bool

    def chunks_ns(self, chunks: Batch) -> int:
        """Time of prompt chunks that share nothing: of all of them, or of the longest work item."""
        lens, query_lens = chunks.seq_lens.astype(np.int64), np.diff(chunks.query_start_loc).astype(np.int64)
        seen = np.minimum(lens - query_lens // 2, chunks.window)  # by a query token in the mean
        flops = int((seen * query_lens).sum()) * self.flops_per_pair
        queries = np.minimum(query_lens, self.chunk_queries)
        longest = int((np.minimum(lens, chunks.window + queries) * queries).max()) * self.flops_per_pair
        return max(flops, longest // self.num_kv_heads * self.processors) // self.times.flops_per_ns

    def beside(self, tiles: TileList, run: int, decode_ns: int, chunk_ns: int) -> Beside:
        """Which items of a tile list of low tiles alone to compute while the chunks are: as many as will end with them,
        in whole rounds of the multiprocessors; all, if one round does not.

        run: tokens of a run. decode_ns: of the whole list after the chunks.
        While both run, decodes and chunks have shares of their speeds; decodes that are left then run alone.
        """
        times, number = self.times, int(tiles.counts[1] - tiles.counts[0])
        runs = tiles.items[:number, 2] - tiles.items[:number, 0]
        blocks = -(-runs.astype(np.int64) * run // HYBRID_KEYS)
        # ns until the hybrid kernel, without chunks, has computed an item and those before it: their share of every
        # multiprocessor, or as many of the longest as some have
        tasks = np.arange(1, number + 1) * self.num_kv_heads
        until = np.maximum(
            blocks.cumsum() * self.num_kv_heads // self.processors, -(-tasks // self.processors) * blocks
        )
        until = np.maximum.accumulate(until) * times.block_ns
        both_ns = chunk_ns * 100 // times.chunk_percent  # of the chunks, beside decodes all the time
        most = int(np.searchsorted(until, both_ns * times.decode_percent // 100, side="right"))
        if most < number:
            rounds = most * self.num_kv_heads // self.processors
            most = rounds * self.processors // self.num_kv_heads or number
        alone = int(until[most - 1])
        beside_ns = alone * 100 // times.decode_percent
        total = chunk_ns + beside_ns * (100 - times.chunk_percent) // 100
        if beside_ns > both_ns:
            total = both_ns + alone - both_ns * times.decode_percent // 100
        return Beside(most, total + int(blocks[most:].sum() * decode_ns // blocks.sum()))


def make_overlap(config: AttentionConfig, card: str, processors: int, chunk_rows: int) -> Overlap | None:
    """None: the kernel does not compute this attention, another execution was asked for, or `auto` on a card of which
    nothing is known. chunk_rows: of a chunk's work item."""
    if not config.overlaps or config.execution not in ("auto", "overlapped"):
        return None
    forced = config.execution == "overlapped"
    times = hybrid_times(card) or (hybrid_times(MEASURED_CARD) if forced else None)
    if times is None:
        return None
    flops = 2 * (config.head_dim + config.value_dim) * config.num_qo_heads
    queries = chunk_rows * config.num_kv_heads // config.num_qo_heads
    return Overlap(times, flops, config.num_kv_heads, processors, queries, forced)
