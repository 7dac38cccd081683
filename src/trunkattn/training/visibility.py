"""Which keys a block of queries sees in training: masks, and ranges of keys in whole blocks."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# Columns of `TreeTables.segments`
TREE_SEGMENT_START = tl.constexpr(0)
TREE_SEGMENT_END = tl.constexpr(1)
TREE_SEGMENT_PARENT = tl.constexpr(2)
TREE_SEGMENT_LEVEL = tl.constexpr(3)
TREE_SEGMENT_COLUMNS = tl.constexpr(4)


class Rows(NamedTuple):
    """The numbers [M] that decide which keys each query of a block sees. `position` is its place among the keys.
    `depth` is the number of keys before it on its path, which in a tree differs from its place. It is set only if there
    is a window."""

    position: Any
    depth: Any


class Depths(NamedTuple):
    """The least and the largest depth of a block of queries in a tree. They are set only if there is a window."""

    least: Any
    largest: Any


class Ranges(NamedTuple):
    """A range of keys, or of queries, in whole blocks. Blocks before full_begin and from full_end on need a mask."""

    begin: Any
    full_begin: Any
    full_end: Any
    end: Any


@triton.jit
def sees(batch, n, length, position, depth, VARIANT: tl.constexpr):
    """Returns whether queries see keys `n` of a sequence of `length` tokens. `position` and `depth`, which `Rows`
    explains, broadcast with `n`."""
    seen = n < length
    if VARIANT.causal:
        seen = seen & (n <= position)
    key_depth = n
    if VARIANT.tree:
        seen = seen & (position < tl.load(batch.subtree_end + n, mask=n < length, other=0))
        if VARIANT.window:
            key_depth = tl.load(batch.depths + n, mask=n < length, other=0)
    if VARIANT.window:
        seen = seen & (depth - key_depth < batch.window)
        if not VARIANT.causal:
            seen = seen & (key_depth - depth < batch.window)
    return seen


@triton.jit
def row_places(batch, m, length, len_k, VARIANT: tl.constexpr):
    """Returns the `Rows` of queries `m` of a sequence of `length` queries and `len_k` keys. The last query sees the
    last key."""
    position = m + (len_k - length)
    depth = position
    if VARIANT.tree and VARIANT.window:
        depth = tl.load(batch.depths + m, mask=m < length, other=0)
    return Rows(position, depth)


@triton.jit
def depths_of(rows, m, length, VARIANT: tl.constexpr):
    """Returns the `Depths` of queries `m` of a tree of `length` tokens."""
    if VARIANT.window:
        return Depths(tl.min(tl.where(m < length, rows.depth, 2147483647)), tl.max(rows.depth))
    else:
        return Depths(0, 0)


@triton.jit
def visible_keys(batch, first, len_q, len_k, TILE: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the `Ranges` of the keys that a block of queries from `first` on sees if there is no tree."""
    BLOCK_N: tl.constexpr = TILE.block_n
    begin, full_begin, full_end, end = 0, 0, len_k, len_k
    last_seen = first + len_k - len_q  # by the first query
    if VARIANT.window:
        begin = tl.minimum(tl.maximum(last_seen + 1 - batch.window, 0), len_k) // BLOCK_N * BLOCK_N
        full_begin = tl.cdiv(tl.maximum(last_seen + TILE.block_m - batch.window, 0), BLOCK_N) * BLOCK_N
        if not VARIANT.causal:
            last_seen = last_seen + batch.window - 1
    if VARIANT.causal or VARIANT.window:
        full_end = tl.minimum(tl.maximum(last_seen + 1, 0), len_k)
        end = tl.minimum(tl.maximum(last_seen + TILE.block_m, 0), len_k)
    full_end = full_end // BLOCK_N * BLOCK_N
    if VARIANT.window:
        no_full = full_begin >= full_end
        full_begin, full_end = tl.where(no_full, begin, full_begin), tl.where(no_full, begin, full_end)
    some = first < len_q
    return Ranges(begin, full_begin, tl.where(some, full_end, begin), tl.where(some, end, begin))


@triton.jit
def masked_blocks(ranges, TILE: tl.constexpr):
    """Returns the number of blocks of keys that need a mask."""
    before, behind = ranges.full_begin - ranges.begin, tl.maximum(ranges.end - ranges.full_end, 0)
    return tl.cdiv(before, TILE.block_n) + tl.cdiv(behind, TILE.block_n)


@triton.jit
def masked_block(ranges, number, TILE: tl.constexpr):
    """Returns the first key of the masked block with this number."""
    at = ranges.begin + number * TILE.block_n
    return tl.where(at < ranges.full_begin, at, at - ranges.full_begin + ranges.full_end)


@triton.jit
def own_segment(batch, first, length, TILE: tl.constexpr):
    """Returns the keys of a tree's query block itself, as `Ranges`, and its segment."""
    begin = first // TILE.block_n * TILE.block_n
    end = tl.minimum(first + TILE.block_m, length)
    return Ranges(begin, begin, begin, end), tl.load(batch.segment_of + first)


@triton.jit
def path_keys(batch, segment, top, first, depths, length, TILE: tl.constexpr, VARIANT: tl.constexpr):
    """Returns the `Ranges` of the keys of one segment above a block of queries, and the segment's parent. `depths` are
    those of the block, see `depths_of`.

    Keys from `top` on are done. All keys that the block sees outside of itself are ancestors of its first query,
    because they come before it in pre-order and their subtrees end after it.
    """
    BLOCK_N: tl.constexpr = TILE.block_n
    segment = tl.maximum(segment, 0)
    own = batch.segments + TREE_SEGMENT_COLUMNS * segment
    start = tl.load(own + TREE_SEGMENT_START)
    end = tl.minimum(tl.load(own + TREE_SEGMENT_END), top)
    parent = tl.load(own + TREE_SEGMENT_PARENT)
    low, full_low = start, start
    if VARIANT.window:
        at_depth_0 = start - tl.load(batch.depths + start)  # the number of a key of depth 0, were it in this segment
        low = tl.maximum(start, at_depth_0 + depths.least + 1 - batch.window)
        full_low = tl.maximum(start, at_depth_0 + depths.largest + 1 - batch.window)
    begin = low // BLOCK_N * BLOCK_N
    end = tl.where(end > low, end, begin)
    full_begin, full_end = tl.cdiv(full_low, BLOCK_N) * BLOCK_N, end // BLOCK_N * BLOCK_N
    all_see = tl.load(batch.subtree_end + start) >= tl.minimum(first + TILE.block_m, length)
    some = all_see & (full_begin < full_end)
    return Ranges(begin, tl.where(some, full_begin, begin), tl.where(some, full_end, begin), end), parent
