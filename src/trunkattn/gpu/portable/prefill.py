"""FlashAttention for prompt chunks over the paged cache (FlashAttention, §3.1; RelayAttention, §3.2: shared prefixes).

A CTA computes one item of a work list for one KV head at a time. The rows of its tile are (query token, head of the
group) pairs. It streams the item's range of KV with an online softmax and finds pages in the block table. Blocks of
keys that all rows see need no mask and come first. The masked ones follow: the edge of a window, the diagonal, and the
end of the range.
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
from trunkattn.gpu.portable.online_softmax import add_values, empty_state, soft_capped, softmax_step
from trunkattn.gpu.portable.tile_io import (
    HeadCache,
    Rows,
    load_block,
    load_in_halves,
    load_masked_block,
    load_queries,
    store_rows,
)
from trunkattn.gpu.tiles import PrefillTile
from trunkattn.planner import work_list

_ITEM_COLUMNS = tl.constexpr(work_list.ITEM_COLUMNS)
_KV_ROW, _KV_START, _KV_END = (
    tl.constexpr(work_list.KV_ROW),
    tl.constexpr(work_list.KV_START),
    tl.constexpr(work_list.KV_END),
)
_QUERY_START, _QUERY_END = tl.constexpr(work_list.QUERY_START), tl.constexpr(work_list.QUERY_END)


class PrefillWork(NamedTuple):
    """The arrays of a `ChunkList` on the device, their number of items, and the position of each query token in its
    sequence."""

    items: Any
    count: Any
    block_table: Any
    queries: Any
    partial_slots: Any
    positions: Any


class PrefillTileShape(NamedTuple):
    """Constants of a tile of `block_m` rows and `block_n` keys. One page id is read for `segment_size` tokens, and
    `stages` blocks are in flight."""

    block_m: int
    block_n: int
    segment_size: int
    stages: int


class ChunkItem(NamedTuple):
    """An item reads tokens [kv_start, kv_end) of a row of the block table for queries [query_start, query_end)."""

    kv_row: Any
    kv_start: Any
    kv_end: Any
    query_start: Any
    query_end: Any


class PageRow(NamedTuple):
    """A row of the block table, and how many of its columns an item reads."""

    pages: Any
    columns: Any


class KeyBlocks(NamedTuple):
    """An item's blocks of keys, which begin at token `start`. A window masks the first `leading` blocks, all rows see
    the `full` blocks that follow, and the rest are masked. There are `count` blocks in all."""

    start: Any
    leading: Any
    full: Any
    count: Any


@triton.jit
def load_item(row):
    """Loads an item. `row` points to its row."""
    return ChunkItem(
        kv_row=tl.load(row + _KV_ROW),
        kv_start=tl.load(row + _KV_START),
        kv_end=tl.load(row + _KV_END),
        query_start=tl.load(row + _QUERY_START),
        query_end=tl.load(row + _QUERY_END),
    )


@triton.jit
def load_pages(row, first, n, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Loads the page of each key [N] of the block at token `first`. Few segments are looked up as scalars, because a
    thread then keeps one address for each."""
    COUNT: tl.constexpr = TILE.block_n // TILE.segment_size
    if COUNT > 4:
        column = (first + n // TILE.segment_size * TILE.segment_size) // SHAPE.page_size
        return load_in_halves(row.pages + column, column < row.columns)
    page = tl.zeros_like(n)
    for i in tl.static_range(COUNT):
        column = (first + i * TILE.segment_size) // SHAPE.page_size
        page = tl.where(n // TILE.segment_size == i, load_in_halves(row.pages + column, column < row.columns), page)
    return page


@triton.jit
def offset_in_page(first, n, SHAPE: tl.constexpr, TILE: tl.constexpr):
    """Returns the place in its page of each key of a block, which begins at a multiple of a segment."""
    if TILE.segment_size == SHAPE.page_size:
        return n % TILE.segment_size
    return (first + n // TILE.segment_size * TILE.segment_size) % SHAPE.page_size + n % TILE.segment_size


@triton.jit
def key_blocks(item, position, used, window, TILE: tl.constexpr):
    """Finds which blocks need a mask, from the positions of the rows."""
    BLOCK_N: tl.constexpr = TILE.block_n
    start = item.kv_start // TILE.segment_size * TILE.segment_size
    lowest, highest = tl.min(tl.where(used, position, item.kv_end), 0), tl.max(position, 0)
    leading = (tl.maximum(item.kv_start, highest - window + 1) - start + BLOCK_N - 1) // BLOCK_N
    full = tl.maximum(tl.minimum(item.kv_end, lowest + 1) - start - leading * BLOCK_N, 0) // BLOCK_N
    return KeyBlocks(start, leading, full, (item.kv_end - start + BLOCK_N - 1) // BLOCK_N)


@triton.jit
def masked_block(blocks, number, TILE: tl.constexpr):
    """Returns the first token of the masked block with this number."""
    return blocks.start + (number + tl.where(number < blocks.leading, 0, blocks.full)) * TILE.block_n


@triton.jit
def sees(kv_token, inside, position, window):
    """Returns which row sees which key, [M, N], of the keys that are `inside` of the item. `position` [M] is the place
    of each row's query."""
    seen = inside[None, :] & (kv_token[None, :] <= position[:, None])
    return seen & (kv_token[None, :] > position[:, None] - window)


@triton.jit
def attend(state, q_tile, keys, values, seen, scale, soft_cap, MASK: tl.constexpr, FEATURES: tl.constexpr):
    """Adds a block of keys to the state. Under MASK it adds only those that are `seen`. It finds the largest logit
    before scaling, and the scale may have either sign."""
    PRECISION: tl.constexpr = FEATURES.precision
    scores = tl.dot(q_tile, keys, input_precision=PRECISION)  # S = Q·Kᵀ
    if FEATURES.soft_cap:
        scores, scale = soft_capped(scores * scale, soft_cap), 1.0
    if MASK:
        scores = tl.where(seen, scores, tl.where(scale < 0, float("inf"), -float("inf")))
    largest = tl.max(scores, 1)
    if scale < 0:
        largest = tl.min(scores, 1)
    p, state, rescale = softmax_step(state, scores, scale, largest * scale)
    return add_values(state, rescale, p, values, PRECISION)


@triton.jit
def prefill_item(
    row,
    kv_head,
    operands,
    work,
    modifiers,
    table_stride,
    strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Computes the item at a row of the items, for one KV head."""
    BLOCK_M: tl.constexpr = TILE.block_m
    BLOCK_N: tl.constexpr = TILE.block_n
    GROUP: tl.constexpr = SHAPE.group_size
    item = load_item(row)
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    entry = item.query_start + m // GROUP
    used = (entry < item.query_end) & (m < BLOCK_M // GROUP * GROUP)
    token = tl.load(work.queries + entry, mask=used, other=0)
    position = tl.load(work.positions + token, mask=used, other=0)
    rows = Rows(token, kv_head * GROUP + m % GROUP, used)
    q_tile = load_queries(operands, strides, rows, SHAPE)
    scale = tl.load(modifiers.logit_scale + kv_head)
    scale = tl.where(tl.abs(scale) < 1e-37, 1e-37, scale)  # 0 times the infinite score of a masked key would be NaN
    state = empty_state(BLOCK_M, SHAPE.padded_dim_v)
    head = tl.cast(kv_head, tl.int64)  # heads may lie far apart
    k, v = operands.k_cache + head * strides.k_head, operands.v_cache + head * strides.v_head
    cache = HeadCache(
        k=k, v=v, k_page=strides.k_page, k_token=strides.k_token, v_page=strides.v_page, v_token=strides.v_token
    )
    pages = work.block_table + item.kv_row.to(tl.int64) * table_stride
    page_row = PageRow(pages, (item.kv_end + SHAPE.page_size - 1) // SHAPE.page_size)
    blocks = key_blocks(item, position, used, modifiers.window, TILE)
    begin, end = blocks.start + blocks.leading * BLOCK_N, blocks.start + (blocks.leading + blocks.full) * BLOCK_N
    page = load_pages(page_row, begin, n, SHAPE, TILE)
    for first in tl.range(begin, end, BLOCK_N, num_stages=TILE.stages):
        keys, values = load_block(cache, page.to(tl.int64), offset_in_page(first, n, SHAPE, TILE), q_tile, SHAPE)
        state = attend(state, q_tile, keys, values, True, scale, modifiers.soft_cap, False, FEATURES)
        page = load_pages(page_row, first + BLOCK_N, n, SHAPE, TILE)
    page = load_pages(page_row, tl.where(blocks.leading > 0, blocks.start, end), n, SHAPE, TILE)
    for block in tl.range(0, blocks.count - blocks.full, num_stages=TILE.stages):
        first = masked_block(blocks, block, TILE)
        of_page, offset = page.to(tl.int64), offset_in_page(first, n, SHAPE, TILE)
        kv_token = first + n
        inside = (kv_token >= item.kv_start) & (kv_token < item.kv_end)
        keys, values = load_masked_block(cache, of_page, offset, inside, q_tile, SHAPE)
        seen = sees(kv_token, inside, position, modifiers.window)
        keys, values = keys.to(q_tile.dtype), values.to(q_tile.dtype)
        state = attend(state, q_tile, keys, values, seen, scale, modifiers.soft_cap, True, FEATURES)
        page = load_pages(page_row, masked_block(blocks, block + 1, TILE), n, SHAPE, TILE)
    partial_slot = tl.load(work.partial_slots + entry, mask=used, other=0)
    v_scale = modifiers.v_scale + kv_head
    store_rows(state, rows, partial_slot, operands, strides, v_scale, modifiers.sinks, SHAPE, FEATURES)


@triton.jit
def prefill_kernel(
    operands: Operands,
    work: PrefillWork,
    modifiers: Modifiers,
    table_stride,
    strides: Strides,
    SHAPE: tl.constexpr,
    TILE: tl.constexpr,
    FEATURES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Computes count[0] items in the order of `even_rounds`. In one round a CTA takes its turn from the front, and in
    the next from the back if that round is full, so that all CTAs end at about the same time. With `PDL.trigger` the
    next launch may start now."""
    if PDL.trigger:
        tl.extra.cuda.gdc_launch_dependents()
    num_tasks, num_ctas = tl.load(work.count) * SHAPE.num_kv_heads, tl.num_programs(0)
    for first in range(0, num_tasks, num_ctas):
        turn = tl.program_id(0)
        backwards = (first // num_ctas % 2 == 1) & (first + num_ctas <= num_tasks)
        task = first + tl.where(backwards, num_ctas - 1 - turn, turn)
        if task < num_tasks:
            prefill_item(
                work.items + task // SHAPE.num_kv_heads * _ITEM_COLUMNS,
                task % SHAPE.num_kv_heads,
                operands,
                work,
                modifiers,
                table_stride,
                strides,
                SHAPE,
                TILE,
                FEATURES,
            )


def bind(plan: GpuPlan, t: Tensors, launch: Launch, options: LaunchOptions) -> BoundLaunches:
    """Returns the launch of the items of prompt chunks, for layers like `t`. It is the first of a plan, and waits for
    nothing."""
    grids = [Grid(launch.num_ctas, launch_arguments(plan, t, options))]
    return BoundLaunches(prefill_kernel, grids, arguments.LAYER, arguments.of_layer(plan.geometry))


def launch_arguments(plan: GpuPlan, t: Tensors, options: LaunchOptions) -> dict[str, Any]:
    """Returns the arguments of `prefill_kernel` for a plan with prompt chunks, and how it is compiled and launched."""
    chunks, geometry = plan.chunks, plan.geometry
    assert chunks
    features = arguments.features(geometry, t.q.dtype, options.return_lse)
    return {
        "operands": arguments.operands(t),
        "work": PrefillWork(
            items=chunks.arrays["items"],
            count=plan.arrays["chunk_count"],
            block_table=chunks.arrays["block_table"],
            queries=chunks.arrays["queries"],
            partial_slots=chunks.arrays["partial_slots"],
            positions=plan.arrays["positions"],
        ),
        "modifiers": arguments.modifiers(t, geometry),
        "table_stride": chunks.table_stride,
        "strides": arguments.strides(t),
        "SHAPE": arguments.shape(geometry),
        "TILE": tile_shape(chunks.tile, geometry.page_size),
        # Prompt chunks are always masked, whatever the overlapped decodes are: one value, one kernel.
        "FEATURES": features._replace(masked=True),
        "num_warps": chunks.tile.warps,
        **arguments.pdl(options),
    }


def tile_shape(tile: PrefillTile, page_size: int) -> PrefillTileShape:
    """Returns the constants of a tile. A segment, for which one page id is read, has a power of two of tokens and
    divides a page and a block."""
    segment_size = min(tile.block_n, page_size & -page_size)
    return PrefillTileShape(tile.block_m, tile.block_n, segment_size, tile.stages)
