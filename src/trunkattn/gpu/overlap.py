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
from trunkattn.planner.tiles.overlap import ChunkTimes, ChunkWork, OverlapCosts, chunk_work

# Prompt chunks that take less time are not overlapped: decodes gain more from a free choice of tiles.
_CHUNKS_WORTH_NS: Final = 20_000
# Decodes that take a smaller percentage of the chunks' time are not overlapped: chunks are slower in the common kernel.
_DECODES_WORTH_PERCENT: Final = 25
# Overlapping must take less than this percentage of the serial time, because predictions are a few percent off.
_WORTH_PERCENT: Final = 96


@dataclass(frozen=True)
class Overlap:
    """Predicts the time of a step on a card if one kernel computes prompt chunks and decodes.

    Attributes:
        times: measured times of that kernel.
        rule: the tiles of decodes; the kernel uses the first one.
        flops_per_pair: arithmetic of all heads for one query token and one token that it sees.
        num_sms: SMs of the card.
        chunk_queries: query tokens of a chunk's work item.
        forced: overlap whatever the prediction says.
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
        """Predicted times of the chunks: the time of all their arithmetic or of the longest work item, whichever is
        more, and the time of their reads."""
        flops, num_bytes = work.pairs * self.flops_per_pair, work.kv_tokens * self.rule.token_bytes
        read_ns = num_bytes * 1000 // self.rule.bytes_per_us
        return ChunkTimes(
            without_decodes_ns=max(flops // self.times.flops_per_ns, self._longest_ns(work)),
            reads_ns=read_ns * self.times.reads_percent // 100,
        )

    def _longest_ns(self, work: ChunkWork) -> int:
        flops = work.max_item_pairs * self.flops_per_pair
        return flops // self.rule.num_kv_heads * self.num_sms // self.times.flops_per_ns

    def fills(self, work: ChunkWork, decode_ns: int) -> bool:
        """Whether decodes that take `decode_ns` can fill the SMs that idle while the last chunk items end, which lasts
        at most as long as the longest item. If so, cutting chunks gains nothing."""
        return work.num_items * self.rule.num_kv_heads >= self.num_sms and decode_ns >= self._longest_ns(work)

    def is_worth(self, overlapped_ns: int, serial_ns: int) -> bool:
        """Whether overlapping is predicted to be enough faster than one after the other."""
        return self.forced or overlapped_ns * 100 < serial_ns * _WORTH_PERCENT

    def is_worth_for(self, chunks: StepTables, other_kv_tokens: int | None) -> bool:
        """Whether to overlap these chunks with decodes that are planned on the device. other_kv_tokens: an upper bound
        of the decodes' KV tokens; None: unknown."""
        chunks_ns = self.chunk_times(self.work_of(chunks)).without_decodes_ns
        if self.forced or other_kv_tokens is None:
            return self.forced or chunks_ns >= _CHUNKS_WORTH_NS
        decodes_ns = other_kv_tokens * self.rule.token_bytes * 1000 // self.rule.bytes_per_us
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
        """The stage of the separate launch for items that are not co-scheduled."""
        (stage,) = stages_of(self.rule, Tiling(0, waves=0))
        return stage


def overlap_candidates(
    tilings: Sequence[Tiling], numbers: Sequence[int], times: Sequence[int], group_size: int
) -> list[int]:
    """The numbers of the tilings to try, all of them with low tiles only: the fastest one, and the fastest of those
    that are cut finest, whose many items best fill the gaps that chunks leave. If the kernel computes items of one
    query token faster, the same two among the tilings of such items.

    Args:
        tilings: all candidates.
        numbers: the candidates that fit the capacity.
        times: predicted times of all candidates.
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
    """The predictor for the kernel that computes chunks and decodes at once; None if no such kernel computes the
    attention. An untimed card overlaps only if asked to, and is predicted by an H200's times."""
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
