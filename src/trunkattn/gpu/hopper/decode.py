"""Decoding in row tiles on Hopper over a paged cache, warp specialized, in Gluon: the kernel of `TileList` items.

A CTA computes items of up to 64 rows for one KV head each. A row is a (query token, head of the group) pair. Two
producer warps load blocks of keys and of values by TMA, 16 tokens of a page and 64 dims at a time. For an 8-bit cache
more producer warps widen what TMA loads (`widen`), and for small pages they gather token by token (`gather`). One
consumer warpgroup computes. Two CTAs share an SM: while one computes the softmax of a block, the tensor cores work for
the other. A masked block is computed whole, because tensor cores have time to spare and memory has none.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.bound import BoundLaunches, Grid
from trunkattn.gpu.hopper import spec
from trunkattn.gpu.hopper.arguments import LAYER
from trunkattn.gpu.hopper.common import (
    SWIZZLED,
    WARPGROUP_ROWS,
    reinterpret,
    without_padding,
    write_partials,
)
from trunkattn.gpu.hopper.decode_arguments import (
    OF_LAYER,
    UNSPECIALIZED,
    CtaRange,
    decode_arguments,
    kv_source,
    shape_of,
)
from trunkattn.gpu.hopper.decode_items import blocks_of, gather_items, load_items, segment_of, widen_items
from trunkattn.gpu.hopper.online_softmax import (
    attend_block,
    attend_first_block,
    finish_attention,
    sink_divisor,
)
from trunkattn.gpu.hopper.pipeline import (
    BAR_K_EMPTY,
    BAR_V_EMPTY,
    KvPipelines,
    allocate_boxes,
    make_pipeline,
)
from trunkattn.gpu.hopper.segments import BlockMask, mask_gathered, mask_rows
from trunkattn.gpu.hopper.tasks import begin_launch, end_launch, prefetch_plan, task_of, tasks_of
from trunkattn.gpu.hopper.widen import allocate_staging, allocate_words, as_float16
from trunkattn.gpu.launch_order import Launch, LaunchOptions
from trunkattn.gpu.layer import Pdl, Tensors
from trunkattn.planner.work_list import DIRECT, QUERY_END, QUERY_START

_LOADED, _WIDENED, _GATHERED = (gl.constexpr(int(source)) for source in spec.Source)
_DIRECT = gl.constexpr(DIRECT)
_QUERY_START, _QUERY_END = gl.constexpr(QUERY_START), gl.constexpr(QUERY_END)


class _Rows(NamedTuple):
    """The query token of each row [64], its partial slot, and whether the item has such a row (`used`)."""

    token: Any
    partial_slot: Any
    used: Any


@gluon.jit
def _load_queries(q_tile, queries, first, end, kv_head, scale, layer, C: gl.constexpr, T: gl.constexpr):
    """Copies queries [first, end) of the list to shared memory. Returns the scale of their logits: |scale|, or one
    scale for each row if rows are scaled too (`as_float16`)."""
    m = gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, T.copy))
    used = first + m // C.group_size < end
    token = gl.load(queries + first + m // C.group_size, mask=used, other=0).to(gl.int64)
    d = gl.arange(0, T.head_dim, gl.SliceLayout(0, T.copy))[None, :]
    query_head = kv_head * C.group_size + m % C.group_size
    at = (token * layer.q_token_stride + query_head * layer.q_head_stride)[:, None] + d
    values = gl.load(layer.q + at, mask=without_padding(used[:, None], d, C, T), other=0.0)
    values = gl.where(scale < 0, -values, values)
    scale = gl.abs(scale)
    if values.dtype != q_tile.dtype:
        values, inverse = as_float16(values)
        scale = scale * gl.convert_layout(inverse, gl.SliceLayout(1, T.scores))
    q_tile.store(values)
    fence_async_shared()
    return gl.maximum(scale, 1e-37)  # a masked score is infinite, and infinity times 0 is NaN


@gluon.jit
def _load_rows(tiles, first, end, query):
    """Loads what the epilogue must know of queries [first, end) of the list."""
    used = first + query < end
    token = gl.load(tiles.queries + first + query, mask=used, other=0)
    return _Rows(token, gl.load(tiles.partial_slots + first + query, mask=used, other=_DIRECT), used)


@gluon.jit
def _epilogue(out, lse, rows, q_tile, layer, kv_head, C: gl.constexpr, T: gl.constexpr):
    """Writes rows as partials, or through the query tile's memory to `layer.out`."""
    v_scale = gl.load(layer.v_scale + kv_head)
    query_head = kv_head * C.group_size + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, T.acc)) % C.group_size
    write_partials(out, lse, rows.partial_slot, rows.used, query_head, layer, C, T)
    direct = rows.used & (rows.partial_slot == _DIRECT)
    if C.return_lse:
        gl.store(layer.lse + rows.token * C.num_qo_heads + query_head, lse, mask=direct)
    if C.sinks:
        out = out / sink_divisor(lse, layer.sinks + query_head, direct)[:, None]
    out_tile = q_tile
    if q_tile.dtype != layer.out.dtype.element_ty:
        OUT: gl.constexpr = (WARPGROUP_ROWS, T.head_dim)
        out_tile = reinterpret(q_tile, layer.out.dtype.element_ty, OUT, SWIZZLED)
    out_tile.store((out * v_scale).to(out_tile.dtype))
    COPY: gl.constexpr = T.copy
    COPY_ROW: gl.constexpr = gl.SliceLayout(1, COPY)
    token = gl.convert_layout(gl.where(direct, rows.token, -1), COPY_ROW)
    query_head = kv_head * C.group_size + gl.arange(0, WARPGROUP_ROWS, COPY_ROW) % C.group_size
    d = gl.arange(0, T.head_dim, gl.SliceLayout(0, T.copy))[None, :]
    at = (token.to(gl.int64) * layer.out_token_stride + query_head * layer.out_head_stride)[:, None] + d
    gl.store(layer.out + at, out_tile.load(COPY), mask=without_padding((token >= 0)[:, None], d, C, T))


@gluon.jit
def _phase_begin(blocks, phase):
    """Returns the first block of a phase, in the order in which blocks are computed. Phase 0 has the masked blocks that
    come first, phase 1 the full ones, and phase 2 the other masked ones. Block 0 is computed ahead of all phases."""
    first_full, end_full = blocks.num_masked_first, blocks.num_masked_first + blocks.num_full
    return gl.where(phase == 0, 1, gl.maximum(gl.where(phase == 1, first_full, end_full), 1))


@gluon.jit
def _consume(tasks, tiles, layer, window, q_tile, kv, C: gl.constexpr, T: gl.constexpr):
    """Runs the consumer warpgroup, which computes the attention of the items."""
    MASK: gl.constexpr = mask_gathered if C.source == _GATHERED else mask_rows
    query = gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, T.scores)) // C.group_size
    index = 0
    for turn in range(tasks.cta, tasks.num_tasks, tasks.num_ctas):
        task = task_of(tasks, turn, C.num_kv_heads)
        blocks = blocks_of(task.item, tasks, C, T)
        if blocks.count > 0:  # an item that the device planner had no room for has no segments
            first_query, end_query = gl.load(task.item + _QUERY_START), gl.load(task.item + _QUERY_END)
            scale = gl.load(layer.logit_scale + task.kv_head)
            scale = _load_queries(q_tile, tiles.queries, first_query, end_query, task.kv_head, scale, layer, C, T)
            rows = _load_rows(tiles, first_query, end_query, gl.convert_layout(query, gl.SliceLayout(1, T.acc)))
            position = query
            if C.masked:
                used = first_query + query < end_query
                token = gl.load(tiles.queries + first_query + query, mask=used, other=0)
                position = gl.load(tiles.positions + token, mask=used, other=0)
            at = segment_of(blocks, 0, C, T)
            mask_args = BlockMask(
                segments=tiles.segments, at=at, end=blocks.end, query=query, position=position, window=window
            )
            state = attend_first_block(q_tile, kv, index, blocks.count > 1, scale, MASK, mask_args, C, T)
            index += 1
            for phase in range(3):  # a loop, so that the code of masked blocks takes the instruction cache once
                begin = _phase_begin(blocks, phase)
                if phase == 1:
                    for nth in range(begin, blocks.num_masked_first + blocks.num_full):
                        state = attend_block(state, q_tile, kv, index, nth + 1 < blocks.count, scale, None, 0, C, T)
                        index += 1
                else:
                    for nth in range(begin, gl.where(phase == 0, blocks.num_masked_first, blocks.count)):
                        at = segment_of(blocks, nth, C, T)
                        mask_args = BlockMask(
                            segments=tiles.segments,
                            at=at,
                            end=blocks.end,
                            query=query,
                            position=position,
                            window=window,
                        )
                        more = nth + 1 < blocks.count
                        state = attend_block(state, q_tile, kv, index, more, scale, MASK, mask_args, C, T)
                        index += 1
            parts, lse = finish_attention(state, kv, index, T)
            _epilogue(parts[0], lse, rows, q_tile, layer, task.kv_head, C, T)


@gluon.jit
def _allocate_memory(k_desc, v_desc, dtype: gl.constexpr, C: gl.constexpr, T: gl.constexpr):
    """Allocates the memory of the queries, and the pipelines of keys and of values, all stages of which are empty."""
    Q: gl.constexpr = (WARPGROUP_ROWS, T.head_dim)
    if C.source == _LOADED:
        k_boxes, v_boxes = allocate_boxes(k_desc, T), allocate_boxes(v_desc, T)
        q_tile = gl.allocate_shared_memory(dtype, Q, SWIZZLED)
        return q_tile, KvPipelines(make_pipeline(k_boxes, T), make_pipeline(v_boxes, T))
    else:
        ARRIVALS: gl.constexpr = 32 * T.num_producer_warps if C.kv_bytes == 2 else 1  # each thread reports its copies
        kv = KvPipelines(allocate_words(dtype, ARRIVALS, T), allocate_words(dtype, ARRIVALS, T))
        return gl.allocate_shared_memory(dtype, Q, SWIZZLED), kv


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def hopper_decode_kernel(
    layer,
    k_desc,
    v_desc,
    work,
    first_bucket,
    last_bucket,
    items_size,
    queries_size,
    segments_size,
    first_cta,
    total_ctas,
    C: gl.constexpr,
):
    """Computes the items of buckets first_bucket to last_bucket, which merge nothing. Each `*_size` is the number of
    elements of an array. Several launches share the items: they have `total_ctas` CTAs, and this one begins with
    `first_cta`."""
    begin_launch(work.pdl)
    tiles = work.tiles
    cta = gl.program_id(0) + first_cta
    prefetch_plan(tiles, items_size, queries_size, segments_size, cta)
    T: gl.constexpr = C.tile
    # 8-bit numbers become float16 with fewer instructions than bfloat16
    dtype: gl.constexpr = gl.float16 if C.kv_bytes == 1 else layer.q.dtype.element_ty
    q_tile, kv = _allocate_memory(k_desc, v_desc, dtype, C, T)
    tasks = tasks_of(work, first_bucket, last_bucket, cta, total_ctas, C.num_kv_heads)
    if C.source == _GATHERED:
        gl.warp_specialize(
            [
                (_consume, (tasks, tiles, layer, work.window, q_tile, kv, C, T)),
                (gather_items, (tasks, tiles.segments, k_desc, v_desc, layer, kv, C, T)),
            ],
            [T.num_producer_warps],
            [C.producer_registers],
        )
    elif C.source == _WIDENED:
        staging = allocate_staging(k_desc, T)
        gl.warp_specialize(
            [
                (_consume, (tasks, tiles, layer, work.window, q_tile, kv, C, T)),
                (widen_items, (tasks, tiles.segments, k_desc, v_desc, staging, kv, C, T)),
            ],
            [T.num_producer_warps],
            [C.producer_registers],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (tasks, tiles, layer, work.window, q_tile, kv, C, T)),
                (load_items, (tasks, tiles.segments, k_desc, kv.k, BAR_K_EMPTY, C, T)),
                (load_items, (tasks, tiles.segments, v_desc, kv.v, BAR_V_EMPTY, C, T)),
            ],
            [1, 1],
            [C.producer_registers, C.producer_registers],
        )
    end_launch(work.pdl)


def bind(plan: GpuPlan, t: Tensors, launch: Launch, options: LaunchOptions) -> BoundLaunches:
    """Binds the launches of the items of the launch's buckets, for layers like `t`. With a window, up to 15 tokens
    before it are loaded and masked. They must be finite, as tokens of the sequence are.

    A launch that spreads its items becomes several launches side by side, each with one CTA an SM. With one KV head
    they would cost more than they save. The first overlaps what is ahead, and the last triggers what comes next."""
    source, grids, pdl = kv_source(t, plan.geometry), [], options.pdl
    each_sm = (plan.card.num_sms,) * plan.tiles[launch.buckets[0]].ctas_per_sm
    spreads = launch.spread and plan.geometry.num_kv_heads > 1
    num_ctas = each_sm if spreads else (min(launch.num_ctas, sum(each_sm)),)
    buckets = launch.buckets[0], launch.buckets[-1]
    for number, count in enumerate(num_ctas):
        its_pdl = Pdl(pdl.trigger or number + 1 < len(num_ctas), pdl.wait or number > 0)
        ctas = CtaRange(sum(num_ctas[:number]), sum(num_ctas), its_pdl)
        registers = shape_of(plan.geometry.head_dim, source).registers
        compiled = {"num_warps": 4, "maxnreg": registers, "launch_pdl": True}
        grids.append(Grid(count, decode_arguments(t, plan, buckets, ctas, options.return_lse)._asdict() | compiled))
    return BoundLaunches(hopper_decode_kernel, grids, LAYER, OF_LAYER[source])
