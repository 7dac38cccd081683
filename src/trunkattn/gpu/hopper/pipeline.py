"""Pipelines between a producer warp, which loads keys or values by TMA, and the warps that consume them.

A pipeline has stages in shared memory, each for one block of keys or of values. The full barrier of a stage is an
mbarrier, which completes when TMA has written the stage. The empty barrier is a named barrier. It lets the producer
fill the stage again when every consumer warp has read it.
"""

from typing import Any, Final, NamedTuple

from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from trunkattn.gpu.hopper.barriers import barrier_arrive, barrier_sync
from trunkattn.gpu.hopper.common import BOX_DIMS, BOX_TOKENS, SWIZZLED, opaque, reinterpret

# Numbers of the empty barriers of stage 0; those of the next stages follow
BAR_K_EMPTY, BAR_V_EMPTY = gl.constexpr(8), gl.constexpr(10)
BAR_KV_EMPTY: Final = 12

# Triton 3.9 and Triton 3.6 have different names for these
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
warps_sync = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier


@builtin
def tma_add(desc: Any, coord: Any, source: Any, _semantic: Any = None) -> None:
    """Starts to add a tile in shared memory to a tensor by TMA. Triton before 3.8 has no function for this."""
    at = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(ir.DESCRIPTOR_REDUCE_KIND.ADD, desc.handle, at, source.handle)


class PipelineShape(NamedTuple):
    """Constants of a pipeline. A stage holds `block_n` keys or values of `head_dim` numbers each.

    Attributes:
        num_threads: threads of the producer and of the consumers, which meet at an empty barrier.
        empty: number of the empty barrier of stage 0.
        stored: producer warps write the blocks with stores. Otherwise TMA writes them.
    """

    head_dim: int
    block_n: int
    num_stages: int
    num_threads: int
    empty: int
    stored: bool = False


class Pipeline(NamedTuple):
    """The memory and the full barriers of a pipeline.

    Attributes:
        boxes: the memory as TMA writes it [stages * boxes of a block, ...]. In a block, boxes of dims 0 to 63 come
            first, then those of the next 64 dims.
        tiles: the same memory [stages, block_n, head_dim] as products read it.
        full: the full barriers [stages, 1].
    """

    boxes: Any
    tiles: Any
    full: Any


class KvPipelines(NamedTuple):
    """One pipeline for keys and one for values."""

    k: Any
    v: Any


class Boxes(NamedTuple):
    """TMA boxes of a block. Both fields are tuples: the page of each box, and the token of that page at which the box
    begins."""

    page: Any
    token: Any


@gluon.jit
def allocate_boxes(desc, SHAPE: gl.constexpr):
    """Allocates the shared memory of a pipeline's stages."""
    BOXES: gl.constexpr = SHAPE.num_stages * (SHAPE.head_dim // BOX_DIMS) * (SHAPE.block_n // BOX_TOKENS)
    return gl.allocate_shared_memory(desc.dtype, [BOXES, 1, BOX_TOKENS, 1, BOX_DIMS], desc.layout)


@gluon.jit
def make_pipeline(boxes, SHAPE: gl.constexpr):
    """Makes a pipeline over the memory of `allocate_boxes`. All stages are empty. The boxes of a block lie where a
    swizzled tile has the same rows."""
    NUM_STAGES: gl.constexpr = SHAPE.num_stages
    TILES: gl.constexpr = (NUM_STAGES, SHAPE.block_n, SHAPE.head_dim)
    tiles = reinterpret(boxes, boxes.dtype, TILES, SWIZZLED)
    return Pipeline(boxes, tiles, full_barriers(SHAPE))


@gluon.jit
def full_barriers(SHAPE: gl.constexpr):
    """Allocates the full barriers of a pipeline. All stages are empty."""
    NUM_STAGES: gl.constexpr = SHAPE.num_stages
    full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(NUM_STAGES):
        mbarrier.init(full.index(i), count=1)
    return full


@gluon.jit
def producer_acquire(index, BAR_EMPTY: gl.constexpr, SHAPE: gl.constexpr):
    """Waits until all consumer warps have released the stage that block `index` goes to. The first block of a stage
    does not wait, because the stage is empty."""
    if index >= SHAPE.num_stages:
        barrier_sync(gl.to_tensor(BAR_EMPTY) + index % SHAPE.num_stages, SHAPE.num_threads)


@gluon.jit
def load_block(desc, pipeline, index, boxes, kv_head, BAR_EMPTY: gl.constexpr, SHAPE: gl.constexpr):
    """Acquires the stage of block `index` and starts its TMA loads."""
    BOXES: gl.constexpr = SHAPE.block_n // BOX_TOKENS
    PARTS: gl.constexpr = SHAPE.head_dim // BOX_DIMS
    stage = index % SHAPE.num_stages
    full = pipeline.full.index(stage)
    producer_acquire(index, BAR_EMPTY, SHAPE)
    mbarrier.expect(full, SHAPE.block_n * SHAPE.head_dim * 2)
    for part in range(opaque(PARTS)):
        for i in gl.static_range(BOXES):
            box = pipeline.boxes.index((stage * PARTS + part) * BOXES + i)
            tma_load(desc, [boxes.page[i], boxes.token[i], kv_head, part * BOX_DIMS], full, box)


@gluon.jit
def consumer_wait(pipeline, index, SHAPE: gl.constexpr, pred=True):
    """Waits until block `index` has been written, if `pred` is true. The matrix products see what TMA writes at once.
    What producer warps store, they see only after a fence."""
    mbarrier.wait(pipeline.full.index(index % SHAPE.num_stages), index // SHAPE.num_stages % 2, pred=pred)
    if SHAPE.stored:
        fence_async_shared()


@gluon.jit
def consumer_release(index, BAR_EMPTY: gl.constexpr, SHAPE: gl.constexpr):
    """Tells the producer that this warp has read block `index`.

    A warp cannot release a stage twice before the producer acquires it, since the stage is filled again only after
    that. The stages that are released at the end of a kernel are never acquired."""
    barrier_arrive(gl.to_tensor(BAR_EMPTY) + index % SHAPE.num_stages, SHAPE.num_threads)
