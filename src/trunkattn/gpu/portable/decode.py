"""Packed attention on a GPU (PAT, §5.2 to §7): a CTA computes one item of a tile list for one KV head at a time.

The rows of a CTA's tile are (query token, head of the group) pairs. It streams the item's segments of KV, each a few
tokens of one page, with an online softmax (FlashAttention). Segments that all rows see come first and need no mask. Of
the others each row sees those of its own request: the mask is block-diagonal. A row whose KV is split leaves a partial.
An item that merges adds the partials of earlier launches to its own state and writes the final output, so that leaves
of the forest need no merge launch.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.bound import BoundLaunches, Grid
from trunkattn.gpu.launch_order import Launch, LaunchOptions
from trunkattn.gpu.layer import Tensors
from trunkattn.gpu.portable import arguments
from trunkattn.gpu.portable.arguments import Modifiers, Operands, Strides
from trunkattn.gpu.portable.decode_arguments import DecodeWork, decode_arguments
from trunkattn.gpu.portable.online_softmax import (
    Softmax,
    add_partial,
    add_values,
    empty_state,
    soft_capped,
    softmax_step,
)
from trunkattn.gpu.portable.tile_io import (
    HeadCache,
    Rows,
    load_block,
    load_in_halves,
    load_masked_block,
    load_queries,
    store_rows,
)
from trunkattn.planner import work_list

_ITEM_COLUMNS = tl.constexpr(work_list.ITEM_COLUMNS)
_SEGMENT_START, _SHARED_END = tl.constexpr(work_list.SEGMENT_START), tl.constexpr(work_list.SEGMENT_SHARED_END)
_SEGMENT_END = tl.constexpr(work_list.SEGMENT_END)
_QUERY_START, _QUERY_END = tl.constexpr(work_list.QUERY_START), tl.constexpr(work_list.QUERY_END)
_PLACE, _QUERIES = tl.constexpr(work_list.SEGMENT_PLACE), tl.constexpr(work_list.SEGMENT_QUERIES)
_POSITION, _SEGMENT_COLUMNS = tl.constexpr(work_list.SEGMENT_POSITION), tl.constexpr(work_list.SEGMENT_COLUMNS)


class Item(NamedTuple):
    """An item reads segments [segment_start, segment_end) for queries [query_start, query_end) of the work list. The
    segments before shared_end are full, and all queries of the item see them."""

    segment_start: Any
    shared_end: Any
    segment_end: Any
    query_start: Any
    query_end: Any


class Query(NamedTuple):
    """The query rows of a tile [..., M, D], and how their logits are made. `number` and `position` [..., M] are the
    places of each row's query in the item and in its sequence."""

    tile: Any
    number: Any
    position: Any
    scale: Any
    soft_cap: Any
    window: Any


class KeyPlaces(NamedTuple):
    """The places of the keys [..., N] of a block. For each key they are the segment of the block that holds it, and its
    place in that segment."""

    segment: Any
    offset: Any


@triton.jit
def load_item(row):
    """Loads an item. `row` points to its row."""
    return Item(
        segment_start=tl.load(row + _SEGMENT_START),
        shared_end=tl.load(row + _SHARED_END),
        segment_end=tl.load(row + _SEGMENT_END),
        query_start=tl.load(row + _QUERY_START),
        query_end=tl.load(row + _QUERY_END),
    )


@triton.jit
def _load_listed(segments, number, end, COLUMN: tl.constexpr):
    """Loads a column of the segment list. It is 0 from segment `end` on."""
    return load_in_halves(segments + number * _SEGMENT_COLUMNS + COLUMN, number < end)


@triton.jit
def load_segments(segments, first, end, key_segment, COLUMN: tl.constexpr, COUNT: tl.constexpr):
    """Loads a column of the segment list for each key of a block of COUNT segments from `first` on. Few segments are
    loaded as scalars, because a thread then keeps one address for each."""
    if COUNT > 4:
        return _load_listed(segments, first + key_segment, end, COLUMN)
    value = tl.zeros_like(key_segment)
    for i in tl.static_range(COUNT):
        value = tl.where(key_segment == i, _load_listed(segments, first + i, end, COLUMN), value)
    return value


@triton.jit
def attend(state, query, keys, values, seen, MASK: tl.constexpr, FEATURES: tl.constexpr):
    """Adds a block of keys to the state. Under MASK it adds only those that are `seen`."""
    PRECISION: tl.constexpr = FEATURES.precision
    logits = tl.dot(query.tile, keys, input_precision=PRECISION) * query.scale  # S = Q·Kᵀ
    if FEATURES.soft_cap:
        logits = soft_capped(logits, query.soft_cap)
    if MASK:
        logits = tl.where(seen, logits, -float("inf"))
    p, state, rescale = softmax_step(state, logits, 1.0, tl.max(logits, len(logits.shape) - 1))
    return add_values(state, rescale, p, values, PRECISION)


@triton.jit
def attend_shared(state, query, item, cache, segments, SHAPE: tl.constexpr, TILE: tl.constexpr, FEATURES: tl.constexpr):
    """Adds the segments that all rows see."""
    COUNT: tl.constexpr = TILE.block_n // TILE.segment_size
    n = tl.arange(0, TILE.block_n)
    key_segment = n // TILE.segment_size
    place = load_segments(segments, item.segment_start, item.segment_end, key_segment, _PLACE, COUNT)
    for first in tl.range(item.segment_start, item.shared_end, COUNT, num_stages=TILE.stages):
        page, offset = (place // SHAPE.page_size).to(tl.int64), place % SHAPE.page_size + n % TILE.segment_size
        keys, values = load_block(cache, page, offset, query.tile, SHAPE)
        state = attend(state, query, keys, values, True, False, FEATURES)
        place = load_segments(segments, first + COUNT, item.segment_end, key_segment, _PLACE, COUNT)
    return state


@triton.jit
def attend_masked(
    state,
    query,
    item,
    cache,
    segments,
    places,
    SHAPE: tl.constexpr,
    FEATURES: tl.constexpr,
    COUNT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Adds the other segments, COUNT of them at a time, each to the rows of its queries."""
    M: tl.constexpr = len(query.tile.shape) - 1  # axes to insert, so that a mask lies along the keys
    N: tl.constexpr = len(query.tile.shape) - 2
    begin, end = item.shared_end, item.segment_end
    place = load_segments(segments, begin, end, places.segment, _PLACE, COUNT)
    packed = load_segments(segments, begin, end, places.segment, _QUERIES, COUNT)
    for first in tl.range(begin, end, COUNT, num_stages=STAGES):
        inside = places.offset < packed >> 16
        page, offset = (place // SHAPE.page_size).to(tl.int64), place % SHAPE.page_size + places.offset
        keys, values = load_masked_block(cache, page, offset, inside, query.tile, SHAPE)
        first_query, end_query = tl.where(inside, packed & 255, 256), packed >> 8 & 255
        number = tl.expand_dims(query.number, M)
        seen = (number >= tl.expand_dims(first_query, N)) & (number < tl.expand_dims(end_query, N))
        if FEATURES.masked:
            key_position = load_segments(segments, first, end, places.segment, _POSITION, COUNT) + places.offset
            key_position, position = tl.expand_dims(key_position, N), tl.expand_dims(query.position, M)
            seen = seen & (key_position <= position) & (key_position > position - query.window)
        keys, values = keys.to(query.tile.dtype), values.to(query.tile.dtype)
        state = attend(state, query, keys, values, seen, True, FEATURES)
        place = load_segments(segments, first + COUNT, end, places.segment, _PLACE, COUNT)
        packed = load_segments(segments, first + COUNT, end, places.segment, _QUERIES, COUNT)
    return state


@triton.jit
def attend_private(
    state, query, item, cache, segments, SHAPE: tl.constexpr, TILE: tl.constexpr, FEATURES: tl.constexpr
):
    """Adds the segments that not all rows see. Subtiles are a batch of smaller products, each with keys of its own."""
    BLOCK_M: tl.constexpr = TILE.block_m
    SUBTILES: tl.constexpr = TILE.subtiles
    ROWS: tl.constexpr = TILE.block_m // TILE.subtiles
    D: tl.constexpr = SHAPE.padded_dim
    DV: tl.constexpr = SHAPE.padded_dim_v
    if SUBTILES == 1:
        COUNT: tl.constexpr = TILE.block_n // TILE.segment_size
        n = tl.arange(0, TILE.block_n)
        places = KeyPlaces(n // TILE.segment_size, n % TILE.segment_size)
        return attend_masked(state, query, item, cache, segments, places, SHAPE, FEATURES, COUNT, TILE.stages)
    else:
        EACH: tl.constexpr = TILE.private_n // TILE.segment_size  # segments of a subtile
        subtile, n = tl.arange(0, SUBTILES), tl.arange(0, TILE.private_n)
        state = Softmax(
            tl.reshape(state.acc, (SUBTILES, ROWS, DV)),
            tl.reshape(state.row_max, (SUBTILES, ROWS)),
            tl.reshape(state.row_sum, (SUBTILES, ROWS)),
        )
        query = Query(
            tile=tl.reshape(query.tile, (SUBTILES, ROWS, D)),
            number=tl.reshape(query.number, (SUBTILES, ROWS)),
            position=tl.reshape(query.position, (SUBTILES, ROWS)),
            scale=query.scale,
            soft_cap=query.soft_cap,
            window=query.window,
        )
        places = KeyPlaces(
            subtile[:, None] * EACH + (n // TILE.segment_size)[None, :],
            (n % TILE.segment_size)[None, :] + tl.zeros_like(subtile)[:, None],
        )
        state = attend_masked(state, query, item, cache, segments, places, SHAPE, FEATURES, SUBTILES * EACH, 2)
        return Softmax(
            tl.reshape(state.acc, (BLOCK_M, DV)),
            tl.reshape(state.row_max, (BLOCK_M,)),
            tl.reshape(state.row_sum, (BLOCK_M,)),
        )


@triton.jit
def merge_earlier(state, rows, first, last, operands, SHAPE: tl.constexpr):
    """Adds to each row the partials in slots [first, last), in their order."""
    dv = tl.arange(0, SHAPE.padded_dim_v)
    for i in range(0, tl.max(last - first, 0)):
        valid = rows.used & (first + i < last)
        slot_at = (first + i).to(tl.int64) * SHAPE.num_qo_heads + rows.head
        lse = tl.load(operands.partial_lse + slot_at, mask=valid, other=-float("inf"))
        mask = valid[:, None] & (dv < SHAPE.head_dim_v)[None, :]
        partial = tl.load(operands.partial + slot_at[:, None] * SHAPE.head_dim_v + dv[None, :], mask=mask, other=0.0)
        state = add_partial(state, partial, lse, valid)
    return state


@triton.jit
def compute_item(
    row,
    kv_head,
    operands,
    work,
    modifiers,
    strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    FEATURES: tl.constexpr,
    MERGE: tl.constexpr,
    PDL_WAIT: tl.constexpr,
):
    """Computes the item at a row of the items, for one KV head."""
    BLOCK_M: tl.constexpr = TILE.block_m
    GROUP: tl.constexpr = SHAPE.group_size
    ROWS: tl.constexpr = TILE.block_m // TILE.subtiles  # of a subtile, which holds whole groups
    QUERIES: tl.constexpr = ROWS // GROUP
    item = load_item(row)
    m = tl.arange(0, BLOCK_M)
    number = m // ROWS * QUERIES + m % ROWS // GROUP
    entry = item.query_start + number
    used = (entry < item.query_end) & (m % ROWS < QUERIES * GROUP)
    token = tl.load(work.queries + entry, mask=used, other=0)
    rows = Rows(token, kv_head * GROUP + m % ROWS % GROUP, used)
    tile = load_queries(operands, strides, rows, SHAPE)
    scale = tl.load(modifiers.logit_scale + kv_head)
    head = tl.cast(kv_head, tl.int64)  # heads may lie far apart
    k, v = operands.k_cache + head * strides.k_head, operands.v_cache + head * strides.v_head
    cache = HeadCache(
        k=k, v=v, k_page=strides.k_page, k_token=strides.k_token, v_page=strides.v_page, v_token=strides.v_token
    )
    position = number
    if FEATURES.masked:
        position = tl.load(work.positions + token, mask=used, other=0)
    query = Query(
        tile=tile, number=number, position=position, scale=scale, soft_cap=modifiers.soft_cap, window=modifiers.window
    )
    state = empty_state(BLOCK_M, SHAPE.padded_dim_v)
    state = attend_shared(state, query, item, cache, work.segments, SHAPE, TILE, FEATURES)
    state = attend_private(state, query, item, cache, work.segments, SHAPE, TILE, FEATURES)
    if MERGE:
        if PDL_WAIT:
            tl.extra.cuda.gdc_wait()  # from here on the partials of earlier launches are complete
        first = tl.load(work.merge_slots + 2 * entry, mask=used, other=0)
        last = tl.load(work.merge_slots + 2 * entry + 1, mask=used, other=0)
        state = merge_earlier(state, rows, first, last, operands, SHAPE)
    partial_slot = tl.load(work.partial_slots + entry, mask=used, other=0)
    v_scale = modifiers.v_scale + kv_head
    store_rows(state, rows, partial_slot, operands, strides, v_scale, modifiers.sinks, SHAPE, FEATURES)


@triton.jit
def decode_kernel(
    operands: Operands,
    work: DecodeWork,
    modifiers: Modifiers,
    strides: Strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    FEATURES: tl.constexpr,
    BUCKETS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes the items of one or two buckets (`TileList.counts`). With `PDL.trigger` the next launch may start now.
    With `PDL.wait` this launch starts before the one ahead of it ends, and waits for it before it reads its
    partials."""
    if PDL.trigger:
        tl.extra.cuda.gdc_launch_dependents()
    first_item = tl.load(work.counts + BUCKETS.first)
    num_items = tl.load(work.counts + BUCKETS.first + 1) - first_item
    second_item, num_second = first_item, 0
    if BUCKETS.second >= 0:
        second_item = tl.load(work.counts + BUCKETS.second) - num_items
        num_second = tl.load(work.counts + BUCKETS.second + 1) - second_item - num_items
    first_task = tl.program_id(0) * BUCKETS.stride % tl.num_programs(0)
    for task in range(first_task, (num_items + num_second) * SHAPE.num_kv_heads, tl.num_programs(0)):
        number = task // SHAPE.num_kv_heads
        row = work.items + (number + tl.where(number < num_items, first_item, second_item)) * _ITEM_COLUMNS
        compute_item(
            row,
            task % SHAPE.num_kv_heads,
            operands,
            work,
            modifiers,
            strides,
            SHAPE,
            TILE,
            FEATURES,
            BUCKETS.merge,
            PDL.wait,
        )
    if PDL.wait and tl.program_id(0) == 0:  # a launch that waits for this one then also waits for those ahead of it
        tl.extra.cuda.gdc_wait()


def bind(plan: GpuPlan, t: Tensors, launch: Launch, options: LaunchOptions) -> BoundLaunches:
    """Returns the launch of the items of the launch's buckets, for layers like `t`."""
    given = decode_arguments(plan, t, launch, options)
    grids, of_layer = [Grid(launch.num_ctas, given)], arguments.of_layer(plan.geometry)
    return BoundLaunches(decode_kernel, grids, arguments.LAYER, of_layer)
