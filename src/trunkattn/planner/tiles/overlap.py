"""How many items of a tile list are co-scheduled with the prompt chunks of a step (POD-Attention §4)."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.planner.tiles.cost import (
    BLOCK_COLUMNS,
    FULL_BLOCKS,
    MASKED_BLOCKS,
    NUM_ENTRIES,
    NUM_SEGMENTS,
    stage_ns,
)
from trunkattn.planner.work_list import QUERY_END, QUERY_START, SEGMENT_END, SEGMENT_SHARED_END, SEGMENT_START


class OverlapCosts(NamedTuple):
    """Costs of the kernel that computes prompt chunks and decodes at once, as integers.

    chunk_percent, decode_percent: speed of chunks and of decodes while both run, in percent of their speed if the same
    kernel computes only one of them; first for tiles of up to `narrow_rows` rows, then for taller ones.
    block_ns: time of a block of `block_segments` segments. An SM computes one item at a time.
    item_ns: time of an item in addition to its blocks.
    fixed_ns: time of the launch.
    """

    chunk_percent: tuple[int, int]
    decode_percent: tuple[int, int]
    narrow_rows: int
    block_ns: int
    block_segments: int
    item_ns: int
    fixed_ns: int
    group_size: int
    num_kv_heads: int
    num_sms: int


class ChunkTimes(NamedTuple):
    """Predicted times of the prompt chunks of a step.

    without_decodes_ns: time if nothing decodes beside them.
    reads_ns: time to read the chunks' keys and values from memory, for which decodes wait.
    """

    without_decodes_ns: int
    reads_ns: int


class ChunkWork(NamedTuple):
    """The amount of work in the prompt chunks of a step, per head.

    pairs: number of (query token, token that it sees) pairs, counted with the mean of each request.
    kv_tokens: tokens that at least one query token sees.
    max_item_pairs: pairs of the largest work item, if chunks are not cut.
    num_items: work items, if chunks are not cut.
    """

    pairs: int
    kv_tokens: int
    max_item_pairs: int
    num_items: int


class Overlapped(NamedTuple):
    """How a step overlaps. items: number of leading items of the tile list that are co-scheduled with the chunks;
    total_ns: predicted time of the whole step."""

    items: int
    total_ns: int


class _Profile(NamedTuple):
    """Arrays [items] that describe each item of a tile list together with the items before it.

    blocks: [items, BLOCK_COLUMNS] what the item reads; its entries are query tokens.
    until_ns: time until the kernel has computed this item and all before it, without chunks.
    is_wide: 1 if this item or one before it has more rows than the narrow tile.
    """

    blocks: NDArray[np.int64]
    until_ns: NDArray[np.int64]
    is_wide: NDArray[np.int64]


def chunk_work(
    seq_lens: NDArray[np.int32], query_start_loc: NDArray[np.int32], window: int, queries_per_item: int
) -> ChunkWork:
    """The work of prompt chunks that share nothing. It is plain NumPy, so that a plan made on a GPU compiles
    nothing."""
    lengths, queries = seq_lens.astype(np.int64), np.diff(query_start_loc).astype(np.int64)
    longest = np.minimum(queries, queries_per_item)
    return ChunkWork(
        pairs=int((np.minimum(lengths - queries // 2, window) * queries).sum()),
        kv_tokens=int(np.minimum(lengths, window + queries).sum()),
        max_item_pairs=int((np.minimum(lengths, window + longest) * longest).max(initial=0)),
        num_items=int(-(-queries // queries_per_item).sum()),
    )


@njit
def choose_overlap(items, num_slots, chunks, overlap, stage, tile_index, costs):
    """Chooses how many of the leading items, which merge nothing, to co-schedule with the chunks.

    There are three candidates: all items; the whole rounds of items that end before the chunks do; and one round more.
    The remaining items get a separate launch, of `stage`. num_slots: partials that a merge reads afterwards.
    """
    assert len(items) > 0, "a tile list of low tiles has items that merge nothing"
    number, profile = len(items), _profile(items, overlap)
    until_ns = profile.until_ns + chunks.reads_ns
    wide = profile.is_wide[number - 1]
    chunks_end_ns = chunks.without_decodes_ns * 100 // overlap.chunk_percent[wide]
    fitting = np.searchsorted(until_ns, chunks_end_ns * overlap.decode_percent[wide] // 100, side="right")
    rounds = fitting * overlap.num_kv_heads // overlap.num_sms
    best = Overlapped(np.int64(0), np.int64(0))
    for count in (number, _items_of(rounds, overlap), _items_of(rounds + 1, overlap)):
        if count <= 0 or count > number:
            continue
        total_ns = _both_ns(chunks.without_decodes_ns, until_ns[count - 1], overlap, profile.is_wide[count - 1])
        if count < number:
            left = profile.blocks[count:]
            total_ns += stage_ns(
                left, left[:, NUM_SEGMENTS].sum() * costs.segment_size, 0, stage, tile_index, True, costs
            )
        if best.items == 0 or total_ns < best.total_ns:
            best = Overlapped(np.int64(count), np.int64(total_ns))
    if num_slots == 0:
        return best
    merge_ns = costs.launch_ns + num_slots * costs.partial_bytes * 1000 // costs.bytes_per_us
    return Overlapped(best.items, best.total_ns + merge_ns)


@njit(inner=True)
def _items_of(rounds, overlap):
    """Number of items that the SMs compute in `rounds` rounds."""
    return rounds * overlap.num_sms // overlap.num_kv_heads


@njit(inner=True)
def _profile(items, overlap):
    """Computes the profile. Items are done when all SMs together have had time for their sum, and when an SM with the
    most items has had time for them, each counted like the longest."""
    number = len(items)
    blocks = np.empty((number, BLOCK_COLUMNS), np.int64)
    until_ns, is_wide = np.empty(number, np.int64), np.empty(number, np.int64)
    sum_ns, latest_ns, max_queries = np.int64(0), np.int64(0), np.int64(0)
    for item in range(number):
        segments = np.int64(items[item, SEGMENT_END]) - items[item, SEGMENT_START]
        full = (np.int64(items[item, SEGMENT_SHARED_END]) - items[item, SEGMENT_START]) // overlap.block_segments
        num_blocks = (segments + overlap.block_segments - 1) // overlap.block_segments
        queries = np.int64(items[item, QUERY_END]) - items[item, QUERY_START]
        blocks[item, FULL_BLOCKS], blocks[item, MASKED_BLOCKS] = full, num_blocks - full
        blocks[item, NUM_SEGMENTS], blocks[item, NUM_ENTRIES] = segments, queries
        item_ns = num_blocks * overlap.block_ns + overlap.item_ns
        sum_ns += item_ns
        rounds = ((item + 1) * overlap.num_kv_heads + overlap.num_sms - 1) // overlap.num_sms
        latest_ns = max(latest_ns, sum_ns * overlap.num_kv_heads // overlap.num_sms, rounds * item_ns)
        max_queries = max(max_queries, queries)
        until_ns[item], is_wide[item] = latest_ns, max_queries * overlap.group_size > overlap.narrow_rows
    return _Profile(blocks, until_ns, is_wide)


@njit(inner=True)
def _both_ns(chunk_ns, decode_ns, overlap, wide):
    """Time of chunks and decodes that take `chunk_ns` and `decode_ns` by themselves. While both run, each has a share
    of its speed."""
    chunk_end_ns = chunk_ns * 100 // overlap.chunk_percent[wide]
    decode_end_ns = decode_ns * 100 // overlap.decode_percent[wide]
    if decode_end_ns > chunk_end_ns:
        return overlap.fixed_ns + chunk_end_ns + decode_ns - chunk_end_ns * overlap.decode_percent[wide] // 100
    return overlap.fixed_ns + chunk_ns + decode_end_ns * (100 - overlap.chunk_percent[wide]) // 100
