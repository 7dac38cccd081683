"""Latent attention in row tiles on Hopper over a paged latent cache, warp specialized, in Gluon.

A CTA computes items of up to 64 rows. A row is a (query token, head) pair. Blocks have 64 cached rows, or 32 if the
cache has 8 bits. They are keys and values of all heads at once. An output of 512 columns in float32 fills the registers
of two consumer warpgroups, so each of them holds 256 columns. They take blocks in pairs, like FlashMLA's "seesaw"
schedule (https://github.com/deepseek-ai/FlashMLA, docs/20250422-new-kernel-deep-dive.md). Each computes the scores of
one block, and both multiply the probabilities of both blocks by their half of the values. The softmax of one warpgroup
runs while the tensor cores work for the other. Probabilities and row maxima pass through shared memory. Rows of 8 bits
are widened to float16 before the consumers see them (`widen`), and queries and probabilities are then float16, too.
"""

from typing import Any, Final, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.bound import BoundLaunches, Grid
from trunkattn.gpu.hopper.common import (
    NEG_INF,
    SWIZZLED,
    WARPGROUP_ROWS,
    reinterpret,
)
from trunkattn.gpu.hopper.online_softmax import copy_layout
from trunkattn.gpu.hopper.segments import row_tiles_of
from trunkattn.gpu.hopper.tasks import begin_launch, end_launch, prefetch_plan, task_of, tasks_of
from trunkattn.gpu.launch_order import Launch, LaunchOptions
from trunkattn.gpu.layer import Tensors
from trunkattn.gpu.mla.blocks import (
    HALF_DIM,
    LEFT,
    PART_COLUMNS,
    RIGHT,
    ROPE_DIM,
    RowMask,
    allocate_buffers,
    blocks_of,
    load_items,
)
from trunkattn.gpu.mla.pairs import (
    Item,
    Shared,
    State,
    left_last,
    left_pair,
    right_last,
    right_pair,
)
from trunkattn.gpu.mla.rows import FEW_THREADS_A_ROW, epilogue, load_queries, rows_of
from trunkattn.gpu.mla.spec import BLOCK_ROWS, NARROW_BLOCK_ROWS
from trunkattn.gpu.mla.widen import narrow_descriptor, widen_pairs
from trunkattn.planner.work_list import QUERY_END, QUERY_START

_QUERY_START, _QUERY_END = gl.constexpr(QUERY_START), gl.constexpr(QUERY_END)
REGISTERS: Final = 168  # of a thread at launch: there are twelve warps, or ten that Triton rounds up
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
_REGISTERS_BESIDE_WIDENERS, _WIDENER_REGISTERS = gl.constexpr(216), gl.constexpr(72)
_P_SWIZZLED = gl.constexpr(gl.NVMMASharedLayout(64, 16, 2))  # rows of 32 probabilities


class LatentConstants(NamedTuple):
    """What the kernel is compiled for.

    Attributes:
        num_qo_heads, group_size: the number of query heads, and how many of them an item computes at once.
        segment_size: tokens of a whole segment, and rows of a TMA box.
        block_rows, pairs_held: cached rows of a block, and pairs of blocks that shared memory holds.
        masked: queries of one sequence see different tokens.
        widened: the cache has 8 bits, and producer warps widen its rows to float16.
        box_columns: columns of a TMA box: 64, or 128 if the cache has 8 bits.
        part_threads, producer_threads: of the producer warps, those that fill one part, and all.
        scores, acc: layouts of a block's scores and of half of the output.
        copy: the layout in which half of the output is copied to memory.
    """

    num_qo_heads: int
    num_head_groups: int
    group_size: int
    page_size: int
    segment_size: int
    block_rows: int
    pairs_held: int
    masked: bool
    return_lse: bool
    widened: bool
    box_columns: int
    part_threads: int
    producer_threads: int
    scores: Any
    acc: Any
    copy: Any


def constants(
    num_qo_heads: int,
    group_size: int,
    page_size: int,
    segment_size: int,
    masked: bool,
    return_lse: bool,
    kv_bytes: int,
) -> LatentConstants:
    """Returns the constants of an attention. kv_bytes: bytes of a number in the cache."""
    widened = kv_bytes == 1
    part_threads, producer_threads = (128, 128) if widened else (32, 64)
    block_rows, pairs_held = (NARROW_BLOCK_ROWS, 2) if widened else (BLOCK_ROWS, 1)
    scores, acc = (
        gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])
        for columns in (block_rows, HALF_DIM.value)
    )
    return LatentConstants(
        num_qo_heads=num_qo_heads,
        num_head_groups=num_qo_heads // group_size,
        group_size=group_size,
        page_size=page_size,
        segment_size=segment_size,
        block_rows=block_rows,
        pairs_held=pairs_held,
        masked=masked,
        return_lse=return_lse,
        widened=widened,
        box_columns=128 // kv_bytes,
        part_threads=part_threads,
        producer_threads=producer_threads,
        scores=scores,
        acc=acc,
        copy=FEW_THREADS_A_ROW.value if widened else copy_layout(HALF_DIM.value),
    )


class LatentLayer(NamedTuple):
    """Tensors of one layer, and their strides.

    q_latent and out are [T, Hq, 512], and q_rope is [T, Hq, 64]. The other tensors are float32: lse [T, Hq], partial
    [slots, Hq, 512], partial_lse [slots, Hq], logit_scale and v_scale [1]. logit_scale includes log2(e)."""

    q_latent: Any
    q_rope: Any
    out: Any
    lse: Any
    partial: Any
    partial_lse: Any
    logit_scale: Any
    v_scale: Any
    q_latent_token_stride: Any
    q_latent_head_stride: Any
    q_rope_token_stride: Any
    q_rope_head_stride: Any
    out_token_stride: Any
    out_head_stride: Any


@gluon.jit
def _last_block(state, shared, buffers, item, uses, WHICH: gl.constexpr, C: gl.constexpr):
    """Adds the last block of an item with an odd number of blocks. Returns the state and the uses of the own buffer."""
    if item.blocks.count % 2 == 1:
        if WHICH == LEFT:
            state = left_last(state, shared, buffers, item, uses, C)
            uses += 1
        else:
            state = right_last(state, shared, buffers, uses, C)
    return state, uses


@gluon.jit
def _consume(tasks, tiles, layer, window, shared, buffers, WHICH: gl.constexpr, C: gl.constexpr):
    """Runs a consumer warpgroup, which computes its half of the output of the items."""
    ROWS: gl.constexpr = gl.SliceLayout(1, C.scores)
    ACC: gl.constexpr = C.acc
    uses, num_items = 0, 0  # pairs, or own blocks, that were computed before
    for turn in range(tasks.cta, tasks.num_tasks, tasks.num_ctas):
        task = task_of(tasks, turn, C.num_head_groups)
        blocks = blocks_of(task.item, C)
        if blocks.count > 0:  # an item that the device planner had no room for has no segments
            first, end = gl.load(task.item + _QUERY_START), gl.load(task.item + _QUERY_END)
            first_head = task.kv_head * C.group_size
            is_first = num_items == 0
            num_items += 1
            rows = rows_of(tiles, first, end, first_head, C)
            q_rope, scale = load_queries(shared, rows, layer, is_first, WHICH, C)
            position = rows.query
            if C.masked:
                position = gl.load(tiles.positions + rows.token, mask=rows.used, other=0)
            item = Item(q_rope, scale, RowMask(tiles.segments, rows.query, position, window), blocks)
            state = State(
                gl.full([WARPGROUP_ROWS], NEG_INF, gl.float32, ROWS),
                gl.zeros([WARPGROUP_ROWS], gl.float32, ROWS),
                gl.zeros([WARPGROUP_ROWS, HALF_DIM], gl.float32, ACC),
            )
            PAIR: gl.constexpr = left_pair if WHICH == LEFT else right_pair
            num_full = blocks.num_full // 2 * 2
            for nth in range(0, num_full, 2):
                state = PAIR(state, shared, buffers, item, uses, nth, False, C)
                uses += 1
            for nth in range(num_full, blocks.count if C.widened else blocks.count // 2 * 2, 2):
                state = PAIR(state, shared, buffers, item, uses, nth, True, C)
                uses += 1
            if not C.widened:
                state, uses = _last_block(state, shared, buffers, item, uses, WHICH, C)
            epilogue(state, shared, tiles, first, end, first_head, layer, WHICH, C)


class LatentWork(NamedTuple):
    """The arrays of a plan. `counts` says where buckets begin. `window` is in tokens, and 2^31 - 1 hides nothing. `pdl`
    is a `Pdl`; Triton compiles no special code for its bools."""

    tiles: Any
    counts: Any
    window: Any
    pdl: Any


class LatentArguments(NamedTuple):
    """The parameters of `latent_decode_kernel`. `desc` is the TMA descriptor of the cache."""

    layer: LatentLayer
    desc: Any
    work: LatentWork
    first_bucket: int
    last_bucket: int
    items_size: int
    queries_size: int
    segments_size: int
    C: LatentConstants


UNSPECIALIZED: Final = LatentArguments._fields[3:-1]


@gluon.jit
def _allocate_shared(dtype: gl.constexpr, C: gl.constexpr):
    """Allocates the shared memory of the consumer warpgroups."""
    ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_rope = gl.allocate_shared_memory(dtype, [WARPGROUP_ROWS, ROPE_DIM], SWIZZLED)
    if C.widened:
        BOTH: gl.constexpr = (2, WARPGROUP_ROWS, C.block_rows)
        probabilities = reinterpret(q_rope, dtype, BOTH, _P_SWIZZLED)
        p_left, p_right = probabilities.index(0), probabilities.index(1)
    else:
        P: gl.constexpr = (WARPGROUP_ROWS, C.block_rows)
        p_left = gl.allocate_shared_memory(dtype, P, SWIZZLED)
        p_right = q_rope
    return Shared(
        q=gl.allocate_shared_memory(dtype, [2, WARPGROUP_ROWS, HALF_DIM], SWIZZLED),
        q_rope=q_rope,
        p_left=p_left,
        p_right=p_right,
        max_left=gl.allocate_shared_memory(gl.float32, [WARPGROUP_ROWS], ROW),
        max_right=gl.allocate_shared_memory(gl.float32, [WARPGROUP_ROWS], ROW),
        sum_left=gl.allocate_shared_memory(gl.float32, [WARPGROUP_ROWS], ROW),
        sum_right=gl.allocate_shared_memory(gl.float32, [WARPGROUP_ROWS], ROW),
    )


@gluon.jit(do_not_specialize=UNSPECIALIZED)
def latent_decode_kernel(
    layer,
    desc,
    work,
    first_bucket,
    last_bucket,
    items_size,
    queries_size,
    segments_size,
    C: gl.constexpr,
):
    """Computes the items of buckets first_bucket to last_bucket, which merge nothing. Each `*_size` is the number of
    elements of an array."""
    begin_launch(work.pdl)
    tiles = work.tiles
    cta = gl.program_id(0)
    prefetch_plan(tiles, items_size, queries_size, segments_size, cta)
    dtype: gl.constexpr = gl.float16 if C.widened else layer.out.dtype.element_ty
    buffers = allocate_buffers(desc, dtype, C)
    shared = _allocate_shared(dtype, C)
    tasks = tasks_of(work, first_bucket, last_bucket, cta, gl.num_programs(0), C.num_head_groups)
    if not C.widened:
        gl.warp_specialize(
            [
                (_consume, (tasks, tiles, layer, work.window, shared, buffers, LEFT, C)),
                (_consume, (tasks, tiles, layer, work.window, shared, buffers, RIGHT, C)),
                (load_items, (tasks, tiles.segments, desc, buffers, LEFT, C)),
                (load_items, (tasks, tiles.segments, desc, buffers, RIGHT, C)),
            ],
            [4, 1, 1],
            [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS, _PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_consume, (tasks, tiles, layer, work.window, shared, buffers, LEFT, C)),
                (_consume, (tasks, tiles, layer, work.window, shared, buffers, RIGHT, C)),
                (widen_pairs, (tasks, tiles.segments, desc, buffers, C)),
            ],
            [4, 4],
            [_REGISTERS_BESIDE_WIDENERS, _WIDENER_REGISTERS],
        )
    end_launch(work.pdl)


def tma_descriptor(cache: torch.Tensor, segment_size: int) -> TensorDescriptor:
    """Returns the argument `desc`. A TMA box holds a segment's tokens and 64 columns. The cache is [pages, page_size,
    1, columns]."""
    rows = cache[:, :, 0]
    if rows.itemsize == 1:
        return narrow_descriptor(rows, segment_size)
    box = [1, segment_size, PART_COLUMNS.value]
    return TensorDescriptor(rows, list(rows.shape), list(rows.stride()), box, gl.NVMMASharedLayout(128, 16, 3))


def layer_of(t: Tensors) -> LatentLayer:
    """Returns the argument `layer`."""
    assert t.q_rope is not None
    return LatentLayer(
        q_latent=t.q,
        q_rope=t.q_rope,
        out=t.out,
        lse=t.lse,
        partial=t.partial,
        partial_lse=t.partial_lse,
        logit_scale=t.logit_scale,
        v_scale=t.v_scale,
        q_latent_token_stride=t.q.stride(0),
        q_latent_head_stride=t.q.stride(1),
        q_rope_token_stride=t.q_rope.stride(0),
        q_rope_head_stride=t.q_rope.stride(1),
        out_token_stride=t.out.stride(0),
        out_head_stride=t.out.stride(1),
    )


LAYER: Final = ("layer", "desc")  # the arguments that differ from layer to layer


def bind(plan: GpuPlan, t: Tensors, launch: Launch, options: LaunchOptions) -> BoundLaunches:
    """Binds the launch of the items of the launch's buckets, for layers like `t`. With a window, the tokens of a
    segment that lie before it are loaded and masked. They must be finite, as tokens of the sequence are."""
    g, arrays, sizes = plan.geometry, plan.arrays, plan.sizes

    def of_layer(each: Tensors) -> tuple[LatentLayer, TensorDescriptor]:
        return layer_of(each), tma_descriptor(each.k_cache, g.segment_size)

    layer, desc = of_layer(t)
    given = LatentArguments(
        layer=layer,
        desc=desc,
        work=LatentWork(tiles=row_tiles_of(plan), counts=arrays[launch.counts], window=g.window, pdl=options.pdl),
        first_bucket=launch.buckets[0],
        last_bucket=launch.buckets[-1],
        items_size=sizes["items"],
        queries_size=sizes["queries"],
        segments_size=sizes["segments"],
        C=constants(
            g.num_qo_heads, g.group_size, g.page_size, g.segment_size, g.masked, options.return_lse, t.k_cache.itemsize
        ),
    )
    compiled = {"num_warps": 4, "maxnreg": REGISTERS, "launch_pdl": True}
    grid = Grid(min(launch.num_ctas, plan.card.num_sms), given._asdict() | compiled)
    return BoundLaunches(latent_decode_kernel, [grid], LAYER, of_layer)
