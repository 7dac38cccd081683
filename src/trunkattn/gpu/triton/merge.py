"""Merge of a query's partials on a GPU (PAT, §7; RelayAttention, §3.3): a CTA takes one query token and head at a
time."""

from typing import Any, Final, NamedTuple

import triton
import triton.language as tl

from trunkattn.gpu.plan import GpuPlan, Tensors
from trunkattn.gpu.triton.online_softmax import LN_2, NEG_INF, Softmax, add_partials, sink_divisor
from trunkattn.numerics import padded_head_dim

# Partials that are added at once: a block of _FEW for a query with a few partials, blocks of _MANY for one with dozens.
# Rows wider than _NARROW have several warps, in one of which a block of _MANY would spill.
_FEW = tl.constexpr(8)
_MANY = tl.constexpr(32)
_NARROW: Final = 128
_WIDE_WARPS: Final = 4


class MergeOperands(NamedTuple):
    """The tensors of a layer that a merge reads and writes, as `gpu.plan.Tensors` describes them."""

    out: Any
    lse: Any
    partial: Any
    partial_lse: Any


class MergeWork(NamedTuple):
    """Query tokens, and for each the partial slots [first, last) that hold its partials in the order of their tokens.
    counts[COUNT_AT] says how many there are."""

    queries: Any
    ranges: Any
    counts: Any


class OutStrides(NamedTuple):
    """In elements."""

    token: Any
    head: Any


class MergeShape(NamedTuple):
    """Constants of an attention."""

    num_qo_heads: int
    group_size: int
    head_dim_v: int
    padded_dim_v: int


@triton.jit
def _add_block(state, operands, first, last, head, SHAPE: tl.constexpr, COUNT: tl.constexpr):
    """Adds the partials in slots [first, last), at most COUNT of them."""
    dv = tl.arange(0, SHAPE.padded_dim_v)
    slot = first + tl.arange(0, COUNT)
    valid = slot < last
    slot_at = slot.to(tl.int64) * SHAPE.num_qo_heads + head
    lse = tl.load(operands.partial_lse + slot_at, mask=valid, other=NEG_INF)
    mask = valid[:, None] & (dv < SHAPE.head_dim_v)[None, :]
    partials = tl.load(operands.partial + slot_at[:, None] * SHAPE.head_dim_v + dv[None, :], mask=mask, other=0.0)
    return add_partials(state, partials, lse, valid)


@triton.jit
def merge_query(
    task,
    operands,
    work,
    v_scale,
    sinks,
    strides,
    SHAPE: tl.constexpr,
    SINKS: tl.constexpr,
    RETURN_LSE: tl.constexpr,
    PDL_WAIT: tl.constexpr,
):
    """One query token and head."""
    DV: tl.constexpr = SHAPE.padded_dim_v
    number, head = task // SHAPE.num_qo_heads, task % SHAPE.num_qo_heads
    token = tl.load(work.queries + number)
    first, last = tl.load(work.ranges + 2 * number), tl.load(work.ranges + 2 * number + 1)
    if PDL_WAIT:
        tl.extra.cuda.gdc_wait()  # from here on the partials of earlier launches are complete; the plan was before
    state = Softmax(tl.zeros([DV], tl.float32), tl.full((), NEG_INF, tl.float32), tl.full((), 0.0, tl.float32))
    if last - first <= _FEW:
        state = _add_block(state, operands, first, last, head, SHAPE, _FEW)
    else:
        for start in range(first, last, _MANY):
            state = _add_block(state, operands, start, last, head, SHAPE, _MANY)
    lse = state.row_max * LN_2 + tl.log(state.row_sum)  # -inf if no partial saw a key
    result = state.acc / tl.where(state.row_sum > 0, state.row_sum, 1.0) * tl.load(v_scale + head // SHAPE.group_size)
    if SINKS:
        result = result / sink_divisor(tl.load(sinks + head).to(tl.float32), lse)
    dv = tl.arange(0, DV)
    out = operands.out + (token.to(tl.int64) * strides.token + head * strides.head)
    tl.store(out + dv, result.to(operands.out.dtype.element_ty), mask=dv < SHAPE.head_dim_v)
    if RETURN_LSE:
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
    PDL_WAIT: tl.constexpr,
):
    """counts[COUNT_AT] query tokens; PDL_WAIT as in `decode_kernel`."""
    for task in range(tl.program_id(0), tl.load(work.counts + COUNT_AT) * SHAPE.num_qo_heads, tl.num_programs(0)):
        merge_query(task, operands, work, v_scale, sinks, strides, SHAPE, SINKS, RETURN_LSE, PDL_WAIT)
    if PDL_WAIT and tl.program_id(0) == 0:  # if nothing is to be merged, too: what waits for this waits for those ahead
        tl.extra.cuda.gdc_wait()


def launch_arguments(plan: GpuPlan, t: Tensors, count_at: int, return_lse: bool) -> dict[str, Any]:
    """The arguments of `merge_kernel` but PDL_WAIT."""
    arrays, geometry = plan.arrays, plan.geometry
    return {
        "operands": MergeOperands(t.out, t.lse, t.partial, t.partial_lse),
        "work": MergeWork(arrays["merge_queries"], arrays["merge_ranges"], arrays["counts"]),
        "v_scale": t.v_scale,
        "sinks": t.sinks,
        "strides": OutStrides(*t.out.stride()[:2]),
        "COUNT_AT": count_at,
        "SHAPE": merge_shape(geometry.num_qo_heads, geometry.num_kv_heads, geometry.head_dim_v),
        "SINKS": geometry.sinks,
        "RETURN_LSE": return_lse,
        "num_warps": merge_warps(geometry.head_dim_v),
    }


LAYER: Final = ("operands", "v_scale", "sinks")  # the arguments that differ from layer to layer


def of_layer(t: Tensors) -> tuple[Any, ...]:
    """The arguments `LAYER`."""
    return MergeOperands(t.out, t.lse, t.partial, t.partial_lse), t.v_scale, t.sinks


def merge_warps(head_dim_v: int) -> int:
    """Of a CTA."""
    return 1 if padded_head_dim(head_dim_v) <= _NARROW else _WIDE_WARPS


def merge_shape(num_qo_heads: int, num_kv_heads: int, head_dim_v: int) -> MergeShape:
    """The constants of an attention."""
    return MergeShape(num_qo_heads, num_qo_heads // num_kv_heads, head_dim_v, padded_head_dim(head_dim_v))
