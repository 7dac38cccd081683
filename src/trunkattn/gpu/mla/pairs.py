"""Pairs of blocks: scores, softmax and products of the two consumer warpgroups of the latent kernel.

The left warpgroup computes the scores of the first block of a pair and holds the left half of the output. The right
warpgroup computes the scores of the second block and holds the right half. Both halves need the probabilities of each
block:

    left                                    right
    scores of block 0                       scores of block 1
    p0, row maxima m0            -> m0 ->   p1 with m1 = max(m0, its own)
    left  += p0 · values of block 0         right += p1 · values of block 1
    p0 · exp2(m0 - m1)     <- p1, m1, p0 ->
    left  += p1 · values of block 1         right += p0 · values of block 0

If an item has an odd number of blocks of 64 rows, its last block is added without another. Blocks of 32 rows always
come in pairs, and all rows of a second block that does not exist are masked.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from trunkattn.gpu.hopper.barriers import barrier_arrive, barrier_sync
from trunkattn.gpu.hopper.common import WARPGROUP_ROWS
from trunkattn.gpu.hopper.online_softmax import softmax_step
from trunkattn.gpu.mla.blocks import (
    LEFT,
    RIGHT,
    ROPE,
    block_at,
    half_of,
    half_release,
    hidden_zero,
    mask_block,
    part_release,
    part_wait,
    read_segments,
)

# Barriers at which the two warpgroups meet, behind the empty barriers
_BAR_MAX, _BAR_RIGHT, _BAR_LEFT = gl.constexpr(11), gl.constexpr(12), gl.constexpr(13)
BAR_BOTH = gl.constexpr(14)
BOTH_THREADS = gl.constexpr(256)


class Shared(NamedTuple):
    """Shared memory of the consumer warpgroups. `q` [2, 64, 256] has the latent columns of the queries, and `q_rope`
    [64, 64] their rope columns until registers hold them. `p_left` and `p_right` [64, block rows] are the probabilities
    of the left and of the right warpgroup's block, in the memory of `q_rope`. `max_*` and `sum_*` [64] are the maxima
    and the sums of their rows."""

    q: Any
    q_rope: Any
    p_left: Any
    p_right: Any
    max_left: Any
    max_right: Any
    sum_left: Any
    sum_right: Any


class State(NamedTuple):
    """The state of a warpgroup between two pairs: `row_max` [64], `row_sum` [64] of its own blocks, and `acc`
    [64, 256]."""

    row_max: Any
    row_sum: Any
    acc: Any


class Item(NamedTuple):
    """What does not change within an item. `q_rope` holds the rope columns of the queries in registers. `scale` is that
    of logits, for all rows or for each row [64], and includes log2(e). `mask` is what `mask_block` reads, and `blocks`
    are the item's blocks."""

    q_rope: Any
    scale: Any
    mask: Any
    blocks: Any


@gluon.jit
def _scores_of(shared, q_rope, buffers, uses, WHICH: gl.constexpr, C: gl.constexpr):
    """Computes the scores [64, block rows] of the own block, and releases its rope columns."""
    SCORES: gl.constexpr = C.scores
    SHAPE: gl.constexpr = (WARPGROUP_ROWS, C.block_rows)
    zeros = gl.zeros(SHAPE, gl.float32, SCORES)
    OTHER: gl.constexpr = 1 - WHICH
    part_wait(buffers, WHICH, ROPE, uses, C)
    # S = Q·Kᵀ, in three parts: the rope columns, then the two halves of the latent
    k_tile = buffers.rope.index(block_at(uses, WHICH, C)).permute((1, 0))
    scores = warpgroup_mma(q_rope, k_tile, zeros, use_acc=False, is_async=True)
    part_wait(buffers, WHICH, WHICH, uses, C)
    k_tile = half_of(buffers, uses, WHICH, WHICH, C).permute((1, 0))
    scores = warpgroup_mma(shared.q.index(WHICH + hidden_zero(uses)), k_tile, scores, is_async=True)
    part_wait(buffers, WHICH, OTHER, uses, C)
    k_tile = half_of(buffers, uses, WHICH, OTHER, C).permute((1, 0))
    scores = warpgroup_mma(shared.q.index(OTHER + hidden_zero(uses)), k_tile, scores, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    part_release(WHICH, ROPE, C)
    return scores


@gluon.jit
def to_acc_layout(rows, C: gl.constexpr):
    """Converts a number of each row to the layout of the output. Both layouts give a thread the same rows, so no data
    moves."""
    return gl.convert_layout(rows, gl.SliceLayout(1, C.acc))


@gluon.jit
def _operand(p, C: gl.constexpr):
    """Returns probabilities as the left operand of a product. They stay in the same registers."""
    return gl.convert_layout(p, gl.DotOperandLayout(0, C.acc, 2))


@gluon.jit
def left_pair(state, shared, buffers, item, uses, nth, MASK: gl.constexpr, C: gl.constexpr):
    """Computes the left warpgroup's part of a pair of blocks: the scores of the first block, and the left half of the
    output."""
    ROWS: gl.constexpr = gl.SliceLayout(1, C.scores)
    if MASK:
        read = read_segments(item.mask, item.blocks, nth, C)
    scores = _scores_of(shared, item.q_rope, buffers, uses, LEFT, C)
    mask = mask_block(item.mask, read, C) if MASK else 0
    p, rescale, row_max, row_sum = softmax_step(state.row_max, state.row_sum, scores, item.scale, mask, MASK, 0.0)
    shared.max_left.store(row_max)
    barrier_arrive(_BAR_MAX, BOTH_THREADS)
    acc = state.acc * to_acc_layout(rescale, C)[:, None]
    p_own = _operand(p.to(shared.q.dtype), C)
    acc = warpgroup_mma(p_own, half_of(buffers, uses, 0, LEFT, C), acc, is_async=True)  # O += P·V
    barrier_sync(_BAR_RIGHT, BOTH_THREADS)
    last_max = shared.max_right.load(ROWS)
    again = gl.exp2(row_max - last_max)
    shared.p_left.store((p * again[:, None]).to(shared.q.dtype))
    fence_async_shared()
    barrier_arrive(_BAR_LEFT, BOTH_THREADS)
    acc, p_own = warpgroup_mma_wait(0, deps=(acc, p_own))
    part_release(0, LEFT, C)
    acc = acc * to_acc_layout(again, C)[:, None]
    # O += P·V of the other block
    acc = warpgroup_mma(shared.p_right, half_of(buffers, uses, 1, LEFT, C), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    part_release(1, LEFT, C)
    half_release(LEFT, uses, C)
    return State(last_max, row_sum * again, acc)


@gluon.jit
def right_pair(state, shared, buffers, item, uses, nth, MASK: gl.constexpr, C: gl.constexpr):
    """Computes the right warpgroup's part of a pair of blocks: the scores of the second block, and the right half of
    the output."""
    ROWS: gl.constexpr = gl.SliceLayout(1, C.scores)
    if MASK:
        read = read_segments(item.mask, item.blocks, nth + 1, C)
    scores = _scores_of(shared, item.q_rope, buffers, uses, RIGHT, C)
    mask = mask_block(item.mask, read, C) if MASK else 0
    barrier_sync(_BAR_MAX, BOTH_THREADS)
    first_max = shared.max_left.load(ROWS)
    p, _, row_max, new_sum = softmax_step(first_max, state.row_sum * 0, scores, item.scale, mask, MASK, 0.0)
    shared.max_right.store(row_max)
    p_own = p.to(shared.q.dtype)
    shared.p_right.store(p_own)
    fence_async_shared()
    barrier_arrive(_BAR_RIGHT, BOTH_THREADS)
    rescale = gl.exp2(state.row_max - row_max)
    acc = state.acc * to_acc_layout(rescale, C)[:, None]
    p_own = _operand(p_own, C)
    acc = warpgroup_mma(p_own, half_of(buffers, uses, 1, RIGHT, C), acc, is_async=True)  # O += P·V
    barrier_sync(_BAR_LEFT, BOTH_THREADS)
    acc = warpgroup_mma(shared.p_left, half_of(buffers, uses, 0, RIGHT, C), acc, is_async=True)  # O += P·V
    acc, p_own = warpgroup_mma_wait(1, deps=(acc, p_own))
    part_release(1, RIGHT, C)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    part_release(0, RIGHT, C)
    half_release(RIGHT, uses, C)
    return State(row_max, state.row_sum * rescale + new_sum, acc)


@gluon.jit
def left_last(state, shared, buffers, item, uses, C: gl.constexpr):
    """Computes the scores of the last block of an item with an odd number of blocks. Adds the block to the left half of
    the output."""
    read = read_segments(item.mask, item.blocks, item.blocks.count - 1, C)
    scores = _scores_of(shared, item.q_rope, buffers, uses, LEFT, C)
    mask = mask_block(item.mask, read, C)
    p, rescale, row_max, row_sum = softmax_step(state.row_max, state.row_sum, scores, item.scale, mask, True, 0.0)
    p_own = p.to(shared.q.dtype)
    barrier_sync(_BAR_RIGHT, BOTH_THREADS)  # the right warpgroup has read the left probabilities of the pair before
    shared.max_left.store(row_max)
    shared.p_left.store(p_own)
    fence_async_shared()
    barrier_arrive(_BAR_MAX, BOTH_THREADS)
    acc = state.acc * to_acc_layout(rescale, C)[:, None]
    p_own = _operand(p_own, C)
    acc = warpgroup_mma(p_own, half_of(buffers, uses, 0, LEFT, C), acc, is_async=True)  # O += P·V
    acc, p_own = warpgroup_mma_wait(0, deps=(acc, p_own))
    part_release(0, LEFT, C)
    return State(row_max, row_sum, acc)


@gluon.jit
def right_last(state, shared, buffers, uses, C: gl.constexpr):
    """Adds the last block of an item with an odd number of blocks to the right half of the output."""
    barrier_arrive(_BAR_RIGHT, BOTH_THREADS)
    barrier_sync(_BAR_MAX, BOTH_THREADS)
    row_max = shared.max_left.load(gl.SliceLayout(1, C.scores))
    rescale = gl.exp2(state.row_max - row_max)
    acc = state.acc * to_acc_layout(rescale, C)[:, None]
    acc = warpgroup_mma(shared.p_left, half_of(buffers, uses, 0, RIGHT, C), acc, is_async=True)  # O += P·V
    acc = warpgroup_mma_wait(0, deps=(acc,))
    part_release(0, RIGHT, C)
    return State(row_max, state.row_sum * rescale, acc)
