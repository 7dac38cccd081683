"""Prompt chunks and decodes in one launch on Hopper: each multiprocessor computes both at once (POD-Attention §4).

POD's kernel gives a multiprocessor several programs and decides by a ticket which of them prefill and which decode. On
Hopper a program that prefills at full speed fills a multiprocessor, so here warps have roles inside one program: two
warp groups compute prompt chunks as in `prefill_hopper`, a third one decodes, and three warps bring in the chunks'
keys, the chunks' values, and both for the decodes. Tensor cores are busy with the first, memory with the second.

Decoding takes few of the program's registers and little of its time because operands are exchanged: keys and values,
of which there are many, are the rows of the matrix products, and the query rows, 8 or 16, the columns. Each of its four
warps has 16 of a block's 64 keys, so that they meet to know its maximum: see `_attend`.
"""

from typing import TYPE_CHECKING, Final

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trunkattn.kernels import prefill_hopper
from trunkattn.kernels.decode_hopper import boxes_of
from trunkattn.kernels.hopper import (
    BOX,
    DIM,
    KEYS_BACK,
    NOTHING,
    RING_BACK,
    TILE,
    VALUES_BACK,
    WIDE,
    descriptor,
    give_back,
    launch_dependents,
    load_box,
    make_barriers,
    meet,
    rolled,
    rows_at,
    take_back,
    tiles_of,
)
from trunkattn.kernels.prefill_hopper import chunk_memory, consume_chunks, produce_chunks
from trunkattn.kernels.tile_table import HYBRID_GROUPS, HYBRID_KEYS, HYBRID_NARROW, HYBRID_ROWS, GpuTile
from trunkattn.plan_format import DIRECT, ITEM_COLUMNS, UNLIMITED

if TYPE_CHECKING:
    from trunkattn.kernels.gpu import GpuPlan, Tensors

SLOTS: Final = 3  # of 16 KiB, 64 keys or values, in the decodes' ring: most of what the chunks' rings leave
REGISTERS: Final = 128  # of each of 512 threads at launch
CHUNK_REGISTERS: Final = 208  # of threads that compute chunks, then
DECODE_REGISTERS: Final = 72
_PRODUCER_REGISTERS = gl.constexpr(24)
_BLOCK_N, _STAGES = gl.constexpr(128), gl.constexpr(2)  # of the chunks
_NARROW = gl.constexpr(HYBRID_NARROW)  # rows of a decode tile, which whole groups fill
_WIDE = gl.constexpr(HYBRID_ROWS)
_KEYS = gl.constexpr(HYBRID_KEYS)  # of a block of a decode tile
_BOXES = gl.constexpr(4)  # of a block
_ITEM = gl.constexpr(ITEM_COLUMNS)
_DIRECT = gl.constexpr(DIRECT)
_LN_2 = gl.constexpr(0.6931471805599453)
_HIGHER = gl.constexpr(8.0)  # weights may grow to 2 to this power before sums are scaled anew
_WARPS = gl.constexpr(4)
_VOTE = gl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $1, 0; vote.sync.any.pred p, p, 0xffffffff; selp.s32 $0, 1, 0, p; }"
)
_THREADS = gl.constexpr(128 + 32)  # that use the decodes' ring
_TOPS = gl.constexpr(gl.BlockedLayout([4, 2], [8, 4], [4, 1], [1, 0]))  # a thread has its columns of all warps
_FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
_NARROW_ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 8, 16]))
_WIDE_ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]))
_NARROW_WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(0, 16, 2))
_WIDE_WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(32, 16, 2))


@gluon.jit
def _first_task():
    """Of this program, which takes every num_programs-th: the last program, which may have fewer chunks, first."""
    return gl.num_programs(0) - 1 - gl.program_id(0)


@gluon.jit
def _send(desc, page, place, head, ring, ready, count, SLOTS: gl.constexpr):
    """Sends for a block of keys or values."""
    slot = count % SLOTS
    bar = ready.index(slot)
    take_back(count, RING_BACK, _THREADS, SLOTS)
    mbarrier.expect(bar, _KEYS * DIM * 2)
    for half in range(rolled(2)):
        for i in gl.static_range(_BOXES):
            box = ring.index((slot * 2 + half) * _BOXES + i)
            load_box(desc, [page[i], place[i], head, half * (DIM // 2)], bar, box)


@gluon.jit
def _produce(tasks, runs, k_desc, v_desc, ring, ready,
             NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, RUN: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """Fills the decodes' ring: of each block the keys, then the values."""
    items, num_tasks = tasks
    count = 0
    for task in range(_first_task(), num_tasks, gl.num_programs(0)):
        item, head = items + task // NUM_KV_HEADS * _ITEM, task % NUM_KV_HEADS
        start, end = gl.load(item), gl.load(item + 2)
        page, place = boxes_of(runs, start, end, PAGE_SIZE, RUN)
        for at in range(start, end, _KEYS // RUN):
            next_page, next_place = boxes_of(runs, at + _KEYS // RUN, end, PAGE_SIZE, RUN)  # on its way meanwhile
            _send(k_desc, page, place, head, ring, ready, count, SLOTS)
            _send(v_desc, page, place, head, ring, ready, count + 1, SLOTS)
            count += 2
            page, place = next_page, next_place


@gluon.jit
def _any(flag):
    """Whether it is set, asked in a way that tells the assembler that warps do not part there."""
    return gl.inline_asm_elementwise(_VOTE, "=r,r", [flag.to(gl.int32)], gl.int32, False, 1) != 0


@gluon.jit
def _attend(state, count, scale, mask, memory, ring, MASK: gl.constexpr, ACC: gl.constexpr, SLOTS: gl.constexpr):
    """One block of the online softmax. state: output [128 dims, rows], what exponents are from [rows] and sums [64,
    rows], which are added up at the end.

    Weights are of the maximum before the block, which all warps know, and stand if no row's is much higher in it: then
    warps pass on weights and maxima at one meeting."""
    acc, top, total = state
    q_tile, p_tile, tops = memory
    tiles, ready = ring
    ROWS: gl.constexpr = p_tile.shape[1]
    keys, values = count % SLOTS, (count + 1) % SLOTS
    mbarrier.wait(ready.index(keys), count // SLOTS % 2)
    nothing = gl.zeros([_KEYS, ROWS], gl.float32, ACC)
    scores = warpgroup_mma(tiles.index(keys), q_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,)) * scale
    give_back(keys, RING_BACK, _THREADS)
    if MASK:
        scores = gl.where(mask, scores, -float("inf"))
    tops.store(gl.max(gl.reshape(scores, [_WARPS, _KEYS // _WARPS, ROWS]), 1))
    weights = gl.exp2(scores - top[None, :])
    p_tile.store(weights.to(p_tile.dtype))
    fence_async_shared()
    higher = gl.convert_layout(gl.max(tops.load(_TOPS), 0), gl.SliceLayout(0, ACC))
    if _any(gl.max(higher - top, 0) > _HIGHER):
        higher = gl.maximum(top, higher)
        weights = gl.exp2(scores - higher[None, :])
        p_tile.store(weights.to(p_tile.dtype))
        fence_async_shared()
        meet()  # here, or Triton has warps meet behind the branch, which few blocks take
        rescale = gl.exp2(top - higher)[None, :]
        acc, total, top = acc * rescale, total * rescale, higher
    mbarrier.wait(ready.index(values), (count + 1) // SLOTS % 2)
    acc = warpgroup_mma(tiles.index(values).permute((1, 0)), p_tile, acc, is_async=True)
    total += weights
    acc = warpgroup_mma_wait(0, deps=(acc,))
    give_back(values, RING_BACK, _THREADS)
    return acc, top, total


@gluon.jit
def _mask(runs, at, end, local, position, window, ACC: gl.constexpr, RUN: gl.constexpr, MASKED: gl.constexpr):
    """[64, rows] which row sees which key of the block that begins with run `at`."""
    n = gl.arange(0, _KEYS, gl.SliceLayout(1, ACC))
    run = at + n // RUN
    word = runs + run * 3
    rows = gl.load(word + 1, mask=run < end, other=0)
    first = n % RUN // BOX * BOX  # of the box, in the run
    missing = BOX - gl.minimum(gl.maximum((rows >> 16) - first, 0), BOX)  # a box ends with its last token
    begin, until = gl.where(n % BOX >= missing, rows & 255, 256), rows >> 8 & 255
    seen = (local[None, :] >= begin[:, None]) & (local[None, :] < until[:, None])
    if MASKED:
        where = gl.load(word + 2, mask=run < end, other=0) + n % RUN - missing
        seen = seen & (where[:, None] <= position[None, :]) & (where[:, None] > (position - window)[None, :])
    return seen


@gluon.jit
def _compute(tasks, plan, tensors, scales, window, strides, memory, ring,
             NUM_QO_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, MASKED: gl.constexpr, RETURN_LSE: gl.constexpr,
             RUN: gl.constexpr, ACC: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """Items of the tile list that merge nothing, as `decode.compute_item`, of as many rows as memory has."""
    items, num_tasks = tasks
    runs, queries, slots, positions = plan
    q, q_tile = tensors[0], memory[0]
    GROUP: gl.constexpr = NUM_QO_HEADS // NUM_KV_HEADS
    ROWS: gl.constexpr = q_tile.shape[0]
    m = gl.arange(0, ROWS, gl.SliceLayout(0, ACC))
    wide_m = gl.arange(0, ROWS, gl.SliceLayout(1, WIDE))
    wide_d = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))[None, :]
    count = 0
    for task in range(_first_task(), num_tasks, gl.num_programs(0)):
        item, head = items + task // NUM_KV_HEADS * _ITEM, task % NUM_KV_HEADS
        start, full, end = gl.load(item), gl.load(item + 1), gl.load(item + 2)
        begin, last = gl.load(item + 3), gl.load(item + 4)
        wide_used = begin + wide_m // GROUP < last
        token = gl.load(queries + begin + wide_m // GROUP, mask=wide_used, other=0)
        at = (rows_at(token, strides[0]) + (head * GROUP + wide_m % GROUP) * strides[1])[:, None] + wide_d
        q_tile.store(gl.load(q + at, mask=wide_used[:, None], other=0.0))
        fence_async_shared()
        meet()  # here, or Triton has warps meet in every block for it
        used = begin + m // GROUP < last
        position = m
        if MASKED:
            token = gl.load(queries + begin + m // GROUP, mask=used, other=0)
            position = gl.load(positions + token, mask=used, other=0)
        state = (gl.zeros([DIM, ROWS], gl.float32, ACC), gl.full([ROWS], NOTHING, gl.float32, gl.SliceLayout(0, ACC)),
                 gl.zeros([_KEYS, ROWS], gl.float32, ACC))  # fmt: skip
        scale = gl.load(scales[0] + head)
        for _ in range(start, full, _KEYS // RUN):
            state = _attend(state, count, scale, 0, memory, ring, False, ACC, SLOTS)
            count += 2
        for at_run in range(full, end, _KEYS // RUN):
            seen = _mask(runs, at_run, end, m // GROUP, position, window, ACC, RUN, MASKED)
            state = _attend(state, count, scale, seen, memory, ring, True, ACC, SLOTS)
            count += 2
        _finish(state, begin, used, head, queries, slots, tensors, strides, gl.load(scales[1] + head),
                NUM_QO_HEADS, GROUP, RETURN_LSE, ACC)  # fmt: skip


@gluon.jit
def _finish(state, begin, used, head, queries, slots, tensors, strides, v_scale,
            NUM_QO_HEADS: gl.constexpr, GROUP: gl.constexpr, RETURN_LSE: gl.constexpr, ACC: gl.constexpr):  # fmt: skip
    """Writes the rows to their partial slots, or to the output."""
    _, out, lse_out, partial, partial_lse = tensors
    acc, top, total = state
    m = gl.arange(0, acc.shape[1], gl.SliceLayout(0, ACC))
    d = gl.arange(0, DIM, gl.SliceLayout(1, ACC))[:, None]
    total = gl.sum(total, 0)
    some = gl.where(total > 0, total, 1.0)  # a row may see nothing of its item
    natural = gl.where(total > 0, top * _LN_2 + gl.log(some), NOTHING)
    query_head = head * GROUP + m % GROUP
    slot = gl.load(slots + begin + m // GROUP, mask=used, other=_DIRECT)
    token = gl.load(queries + begin + m // GROUP, mask=used, other=0)
    kept, direct = used & (slot != _DIRECT), used & (slot == _DIRECT)
    slot_at = slot.to(gl.int64) * NUM_QO_HEADS + query_head
    out_at = rows_at(token, strides[2]) + query_head * strides[3]
    result = acc * (1.0 / some)[None, :]
    gl.store(partial + slot_at[None, :] * DIM + d, result, mask=kept[None, :])
    gl.store(out + out_at[None, :] + d, (result * v_scale).to(out.dtype.element_ty), mask=direct[None, :])
    gl.store(partial_lse + slot_at, natural, mask=kept)
    if RETURN_LSE:
        gl.store(lse_out + token * NUM_QO_HEADS + query_head, natural, mask=direct)


@gluon.jit
def _decode(most, tasks, plan, tensors, scales, window, strides, narrow, wide, ring,
            NUM_QO_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, MASKED: gl.constexpr, RETURN_LSE: gl.constexpr,
            RUN: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """The items in tiles of 8 rows if they have no more. most: queries of an item."""
    if most * (NUM_QO_HEADS // NUM_KV_HEADS) <= _NARROW:
        _compute(tasks, plan, tensors, scales, window, strides, narrow, ring,
                 NUM_QO_HEADS, NUM_KV_HEADS, MASKED, RETURN_LSE, RUN, _NARROW_ACC, SLOTS)  # fmt: skip
    else:
        _compute(tasks, plan, tensors, scales, window, strides, wide, ring,
                 NUM_QO_HEADS, NUM_KV_HEADS, MASKED, RETURN_LSE, RUN, _WIDE_ACC, SLOTS)  # fmt: skip


@gluon.jit
def _decode_memory(dtype: gl.constexpr, ROWS: gl.constexpr, WEIGHTS: gl.constexpr):
    """Shared memory of a decode tile: queries, weights of a block, and its maxima in each warp."""
    q_tile = gl.allocate_shared_memory(dtype, [ROWS, DIM], TILE)
    p_tile = gl.allocate_shared_memory(dtype, [_KEYS, ROWS], WEIGHTS)
    return q_tile, p_tile, gl.allocate_shared_memory(gl.float32, [_WARPS, ROWS], _FLAT)


@gluon.jit
def hybrid_kernel(
    q, k_desc, v_desc, out, lse_out, partial, partial_lse,  # tensors
    chunk_items, chunk_count, block_table, chunk_queries, chunk_slots,  # prompt chunks
    items, beside, runs, queries, slots, positions,  # the tile list
    logit_scale, v_scale, window,  # options
    table_stride, q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    NUM_QO_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, RUN: gl.constexpr,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, RETURN_LSE: gl.constexpr, LEADS: gl.constexpr, SLOTS: gl.constexpr,
    CHUNK_REGISTERS: gl.constexpr, DECODE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """chunk_count[0] prompt chunks, as `PrefillList` has them, and the items [beside[0], beside[1]) of the tile list,
    which merge nothing and have at most beside[2] queries."""
    if LEADS:
        launch_dependents()
    dtype: gl.constexpr = q.dtype.element_ty
    k_ring, v_ring, chunk_q, chunk_tiles, chunk_barriers = chunk_memory(k_desc, v_desc, dtype, _BLOCK_N, _STAGES)
    k_ready, v_ready = chunk_barriers
    ring = gl.allocate_shared_memory(dtype, [SLOTS * 2 * _BOXES, 1, BOX, 1, DIM // 2], k_desc.layout)
    narrow = _decode_memory(dtype, _NARROW, _NARROW_WEIGHTS)
    wide = _decode_memory(dtype, _WIDE, _WIDE_WEIGHTS)
    gl.static_assert(RING_BACK + SLOTS <= 16)
    ready = make_barriers(SLOTS)
    filled = (tiles_of(ring, _KEYS, DIM, SLOTS), ready)
    chunks = (chunk_items, gl.load(chunk_count) * NUM_KV_HEADS)
    first_item = gl.load(beside)
    tasks = (items + first_item * _ITEM, (gl.load(beside + 1) - first_item) * NUM_KV_HEADS)
    rows, plan = (chunk_queries, chunk_slots, positions), (runs, queries, slots, positions)
    tensors = (q, out, lse_out, partial, partial_lse)
    scales = (logit_scale, v_scale)
    strides = (q_stride_t, q_stride_h, out_stride_t, out_stride_h)
    gl.warp_specialize(
        [
            (consume_chunks, (0, chunks, rows, tensors, scales, window, strides, chunk_q, chunk_tiles, chunk_barriers,
                              NUM_QO_HEADS, NUM_KV_HEADS, WINDOW, RETURN_LSE, _BLOCK_N, _STAGES)),
            (consume_chunks, (1, chunks, rows, tensors, scales, window, strides, chunk_q, chunk_tiles, chunk_barriers,
                              NUM_QO_HEADS, NUM_KV_HEADS, WINDOW, RETURN_LSE, _BLOCK_N, _STAGES)),
            (_decode, (gl.load(beside + 2), tasks, plan, tensors, scales, window, strides, narrow, wide, filled,
                       NUM_QO_HEADS, NUM_KV_HEADS, MASKED, RETURN_LSE, RUN, SLOTS)),
            (produce_chunks, (chunks, block_table, table_stride, k_desc, k_ring, k_ready, KEYS_BACK,
                              NUM_KV_HEADS, PAGE_SIZE, _BLOCK_N, _STAGES)),
            (produce_chunks, (chunks, block_table, table_stride, v_desc, v_ring, v_ready, VALUES_BACK,
                              NUM_KV_HEADS, PAGE_SIZE, _BLOCK_N, _STAGES)),
            (_produce, (tasks, runs, k_desc, v_desc, ring, ready, NUM_KV_HEADS, PAGE_SIZE, RUN, SLOTS)),
        ],
        [4, 4, 1, 1, 1],
        [CHUNK_REGISTERS, DECODE_REGISTERS, _PRODUCER_REGISTERS, _PRODUCER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip


def supports(t: "Tensors", plan: "GpuPlan", tile: GpuTile) -> bool:
    """Whether `launch` computes the chunks of a plan and the items beside them, of this tile: what
    `prefill_hopper.supports` accepts, and tiles of 16 rows by 64 keys."""
    return (
        plan.prefill is not None
        and prefill_hopper.supports(t, plan.prefill.tile, plan.geometry)
        and (tile.block_m, tile.block_n, tile.subtiles) == (HYBRID_ROWS, HYBRID_KEYS, 1)
        and plan.geometry.num_qo_heads // plan.geometry.num_kv_heads in HYBRID_GROUPS
        and plan.geometry.run % BOX.value == 0
    )


def launch(t: "Tensors", plan: "GpuPlan", processors: int, options: dict[str, bool]) -> None:
    """A plan's prompt chunks, and the items beside them, on the current stream. options: the kernel's LEADS and
    RETURN_LSE."""
    prefill, geometry, arrays = plan.prefill, plan.geometry, plan.arrays
    assert prefill
    chunks = prefill.arrays
    windowed = geometry.window != UNLIMITED
    hybrid_kernel[(processors,)](
        t.q, descriptor(t.k_cache), descriptor(t.v_cache), t.out, t.lse, t.partial, t.partial_lse,
        chunks["items"], arrays["prefill_count"], chunks["block_table"], chunks["queries"], chunks["slots"],
        arrays["items"], arrays["beside"], arrays["runs"], arrays["queries"], arrays["slots"], arrays["positions"],
        t.logit_scale, t.v_scale, geometry.window, prefill.table_stride, *t.q.stride()[:2], *t.out.stride()[:2],
        NUM_QO_HEADS=geometry.num_qo_heads, NUM_KV_HEADS=geometry.num_kv_heads, PAGE_SIZE=geometry.page_size,
        RUN=geometry.run, MASKED=geometry.masked, WINDOW=windowed, SLOTS=SLOTS, **options,
        CHUNK_REGISTERS=CHUNK_REGISTERS, DECODE_REGISTERS=DECODE_REGISTERS, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
