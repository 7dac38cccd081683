"""The work list: the contract between planners, which write it, and kernels, which read nothing else about a batch.

A *work item* is a range of KV tokens that is read once for several query tokens. There are two kinds of list:

    WorkList    an item reads one range of one row of the block table       CPU, and prompt chunks on a GPU
    TileList    an item reads many segments, each for some of its queries   row tiles on a GPU

If all KV of a query lies in one item, that item writes the query's output (DIRECT). If it lies in several, each of them
writes a *partial* to its own *partial slot*: an output and its log-sum-exp. A merge combines these. `lse` is always the
natural logarithm of the sum of the exponentials of the scaled and soft-capped logits, in float32 and without sinks. An
empty state has output 0 and lse -inf.

Sources: PAT, https://arxiv.org/abs/2511.22333, §5.2 for packs as work items, §7 for the merge; FlashAttention,
https://arxiv.org/abs/2205.14135, §3.1 for why partial results with their lse can be merged.
"""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

from trunkattn.numerics import MAX_INT32

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
SEGMENT_PLACE: Final = 0  # place of its first token in the cache: page * page_size + offset
SEGMENT_QUERIES: Final = 1  # first query | end query << 8 | tokens << 16, queries counted from the item's first
SEGMENT_POSITION: Final = 2  # position of its first token in the sequence
SEGMENT_COLUMNS: Final = 3

# A batch-invariant plan of packs cuts each sequence at multiples of this many tokens, whatever the other requests are.
# Plans of row tiles have longer spans (`tiles.batch_invariant`).
PACK_SPAN_TOKENS: Final = 256

UNLIMITED: Final = MAX_INT32  # stands for no sliding window

DIRECT: Final = -1  # in place of a partial slot: all KV of the query is in this item, which writes the output


@dataclass(frozen=True)
class WorkList:
    """Items that each read one range of KV. All arrays are int32.

    Attributes:
        items: [num_items, ITEM_COLUMNS] heaviest first.
        queries: [...] the query tokens of each item.
        partial_slots: [...] the partial slot that the item writes for each of them, or DIRECT.
        merge_queries: [num_merged] the query tokens that are in several items.
        merge_indptr: [num_merged + 1] query merge_queries[i] has the partial slots merge_indptr[i] to merge_indptr[i +
            1] - 1, in the order of their tokens.
    """

    items: NDArray[np.int32]
    queries: NDArray[np.int32]
    partial_slots: NDArray[np.int32]
    merge_queries: NDArray[np.int32]
    merge_indptr: NDArray[np.int32]

    @property
    def num_slots(self) -> int:
        """Number of partial slots: partials that a run writes and reads, per query head."""
        return int(self.merge_indptr[-1])

    def equals(self, other: "WorkList") -> bool:
        """Bit equality."""
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))


@dataclass(frozen=True)
class TileList:
    """Items that each read several segments of KV, each segment for some of the item's queries. All arrays are int32.

    Attributes:
        items: [num_items, ITEM_COLUMNS] by bucket: first one bucket per tile height for items that merge nothing, then
            one per height for items that merge. Each bucket is heaviest first.
        segments: [num_segments, SEGMENT_COLUMNS] the segments that items name by SEGMENT_START and SEGMENT_END.
        queries, partial_slots: as in WorkList.
        merge_slots: [..., 2] the partial slots [first, last) that the item merges for each of its queries.
        counts: [2 * heights + 1] where each bucket begins, and the number of items.
        merge_queries, merge_ranges: [num_merged] and [num_merged, 2] the queries that no item merges, and the partial
            slots [first, last) of each.
        num_slots: number of partial slots.
        merges_taller: whether items merge only partials of taller tiles.
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

    @property
    def segment_tokens(self) -> NDArray[np.int64]:
        """[num_segments] the tokens of each segment."""
        return self.segments[:, SEGMENT_QUERIES].astype(np.int64) >> 16


@dataclass(frozen=True)
class ChunkList:
    """The work list of a step's prompt chunks. The step's other requests are in a tile list, which also merges the
    chunks' partials.

    items, queries, partial_slots: as in WorkList, with the query tokens and partial slots of the whole step.
    block_table [rows, columns]: the pages of the chunks' requests; KV_ROW is a row of it.
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
        """The sizes of a tile list that exceed their limits, such as "9 items of 8". Empty if it fits."""
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
    reason: why it was chosen; and, if portable kernels compute it although faster ones exist, why.
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
