"""Prefill on Hopper over a paged cache, warp specialized, in Gluon: FlashAttention-3's design.

A CTA computes work items of up to 128 rows for one KV head each. A row is a (query token, head of the group) pair. Two
producer warps load blocks of keys and of values by TMA; a TMA box has 16 tokens of a page and 64 dims. Two consumer
warpgroups compute 64 rows each. While a warpgroup computes the softmax of a block, the tensor cores compute the product
p·v of the block before, and the products of the other warpgroup. Blocks are computed from the last to the first, so
that the few blocks that need a mask come first.
"""

from types import MappingProxyType
from typing import Any, Final, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.bound import BoundLaunches, Grid
from trunkattn.gpu.hopper.arguments import LAYER, of_layer
from trunkattn.gpu.hopper.common import (
    BOX_TOKENS,
    PRODUCER_REGISTERS,
    SWIZZLED,
    WARPGROUP_ROWS,
    pdl_trigger,
    row_offset,
    scheduled_task,
    write_partials,
)
from trunkattn.gpu.hopper.online_softmax import (
    MainloopTile,
    attend_block,
    attend_first_block,
    finish_attention,
    mainloop_tile,
    sink_divisor,
    to_scores_layout,
)
from trunkattn.gpu.hopper.pipeline import (
    BAR_K_EMPTY,
    BAR_V_EMPTY,
    Boxes,
    KvPipelines,
    allocate_boxes,
    load_block,
    make_pipeline,
)
from trunkattn.gpu.hopper.prefill_arguments import prefill_arguments
from trunkattn.gpu.launch_order import Launch, LaunchOptions
from trunkattn.gpu.layer import Tensors
from trunkattn.planner.work_list import (
    DIRECT,
    KV_END,
    KV_ROW,
    KV_START,
    QUERY_END,
    QUERY_START,
)

REGISTERS: Final = MappingProxyType({1: 168, 2: 80})  # of each thread at launch, by the number of CTAs of an SM
_BLOCK_TOKENS: Final = MappingProxyType({64: 128, 128: 128, 256: 64})  # keys of a block, by head_dim
_SHARED_SM_BLOCK_TOKENS: Final = 64  # the same where two CTAs share an SM
_CONSUMER_REGISTERS, _SHARED_SM_CONSUMER_REGISTERS = gl.constexpr(240), gl.constexpr(104)
_KV_ROW, _KV_START, _KV_END = gl.constexpr(KV_ROW), gl.constexpr(KV_START), gl.constexpr(KV_END)
_QUERY_START, _QUERY_END = gl.constexpr(QUERY_START), gl.constexpr(QUERY_END)
_DIRECT = gl.constexpr(DIRECT)
_NEVER = gl.constexpr(2**30)  # a position that no row reaches


def _prefill_tile(head_dim: int, block_n: int) -> MainloopTile:
    """Returns the constants of the main loop for heads of 64, 128 or 256, and blocks of `block_n` keys."""
    return mainloop_tile(head_dim, block_n, num_stages=2, num_consumer_warps=8, mask_ahead=False)


TILE_64, TILE_128, TILE_256 = (gl.constexpr(_prefill_tile(*each)) for each in _BLOCK_TOKENS.items())
TILE_64_SHARED_SM = gl.constexpr(_prefill_tile(64, _SHARED_SM_BLOCK_TOKENS))


class ChunkMemory(NamedTuple):
    """Shared memory of a CTA: the queries of both warpgroups, `q_tiles` [2, 64, head_dim], and the pipelines."""

    q_tiles: Any
    kv: KvPipelines


class _KvRange(NamedTuple):
    """Tokens [first, end) of an item, in `num_blocks` blocks. `first` is the first token of a TMA box."""

    first: Any
    end: Any
    num_blocks: Any


class _MaskArgs(NamedTuple):
    """What the mask of a block depends on. The block begins with token `first`, and the item's keys end at `end`. Each
    row sees the keys from `window_start` [64] to `position` [64]."""

    first: Any
    end: Any
    window_start: Any
    position: Any


class _QueryRows(NamedTuple):
    """The rows of a warpgroup. `entry` is the row's index in the lists of queries and slots. `used` says whether the
    item has such a row."""

    entry: Any
    token: Any
    query_head: Any
    used: Any


@gluon.jit
def _kv_range(item, T: gl.constexpr):
    first, end = gl.load(item + _KV_START) // BOX_TOKENS * BOX_TOKENS, gl.load(item + _KV_END)
    return _KvRange(first, end, (end - first + T.block_n - 1) // T.block_n)


@gluon.jit
def _locate_boxes(pages, first, end, CUT: gl.constexpr, PAGE_SIZE: gl.constexpr, T: gl.constexpr):
    """Returns the TMA boxes of the block that begins with token `first`.

    What the cache holds beyond `end` may be NaN, and is never read as a value. `CUT` says that the block may reach
    beyond `end`. A box that `end` cuts then begins earlier, so that it ends there. A box beyond `end` lies outside the
    cache, where TMA fills in zeros."""
    BOXES: gl.constexpr = T.block_n // BOX_TOKENS
    page: gl.tuple = ()
    begin: gl.tuple = ()
    for i in gl.static_range(BOXES):
        token = first + i * BOX_TOKENS
        start = token % PAGE_SIZE if PAGE_SIZE > BOX_TOKENS else 0
        if CUT:
            start = gl.where(token < end, start + gl.minimum(end - token - BOX_TOKENS, 0), -BOX_TOKENS)
            token = gl.minimum(token, end - 1)
        page += (gl.load(pages + token // PAGE_SIZE),)
        begin += (start,)
    return Boxes(page, begin)


@gluon.jit
def produce_chunks(chunks, num_tasks, desc, pipeline, BAR_EMPTY: gl.constexpr, C: gl.constexpr, T: gl.constexpr):
    """Runs the producer warp of keys or of values, which loads the blocks of each item from the last to the first."""
    index = 0
    for turn in range(gl.program_id(0), num_tasks, gl.num_programs(0)):
        task = scheduled_task(chunks.items, turn, gl.program_id(0), gl.num_programs(0), num_tasks, C.num_kv_heads)
        pages = chunks.block_table + gl.load(task.item + _KV_ROW).to(gl.int64) * chunks.table_stride
        kv = _kv_range(task.item, T)
        first = kv.first + (kv.num_blocks - 1) * T.block_n
        boxes = _locate_boxes(pages, first, kv.end, True, C.page_size, T)
        load_block(desc, pipeline, index, boxes, task.kv_head, BAR_EMPTY, T)
        index += 1
        for _ in range(1, kv.num_blocks):
            first -= T.block_n
            boxes = _locate_boxes(pages, first, kv.end, False, C.page_size, T)
            load_block(desc, pipeline, index, boxes, task.kv_head, BAR_EMPTY, T)
            index += 1


@gluon.jit
def _mask(args, CUT: gl.constexpr, C: gl.constexpr, T: gl.constexpr):
    """Returns which row sees which key of a block, [64, block_n]. `_locate_boxes` explains `CUT`."""
    n = gl.arange(0, T.block_n, gl.SliceLayout(0, T.scores))
    origin = 0 if C.windowed else args.first  # keys are counted from there
    key = args.first - origin + n
    if CUT:
        box = args.first - origin + n // BOX_TOKENS * BOX_TOKENS
        key -= gl.maximum(BOX_TOKENS - (args.end - origin - box), 0)  # a box that `end` cuts ends there
        key = gl.where(key >= box, key, _NEVER)
    mask = key[None, :] <= (args.position - origin)[:, None]
    if C.windowed:
        mask = mask & (key[None, :] >= args.window_start[:, None])
    return mask


@gluon.jit
def _mask_last_block(args, C: gl.constexpr, T: gl.constexpr):
    return _mask(args, True, C, T)


@gluon.jit
def _mask_block(args, C: gl.constexpr, T: gl.constexpr):
    return _mask(args, False, C, T)


@gluon.jit
def _rows_of(m, first_query, end_query, kv_head, chunks, C: gl.constexpr):
    """Returns rows m of an item whose queries are [first_query, end_query) of the list."""
    entry = first_query + m // C.group_size
    used = entry < end_query
    token = gl.load(chunks.queries + entry, mask=used, other=0)
    return _QueryRows(entry, token, kv_head * C.group_size + m % C.group_size, used)


@gluon.jit
def _load_queries(q_tile, rows, scale, layer, T: gl.constexpr):
    """Copies query rows to shared memory. They are negated if the scale is negative, because the main loop multiplies
    logits by |scale|."""
    d = gl.arange(0, T.head_dim, gl.SliceLayout(0, T.copy))[None, :]
    at = (row_offset(rows.token, layer.q_token_stride) + rows.query_head * layer.q_head_stride)[:, None] + d
    values = gl.load(layer.q + at, mask=rows.used[:, None], other=0.0)
    q_tile.store(gl.where(scale < 0, -values, values))
    fence_async_shared()


@gluon.jit
def _first_full_block(kv, position, T: gl.constexpr):
    """Returns how many blocks, the first ones, all rows would see without a window. The last block never counts."""
    seen_by_all = gl.maximum(gl.minimum(kv.end, gl.min(position, 0) + 1) - kv.first, 0)
    return gl.minimum(seen_by_all // T.block_n, kv.num_blocks - 1)


@gluon.jit
def _epilogue(out, lse, rows, copy_rows, q_tile, layer, chunks, v_scale, C: gl.constexpr, T: gl.constexpr):
    """Writes rows as partials, or through the query tile's memory to `layer.out`. `copy_rows` are the same rows in the
    layout of that copy."""
    COPY: gl.constexpr = T.copy
    partial_slot = gl.load(chunks.partial_slots + rows.entry, mask=rows.used, other=_DIRECT)
    write_partials(out, lse, partial_slot, rows.used, rows.query_head, layer, C, T)
    if C.sinks:
        direct_row = rows.used & (partial_slot == _DIRECT)
        out = out / sink_divisor(lse, layer.sinks + rows.query_head, direct_row)[:, None]
    q_tile.store((out * v_scale).to(q_tile.dtype))
    direct = gl.load(chunks.partial_slots + copy_rows.entry, mask=copy_rows.used, other=0) == _DIRECT
    d = gl.arange(0, T.head_dim, gl.SliceLayout(0, T.copy))[None, :]
    head_offset = copy_rows.query_head * layer.out_head_stride
    at = (row_offset(copy_rows.token, layer.out_token_stride) + head_offset)[:, None] + d
    gl.store(layer.out + at, q_tile.load(COPY), mask=(copy_rows.used & direct)[:, None])
    if C.return_lse:
        token = gl.load(chunks.queries + rows.entry, mask=rows.used, other=0)
        direct_row = rows.used & (partial_slot == _DIRECT)
        gl.store(layer.lse + token * C.num_qo_heads + rows.query_head, lse, mask=direct_row)


@gluon.jit
def consume_chunks(
    WARPGROUP: gl.constexpr, chunks, num_tasks, positions, layer, window, memory, C: gl.constexpr, T: gl.constexpr
):
    """Runs consumer warpgroup 0 or 1, which computes the attention of 64 rows of each item."""
    kv_pipelines = memory.kv
    q_tile = memory.q_tiles.index(WARPGROUP)
    m = WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, T.acc))
    COPY: gl.constexpr = T.copy
    copy_m = WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, COPY))
    index = 0
    for turn in range(gl.program_id(0), num_tasks, gl.num_programs(0)):
        task = scheduled_task(chunks.items, turn, gl.program_id(0), gl.num_programs(0), num_tasks, C.num_kv_heads)
        first_query, end_query = gl.load(task.item + _QUERY_START), gl.load(task.item + _QUERY_END)
        scale = gl.load(layer.logit_scale + task.kv_head)
        copy_rows = _rows_of(copy_m, first_query, end_query, task.kv_head, chunks, C)
        _load_queries(q_tile, copy_rows, scale, layer, T)
        scale = gl.maximum(gl.abs(scale), 1e-37)  # a masked score is infinite, and infinity times 0 is NaN
        rows = _rows_of(m, first_query, end_query, task.kv_head, chunks, C)
        position = gl.load(positions + rows.token, mask=rows.used, other=_NEVER - 1)

        kv = _kv_range(task.item, T)
        full = _first_full_block(kv, position, T)
        windowed, window_start = 0, position  # blocks before `windowed` begin before some row's window
        if C.windowed:
            window_start = gl.maximum(position - window + 1, gl.load(task.item + _KV_START))
            latest = gl.max(gl.where(rows.used, window_start, kv.first), 0)
            windowed = gl.minimum((latest - kv.first + T.block_n - 1) // T.block_n, full)
            window_start = to_scores_layout(window_start, T)
        position = to_scores_layout(position, T)

        has_next = kv.num_blocks > 1
        mask_args = _MaskArgs(kv.first + (kv.num_blocks - 1) * T.block_n, kv.end, window_start, position)
        state = attend_first_block(q_tile, kv_pipelines, index, has_next, scale, _mask_last_block, mask_args, C, T)
        index += 1
        for block in range(kv.num_blocks - 2, full - 1, -1):
            mask_args = _MaskArgs(kv.first + block * T.block_n, kv.end, window_start, position)
            state = attend_block(state, q_tile, kv_pipelines, index, block > 0, scale, _mask_block, mask_args, C, T)
            index += 1
        for block in range(full - 1, windowed - 1, -1):
            state = attend_block(state, q_tile, kv_pipelines, index, block > 0, scale, None, 0, C, T)
            index += 1
        if C.windowed:
            for block in range(windowed - 1, -1, -1):
                mask_args = _MaskArgs(kv.first + block * T.block_n, kv.end, window_start, position)
                state = attend_block(state, q_tile, kv_pipelines, index, block > 0, scale, _mask_block, mask_args, C, T)
                index += 1
        parts, lse = finish_attention(state, kv_pipelines, index, T)
        v_scale = gl.load(layer.v_scale + task.kv_head)
        _epilogue(parts[0], lse, rows, copy_rows, q_tile, layer, chunks, v_scale, C, T)


@gluon.jit
def allocate_chunk_memory(k_desc, v_desc, T: gl.constexpr):
    """Allocates the shared memory. All stages of the pipelines are empty."""
    k_boxes, v_boxes = allocate_boxes(k_desc, T), allocate_boxes(v_desc, T)
    q_tiles = gl.allocate_shared_memory(k_desc.dtype, [2, WARPGROUP_ROWS, T.head_dim], SWIZZLED)
    return ChunkMemory(q_tiles, KvPipelines(make_pipeline(k_boxes, T), make_pipeline(v_boxes, T)))


@gluon.jit
def hopper_prefill_kernel(layer, k_desc, v_desc, work, C: gl.constexpr):
    """Computes the items of prompt chunks."""
    if C.pdl_trigger:
        pdl_trigger()
    chunks, positions, window = work.chunks, work.positions, work.window
    gl.static_assert(C.ctas_per_sm == 1 or C.head_dim == 64)
    T_64: gl.constexpr = TILE_64 if C.ctas_per_sm == 1 else TILE_64_SHARED_SM
    T: gl.constexpr = T_64 if C.head_dim == 64 else TILE_128 if C.head_dim == 128 else TILE_256
    CONSUMERS: gl.constexpr = _CONSUMER_REGISTERS if C.ctas_per_sm == 1 else _SHARED_SM_CONSUMER_REGISTERS
    memory = allocate_chunk_memory(k_desc, v_desc, T)
    num_tasks = gl.load(work.num_items) * C.num_kv_heads
    gl.warp_specialize(
        [
            (consume_chunks, (0, chunks, num_tasks, positions, layer, window, memory, C, T)),
            (consume_chunks, (1, chunks, num_tasks, positions, layer, window, memory, C, T)),
            (produce_chunks, (chunks, num_tasks, k_desc, memory.kv.k, BAR_K_EMPTY, C, T)),
            (produce_chunks, (chunks, num_tasks, v_desc, memory.kv.v, BAR_V_EMPTY, C, T)),
        ],
        [4, 1, 1],
        [CONSUMERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


def bind(plan: GpuPlan, t: Tensors, launch: Launch, options: LaunchOptions) -> BoundLaunches:
    """Binds the launch of the items of prompt chunks, for layers like `t`. It is the first launch of a plan and waits
    for nothing.

    Without a window the KV_START of an item is a multiple of 16, as cuts of packs are. With a window, up to 15 tokens
    before it are loaded and masked. They must be finite, as tokens of the sequence are."""
    assert plan.chunks
    registers = REGISTERS[plan.chunks.tile.ctas_per_sm]
    given = prefill_arguments(t, plan, options.pdl.trigger, options.return_lse)._asdict()
    given |= {"num_warps": 4, "maxnreg": registers}
    return BoundLaunches(hopper_prefill_kernel, [Grid(launch.num_ctas, given)], LAYER, of_layer)
