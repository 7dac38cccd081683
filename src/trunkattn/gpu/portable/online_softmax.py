"""The online softmax of the Triton kernels (FlashAttention-2, §3.1; https://arxiv.org/abs/2307.08691).

A row of a tile holds three things of the keys that it has seen: the largest logit `row_max`, the sum `row_sum` of
p = 2^(logit - row_max), and `acc`, the sum of p · value. A block with a larger logit first multiplies the old sums by
2^(old maximum - new maximum). At the end the output is acc / row_sum and lse is ln(row_sum) + row_max · ln(2).

A partial is the output and the lse of a part of a row's keys. As a state it has row_sum 1 and row_max lse · log2(e).
Logits are in base 2 everywhere: they include log2(e).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trunkattn import numerics

LOG2_E = tl.constexpr(numerics.LOG2_E)
LN_2 = tl.constexpr(numerics.LN_2)
NEG_INF = tl.constexpr(numerics.NEG_INF)


class Softmax(NamedTuple):
    """The state of rows. `acc` is [..., M, D], and `row_max` and `row_sum` are [..., M], all in float32."""

    acc: Any
    row_max: Any
    row_sum: Any


@triton.jit
def empty_state(BLOCK_M: tl.constexpr, DIM: tl.constexpr):
    """Returns the state of rows that have seen no key."""
    acc = tl.zeros([BLOCK_M, DIM], tl.float32)
    return Softmax(acc, tl.full([BLOCK_M], NEG_INF, tl.float32), tl.zeros([BLOCK_M], tl.float32))


@triton.jit
def softmax_step(state, scores, scale, block_max):
    """Returns p of a block of keys, the state with its maximum and its sum of p, and what `add_values` multiplies acc
    by.

    The logits are scores · scale. They are multiplied here, so that scaling and subtraction are one instruction.
    `block_max` is the largest logit of each row.
    """
    row_max = tl.maximum(state.row_max, block_max)
    p = tl.exp2(scores * scale - tl.expand_dims(row_max, len(scores.shape) - 1))
    rescale = tl.exp2(state.row_max - row_max)
    row_sum = state.row_sum * rescale + tl.sum(p, len(scores.shape) - 1)
    return p, Softmax(state.acc, row_max, row_sum), rescale


@triton.jit
def add_values(state, rescale, p, values, PRECISION: tl.constexpr):
    """Rescales acc and adds p · values, in the dtype of the values."""
    AXIS: tl.constexpr = len(p.shape) - 1
    # O += P·V
    acc = tl.dot(p.to(values.dtype), values, state.acc * tl.expand_dims(rescale, AXIS), input_precision=PRECISION)
    return Softmax(acc, state.row_max, state.row_sum)


@triton.jit
def add_partial(state, partial, lse, valid):
    """Adds one partial to each row. `partial` is [M, D], and `lse` and `valid` are [M]. Nothing is added where a
    partial is not valid."""
    partial_max = lse * LOG2_E
    row_max = tl.maximum(state.row_max, partial_max)
    rescale, weight = tl.exp2(state.row_max - row_max), tl.where(valid, tl.exp2(partial_max - row_max), 0.0)
    row_sum = state.row_sum * rescale + weight
    return Softmax(state.acc * rescale[:, None] + partial * weight[:, None], row_max, row_sum)


@triton.jit
def add_partials(state, partials, lse, valid):
    """Adds several partials to each row. `state.acc` is [..., D], `partials` are [..., N, D], and `lse` and `valid` are
    [..., N]."""
    AXIS: tl.constexpr = len(lse.shape) - 1
    partial_max = lse * LOG2_E
    row_max = tl.maximum(state.row_max, tl.max(partial_max, AXIS))
    weights = tl.where(valid, tl.exp2(partial_max - tl.expand_dims(row_max, AXIS)), 0.0)
    rescale = tl.exp2(state.row_max - row_max)
    added = tl.sum(partials * tl.expand_dims(weights, AXIS + 1), AXIS)
    acc = state.acc * tl.expand_dims(rescale, AXIS) + added
    return Softmax(acc, row_max, state.row_sum * rescale + tl.sum(weights, AXIS))


@triton.jit
def output_of(state):
    """Returns the output of each row, which is 0 for a row that has seen no key."""
    return state.acc / tl.where(state.row_sum == 0, 1.0, state.row_sum)[:, None]


@triton.jit
def lse_of(state):
    """Returns the lse of each row, which is -inf for a row that has seen no key, and NaN for one whose sum is NaN."""
    row_sum = tl.where(state.row_sum == 0, 1.0, state.row_sum)
    return tl.where(state.row_sum == 0, -float("inf"), state.row_max * LN_2 + tl.log(row_sum))


@triton.jit
def sink_divisor(sink, lse):
    """Returns what an attention sink divides an output by: it is one more logit, without a value."""
    return 1.0 + tl.exp2((sink - lse) * LOG2_E)


@triton.jit
def soft_capped(logits, soft_cap):
    """Returns soft_cap · tanh(logits / soft_cap) in base 2, for logits in base e."""
    return (2.0 / (1.0 + tl.exp2(logits * (-2.0 * LOG2_E / soft_cap))) - 1.0) * (soft_cap * LOG2_E)
