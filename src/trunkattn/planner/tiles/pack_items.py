"""The items of packs as items of row tiles: what a packing policy has planned, for the kernels of a GPU."""

from typing import NamedTuple

import numpy as np

from trunkattn.compiled import njit
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.candidates import TilingRule
from trunkattn.planner.tiles.cost import EVERY
from trunkattn.planner.tiles.layout import Items
from trunkattn.planner.tiles.tile_list import TileArrays, finish, nest
from trunkattn.planner.work_list import (
    KV_END,
    KV_ROW,
    KV_START,
    QUERY_END,
    QUERY_START,
    SEGMENT_COLUMNS,
    SEGMENT_END,
    SEGMENT_PLACE,
    SEGMENT_POSITION,
    SEGMENT_QUERIES,
    SEGMENT_SHARED_END,
    SEGMENT_START,
    TileList,
    WorkList,
)


class KeyGrid(NamedTuple):
    """The tokens at which blocks of keys begin, as batch-invariant lists need them: every `block` tokens of each `span`
    tokens of a sequence. With spans of one token they begin where items do."""

    span: int
    block: int


def tile_work(rule: TilingRule, work: WorkList, batch: StepTables, fixed_chunk: int = 0) -> TileList:
    """The work list of a packing policy as a tile list: each item goes to the lowest tile that holds it.

    fixed_chunk: see `SplitRule`.
    """
    heights = [tile.entries(rule.group_size) for tile in rule.tiles]
    buckets = np.searchsorted(heights, work.items[:, QUERY_END] - work.items[:, QUERY_START]).astype(np.int32)
    per_tile = [EVERY if rule.batch_invariant else tile.block_tokens // rule.segment_size for tile in rule.tiles]
    block_segments = np.array(per_tile, np.int32)[buckets]
    grid = KeyGrid(fixed_chunk, rule.tiles[0].block_tokens) if fixed_chunk else KeyGrid(1, 1)
    emitted = items_of_work(
        (work.items, work.queries),
        batch.block_table,
        batch.query_positions,
        batch.window,
        rule.segment_size,
        rule.page_size,
        block_segments,
        grid,
    )
    if rule.list_rule.is_nested:
        emitted = nest(emitted, buckets, rule.list_rule.subtiles)
    arrays: TileArrays = finish(emitted, buckets, len(rule.tiles), int(batch.query_start_loc[-1]), rule.fuse_up_to)
    return TileList(*arrays, merges_taller=False)


@njit(inner=True)
def _first_listed(start, grid):
    """The first token of the block that holds an item's first token."""
    return start - start % grid.span % grid.block


@njit
def items_of_work(work, table, positions, window, segment_size, page_size, block_segments, grid):
    """The items of a WorkList as Items whose segments are all for all queries of the item. work: its items and queries.

    On a grid, where a window begins within a block, the segments before it are listed as empty ones, so that all others
    keep their places.
    """
    source, queries = work
    total = np.int64(0)
    for i in range(len(source)):
        first = _first_listed(np.int64(source[i, KV_START]), grid)
        total += (source[i, KV_END] + segment_size - 1) // segment_size - first // segment_size
    items = source.copy()
    segments = np.empty((total, SEGMENT_COLUMNS), np.int32)
    at = 0
    for i in range(len(source)):
        row, start, end = source[i, KV_ROW], source[i, KV_START], source[i, KV_END]
        count = source[i, QUERY_END] - source[i, QUERY_START]
        lowest, highest = positions[queries[source[i, QUERY_START]]], np.int32(0)
        for j in range(source[i, QUERY_START], source[i, QUERY_END]):
            lowest, highest = min(lowest, positions[queries[j]]), max(highest, positions[queries[j]])
        items[i, SEGMENT_START] = at
        full, leading = 0, True
        token = _first_listed(np.int64(start), grid)
        while token < end:
            tokens = min((token // segment_size + 1) * segment_size, end) - token  # a window may start inside a segment
            if token + tokens > start:
                segments[at, SEGMENT_PLACE] = table[row, token // page_size] * page_size + token % page_size
                segments[at, SEGMENT_QUERIES] = count << 8 | tokens << 16
                segments[at, SEGMENT_POSITION] = token
            else:
                segments[at, :] = 0
            is_full = tokens == segment_size and token + segment_size - 1 <= lowest and token > highest - window
            leading = leading and is_full
            full += leading
            at += 1
            token += tokens
        items[i, SEGMENT_SHARED_END] = items[i, SEGMENT_START] + full // block_segments[i] * block_segments[i]
        items[i, SEGMENT_END] = at
    return Items(items, segments, queries, np.ones(len(items), np.bool_))
