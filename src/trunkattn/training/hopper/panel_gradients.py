"""The consumer warps for dk and dv on Hopper, for keys of 136 to 192 dims and values of up to 128, in Gluon.

A CTA holds 128 keys, 64 for each consumer warpgroup, which keeps their dk and dv in registers as panels of 64 dims.
These take most of the registers, so it computes the scores of 32 queries at a time. pᵀ and dsᵀ stay in registers, and
the warpgroups do not wait for each other (`key_gradients` has the formulas). `query_gradients` computes dq.
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

from trunkattn.gpu.hopper.common import WARPGROUP_ROWS
from trunkattn.gpu.hopper.pipeline import consumer_release, consumer_wait
from trunkattn.training.hopper.key_blocks import (
    ALL_SEEN,
    MASKED,
    KeyTask,
    find_keys,
    own_keys,
    sees_parts,
    skips_blocks,
    weights,
)
from trunkattn.training.hopper.key_loads import (
    Full,
    consumers_meet,
    walk_all_seen,
    walk_masked,
    walk_part_seen,
    walk_queries,
    write_rows,
    zero_rows,
)
from trunkattn.training.hopper.key_tile import BAR_DOUT_EMPTY, BAR_Q_EMPTY
from trunkattn.training.hopper.query_tiles import IN_WARPGROUP
from trunkattn.training.hopper.wide_gradients import Panels, panels_of, zero_tail

_PANEL = gl.constexpr(64)
_FIELDS = gl.constexpr(len(KeyTask._fields))
_TASK_SLOTS = gl.constexpr(32)  # a power of two


class PanelMemory(NamedTuple):
    """Shared memory of the consumers. `loaded` is a `KeyMemory`, and k, v, q and dout view its memory as `Panels`.
    `tasks` holds the fields of each warpgroup's `KeyTask`, where `sees_parts` is true."""

    loaded: Any
    tasks: Any
    k: Panels
    v: Panels
    q: Panels
    dout: Panels


class _Given(NamedTuple):
    """What a consumer reads, in addition to its sums."""

    keys: Any
    memory: Any


class _State(NamedTuple):
    """The sums dk and dv of a warpgroup's keys over queries, as tuples of panels [64, 64]. dk is not yet multiplied by
    sm_scale. `scores` is sᵀ [64, 32] of the next queries, if it is computed ahead."""

    dk: Any
    dv: Any
    scores: Any


@gluon.jit
def panel_memory(loaded, dtype: gl.constexpr, T: gl.constexpr):
    """Returns a `PanelMemory`."""
    return PanelMemory(
        loaded=loaded,
        tasks=gl.allocate_shared_memory(gl.int32, [2 * _TASK_SLOTS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0])),
        k=panels_of(loaded.k_boxes, dtype, 2, T.dim),
        v=panels_of(loaded.v_boxes, dtype, 2, T.dim_v),
        q=panels_of(loaded.q_boxes, dtype, T.num_stages, T.dim),
        dout=panels_of(loaded.dout_boxes, dtype, T.dout.num_stages, T.dim_v),
    )


@gluon.jit
def _keep_task(WARPGROUP: gl.constexpr, task, memory):
    """Writes a task to shared memory."""
    for i in gl.static_range(_FIELDS):
        slot = memory.tasks.index(WARPGROUP * _TASK_SLOTS + i)
        slot.store(gl.full([1], 0, gl.int32, IN_WARPGROUP) + task[i])


@gluon.jit
def _kept_task(WARPGROUP: gl.constexpr, memory):
    """Returns the task of `_keep_task`."""
    fields: gl.tuple = ()
    for i in gl.static_range(_FIELDS):
        fields += (gl.max(memory.tasks.index(WARPGROUP * _TASK_SLOTS + i).load(IN_WARPGROUP), 0),)
    return KeyTask(*fields)


@gluon.jit
def _hidden_zero(index, MASK: gl.constexpr, C: gl.constexpr):
    """Returns 0. Where there are blocks of which queries see a part, the compiler knows this only in blocks without a
    mask. In the others it computes the places of keys and values in shared memory again for each block, which takes
    fewer registers."""
    if MASK == ALL_SEEN or not sees_parts(C):
        return 0
    else:
        return gl.inline_asm_elementwise("shr.s32 $0, $1, 31;", "=r,r", [gl.to_tensor(index)], gl.int32, True, 1)


@gluon.jit
def _start_product(
    WARPGROUP: gl.constexpr, own, zero, panels, stage, HALF: gl.constexpr, COUNT: gl.constexpr, T: gl.constexpr
):
    """Starts the product [64, 32] of the warpgroup's keys (or values) and half of a block of queries (or of dout)."""
    COLUMNS: gl.constexpr = T.columns
    SCORES: gl.constexpr = T.scores
    product = gl.zeros([WARPGROUP_ROWS, COLUMNS], gl.float32, SCORES)
    for part in gl.static_range(COUNT):
        columns = panels.half.index((stage * panels.room + part) * 2 + HALF).permute((1, 0))
        product = warpgroup_mma(
            own.one.index(WARPGROUP * own.room + part + zero), columns, product, use_acc=part > 0, is_async=True
        )
    return product


@gluon.jit
def _start_scores(WARPGROUP: gl.constexpr, zero, index, there, memory, HALF: gl.constexpr, T: gl.constexpr):
    """Starts the product sᵀ of half of block `index` of queries. If there is no such block (`there` is false), the
    product is not used, and it does not matter what the memory holds."""
    consumer_wait(Full(memory.loaded.q_full), index, T, there)
    return _start_product(WARPGROUP, memory.k, zero, memory.q, index % T.num_stages, HALF, T.key_panels, T)  # Sᵀ = K·Qᵀ


@gluon.jit
def _add_panels(sums, weights, panels, stage, HALF: gl.constexpr, COUNT: gl.constexpr):
    """Starts to add the products of weights [64, 32] and half of a block to the panels of sums."""
    added: gl.tuple = ()
    for part in gl.static_range(COUNT):
        rows = panels.half.index((stage * panels.room + part) * 2 + HALF)
        added += (warpgroup_mma(weights, rows, sums[part], is_async=True),)
    return added


@gluon.jit
def _operand(values, dtype: gl.constexpr, T: gl.constexpr):
    """Converts values [64, 32] to an operand of a product [64, 64]."""
    SUMS: gl.constexpr = T.panel
    return gl.convert_layout(values.to(dtype), gl.DotOperandLayout(0, SUMS, 2))


@gluon.jit
def _add_half(WARPGROUP: gl.constexpr, state, m, index, given, HALF: gl.constexpr, MASK: gl.constexpr, C: gl.constexpr):
    """Adds what half of a block of queries contributes to dk and dv."""
    T: gl.constexpr = C.tile
    DOUT: gl.constexpr = T.dout
    SCORES: gl.constexpr = T.scores
    KEY_PANELS: gl.constexpr = T.key_panels
    VALUE_PANELS: gl.constexpr = T.value_panels
    AHEAD: gl.constexpr = 0 if skips_blocks(C) else 1
    keys, memory = given.keys, given.memory
    dtype: gl.constexpr = memory.loaded.q.dtype
    stage, dout_stage = index % T.num_stages, index % DOUT.num_stages
    zero = _hidden_zero(index, MASK, C)
    if AHEAD:
        scores = state.scores
    else:
        scores = warpgroup_mma_wait(0, deps=(_start_scores(WARPGROUP, zero, index, True, memory, HALF, T),))
    dp = _start_product(WARPGROUP, memory.v, zero, memory.dout, dout_stage, HALF, VALUE_PANELS, T)  # dPᵀ = V·dOᵀ
    shift = memory.loaded.rows.index(4 * stage + HALF).load(gl.SliceLayout(0, SCORES))
    p, sloped = weights(scores, shift, m * T.block_m + HALF * T.columns, keys, MASK, C)
    p_half = _operand(p, dtype, T)
    dv = _add_panels(state.dv, p_half, memory.dout, dout_stage, HALF, VALUE_PANELS)  # dV += Pᵀ·dO
    dp = warpgroup_mma_wait(VALUE_PANELS, deps=(dp,))
    delta = memory.loaded.rows.index(4 * stage + 2 + HALF).load(gl.SliceLayout(0, SCORES))
    ds_half = _operand(sloped * (dp - delta[None, :]), dtype, T)
    dk = _add_panels(state.dk, ds_half, memory.q, stage, HALF, KEY_PANELS)  # dK += dSᵀ·Q
    next_scores = state.scores
    if AHEAD:
        next_scores = _start_scores(WARPGROUP, zero, index + HALF, index + HALF < keys.count, memory, 1 - HALF, T)
    LATER: gl.constexpr = AHEAD * KEY_PANELS
    dv += (p_half,)
    dv = warpgroup_mma_wait(KEY_PANELS + LATER, deps=dv)[:VALUE_PANELS]
    if HALF == 1:
        consumer_release(index, BAR_DOUT_EMPTY, DOUT)
    dk += (ds_half,)
    dk = warpgroup_mma_wait(LATER, deps=dk)[:KEY_PANELS]
    if HALF == 1:
        consumer_release(index, BAR_Q_EMPTY, T)
    if AHEAD:
        next_scores = warpgroup_mma_wait(0, deps=(next_scores,))
    return _State(dk, dv, next_scores)


@gluon.jit
def _add_queries(WARPGROUP: gl.constexpr, state, m, member, index, task, given, MASK: gl.constexpr, C: gl.constexpr):
    """Adds what a block of queries contributes to dk and dv."""
    T: gl.constexpr = C.tile
    DOUT: gl.constexpr = T.dout
    consumer_wait(Full(given.memory.loaded.dout_full), index, DOUT)
    rows = task.len_q - m * T.block_m
    if MASK == MASKED and C.variant.packed and rows < T.block_m:
        zero_tail(WARPGROUP, given.memory, index, rows, C)
    state = _add_half(WARPGROUP, state, m, index, given, 0, MASK, C)
    return _add_half(WARPGROUP, state, m, index, given, 1, MASK, C)


@gluon.jit
def _no_sums(COUNT: gl.constexpr, T: gl.constexpr):
    SUMS: gl.constexpr = T.panel
    sums: gl.tuple = ()
    for _ in gl.static_range(COUNT):
        sums += (gl.zeros([WARPGROUP_ROWS, _PANEL], gl.float32, SUMS),)
    return sums


@gluon.jit
def _write(WARPGROUP: gl.constexpr, sums, factor, own, out, task, work, batch, DIM: gl.constexpr, C: gl.constexpr):
    """Writes the panels of dk or dv of the warpgroup's keys, multiplied by `factor`, through the shared memory of the
    keys or values."""
    T: gl.constexpr = C.tile
    IN_PARTS: gl.constexpr = C.members < C.group_size
    OUT: gl.constexpr = T.panel if IN_PARTS else T.copy_panel
    first = task.first + WARPGROUP * WARPGROUP_ROWS
    token = task.out_row * work.numbers.seqlen_k + task.begin_k + first
    rows, num_heads = task.len_k - first, batch.num_qo_heads // C.group_size
    for part in gl.static_range(len(sums)):
        tile = own.one.index(WARPGROUP * own.room + part)
        write_rows(tile, sums[part] * factor, out, token, rows, task.kv_head, num_heads, part * _PANEL, DIM, OUT)


@gluon.jit
def _given(WARPGROUP: gl.constexpr, task, batch, scales, memory, C: gl.constexpr):
    """Returns a `_Given` of the warpgroup's keys of a task."""
    T: gl.constexpr = C.tile
    n = task.first + WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, T.scores))
    return _Given(own_keys(n, task, batch, scales, C), memory)


@gluon.jit
def _walk(WARPGROUP: gl.constexpr, state, task, work, batch, scales, memory, C: gl.constexpr):
    """`walk_queries` with `_add_queries`. Where there are blocks of which queries see a part, the task is read again
    before each part, since registers beside the sums do not hold it through the loops, which need little of it."""
    given = _given(WARPGROUP, task, batch, scales, memory, C)
    if sees_parts(C):
        state, index = walk_all_seen(_add_queries, WARPGROUP, state, task, given, C)
        seen_in_part = _kept_task(WARPGROUP, memory)
        given = _given(WARPGROUP, seen_in_part, batch, scales, memory, C)
        state, index = walk_part_seen(_add_queries, WARPGROUP, state, index, seen_in_part, given, C)
        masked = _kept_task(WARPGROUP, memory)
        given = _given(WARPGROUP, masked, batch, scales, memory, C)
        state = walk_masked(_add_queries, WARPGROUP, state, index, masked, work, given, C)
    else:
        state = walk_queries(_add_queries, WARPGROUP, state, task, work, given, C)
    return state


@gluon.jit
def consume_panels(WARPGROUP: gl.constexpr, work, batch, scales, memory, C: gl.constexpr):
    """Runs consumer warpgroup 0 or 1."""
    T: gl.constexpr = C.tile
    KEY_PANELS: gl.constexpr = T.key_panels
    VALUE_PANELS: gl.constexpr = T.value_panels
    COPY: gl.constexpr = T.copy_panel
    HEAD_DIM: gl.constexpr = C.head_dim
    HEAD_DIM_V: gl.constexpr = C.head_dim_v
    task = find_keys(work, batch, C)
    if sees_parts(C):
        _keep_task(WARPGROUP, task, memory)
    dk, dv = _no_sums(KEY_PANELS, T), _no_sums(VALUE_PANELS, T)
    if task.end > task.begin:
        rows = task.len_k - task.first - WARPGROUP * WARPGROUP_ROWS
        mbarrier.wait(memory.loaded.kv_full.index(0), 0)
        if C.variant.packed:
            for part in gl.static_range(KEY_PANELS):
                zero_rows(memory.k.one.index(WARPGROUP * memory.k.room + part), rows, COPY)
            for part in gl.static_range(VALUE_PANELS):
                zero_rows(memory.v.one.index(WARPGROUP * memory.v.room + part), rows, COPY)
            fence_async_shared()
        scores = 0
        if not skips_blocks(C):
            scores = warpgroup_mma_wait(0, deps=(_start_scores(WARPGROUP, 0, 0, True, memory, 0, T),))
        state = _walk(WARPGROUP, _State(dk, dv, scores), task, work, batch, scales, memory, C)
        dk, dv = state.dk, state.dv
    if sees_parts(C):
        task = _kept_task(WARPGROUP, memory)
    consumers_meet()
    _write(WARPGROUP, dk, scales.sm_scale, memory.k, work.dk, task, work, batch, HEAD_DIM, C)
    _write(WARPGROUP, dv, 1.0, memory.v, work.dv, task, work, batch, HEAD_DIM_V, C)
