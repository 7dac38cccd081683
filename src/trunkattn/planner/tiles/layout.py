"""Row tiles over the forest. A tile reads each segment of KV that at least one of its queries needs, once.

Queries are in depth-first order, so neighbours share most of their path. A tile of neighbours reads the trunk for all
of its rows and each private suffix for the rows of one request (a block-diagonal mask), so it leaves no partials. Tiles
that run at the same time find the trunk in the L2 cache, so it is read from memory once. Two heights can share the
work: tall tiles for nodes with many queries, and low tiles for the other nodes, which also merge the partials of the
tall ones (RelayAttention §3.3).
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.planner.work_list import (
    ITEM_COLUMNS,
    QUERY_END,
    QUERY_START,
    SEGMENT_COLUMNS,
    SEGMENT_END,
    SEGMENT_PLACE,
    SEGMENT_POSITION,
    SEGMENT_QUERIES,
    SEGMENT_SHARED_END,
    SEGMENT_START,
)

Int32Array = NDArray[np.int32]


class Entries(NamedTuple):
    """Query tokens in the order of the forest's rows."""

    query: Int32Array  # [E] token of the step
    position: Int32Array  # [E] place in its sequence
    node_start: Int32Array  # [N] first entry below a node
    node_end: Int32Array  # [N] one past the last entry below it


class Stage(NamedTuple):
    """The tiles of one launch, and how they are cut into items. Nodes with at least `least` and fewer than `below`
    entries belong to it.

    Tiles are cut in one of three ways. With `num_splits` 0 none is. Otherwise each tile by itself is cut into equal
    items. With `item_segments`, all tiles in a row are cut into `num_splits` portions of one length, whatever tiles
    they lie in: a portion may hold the end of one tile and the beginning of the next, as items of their own. No CTA is
    bound to a portion. Kernels deal the items, heaviest first, so a CTA mostly gets a whole portion or two parts that
    are as long as one.
    """

    height: int  # entries of a tile
    least: int
    below: int
    block_segments: int  # segments of a block of keys
    num_splits: int  # items or portions that all tiles are to be cut into, see `target_of`
    subtiles: int = 1  # see `tile_list.nest`
    private_segments: int = 1  # segments of a subtile's block
    item_segments: int = 0  # segments that take as long as an item takes to begin and to end; 0: equal items


@njit(inner=True)
def stage_of(fields):
    """The Stage in an array of its fields."""
    height, least, below, block_segments, num_splits, subtiles, private_segments, item_segments = fields
    return Stage(
        height=height,
        least=least,
        below=below,
        block_segments=block_segments,
        num_splits=num_splits,
        subtiles=subtiles,
        private_segments=private_segments,
        item_segments=item_segments,
    )


@njit(inner=True)
def cut_stage(stage, num_splits, item_segments):
    """A Stage whose tiles are cut in this way."""
    return Stage(
        height=stage.height,
        least=stage.least,
        below=stage.below,
        block_segments=stage.block_segments,
        num_splits=num_splits,
        subtiles=stage.subtiles,
        private_segments=stage.private_segments,
        item_segments=item_segments,
    )


# Columns of `_node_rows`
NODE_LOW: Final = 0  # the tile's first entry below the node
NODE_HIGH: Final = 1  # one past its last
NODE_FIRST: Final = 2  # the node's first segment that is full and seen entirely by all of these entries
NODE_LAST: Final = 3  # one past the last
NODE_COLUMNS: Final = 4


class TileNodes(NamedTuple):
    """The nodes that each tile of a stage reads, by tile and then by node."""

    indptr: Int32Array  # [tiles + 1] into the others
    nodes: Int32Array
    num_segments: Int32Array  # segments of the node that the tile reads


class Outline(NamedTuple):
    """The items of a stage without their segments, in the order of the entries."""

    tile_nodes: TileNodes
    items: Int32Array  # as in TileList
    first_entry: NDArray[np.int64]  # first entry of each item
    uncut: NDArray[np.bool_]  # see Items


class Items(NamedTuple):
    """The items that a stage emits, in the order of the entries. The columns are those of TileList.

    uncut: whether an item is a whole tile. The items of a cut tile run at the same time, so none can merge the others.
    """

    items: Int32Array
    segments: Int32Array
    queries: Int32Array
    uncut: NDArray[np.bool_]


@njit
def make_entries(forest, seq_lens, query_start_loc):
    """The entries of all rows, in depth-first order."""
    num_rows = len(forest.order)
    first = np.zeros(num_rows + 1, np.int32)
    for i in range(num_rows):
        row = forest.order[i]
        first[i + 1] = first[i] + query_start_loc[row + 1] - query_start_loc[row]
    query = np.empty(first[-1], np.int32)
    position = np.empty(first[-1], np.int32)
    for i in range(num_rows):
        row = forest.order[i]
        for j in range(first[i + 1] - first[i]):
            query[first[i] + j] = query_start_loc[row] + j
            position[first[i] + j] = seq_lens[row] - query_start_loc[row + 1] + query_start_loc[row] + j
    return Entries(query, position, first[forest.row_start], first[forest.row_end])


class Visible(NamedTuple):
    """The tokens [start, end) of a node that some entries see, and the lowest and highest position of these entries."""

    start: int
    end: int
    lowest: int
    highest: int


@njit(inner=True)
def visible(forest, entries, node, low, high, window):
    """What entries [low, high) see of a node."""
    lowest, highest = entries.position[low], entries.position[low]
    for i in range(low + 1, high):
        lowest, highest = min(lowest, entries.position[i]), max(highest, entries.position[i])
    start = max(forest.token_start[node], lowest + 1 - window)
    end = min(forest.token_end[node], highest + 1)
    return Visible(start, end, lowest, highest)


@njit
def stage_nodes(forest, entries, stage, window, segment_size):
    """The nodes that each tile of a stage reads."""
    height = stage.height
    num_tiles = (len(entries.query) + height - 1) // height
    indptr = np.zeros(num_tiles + 1, np.int32)
    for node in range(len(forest.parent)):
        size = entries.node_end[node] - entries.node_start[node]
        if stage.least <= size < stage.below and forest.token_end[node] > forest.token_start[node]:
            for tile in range(entries.node_start[node] // height, (entries.node_end[node] - 1) // height + 1):
                indptr[tile + 1] += 1
    for tile in range(num_tiles):
        indptr[tile + 1] += indptr[tile]
    nodes = np.empty(indptr[-1], np.int32)
    num_segments = np.zeros(indptr[-1], np.int32)
    fill = indptr[:-1].copy()
    for node in range(len(forest.parent)):
        size = entries.node_end[node] - entries.node_start[node]
        if stage.least <= size < stage.below and forest.token_end[node] > forest.token_start[node]:
            for tile in range(entries.node_start[node] // height, (entries.node_end[node] - 1) // height + 1):
                low = max(entries.node_start[node], tile * height)
                high = min(entries.node_end[node], (tile + 1) * height)
                seen = visible(forest, entries, node, low, high, window)
                last, first = (seen.end + segment_size - 1) // segment_size, seen.start // segment_size
                nodes[fill[tile]] = node
                num_segments[fill[tile]] = max(0, last - first)
                fill[tile] += 1
    return TileNodes(indptr, nodes, num_segments)


@njit(inner=True)
def _fill_tile(forest, entries, table, tile, stage, tile_nodes, window, segment_size, page_size, segments):
    """Writes the segments of a tile, with queries counted from the tile's first entry. Returns the number of
    segments."""
    at = 0
    for i in range(tile_nodes.indptr[tile], tile_nodes.indptr[tile + 1]):
        node = tile_nodes.nodes[i]
        low = max(entries.node_start[node], tile * stage.height)
        high = min(entries.node_end[node], (tile + 1) * stage.height)
        seen = visible(forest, entries, node, low, high, window)
        row = forest.order[forest.row_start[node]]
        rows = (low - tile * stage.height) | (high - tile * stage.height) << 8
        token = seen.start
        # The loop advances these, because a division for each segment would take most of the time.
        column, offset = token // page_size, token % page_size
        for _ in range(tile_nodes.num_segments[i]):
            stop = token - (token & (segment_size - 1)) + segment_size  # a window may start inside a segment
            count = min(stop, seen.end) - token
            segments[at, SEGMENT_PLACE] = table[row, column] * page_size + offset
            segments[at, SEGMENT_QUERIES] = rows | count << 16
            segments[at, SEGMENT_POSITION] = token
            at += 1
            token += count
            offset += count
            if offset == page_size:
                column, offset = column + 1, 0
    return at


@njit
def target_of(total, num_tiles, num_splits, block_segments, item_segments):
    """Segments that an item, or a portion, should have if tiles of `total` segments in all are to be cut into
    `num_splits` of them. With num_splits 0 no tile is cut. `Stage` describes the other arguments.

    If tiles are cut into equal items, a tile becomes the nearest whole number of them (`step_of`). Tiles mostly have
    one size, so each becomes as many items as fit into one round together; otherwise a few items would be left for a
    second round. A portion has room for what its items take to begin and to end, and for a block that each of them
    does not fill. The device planner compiles this function and the next four, too.
    """
    target = total + 1
    if num_splits > 0:
        if item_segments > 0:
            total += num_tiles * (block_segments - 1 + item_segments)
            target = ((total + num_splits - 1) // num_splits + block_segments - 1) // block_segments * block_segments
        else:
            if num_tiles <= num_splits:
                num_splits = num_splits // max(num_tiles, 1) * max(num_tiles, 1)
            target = (total + num_splits - 1) // num_splits
        target = max(block_segments, target)
    return target


@njit
def step_of(size, target, block_segments, item_segments):
    """Segments of each item of a tile but for the first and the last: a whole number of blocks."""
    num_splits = max(1, (size + target // 2) // target)
    equal = max(1, ((size + num_splits - 1) // num_splits + block_segments - 1) // block_segments * block_segments)
    return equal + min(item_segments, 1) * (target - equal)


@njit
def pitch_of(size, block_segments, item_segments):
    """Segments from the beginning of a tile to that of the next one, where tiles in a row are cut into portions."""
    return min(size, 1) * ((size + item_segments + block_segments - 1) // block_segments * block_segments)


@njit
def lead_of(step, before, item_segments):
    """Segments of a tile's first item if the tile has so many. before: the pitches of the tiles before it."""
    return step - min(item_segments, 1) * (before % step)


@njit
def splits_of(size, lead, step):
    """Items of a tile."""
    return min(size, 1) * (1 + max(size - lead + step - 1, 0) // step)


@njit(inner=True)
def _node_rows(forest, entries, stage, tile_nodes, window, segment_size):
    """[nodes, NODE_COLUMNS] for each tile and node."""
    found = np.empty((len(tile_nodes.nodes), NODE_COLUMNS), np.int64)
    for tile in range(len(tile_nodes.indptr) - 1):
        for i in range(tile_nodes.indptr[tile], tile_nodes.indptr[tile + 1]):
            node = tile_nodes.nodes[i]
            low = max(np.int64(entries.node_start[node]), tile * stage.height)
            high = min(np.int64(entries.node_end[node]), (tile + 1) * stage.height)
            seen = visible(forest, entries, node, low, high, window)
            begin = seen.start // segment_size
            first = (seen.highest - window) // segment_size + 1 - begin
            found[i, NODE_LOW], found[i, NODE_HIGH] = low, high
            found[i, NODE_FIRST] = max(min(1, seen.start % segment_size), first)  # a window may start inside a segment
            found[i, NODE_LAST] = min(seen.end, seen.lowest + 1) // segment_size - begin
    return found


@njit(inner=True)
def _entries_of(rows, num_segments, first_node, end):
    """The entries [low, high) for which an item's segments are: those of the nodes from `first_node` on, up to segment
    `end`, counted from that node's first. rows: see `_node_rows`."""
    low, high, node, before = rows[first_node, NODE_LOW], rows[first_node, NODE_HIGH], first_node, np.int64(0)
    while before < end:
        if num_segments[node] > 0:
            low, high = min(low, rows[node, NODE_LOW]), max(high, rows[node, NODE_HIGH])
        before += num_segments[node]
        node += 1
    return low, high


@njit(inner=True)
def _leading_full(rows, num_segments, first_node, begin, end, low, high):
    """How many leading segments of an item are full and for all of its entries [low, high). Its segments [begin, end)
    are counted from the first of `first_node`."""
    full, is_full, node, before = np.int64(0), True, first_node, np.int64(0)
    while before < end and is_full:
        first, last = max(begin - before, 0), min(end - before, np.int64(num_segments[node]))
        if last > first:
            is_for_all = rows[node, NODE_LOW] == low and rows[node, NODE_HIGH] == high
            is_full = is_for_all and first >= rows[node, NODE_FIRST]
            if is_full:
                whole = max(0, min(last, rows[node, NODE_LAST]) - first)
                full += whole
                is_full = whole == last - first
        before += num_segments[node]
        node += 1
    return full


@njit(inner=True)
def outline_stage(forest, entries, stage, window, segment_size):
    """The items of a stage. A tile that is cut becomes items of whole blocks."""
    tile_nodes = stage_nodes(forest, entries, stage, window, segment_size)
    rows = _node_rows(forest, entries, stage, tile_nodes, window, segment_size)
    indptr, num_segments = tile_nodes.indptr, tile_nodes.num_segments
    num_tiles = len(indptr) - 1
    block, own = stage.block_segments, stage.item_segments
    target = target_of(np.int64(num_segments.sum()), num_tiles, stage.num_splits, block, own)
    most, before = np.int64(0), np.int64(0)
    for tile in range(num_tiles):
        size = np.int64(num_segments[indptr[tile] : indptr[tile + 1]].sum())
        step = step_of(size, target, block, own)
        most += splits_of(size, lead_of(step, before, own), step)
        before += pitch_of(size, block, own)
    items = np.empty((most, ITEM_COLUMNS), np.int32)
    first_entry = np.empty(most, np.int64)
    uncut = np.empty(most, np.bool_)
    count, filled, at, before = 0, np.int64(0), np.int64(0), np.int64(0)
    for tile in range(num_tiles):
        size = np.int64(num_segments[indptr[tile] : indptr[tile + 1]].sum())
        step = step_of(size, target, block, own)
        lead = lead_of(step, before, own)
        num_items = splits_of(size, lead, step)
        first_node, passed = np.int64(indptr[tile]), np.int64(0)  # an item's first node; the tile's segments before it
        for split in range(num_items):
            begin, end = max(lead + (split - 1) * step, 0), min(lead + split * step, size)
            while passed + num_segments[first_node] <= begin:
                passed += num_segments[first_node]
                first_node += 1
            low, high = _entries_of(rows, num_segments, first_node, end - passed)
            full = _leading_full(rows, num_segments, first_node, begin - passed, end - passed, low, high)
            items[count, SEGMENT_START], items[count, SEGMENT_END] = at + begin, at + end
            items[count, SEGMENT_SHARED_END] = at + begin + full // block * block
            items[count, QUERY_START], items[count, QUERY_END] = filled, filled + high - low
            first_entry[count], uncut[count] = low, num_items == 1
            filled += high - low
            count += 1
        at += size
        before += pitch_of(size, block, own)
    return Outline(tile_nodes, items[:count].copy(), first_entry[:count].copy(), uncut[:count].copy())


@njit
def emit_stage(forest, entries, table, stage, window, segment_size, page_size):
    """The items of a stage with their segments and queries."""
    outline = outline_stage(forest, entries, stage, window, segment_size)
    tile_nodes, items, first_entry = outline.tile_nodes, outline.items, outline.first_entry
    segments = np.empty((np.int64(tile_nodes.num_segments.sum()), SEGMENT_COLUMNS), np.int32)
    at = 0
    for tile in range(len(tile_nodes.indptr) - 1):
        at += _fill_tile(
            forest, entries, table, tile, stage, tile_nodes, window, segment_size, page_size, segments[at:]
        )
    queries = np.empty(items[-1, QUERY_END] if len(items) else 0, np.int32)
    for item in range(len(items)):
        begin = items[item, QUERY_START]
        for i in range(begin, items[item, QUERY_END]):
            queries[i] = entries.query[first_entry[item] + i - begin]
        low = np.int32(first_entry[item] % stage.height)
        if low > 0:  # rows are counted from the item's first query
            for i in range(items[item, SEGMENT_START], items[item, SEGMENT_END]):
                segments[i, SEGMENT_QUERIES] -= low | low << 8
    return Items(items, segments, queries, outline.uncut)


@njit(inner=True)
def ordered_items(outline, num_entries):
    """The items of a stage in the order of `finish`, if no item merges, and the number of partial slots."""
    items, partials = outline.items, np.zeros(num_entries, np.int64)
    lengths = np.empty(len(items), np.int64)
    for item in range(len(items)):
        lengths[item] = items[item, SEGMENT_END] - items[item, SEGMENT_START]
        first = outline.first_entry[item]
        for entry in range(first, first + items[item, QUERY_END] - items[item, QUERY_START]):
            partials[entry] += 1
    num_slots = np.int64(0)
    for entry in range(num_entries):
        num_slots += partials[entry] if partials[entry] > 1 else 0
    return items[np.argsort(-lengths, kind="mergesort")], num_slots
