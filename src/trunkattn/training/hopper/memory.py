"""Shared memory of the kernels on Hopper that own queries: tiles of queries and of outputs, pipelines of keys and of
values.

The width of a tensor in shared memory must be a power of two. A head of 136 to 192 dims is therefore stored in two
parts, one of 128 dims and one of 64. A single part of 256 dims would take more memory and more matrix products.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from trunkattn.gpu.hopper.common import SWIZZLED, WARPGROUP_ROWS, reinterpret
from trunkattn.gpu.hopper.pipeline import KvPipelines, Pipeline, full_barriers, tma_load
from trunkattn.training.hopper.query_tiles import INFO_SLOTS

_tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # 3.9, and 3.6


class QueryMemory(NamedTuple):
    """Shared memory of a CTA.

    Attributes:
        q_boxes, out_boxes: the queries and the outputs as TMA reads and writes them, as a tuple of parts. In the
            backward pass, dout lies where the forward pass has the outputs.
        q_tiles, out_tiles: the same memory [consumers, 64, head_dim] as matrix products read it. It is a tuple of parts
            if a head has several (see `MainloopTile`).
        q_full: the full barrier of the queries and of `info`.
        info: the fields of the `QueryTile` that the queries belong to.
        kv: the pipelines of keys and of values.
    """

    q_boxes: Any
    q_tiles: Any
    q_full: Any
    info: Any
    out_boxes: Any
    out_tiles: Any
    kv: KvPipelines


@gluon.jit
def allocate(q_desc, k_desc, v_desc, out_desc, C: gl.constexpr):
    """Allocates the shared memory. All stages of the pipelines are empty."""
    T: gl.constexpr = C.mainloop
    V: gl.constexpr = C.value_shape
    CONSUMERS: gl.constexpr = C.tile.block_m // WARPGROUP_ROWS
    k_boxes, v_boxes = _boxes(k_desc, T.num_stages, T.block_n, T), _boxes(v_desc, V.num_stages, V.block_n, V)
    q_boxes = _boxes(q_desc, CONSUMERS, WARPGROUP_ROWS, T)
    if C.own_out:
        out_boxes = _boxes(out_desc, CONSUMERS, WARPGROUP_ROWS, V)
    else:
        out_boxes = _in_place_of(q_boxes, out_desc, CONSUMERS, V)
    q_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    mbarrier.init(q_full.index(0), count=1)
    return QueryMemory(
        q_boxes=q_boxes,
        q_tiles=_tiles(q_boxes, CONSUMERS, WARPGROUP_ROWS, T),
        q_full=q_full,
        info=gl.allocate_shared_memory(gl.int32, [INFO_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        out_boxes=out_boxes,
        out_tiles=_tiles(out_boxes, CONSUMERS, WARPGROUP_ROWS, V),
        kv=KvPipelines(_pipeline(k_boxes, T), _pipeline(v_boxes, V)),
    )


@gluon.jit
def _boxes(desc, COUNT: gl.constexpr, ROWS: gl.constexpr, SHAPE: gl.constexpr):
    """Allocates `COUNT` tiles as a tuple of parts. Each part consists of boxes of the descriptor, which are as wide as
    the last part."""
    boxes: gl.tuple = ()
    for i in gl.static_range(len(SHAPE.parts)):
        boxes += (_allocate_part(desc, COUNT, ROWS, i, SHAPE),)
    return boxes


@gluon.jit
def _allocate_part(desc, COUNT: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr, SHAPE: gl.constexpr):
    BOX: gl.constexpr = SHAPE.parts[-1].width
    BOXES: gl.constexpr = COUNT * (SHAPE.parts[PART].width // BOX)
    return gl.allocate_shared_memory(desc.dtype, [BOXES, 1, ROWS, 1, BOX], desc.layout)


@gluon.jit
def _in_place_of(q_boxes, out_desc, CONSUMERS: gl.constexpr, SHAPE: gl.constexpr):
    """Returns boxes of outputs that lie in the memory of the queries. The parts of a value are as wide as the first
    parts of a key, so they fit."""
    boxes: gl.tuple = ()
    for i in gl.static_range(len(SHAPE.parts)):
        boxes += (_out_part(q_boxes[i], out_desc, CONSUMERS, i, SHAPE),)
    return boxes


@gluon.jit
def _out_part(boxes, out_desc, CONSUMERS: gl.constexpr, PART: gl.constexpr, SHAPE: gl.constexpr):
    BOX: gl.constexpr = SHAPE.parts[-1].width
    BOXES: gl.constexpr = CONSUMERS * (SHAPE.parts[PART].width // BOX)
    LAYOUT: gl.constexpr = out_desc.layout
    return reinterpret(boxes, boxes.dtype, (BOXES, 1, WARPGROUP_ROWS, 1, BOX), LAYOUT)


@gluon.jit
def _tiles(boxes, COUNT: gl.constexpr, ROWS: gl.constexpr, SHAPE: gl.constexpr):
    """Returns the memory of boxes as tiles for matrix products. This works because the boxes of a tile lie where a
    swizzled tile has the same dims."""
    if len(SHAPE.parts) == 1:
        return _tile_part(boxes[0], COUNT, ROWS, 0, SHAPE)
    else:
        tiles: gl.tuple = ()
        for i in gl.static_range(len(SHAPE.parts)):
            tiles += (_tile_part(boxes[i], COUNT, ROWS, i, SHAPE),)
        return tiles


@gluon.jit
def _tile_part(boxes, COUNT: gl.constexpr, ROWS: gl.constexpr, PART: gl.constexpr, SHAPE: gl.constexpr):
    WIDTH: gl.constexpr = SHAPE.parts[PART].width
    return reinterpret(boxes, boxes.dtype, (COUNT, ROWS, WIDTH), SWIZZLED)


@gluon.jit
def _pipeline(boxes, SHAPE: gl.constexpr):
    tiles = _tiles(boxes, SHAPE.num_stages, SHAPE.block_n, SHAPE)
    return Pipeline(boxes, tiles, full_barriers(SHAPE))


@gluon.jit
def load_tile(desc, batch, token, head, full, boxes, index, SHAPE: gl.constexpr):
    """Starts the loads of tile `index`, whose first row is the given token of a head."""
    BOX: gl.constexpr = SHAPE.parts[-1].width
    for i in gl.static_range(len(SHAPE.parts)):
        for j in gl.static_range(SHAPE.parts[i].width // BOX):
            box = boxes[i].index(index * (SHAPE.parts[i].width // BOX) + j)
            tma_load(desc, [batch, token, head, SHAPE.parts[i].begin + j * BOX], full, box)


@gluon.jit
def store_tile(desc, batch, token, head, boxes, index, SHAPE: gl.constexpr):
    """Starts to write tile `index`, whose first row is the given token of a head."""
    BOX: gl.constexpr = SHAPE.parts[-1].width
    for i in gl.static_range(len(SHAPE.parts)):
        for j in gl.static_range(SHAPE.parts[i].width // BOX):
            box = boxes[i].index(index * (SHAPE.parts[i].width // BOX) + j)
            _tma_store(desc, [batch, token, head, SHAPE.parts[i].begin + j * BOX], box)
