"""Latent attention in row tiles in Triton, for any card: a CTA computes one item for one group of heads at a time.

A block of cached rows is read once, as two tiles: latent columns, which are keys and values, and rope columns, which
are only keys. The rest is as in the portable decode kernel.
"""

from typing import Any, Final, NamedTuple

import triton
import triton.language as tl

from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.bound import BoundLaunches, Grid
from trunkattn.gpu.launch_order import Launch, LaunchOptions
from trunkattn.gpu.layer import Tensors
from trunkattn.gpu.mla import spec
from trunkattn.gpu.portable import arguments
from trunkattn.gpu.portable.decode import load_item, load_segments
from trunkattn.gpu.portable.decode_arguments import DecodeWork, decode_arguments, decode_tile
from trunkattn.gpu.portable.online_softmax import add_values, empty_state, soft_capped, softmax_step
from trunkattn.gpu.portable.tile_io import Rows, load_tile, store_rows
from trunkattn.numerics import padded_head_dim
from trunkattn.planner import work_list

_ITEM_COLUMNS = tl.constexpr(work_list.ITEM_COLUMNS)
_PLACE, _QUERIES = tl.constexpr(work_list.SEGMENT_PLACE), tl.constexpr(work_list.SEGMENT_QUERIES)
_POSITION = tl.constexpr(work_list.SEGMENT_POSITION)


class LatentOperands(NamedTuple):
    """The tensors of a layer, as `gpu.layer.Tensors` describes them. `cache` is the cache of rows."""

    q: Any
    q_rope: Any
    cache: Any
    out: Any
    lse: Any
    partial: Any
    partial_lse: Any


class LatentStrides(NamedTuple):
    """Strides of a layer's tensors in elements. Rows are contiguous."""

    q_token: Any
    q_head: Any
    q_rope_token: Any
    q_rope_head: Any
    out_token: Any
    out_head: Any
    page: Any
    token: Any


class LatentShape(NamedTuple):
    """Constants of an attention. A row has `head_dim_v` latent columns and `rope_dim` others. The fields `padded_*` are
    the widths of their tiles."""

    num_qo_heads: int
    num_kv_heads: int
    group_size: int
    page_size: int
    head_dim_v: int
    rope_dim: int
    padded_dim_v: int
    padded_rope: int


class Queries(NamedTuple):
    """The query rows of a tile: their columns `latent` [M, latent] and `rope` [M, rope], and where each row's query
    stands in the item (`number` [M]) and in its sequence (`position` [M])."""

    latent: Any
    rope: Any
    number: Any
    position: Any


@triton.jit
def _attend_item(
    state,
    query,
    item,
    operands,
    segments,
    modifiers,
    strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Adds the segments of an item, each to the rows of its queries."""
    COUNT: tl.constexpr = TILE.block_n // TILE.segment_size
    PRECISION: tl.constexpr = FEATURES.precision
    n = tl.arange(0, TILE.block_n)
    key_segment, in_segment = n // TILE.segment_size, n % TILE.segment_size
    d, r = tl.arange(0, SHAPE.padded_dim_v)[None, :], tl.arange(0, SHAPE.padded_rope)[None, :]
    scale = tl.load(modifiers.logit_scale)
    for first in tl.range(item.segment_start, item.segment_end, COUNT, num_stages=TILE.stages):
        place = load_segments(segments, first, item.segment_end, key_segment, _PLACE, COUNT)
        packed = load_segments(segments, first, item.segment_end, key_segment, _QUERIES, COUNT)
        inside = in_segment < packed >> 16
        page, token = (place // SHAPE.page_size).to(tl.int64), place % SHAPE.page_size + in_segment
        at = (page * strides.page + token * strides.token)[:, None]
        latent = load_tile(operands.cache, at, d, inside[:, None], SHAPE.head_dim_v, SHAPE.padded_dim_v, True)
        rope = operands.cache + SHAPE.head_dim_v
        rope = load_tile(rope, at, r, inside[:, None], SHAPE.rope_dim, SHAPE.padded_rope, True)
        latent, rope = latent.to(query.latent.dtype), rope.to(query.latent.dtype)
        logits = tl.dot(query.latent, tl.trans(latent), input_precision=PRECISION)  # S = Q·Kᵀ, in two parts
        logits = tl.dot(query.rope, tl.trans(rope), logits, input_precision=PRECISION) * scale
        if FEATURES.soft_cap:
            logits = soft_capped(logits, modifiers.soft_cap)
        first_query, end_query = tl.where(inside, packed & 255, 256), packed >> 8 & 255
        seen = (query.number[:, None] >= first_query[None, :]) & (query.number[:, None] < end_query[None, :])
        if FEATURES.masked:
            key = load_segments(segments, first, item.segment_end, key_segment, _POSITION, COUNT) + in_segment
            key, position = key[None, :], query.position[:, None]
            seen = seen & (key <= position) & (key > position - modifiers.window)
        logits = tl.where(seen, logits, -float("inf"))
        p, state, rescale = softmax_step(state, logits, 1.0, tl.max(logits, 1))
        state = add_values(state, rescale, p, latent, PRECISION)  # O += P·V: the latent is the values, too
    return state


@triton.jit
def _compute_item(
    row,
    group,
    operands,
    work,
    modifiers,
    strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Computes the item at a row of the items, for one group of heads."""
    BLOCK_M: tl.constexpr = TILE.block_m
    GROUP: tl.constexpr = SHAPE.group_size
    item = load_item(row)
    m = tl.arange(0, BLOCK_M)
    number = m // GROUP
    entry = item.query_start + number
    used = (entry < item.query_end) & (number < BLOCK_M // GROUP)
    token = tl.load(work.queries + entry, mask=used, other=0)
    rows = Rows(token, group * GROUP + m % GROUP, used)
    at = (token.to(tl.int64) * strides.q_token + rows.head * strides.q_head)[:, None]
    d, r = tl.arange(0, SHAPE.padded_dim_v)[None, :], tl.arange(0, SHAPE.padded_rope)[None, :]
    latent = load_tile(operands.q, at, d, used[:, None], SHAPE.head_dim_v, SHAPE.padded_dim_v, True)
    at = (token.to(tl.int64) * strides.q_rope_token + rows.head * strides.q_rope_head)[:, None]
    rope = load_tile(operands.q_rope, at, r, used[:, None], SHAPE.rope_dim, SHAPE.padded_rope, True)
    position = number
    if FEATURES.masked:
        position = tl.load(work.positions + token, mask=used, other=0)
    query = Queries(latent, rope, number, position)
    state = empty_state(BLOCK_M, SHAPE.padded_dim_v)
    state = _attend_item(state, query, item, operands, work.segments, modifiers, strides, SHAPE, TILE, FEATURES)
    partial_slot = tl.load(work.partial_slots + entry, mask=used, other=0)
    store_rows(state, rows, partial_slot, operands, strides, modifiers.v_scale, modifiers.sinks, SHAPE, FEATURES)


@triton.jit
def portable_latent_kernel(
    operands: LatentOperands,
    work: DecodeWork,
    modifiers: arguments.Modifiers,
    strides: LatentStrides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    FEATURES: tl.constexpr,
    BUCKETS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes the items of a bucket, which merge nothing. It uses PDL as `decode_kernel` does."""
    if PDL.trigger:
        tl.extra.cuda.gdc_launch_dependents()
    first_item = tl.load(work.counts + BUCKETS.first)
    num_tasks = (tl.load(work.counts + BUCKETS.first + 1) - first_item) * SHAPE.num_kv_heads
    for task in range(tl.program_id(0), num_tasks, tl.num_programs(0)):
        row = work.items + (first_item + task // SHAPE.num_kv_heads) * _ITEM_COLUMNS
        _compute_item(row, task % SHAPE.num_kv_heads, operands, work, modifiers, strides, SHAPE, TILE, FEATURES)
    if PDL.wait and tl.program_id(0) == 0:  # a launch that waits for this one then also waits for those ahead of it
        tl.extra.cuda.gdc_wait()


LAYER: Final = ("operands", "modifiers")  # the arguments that differ from layer to layer


def operands_of(t: Tensors) -> LatentOperands:
    """Returns the tensors of a layer."""
    return LatentOperands(
        q=t.q, q_rope=t.q_rope, cache=t.k_cache, out=t.out, lse=t.lse, partial=t.partial, partial_lse=t.partial_lse
    )


def bind(plan: GpuPlan, t: Tensors, launch: Launch, options: LaunchOptions) -> BoundLaunches:
    """Binds the launch of the items of the launch's bucket, for layers like `t`."""
    geometry, given = plan.geometry, decode_arguments(plan, t, launch, options)
    rope_dim = geometry.head_dim - geometry.head_dim_v
    assert t.q_rope is not None
    tile = plan.tiles[launch.buckets[0]]
    if tile.kernel != spec.PORTABLE:  # it stands in for another kernel, whose lists have segments of up to its block
        tile = spec.portable_tile(tile.block_m, max(32, geometry.segment_size))
    given |= {
        "operands": operands_of(t),
        "strides": LatentStrides(
            *t.q.stride()[:2], *t.q_rope.stride()[:2], *t.out.stride()[:2], *t.k_cache.stride()[:2]
        ),
        "SHAPE": LatentShape(
            num_qo_heads=geometry.num_qo_heads,
            num_kv_heads=geometry.num_kv_heads,
            group_size=geometry.group_size,
            page_size=geometry.page_size,
            head_dim_v=geometry.head_dim_v,
            rope_dim=rope_dim,
            padded_dim_v=padded_head_dim(geometry.head_dim_v),
            padded_rope=padded_head_dim(rope_dim),
        ),
        "TILE": decode_tile(tile, geometry.segment_size),
        "num_warps": tile.warps,
    }

    def of_layer(each: Tensors) -> tuple[LatentOperands, arguments.Modifiers]:
        return operands_of(each), arguments.modifiers(each, geometry)

    return BoundLaunches(portable_latent_kernel, [Grid(launch.num_ctas, given)], LAYER, of_layer)
