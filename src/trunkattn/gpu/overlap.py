"""Which decodes of a step are co-scheduled with its prompt chunks on a GPU (POD-Attention §4), by predicted time."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from trunkattn.config import AttentionConfig
from trunkattn.gpu.cards import H200, Card, OverlapTimes
from trunkattn.gpu.hopper import spec as hopper
from trunkattn.gpu.kernel import Kernels
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.candidates import TileStage, Tiling, TilingRule, stages_of
from trunkattn.planner.tiles.overlap import (
    ChunkTimes,
    ChunkWork,
    OverlapCosts,
    Overlapped,
    choose_overlap,
    chunk_work,
)
from trunkattn.planner.tiles.step import TiledStep
from trunkattn.planner.work_list import TileList

# Time of prompt chunks from which decodes gain more beside them than by tiles of their own choice
_CHUNKS_WORTH_NS: Final = 20_000
# Percent of the chunks' time that decodes must take if they share nothing: chunks are slower in the common kernel
_DECODES_WORTH_PERCENT: Final = 25
# Percent of the serial time that overlapping may take at most. Predictions are a few percent off.
_WORTH_PERCENT: Final = 96


@dataclass(frozen=True)
class Overlap:
    """What a card makes of a step if one kernel computes chunks and decodes.

    Attributes:
        times: of the card.
        rule: its tiles; the first one is that of decodes.
        flops_per_pair: of a query token and a token that it sees, all heads.
        num_sms: of the card.
        chunk_queries: query tokens of a chunk's work item.
        forced: chunks and decodes share the kernel whatever the prediction says.
    """

    times: OverlapTimes
    rule: TilingRule
    flops_per_pair: int
    num_sms: int
    chunk_queries: int
    forced: bool

    def work_of(self, chunks: StepTables) -> ChunkWork:
        """The work of prompt chunks that share nothing."""
        return chunk_work(chunks.seq_lens, chunks.query_start_loc, chunks.window, self.chunk_queries)

    def chunk_times(self, work: ChunkWork) -> ChunkTimes:
        """Predicted times: of all chunks, or of the longest work item."""
        flops, num_bytes = work.pairs * self.flops_per_pair, work.kv_tokens * self._token_bytes
        alone_ns = max(flops // self.times.flops_per_ns, self._longest_ns(work))
        return ChunkTimes(alone_ns, num_bytes * 1000 // self.rule.bytes_per_us * self.times.reads_percent // 100)

    @property
    def _token_bytes(self) -> int:
        return self.rule.head_bytes * self.rule.num_kv_heads

    def _longest_ns(self, work: ChunkWork) -> int:
        flops = work.max_item_pairs * self.flops_per_pair
        return flops // self.rule.num_kv_heads * self.num_sms // self.times.flops_per_ns

    def fills(self, work: ChunkWork, decode_ns: int) -> bool:
        """Whether decodes of that time fill what whole chunk items leave of the card at their end, at most the time of
        the longest one. Cutting chunks gains nothing then."""
        return work.num_items * self.rule.num_kv_heads >= self.num_sms and decode_ns >= self._longest_ns(work)

    def is_worth(self, overlapped_ns: int, serial_ns: int) -> bool:
        """Whether to overlap, by predicted time."""
        return self.forced or overlapped_ns * 100 < serial_ns * _WORTH_PERCENT

    def is_worth_for(self, chunks: StepTables, other_kv_tokens: int | None) -> bool:
        """Whether to overlap decodes, of which the host knows at most how many tokens they have, with these chunks."""
        chunks_ns = self.chunk_times(self.work_of(chunks)).alone_ns
        if self.forced or other_kv_tokens is None:
            return self.forced or chunks_ns >= _CHUNKS_WORTH_NS
        decodes_ns = other_kv_tokens * self._token_bytes * 1000 // self.rule.bytes_per_us
        return chunks_ns >= _CHUNKS_WORTH_NS and 100 * decodes_ns >= _DECODES_WORTH_PERCENT * chunks_ns

    @cached_property
    def costs(self) -> OverlapCosts:
        """What the planner must know of the kernel."""
        narrow, wide = self.times.narrow, self.times.wide
        return OverlapCosts(
            chunk_percent=(narrow.chunk_percent, wide.chunk_percent),
            decode_percent=(narrow.decode_percent, wide.decode_percent),
            narrow_rows=hopper.BOTH_NARROW_ROWS,
            block_ns=self.times.block_ns,
            block_segments=hopper.BOTH_KEYS // self.rule.segment_size,
            item_ns=self.times.item_ns,
            fixed_ns=self.times.fixed_ns,
            group_size=self.rule.group_size,
            num_kv_heads=self.rule.num_kv_heads,
            num_sms=self.num_sms,
        )

    @cached_property
    def leftover(self) -> TileStage:
        """What a launch of its own computes: the items that are not co-scheduled."""
        (launch,) = stages_of(self.rule, Tiling(0, waves=0))
        return launch

    def best_of(self, step: TiledStep, numbers: list[int], chunks: ChunkTimes) -> tuple[int, Overlapped]:
        """The candidate (among `numbers`, all single-height low tilings) whose step ends first."""
        return step.overlap(numbers, chunks, self.costs, self.leftover)

    def choose(self, tiles: TileList, chunks: ChunkTimes) -> Overlapped:
        """Which items of a tile list of low tiles alone to co-schedule."""
        items = tiles.items[: tiles.counts[1] - tiles.counts[0]]
        tile_index, stage = self.leftover
        return Overlapped(
            *choose_overlap(items, tiles.num_slots, chunks, self.costs, stage, tile_index, self.rule.priced.costs)
        )


def overlap_candidates(
    tilings: Sequence[Tiling], numbers: Sequence[int], times: Sequence[int], group_size: int
) -> list[int]:
    """Numbers of the tilings to try, of those of low tiles: the fastest of all, the fastest of the finest, whose many
    items fill best the time that chunks leave, and both of one query token an item, if the kernel computes those
    faster.

    Args:
        tilings: all candidates.
        numbers: of those that may be taken.
        times: predicted for all.
        group_size: query heads of a KV head.
    """
    low = [number for number in numbers if tilings[number].tall is None and tilings[number].low == 0]
    per_query = [number for number in low if tilings[number].per_query] if group_size <= hopper.BOTH_NARROW_ROWS else []
    found = list[int]()
    for some in (low, per_query):
        if some:
            finest = max([tilings[number].waves for number in some])
            found.append(min(some, key=times.__getitem__))
            found.append(min([i for i in some if tilings[i].waves == finest], key=times.__getitem__))
    return list(dict.fromkeys(found))


def make_overlap(config: AttentionConfig, kernels: Kernels, card: Card, rule: TilingRule) -> Overlap | None:
    """What is known of the kernel that computes chunks and decodes at once; None: no such kernel computes the
    attention. On a card that was not timed, which must be asked for, an H200's times stand in."""
    times = card.model.overlap or H200.overlap
    if kernels.both is None or kernels.prefill_tile is None or times is None:
        return None
    return Overlap(
        times=times,
        rule=rule,
        flops_per_pair=2 * (config.head_dim + config.value_dim) * config.num_qo_heads,
        num_sms=card.num_sms,
        chunk_queries=kernels.prefill_tile.block_m // config.group_size,
        forced=config.execution == "overlapped",
    )
