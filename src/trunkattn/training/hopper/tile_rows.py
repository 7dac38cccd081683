"""Rows of tiles in shared memory, as the consumer warps of the kernels that own queries read and write them."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from trunkattn.gpu.hopper.barriers import barrier_sync
from trunkattn.gpu.hopper.common import WARPGROUP_ROWS
from trunkattn.gpu.hopper.online_softmax import part_of
from trunkattn.gpu.hopper.pipeline import consumer_wait, warps_sync
from trunkattn.training.hopper.memory import store_tile
from trunkattn.training.hopper.producer import BAR_Q_EMPTY

_CLEARED_ROWS = gl.constexpr(32)  # rows that are cleared at a time
_BAR_CLEARED = gl.constexpr(BAR_Q_EMPTY + 1)
_NUM_CONSUMERS = gl.constexpr(256)


class Written(NamedTuple):
    """A tensor [batch, seqlen_q, num_qo_heads, dims], and the shared memory that its tiles are written from.

    Attributes:
        desc, tensor: its descriptor, and a pointer to it. It is contiguous.
        boxes, tiles: the memory as TMA reads it, and as consumers write it (see `QueryMemory`).
    """

    desc: Any
    tensor: Any
    boxes: Any
    tiles: Any


@gluon.jit
def tile_at(tiles, index, SHAPE: gl.constexpr):
    """Returns a tile in shared memory. It is a tuple of parts if heads have several."""
    if len(SHAPE.parts) == 1:
        return tiles.index(index)
    else:
        found: gl.tuple = ()
        for i in gl.static_range(len(SHAPE.parts)):
            found += (tiles[i].index(index),)
        return found


@gluon.jit
def clear_rows(pipeline, index, count, WARPGROUP: gl.constexpr, SHAPE: gl.constexpr):
    """Sets the first `count` rows of block `index` of a pipeline to 0, if count > 0. The block is then the only one of
    its sequence, and these rows belong to the sequence before and may be NaN. Each of two warpgroups clears its share,
    and both then read the whole block. A product of scores that still reads it may see these rows either way, because a
    mask drops their scores."""
    COPY: gl.constexpr = SHAPE.copy
    SLICES: gl.constexpr = SHAPE.block_n // _CLEARED_ROWS
    if count > 0:
        consumer_wait(pipeline, index, SHAPE)
        for part in gl.static_range(len(SHAPE.parts)):
            tile = part_of(pipeline.tiles, part, SHAPE).index(index % SHAPE.num_stages)
            for i in gl.static_range(WARPGROUP, SLICES, 2):
                rows = tile.slice(i * _CLEARED_ROWS, _CLEARED_ROWS)
                row = i * _CLEARED_ROWS + gl.arange(0, _CLEARED_ROWS, gl.SliceLayout(1, COPY))
                cleared = rows.load(COPY)
                rows.store(gl.where((row < count)[:, None], 0.0, cleared).to(cleared.dtype))
        fence_async_shared()
        barrier_sync(_BAR_CLEARED, _NUM_CONSUMERS)


@gluon.jit
def write_tile(parts, tile, written, WARPGROUP: gl.constexpr, SHAPE: gl.constexpr, DIM: gl.constexpr):
    """Writes the rows of a warpgroup, which come in parts, through shared memory. TMA writes them, unless the sequence
    ends among them. A head has `DIM` dims in memory."""
    COPY: gl.constexpr = SHAPE.copy
    first = tile.first + WARPGROUP * WARPGROUP_ROWS
    for i in gl.static_range(len(SHAPE.parts)):
        place = part_of(written.tiles, i, SHAPE).index(WARPGROUP)
        place.store(parts[i].to(place.dtype))
    fence_async_shared()
    warps_sync()
    if first + WARPGROUP_ROWS <= tile.len_q:
        store_tile(written.desc, tile.batch, tile.begin_q + first, tile.head, written.boxes, WARPGROUP, SHAPE)
    else:
        m = first + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, COPY))
        token = (tile.batch * written.desc.shape[1] + tile.begin_q).to(gl.int64) + m
        at = (token * written.desc.shape[2] + tile.head)[:, None] * DIM
        for i in gl.static_range(len(SHAPE.parts)):
            d = SHAPE.parts[i].begin + gl.arange(0, SHAPE.parts[i].width, gl.SliceLayout(0, COPY))[None, :]
            rows = part_of(written.tiles, i, SHAPE).index(WARPGROUP).load(COPY)
            gl.store(written.tensor + at + d, rows, mask=(m < tile.len_q)[:, None] & (d < DIM))
