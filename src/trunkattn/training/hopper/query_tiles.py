"""The tiles of the kernels on Hopper that own queries: their order, and the blocks of keys that each one sees.

CTAs are persistent and compute one tile after another. The producer warp draws the number of the next tile from a
counter, so that a CTA that finishes early computes more tiles. It passes the tile to the consumer warps through shared
memory. Tiles that see the most keys come first (longest processing time first). The keys of all heads would not fit the
L2 cache, so tiles are ordered in sections of a few heads. FlashAttention-3's code does both
(https://arxiv.org/abs/2407.08608).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from trunkattn.training.common import find_sequence, sequence_range_32
from trunkattn.training.visibility import (
    TREE_SEGMENT_COLUMNS,
    TREE_SEGMENT_LEVEL,
    Depths,
    masked_block,
    masked_blocks,
    own_segment,
    path_keys,
    visible_keys,
)


class Tables(NamedTuple):
    """Arrays on the device, and the window.

    Attributes:
        cu_seqlens_q, cu_seqlens_k: where packed sequences begin. Both are None unless sequences are packed.
        subtree_end, depths, segment_of, segments: the fields of `TreeTables`. They are None without a tree, and depths
            is also None without a window.
        next_tile: the counter of tiles [1], which is 0 at launch.
        window: keys to each side, or `UNLIMITED`.
        sinks: the logit of each head's sink [num_qo_heads], or None.
    """

    cu_seqlens_q: Any
    cu_seqlens_k: Any
    subtree_end: Any
    depths: Any
    segment_of: Any
    segments: Any
    next_tile: Any
    window: Any
    sinks: Any


class TileOrder(NamedTuple):
    """How tiles are counted. `num_blocks` is the number of query blocks of a head, `num_heads` the number of heads of
    all sequences of a batch, and `section` the number of heads of a section."""

    num_blocks: Any
    num_heads: Any
    section: Any


class QueryTile(NamedTuple):
    """A tile of queries of one head, which begins with token `first` of a sequence.

    Attributes:
        first: the first token, counted within the sequence.
        head: the query head, or -1 after the last tile.
        batch: the sequence's place in the batch.
        begin_q, len_q: the sequence has tokens [begin_q, begin_q + len_q) of the tensor of queries.
        begin_k, len_k: the same for the tensor of keys. begin_k is -1 for tokens behind the last packed sequence.
    """

    first: Any
    head: Any
    batch: Any
    begin_q: Any
    len_q: Any
    begin_k: Any
    len_k: Any


class TileKeys(NamedTuple):
    """The keys of a tile.

    Attributes:
        ranges: the `Ranges` of its sequence, or in a tree, of its own segment.
        last: the first key of their last block, which a kernel computes first.
        segment: the tile's own segment in a tree, otherwise 0.
        depths: the `Depths` of the tile.
    """

    ranges: Any
    last: Any
    segment: Any
    depths: Any


class Box(NamedTuple):
    """Where the loads of the last block begin: at `token`, which is `before` tokens before the block."""

    token: Any
    before: Any


# Which keys of a block a row sees. ALL_SEEN: all of them. MASKED: those that `mask_of` says. MASKED_BEFORE: every key
# comes before every row, and a row sees the keys whose subtree holds it and which lie in its window (`mask_before`).
ALL_SEEN, MASKED, MASKED_BEFORE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)

FIELDS = gl.constexpr(len(QueryTile._fields))
INFO_SLOTS = gl.constexpr(8)  # a power of two
# Layouts that spread numbers over the threads of one warp, and of one warpgroup
IN_WARP = gl.constexpr(gl.BlockedLayout([1], [32], [1], [0]))
IN_WARPGROUP = gl.constexpr(gl.BlockedLayout([1], [32], [4], [0]))


@gluon.jit
def read_tile(info, full, turn):
    """Returns the tile of a CTA's turn, after the producer has written it. All warps of a warpgroup call this. `info`
    holds the tile's fields in shared memory, int32 [8, 1], and `full` is its full barrier."""
    mbarrier.wait(full, turn % 2)
    fields: gl.tuple = ()
    for i in gl.static_range(FIELDS):
        fields += (gl.max(info.index(i).load(IN_WARPGROUP), 0),)
    return QueryTile(*fields)


@gluon.jit
def tile_order(q_desc, num_sequences, section, C: gl.constexpr):
    """Returns the order of the tiles. Packed tokens behind the last sequence count as one more sequence without
    keys."""
    BLOCK_M: gl.constexpr = C.tile.block_m
    if C.variant.packed:
        num_blocks = q_desc.shape[1] // BLOCK_M + num_sequences + 1
    else:
        num_blocks = (q_desc.shape[1] + BLOCK_M - 1) // BLOCK_M
    return TileOrder(num_blocks, q_desc.shape[0] * q_desc.shape[2], section)


@gluon.jit
def find_tile(number, order, q_desc, k_desc, tables, num_sequences, C: gl.constexpr):
    """Returns tile `number` of all tiles. It may have no queries."""
    BLOCK_M: gl.constexpr = C.tile.block_m
    of_section = order.section * order.num_blocks
    first_head = number // of_section * order.section
    heads = gl.minimum(order.section, order.num_heads - first_head)  # the last section may have fewer
    rest = number % of_section
    block = order.num_blocks - 1 - rest // heads
    head = first_head + rest % heads
    begin_q, begin_k, len_q, len_k = 0, 0, q_desc.shape[1], k_desc.shape[1]
    if C.variant.packed:
        sequence, block = find_sequence(block, tables.cu_seqlens_q, num_sequences + 1, BLOCK_M)
        if sequence < num_sequences:
            begin_q, len_q = sequence_range_32(tables.cu_seqlens_q, sequence, len_q)
            begin_k, len_k = sequence_range_32(tables.cu_seqlens_k, sequence, len_k)
        else:
            begin_q = gl.minimum(gl.maximum(gl.load(tables.cu_seqlens_q + sequence), 0), len_q)
            len_q, begin_k, len_k = len_q - begin_q, -1, 0
    return QueryTile(
        first=block * BLOCK_M,
        head=head % q_desc.shape[2],
        batch=head // q_desc.shape[2],
        begin_q=begin_q,
        len_q=len_q,
        begin_k=begin_k,
        len_k=len_k,
    )


@gluon.jit
def _tile_depths(tile, tables, LAYOUT: gl.constexpr, C: gl.constexpr):
    if C.variant.tree and C.variant.window:
        m = tile.first + gl.arange(0, C.tile.block_m, LAYOUT)
        depth = gl.load(tables.depths + gl.minimum(m, tile.len_q - 1))
        return Depths(gl.min(depth, 0), gl.max(depth, 0))
    else:
        return Depths(0, 0)


@gluon.jit
def tile_keys(tile, tables, LAYOUT: gl.constexpr, C: gl.constexpr):
    """Returns the keys of a tile. `LAYOUT` spreads numbers over the warps that call this."""
    BLOCK_N: gl.constexpr = C.tile.block_n
    TILE: gl.constexpr = C.tile
    VARIANT: gl.constexpr = C.variant
    if C.variant.tree:
        ranges, segment = own_segment(tables, tile.first, tile.len_q, TILE)
    else:
        ranges, segment = visible_keys(tables, tile.first, tile.len_q, tile.len_k, TILE, VARIANT), 0
    last = gl.maximum(ranges.end - 1, 0) // BLOCK_N * BLOCK_N
    return TileKeys(ranges, last, segment, _tile_depths(tile, tables, LAYOUT, C))


@gluon.jit
def last_box(tile, keys, C: gl.constexpr):
    """Returns where the loads of a tile's last block begin.

    What lies behind a packed sequence may be NaN, and NaN times a weight of 0 is NaN. So the loads of a block in which
    the sequence ends begin early enough to end with the sequence. A tile without keys loads a block outside the tensor,
    which TMA fills with zeros."""
    BLOCK_N: gl.constexpr = C.tile.block_n
    before = 0
    if C.variant.packed:
        before = gl.maximum(keys.last + BLOCK_N - tile.len_k, 0)
    token = tile.begin_k + keys.last - before
    return Box(gl.where(keys.ranges.end > 0, token, -BLOCK_N), before)


@gluon.jit
def walk_keys(step: gl.constexpr, state, given, tile, keys, tables, C: gl.constexpr):
    """Calls `step(state, at, more, given, SEEN, C)` for each block of a tile except the last one, and returns the final
    state. `at` is the first key of the block, and `more` says that another block certainly follows.

    Blocks are visited downwards from the last one. In a tree the walk then goes up the segments from the tile to the
    root, as in the portable kernel. Blocks in which a window begins come after those that all rows see."""
    BLOCK_N: gl.constexpr = C.tile.block_n
    TILE: gl.constexpr = C.tile
    VARIANT: gl.constexpr = C.variant
    ranges = keys.ranges
    for at in range(keys.last - BLOCK_N, ranges.full_end - 1, -BLOCK_N):
        state = step(state, at, False, given, MASKED, C)
    if C.variant.tree:
        top, segment = ranges.begin, keys.segment
        level = gl.load(tables.segments + TREE_SEGMENT_COLUMNS * segment + TREE_SEGMENT_LEVEL)
        for _ in range(level + 1):
            ranges, segment = path_keys(tables, segment, top, tile.first, keys.depths, tile.len_q, TILE, VARIANT)
            top = gl.minimum(top, ranges.begin)
            for number in range(masked_blocks(ranges, TILE)):
                state = step(state, masked_block(ranges, number, TILE), False, given, MASKED_BEFORE, C)
            for at in range(ranges.full_begin, ranges.full_end, BLOCK_N):
                state = step(state, at, at + BLOCK_N < ranges.full_end, given, ALL_SEEN, C)
    else:
        for at in range(gl.minimum(ranges.full_end, keys.last) - BLOCK_N, ranges.full_begin - 1, -BLOCK_N):
            state = step(state, at, at > ranges.begin, given, ALL_SEEN, C)
        if C.variant.window:
            for at in range(ranges.full_begin - BLOCK_N, ranges.begin - 1, -BLOCK_N):
                state = step(state, at, at > ranges.begin, given, MASKED_BEFORE, C)
    return state
