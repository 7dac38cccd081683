"""Prompt chunks and decodes in one launch on Hopper: each multiprocessor computes both at once (POD-Attention §4).

POD's kernel gives a multiprocessor several programs and decides by a ticket which of them prefill and which decode. On
Hopper a program that prefills at full speed fills a multiprocessor, so here warps have roles inside one program: two
warp groups compute prompt chunks as in `prefill_hopper`, a third one decodes, and three warps bring in the chunks'
keys, the chunks' values, and both for the decodes. Tensor cores are busy with the first, memory with the second.

Decoding takes few of the program's registers and little of its time because operands are exchanged: keys and values,
of which there are many, are the rows of the matrix products, and the query rows, at most 16, the columns.
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
from trunkattn.kernels.hopper import descriptor, launch_dependents, load_box, make_barriers, rolled, tiles_of
from trunkattn.kernels.prefill_hopper import chunk_memory, consume_chunks, produce_chunks
from trunkattn.kernels.tile_table import HYBRID_GROUPS, HYBRID_KEYS, HYBRID_ROWS, GpuTile
from trunkattn.plan_format import DIRECT, ITEM_COLUMNS, UNLIMITED

if TYPE_CHECKING:
    from trunkattn.kernels.gpu import GpuPlan, Tensors

SLOTS: Final = 7  # of 8 KiB, 64 keys or values of 64 dims, in the decodes' ring: what the chunks' rings leave
REGISTERS: Final = 128  # of each of 512 threads at launch
CHUNK_REGISTERS: Final = 208  # of threads that compute chunks, then
DECODE_REGISTERS: Final = 72
_PRODUCER_REGISTERS = gl.constexpr(24)
_BLOCK_N, _STAGES = gl.constexpr(128), gl.constexpr(2)  # of the chunks
_ROWS = gl.constexpr(HYBRID_ROWS)  # of a decode tile, which whole groups fill
_KEYS = gl.constexpr(HYBRID_KEYS)  # of a block of a decode tile
_BOX = gl.constexpr(16)  # tokens that the copy engine brings at once
_BOXES = gl.constexpr(4)  # of a block
_DIM = gl.constexpr(128)
_HALF = gl.constexpr(64)  # dims
_ITEM = gl.constexpr(ITEM_COLUMNS)
_DIRECT = gl.constexpr(DIRECT)
_NOTHING = gl.constexpr(-1e30)
_LN_2 = gl.constexpr(0.6931471805599453)
_ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 16, 16]))
_KEY = gl.constexpr(gl.SliceLayout(1, _ACC.value))  # keys, or dims
_ROW = gl.constexpr(gl.SliceLayout(0, _ACC.value))  # query rows
_TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
_WEIGHTS = gl.constexpr(gl.NVMMASharedLayout(32, 16, 2))
_WIDE = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _first_task():
    """Of this program, which takes every num_programs-th: the last program, which may have fewer chunks, first."""
    return gl.num_programs(0) - 1 - gl.program_id(0)


@gluon.jit
def _send(desc, page, place, head, ring, ready, empty, count, SLOTS: gl.constexpr):
    """Sends for both halves of the dims of a block of keys or values."""
    for half in range(rolled(2)):
        slot = (count + half) % SLOTS
        bar = ready.index(slot)
        mbarrier.wait(empty.index(slot), (count + half) // SLOTS % 2 ^ 1)
        mbarrier.expect(bar, _KEYS * _HALF * 2)
        for i in gl.static_range(_BOXES):
            load_box(desc, [page[i], place[i], head, half * _HALF], bar, ring.index(slot * _BOXES + i))
    return count + 2


@gluon.jit
def _produce(tasks, runs, k_desc, v_desc, ring, ready, empty,
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
            count = _send(k_desc, page, place, head, ring, ready, empty, count, SLOTS)
            count = _send(v_desc, page, place, head, ring, ready, empty, count, SLOTS)
            page, place = next_page, next_place


@gluon.jit
def _attend(state, count, scale, mask, q_tile, p_tile, tiles, ready, empty, MASK: gl.constexpr, SLOTS: gl.constexpr):
    """One block of the online softmax. state: output of each half [64 dims, 16 rows], maximum [16] and sums
    [64, 16], which are added up at the end."""
    low, high, top, total = state
    for half in gl.static_range(2):
        mbarrier.wait(ready.index((count + half) % SLOTS), (count + half) // SLOTS % 2)
    scores = gl.zeros([_KEYS, _ROWS], gl.float32, _ACC)
    for half in gl.static_range(2):
        keys = tiles.index((count + half) % SLOTS)
        scores = warpgroup_mma(keys, q_tile.index(half).permute((1, 0)), scores, use_acc=half > 0, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,)) * scale
    for half in gl.static_range(2):
        mbarrier.arrive(empty.index((count + half) % SLOTS))
    if MASK:
        scores = gl.where(mask, scores, -float("inf"))
    higher = gl.maximum(top, gl.max(scores, 0))
    weights = gl.exp2(scores - higher[None, :])
    rescale = gl.exp2(top - higher)[None, :]
    p_tile.store(weights.to(p_tile.dtype))
    fence_async_shared()
    count += 2
    for half in gl.static_range(2):
        mbarrier.wait(ready.index((count + half) % SLOTS), (count + half) // SLOTS % 2)
    low = warpgroup_mma(tiles.index(count % SLOTS).permute((1, 0)), p_tile, low * rescale, is_async=True)
    high = warpgroup_mma(tiles.index((count + 1) % SLOTS).permute((1, 0)), p_tile, high * rescale, is_async=True)
    low, high = warpgroup_mma_wait(0, deps=(low, high))
    for half in gl.static_range(2):
        mbarrier.arrive(empty.index((count + half) % SLOTS))
    return low, high, higher, total * rescale + weights


@gluon.jit
def _mask(runs, at, end, local, position, window, RUN: gl.constexpr, MASKED: gl.constexpr):
    """[64, 16] which row sees which key of the block that begins with run `at`."""
    n = gl.arange(0, _KEYS, _KEY)
    run = at + n // RUN
    word = runs + run * 3
    rows = gl.load(word + 1, mask=run < end, other=0)
    first = n % RUN // _BOX * _BOX  # of the box, in the run
    missing = _BOX - gl.minimum(gl.maximum((rows >> 16) - first, 0), _BOX)  # a box ends with its last token
    begin, until = gl.where(n % _BOX >= missing, rows & 255, 256), rows >> 8 & 255
    seen = (local[None, :] >= begin[:, None]) & (local[None, :] < until[:, None])
    if MASKED:
        where = gl.load(word + 2, mask=run < end, other=0) + n % RUN - missing
        seen = seen & (where[:, None] <= position[None, :]) & (where[:, None] > (position - window)[None, :])
    return seen


@gluon.jit
def _decode(tasks, plan, tensors, scales, window, strides, q_tile, p_tile, tiles, ready, empty,
            NUM_QO_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, MASKED: gl.constexpr, RETURN_LSE: gl.constexpr,
            RUN: gl.constexpr, SLOTS: gl.constexpr):  # fmt: skip
    """Items of the tile list that merge nothing, as `decode.compute_item`."""
    items, num_tasks = tasks
    runs, queries, slots, positions = plan
    q = tensors[0]
    GROUP: gl.constexpr = NUM_QO_HEADS // NUM_KV_HEADS
    m = gl.arange(0, _ROWS, _ROW)
    wide_m = gl.arange(0, _ROWS, gl.SliceLayout(1, _WIDE))
    wide_d = gl.arange(0, _HALF, gl.SliceLayout(0, _WIDE))[None, :]
    count = 0
    for task in range(_first_task(), num_tasks, gl.num_programs(0)):
        item, head = items + task // NUM_KV_HEADS * _ITEM, task % NUM_KV_HEADS
        start, full, end = gl.load(item), gl.load(item + 1), gl.load(item + 2)
        begin, last = gl.load(item + 3), gl.load(item + 4)
        wide_used = begin + wide_m // GROUP < last
        token = gl.load(queries + begin + wide_m // GROUP, mask=wide_used, other=0).to(gl.int64)
        at = (token * strides[0] + (head * GROUP + wide_m % GROUP) * strides[1])[:, None] + wide_d
        for half in gl.static_range(2):
            q_tile.index(half).store(gl.load(q + at + half * _HALF, mask=wide_used[:, None], other=0.0))
        fence_async_shared()
        used = begin + m // GROUP < last
        position = m
        if MASKED:
            token = gl.load(queries + begin + m // GROUP, mask=used, other=0)
            position = gl.load(positions + token, mask=used, other=0)
        nothing = gl.zeros([_KEYS, _ROWS], gl.float32, _ACC)
        state = (nothing, nothing, gl.full([_ROWS], _NOTHING, gl.float32, _ROW), nothing)
        scale = gl.load(scales[0] + head)
        for _ in range(start, full, _KEYS // RUN):
            state = _attend(state, count, scale, 0, q_tile, p_tile, tiles, ready, empty, False, SLOTS)
            count += 4
        for at_run in range(full, end, _KEYS // RUN):
            seen = _mask(runs, at_run, end, m // GROUP, position, window, RUN, MASKED)
            state = _attend(state, count, scale, seen, q_tile, p_tile, tiles, ready, empty, True, SLOTS)
            count += 4
        _finish(state, begin, used, head, queries, slots, tensors, strides, gl.load(scales[1] + head),
                NUM_QO_HEADS, GROUP, RETURN_LSE)  # fmt: skip


@gluon.jit
def _finish(state, begin, used, head, queries, slots, tensors, strides, v_scale,
            NUM_QO_HEADS: gl.constexpr, GROUP: gl.constexpr, RETURN_LSE: gl.constexpr):  # fmt: skip
    """Writes the rows to their partial slots, or to the output."""
    _, out, lse_out, partial, partial_lse = tensors
    low, high, top, total = state
    m = gl.arange(0, _ROWS, _ROW)
    d = gl.arange(0, _HALF, _KEY)[:, None]
    total = gl.sum(total, 0)
    some = gl.where(total > 0, total, 1.0)  # a row may see nothing of its item
    natural = gl.where(total > 0, top * _LN_2 + gl.log(some), _NOTHING)
    query_head = head * GROUP + m % GROUP
    slot = gl.load(slots + begin + m // GROUP, mask=used, other=_DIRECT)
    token = gl.load(queries + begin + m // GROUP, mask=used, other=0)
    kept, direct = used & (slot != _DIRECT), used & (slot == _DIRECT)
    slot_at = slot.to(gl.int64) * NUM_QO_HEADS + query_head
    out_at = token.to(gl.int64) * strides[2] + query_head * strides[3]
    for half in gl.static_range(2):
        result = low if half == 0 else high
        result = result * (1.0 / some)[None, :]
        gl.store(partial + slot_at[None, :] * _DIM + d + half * _HALF, result, mask=kept[None, :])
        result = (result * v_scale).to(out.dtype.element_ty)
        gl.store(out + out_at[None, :] + d + half * _HALF, result, mask=direct[None, :])
    gl.store(partial_lse + slot_at, natural, mask=kept)
    if RETURN_LSE:
        gl.store(lse_out + token * NUM_QO_HEADS + query_head, natural, mask=direct)


@gluon.jit
def hybrid_kernel(
    q, k_desc, v_desc, out, lse_out, partial, partial_lse,  # tensors
    chunk_items, chunk_counts, block_table, chunk_queries, chunk_slots,  # prompt chunks
    items, beside, runs, queries, slots, positions,  # the tile list
    logit_scale, v_scale, window,  # options
    table_stride, q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    NUM_QO_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, RUN: gl.constexpr,
    MASKED: gl.constexpr, WINDOW: gl.constexpr, RETURN_LSE: gl.constexpr, LEADS: gl.constexpr, SLOTS: gl.constexpr,
    CHUNK_REGISTERS: gl.constexpr, DECODE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Prompt chunks, as `prefill_hopper_kernel` has them, and the items [beside[0], beside[1]) of the tile list,
    which merge nothing."""
    if LEADS:
        launch_dependents()
    dtype: gl.constexpr = q.dtype.element_ty
    k_ring, v_ring, chunk_q, chunk_tiles, chunk_barriers = chunk_memory(k_desc, v_desc, dtype, _BLOCK_N, _STAGES)
    k_ready, k_empty, v_ready, v_empty = chunk_barriers
    ring = gl.allocate_shared_memory(dtype, [SLOTS * _BOXES, 1, _BOX, 1, _HALF], k_desc.layout)
    q_tile = gl.allocate_shared_memory(dtype, [2, _ROWS, _HALF], _TILE)
    p_tile = gl.allocate_shared_memory(dtype, [_KEYS, _ROWS], _WEIGHTS)
    ready, empty = make_barriers(SLOTS, 1), make_barriers(SLOTS, 1)
    tiles = tiles_of(ring, _KEYS, _HALF, SLOTS)
    chunks = (chunk_items, gl.load(chunk_counts), gl.load(chunk_counts + 1))
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
            (_decode, (tasks, plan, tensors, scales, window, strides, q_tile, p_tile, tiles, ready, empty,
                       NUM_QO_HEADS, NUM_KV_HEADS, MASKED, RETURN_LSE, RUN, SLOTS)),
            (produce_chunks, (chunks, block_table, table_stride, k_desc, k_ring, k_ready, k_empty,
                              NUM_KV_HEADS, PAGE_SIZE, _BLOCK_N, _STAGES)),
            (produce_chunks, (chunks, block_table, table_stride, v_desc, v_ring, v_ready, v_empty,
                              NUM_KV_HEADS, PAGE_SIZE, _BLOCK_N, _STAGES)),
            (_produce, (tasks, runs, k_desc, v_desc, ring, ready, empty, NUM_KV_HEADS, PAGE_SIZE, RUN, SLOTS)),
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
        and plan.geometry.run % _BOX.value == 0
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
        chunks["items"], arrays["prefill_counts"], chunks["block_table"], chunks["queries"], chunks["slots"],
        arrays["items"], arrays["beside"], arrays["runs"], arrays["queries"], arrays["slots"], arrays["positions"],
        t.logit_scale, t.v_scale, geometry.window, prefill.table_stride, *t.q.stride()[:2], *t.out.stride()[:2],
        NUM_QO_HEADS=geometry.num_qo_heads, NUM_KV_HEADS=geometry.num_kv_heads, PAGE_SIZE=geometry.page_size,
        RUN=geometry.run, MASKED=geometry.masked, WINDOW=windowed, SLOTS=SLOTS, **options,
        CHUNK_REGISTERS=CHUNK_REGISTERS, DECODE_REGISTERS=DECODE_REGISTERS, num_warps=4, maxnreg=REGISTERS,
    )  # fmt: skip
