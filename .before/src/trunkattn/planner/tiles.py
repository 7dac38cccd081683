"""Row tiles over the forest: each reads every run of KV that at least one of its queries needs, once.

Queries stand in depth-first order, so neighbours share most of their path. A tile of neighbours reads the trunk for all
its rows and each private suffix for one request's rows (a block-diagonal mask), and needs no partial states. Tiles that
run side by side find the trunk in the L2 cache, so it leaves memory once. Two heights may share the work: tall tiles
for nodes with many queries, low ones for the rest, which merge the partials of the tall ones (RelayAttention §3.3).
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trunkattn.plan_format import DIRECT, ITEM_COLUMNS, QUERY_END, QUERY_START, RUN_END, RUN_FULL, RUN_START

Int32Array = NDArray[np.int32]


class Entries(NamedTuple):
    """Query tokens in the order of the forest's rows."""

    query: Int32Array  # [E] token of the step
    position: Int32Array  # [E] place in its sequence
    node_start: Int32Array  # [N] first entry below a node
    node_end: Int32Array  # [N]


class Stage(NamedTuple):
    """One kind of tile. Nodes with at least `least` and fewer than `below` entries belong to it."""

    height: int  # entries of a tile
    least: int
    below: int
    block_runs: int  # runs of a block of keys
    num_parts: int  # items wanted: long tiles are cut until there are about as many; 0: none is cut
    subtiles: int = 1  # see `nest`
    private_runs: int = 1  # of a subtile's block


class Items(NamedTuple):
    """What a stage emits, in the order of the entries; items as in TileList.

    uncut: the item is a whole tile. Parts of a tile run side by side, so none of them can merge the others.
    """

    items: Int32Array
    runs: Int32Array
    queries: Int32Array
    uncut: NDArray[np.bool_]


@njit(cache=True)
def make_entries(forest, seq_lens, query_start_loc):
    """Entries of all rows, depth first."""
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


@njit(cache=True)
def visible(forest, entries, node, low, high, window):
    """Tokens [start, end) of a node that entries [low, high) see; lowest and highest position."""
    lowest, highest = entries.position[low], entries.position[low]
    for i in range(low + 1, high):
        lowest, highest = min(lowest, entries.position[i]), max(highest, entries.position[i])
    start = max(forest.token_start[node], lowest + 1 - window)
    end = min(forest.token_end[node], highest + 1)
    return start, end, lowest, highest


@njit(cache=True)
def segments(forest, entries, stage, window, run):
    """(tile, node, runs) of a stage, by tile and then by node; indptr of the tiles."""
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
    num_runs = np.zeros(indptr[-1], np.int32)
    fill = indptr[:-1].copy()
    for node in range(len(forest.parent)):
        size = entries.node_end[node] - entries.node_start[node]
        if stage.least <= size < stage.below and forest.token_end[node] > forest.token_start[node]:
            for tile in range(entries.node_start[node] // height, (entries.node_end[node] - 1) // height + 1):
                low, high = (
                    max(entries.node_start[node], tile * height),
                    min(entries.node_end[node], (tile + 1) * height),
                )
                start, end, _, _ = visible(forest, entries, node, low, high, window)
                nodes[fill[tile]] = node
                num_runs[fill[tile]] = max(0, (end + run - 1) // run - start // run)
                fill[tile] += 1
    return indptr, nodes, num_runs


@njit(cache=True)
def _fill_tile(forest, entries, table, tile, stage, span, window, run, page_size, runs, whole):
    """Runs of one tile's segments; whole[i]: a full run that all of its queries see."""
    nodes, num_runs = span
    at = 0
    for i in range(len(nodes)):
        node = nodes[i]
        low = max(entries.node_start[node], tile * stage.height)
        high = min(entries.node_end[node], (tile + 1) * stage.height)
        start, end, lowest, highest = visible(forest, entries, node, low, high, window)
        row = forest.order[forest.row_start[node]]
        rows = (low - tile * stage.height) | (high - tile * stage.height) << 8
        token = start
        column, offset = token // page_size, token % page_size  # counted on: divisions would take most of the time
        for _ in range(num_runs[i]):
            count = min(token - (token & (run - 1)) + run, end) - token  # a window may start inside a run
            runs[at, 0] = table[row, column] * page_size + offset
            runs[at, 1] = rows | count << 16
            runs[at, 2] = token
            whole[at] = count == run and token + run - 1 <= lowest and token > highest - window
            at += 1
            token += count
            offset += count
            if offset == page_size:
                column, offset = column + 1, 0
    return at


@njit(cache=True)
def share_of(total, num_parts, block_runs):
    """Runs of an item, where the tiles of a stage have so many in all and are to be cut into `num_parts`; 0: not."""
    if num_parts == 0:
        return total + 1
    return max(np.int64(block_runs), (total + num_parts - 1) // num_parts)


@njit(cache=True)
def step_of(size, share, block_runs):
    """Runs of each item of a tile, but the last: whole blocks."""
    parts = max(1, (size + share // 2) // share)
    return max(1, ((size + parts - 1) // parts + block_runs - 1) // block_runs * block_runs)


@njit(cache=True)
def emit_stage(forest, entries, table, stage, window, run, page_size):
    """The items of a stage, tiles cut into parts of whole blocks."""
    indptr, nodes, num_runs = segments(forest, entries, stage, window, run)
    num_tiles = len(indptr) - 1
    total = np.int64(num_runs.sum())
    share = share_of(total, stage.num_parts, stage.block_runs)
    runs = np.empty((total, 3), np.int32)
    whole = np.empty(total, np.bool_)
    most = np.int64(0)
    for tile in range(num_tiles):
        size = num_runs[indptr[tile] : indptr[tile + 1]].sum()
        most += max(1, (size + share // 2) // share) + 1
    items = np.empty((most, ITEM_COLUMNS), np.int32)
    queries = np.empty(most * stage.height, np.int32)
    uncut = np.empty(most, np.bool_)
    count, filled, at = 0, 0, 0
    for tile in range(num_tiles):
        span = (nodes[indptr[tile] : indptr[tile + 1]], num_runs[indptr[tile] : indptr[tile + 1]])
        size = _fill_tile(forest, entries, table, tile, stage, span, window, run, page_size, runs[at:], whole[at:])
        step = step_of(size, share, stage.block_runs)
        for begin in range(at, at + size, step):
            end = min(begin + step, at + size)
            low, high, full = _narrow(runs, whole, begin, end)
            for i in range(tile * stage.height + low, tile * stage.height + high):
                queries[filled + i - tile * stage.height - low] = entries.query[i]
            items[count, RUN_START], items[count, RUN_END] = begin, end
            items[count, RUN_FULL] = begin + full // stage.block_runs * stage.block_runs
            items[count, QUERY_START], items[count, QUERY_END] = filled, filled + high - low
            filled += high - low
            uncut[count] = step >= size
            count += 1
        at += size
    return Items(items[:count].copy(), runs, queries[:filled].copy(), uncut[:count].copy())


@njit(cache=True)
def _narrow(runs, whole, begin, end):
    """Leaves out queries that no run of an item concerns. Returns first and end query, and leading full runs."""
    low, high = 255, 0
    for i in range(begin, end):
        low, high = min(low, runs[i, 1] & 255), max(high, runs[i, 1] >> 8 & 255)
    if low > 0:
        for i in range(begin, end):
            runs[i, 1] -= low | low << 8
    full = 0
    for i in range(begin, end):
        if not whole[i] or (runs[i, 1] & 0xFFFF) != (high - low) << 8:
            break
        full += 1
    return low, high, full


@njit(cache=True)
def items_of_work(work, table, positions, window, run, page_size, block_runs):
    """A WorkList's items as runs: each reads one range of tokens for all its queries. work: items, queries."""
    source, queries = work
    total = np.int64(0)
    for i in range(len(source)):
        total += (source[i, 2] + run - 1) // run - source[i, 1] // run
    items = source.copy()
    runs = np.empty((total, 3), np.int32)
    at = 0
    for i in range(len(source)):
        row, start, end = source[i, 0], source[i, 1], source[i, 2]
        count = source[i, QUERY_END] - source[i, QUERY_START]
        lowest, highest = positions[queries[source[i, QUERY_START]]], np.int32(0)
        for j in range(source[i, QUERY_START], source[i, QUERY_END]):
            lowest, highest = min(lowest, positions[queries[j]]), max(highest, positions[queries[j]])
        items[i, RUN_START] = at
        full, leading = 0, True
        token = start
        while token < end:
            tokens = min((token // run + 1) * run, end) - token  # a window may start inside a run
            runs[at, 0] = table[row, token // page_size] * page_size + token % page_size
            runs[at, 1] = count << 8 | tokens << 16
            runs[at, 2] = token
            leading = leading and tokens == run and token + run - 1 <= lowest and token > highest - window
            full += leading
            at += 1
            token += tokens
        items[i, RUN_FULL] = items[i, RUN_START] + full // block_runs[i] * block_runs[i]
        items[i, RUN_END] = at
    return Items(items, runs, queries, np.ones(len(items), np.bool_))


@njit(cache=True)
def nest(emitted, kind_of_item, shapes):
    """Deals the runs of an item that are not full to its subtiles, which read them side by side.

    shapes [kinds, 3]: subtiles of a tile, entries and runs of a block of one. A run goes to every subtile that has
    queries of it; the list holds a block for each subtile in turn, short ones filled up with runs of no token.
    """
    items, runs, queries, uncut = emitted
    items = items.copy()
    lengths = np.zeros(shapes[:, 0].max(), np.int64)
    ends = np.zeros(len(items) + 1, np.int64)
    for item in range(len(items)):
        subtiles, height, block = shapes[kind_of_item[item]]
        size = items[item, RUN_END] - items[item, RUN_FULL]
        if subtiles > 1:
            _count(runs, items[item], height, lengths)
            size = (lengths.max() + block - 1) // block * block * subtiles
        ends[item + 1] = ends[item] + items[item, RUN_FULL] - items[item, RUN_START] + size
    nested = np.zeros((ends[-1], 3), np.int32)
    for item in range(len(items)):
        subtiles, height, block = shapes[kind_of_item[item]]
        start, full, end = items[item, RUN_START], items[item, RUN_FULL], items[item, RUN_END]
        at = ends[item] + full - start
        nested[ends[item] : at] = runs[start:full]
        if subtiles == 1:
            nested[at : ends[item + 1]] = runs[full:end]
        else:
            lengths[:] = 0
            for i in range(full, end):
                low, high = runs[i, 1] & 255, runs[i, 1] >> 8 & 255
                for subtile in range(low // height, (high - 1) // height + 1):
                    nth = lengths[subtile]
                    nested[at + (nth // block * subtiles + subtile) * block + nth % block] = runs[i]
                    lengths[subtile] += 1
        items[item, RUN_START], items[item, RUN_FULL], items[item, RUN_END] = ends[item], at, ends[item + 1]
    return Items(items, nested, queries, uncut)


@njit(cache=True)
def _count(runs, item, height, lengths):
    """Runs of an item that are not full, by subtile."""
    lengths[:] = 0
    for i in range(item[RUN_FULL], item[RUN_END]):
        for subtile in range((runs[i, 1] & 255) // height, ((runs[i, 1] >> 8 & 255) - 1) // height + 1):
            lengths[subtile] += 1


@njit(cache=True)
def finish(emitted, bucket, num_buckets, num_queries, fuse_up_to):
    """Partial slots, merges, and items in the order of their buckets, heaviest first.

    `bucket` [num_items]: tile height. An item of the lowest tile that is `uncut` and holds the last piece of all its
    queries merges the others itself, at most `fuse_up_to` of them, and moves to the second half of the buckets.
    """
    items, runs, queries, uncut = emitted
    pieces = np.zeros(num_queries, np.int32)
    for query in queries:
        pieces[query] += 1
    slots, first = _slots(queries, pieces)
    parts = np.zeros((len(queries), 2), np.int32)
    fused = np.zeros(num_queries, np.bool_)
    bucket = bucket.copy()
    for item in range(len(items)):
        merges, leaf = False, uncut[item] and bucket[item] == 0
        for i in range(items[item, QUERY_START], items[item, QUERY_END]):
            count = pieces[queries[i]]
            merges = merges or count > 1
            leaf = leaf and (count == 1 or (slots[i] == first[queries[i]] + count - 1 and count - 1 <= fuse_up_to))
        if merges and leaf:
            for i in range(items[item, QUERY_START], items[item, QUERY_END]):
                if pieces[queries[i]] > 1:
                    parts[i, 0], parts[i, 1] = first[queries[i]], slots[i]
                    slots[i] = DIRECT
                    fused[queries[i]] = True
            bucket[item] += num_buckets
    weight = np.empty(len(items), np.int64)
    counts = np.zeros(2 * num_buckets + 1, np.int32)
    for item in range(len(items)):
        weight[item] = np.int64(bucket[item]) << 32 | (np.int64(1) << 31) - (
            items[item, RUN_END] - items[item, RUN_START]
        )
        counts[bucket[item] + 1] += 1
    for i in range(2 * num_buckets):
        counts[i + 1] += counts[i]
    left = 0
    for query in range(num_queries):
        left += pieces[query] > 1 and not fused[query]
    merge_queries = np.empty(left, np.int32)
    merge_ranges = np.empty((left, 2), np.int32)
    at = 0
    for query in range(num_queries):
        if pieces[query] > 1 and not fused[query]:
            merge_queries[at] = query
            merge_ranges[at, 0], merge_ranges[at, 1] = first[query], first[query] + pieces[query]
            at += 1
    order = np.argsort(weight, kind="mergesort")
    num_slots = int(pieces[pieces > 1].sum())
    return items[order], runs, queries, slots, parts, counts, merge_queries, merge_ranges, num_slots


@njit(cache=True)
def _slots(queries, pieces):
    """Consecutive slots for the pieces of a query, in the order in which they were emitted."""
    first = np.zeros(len(pieces), np.int32)
    total = 0
    for query in range(len(pieces)):
        first[query] = total
        total += pieces[query] if pieces[query] > 1 else 0
    following = first.copy()
    slots = np.full(len(queries), DIRECT, np.int32)
    for i in range(len(queries)):
        if pieces[queries[i]] > 1:
            slots[i] = following[queries[i]]
            following[queries[i]] += 1
    return slots, first
