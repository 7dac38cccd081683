"""The work list: the contract between planners, which write it, and kernels, which read nothing else about a batch.

A *work item* is a range of KV tokens that is read once for several query tokens. There are two kinds of list:

    WorkList    an item reads one range of one row of the block table       CPU, and prompt chunks on a GPU
    TileList    an item reads many segments, each for some of its queries   row tiles on a GPU

A query whose KV lies in one item gets its output from that item (DIRECT). One whose KV lies in several gets a *partial
slot* from each of them: an output and its log-sum-exp, which a merge adds up. `lse` is always the natural logarithm of
the sum of the exponentials of the scaled and soft-capped logits, in float32 and without sinks. An empty state has
output 0 and lse -inf.

Sources: PAT, https://arxiv.org/abs/2511.22333, §5.2 for packs as work items, §7 for the merge; FlashAttention,
https://arxiv.org/abs/2205.14135, §3.1 for why partial results with their lse can be merged.
"""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Columns of WorkList.items
KV_ROW: Final = 0  # row of the block table that holds the pages of the item's KV
KV_START: Final = 1  # first token
KV_END: Final = 2  # one past the last token
QUERY_START: Final = 3  # into WorkList.queries and .partial_slots
QUERY_END: Final = 4
ITEM_COLUMNS: Final = 5

# Columns of TileList.items; QUERY_START and QUERY_END as above
SEGMENT_START: Final = 0  # into TileList.segments
SEGMENT_SHARED_END: Final = 1  # segments before this one are whole and seen by every query of the item
SEGMENT_END: Final = 2

# Columns of TileList.segments
SEGMENT_PLACE: Final = 0  # of its first token in the cache: page * page_size + offset
SEGMENT_QUERIES: Final = 1  # first query | end query << 8 | tokens << 16, queries counted from the item's first
SEGMENT_POSITION: Final = 2  # of its first token in the sequence
SEGMENT_COLUMNS: Final = 3

# A batch-invariant plan of packs always computes a token in the same span of its sequence, whatever other requests
# there are. Plans of row tiles have spans of their own (`tiles.batch_invariant`).
INVARIANT_SPAN_TOKENS: Final = 256

UNLIMITED: Final = 2**31 - 1  # the sliding window of attention without one

DIRECT: Final = -1  # the slot of a query whose KV is in one item: that item writes the final output


@dataclass(frozen=True)
class WorkList:
    """Items that each read one range of KV; all arrays are int32.

    items [num_items, ITEM_COLUMNS]: heaviest first. queries [...]: the query tokens of each item. partial_slots [...]:
    the partial slot that each of them writes, or DIRECT. merge_queries [num_merged]: the query tokens in several items.
    The partial slots of merge_queries[i] are merge_indptr[i] to merge_indptr[i + 1] - 1, in the order of their tokens.
    """

    items: NDArray[np.int32]
    queries: NDArray[np.int32]
    partial_slots: NDArray[np.int32]
    merge_queries: NDArray[np.int32]
    merge_indptr: NDArray[np.int32]

    @property
    def num_slots(self) -> int:
        """Partial slots: partial results that a run writes and reads, per query head."""
        return int(self.merge_indptr[-1])

    def equals(self, other: "WorkList") -> bool:
        """Bit equality."""
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))


@dataclass(frozen=True)
class TileList:
    """Items that each read several segments of KV, a segment for some of the item's queries; all arrays are int32.

    items [num_items, ITEM_COLUMNS]: in buckets, first the items that merge nothing by tile height, then those that
    merge by tile height, each bucket heaviest first. counts [2 * heights + 1]: where each bucket begins, and the end.
    segments [num_segments, SEGMENT_COLUMNS]: the segments. queries, partial_slots: as in WorkList. merge_slots
    [..., 2]: the partial slots [first, last) that the item merges for the query. merge_queries, merge_ranges
    [num_merged, 2]: the queries that no item merges, and their partial slots. num_slots: partial slots. merges_taller:
    items merge what taller tiles leave, and nothing else.
    """

    items: NDArray[np.int32]
    segments: NDArray[np.int32]
    queries: NDArray[np.int32]
    partial_slots: NDArray[np.int32]
    merge_slots: NDArray[np.int32]
    counts: NDArray[np.int32]
    merge_queries: NDArray[np.int32]
    merge_ranges: NDArray[np.int32]
    num_slots: int
    merges_taller: bool


@dataclass(frozen=True)
class ChunkList:
    """The work list of a step's prompt chunks, next to the tile list of its other requests.

    items, queries, partial_slots: as in WorkList, with the query tokens and partial slots of the whole step.
    block_table [rows, columns]: the pages of the chunks' requests, whose rows KV_ROW names. The tile list merges the
    chunks' partials too.
    """

    items: NDArray[np.int32]
    queries: NDArray[np.int32]
    partial_slots: NDArray[np.int32]
    block_table: NDArray[np.int32]


@dataclass(frozen=True)
class ChunkLimits:
    """The largest ChunkList that buffers of a fixed size hold. Its table has exactly `columns` columns."""

    items: int
    queries: int
    rows: int
    columns: int


@dataclass(frozen=True)
class TileLimits:
    """The largest TileList that buffers of a fixed size hold."""

    items: int
    segments: int
    queries: int
    merged: int
    slots: int
    query_tokens: int

    def broken_by(self, tiles: TileList) -> list[str]:
        """What of a tile list exceeds its limit, such as "9 items of 8". Empty: it fits."""
        sizes = {
            "items": len(tiles.items),
            "segments": len(tiles.segments),
            "queries": len(tiles.queries),
            "merged": len(tiles.merge_queries),
            "slots": tiles.num_slots,
        }
        return [f"{size} {name} of {getattr(self, name)}" for name, size in sizes.items() if size > getattr(self, name)]


@dataclass(frozen=True)
class PlanStats:
    """What a plan reads. Tokens are KV tokens per KV head and layer; a token that two items read counts twice.

    kv_tokens_read: what the plan reads.
    kv_tokens_per_query: what it would read with one pack per request, in the same tiles.
    num_packs: groups of queries that read KV together. Row tiles on a GPU have no packs; their work items are counted.
    num_work_items: all items.
    tiles: number of items by tile.
    policy: the packing policy, or the kind of tiling, that was chosen.
    reason: why it was chosen; and why the portable kernels compute it, where others are faster.
    """

    kv_tokens_read: int
    kv_tokens_per_query: int
    num_packs: int
    num_work_items: int
    tiles: dict[str, int]
    policy: str
    reason: str

    def with_chunks(self, chunks: "PlanStats") -> "PlanStats":
        """Returns the statistics of the whole step; `chunks` describes its prompt chunks."""
        both = self.num_work_items > 0
        return PlanStats(
            kv_tokens_read=self.kv_tokens_read + chunks.kv_tokens_read,
            kv_tokens_per_query=self.kv_tokens_per_query + chunks.kv_tokens_per_query,
            num_packs=self.num_packs + chunks.num_packs,
            num_work_items=self.num_work_items + chunks.num_work_items,
            tiles=self.tiles | chunks.tiles,
            policy=f"{self.policy}, prefill {chunks.policy}" if both else f"prefill {chunks.policy}",
            reason=f"{self.reason}; prefill: {chunks.reason}" if both else chunks.reason,
        )
