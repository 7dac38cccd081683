"""The walk of a block of queries over the keys that it sees, in the portable training kernels.

The forward pass and the gradients of queries both take this walk. In a prefix tree it goes up the segments from the
block to the root.
"""

import triton
import triton.language as tl

from trunkattn.training.visibility import (
    TREE_SEGMENT_COLUMNS,
    TREE_SEGMENT_LEVEL,
    depths_of,
    masked_block,
    masked_blocks,
    own_segment,
    path_keys,
    visible_keys,
)


@triton.jit
def walk_keys(
    step: tl.constexpr,
    state,
    held,
    queries,
    keys,
    batch,
    rows,
    scales,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Calls `step(state, held, keys, batch, first, rows, scales, SHAPE, TILE, VARIANT, MASK)` for each block of keys
    that some query sees, and returns the final state. `held` is what the kernel holds of its queries, and `first` is
    the first key of the block."""
    if VARIANT.tree:
        m = queries.first + tl.arange(0, TILE.block_m)
        ranges, segment = own_segment(batch, queries.first, queries.length, TILE)
        top, depths = ranges.begin, depths_of(rows, m, queries.length, VARIANT)
        level = tl.load(batch.segments + TREE_SEGMENT_COLUMNS * segment + TREE_SEGMENT_LEVEL)
        for _ in tl.range(0, level + 2, num_stages=1):  # the block itself, its segment, and those above
            state = _walk_ranges(step, state, held, keys, batch, ranges, rows, scales, SHAPE, TILE, VARIANT)
            ranges, segment = path_keys(batch, segment, top, queries.first, depths, queries.length, TILE, VARIANT)
            top = tl.minimum(top, ranges.begin)
    else:
        ranges = visible_keys(batch, queries.first, queries.length, keys.length, TILE, VARIANT)
        state = _walk_ranges(step, state, held, keys, batch, ranges, rows, scales, SHAPE, TILE, VARIANT)
    return state


@triton.jit
def _walk_ranges(
    step: tl.constexpr,
    state,
    held,
    keys,
    batch,
    ranges,
    rows,
    scales,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    VARIANT: tl.constexpr,
):
    """Walks over ranges of keys, first over the blocks that need no mask."""
    for at in tl.range(ranges.full_begin, ranges.full_end, TILE.block_n):
        state = step(state, held, keys, batch, at, rows, scales, SHAPE, TILE, VARIANT, False)
    if VARIANT.tree or VARIANT.window:
        for number in tl.range(0, masked_blocks(ranges, TILE)):
            at = masked_block(ranges, number, TILE)
            state = step(state, held, keys, batch, at, rows, scales, SHAPE, TILE, VARIANT, True)
    elif VARIANT.causal or not VARIANT.even_k:
        for at in tl.range(ranges.full_end, ranges.end, TILE.block_n):
            state = step(state, held, keys, batch, at, rows, scales, SHAPE, TILE, VARIANT, True)
    return state
