"""Rows of an item: how the warpgroups of the latent kernel load their queries and write their outputs.

A row is a (query token, head) pair. Each of the two warpgroups copies half of the latent columns, and both hold the
rope columns in registers. If the cache has 8 bits, rows become float16 on the way.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from trunkattn.gpu.hopper.barriers import barrier_sync
from trunkattn.gpu.hopper.common import SWIZZLED, WARPGROUP_ROWS, reinterpret
from trunkattn.gpu.hopper.online_softmax import copy_layout, finalize
from trunkattn.gpu.hopper.widen import float16_factors, largest_of
from trunkattn.gpu.mla.blocks import HALF_DIM, LATENT_DIM, LEFT, ROPE_DIM, queries_arrive
from trunkattn.gpu.mla.pairs import BAR_BOTH, BOTH_THREADS, to_acc_layout
from trunkattn.planner.work_list import DIRECT

FEW_THREADS_A_ROW = gl.constexpr(copy_layout(ROPE_DIM.value))  # a maximum over columns takes few steps
_DIRECT = gl.constexpr(DIRECT)


class Rows(NamedTuple):
    """The rows of an item, [64] each: the query's place in the item and its token, the head, and whether the item has
    such a row. `count` is the number of rows that it has."""

    query: Any
    token: Any
    head: Any
    used: Any
    count: Any


@gluon.jit
def rows_of(tiles, first, end, first_head, C: gl.constexpr):
    """Returns the rows of an item, in the layout of the scores. A thread has two rows in this layout. In the layout of
    a copied tile it has sixteen, and would divide and read for each of them."""
    m = gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, C.scores))
    query, head, count = m // C.group_size, first_head + m % C.group_size, (end - first) * C.group_size
    token = gl.load(tiles.queries + first + query, mask=m < count, other=0)
    return Rows(query, token, head, m < count, count)


@gluon.jit
def _load_tile(pointer, at, count, first_column: gl.constexpr, columns: gl.constexpr, LAYOUT: gl.constexpr):
    """Loads rows [64, columns]. `at` [64] is the offset of each row in elements, and `count` is the number of rows that
    are used."""
    ROW: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    used = gl.arange(0, WARPGROUP_ROWS, ROW) < count
    d = first_column + gl.arange(0, columns, gl.SliceLayout(0, LAYOUT))
    return gl.load(pointer + gl.convert_layout(at, ROW)[:, None] + d[None, :], mask=used[:, None], other=0.0)


@gluon.jit
def load_queries(shared, rows, layer, is_first, WHICH: gl.constexpr, C: gl.constexpr):
    """Copies query rows to shared memory. Each warpgroup copies half of the latent columns. Returns the rope columns,
    which both warpgroups hold in registers, and the scale of logits: one number, or one for each row if rows are scaled
    to become float16. If logits are scaled by a negative number, queries change their sign."""
    COPY: gl.constexpr = C.copy
    SCORES: gl.constexpr = C.scores
    token = rows.token.to(gl.int64)
    at = token * layer.q_latent_token_stride + rows.head * layer.q_latent_head_stride
    latent = _load_tile(layer.q_latent, at, rows.count, WHICH * HALF_DIM, HALF_DIM, COPY)
    if WHICH == LEFT:
        LAYOUT: gl.constexpr = FEW_THREADS_A_ROW
        at = token * layer.q_rope_token_stride + rows.head * layer.q_rope_head_stride
        rope = _load_tile(layer.q_rope, at, rows.count, 0, ROPE_DIM, LAYOUT)
    if is_first:
        queries_arrive(C)
    q_tile = shared.q.index(WHICH)
    logit_scale = gl.load(layer.logit_scale)
    scale = gl.abs(logit_scale)
    if latent.dtype != q_tile.dtype:
        if WHICH == LEFT:
            shared.max_left.store(gl.maximum(largest_of(latent), largest_of(rope)))
        else:
            shared.max_right.store(largest_of(latent))
        ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
        COPY_ROWS: gl.constexpr = gl.SliceLayout(1, COPY)
        barrier_sync(BAR_BOTH, BOTH_THREADS)
        largest = gl.maximum(shared.max_left.load(ROWS), shared.max_right.load(ROWS))
        scale = scale * float16_factors(largest)[1]
        largest = gl.maximum(shared.max_left.load(COPY_ROWS), shared.max_right.load(COPY_ROWS))
        factor = float16_factors(largest)[0][:, None]
        latent = (latent.to(gl.float32) * factor).to(q_tile.dtype)
        if WHICH == LEFT:
            rope = (rope.to(gl.float32) * factor).to(q_tile.dtype)
    q_tile.store(latent)
    if WHICH == LEFT:
        shared.q_rope.store(rope)
    if logit_scale < 0:
        q_tile.store(-q_tile.load(COPY))
        if WHICH == LEFT:
            shared.q_rope.store(-shared.q_rope.load(LAYOUT))
    fence_async_shared()
    barrier_sync(BAR_BOTH, BOTH_THREADS)
    scale = gl.maximum(scale, 1e-37)  # times 0 a masked score, -inf, would be NaN
    return shared.q_rope.load(gl.DotOperandLayout(0, SCORES, 2)), scale


@gluon.jit
def _write_out(out, token, head, queries, layer, WHICH: gl.constexpr, C: gl.constexpr):
    """Writes half of the columns of rows to `layer.out`, through the memory of `queries` and with 16 bytes a thread.
    `token` and `head` [64] are those of each row. A row with token -1 is not written."""
    DTYPE: gl.constexpr = layer.out.dtype.element_ty
    QUERIES: gl.constexpr = (2, WARPGROUP_ROWS, HALF_DIM)
    out_tile = reinterpret(queries, DTYPE, QUERIES, SWIZZLED).index(WHICH)
    out_tile.store((out * gl.load(layer.v_scale)).to(DTYPE))
    COPY: gl.constexpr = C.copy
    COPY_ROW: gl.constexpr = gl.SliceLayout(1, COPY)
    token, head = gl.convert_layout(token, COPY_ROW), gl.convert_layout(head, COPY_ROW)
    d = WHICH * HALF_DIM + gl.arange(0, HALF_DIM, gl.SliceLayout(0, COPY))[None, :]
    at = (token.to(gl.int64) * layer.out_token_stride + head * layer.out_head_stride)[:, None] + d
    gl.store(layer.out + at, out_tile.load(COPY), mask=(token >= 0)[:, None])


@gluon.jit
def epilogue(state, shared, tiles, first, end, first_head, layer, WHICH: gl.constexpr, C: gl.constexpr):
    """Writes half of the columns of an item's rows, as partials or to `layer.out`."""
    if WHICH == LEFT:
        shared.sum_left.store(state.row_sum)
        barrier_sync(BAR_BOTH, BOTH_THREADS)
        row_sum = state.row_sum + shared.sum_right.load(gl.SliceLayout(1, C.scores))
    else:
        shared.sum_right.store(state.row_sum)
        barrier_sync(BAR_BOTH, BOTH_THREADS)
        row_sum = shared.sum_left.load(gl.SliceLayout(1, C.scores)) + state.row_sum
    inverse_sum, lse = finalize(state.row_max, row_sum)
    out = state.acc * to_acc_layout(inverse_sum, C)[:, None]
    rows = rows_of(tiles, first, end, first_head, C)
    slot = gl.load(tiles.partial_slots + first + rows.query, mask=rows.used, other=_DIRECT)
    if gl.max(slot, 0) != _DIRECT:
        has_slot = rows.used & (slot != _DIRECT)
        at = slot.to(gl.int64) * C.num_qo_heads + rows.head
        d = WHICH * HALF_DIM + gl.arange(0, HALF_DIM, gl.SliceLayout(0, C.acc))[None, :]
        to = layer.partial + to_acc_layout(at, C)[:, None] * LATENT_DIM + d
        gl.store(to, out, mask=to_acc_layout(has_slot, C)[:, None])
        if WHICH == LEFT:
            gl.store(layer.partial_lse + at, lse, mask=has_slot)
    direct = rows.used & (slot == _DIRECT)
    if C.return_lse and WHICH == LEFT:
        gl.store(layer.lse + rows.token * C.num_qo_heads + rows.head, lse, mask=direct)
    if gl.max(direct.to(gl.int32), 0) > 0:
        _write_out(out, gl.where(direct, rows.token, -1), rows.head, shared.q, layer, WHICH, C)
