"""Prompt chunks and decodes in one launch on Hopper, so that each SM computes both at the same time. This is the kernel
of POD-Attention, in Gluon (section 4 of https://arxiv.org/abs/2410.18038).

POD's own kernel gives an SM several CTAs, and a ticket decides which of them prefill and which decode. On Hopper a CTA
that prefills at full speed fills an SM. So here the warps of one CTA are specialized: two warpgroups compute prompt
chunks as in `prefill`, and a third one decodes. Two producer warps load the keys and the values of the chunks, and a
third one loads both for the decodes. The chunks keep the tensor cores busy, and the decodes keep memory busy.

Decoding takes few of the CTA's registers and little of its time, because operands are swapped. Keys and values, of
which there are many, are the rows of the matrix products. The 8 or 16 query rows are the columns. Each of the four
warps has 16 of a block's 64 keys, so the warps must synchronize to know the maximum of the block: see `_attend_block`.
"""

from typing import Any, Final, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.bound import BoundLaunches, Grid
from trunkattn.gpu.hopper import spec
from trunkattn.gpu.hopper.arguments import LAYER, of_layer
from trunkattn.gpu.hopper.barriers import NUM_BARRIERS
from trunkattn.gpu.hopper.common import (
    NEG_INF,
    PRODUCER_REGISTERS,
    SWIZZLED,
    pdl_trigger,
    row_offset,
)
from trunkattn.gpu.hopper.online_softmax import copy_layout, finalize, sink_divisor, soft_capped
from trunkattn.gpu.hopper.pipeline import (
    BAR_K_EMPTY,
    BAR_KV_EMPTY,
    BAR_V_EMPTY,
    PipelineShape,
    allocate_boxes,
    consumer_release,
    consumer_wait,
    load_block,
    make_pipeline,
    warps_sync,
)
from trunkattn.gpu.hopper.prefill import TILE_128, allocate_chunk_memory, consume_chunks, produce_chunks
from trunkattn.gpu.hopper.prefill_arguments import prefill_decode_arguments
from trunkattn.gpu.hopper.segments import (
    BLOCK_TOKENS,
    ITEM_SEGMENT_END,
    ITEM_SEGMENT_START,
    ITEM_SHARED_END,
    BlockMask,
    locate_boxes,
    mask_columns,
)
from trunkattn.gpu.launch_order import Launch, LaunchOptions
from trunkattn.gpu.layer import Tensors
from trunkattn.numerics import LOG2_E
from trunkattn.planner.work_list import DIRECT, ITEM_COLUMNS, QUERY_END, QUERY_START

REGISTERS: Final = 128  # of each of 512 threads at launch
CHUNK_REGISTERS = gl.constexpr(208)  # of each thread that computes chunks, after the launch
DECODE_REGISTERS = gl.constexpr(72)  # of each thread that decodes
_NARROW_ROWS = gl.constexpr(spec.BOTH_NARROW_ROWS)  # rows of a decode tile, which holds whole groups
_WIDE_ROWS = gl.constexpr(spec.BOTH_ROWS)
# Three stages of 16 KiB, each for the keys or for the values of a block, take most of the memory that chunks leave
_SHAPE: Final = PipelineShape(
    spec.BOTH_HEAD_DIM, BLOCK_TOKENS.value, num_stages=3, num_threads=128 + 32, empty=BAR_KV_EMPTY
)
assert _SHAPE.empty + _SHAPE.num_stages <= NUM_BARRIERS
_PIPELINE = gl.constexpr(_SHAPE)
_HEAD_DIM = gl.constexpr(spec.BOTH_HEAD_DIM)
_COPY = gl.constexpr(copy_layout(spec.BOTH_HEAD_DIM))
_NUM_WARPS = gl.constexpr(4)
_SPECULATION_LIMIT = gl.constexpr(8.0)  # p may grow to 2 to this power before sums are rescaled
_LOG2_E = gl.constexpr(LOG2_E)
_DIRECT = gl.constexpr(DIRECT)
_ITEM_COLUMNS = gl.constexpr(ITEM_COLUMNS)
_QUERY_START, _QUERY_END = gl.constexpr(QUERY_START), gl.constexpr(QUERY_END)
_VOTE_ANY = gl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
)
_WARP_MAX = gl.constexpr(gl.BlockedLayout([4, 2], [8, 4], [4, 1], [1, 0]))  # a thread has its columns of all warps
_UNSWIZZLED = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_NARROW_ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16]))
_WIDE_ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]))
_NARROW_P = gl.constexpr(gl.NVMMASharedLayout(0, 16, 2))
_WIDE_P = gl.constexpr(gl.NVMMASharedLayout(32, 16, 2))


class _DecodeMemory(NamedTuple):
    """Shared memory of a decode tile: the queries [rows, 128], p of a block [64, rows], and the maxima of each warp's
    keys [4, rows]."""

    q_tile: Any
    p_tile: Any
    warp_max: Any


class _DecodeState(NamedTuple):
    """The state between two blocks. `acc` [128, rows] is the output before it is divided by the sums. Exponents are
    relative to `row_max` [rows]. The sums are kept in 64 parts, `row_sum` [64, rows], which are added up at the
    end."""

    acc: Any
    row_max: Any
    row_sum: Any


class _Tasks(NamedTuple):
    """The decode tasks. `items` points to the first item."""

    items: Any
    num_tasks: Any


@gluon.jit
def _first_task():
    """Returns the first decode task of this CTA, which then takes every num_programs-th task. The last CTA takes the
    heaviest task, because it may have fewer chunks."""
    return gl.num_programs(0) - 1 - gl.program_id(0)


@gluon.jit
def _produce(tasks, segments, k_desc, v_desc, pipeline, C: gl.constexpr, S: gl.constexpr):
    """Runs the producer warp of the decodes. It loads the keys of a block, then its values."""
    BLOCK_SEGMENTS: gl.constexpr = S.block_n // C.segment_size
    index = 0
    for task in range(_first_task(), tasks.num_tasks, gl.num_programs(0)):
        item, kv_head = tasks.items + task // C.num_kv_heads * _ITEM_COLUMNS, task % C.num_kv_heads
        start, end = gl.load(item + ITEM_SEGMENT_START), gl.load(item + ITEM_SEGMENT_END)
        boxes = locate_boxes(segments, start, end, C, S.block_n)
        for at in range(start, end, BLOCK_SEGMENTS):
            # These loads overlap the waits below
            next_boxes = locate_boxes(segments, at + BLOCK_SEGMENTS, end, C, S.block_n)
            load_block(k_desc, pipeline, index, boxes, kv_head, S.empty, S)
            load_block(v_desc, pipeline, index + 1, boxes, kv_head, S.empty, S)
            index += 2
            boxes = next_boxes


@gluon.jit
def _warp_any(flag):
    """Whether any thread of the warp has `flag` set. The result is the same in the whole warp, and ptxas knows this, so
    that a branch on it does not diverge."""
    return gl.inline_asm_elementwise(_VOTE_ANY, "=r,r", [flag.to(gl.int32)], gl.int32, False, 1) != 0


@gluon.jit
def _attend_block(
    state,
    index,
    scale,
    mask,
    memory,
    pipeline,
    MASK: gl.constexpr,
    ACC: gl.constexpr,
    C: gl.constexpr,
    S: gl.constexpr,
):
    """Adds a block. Its keys are block `index` of the pipeline, and its values are the next one.

        s = scale · k·qᵀ    p = exp2(s - m)    row_sum += p    acc += vᵀ·p

    m is the maximum before the block, which all warps know without waiting. This p is kept unless the block's maximum
    of some row is much larger: new_max > m + 8. In that case m becomes max(m, new_max), p is computed again, and acc
    and row_sum are multiplied by exp2(old m - new m). So the warps exchange p and their maxima at a single barrier."""
    ROWS: gl.constexpr = memory.p_tile.shape[1]
    BLOCK_N: gl.constexpr = S.block_n
    acc, row_max, row_sum = state
    k_stage, v_stage = index % S.num_stages, (index + 1) % S.num_stages
    consumer_wait(pipeline, index, S)
    zeros, q_tile = gl.zeros([BLOCK_N, ROWS], gl.float32, ACC), memory.q_tile.permute((1, 0))
    scores = warpgroup_mma(pipeline.tiles.index(k_stage), q_tile, zeros, use_acc=False, is_async=True)  # Sᵀ = K·Qᵀ
    scores = warpgroup_mma_wait(0, deps=(scores,))
    if C.soft_cap > 0:
        scores = soft_capped(scores, scale, C.soft_cap)
        scale = C.soft_cap * _LOG2_E
    scores = scores * scale
    consumer_release(index, S.empty, S)
    if MASK:
        scores = gl.where(mask, scores, -float("inf"))
    memory.warp_max.store(gl.max(gl.reshape(scores, [_NUM_WARPS, BLOCK_N // _NUM_WARPS, ROWS]), 1))
    p = gl.exp2(scores - row_max[None, :])
    memory.p_tile.store(p.to(memory.p_tile.dtype))
    fence_async_shared()
    new_max = gl.convert_layout(gl.max(memory.warp_max.load(_WARP_MAX), 0), gl.SliceLayout(0, ACC))
    if _warp_any(gl.max(new_max - row_max, 0) > _SPECULATION_LIMIT):
        new_max = gl.maximum(row_max, new_max)
        p = gl.exp2(scores - new_max[None, :])
        memory.p_tile.store(p.to(memory.p_tile.dtype))
        fence_async_shared()
        warps_sync()  # otherwise Triton synchronizes after the branch, which few blocks take
        rescale = gl.exp2(row_max - new_max)[None, :]
        acc, row_sum, row_max = acc * rescale, row_sum * rescale, new_max
    consumer_wait(pipeline, index + 1, S)
    acc = warpgroup_mma(pipeline.tiles.index(v_stage).permute((1, 0)), memory.p_tile, acc, is_async=True)  # Oᵀ += Vᵀ·Pᵀ
    row_sum += p
    acc = warpgroup_mma_wait(0, deps=(acc,))
    consumer_release(index + 1, S.empty, S)
    return _DecodeState(acc, row_max, row_sum)


@gluon.jit
def _load_queries(q_tile, queries, first_query, end_query, kv_head, layer, C: gl.constexpr):
    """Copies queries [first_query, end_query) of the list to shared memory."""
    m = gl.arange(0, q_tile.shape[0], gl.SliceLayout(1, _COPY))
    d = gl.arange(0, _HEAD_DIM, gl.SliceLayout(0, _COPY))[None, :]
    used = first_query + m // C.group_size < end_query
    token = gl.load(queries + first_query + m // C.group_size, mask=used, other=0)
    query_head = kv_head * C.group_size + m % C.group_size
    at = (row_offset(token, layer.q_token_stride) + query_head * layer.q_head_stride)[:, None] + d
    q_tile.store(gl.load(layer.q + at, mask=used[:, None], other=0.0))
    fence_async_shared()
    warps_sync()  # otherwise Triton synchronizes the warps in every block


@gluon.jit
def _compute(tasks, tiles, layer, window, memory, pipeline, ACC: gl.constexpr, C: gl.constexpr, S: gl.constexpr):
    """Computes the attention of items. None has more rows than the tile in `memory`."""
    ROWS: gl.constexpr = memory.q_tile.shape[0]
    BLOCK_SEGMENTS: gl.constexpr = S.block_n // C.segment_size
    m = gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
    query = m // C.group_size
    index = 0
    for task in range(_first_task(), tasks.num_tasks, gl.num_programs(0)):
        item, kv_head = tasks.items + task // C.num_kv_heads * _ITEM_COLUMNS, task % C.num_kv_heads
        start, shared_end = gl.load(item + ITEM_SEGMENT_START), gl.load(item + ITEM_SHARED_END)
        end = gl.load(item + ITEM_SEGMENT_END)
        first_query, end_query = gl.load(item + _QUERY_START), gl.load(item + _QUERY_END)
        _load_queries(memory.q_tile, tiles.queries, first_query, end_query, kv_head, layer, C)
        used = first_query + query < end_query
        position = m
        if C.masked:
            token = gl.load(tiles.queries + first_query + query, mask=used, other=0)
            position = gl.load(tiles.positions + token, mask=used, other=0)
        acc = gl.zeros([_HEAD_DIM, ROWS], gl.float32, ACC)
        row_max = gl.full([ROWS], NEG_INF, gl.float32, gl.SliceLayout(0, ACC))
        state = _DecodeState(acc, row_max, gl.zeros([BLOCK_TOKENS, ROWS], gl.float32, ACC))
        scale = gl.load(layer.logit_scale + kv_head)
        for _ in range(start, shared_end, BLOCK_SEGMENTS):
            state = _attend_block(state, index, scale, 0, memory, pipeline, False, ACC, C, S)
            index += 2
        for at in range(shared_end, end, BLOCK_SEGMENTS):
            mask = mask_columns(
                BlockMask(segments=tiles.segments, at=at, end=end, query=query, position=position, window=window),
                ACC,
                C,
            )
            state = _attend_block(state, index, scale, mask, memory, pipeline, True, ACC, C, S)
            index += 2
        v_scale = gl.load(layer.v_scale + kv_head)
        _epilogue(state, tiles, first_query, used, kv_head, v_scale, layer, ACC, C)


@gluon.jit
def _epilogue(state, tiles, first_query, used, kv_head, v_scale, layer, ACC: gl.constexpr, C: gl.constexpr):
    """Writes the rows to their partial slots, or to `layer.out`."""
    m = gl.arange(0, state.acc.shape[1], gl.SliceLayout(0, ACC))
    d = gl.arange(0, _HEAD_DIM, gl.SliceLayout(1, ACC))[:, None]
    inverse_sum, lse = finalize(state.row_max, gl.sum(state.row_sum, 0))
    query_head = kv_head * C.group_size + m % C.group_size
    partial_slot = gl.load(tiles.partial_slots + first_query + m // C.group_size, mask=used, other=_DIRECT)
    token = gl.load(tiles.queries + first_query + m // C.group_size, mask=used, other=0)
    has_slot, direct = used & (partial_slot != _DIRECT), used & (partial_slot == _DIRECT)
    slot_at = partial_slot.to(gl.int64) * C.num_qo_heads + query_head
    out_at = row_offset(token, layer.out_token_stride) + query_head * layer.out_head_stride
    out = state.acc * inverse_sum[None, :]
    gl.store(layer.partial + slot_at[None, :] * _HEAD_DIM + d, out, mask=has_slot[None, :])
    if C.sinks:
        out = out / sink_divisor(lse, layer.sinks + query_head, direct)[None, :]
    gl.store(layer.out + out_at[None, :] + d, (out * v_scale).to(layer.out.dtype.element_ty), mask=direct[None, :])
    gl.store(layer.partial_lse + slot_at, lse, mask=has_slot)
    if C.return_lse:
        gl.store(layer.lse + token * C.num_qo_heads + query_head, lse, mask=direct)


@gluon.jit
def _consume(max_queries, tasks, tiles, layer, window, narrow, wide, pipeline, C: gl.constexpr, S: gl.constexpr):
    """Runs the consumer warpgroup of the decodes. It uses tiles of 8 rows if no item has more. `max_queries` is the
    largest number of queries of an item."""
    if max_queries * C.group_size <= _NARROW_ROWS:
        _compute(tasks, tiles, layer, window, narrow, pipeline, _NARROW_ACC, C, S)
    else:
        _compute(tasks, tiles, layer, window, wide, pipeline, _WIDE_ACC, C, S)


@gluon.jit
def _allocate_decode_memory(dtype: gl.constexpr, ROWS: gl.constexpr, P: gl.constexpr):
    q_tile = gl.allocate_shared_memory(dtype, [ROWS, _HEAD_DIM], SWIZZLED)
    p_tile = gl.allocate_shared_memory(dtype, [BLOCK_TOKENS, ROWS], P)
    return _DecodeMemory(q_tile, p_tile, gl.allocate_shared_memory(gl.float32, [_NUM_WARPS, ROWS], _UNSWIZZLED))


@gluon.jit
def hopper_prefill_decode_kernel(layer, k_desc, v_desc, work, C: gl.constexpr):
    """Computes the items of prompt chunks, and some items of the tile list."""
    if C.pdl_trigger:
        pdl_trigger()
    chunks, tiles, window = work.chunks, work.tiles, work.window
    chunk_memory = allocate_chunk_memory(k_desc, v_desc, TILE_128)
    boxes = allocate_boxes(k_desc, _PIPELINE)
    narrow = _allocate_decode_memory(k_desc.dtype, _NARROW_ROWS, _NARROW_P)
    wide = _allocate_decode_memory(k_desc.dtype, _WIDE_ROWS, _WIDE_P)
    pipeline = make_pipeline(boxes, _PIPELINE)
    num_tasks = gl.load(work.num_chunk_items) * C.num_kv_heads
    first_item = gl.load(work.item_range)
    num_decodes = (gl.load(work.item_range + 1) - first_item) * C.num_kv_heads
    tasks = _Tasks(tiles.items + first_item * _ITEM_COLUMNS, num_decodes)
    max_queries = gl.load(work.item_range + 2)
    gl.warp_specialize(
        [
            (consume_chunks, (0, chunks, num_tasks, tiles.positions, layer, window, chunk_memory, C, TILE_128)),
            (consume_chunks, (1, chunks, num_tasks, tiles.positions, layer, window, chunk_memory, C, TILE_128)),
            (_consume, (max_queries, tasks, tiles, layer, window, narrow, wide, pipeline, C, _PIPELINE)),
            (produce_chunks, (chunks, num_tasks, k_desc, chunk_memory.kv.k, BAR_K_EMPTY, C, TILE_128)),
            (produce_chunks, (chunks, num_tasks, v_desc, chunk_memory.kv.v, BAR_V_EMPTY, C, TILE_128)),
            (_produce, (tasks, tiles.segments, k_desc, v_desc, pipeline, C, _PIPELINE)),
        ],
        [4, 4, 1, 1, 1],
        [CHUNK_REGISTERS, DECODE_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS, PRODUCER_REGISTERS],
    )


def bind(plan: GpuPlan, t: Tensors, launch: Launch, options: LaunchOptions) -> BoundLaunches:
    """Binds the launch of a plan's prompt chunks and of the items that are co-scheduled with them, for layers like
    `t`."""
    given = prefill_decode_arguments(t, plan, options.pdl.trigger, options.return_lse)._asdict()
    given |= {"num_warps": 4, "maxnreg": REGISTERS}
    return BoundLaunches(hopper_prefill_decode_kernel, [Grid(launch.num_ctas, given)], LAYER, of_layer)
