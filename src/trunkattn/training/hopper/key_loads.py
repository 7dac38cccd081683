"""What all warps of the backward pass on Hopper share: memory, barriers, the producer warp that loads by TMA, and the
order of the blocks of queries."""

from typing import Any, Final, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from trunkattn.gpu.hopper.barriers import barrier_sync
from trunkattn.gpu.hopper.common import BOX_DIMS, SWIZZLED, WARPGROUP_ROWS, reinterpret
from trunkattn.gpu.hopper.pipeline import producer_acquire, tma_load
from trunkattn.training.hopper.key_blocks import (
    ALL_SEEN,
    MASKED,
    PART_SEEN,
    find_keys,
    is_reached,
    masked_query_block,
    needs_masks,
    num_masked_blocks,
    sees_parts,
)
from trunkattn.training.hopper.key_tile import BAR_DOUT_EMPTY, BAR_Q_EMPTY

_NUM_CONSUMERS = gl.constexpr(256)
_BAR_CONSUMERS = gl.constexpr(12)
DQ_BOX: Final = (64, 32)  # a TMA box of dq: rows, and float32 numbers of each row
FLOAT_BOX = gl.constexpr(DQ_BOX[1])


class KeyMemory(NamedTuple):
    """Shared memory of a CTA. The fields named boxes are as TMA reads and writes them; the others view the same memory
    as products read it. A row of the tiles k, q, v and dout is a whole head, and a row of a panel is 64 numbers of
    one."""

    k_boxes: Any
    v_boxes: Any
    q_boxes: Any
    dout_boxes: Any
    k: Any
    v: Any
    q: Any
    dout: Any
    k_panels: Any
    rows: Any
    row_boxes: Any
    kv_full: Any
    q_full: Any
    dout_full: Any


class Full(NamedTuple):
    """The full barriers of a pipeline, as `consumer_wait` takes them."""

    full: Any


class _Loads(NamedTuple):
    """Where the producer loads from, and the memory it loads to."""

    q_desc: Any
    dout_desc: Any
    rows_desc: Any
    memory: Any


@gluon.jit
def walk_queries(step: gl.constexpr, WARPGROUP: gl.constexpr, state, task, work, given, C: gl.constexpr):
    """Calls `step(WARPGROUP, state, m, member, index, task, given, MASK, C)` for each block of queries of each head of
    a task, and returns the final state. `m` is the number of the block in its sequence, and `index` counts the calls.
    Blocks come in the order of `MASK`. Heads and blocks share one loop, because two nested loops would need more
    registers than there are."""
    state, index = walk_all_seen(step, WARPGROUP, state, task, given, C)
    state, index = walk_part_seen(step, WARPGROUP, state, index, task, given, C)
    return walk_masked(step, WARPGROUP, state, index, task, work, given, C)


@gluon.jit
def walk_all_seen(step: gl.constexpr, WARPGROUP: gl.constexpr, state, task, given, C: gl.constexpr):
    """The first part of `walk_queries`: the blocks without a mask. Returns the state and the number of calls."""
    index, count = 0, task.full_end - task.full_begin
    for number in range(C.members * count):
        m = task.full_begin + number % count
        state = step(WARPGROUP, state, m, number // count, index, task, given, ALL_SEEN, C)
        index += 1
    return state, index


@gluon.jit
def walk_part_seen(step: gl.constexpr, WARPGROUP: gl.constexpr, state, index, task, given, C: gl.constexpr):
    """The second part, after `index` calls. Returns the state and the number of calls so far."""
    if sees_parts(C):
        count = task.part_end - task.part_begin
        for number in range(C.members * count):
            m = task.part_begin + number % count
            state = step(WARPGROUP, state, m, number // count, index, task, given, PART_SEEN, C)
            index += 1
    return state, index


@gluon.jit
def walk_masked(step: gl.constexpr, WARPGROUP: gl.constexpr, state, index, task, work, given, C: gl.constexpr):
    """The last part, after `index` calls: the blocks with a mask. Returns the state."""
    if needs_masks(C):
        count = num_masked_blocks(task, C)
        for number in range(C.members * count):
            m = masked_query_block(task, number % count, C)
            if is_reached(work, task, m, C):
                state = step(WARPGROUP, state, m, number // count, index, task, given, MASKED, C)
                index += 1
    return state


@gluon.jit
def _load_tile(desc, boxes, at, token, head, batch, full, PANELS: gl.constexpr):
    """Starts the TMA loads of the panels of a tile. Its first box is box `at`."""
    for part in gl.static_range(PANELS):
        tma_load(desc, [batch, token, head, part * BOX_DIMS], full, boxes.index(at + part))


@gluon.jit
def _produce_block(WARPGROUP: gl.constexpr, state, m, member, index, task, loads, MASK: gl.constexpr, C: gl.constexpr):
    """Starts the loads of a block of queries. What sᵀ and p need completes one barrier, and dout completes another."""
    T: gl.constexpr = C.tile
    DOUT: gl.constexpr = T.dout
    BLOCK_M: gl.constexpr = T.block_m
    memory = loads.memory
    stage = index % T.num_stages
    head = task.head + member
    token = task.begin_q + m * BLOCK_M
    producer_acquire(index, BAR_Q_EMPTY, T)
    q_full = memory.q_full.index(stage)
    mbarrier.expect(q_full, BLOCK_M * T.key_panels * BOX_DIMS * 2 + 2 * BLOCK_M * 4)
    row = (task.row_block + member * task.num_row_blocks + m) * 2
    _load_tile(loads.q_desc, memory.q_boxes, stage * (T.dim // BOX_DIMS), token, head, task.row, q_full, T.key_panels)
    tma_load(loads.rows_desc, [row, 0], q_full, memory.row_boxes.index(stage))
    producer_acquire(index, BAR_DOUT_EMPTY, DOUT)
    stage = index % T.dout.num_stages
    full = memory.dout_full.index(stage)
    mbarrier.expect(full, BLOCK_M * T.value_panels * BOX_DIMS * 2)
    at = stage * (T.dim_v // BOX_DIMS)
    _load_tile(loads.dout_desc, memory.dout_boxes, at, token, head, task.row, full, T.value_panels)
    return state


@gluon.jit
def produce(work, batch, q_desc, k_desc, v_desc, dout_desc, rows_desc, memory, C: gl.constexpr):
    """Runs the producer warp."""
    T: gl.constexpr = C.tile
    task = find_keys(work, batch, C)
    if task.end > task.begin:
        full = memory.kv_full.index(0)
        mbarrier.expect(full, T.block_n * (T.key_panels + T.value_panels) * BOX_DIMS * 2)
        for part in gl.static_range(T.block_n // WARPGROUP_ROWS):
            token = task.begin_k + task.first + part * WARPGROUP_ROWS
            at_k, at_v = part * (T.dim // BOX_DIMS), part * (T.dim_v // BOX_DIMS)
            _load_tile(k_desc, memory.k_boxes, at_k, token, task.kv_head, task.row, full, T.key_panels)
            _load_tile(v_desc, memory.v_boxes, at_v, token, task.kv_head, task.row, full, T.value_panels)
        walk_queries(_produce_block, 0, gl.to_tensor(0), task, work, _Loads(q_desc, dout_desc, rows_desc, memory), C)


@gluon.jit
def consumers_meet():
    """Waits until all consumer warps have come here."""
    barrier_sync(_BAR_CONSUMERS, _NUM_CONSUMERS)


@gluon.jit
def zero_rows(tile, count, LAYOUT: gl.constexpr):
    """Keeps the first `count` rows of a tile and writes zeros to the others. What TMA reads behind a packed sequence
    may be NaN, and NaN times 0 is NaN."""
    if count < tile.shape[0]:
        row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
        tile.store(gl.where((row < count)[:, None], tile.load(LAYOUT), 0.0))


@gluon.jit
def write_rows(tile, values, out, token, rows, head, num_heads, first, DIM: gl.constexpr, LAYOUT: gl.constexpr):
    """Writes the first `rows` rows of `values` to memory. Their columns are the dims of a head that begin with `first`.
    Float32 gradients are stored directly from the layout `LAYOUT`. Gradients of other dtypes are first copied through
    the tile's shared memory, from which they are read in this layout."""
    if out.dtype.element_ty != gl.float32:
        tile.store(values.to(tile.dtype))
        values = tile.load(LAYOUT)
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
    d = first + gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    at = ((token + row).to(gl.int64) * num_heads + head) * DIM
    gl.store(out + at[:, None] + d[None, :], values, mask=(row < rows)[:, None] & (d < DIM)[None, :])


@gluon.jit
def _boxes(desc, COUNT: gl.constexpr, ROWS: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [COUNT, 1, ROWS, 1, BOX_DIMS], desc.layout)


@gluon.jit
def allocate(q_desc, k_desc, v_desc, dout_desc, rows_desc, T: gl.constexpr):
    """Allocates the shared memory and initializes all barriers."""
    STAGES: gl.constexpr = T.num_stages
    DOUT_STAGES: gl.constexpr = T.dout.num_stages
    BLOCK_M: gl.constexpr = T.block_m
    DIM: gl.constexpr = T.dim
    DIM_V: gl.constexpr = T.dim_v
    PARTS: gl.constexpr = T.block_n // WARPGROUP_ROWS
    K_PANELS: gl.constexpr = DIM // BOX_DIMS
    V_PANELS: gl.constexpr = DIM_V // BOX_DIMS
    dtype: gl.constexpr = q_desc.dtype
    k_boxes = _boxes(k_desc, PARTS * K_PANELS, WARPGROUP_ROWS)
    v_boxes = _boxes(v_desc, PARTS * V_PANELS, WARPGROUP_ROWS)
    q_boxes = _boxes(q_desc, STAGES * K_PANELS, BLOCK_M)
    dout_boxes = _boxes(dout_desc, DOUT_STAGES * V_PANELS, BLOCK_M)
    row_boxes = gl.allocate_shared_memory(gl.float32, [STAGES, 2, BLOCK_M], rows_desc.layout)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    COLUMNS: gl.constexpr = T.columns
    ROW_PARTS: gl.constexpr = BLOCK_M // COLUMNS
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [DOUT_STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
    for i in gl.static_range(DOUT_STAGES):
        mbarrier.init(dout_full.index(i), count=1)
    return KeyMemory(
        k_boxes=k_boxes,
        v_boxes=v_boxes,
        q_boxes=q_boxes,
        dout_boxes=dout_boxes,
        k=reinterpret(k_boxes, dtype, (PARTS, WARPGROUP_ROWS, DIM), SWIZZLED),
        v=reinterpret(v_boxes, dtype, (PARTS, WARPGROUP_ROWS, DIM_V), SWIZZLED),
        q=reinterpret(q_boxes, dtype, (STAGES, BLOCK_M, DIM), SWIZZLED),
        dout=reinterpret(dout_boxes, dtype, (DOUT_STAGES, BLOCK_M, DIM_V), SWIZZLED),
        k_panels=reinterpret(k_boxes, dtype, (PARTS * K_PANELS, WARPGROUP_ROWS, 64), SWIZZLED),
        rows=reinterpret(row_boxes, gl.float32, (2 * STAGES * ROW_PARTS, COLUMNS), ROWS),
        row_boxes=row_boxes,
        kv_full=kv_full,
        q_full=q_full,
        dout_full=dout_full,
    )
