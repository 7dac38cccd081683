"""The consumer warps for dk and dv on Hopper, for keys or values that `panel_gradients` does not take, in Gluon.

The sums dk and dv of 64 such keys do not fit the registers of one warpgroup. So a CTA holds 64 keys, and both consumer
warpgroups share them. From a block of 64 queries each warpgroup takes 32, computes their pᵀ and dsᵀ (`key_gradients`
has the formulas), and writes both to shared memory. From there each warpgroup computes dv and dk for its own panels of
64 dims. `query_gradients` computes dq.

While the exponentials of a block are computed, the products of the block before it run on the tensor cores. For the
first block these are products with zeros.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trunkattn.gpu.hopper.common import SWIZZLED, WARPGROUP_ROWS, reinterpret
from trunkattn.gpu.hopper.pipeline import consumer_release, consumer_wait
from trunkattn.training.hopper.key_blocks import MASKED, find_keys, own_keys, weights
from trunkattn.training.hopper.key_loads import Full, consumers_meet, walk_queries, write_rows, zero_rows
from trunkattn.training.hopper.key_tile import BAR_DOUT_EMPTY, BAR_Q_EMPTY

_PANEL = gl.constexpr(64)
_HALF_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))  # a row of 32 numbers is as long as the swizzle
_P, _DS = gl.constexpr(0), gl.constexpr(1)


class Panels(NamedTuple):
    """Tiles of 64 rows in shared memory, viewed as panels of 64 dims, as pairs of panels, and, where only 32 rows are
    taken at a time, as halves of panels. A tile has room for `room` panels."""

    one: Any
    two: Any
    half: Any
    room: Any


class WideMemory(NamedTuple):
    """Shared memory of the consumers.

    Attributes:
        loaded: a `KeyMemory`. k, v, q and dout view its memory as `Panels`.
        weights: pᵀ and dsᵀ [64, 64] of two blocks of queries.
        weight_halves: the same memory in halves [64, 32], one for each warpgroup.
    """

    loaded: Any
    k: Any
    v: Any
    q: Any
    dout: Any
    weights: Any
    weight_halves: Any


class _Given(NamedTuple):
    """What a consumer reads, in addition to its sums."""

    keys: Any
    memory: Any


class _State(NamedTuple):
    """The sums dk and dv [64, dims of the warpgroup] over queries, without those of the last block, whose pᵀ and dsᵀ
    are in shared memory. dk is not yet multiplied by sm_scale. `last` is the last block's number in the order of the
    task."""

    dk: Any
    dv: Any
    last: Any


@gluon.jit
def panels_of(boxes, dtype: gl.constexpr, STAGES: gl.constexpr, DIM: gl.constexpr):
    """Views the boxes of `STAGES` tiles as `Panels`."""
    ROOM: gl.constexpr = DIM // _PANEL
    one = reinterpret(boxes, dtype, (STAGES * ROOM, _PANEL, _PANEL), SWIZZLED)
    two = reinterpret(boxes, dtype, (STAGES * ROOM // 2, _PANEL, 2 * _PANEL), SWIZZLED)
    half = reinterpret(boxes, dtype, (STAGES * ROOM * 2, _PANEL // 2, _PANEL), SWIZZLED)
    return Panels(one, two, half, ROOM)


@gluon.jit
def wide_memory(loaded, dtype: gl.constexpr, T: gl.constexpr):
    """Allocates a `WideMemory`."""
    halves = gl.allocate_shared_memory(dtype, [8, WARPGROUP_ROWS, _PANEL // 2], _HALF_SWIZZLED)
    return WideMemory(
        loaded=loaded,
        k=panels_of(loaded.k_boxes, dtype, 1, T.dim),
        v=panels_of(loaded.v_boxes, dtype, 1, T.dim_v),
        q=panels_of(loaded.q_boxes, dtype, T.num_stages, T.dim),
        dout=panels_of(loaded.dout_boxes, dtype, T.dout.num_stages, T.dim_v),
        weights=reinterpret(halves, dtype, (4, WARPGROUP_ROWS, _PANEL), _HALF_SWIZZLED),
        weight_halves=halves,
    )


@gluon.jit
def _tile_part(panels, stage, PART: gl.constexpr):
    """Returns the panels `PART` of a tile [64, dims]."""
    if PART.num_panels == 2:
        return panels.two.index((stage * panels.room + PART.first) // 2)
    else:
        return panels.one.index(stage * panels.room + PART.first)


@gluon.jit
def _start_product(WARPGROUP: gl.constexpr, own, panels, stage, COUNT: gl.constexpr, T: gl.constexpr):
    """Starts the product [64, 32] of the CTA's keys (or values) and the warpgroup's queries (or dout), as a sum over
    `COUNT` panels."""
    COLUMNS: gl.constexpr = T.columns
    SCORES: gl.constexpr = T.scores
    product = gl.zeros([WARPGROUP_ROWS, COLUMNS], gl.float32, SCORES)
    for part in gl.static_range(COUNT):
        half = panels.half.index((stage * panels.room + part) * 2 + WARPGROUP).permute((1, 0))
        product = warpgroup_mma(own.one.index(part), half, product, use_acc=part > 0, is_async=True)
    return product


@gluon.jit
def _zero_panels(panels, stage, count, COUNT: gl.constexpr, C: gl.constexpr):
    """Keeps the first `count` rows of a tile and writes zeros to the others."""
    COPY: gl.constexpr = C.tile.copy_panel
    if count < _PANEL:
        for part in gl.static_range(COUNT):
            zero_rows(panels.one.index(stage * panels.room + part), count, COPY)


@gluon.jit
def zero_tail(WARPGROUP: gl.constexpr, memory, index, rows, C: gl.constexpr):
    """Waits for block `index` of queries and its dout, and writes zeros behind their first `rows` rows: each warpgroup
    to one of them, and both then read them. Scores that are computed ahead may see these rows either way, because a
    mask drops them."""
    T: gl.constexpr = C.tile
    DOUT: gl.constexpr = T.dout
    consumer_wait(Full(memory.loaded.q_full), index, T)
    consumer_wait(Full(memory.loaded.dout_full), index, DOUT)
    if WARPGROUP == 0:
        _zero_panels(memory.q, index % T.num_stages, rows, T.key_panels, C)
    else:
        _zero_panels(memory.dout, index % T.dout.num_stages, rows, T.value_panels, C)
    fence_async_shared()
    consumers_meet()


@gluon.jit
def _add_queries(WARPGROUP: gl.constexpr, state, m, member, index, task, given, MASK: gl.constexpr, C: gl.constexpr):
    """Computes pᵀ and dsᵀ of a block of queries, and adds what the block before contributes to dk and dv."""
    T: gl.constexpr = C.tile
    DOUT: gl.constexpr = T.dout
    SCORES: gl.constexpr = T.scores
    PARTS: gl.constexpr = T.parts[WARPGROUP]
    DK: gl.constexpr = PARTS.dk
    DV: gl.constexpr = PARTS.dv
    memory, loaded = given.memory, given.memory.loaded
    stage, dout_stage, last = index % T.num_stages, index % DOUT.num_stages, state.last
    rows = task.len_q - m * T.block_m
    if MASK == MASKED and C.variant.packed and rows < T.block_m:
        zero_tail(WARPGROUP, memory, index, rows, C)
    buffer = (index + 1) % 2
    p_last, ds_last = memory.weights.index(2 * buffer + _P), memory.weights.index(2 * buffer + _DS)
    # dK += dSᵀ·Q
    dk = warpgroup_mma(ds_last, _tile_part(memory.q, last % T.num_stages, DK), state.dk, is_async=True)
    consumer_wait(Full(loaded.q_full), index, T)
    scores = _start_product(WARPGROUP, memory.k, memory.q, stage, T.key_panels, T)  # Sᵀ = K·Qᵀ
    consumer_wait(Full(loaded.dout_full), index, DOUT)
    dp = _start_product(WARPGROUP, memory.v, memory.dout, dout_stage, T.value_panels, T)  # dPᵀ = V·dOᵀ
    # dV += Pᵀ·dO
    dv = warpgroup_mma(p_last, _tile_part(memory.dout, last % DOUT.num_stages, DV), state.dv, is_async=True)
    dk, scores, dp = warpgroup_mma_wait(1, deps=(dk, scores, dp))
    if index > 0:
        consumer_release(last, BAR_Q_EMPTY, T)
    shift = loaded.rows.index(4 * stage + WARPGROUP).load(gl.SliceLayout(0, SCORES))
    delta = loaded.rows.index(4 * stage + 2 + WARPGROUP).load(gl.SliceLayout(0, SCORES))
    p, sloped = weights(scores, shift, m * T.block_m + WARPGROUP * T.columns, given.keys, MASK, C)
    half = 4 * (index % 2) + WARPGROUP
    memory.weight_halves.index(half).store(p.to(loaded.q.dtype))
    memory.weight_halves.index(half + 2).store((sloped * (dp - delta[None, :])).to(loaded.q.dtype))
    dv = warpgroup_mma_wait(0, deps=(dv,))
    if index > 0:
        consumer_release(last, BAR_DOUT_EMPTY, DOUT)
    fence_async_shared()
    consumers_meet()
    return _State(dk, dv, index)


@gluon.jit
def _add_last(WARPGROUP: gl.constexpr, state, memory, C: gl.constexpr):
    """Adds what the last block of queries contributes. Returns dk and dv."""
    T: gl.constexpr = C.tile
    PARTS: gl.constexpr = T.parts[WARPGROUP]
    DK: gl.constexpr = PARTS.dk
    DV: gl.constexpr = PARTS.dv
    buffer = state.last % 2
    p, ds = memory.weights.index(2 * buffer + _P), memory.weights.index(2 * buffer + _DS)
    dk = warpgroup_mma(ds, _tile_part(memory.q, state.last % T.num_stages, DK), state.dk, is_async=True)
    dv = warpgroup_mma(p, _tile_part(memory.dout, state.last % T.dout.num_stages, DV), state.dv, is_async=True)
    return warpgroup_mma_wait(0, deps=(dk, dv))


@gluon.jit
def _start(WARPGROUP: gl.constexpr, task, memory, C: gl.constexpr):
    """Waits for the keys and for the first block of queries, and writes what the first step takes for the weights of
    the block before: zeros."""
    T: gl.constexpr = C.tile
    DOUT: gl.constexpr = T.dout
    SCORES: gl.constexpr = T.scores
    zeros = gl.zeros([WARPGROUP_ROWS, _PANEL // 2], memory.loaded.q.dtype, SCORES)
    memory.weight_halves.index(4 + WARPGROUP).store(zeros)
    memory.weight_halves.index(6 + WARPGROUP).store(zeros)
    mbarrier.wait(memory.loaded.kv_full.index(0), 0)
    if C.variant.packed:
        if WARPGROUP == 0:
            _zero_panels(memory.k, 0, task.len_k - task.first, T.key_panels, C)
        else:
            _zero_panels(memory.v, 0, task.len_k - task.first, T.value_panels, C)
    fence_async_shared()
    consumers_meet()
    consumer_wait(Full(memory.loaded.q_full), gl.to_tensor(0), T)
    consumer_wait(Full(memory.loaded.dout_full), gl.to_tensor(0), DOUT)


@gluon.jit
def consume_wide(WARPGROUP: gl.constexpr, work, batch, scales, memory, C: gl.constexpr):
    """Runs consumer warpgroup 0 or 1."""
    T: gl.constexpr = C.tile
    task = find_keys(work, batch, C)
    PARTS: gl.constexpr = T.parts[WARPGROUP]
    DK: gl.constexpr = PARTS.dk
    DV: gl.constexpr = PARTS.dv
    DK_SUMS: gl.constexpr = DK.sums
    DV_SUMS: gl.constexpr = DV.sums
    dk = gl.zeros([WARPGROUP_ROWS, _PANEL * DK.num_panels], gl.float32, DK_SUMS)
    dv = gl.zeros([WARPGROUP_ROWS, _PANEL * DV.num_panels], gl.float32, DV_SUMS)
    if task.end > task.begin:
        n = task.first + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, T.scores))
        given = _Given(own_keys(n, task, batch, scales, C), memory)
        _start(WARPGROUP, task, memory, C)
        state = walk_queries(_add_queries, WARPGROUP, _State(dk, dv, gl.to_tensor(0)), task, work, given, C)
        dk, dv = _add_last(WARPGROUP, state, memory, C)
    consumers_meet()
    token = task.out_row * work.numbers.seqlen_k + task.begin_k + task.first
    rows, num_heads = task.len_k - task.first, batch.num_qo_heads // C.group_size
    k_tile, v_tile = _tile_part(memory.k, 0, DK), _tile_part(memory.v, 0, DV)
    IN_PARTS: gl.constexpr = C.members < C.group_size
    OUT_K: gl.constexpr = DK_SUMS if IN_PARTS else DK.copy
    OUT_V: gl.constexpr = DV_SUMS if IN_PARTS else DV.copy
    FIRST_K: gl.constexpr = DK.first * _PANEL
    FIRST_V: gl.constexpr = DV.first * _PANEL
    dk = dk * scales.sm_scale
    write_rows(k_tile, dk, work.dk, token, rows, task.kv_head, num_heads, FIRST_K, C.head_dim, OUT_K)
    write_rows(v_tile, dv, work.dv, token, rows, task.kv_head, num_heads, FIRST_V, C.head_dim_v, OUT_V)
