"""What every floor agrees on: the work list of a plan, its columns, and the log-sum-exp convention.

A *work item* is one run of KV tokens read once for several query tokens. `lse` is always the natural logarithm of the
sum of exponentials of the scaled (and soft-capped) logits, in float32, sinks not included; an empty state has output 0
and lse -inf.
"""

from dataclasses import dataclass, fields
from typing import Final

import numpy as np
from numpy.typing import NDArray

# Columns of WorkList.items
KV_ROW: Final = 0  # row of the block table whose pages hold the item's KV
KV_START: Final = 1  # first token
KV_END: Final = 2  # one past the last token
QUERY_START: Final = 3  # into WorkList.queries and .slots
QUERY_END: Final = 4
ITEM_COLUMNS: Final = 5

# Columns of TileList.items; QUERY_START and QUERY_END as above
RUN_START: Final = 0  # into TileList.runs
RUN_FULL: Final = 1  # runs before this one are whole and seen by every query of the item
RUN_END: Final = 2

UNLIMITED: Final = 2**31 - 1  # sliding window: none

DIRECT: Final = -1  # slot of a query whose KV is in one piece: its item writes the final output


@dataclass(frozen=True)
class Capacity:
    """Upper bounds of a step, each at least 1; plans raise ValueError beyond them.

    max_query_len: query tokens of one request, None for max_query_tokens; 1 for decoding alone, which a GPU does
    without causal masks; with few it does without a launch for prompt chunks. A policy other than `auto` may cut a
    batch within these bounds into more pieces than a plan of fixed size holds; then it raises too.
    """

    max_requests: int
    max_query_tokens: int
    max_pages_per_request: int
    num_pages: int
    max_query_len: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "max_query_len":
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise TypeError(f"{field.name}={value!r}: expected an int")
            if value < 1:
                raise ValueError(f"{field.name}={value}: expected at least 1")


@dataclass(frozen=True)
class DeviceModel:
    """What the planner must know of a device; integers, calibrated by measurement (`kernels/tile_table.py`).

    name: for messages and `stats.tiles`. tile_rows: query rows (tokens × group size) of the tallest tile. row_unit:
    rows are computed in multiples of this, a power of two. num_slots: work items (of one KV head) that run at once.
    item_bytes: fixed cost of one of those, in bytes of KV read in the same time. flops_per_byte: arithmetic done in
    the time of one byte, for balance only. split_above_mean: PAT §6's rule, no work item longer than the mean.
    split_grid: cut points are multiples of this many tokens from a pack's start. by_schedule: tiles are cut only as far
    as the slots then end sooner, the partials counted (`planner/schedule.py`).
    """

    name: str
    tile_rows: int
    row_unit: int
    num_slots: int
    item_bytes: int
    flops_per_byte: int
    split_above_mean: bool
    split_grid: int
    by_schedule: bool = False


@dataclass(frozen=True)
class WorkList:
    """The plan's arrays, all int32.

    items [num_items, ITEM_COLUMNS], heaviest first. queries, slots [...]: for each item, query tokens of the step and
    the partial slot each writes, or DIRECT. merge_queries [num_merged] are the query tokens in several pieces;
    slots merge_indptr[i] .. merge_indptr[i + 1] - 1 hold those of merge_queries[i], in order of their tokens.
    """

    items: NDArray[np.int32]
    queries: NDArray[np.int32]
    slots: NDArray[np.int32]
    merge_queries: NDArray[np.int32]
    merge_indptr: NDArray[np.int32]

    @property
    def num_slots(self) -> int:
        """Partial states that a run writes and reads, per query head."""
        return int(self.merge_indptr[-1])

    def equals(self, other: "WorkList") -> bool:
        """Bit equality."""
        return all(np.array_equal(getattr(self, f.name), getattr(other, f.name)) for f in fields(self))


@dataclass(frozen=True)
class TileList:
    """A work list whose items read several runs of KV, each for some of the item's queries; all int32.

    items [num_items, ITEM_COLUMNS] in buckets: items that merge nothing by tile height, then items that merge, by tile
    height, heaviest first; counts [2 * heights + 1] where each bucket begins, and the end. runs [num_runs, 3]: place of
    the first token in the cache (page * page_size + offset); first query | end query << 8 | tokens << 16, queries
    counted from the item's first; position of the first token. queries, slots as in WorkList; parts [..., 2]: partial
    slots [first, last) that the query's item merges. merge_queries, merge_ranges [num_merged, 2]: those no item merges.
    merges_taller: items merge what taller tiles leave, and nothing else.
    """

    items: NDArray[np.int32]
    runs: NDArray[np.int32]
    queries: NDArray[np.int32]
    slots: NDArray[np.int32]
    parts: NDArray[np.int32]
    counts: NDArray[np.int32]
    merge_queries: NDArray[np.int32]
    merge_ranges: NDArray[np.int32]
    num_slots: int
    merges_taller: bool


@dataclass(frozen=True)
class PrefillList:
    """A work list of prompt chunks as `kernels.prefill` reads it, beside the tile list of a step's other requests.

    items, queries, slots: as in WorkList, queries and slots numbered through the whole step; block_table [rows,
    columns]: the pages that items name by KV_ROW. What several items compute is merged by the tile list's merges.
    """

    items: NDArray[np.int32]
    queries: NDArray[np.int32]
    slots: NDArray[np.int32]
    block_table: NDArray[np.int32]


@dataclass(frozen=True)
class PrefillLimits:
    """Most that the arrays of a PrefillList may hold in buffers of a fixed size. columns: exactly, of its table."""

    items: int
    queries: int
    rows: int
    columns: int


@dataclass(frozen=True)
class TileLimits:
    """Most that the arrays of a TileList may hold in buffers of a fixed size."""

    items: int
    runs: int
    queries: int
    merged: int
    slots: int
    query_tokens: int

    def broken_by(self, tiles: TileList) -> list[str]:
        """What of a tile list is over its limit; empty: it fits."""
        sizes = {
            "items": len(tiles.items),
            "runs": len(tiles.runs),
            "queries": len(tiles.queries),
            "merged": len(tiles.merge_queries),
            "slots": tiles.num_slots,
        }
        return [f"{size} {name} of {getattr(self, name)}" for name, size in sizes.items() if size > getattr(self, name)]


@dataclass(frozen=True)
class PlanStats:
    """What a plan reads. Tokens are KV tokens per KV head and layer; a token read by two items counts twice."""

    kv_tokens_read: int
    kv_tokens_per_query: int  # what one pack per request would read, with the same tiles
    num_packs: int
    num_work_items: int
    tiles: dict[str, int]  # work items by tile
    policy: str  # the policy that was used
    reason: str  # why this one
