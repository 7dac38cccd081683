"""Blocks of a latent cache in shared memory: the producer warps that load them by TMA, and how their consumers wait.

A block is rows of a latent cache, of 512 latent and 64 rope columns, in 16 bits. It is kept in three parts: two halves
of 256 latent columns, and the rope columns. Scores need all columns, but half of the output needs only its half of the
latent columns. So each part has a full barrier of its own.

Shared memory holds 128 rows. A cache of 16 bits fills it with one pair of blocks of 64 rows. Each part is released when
its last reader is done, and the loads of the next pair begin while other parts of this one are still in use. A cache of
8 bits fills it with two pairs of blocks of 32 rows, because its rows are widened after they were loaded (`widen`): one
pair is loaded and widened while the other is in use. Both blocks of such a pair share their barriers: of the rope
columns, of the halves that each warpgroup multiplies first, and of the others. Each warpgroup releases what it reads at
the end of a pair.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from trunkattn.gpu.hopper.barriers import barrier_arrive, barrier_sync
from trunkattn.gpu.hopper.common import SWIZZLED, opaque, reinterpret
from trunkattn.gpu.hopper.pipeline import Boxes, tma_load
from trunkattn.gpu.hopper.segments import ITEM_SEGMENT_END, ITEM_SEGMENT_START, ITEM_SHARED_END
from trunkattn.gpu.hopper.tasks import task_of
from trunkattn.planner.work_list import SEGMENT_COLUMNS, SEGMENT_POSITION, SEGMENT_QUERIES

LATENT_DIM, ROPE_DIM = gl.constexpr(512), gl.constexpr(64)
HALF_DIM = gl.constexpr(256)
PART_COLUMNS = gl.constexpr(64)  # of a TMA box: as wide as a swizzled row
HALF_PARTS = gl.constexpr(4)
# The first empty barrier. For 16 bits it is that of the left half of block 0. Then come those of its right half, of its
# rope columns, and of block 1. For 8 bits there are one for the left and one for the right warpgroup in each pair.
BAR_EMPTY = gl.constexpr(5)
PARTS = gl.constexpr(3)  # of a block
LEFT, RIGHT, ROPE = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)
# The halves of a pair that are multiplied first, left of block 0 and right of block 1, and the other two
FIRST, SECOND = gl.constexpr(0), gl.constexpr(1)
_BAR_QUERIES = gl.constexpr(15)
_CONSUMER_THREADS = gl.constexpr(128)  # of a warpgroup
_SEGMENT_COLUMNS = gl.constexpr(SEGMENT_COLUMNS)
_SEGMENT_QUERIES, _SEGMENT_POSITION = gl.constexpr(SEGMENT_QUERIES), gl.constexpr(SEGMENT_POSITION)


class Buffers(NamedTuple):
    """Buffers of the pairs of blocks. The fields `*_boxes` are the memory as TMA writes it; `halves` [2 * blocks, block
    rows, 256] and `rope` [blocks, block rows, 64] are the same memory as products read it. `full` [6, 1] are the full
    barriers. `landed` are the barriers that TMA completes: the full ones, or those of 8-bit parts that are still to be
    widened (`widen`)."""

    half_boxes: Any
    rope_boxes: Any
    halves: Any
    rope: Any
    full: Any
    landed: Any


class Blocks(NamedTuple):
    """Blocks of an item: segments [first, end) in `count` blocks. All rows see the whole of the first `num_full`
    blocks."""

    first: Any
    end: Any
    count: Any
    num_full: Any


@gluon.jit
def allocate_buffers(desc, dtype: gl.constexpr, C: gl.constexpr):
    """Allocates the buffers of numbers of `dtype`. All of them are empty."""
    BOXES: gl.constexpr = C.block_rows // C.segment_size
    BLOCKS: gl.constexpr = 2 * C.pairs_held
    HALF_BOXES: gl.constexpr = (2 * BLOCKS * HALF_PARTS * BOXES, 1, C.segment_size, C.box_columns)
    ROPE_BOXES: gl.constexpr = (BLOCKS * BOXES, 1, C.segment_size, C.box_columns)
    half_boxes = gl.allocate_shared_memory(desc.dtype, HALF_BOXES, desc.layout)
    rope_boxes = gl.allocate_shared_memory(desc.dtype, ROPE_BOXES, desc.layout)
    HALVES: gl.constexpr = (2 * BLOCKS, C.block_rows, HALF_DIM)
    ROPES: gl.constexpr = (BLOCKS, C.block_rows, ROPE_DIM)
    full = _part_barriers()
    return Buffers(
        half_boxes=half_boxes,
        rope_boxes=rope_boxes,
        halves=reinterpret(half_boxes, dtype, HALVES, SWIZZLED),
        rope=reinterpret(rope_boxes, dtype, ROPES, SWIZZLED),
        full=full,
        landed=_part_barriers() if C.widened else full,
    )


@gluon.jit
def _part_barriers():
    """Allocates a barrier for each part of both blocks of 16-bit rows, or of both pairs of 8-bit rows."""
    barriers = gl.allocate_shared_memory(gl.int64, [2 * PARTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2 * PARTS):
        mbarrier.init(barriers.index(i), count=1)
    return barriers


@gluon.jit
def blocks_of(item, C: gl.constexpr):
    """Returns the blocks of an item."""
    BLOCK_SEGMENTS: gl.constexpr = C.block_rows // C.segment_size
    start, shared_end = gl.load(item + ITEM_SEGMENT_START), gl.load(item + ITEM_SHARED_END)
    end = gl.load(item + ITEM_SEGMENT_END)
    count = (end - start + BLOCK_SEGMENTS - 1) // BLOCK_SEGMENTS
    return Blocks(start, end, count, (shared_end - start) // BLOCK_SEGMENTS)


@gluon.jit
def hidden_zero(uses):
    """Returns a 0 that the compiler does not know. Descriptors of shared memory that depend on it are computed where
    they are used. Otherwise they would be computed once, before the loop, and spill."""
    return uses & (gl.num_programs(1) - 1)


@gluon.jit
def block_at(uses, BLOCK: gl.constexpr, C: gl.constexpr):
    """Returns the number of a pair's first or second block in the buffers. `uses` is the number of pairs before it."""
    if C.pairs_held == 1:
        return BLOCK + hidden_zero(uses)
    else:
        return BLOCK + 2 * (uses % C.pairs_held)


@gluon.jit
def half_of(buffers, uses, BLOCK: gl.constexpr, HALF: gl.constexpr, C: gl.constexpr):
    """Returns half of the latent columns of a block, [block rows, 256]."""
    if C.pairs_held == 1:
        return buffers.halves.index(2 * BLOCK + HALF + hidden_zero(uses))
    else:
        return buffers.halves.index(2 * block_at(uses, BLOCK, C) + HALF)


@gluon.jit
def part_wait(buffers, BLOCK: gl.constexpr, PART: gl.constexpr, uses, C: gl.constexpr):
    """Waits until a part of a block has been written."""
    if C.widened:
        STAGE: gl.constexpr = PART if PART == ROPE else (FIRST if BLOCK == PART else SECOND)
        stage_wait(buffers.full, STAGE, uses, C)
    else:
        mbarrier.wait(buffers.full.index(BLOCK * PARTS + PART), uses & 1)


@gluon.jit
def stage_of(barriers, STAGE: gl.constexpr, uses, C: gl.constexpr):
    """Returns the barrier of parts of both blocks of a pair: `FIRST`, `SECOND` or `ROPE`."""
    return barriers.index(uses % C.pairs_held * PARTS + STAGE)


@gluon.jit
def stage_wait(barriers, STAGE: gl.constexpr, uses, C: gl.constexpr):
    """Waits until parts of both blocks of a pair have landed, or have been widened."""
    mbarrier.wait(stage_of(barriers, STAGE, uses, C), uses // C.pairs_held & 1)


@gluon.jit
def part_release(BLOCK: gl.constexpr, PART: gl.constexpr, C: gl.constexpr):
    """Tells the producer that this warp has read a part for the last time. Does nothing if rows are widened."""
    if not C.widened:
        barrier_arrive(BAR_EMPTY + BLOCK * PARTS + PART, _CONSUMER_THREADS + C.part_threads)


@gluon.jit
def half_release(WHICH: gl.constexpr, uses, C: gl.constexpr):
    """Tells the warps that widen rows that this warp has read its half of both blocks of a pair for the last time, and
    its block's rope columns. Does nothing if rows are not widened."""
    if C.widened:
        barrier_arrive(BAR_EMPTY + 2 * (uses % C.pairs_held) + WHICH, _CONSUMER_THREADS + C.part_threads)


@gluon.jit
def half_acquire(WHICH: gl.constexpr, uses, C: gl.constexpr):
    """Waits until `half_release`. The first use of each pair's memory does not wait, because it is empty."""
    if uses >= C.pairs_held:
        barrier_sync(BAR_EMPTY + 2 * (uses % C.pairs_held) + WHICH, _CONSUMER_THREADS + C.part_threads)


@gluon.jit
def _part_acquire(BLOCK: gl.constexpr, PART: gl.constexpr, uses, C: gl.constexpr):
    """Waits until the part is released. The first use does not wait, because the part is empty."""
    if uses > 0:
        barrier_sync(BAR_EMPTY + BLOCK * PARTS + PART, _CONSUMER_THREADS + C.part_threads)


@gluon.jit
def queries_sync(C: gl.constexpr):
    """Makes a producer warp wait until the loads of the first queries have been started. If they came after its own
    loads, they would wait for all of these."""
    barrier_sync(_BAR_QUERIES, 2 * _CONSUMER_THREADS + C.producer_threads)


@gluon.jit
def queries_arrive(C: gl.constexpr):
    """Reports that a consumer warp has started the loads that `queries_sync` waits for."""
    barrier_arrive(_BAR_QUERIES, 2 * _CONSUMER_THREADS + C.producer_threads)


@gluon.jit
def locate(segments, at, end, C: gl.constexpr):
    """Returns the boxes of a block that begins with segment `at`, one for each segment. A box with fewer tokens than it
    has room for ends with the last of them. What lies before the tokens is finite, or TMA sets it to 0; what lies
    behind may be NaN."""
    page: gl.tuple = ()
    token: gl.tuple = ()
    for i in gl.static_range(C.block_rows // C.segment_size):
        segment = segments + gl.maximum(gl.minimum(at + i, end - 1), 0) * _SEGMENT_COLUMNS
        first = gl.load(segment)
        tokens = gl.where(at + i < end, gl.load(segment + _SEGMENT_QUERIES) >> 16, 0)
        page += (first // C.page_size,)
        token += (gl.where(tokens > 0, first % C.page_size + tokens, 0) - C.segment_size,)
    return Boxes(page, token)


@gluon.jit
def _expect_part(barrier, PART: gl.constexpr, BLOCKS: gl.constexpr, C: gl.constexpr):
    """Tells a barrier how many bytes TMA will write of a part. `BLOCKS` is the number of blocks."""
    BOXES: gl.constexpr = 1 if PART == ROPE else HALF_PARTS * PART_COLUMNS // C.box_columns
    mbarrier.expect(barrier, BLOCKS * C.block_rows * PART_COLUMNS * 2 * BOXES)


@gluon.jit
def _load_part(desc, buffers, landed, boxes, at, PART: gl.constexpr, C: gl.constexpr):
    """Starts the loads of a part of block `at` of the buffers. A box of 128 columns of 8 bits fills the memory of the
    last 64 of its columns; that of the rope columns reaches beyond the rows, where TMA sets it to 0."""
    BOXES: gl.constexpr = C.block_rows // C.segment_size
    STEP: gl.constexpr = C.box_columns // PART_COLUMNS
    if PART == ROPE:
        for i in gl.static_range(BOXES):
            box = buffers.rope_boxes.index(at * BOXES + i)
            tma_load(desc, [boxes.page[i], boxes.token[i], LATENT_DIM], landed, box)
    else:
        for part in range(opaque(HALF_PARTS // STEP)):
            for i in gl.static_range(BOXES):
                columns = (2 * at + PART) * HALF_PARTS + part * STEP + STEP - 1
                box = buffers.half_boxes.index(columns * BOXES + i)
                column = PART * HALF_DIM + part * C.box_columns
                tma_load(desc, [boxes.page[i], boxes.token[i], column], landed, box)


@gluon.jit
def _load_when_empty(desc, buffers, boxes, BLOCK: gl.constexpr, PART: gl.constexpr, uses, C: gl.constexpr):
    """Acquires a part of a block and starts its loads."""
    landed = buffers.landed.index(BLOCK * PARTS + PART)
    _part_acquire(BLOCK, PART, uses, C)
    _expect_part(landed, PART, 1, C)
    _load_part(desc, buffers, landed, boxes, BLOCK, PART, C)


@gluon.jit
def load_stage(desc, buffers, boxes, others, STAGE: gl.constexpr, uses, C: gl.constexpr):
    """Starts the loads of parts of both blocks of a pair, which are empty."""
    landed = stage_of(buffers.landed, STAGE, uses, C)
    _expect_part(landed, STAGE, 2, C)
    _load_part(desc, buffers, landed, boxes, block_at(uses, 0, C), STAGE, C)
    _load_part(desc, buffers, landed, others, block_at(uses, 1, C), STAGE if STAGE == ROPE else 1 - STAGE, C)


@gluon.jit
def load_items(tasks, segments, desc, buffers, BLOCK: gl.constexpr, C: gl.constexpr):
    """Runs the producer warp of the first or of the second block of each pair. It loads parts in the order in which the
    scores are computed."""
    BLOCK_SEGMENTS: gl.constexpr = C.block_rows // C.segment_size
    uses, is_first = 0, True
    for turn in range(tasks.cta, tasks.num_tasks, tasks.num_ctas):
        task = task_of(tasks, turn, C.num_head_groups)
        blocks = blocks_of(task.item, C)
        boxes = locate(segments, blocks.first + BLOCK * BLOCK_SEGMENTS, blocks.end, C)
        if is_first & (blocks.count > 0):
            queries_sync(C)
            is_first = False
        for nth in range(BLOCK, blocks.count, 2):
            next_boxes = locate(segments, blocks.first + (nth + 2) * BLOCK_SEGMENTS, blocks.end, C)
            _load_when_empty(desc, buffers, boxes, BLOCK, ROPE, uses, C)
            _load_when_empty(desc, buffers, boxes, BLOCK, LEFT if BLOCK == 0 else RIGHT, uses, C)
            _load_when_empty(desc, buffers, boxes, BLOCK, RIGHT if BLOCK == 0 else LEFT, uses, C)
            uses += 1
            boxes = next_boxes


class RowMask(NamedTuple):
    """What the masks of an item depend on. `query` and `position` [64] say where each row's query stands in the item
    and in its sequence. `window` is in tokens."""

    segments: Any
    query: Any
    position: Any
    window: Any


class BlockSegments(NamedTuple):
    """The segments of a block, as tuples. The first field packs which queries see a segment and how many tokens it has.
    The second is the position of its first token, if the mask needs it."""

    queries: Any
    position: Any


@gluon.jit
def read_segments(args, blocks, nth, C: gl.constexpr):
    """Reads the segments of an item's block. This comes before the scores, so that memory answers while the tensor
    cores work."""
    queries: gl.tuple = ()
    position: gl.tuple = ()
    for i in gl.static_range(C.block_rows // C.segment_size):
        index = blocks.first + nth * (C.block_rows // C.segment_size) + i
        segment = args.segments + index * _SEGMENT_COLUMNS
        queries += (gl.load(segment + _SEGMENT_QUERIES, mask=index < blocks.end, other=0),)
        if C.masked:
            position += (gl.load(segment + _SEGMENT_POSITION, mask=index < blocks.end, other=0),)
    return BlockSegments(queries, position)


@gluon.jit
def mask_block(args, read, C: gl.constexpr):
    """Returns which row sees which key of a block, [64, block rows]. `read` are its segments."""
    n = gl.arange(0, C.block_rows, gl.SliceLayout(0, C.scores))
    begin, until, key = n * 0, n * 0, n * 0
    for i in gl.static_range(C.block_rows // C.segment_size):
        packed = read.queries[i]
        missing = C.segment_size - (packed >> 16)  # a box ends with its last token
        own = n // C.segment_size == i
        begin = gl.where(own, gl.where(n % C.segment_size >= missing, packed & 255, 256), begin)
        until = gl.where(own, packed >> 8 & 255, until)
        if C.masked:
            key = gl.where(own, read.position[i] + n % C.segment_size - missing, key)
    mask = (args.query[:, None] >= begin[None, :]) & (args.query[:, None] < until[None, :])
    if C.masked:
        mask = mask & (key[None, :] <= args.position[:, None])
        mask = mask & (key[None, :] > (args.position - args.window)[:, None])
    return mask
