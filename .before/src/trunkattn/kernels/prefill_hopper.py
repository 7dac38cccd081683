"""Prefill on Hopper (FlashAttention-3's design) over a paged cache: warp groups with roles, in Gluon.

A program computes work items of up to 128 rows, (query token, head of the group) pairs, for one KV head each. Two warps
bring blocks of keys and of values into rings in shared memory, a box of the copy engine per 16 tokens of a page and 64
dims; two warp groups of 64 rows consume them. While a group takes the softmax of a block, the matrix unit works on its
product with the values before and on the other group's products. Blocks are taken from the last to the first, so that
the few that need a mask come before all others.
"""

from typing import TYPE_CHECKING, Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trunkattn.kernels.hopper import (
    BOX,
    DIM,
    KEYS_BACK,
    NOTHING,
    RING_BACK,
    ROWS,
    TILE,
    VALUES_BACK,
    WIDE,
    descriptor,
    give_back,
    last_values,
    launch_dependents,
    load_box,
    make_barriers,
    normalized,
    reads,
    rolled,
    rows_at,
    softmax_block,
    take_back,
    task_of,
    tiles_of,
    write_partials,
)
from trunkattn.kernels.prefill_plan import PrefillPlan
from trunkattn.kernels.tile_table import PrefillTile
from trunkattn.plan_format import DIRECT, ITEM_COLUMNS, KV_END, KV_ROW, KV_START, QUERY_END, QUERY_START, UNLIMITED

if TYPE_CHECKING:
    from trunkattn.kernels.gpu import Geometry, Tensors

_BLOCK_M: Final = 128  # rows of an item at most
BLOCK_N: Final = 128
STAGES: Final = 2  # blocks of a ring; three fit shared memory too, and were no faster
REGISTERS: Final = 168  # of a thread at launch; consumers then take 240 and leave the producers 24
_KV_ROW, _KV_START, _KV_END = gl.constexpr(KV_ROW), gl.constexpr(KV_START), gl.constexpr(KV_END)
_QUERY_START, _QUERY_END = gl.constexpr(QUERY_START), gl.constexpr(QUERY_END)
_ITEM = gl.constexpr(ITEM_COLUMNS)
_DIRECT = gl.constexpr(DIRECT)
_THREADS = gl.constexpr(2 * 128 + 32)  # that use a ring
_NEVER = gl.constexpr(2**30)  # a position that no row reaches
_ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128, 16]))
_ROW = gl.constexpr(gl.SliceLayout(1, _ACC.value))
_OPERAND = gl.constexpr(gl.DotOperandLayout(0, _ACC.value, 2))


@gluon.jit
def _extent(item, BLOCK_N: gl.constexpr):
    """First token of an item's first block, its end, and its blocks."""
    start, end = gl.load(item + _KV_START) // BOX * BOX, gl.load(item + _KV_END)
    return start, end, (end - start + BLOCK_N - 1) // BLOCK_N


@gluon.jit
def _send(desc, ring, ready, count, pages, first, end, head, BACK: gl.constexpr,
          CUT: gl.constexpr, PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Sends for the block of keys or of values at token `first`. CUT: `end` may cut it. A chunk is then read up to that
    end, from as many tokens before, and one past the end from where the cache holds nothing: what lies behind the end
    may be NaN, and is never a value."""
    CHUNKS: gl.constexpr = BLOCK_N // BOX
    page: gl.tuple = ()
    place: gl.tuple = ()
    for i in gl.static_range(CHUNKS):
        token = first + i * BOX
        start = token % PAGE_SIZE if PAGE_SIZE > BOX else 0
        if CUT:
            start = gl.where(token < end, start + gl.minimum(end - token - BOX, 0), -BOX)
            token = gl.minimum(token, end - 1)
        page += (gl.load(pages + token // PAGE_SIZE),)
        place += (start,)
    slot = count % STAGES
    bar = ready.index(slot)
    take_back(count, BACK, _THREADS, STAGES)
    mbarrier.expect(bar, BLOCK_N * DIM * 2)
    for half in range(rolled(2)):
        for i in gl.static_range(CHUNKS):
            box = ring.index((slot * 2 + half) * CHUNKS + i)
            load_box(desc, [page[i], place[i], head, half * (DIM // 2)], bar, box)


@gluon.jit
def produce_chunks(plan, block_table, table_stride, desc, ring, ready, BACK: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
                   PAGE_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Fills a ring."""
    items, num_tasks = plan
    count = 0
    for turn in range(gl.program_id(0), num_tasks, gl.num_programs(0)):
        at, head = task_of(turn, gl.program_id(0), gl.num_programs(0), num_tasks, NUM_KV_HEADS)
        at *= _ITEM
        pages = block_table + gl.load(items + at + _KV_ROW).to(gl.int64) * table_stride
        start, end, num_blocks = _extent(items + at, BLOCK_N)
        first = start + (num_blocks - 1) * BLOCK_N
        _send(desc, ring, ready, count, pages, first, end, head, BACK, True, PAGE_SIZE, BLOCK_N, STAGES)
        count += 1
        for _ in range(1, num_blocks):
            first -= BLOCK_N
            _send(desc, ring, ready, count, pages, first, end, head, BACK, False, PAGE_SIZE, BLOCK_N, STAGES)
            count += 1


@gluon.jit
def _softmax(state, scores, scale, first, bounds, MASK: gl.constexpr, CUT: gl.constexpr, WINDOW: gl.constexpr,
             BLOCK_N: gl.constexpr):  # fmt: skip
    """Weights of a block, what the sums so far are to be scaled by, and the new maximum and sum. CUT: as of `_send`."""
    seen = 0
    if MASK:
        end, lowest, position = bounds
        n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, _ACC))
        origin = 0 if WINDOW else first  # places count from there
        place = first - origin + n
        if CUT:
            chunk = first - origin + n // BOX * BOX
            place -= gl.maximum(BOX - (end - origin - chunk), 0)  # a chunk that `end` cuts ends there
            place = gl.where(place >= chunk, place, _NEVER)
        seen = place[None, :] <= (position - origin)[:, None]
        if WINDOW:
            seen = seen & (place[None, :] >= lowest[:, None])
    return softmax_block(state, scores, scale, seen, MASK)


@gluon.jit
def _step(acc, weights, state, scale, count, more, first, bounds, q_tile, tiles, barriers,
          MASK: gl.constexpr, WINDOW: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Block `count`, whose keys are there: its scores and weights, while the values of the block before are added.

    The wait for the keys of the next block, if there are more, stands before the wait for the sums: its branch keeps
    the assembler from moving the softmax behind the latter."""
    k_tiles, v_tiles = tiles
    k_ready, v_ready = barriers
    slot, before = count % STAGES, (count - 1) % STAGES
    nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, _ACC)
    scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    mbarrier.wait(v_ready.index(before), (count - 1) // STAGES % 2)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    give_back(slot, KEYS_BACK, _THREADS)
    new, rescale, state = _softmax(state, scores, scale, first, bounds, MASK, False, WINDOW, BLOCK_N)
    new = gl.convert_layout(new.to(weights.dtype), _OPERAND)
    mbarrier.wait(k_ready.index((count + 1) % STAGES), (count + 1) // STAGES % 2, pred=more)
    acc, weights, new = warpgroup_mma_wait(0, deps=(acc, weights, new))
    give_back(before, VALUES_BACK, _THREADS)
    return acc * rescale[:, None], new, state


@gluon.jit
def _finish(result, natural, entry, used, q_tile, wide, rows, tensors, strides, head, v_scale,
            NUM_QO_HEADS: gl.constexpr, GROUP: gl.constexpr, RETURN_LSE: gl.constexpr):  # fmt: skip
    """Writes the rows: to `out` by way of the query tile's memory, or partials."""
    queries, slots = rows[0], rows[1]
    q, out, lse_out, partial, partial_lse = tensors
    m, wide_entry, wide_used, wide_token, wide_head, wide_d = wide
    slot = gl.load(slots + entry, mask=used, other=_DIRECT)
    query_head = head * GROUP + m % GROUP
    write_partials(result, natural, slot, used, query_head, partial, partial_lse, _ACC, NUM_QO_HEADS)
    q_tile.store((result * v_scale).to(q.dtype.element_ty))
    direct = wide_used & (gl.load(slots + wide_entry, mask=wide_used, other=0) == _DIRECT)
    out_at = (rows_at(wide_token, strides[2]) + wide_head * strides[3])[:, None] + wide_d
    gl.store(out + out_at, q_tile.load(WIDE), mask=direct[:, None])
    if RETURN_LSE:
        token = gl.load(queries + entry, mask=used, other=0)
        gl.store(lse_out + token * NUM_QO_HEADS + query_head, natural, mask=used & (slot == _DIRECT))


@gluon.jit
def consume_chunks(HALF: gl.constexpr, plan, rows, tensors, scales, window, strides, q_tiles, tiles, barriers,
                   NUM_QO_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, WINDOW: gl.constexpr,
                   RETURN_LSE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Attention of 64 rows of each item."""
    items, num_tasks = plan
    q, queries, positions = tensors[0], rows[0], rows[2]
    k_tiles, v_tiles = tiles
    k_ready, v_ready = barriers
    GROUP: gl.constexpr = NUM_QO_HEADS // NUM_KV_HEADS
    q_tile = q_tiles.index(HALF)
    m = HALF * ROWS + gl.arange(0, ROWS, _ROW)
    wide_m = HALF * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    wide_d = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))[None, :]
    count = 0
    for turn in range(gl.program_id(0), num_tasks, gl.num_programs(0)):
        at, head = task_of(turn, gl.program_id(0), gl.num_programs(0), num_tasks, NUM_KV_HEADS)
        at *= _ITEM
        item = items + at
        query_start, query_end = gl.load(item + _QUERY_START), gl.load(item + _QUERY_END)
        scale = gl.load(scales[0] + head)
        wide_entry = query_start + wide_m // GROUP
        wide_used = wide_entry < query_end
        wide_token = gl.load(queries + wide_entry, mask=wide_used, other=0)
        wide_head = head * GROUP + wide_m % GROUP
        q_at = (rows_at(wide_token, strides[0]) + wide_head * strides[1])[:, None] + wide_d
        q_values = gl.load(q + q_at, mask=wide_used[:, None], other=0.0)
        q_tile.store(gl.where(scale < 0, -q_values, q_values))
        fence_async_shared()
        scale = gl.maximum(gl.abs(scale), 1e-37)  # a masked score, which is infinite, is to stay so
        entry = query_start + m // GROUP
        used = entry < query_end
        token = gl.load(queries + entry, mask=used, other=0)
        position = gl.load(positions + token, mask=used, other=_NEVER - 1)
        start, end, num_blocks = _extent(item, BLOCK_N)
        whole = gl.maximum(gl.minimum(end, gl.min(position, 0) + 1) - start, 0) // BLOCK_N  # blocks that all rows see
        whole = gl.minimum(whole, num_blocks - 1)
        behind, lowest = 0, position  # of them, those that begin before some row's window; the window's first token
        if WINDOW:
            lowest = gl.maximum(position - window + 1, gl.load(item + _KV_START))
            latest = gl.max(gl.where(used, lowest, start), 0)
            behind = gl.minimum((latest - start + BLOCK_N - 1) // BLOCK_N, whole)
        bounds = (end, lowest, position)
        first = start + (num_blocks - 1) * BLOCK_N
        mbarrier.wait(k_ready.index(count % STAGES), count // STAGES % 2)
        keys = k_tiles.index(count % STAGES).permute((1, 0))
        nothing = gl.zeros([ROWS, BLOCK_N], gl.float32, _ACC)
        scores = warpgroup_mma(q_tile, keys, nothing, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        give_back(count % STAGES, KEYS_BACK, _THREADS)
        state = (gl.full([ROWS], NOTHING, gl.float32, _ROW), gl.zeros([ROWS], gl.float32, _ROW))
        weights, _, state = _softmax(state, scores, scale, first, bounds, True, True, WINDOW, BLOCK_N)
        weights = gl.convert_layout(weights.to(q.dtype.element_ty), _OPERAND)
        acc = gl.zeros([ROWS, DIM], gl.float32, _ACC)
        count += 1
        mbarrier.wait(k_ready.index(count % STAGES), count // STAGES % 2, pred=num_blocks > 1)
        for block in range(num_blocks - 2, whole - 1, -1):
            acc, weights, state = _step(
                acc, weights, state, scale, count, block > 0, start + block * BLOCK_N, bounds, q_tile, tiles, barriers,
                True, WINDOW, BLOCK_N, STAGES)  # fmt: skip
            count += 1
        for block in range(whole - 1, behind - 1, -1):
            acc, weights, state = _step(
                acc, weights, state, scale, count, block > 0, start, bounds, q_tile, tiles, barriers,
                False, WINDOW, BLOCK_N, STAGES)  # fmt: skip
            count += 1
        if WINDOW:
            for block in range(behind - 1, -1, -1):
                acc, weights, state = _step(
                    acc, weights, state, scale, count, block > 0, start + block * BLOCK_N, bounds, q_tile, tiles,
                    barriers, True, WINDOW, BLOCK_N, STAGES)  # fmt: skip
                count += 1
        acc = last_values(acc, weights, count, v_tiles, v_ready, _THREADS, STAGES)
        result, natural = normalized(acc, state)
        wide = (m, wide_entry, wide_used, wide_token, wide_head, wide_d)
        _finish(result, natural, entry, used, q_tile, wide, rows, tensors, strides, head,
                gl.load(scales[1] + head), NUM_QO_HEADS, GROUP, RETURN_LSE)  # fmt: skip


@gluon.jit
def chunk_memory(k_desc, v_desc, dtype: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr):
    """Shared memory of the roles: rings of boxes, query tiles, the rings as tiles, and barriers."""
    gl.static_assert(KEYS_BACK + STAGES <= VALUES_BACK)
    gl.static_assert(VALUES_BACK + STAGES <= RING_BACK)
    BOXES: gl.constexpr = STAGES * 2 * BLOCK_N // BOX
    k_ring = gl.allocate_shared_memory(dtype, [BOXES, 1, BOX, 1, DIM // 2], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [BOXES, 1, BOX, 1, DIM // 2], v_desc.layout)
    q_tiles = gl.allocate_shared_memory(dtype, [2, ROWS, DIM], TILE)
    tiles = (tiles_of(k_ring, BLOCK_N, DIM, STAGES), tiles_of(v_ring, BLOCK_N, DIM, STAGES))
    return k_ring, v_ring, q_tiles, tiles, (make_barriers(STAGES), make_barriers(STAGES))


@gluon.jit
def prefill_hopper_kernel(
    q, k_desc, v_desc, out, lse_out, partial, partial_lse,  # tensors
    items, counts, block_table, queries, slots, positions,  # the plan
    logit_scale, v_scale, window,  # options
    table_stride, q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    NUM_QO_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
    WINDOW: gl.constexpr, RETURN_LSE: gl.constexpr, LEADS: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """counts[0] items, as `even_rounds` orders them; see `PrefillList` for the arrays."""
    if LEADS:
        launch_dependents()
    k_ring, v_ring, q_tiles, tiles, barriers = chunk_memory(k_desc, v_desc, q.dtype.element_ty, BLOCK_N, STAGES)
    k_ready, v_ready = barriers
    plan = (items, gl.load(counts) * NUM_KV_HEADS)
    rows = (queries, slots, positions)
    tensors = (q, out, lse_out, partial, partial_lse)
    scales = (logit_scale, v_scale)
    strides = (q_stride_t, q_stride_h, out_stride_t, out_stride_h)
    gl.warp_specialize(
        [
            (consume_chunks, (0, plan, rows, tensors, scales, window, strides, q_tiles, tiles, barriers,
                              NUM_QO_HEADS, NUM_KV_HEADS, WINDOW, RETURN_LSE, BLOCK_N, STAGES)),
            (consume_chunks, (1, plan, rows, tensors, scales, window, strides, q_tiles, tiles, barriers,
                              NUM_QO_HEADS, NUM_KV_HEADS, WINDOW, RETURN_LSE, BLOCK_N, STAGES)),
            (produce_chunks, (plan, block_table, table_stride, k_desc, k_ring, k_ready, KEYS_BACK,
                              NUM_KV_HEADS, PAGE_SIZE, BLOCK_N, STAGES)),
            (produce_chunks, (plan, block_table, table_stride, v_desc, v_ring, v_ready, VALUES_BACK,
                              NUM_KV_HEADS, PAGE_SIZE, BLOCK_N, STAGES)),
        ],
        [4, 1, 1],
        [240, 24, 24],
    )  # fmt: skip


def supports(t: "Tensors", tile: PrefillTile, geometry: "Geometry") -> bool:
    """Whether `launch` computes this: what the copy engine reads, groups that divide 128, items of up to 128 rows, and
    query tokens less than 2^32 elements apart."""
    group = geometry.num_qo_heads // geometry.num_kv_heads
    near = all(tensor.stride(0) < 2**32 for tensor in (t.q, t.out))
    return tile.block_m == _BLOCK_M and _BLOCK_M % group == 0 and near and reads(t, geometry)


def launch(
    t: "Tensors",
    prefill: PrefillPlan,
    counted: tuple[torch.Tensor, torch.Tensor],
    geometry: "Geometry",
    options: dict[str, bool],
) -> None:
    """The items of prompt chunks that `supports` accepts, as `kernels.prefill` computes them, on the current stream.

    counted: number of items [1] and positions [T], int32, as the plan has them. Without a window an item's KV_START is
    a multiple of 16, as cuts of packs are. With one, up to 15 tokens before it are read with a weight of 0: they must
    be finite, as tokens of the sequence are."""
    k_desc, v_desc = (descriptor(cache) for cache in (t.k_cache, t.v_cache))
    arrays, (count, positions) = prefill.arrays, counted
    windowed = geometry.window != UNLIMITED
    prefill_hopper_kernel[(prefill.programs,)](
        t.q, k_desc, v_desc, t.out, t.lse, t.partial, t.partial_lse,
        arrays["items"], count, arrays["block_table"], arrays["queries"], arrays["slots"], positions,
        t.logit_scale, t.v_scale, geometry.window if windowed else 0, prefill.table_stride,
        *t.q.stride()[:2], *t.out.stride()[:2],
        NUM_QO_HEADS=geometry.num_qo_heads, NUM_KV_HEADS=geometry.num_kv_heads, PAGE_SIZE=geometry.page_size,
        WINDOW=windowed, BLOCK_N=BLOCK_N, STAGES=STAGES, **options, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
