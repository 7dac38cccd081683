"""The main kernel of the backward pass on Hopper, warp specialized, in Gluon: all gradients in one pass.

A CTA holds 128 keys and values of a KV head and streams blocks of the queries that see them, of every head of the
group. A producer warp loads by TMA; two consumer warpgroups compute, and each owns 64 of the keys with their rows of dk
and dv, which stay in its registers. For a block of queries (FlashAttention-3's way, https://arxiv.org/abs/2407.08608,
with FlashAttention-2's recomputation, https://arxiv.org/abs/2307.08691):

    sᵀ = k qᵀ, dpᵀ = v doutᵀ            operands are swapped, so that p and ds come in registers as dv and dk need them
    pᵀ = exp2(sᵀ · scale - shift), dv += pᵀ dout
    dsᵀ = pᵀ · (dpᵀ - delta), dk += dsᵀ q
    dq = ds k                           ds by way of shared memory, from both warpgroups

Each warpgroup computes one half of a block's dq, [64, 64], over all 128 keys, and TMA adds it to memory in float32, in
the order in which CTAs happen to run.
"""

from typing import Any, Final, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trunkattn.gpu.hopper.common import BOX_DIMS, PRODUCER_REGISTERS, SWIZZLED, WARPGROUP_ROWS, reinterpret
from trunkattn.gpu.hopper.pipeline import consumer_release, consumer_wait, producer_acquire, tma_add, tma_load
from trunkattn.training.hopper.key_blocks import find_keys, masked_query_block, needs_masks, num_masked_blocks

REGISTERS: Final = 168  # of a thread at launch
_CONSUMER_REGISTERS = gl.constexpr(240)
_NUM_CONSUMERS = gl.constexpr(256)
_BAR_Q_EMPTY, _BAR_DOUT_EMPTY, _BAR_CONSUMERS = gl.constexpr(8), gl.constexpr(10), gl.constexpr(12)
_NEVER = gl.constexpr(2**30)
DQ_BOX: Final = (64, 32)  # rows and numbers of float32 of a TMA box
_FLOAT_BOX = gl.constexpr(DQ_BOX[1])


class _Memory(NamedTuple):
    """Shared memory of a CTA, as TMA writes it and as products read it."""

    k_boxes: Any
    v_boxes: Any
    q_boxes: Any
    dout_boxes: Any
    dq_boxes: Any
    k: Any
    v: Any
    q: Any
    dout: Any
    k_panels: Any
    ds: Any
    ds_panels: Any
    dq: Any
    rows: Any
    row_boxes: Any
    kv_full: Any
    q_full: Any
    dout_full: Any


class _Full(NamedTuple):
    """The full barriers of a pipeline, as `consumer_wait` takes them."""

    full: Any


class _OwnKeys(NamedTuple):
    """The keys of a warpgroup [64], of which each is seen by the queries [seen_from, seen_to). count: blocks of queries
    of all heads."""

    task: Any
    seen_from: Any
    seen_to: Any
    log2_scale: Any
    count: Any


class _State(NamedTuple):
    """Sums over queries [64, dim] of a warpgroup's keys and values; dk not yet times sm_scale. scores: sᵀ of the next
    block of queries, if they are computed ahead."""

    dk: Any
    dv: Any
    scores: Any


@gluon.jit
def _load_tile(desc, boxes, at, token, head, batch, full, DIM: gl.constexpr):
    """Starts the TMA loads of a tile [rows, DIM], whose first box is box `at`."""
    for part in gl.static_range(DIM // BOX_DIMS):
        tma_load(desc, [batch, token, head, part * BOX_DIMS], full, boxes.index(at + part))


@gluon.jit
def _produce_block(m, member, index, task, q_desc, dout_desc, rows_desc, memory, C: gl.constexpr, T: gl.constexpr):
    """Starts the loads of a block of queries: with one barrier what sᵀ and p need, with another dout."""
    BLOCK_M: gl.constexpr = T.block_m
    stage = index % T.num_stages
    head = task.kv_head * C.group_size + member
    token = task.begin_q + m * BLOCK_M
    producer_acquire(index, _BAR_Q_EMPTY, T)
    q_full = memory.q_full.index(stage)
    mbarrier.expect(q_full, BLOCK_M * T.dim * 2 + 2 * BLOCK_M * 4)
    row = (task.row_block + member * task.num_row_blocks + m) * 2
    _load_tile(q_desc, memory.q_boxes, stage * (T.dim // BOX_DIMS), token, head, task.row, q_full, T.dim)
    tma_load(rows_desc, [row, 0], q_full, memory.row_boxes.index(stage))
    producer_acquire(index, _BAR_DOUT_EMPTY, T)
    dout_full = memory.dout_full.index(stage)
    mbarrier.expect(dout_full, BLOCK_M * T.dim_v * 2)
    at = stage * (T.dim_v // BOX_DIMS)
    _load_tile(dout_desc, memory.dout_boxes, at, token, head, task.row, dout_full, T.dim_v)


@gluon.jit
def _produce(work, batch, q_desc, k_desc, v_desc, dout_desc, rows_desc, memory, C: gl.constexpr, T: gl.constexpr):
    """The producer warp."""
    task = find_keys(work, batch, C)
    if task.end > task.begin:
        full = memory.kv_full.index(0)
        mbarrier.expect(full, T.block_n * (T.dim + T.dim_v) * 2)
        for half in gl.static_range(2):
            token = task.begin_k + task.first + half * WARPGROUP_ROWS
            at_k, at_v = half * (T.dim // BOX_DIMS), half * (T.dim_v // BOX_DIMS)
            _load_tile(k_desc, memory.k_boxes, at_k, token, task.kv_head, task.row, full, T.dim)
            _load_tile(v_desc, memory.v_boxes, at_v, token, task.kv_head, task.row, full, T.dim_v)
        index = 0
        for member in range(C.group_size):
            for m in range(task.full_begin, task.full_end):
                _produce_block(m, member, index, task, q_desc, dout_desc, rows_desc, memory, C, T)
                index += 1
        if needs_masks(C):
            for member in range(C.group_size):
                for number in range(num_masked_blocks(task)):
                    m = masked_query_block(task, number)
                    _produce_block(m, member, index, task, q_desc, dout_desc, rows_desc, memory, C, T)
                    index += 1


@gluon.jit
def _consumers_meet():
    """All consumer warps meet."""
    operands = [gl.to_tensor(_BAR_CONSUMERS), gl.to_tensor(_NUM_CONSUMERS)]
    gl.inline_asm_elementwise("bar.sync $1, $2; // $0", "=r,r,r", operands, gl.int32, False, 1)


@gluon.jit
def _zero_rows(tile, count, LAYOUT: gl.constexpr):
    """Writes zeros to the rows of a tile from `count` on. What TMA reads behind a packed sequence may be NaN, and so
    may its product with a 0."""
    if count < tile.shape[0]:
        row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
        tile.store(gl.where((row < count)[:, None], tile.load(LAYOUT), 0.0))


@gluon.jit
def _start_scores(WARPGROUP: gl.constexpr, index, there, memory, T: gl.constexpr):
    """Starts sᵀ of block `index` of queries, if it is `there`: else it is of whatever the memory holds."""
    BLOCK_M: gl.constexpr = T.block_m
    SCORES: gl.constexpr = T.scores
    consumer_wait(_Full(memory.q_full), index, T, there)
    q_tile = memory.q.index(index % T.num_stages)
    zeros = gl.zeros([WARPGROUP_ROWS, BLOCK_M], gl.float32, SCORES)
    return warpgroup_mma(memory.k.index(WARPGROUP), q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _start_dp(WARPGROUP: gl.constexpr, dout_tile, memory, T: gl.constexpr):
    """Starts dpᵀ of a block of queries."""
    BLOCK_M: gl.constexpr = T.block_m
    SCORES: gl.constexpr = T.scores
    zeros = gl.zeros([WARPGROUP_ROWS, BLOCK_M], gl.float32, SCORES)
    return warpgroup_mma(memory.v.index(WARPGROUP), dout_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_queries(
    WARPGROUP: gl.constexpr,
    state,
    m,
    member,
    index,
    keys,
    dq_desc,
    memory,
    MASK: gl.constexpr,
    C: gl.constexpr,
    T: gl.constexpr,
):
    """Adds the part of a block of queries to dk and dv, and its dq to memory."""
    BLOCK_M: gl.constexpr = T.block_m
    SCORES: gl.constexpr = T.scores
    COPY_K: gl.constexpr = T.copy_k
    COPY_V: gl.constexpr = T.copy_v
    DK: gl.constexpr = T.dk
    DV: gl.constexpr = T.dv
    stage, buffer = index % T.num_stages, index % 2
    q_tile, dout_tile = memory.q.index(stage), memory.dout.index(stage)
    if T.ahead:
        scores = state.scores
        consumer_wait(_Full(memory.dout_full), index, T)
    else:
        scores = _start_scores(WARPGROUP, index, True, memory, T)
        consumer_wait(_Full(memory.dout_full), index, T)
        scores = warpgroup_mma_wait(0, deps=(scores,))
    rows = keys.task.len_q - m * BLOCK_M
    if MASK and C.variant.packed and rows < BLOCK_M:
        if WARPGROUP == 0:
            _zero_rows(q_tile, rows, COPY_K)
        else:
            _zero_rows(dout_tile, rows, COPY_V)
        fence_async_shared()
        _consumers_meet()
    if T.ahead:
        dp = _start_dp(WARPGROUP, dout_tile, memory, T)
    shift = memory.rows.index(2 * stage).load(gl.SliceLayout(0, SCORES))
    p = gl.exp2(gl.fma(scores, gl.to_tensor(keys.log2_scale), -shift[None, :]))
    if MASK:
        column = gl.arange(0, BLOCK_M, gl.SliceLayout(0, SCORES))[None, :]
        seen = column >= (keys.seen_from - m * BLOCK_M)[:, None]
        if C.variant.tree:
            seen = seen & (column < (keys.seen_to - m * BLOCK_M)[:, None])
        if C.variant.packed:
            seen = seen & (column < rows)
        p = gl.where(seen, p, 0.0)
    if not T.ahead:
        dp = _start_dp(WARPGROUP, dout_tile, memory, T)
    p_half = gl.convert_layout(p.to(q_tile.dtype), gl.DotOperandLayout(0, DV, 2))
    dv = warpgroup_mma(p_half, dout_tile, state.dv, is_async=True)
    dp = warpgroup_mma_wait(1, deps=(dp,))
    delta = memory.rows.index(2 * stage + 1).load(gl.SliceLayout(0, SCORES))
    ds = (p * (dp - delta[None, :])).to(q_tile.dtype)
    ds_half = gl.convert_layout(ds, gl.DotOperandLayout(0, DK, 2))
    dk = warpgroup_mma(ds_half, q_tile, state.dk, is_async=True)
    dv, p_half = warpgroup_mma_wait(1, deps=(dv, p_half))
    consumer_release(index, _BAR_DOUT_EMPTY, T)
    memory.ds.index(2 * buffer + WARPGROUP).store(ds)
    fence_async_shared()
    _consumers_meet()
    QUERY_PANELS: gl.constexpr = BLOCK_M // 64
    PANEL_Q: gl.constexpr = WARPGROUP if QUERY_PANELS == 2 else 0
    PANEL_D: gl.constexpr = 0 if QUERY_PANELS == 2 else WARPGROUP
    K_PANELS: gl.constexpr = T.dim // 64
    DQ: gl.constexpr = T.dq
    dq = gl.zeros([64, 64], gl.float32, DQ)
    ds_0 = memory.ds_panels.index(2 * buffer * QUERY_PANELS + PANEL_Q).permute((1, 0))
    ds_1 = memory.ds_panels.index((2 * buffer + 1) * QUERY_PANELS + PANEL_Q).permute((1, 0))
    dq = warpgroup_mma(ds_0, memory.k_panels.index(PANEL_D), dq, use_acc=False, is_async=True)
    dq = warpgroup_mma(ds_1, memory.k_panels.index(K_PANELS + PANEL_D), dq, is_async=True)
    next_scores = state.scores
    if T.ahead:
        next_scores = _start_scores(WARPGROUP, index + 1, index + 1 < keys.count, memory, T)
    AHEAD: gl.constexpr = 1 if T.ahead else 0
    dk, ds_half = warpgroup_mma_wait(2 + AHEAD, deps=(dk, ds_half))
    consumer_release(index, _BAR_Q_EMPTY, T)
    tma.store_wait(0)
    dq = warpgroup_mma_wait(AHEAD, deps=(dq,))
    memory.dq.index(WARPGROUP).store(dq)
    fence_async_shared()
    row = (keys.task.row_block + member * keys.task.num_row_blocks + m) * BLOCK_M + PANEL_Q * 64
    for part in gl.static_range(2):
        tma_add(dq_desc, [row, PANEL_D * 64 + part * _FLOAT_BOX], memory.dq_boxes.index(2 * WARPGROUP + part))
    if T.ahead:
        next_scores = warpgroup_mma_wait(0, deps=(next_scores,))
    return _State(dk, dv, next_scores)


@gluon.jit
def _write_rows(tile, values, out, token, rows, head, num_heads, DIM: gl.constexpr, COPY: gl.constexpr):
    """Writes the first `rows` rows of a tile's values to memory, by way of its shared memory."""
    tile.store(values.to(tile.dtype))
    row = gl.arange(0, tile.shape[0], gl.SliceLayout(1, COPY))
    d = gl.arange(0, tile.shape[1], gl.SliceLayout(0, COPY))
    at = ((token + row).to(gl.int64) * num_heads + head) * DIM
    gl.store(out + at[:, None] + d[None, :], tile.load(COPY), mask=(row < rows)[:, None] & (d < DIM)[None, :])


@gluon.jit
def _consume(WARPGROUP: gl.constexpr, work, batch, scales, dq_desc, memory, C: gl.constexpr, T: gl.constexpr):
    """Consumer warpgroup 0 or 1."""
    task = find_keys(work, batch, C)
    DK: gl.constexpr = T.dk
    DV: gl.constexpr = T.dv
    DIM: gl.constexpr = T.dim
    DIM_V: gl.constexpr = T.dim_v
    COPY_K: gl.constexpr = T.copy_k
    COPY_V: gl.constexpr = T.copy_v
    dk = gl.zeros([WARPGROUP_ROWS, DIM], gl.float32, DK)
    dv = gl.zeros([WARPGROUP_ROWS, DIM_V], gl.float32, DV)
    own_first = task.first + WARPGROUP * WARPGROUP_ROWS
    if task.end > task.begin:
        n = own_first + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, T.scores))
        seen_from = n - (task.len_k - task.len_q) if C.variant.causal else n * 0
        if not C.variant.even_k:
            seen_from = gl.where(n < task.len_k, seen_from, _NEVER)
        seen_to = seen_from
        if C.variant.tree:
            seen_to = gl.load(batch.subtree_end + n, mask=n < task.len_k, other=0)
        count = C.group_size * (task.end - task.begin)
        keys = _OwnKeys(task, seen_from, seen_to, scales.log2, count)
        mbarrier.wait(memory.kv_full.index(0), 0)
        if C.variant.packed:
            _zero_rows(memory.k.index(WARPGROUP), task.len_k - own_first, COPY_K)
            _zero_rows(memory.v.index(WARPGROUP), task.len_k - own_first, COPY_V)
            fence_async_shared()
        index = 0
        scores = 0
        if T.ahead:
            scores = warpgroup_mma_wait(0, deps=(_start_scores(WARPGROUP, 0, True, memory, T),))
        state = _State(dk, dv, scores)
        for member in range(C.group_size):
            for m in range(task.full_begin, task.full_end):
                state = _add_queries(WARPGROUP, state, m, member, index, keys, dq_desc, memory, False, C, T)
                index += 1
        if needs_masks(C):
            for member in range(C.group_size):
                for number in range(num_masked_blocks(task)):
                    m = masked_query_block(task, number)
                    state = _add_queries(WARPGROUP, state, m, member, index, keys, dq_desc, memory, True, C, T)
                    index += 1
        dk, dv = state.dk, state.dv
    tma.store_wait(0)
    _consumers_meet()
    token = task.row * batch.seqlen_k + task.begin_k + own_first
    rows = task.len_k - own_first
    k_tile, v_tile = memory.k.index(WARPGROUP), memory.v.index(WARPGROUP)
    dk = dk * scales.sm_scale
    _write_rows(k_tile, dk, work.dk, token, rows, task.kv_head, work.num_kv_heads, C.head_dim, COPY_K)
    _write_rows(v_tile, dv, work.dv, token, rows, task.kv_head, work.num_kv_heads, C.head_dim_v, COPY_V)


@gluon.jit
def _boxes(desc, COUNT: gl.constexpr, ROWS: gl.constexpr):
    return gl.allocate_shared_memory(desc.dtype, [COUNT, 1, ROWS, 1, BOX_DIMS], desc.layout)


@gluon.jit
def _allocate(q_desc, k_desc, v_desc, dout_desc, dq_desc, rows_desc, T: gl.constexpr):
    """Shared memory with all barriers ready."""
    STAGES: gl.constexpr = T.num_stages
    BLOCK_M: gl.constexpr = T.block_m
    DIM: gl.constexpr = T.dim
    DIM_V: gl.constexpr = T.dim_v
    K_PANELS: gl.constexpr = DIM // BOX_DIMS
    V_PANELS: gl.constexpr = DIM_V // BOX_DIMS
    QUERY_PANELS: gl.constexpr = BLOCK_M // 64
    dtype: gl.constexpr = q_desc.dtype
    k_boxes = _boxes(k_desc, 2 * K_PANELS, WARPGROUP_ROWS)
    v_boxes = _boxes(v_desc, 2 * V_PANELS, WARPGROUP_ROWS)
    q_boxes = _boxes(q_desc, STAGES * K_PANELS, BLOCK_M)
    dout_boxes = _boxes(dout_desc, STAGES * V_PANELS, BLOCK_M)
    ds = gl.allocate_shared_memory(dtype, [4, WARPGROUP_ROWS, BLOCK_M], SWIZZLED)
    dq_boxes = gl.allocate_shared_memory(gl.float32, [4, 64, _FLOAT_BOX], dq_desc.layout)
    row_boxes = gl.allocate_shared_memory(gl.float32, [STAGES, 2, BLOCK_M], rows_desc.layout)
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    DQ: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    kv_full = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    q_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    dout_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(q_full.index(i), count=1)
        mbarrier.init(dout_full.index(i), count=1)
    return _Memory(
        k_boxes=k_boxes,
        v_boxes=v_boxes,
        q_boxes=q_boxes,
        dout_boxes=dout_boxes,
        dq_boxes=dq_boxes,
        k=reinterpret(k_boxes, dtype, (2, WARPGROUP_ROWS, DIM), SWIZZLED),
        v=reinterpret(v_boxes, dtype, (2, WARPGROUP_ROWS, DIM_V), SWIZZLED),
        q=reinterpret(q_boxes, dtype, (STAGES, BLOCK_M, DIM), SWIZZLED),
        dout=reinterpret(dout_boxes, dtype, (STAGES, BLOCK_M, DIM_V), SWIZZLED),
        k_panels=reinterpret(k_boxes, dtype, (2 * K_PANELS, WARPGROUP_ROWS, 64), SWIZZLED),
        ds=ds,
        ds_panels=reinterpret(ds, dtype, (4 * QUERY_PANELS, WARPGROUP_ROWS, 64), SWIZZLED),
        dq=reinterpret(dq_boxes, gl.float32, (2, 64, 64), DQ),
        rows=reinterpret(row_boxes, gl.float32, (2 * STAGES, BLOCK_M), ROWS),
        row_boxes=row_boxes,
        kv_full=kv_full,
        q_full=q_full,
        dout_full=dout_full,
    )


@gluon.jit
def hopper_backward_kernel(q_desc, k_desc, v_desc, dout_desc, dq_desc, rows_desc, work, batch, scales, C: gl.constexpr):
    """dk and dv of 128 keys of a KV head, and what they add to dq."""
    T: gl.constexpr = C.tile
    memory = _allocate(q_desc, k_desc, v_desc, dout_desc, dq_desc, rows_desc, T)
    gl.warp_specialize(
        [
            (_consume, (0, work, batch, scales, dq_desc, memory, C, T)),
            (_consume, (1, work, batch, scales, dq_desc, memory, C, T)),
            (_produce, (work, batch, q_desc, k_desc, v_desc, dout_desc, rows_desc, memory, C, T)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
