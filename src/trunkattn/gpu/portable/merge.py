"""Merge of a query's partials on a GPU (PAT, §7; RelayAttention, §3.3).

A task is one head of a query token. Where there are many, and the merge need not be batch invariant, it is several
heads: they share the reads of the plan, and their partials are on the way together. Where there are few, it is a slice
of a head's dims: more CTAs read a query's partials then, and each has more of them on the way.
"""

from typing import Any, Final, NamedTuple

import triton
import triton.language as tl

from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.bound import BoundLaunches, Grid
from trunkattn.gpu.launch_order import Launch, LaunchOptions
from trunkattn.gpu.layer import Tensors
from trunkattn.gpu.portable import arguments
from trunkattn.gpu.portable.online_softmax import LN_2, NEG_INF, Softmax, add_partials, empty_state, sink_divisor
from trunkattn.gpu.tiles import MergeTile
from trunkattn.numerics import padded_head_dim

# Partials that a task adds at once. A task of one head adds a block of _FEW if that is enough, otherwise blocks of
# _MANY. A task of several heads adds _OF_SEVERAL of each. A task of a slice of a head uses blocks of half the size:
# full blocks would cost the kernel more registers, even where nothing is sliced.
_FEW = tl.constexpr(8)
_MANY = tl.constexpr(32)
_OF_SEVERAL = tl.constexpr(2)


class MergeOperands(NamedTuple):
    """The tensors of a layer that a merge reads and writes, as `gpu.layer.Tensors` describes them."""

    out: Any
    lse: Any
    partial: Any
    partial_lse: Any


class MergeWork(NamedTuple):
    """The query tokens to merge, and for each the partial slots [first, last), in the order of their tokens.
    counts[COUNT_AT] is the number of query tokens."""

    queries: Any
    ranges: Any
    counts: Any


class OutStrides(NamedTuple):
    """Strides of the output, in elements."""

    token: Any
    head: Any


class MergeShape(NamedTuple):
    """Constants of an attention. `several`, `slices` and `sliced_up_to` are the fields `heads`, `slices` and
    `sliced_up_to` of `MergeTile`."""

    num_qo_heads: int
    group_size: int
    head_dim_v: int
    padded_dim_v: int
    several: int
    slices: int
    sliced_up_to: int


@triton.jit
def _add_block(state, operands, first, last, head, dv, SHAPE: tl.constexpr, COUNT: tl.constexpr):
    """Adds dims `dv` of the partials in slots [first, last), which are at most COUNT. `head` is one head, or several
    [H]."""
    slot = first + tl.arange(0, COUNT)
    slot_at = slot.to(tl.int64) * SHAPE.num_qo_heads + tl.expand_dims(head, len(head.shape))
    valid, slot_at = tl.broadcast(slot < last, slot_at)
    lse = tl.load(operands.partial_lse + slot_at, mask=valid, other=-float("inf"))
    LAST: tl.constexpr = len(slot_at.shape)
    mask = tl.expand_dims(valid, LAST) & (dv < SHAPE.head_dim_v)
    at = tl.expand_dims(slot_at, LAST) * SHAPE.head_dim_v + dv
    partials = tl.load(operands.partial + at, mask=mask, other=0.0)
    return add_partials(state, partials, lse, valid)


@triton.jit
def _merge_heads(
    task,
    operands,
    work,
    v_scale,
    sinks,
    strides,
    SHAPE: tl.constexpr,
    HEADS: tl.constexpr,
    SLICES: tl.constexpr,
    SINKS: tl.constexpr,
    RETURN_LSE: tl.constexpr,
    PDL_WAIT: tl.constexpr,
):
    """Merges HEADS heads of one query token, or one of SLICES slices of a head. One head is a row without an axis of
    heads, because that takes half the registers."""
    DV: tl.constexpr = SHAPE.padded_dim_v // SLICES
    GROUPS: tl.constexpr = SHAPE.num_qo_heads // HEADS
    dv = tl.arange(0, DV)
    if SLICES > 1:
        dv += task % SLICES * DV
        task = task // SLICES
    number, head = task // GROUPS, tl.full((), task % GROUPS * HEADS, tl.int32)
    token = tl.load(work.queries + number)
    first, last = tl.load(work.ranges + 2 * number), tl.load(work.ranges + 2 * number + 1)
    if PDL_WAIT:
        tl.extra.cuda.gdc_wait()  # from here on the partials of earlier launches are complete; the plan was before
    if HEADS > 1:
        head += tl.arange(0, HEADS)
        state = empty_state(HEADS, DV)
        for start in range(first, last, _OF_SEVERAL):
            state = _add_block(state, operands, start, last, head, dv, SHAPE, _OF_SEVERAL)
    else:
        state = Softmax(tl.zeros([DV], tl.float32), tl.full((), NEG_INF, tl.float32), tl.full((), 0.0, tl.float32))
        FEW: tl.constexpr = _FEW * SLICES
        MANY: tl.constexpr = _MANY // 2 * SLICES if SLICES > 1 else _MANY
        if last - first <= FEW:
            state = _add_block(state, operands, first, last, head, dv, SHAPE, FEW)
        else:
            for start in range(first, last, MANY):
                state = _add_block(state, operands, start, last, head, dv, SHAPE, MANY)
    AXIS: tl.constexpr = len(head.shape)
    lse = state.row_max * LN_2 + tl.log(state.row_sum)  # -inf if no partial saw a key
    divisor = tl.where(state.row_sum == 0, 1.0, state.row_sum)
    scale = tl.load(v_scale + head // SHAPE.group_size)
    if SINKS:
        divisor *= sink_divisor(tl.load(sinks + head).to(tl.float32), lse)
    result = state.acc * tl.expand_dims(scale / divisor, AXIS)
    at = token.to(tl.int64) * strides.token + tl.expand_dims(head * strides.head, AXIS) + dv
    mask, at = tl.broadcast(dv < SHAPE.head_dim_v, at)
    tl.store(operands.out + at, result.to(operands.out.dtype.element_ty), mask=mask)
    if RETURN_LSE:  # each slice finds the same
        tl.store(operands.lse + token * SHAPE.num_qo_heads + head, lse)


@triton.jit
def merge_kernel(
    operands: MergeOperands,
    work: MergeWork,
    v_scale,
    sinks,
    strides: OutStrides,
    COUNT_AT: tl.constexpr,
    SHAPE: tl.constexpr,
    SINKS: tl.constexpr,
    RETURN_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Merges counts[COUNT_AT] query tokens. PDL means what it means in `decode_kernel`."""
    first, step = tl.program_id(0), tl.num_programs(0)
    num_heads = tl.load(work.counts + COUNT_AT) * SHAPE.num_qo_heads
    whole = num_heads  # heads that are a task each
    if SHAPE.several > 1:
        whole = tl.where(2 * (num_heads // SHAPE.several) > step, 0, num_heads)
        for task in range(first, (num_heads - whole) // SHAPE.several, step):
            _merge_heads(
                task, operands, work, v_scale, sinks, strides, SHAPE, SHAPE.several, 1, SINKS, RETURN_LSE, PDL.wait
            )
    if SHAPE.slices > 1:
        sliced = tl.where(num_heads <= SHAPE.sliced_up_to, whole, 0)
        whole -= sliced
        for task in range(first, sliced * SHAPE.slices, step):
            _merge_heads(
                task, operands, work, v_scale, sinks, strides, SHAPE, 1, SHAPE.slices, SINKS, RETURN_LSE, PDL.wait
            )
    for task in range(first, whole, step):
        _merge_heads(task, operands, work, v_scale, sinks, strides, SHAPE, 1, 1, SINKS, RETURN_LSE, PDL.wait)
    if PDL.wait and tl.program_id(0) == 0:  # if nothing is to be merged, too: what waits for this waits for those ahead
        tl.extra.cuda.gdc_wait()


def bind(plan: GpuPlan, t: Tensors, launch: Launch, options: LaunchOptions) -> BoundLaunches:
    """Returns the launch of the merges that no item does, for layers like `t`."""
    return BoundLaunches(merge_kernel, [Grid(launch.num_ctas, launch_arguments(plan, t, options))], LAYER, of_layer)


def launch_arguments(plan: GpuPlan, t: Tensors, options: LaunchOptions) -> dict[str, Any]:
    """Returns the arguments of `merge_kernel`, and how it is compiled and launched."""
    arrays, geometry, tile = plan.arrays, plan.geometry, plan.merge_tile
    return {
        "operands": MergeOperands(t.out, t.lse, t.partial, t.partial_lse),
        "work": MergeWork(arrays["merge_queries"], arrays["merge_ranges"], arrays["counts"]),
        "v_scale": t.v_scale,
        "sinks": t.sinks,
        "strides": OutStrides(*t.out.stride()[:2]),
        "COUNT_AT": 2 * len(plan.tiles) + 1,
        "SHAPE": merge_shape(geometry.num_qo_heads, geometry.num_kv_heads, geometry.head_dim_v, tile),
        "SINKS": geometry.sinks,
        "RETURN_LSE": options.return_lse,
        "num_warps": tile.warps,
        **arguments.pdl(options),
    }


LAYER: Final = ("operands", "v_scale", "sinks")  # the arguments that differ from layer to layer


def of_layer(t: Tensors) -> tuple[Any, ...]:
    """Returns the arguments `LAYER`."""
    return MergeOperands(t.out, t.lse, t.partial, t.partial_lse), t.v_scale, t.sinks


def merge_shape(num_qo_heads: int, num_kv_heads: int, head_dim_v: int, tile: MergeTile) -> MergeShape:
    """Returns the constants of an attention."""
    group_size = num_qo_heads // num_kv_heads
    return MergeShape(
        num_qo_heads=num_qo_heads,
        group_size=group_size,
        head_dim_v=head_dim_v,
        padded_dim_v=padded_head_dim(head_dim_v),
        several=tile.heads,
        slices=tile.slices,
        sliced_up_to=tile.sliced_up_to,
    )
