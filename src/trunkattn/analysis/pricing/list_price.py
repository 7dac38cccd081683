"""The predicted time of a tile list, however it was planned: a packing's list is priced by the formulas of tilings."""

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from trunkattn.planner.tiles.candidates import TilingRule
from trunkattn.planner.tiles.cost import StageLoad, item_ns, load_ns, memory_tokens, tile_blocks, tile_times
from trunkattn.planner.tiles.layout import Stage
from trunkattn.planner.work_list import (
    DIRECT,
    QUERY_END,
    QUERY_START,
    SEGMENT_END,
    SEGMENT_PLACE,
    SEGMENT_SHARED_END,
    SEGMENT_START,
    TileList,
)


def list_ns(rule: TilingRule, tiles: TileList) -> int:
    """Predicted time of a tile list in ns: its launches one after the other, and its merge."""
    num_heights, bounds = len(rule.tiles), tiles.counts.tolist()
    time_ns = rule.launch_ns if len(tiles.merge_queries) else 0
    for bucket, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            time_ns += _launch_ns(rule, tiles, bucket % num_heights, tiles.items[start:end].astype(np.int64))
    return time_ns


def _launch_ns(rule: TilingRule, tiles: TileList, tile_index: int, items: NDArray[np.int64]) -> int:
    """Predicted time in ns of the items of one tile, without the merge."""
    costs, shape = rule.priced.costs, rule.tiles[tile_index]
    tile = tile_times(costs, tile_index)
    stage = Stage(
        height=shape.entries(rule.group_size),
        least=1,
        below=1,
        block_segments=shape.block_tokens // rule.segment_size,
        num_splits=0,
        subtiles=shape.subtiles,
        private_segments=shape.private_tokens // rule.segment_size,
    )
    blocks = [tile_blocks(*each, stage) for each in _segments(items, shape.subtiles)]
    times = [item_ns(*each, 1, shape.subtiles, tile.full_ns, tile.masked_ns) for each in blocks]
    chains = [item_ns(*each, 1, shape.subtiles, tile.full_chain_ns, tile.masked_chain_ns) for each in blocks]
    slots = tiles.partial_slots[_within(items[:, QUERY_START], items[:, QUERY_END])]
    read, from_memory = _tokens(tiles, items, costs.l2_tokens)
    load = StageLoad(
        num_items=len(items),
        work_ns=sum(times),
        max_item_ns=max(times),
        max_chain_ns=max(chains),
        num_partials=int((slots != DIRECT).sum()),
        tokens=read,
        memory_tokens=from_memory,
    )
    return int(load_ns(load, tile, costs, shape.subtiles == 1, False))


def _segments(items: NDArray[np.int64], subtiles: int) -> list[tuple[int, int]]:
    """(segments that all rows see, private segments of the fullest subtile) of each item."""
    whole = items[:, SEGMENT_SHARED_END] - items[:, SEGMENT_START]
    private = (items[:, SEGMENT_END] - items[:, SEGMENT_SHARED_END]) // subtiles
    return list(zip(whole.tolist(), private.tolist(), strict=True))


def _tokens(tiles: TileList, items: NDArray[np.int64], l2_tokens: int) -> tuple[int, int]:
    """Tokens that the items read, and tokens that they read from memory, not from the L2 cache."""
    own = _within(items[:, SEGMENT_START], items[:, SEGMENT_END])
    own = own[np.argsort(-tiles.segment_tokens[own])]  # a page's longest reader first, and padding last
    tokens, places = tiles.segment_tokens[own], tiles.segments[own, SEGMENT_PLACE]
    _, first, times = np.unique(places[tokens > 0], return_index=True, return_counts=True)
    unique = tokens[first]
    read, once, common = int(tokens.sum()), int(unique.sum()), int(unique[times > 1].sum())
    return read, int(memory_tokens(once, common, read - once, l2_tokens))


def _within(starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
    """The indices of all ranges [start, end)."""
    sizes = ends - starts
    return np.repeat(starts - np.cumsum(sizes) + sizes, sizes) + np.arange(sizes.sum())
