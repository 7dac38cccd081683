"""The consumer warps of the backward pass on Hopper for heads above 128, in Gluon: all gradients in one pass.

The sums dk and dv of 64 such keys do not fit the registers of one warpgroup. So a CTA holds 64 keys, and both consumer
warpgroups share them. From a block of 64 queries each warpgroup takes 32, computes their pᵀ and dsᵀ (`key_gradients`
has the formulas), and writes both to shared memory. From there each warpgroup computes dv, dk and dq for its half of
the dims of a head. TMA adds dq to memory in float32.

A head of 192 has three panels of 64 dims. The fourth panel of shared memory is never loaded, and what is computed from
it is never written.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trunkattn.gpu.hopper.common import SWIZZLED, WARPGROUP_ROWS, reinterpret
from trunkattn.gpu.hopper.pipeline import consumer_release, consumer_wait, tma_add
from trunkattn.training.hopper.key_blocks import (
    BAR_DOUT_EMPTY,
    BAR_Q_EMPTY,
    find_keys,
    own_keys,
    skips_blocks,
    weights,
)
from trunkattn.training.hopper.key_loads import (
    FLOAT_BOX,
    Full,
    consumers_meet,
    walk_queries,
    write_rows,
    zero_rows,
)

_PANEL = gl.constexpr(64)
_HALF_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))  # a row of 32 numbers is as long as the swizzle


class WideMemory(NamedTuple):
    """Shared memory of the consumers.

    Attributes:
        loaded: a `KeyMemory`. The other fields up to dout_columns view its memory in other shapes.
        q_halves, dout_halves: panels in halves of 32 queries.
        q_panels, dout_panels: panels of 64 queries and 64 dims.
        k_columns, v_columns, q_columns, dout_columns: tiles in halves of their columns.
        weights: pᵀ and dsᵀ [64, 64].
        weight_halves: the same memory in halves [64, 32], one for each warpgroup.
    """

    loaded: Any
    q_halves: Any
    dout_halves: Any
    q_panels: Any
    dout_panels: Any
    k_columns: Any
    v_columns: Any
    q_columns: Any
    dout_columns: Any
    weights: Any
    weight_halves: Any


class _Given(NamedTuple):
    """What a consumer reads, in addition to its sums."""

    keys: Any
    memory: Any
    dq_desc: Any


class _State(NamedTuple):
    """The sums dk and dv [64, half of dim] over queries, for the columns of a warpgroup. dk is not yet multiplied by
    sm_scale. `scores` is sᵀ [64, 32] of the next block of queries, if it is computed ahead."""

    dk: Any
    dv: Any
    scores: Any


@gluon.jit
def wide_memory(loaded, dtype: gl.constexpr, T: gl.constexpr):
    """Allocates a `WideMemory`."""
    HALF: gl.constexpr = _PANEL // 2
    K_PANELS: gl.constexpr = T.dim // _PANEL
    V_PANELS: gl.constexpr = T.dim_v // _PANEL
    HALF_K: gl.constexpr = T.dim // 2
    HALF_V: gl.constexpr = T.dim_v // 2
    QS: gl.constexpr = T.num_stages
    DS: gl.constexpr = T.dout.num_stages
    halves = gl.allocate_shared_memory(dtype, [4, WARPGROUP_ROWS, HALF], _HALF_SWIZZLED)
    return WideMemory(
        loaded=loaded,
        q_halves=reinterpret(loaded.q_boxes, dtype, (QS * K_PANELS * 2, HALF, _PANEL), SWIZZLED),
        dout_halves=reinterpret(loaded.dout_boxes, dtype, (DS * V_PANELS * 2, HALF, _PANEL), SWIZZLED),
        q_panels=reinterpret(loaded.q_boxes, dtype, (QS * K_PANELS, _PANEL, _PANEL), SWIZZLED),
        dout_panels=reinterpret(loaded.dout_boxes, dtype, (DS * V_PANELS, _PANEL, _PANEL), SWIZZLED),
        k_columns=reinterpret(loaded.k_boxes, dtype, (2, WARPGROUP_ROWS, HALF_K), SWIZZLED),
        v_columns=reinterpret(loaded.v_boxes, dtype, (2, WARPGROUP_ROWS, HALF_V), SWIZZLED),
        q_columns=reinterpret(loaded.q_boxes, dtype, (2 * QS, _PANEL, HALF_K), SWIZZLED),
        dout_columns=reinterpret(loaded.dout_boxes, dtype, (2 * DS, _PANEL, HALF_V), SWIZZLED),
        weights=reinterpret(halves, dtype, (2, WARPGROUP_ROWS, _PANEL), _HALF_SWIZZLED),
        weight_halves=halves,
    )


@gluon.jit
def _start_product(
    WARPGROUP: gl.constexpr, panels, halves, stage, COUNT: gl.constexpr, ROOM: gl.constexpr, T: gl.constexpr
):
    """Starts the product [64, 32] of the CTA's keys (or values) and the warpgroup's queries (or dout), as a sum over
    `COUNT` panels. A tile has room for `ROOM` panels."""
    COLUMNS: gl.constexpr = T.columns
    SCORES: gl.constexpr = T.scores
    product = gl.zeros([WARPGROUP_ROWS, COLUMNS], gl.float32, SCORES)
    for part in gl.static_range(COUNT):
        half = halves.index((stage * ROOM + part) * 2 + WARPGROUP).permute((1, 0))
        product = warpgroup_mma(panels.index(part), half, product, use_acc=part > 0, is_async=True)
    return product


@gluon.jit
def _start_scores(WARPGROUP: gl.constexpr, index, there, memory, T: gl.constexpr):
    """Starts the product sᵀ of block `index` of queries. If there is no such block (`there` is false), the product is
    not used, and it does not matter what the memory holds."""
    consumer_wait(Full(memory.loaded.q_full), index, T, there)
    ROOM: gl.constexpr = T.dim // _PANEL
    panels, stage = memory.loaded.k_panels, index % T.num_stages
    return _start_product(WARPGROUP, panels, memory.q_halves, stage, T.key_panels, ROOM, T)


@gluon.jit
def _zero_panels(panels, at, count, PANELS: gl.constexpr, C: gl.constexpr):
    """Keeps the first `count` rows of a tile and writes zeros to the others. The tile's first panel is panel `at`."""
    COPY: gl.constexpr = C.tile.copy_panel
    if count < _PANEL:
        for part in gl.static_range(PANELS):
            zero_rows(panels.index(at + part), count, COPY)


@gluon.jit
def _zero_tail(WARPGROUP: gl.constexpr, memory, stage, dout_stage, rows, C: gl.constexpr):
    """Writes zeros behind the first `rows` rows of a block of queries and of its dout: each warpgroup to one of them,
    and both then read them."""
    T: gl.constexpr = C.tile
    K_ROOM: gl.constexpr = T.dim // _PANEL
    V_ROOM: gl.constexpr = T.dim_v // _PANEL
    if WARPGROUP == 0:
        _zero_panels(memory.q_panels, stage * K_ROOM, rows, T.key_panels, C)
    else:
        _zero_panels(memory.dout_panels, dout_stage * V_ROOM, rows, T.value_panels, C)
    fence_async_shared()
    consumers_meet()


@gluon.jit
def _add_queries(WARPGROUP: gl.constexpr, state, m, member, index, task, given, MASK: gl.constexpr, C: gl.constexpr):
    """Adds what a block of queries contributes to dk and dv, and adds its dq to memory."""
    T: gl.constexpr = C.tile
    DOUT: gl.constexpr = T.dout
    SCORES: gl.constexpr = T.scores
    K_ROOM: gl.constexpr = T.dim // _PANEL
    V_ROOM: gl.constexpr = T.dim_v // _PANEL
    AHEAD: gl.constexpr = 0 if skips_blocks(C) else 1
    memory, loaded = given.memory, given.memory.loaded
    stage, dout_stage = index % T.num_stages, index % T.dout.num_stages
    scores = state.scores
    if not AHEAD:
        scores = warpgroup_mma_wait(0, deps=(_start_scores(WARPGROUP, index, True, memory, T),))
    consumer_wait(Full(loaded.dout_full), index, DOUT)
    rows = task.len_q - m * T.block_m
    if MASK and C.variant.packed and rows < T.block_m:
        _zero_tail(WARPGROUP, memory, stage, dout_stage, rows, C)
    dp = _start_product(WARPGROUP, loaded.v_panels, memory.dout_halves, dout_stage, T.value_panels, V_ROOM, T)
    shift = loaded.rows.index(4 * stage + WARPGROUP).load(gl.SliceLayout(0, SCORES))
    first = m * T.block_m + WARPGROUP * T.columns
    p, sloped = weights(scores, shift, first, given.keys, MASK, C)
    consumers_meet()  # the products of the block before have read pᵀ and dsᵀ
    memory.weight_halves.index(WARPGROUP).store(p.to(loaded.q.dtype))
    dp = warpgroup_mma_wait(0, deps=(dp,))
    delta = loaded.rows.index(4 * stage + 2 + WARPGROUP).load(gl.SliceLayout(0, SCORES))
    memory.weight_halves.index(2 + WARPGROUP).store((sloped * (dp - delta[None, :])).to(loaded.q.dtype))
    fence_async_shared()
    consumers_meet()
    dout_columns = memory.dout_columns.index(2 * dout_stage + WARPGROUP)
    dv = warpgroup_mma(memory.weights.index(0), dout_columns, state.dv, is_async=True)  # dV += Pᵀ·dO
    ds = memory.weights.index(1)
    q_columns = memory.q_columns.index(2 * stage + WARPGROUP)
    dk = warpgroup_mma(ds, q_columns, state.dk, is_async=True)  # dK += dSᵀ·Q
    FIRST: gl.constexpr = WARPGROUP * K_ROOM // 2  # this warpgroup's first panel of dq; it may have a second
    MORE: gl.constexpr = T.key_panels > FIRST + 1
    dq = _start_dq(ds, loaded.k_panels.index(FIRST), T)
    dv = warpgroup_mma_wait(2, deps=(dv,))
    consumer_release(index, BAR_DOUT_EMPTY, DOUT)
    row = (task.row_block + member * task.num_row_blocks + m) * T.block_m
    tma.store_wait(0)
    if MORE:
        more_dq = _start_dq(ds, loaded.k_panels.index(FIRST + 1), T)
        dk, dq = warpgroup_mma_wait(1, deps=(dk, dq))
        _add_dq(WARPGROUP, dq, row, FIRST, given.dq_desc, loaded)
        tma.store_wait(0)
        dq = more_dq
    next_scores = state.scores
    if AHEAD:
        next_scores = _start_scores(WARPGROUP, index + 1, index + 1 < given.keys.count, memory, T)
    dk, dq = warpgroup_mma_wait(AHEAD * T.key_panels, deps=(dk, dq))
    consumer_release(index, BAR_Q_EMPTY, T)
    LAST: gl.constexpr = FIRST + 1 if MORE else FIRST
    _add_dq(WARPGROUP, dq, row, LAST, given.dq_desc, loaded)
    if AHEAD:
        next_scores = warpgroup_mma_wait(0, deps=(next_scores,))
    return _State(dk, dv, next_scores)


@gluon.jit
def _start_dq(ds, k_panel, T: gl.constexpr):
    """Starts the product for a panel of dq [64, 64]."""
    DQ: gl.constexpr = T.dq
    zeros = gl.zeros([_PANEL, _PANEL], gl.float32, DQ)
    return warpgroup_mma(ds.permute((1, 0)), k_panel, zeros, use_acc=False, is_async=True)


@gluon.jit
def _add_dq(WARPGROUP: gl.constexpr, dq, row, PANEL: gl.constexpr, dq_desc, loaded):
    """Starts to add a panel of dq to memory. Its first row is `row`."""
    loaded.dq.index(WARPGROUP).store(dq)
    fence_async_shared()
    for part in gl.static_range(2):
        tma_add(dq_desc, [row, PANEL * _PANEL + part * FLOAT_BOX], loaded.dq_boxes.index(2 * WARPGROUP + part))


@gluon.jit
def consume_wide(WARPGROUP: gl.constexpr, work, batch, scales, dq_desc, memory, C: gl.constexpr):
    """Runs consumer warpgroup 0 or 1."""
    T: gl.constexpr = C.tile
    task, loaded = find_keys(work, batch, C), memory.loaded
    DK: gl.constexpr = T.dk
    DV: gl.constexpr = T.dv
    HALF_K: gl.constexpr = T.dim // 2
    HALF_V: gl.constexpr = T.dim_v // 2
    dk = gl.zeros([WARPGROUP_ROWS, HALF_K], gl.float32, DK)
    dv = gl.zeros([WARPGROUP_ROWS, HALF_V], gl.float32, DV)
    if task.end > task.begin:
        n = task.first + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, T.scores))
        keys = own_keys(n, task, batch, scales, C)
        mbarrier.wait(loaded.kv_full.index(0), 0)
        if C.variant.packed:
            if WARPGROUP == 0:
                _zero_panels(loaded.k_panels, 0, task.len_k - task.first, T.key_panels, C)
            else:
                _zero_panels(loaded.v_panels, 0, task.len_k - task.first, T.value_panels, C)
            fence_async_shared()
            consumers_meet()
        scores = 0
        if not skips_blocks(C):
            scores = warpgroup_mma_wait(0, deps=(_start_scores(WARPGROUP, 0, True, memory, T),))
        state = _State(dk, dv, scores)
        state = walk_queries(_add_queries, WARPGROUP, state, task, work, _Given(keys, memory, dq_desc), C)
        dk, dv = state.dk, state.dv
    tma.store_wait(0)
    consumers_meet()
    token = task.out_row * batch.seqlen_k + task.begin_k + task.first
    rows, num_heads = task.len_k - task.first, batch.num_qo_heads // C.group_size
    k_tile, v_tile = memory.k_columns.index(WARPGROUP), memory.v_columns.index(WARPGROUP)
    IN_PARTS: gl.constexpr = C.members < C.group_size
    COPY_K: gl.constexpr = T.copy_k
    COPY_V: gl.constexpr = T.copy_v
    OUT_K: gl.constexpr = DK if IN_PARTS else COPY_K
    OUT_V: gl.constexpr = DV if IN_PARTS else COPY_V
    dk = dk * scales.sm_scale
    write_rows(k_tile, dk, work.dk, token, rows, task.kv_head, num_heads, WARPGROUP * HALF_K, C.head_dim, OUT_K)
    write_rows(v_tile, dv, work.dv, token, rows, task.kv_head, num_heads, WARPGROUP * HALF_V, C.head_dim_v, OUT_V)
