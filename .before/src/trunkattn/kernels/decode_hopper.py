"""Row tiles on Hopper over a paged cache: items of the tile list by warps with roles, in Gluon.

A program computes items of up to 64 rows, (query token, head of the group) pairs, for one KV head each. Two warps bring
blocks of 64 keys and of values into rings in shared memory, 16 tokens of a page and 64 dims at a time, wherever they
lie; a warp group takes them from there. Two programs fill a multiprocessor: while one takes the softmax of a block, the
matrix unit works for the other. A block with a mask is computed whole: the matrix unit has time, memory has not.
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

from trunkattn.kernels.hopper import (
    BOX,
    DIM,
    KEYS_BACK,
    NOTHING,
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
    softmax_block,
    take_back,
    task_of,
    tiles_of,
    wait_for_the_launch_ahead,
    write_partials,
)
from trunkattn.plan_format import DIRECT, ITEM_COLUMNS, QUERY_END, QUERY_START, RUN_END, RUN_FULL, RUN_START

if TYPE_CHECKING:
    from trunkattn.kernels.gpu import Geometry, GpuPlan, Tensors
    from trunkattn.kernels.tile_table import GpuTile

# Numbers of a plan and of a launch: arguments for which nothing is compiled anew
NUMBERS: Final = (
    "first_bucket", "last_bucket", "items_size", "queries_size", "runs_size", "first_program", "programs", "leads",
    "follows",
)  # fmt: skip
REGISTERS: Final = 128  # of each of 256 threads at launch; those that consume then take what the others leave
_PRODUCER_REGISTERS = gl.constexpr(24)
_RUN_START, _RUN_FULL, _RUN_END = gl.constexpr(RUN_START), gl.constexpr(RUN_FULL), gl.constexpr(RUN_END)
_QUERY_START, _QUERY_END = gl.constexpr(QUERY_START), gl.constexpr(QUERY_END)
_ITEM = gl.constexpr(ITEM_COLUMNS)
_DIRECT = gl.constexpr(DIRECT)
_KEYS = gl.constexpr(64)
_STAGES = gl.constexpr(2)  # blocks of a ring; three fit shared memory too, and were no faster
_BOXES = gl.constexpr(4)  # of a block
_THREADS = gl.constexpr(128 + 32)  # that use a ring
_LINE = gl.constexpr(32)  # numbers in 128 bytes
_ACC = gl.constexpr(gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16]))
_ROW, _KEY = gl.constexpr(gl.SliceLayout(1, _ACC.value)), gl.constexpr(gl.SliceLayout(0, _ACC.value))
_OPERAND = gl.constexpr(gl.DotOperandLayout(0, _ACC.value, 2))
_WIDE_ROW = gl.constexpr(gl.SliceLayout(1, WIDE.value))


@gluon.jit
def _prefetch(array, size, program, LINES: gl.constexpr):
    """The first lines of an array of `size` numbers to the L2 cache. A plan has left it since the layer before, and a
    program would wait for memory three times before it knows where its keys are."""
    lines = gl.minimum(size // _LINE, LINES)
    first = program * 128
    if first < lines:
        line = gl.minimum(first + gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0])), lines - 1)
        gl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; // $0", "=r,l", [array + line * _LINE], gl.int32, False, 1)  # fmt: skip


@gluon.jit
def boxes_of(runs, at, end, PAGE_SIZE: gl.constexpr, RUN: gl.constexpr):
    """Pages and places of the boxes of a block that begins with run `at`. A box of fewer tokens than 16 ends where they
    end, and begins in what the copy engine sets to 0, or with tokens before them: what lies behind may be NaN."""
    page: gl.tuple = ()
    place: gl.tuple = ()
    for i in gl.static_range(_BOXES):
        run = at + i * BOX // RUN
        word = runs + gl.maximum(gl.minimum(run, end - 1), 0) * 3
        first = gl.load(word)
        tokens = gl.where(run < end, gl.load(word + 1) >> 16, 0) - i * BOX % RUN
        tokens = gl.minimum(gl.maximum(tokens, 0), BOX)
        page += (first // PAGE_SIZE,)
        place += (gl.where(tokens > 0, first % PAGE_SIZE + i * BOX % RUN + tokens - BOX, -BOX),)
    return page, place


@gluon.jit
def _extent(item, program, programs, BLOCK_RUNS: gl.constexpr):
    """Of an item: first run and end; blocks, and those that all rows see; blocks with a mask that come first.

    In every other program they do. Blocks that all rows see are shared by many items and come from the L2 cache, those
    with a mask from memory: so both are always at work, and the programs of a multiprocessor each at another."""
    start, full, end = gl.load(item + _RUN_START), gl.load(item + _RUN_FULL), gl.load(item + _RUN_END)
    number, num_full = (end - start + BLOCK_RUNS - 1) // BLOCK_RUNS, (full - start) // BLOCK_RUNS
    half = gl.maximum(programs // 2, 1)
    turned = (program + program // half) % 2 == 1
    return start, end, number, num_full, gl.where(turned, number - num_full, 0)


@gluon.jit
def _block(nth, num_full, ahead):
    """The block of an item that is computed as nth."""
    return gl.where(nth < ahead, num_full + nth, nth - ahead)


@gluon.jit
def _produce(tasks, runs, desc, ring, ready, BACK: gl.constexpr, NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr,
             RUN: gl.constexpr):  # fmt: skip
    """Fills a ring."""
    items, num_tasks, program, programs = tasks
    BLOCK_RUNS: gl.constexpr = _KEYS // RUN
    count = 0
    for turn in range(program, num_tasks, programs):
        item, head = task_of(turn, program, programs, num_tasks, NUM_KV_HEADS)
        start, end, number, num_full, ahead = _extent(items + item * _ITEM, program, programs, BLOCK_RUNS)
        page, place = boxes_of(runs, start + _block(0, num_full, ahead) * BLOCK_RUNS, end, PAGE_SIZE, RUN)
        for nth in range(number):
            following = start + _block(nth + 1, num_full, ahead) * BLOCK_RUNS
            next_page, next_place = boxes_of(runs, following, end, PAGE_SIZE, RUN)  # on its way meanwhile
            slot = count % _STAGES
            bar = ready.index(slot)
            take_back(count, BACK, _THREADS, _STAGES)
            mbarrier.expect(bar, _KEYS * DIM * 2)
            for half in range(rolled(2)):
                for i in gl.static_range(_BOXES):
                    box = ring.index((slot * 2 + half) * _BOXES + i)
                    load_box(desc, [page[i], place[i], head, half * (DIM // 2)], bar, box)
            count += 1
            page, place = next_page, next_place


@gluon.jit
def _seen(runs, at, end, local, position, window, RUN: gl.constexpr, MASKED: gl.constexpr):
    """[64, 64] which row sees which key of the block that begins with run `at`. local: each row's query."""
    n = gl.arange(0, _KEYS, _KEY)
    sees = local * 0  # a bit for each box
    there = n * 0  # tokens of the key's box, and its place there: a box ends with its last token
    for i in gl.static_range(_BOXES):
        run = at + i * BOX // RUN
        word = gl.load(runs + run * 3 + 1, mask=run < end, other=0)
        tokens = gl.minimum(gl.maximum((word >> 16) - i * BOX % RUN, 0), BOX)
        sees |= gl.where((local >= (word & 255)) & (local < (word >> 8 & 255)), 1 << i, 0)
        there = gl.where(n // BOX == i, n % BOX + tokens, there)
    seen = ((sees[:, None] >> (n // BOX)[None, :]) & 1 != 0) & (there >= BOX)[None, :]
    if MASKED:
        run = at + n // RUN
        where = gl.load(runs + run * 3 + 2, mask=run < end, other=0) + n % RUN // BOX * BOX + there - BOX
        seen = seen & (where[None, :] <= position[:, None]) & (where[None, :] > (position - window)[:, None])
    return seen


@gluon.jit
def _step(acc, weights, state, scale, count, more, block, rows, q_tile, tiles, barriers, MASK: gl.constexpr,
          MASKED: gl.constexpr, RUN: gl.constexpr):  # fmt: skip
    """Block `count`, whose keys are there: its scores and weights, while the values of the block before are added.

    The wait for the keys of the next block, if there are more, stands before the wait for the sums: its branch keeps
    the assembler from moving the softmax behind the latter."""
    k_tiles, v_tiles = tiles
    k_ready, v_ready = barriers
    runs, at, end = block
    local, position, window = rows
    slot, before = count % _STAGES, (count - 1) % _STAGES
    nothing = gl.zeros([ROWS, _KEYS], gl.float32, _ACC)
    scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), nothing, use_acc=False, is_async=True)
    seen = 0
    if MASK:
        seen = _seen(runs, at, end, local, position, window, RUN, MASKED)
    mbarrier.wait(v_ready.index(before), (count - 1) // _STAGES % 2)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, deps=(scores,))
    give_back(slot, KEYS_BACK, _THREADS)
    new, rescale, state = softmax_block(state, scores, scale, seen, MASK)
    new = gl.convert_layout(new.to(weights.dtype), _OPERAND)
    mbarrier.wait(k_ready.index((count + 1) % _STAGES), (count + 1) // _STAGES % 2, pred=more)
    acc, weights, new = warpgroup_mma_wait(0, deps=(acc, weights, new))
    give_back(before, VALUES_BACK, _THREADS)
    return acc * rescale[:, None], new, state


@gluon.jit
def _finish(result, natural, row, q_tile, tensors, strides, head, v_scale, NUM_QO_HEADS: gl.constexpr,
            GROUP: gl.constexpr, RETURN_LSE: gl.constexpr):  # fmt: skip
    """Writes the rows: to `out` by way of the query tile's memory, or partials. row: query token and slot of each."""
    q, out, lse_out, partial, partial_lse = tensors
    token, slot, used = row
    query_head = head * GROUP + gl.arange(0, ROWS, _ROW) % GROUP
    write_partials(result, natural, slot, used, query_head, partial, partial_lse, _ACC, NUM_QO_HEADS)
    direct = used & (slot == _DIRECT)
    if RETURN_LSE:
        gl.store(lse_out + token * NUM_QO_HEADS + query_head, natural, mask=direct)
    q_tile.store((result * v_scale).to(q.dtype.element_ty))
    wide_token = gl.convert_layout(gl.where(direct, token, -1), _WIDE_ROW)
    wide_head = head * GROUP + gl.arange(0, ROWS, _WIDE_ROW) % GROUP
    d = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))[None, :]
    out_at = (wide_token.to(gl.int64) * strides[2] + wide_head * strides[3])[:, None] + d
    gl.store(out + out_at, q_tile.load(WIDE), mask=(wide_token >= 0)[:, None])


@gluon.jit
def _load_queries(q, queries, start, end, head, scale, q_tile, strides, GROUP: gl.constexpr):
    """Query rows [start, end) of the list to shared memory, for keys whose logits are multiplied by |scale|."""
    m = gl.arange(0, ROWS, _WIDE_ROW)
    used = start + m // GROUP < end
    token = gl.load(queries + start + m // GROUP, mask=used, other=0).to(gl.int64)
    d = gl.arange(0, DIM, gl.SliceLayout(0, WIDE))[None, :]
    at = (token * strides[0] + (head * GROUP + m % GROUP) * strides[1])[:, None] + d
    values = gl.load(q + at, mask=used[:, None], other=0.0)
    q_tile.store(gl.where(scale < 0, -values, values))
    fence_async_shared()


@gluon.jit
def _consume(tasks, plan, tensors, scales, window, strides, q_tile, tiles, barriers, NUM_QO_HEADS: gl.constexpr,
             NUM_KV_HEADS: gl.constexpr, MASKED: gl.constexpr, RETURN_LSE: gl.constexpr,
             RUN: gl.constexpr):  # fmt: skip
    """Attention of the items."""
    items, num_tasks, program, programs = tasks
    runs, queries, slots, positions = plan
    q = tensors[0]
    k_tiles, v_tiles = tiles
    k_ready, v_ready = barriers
    GROUP: gl.constexpr = NUM_QO_HEADS // NUM_KV_HEADS
    BLOCK_RUNS: gl.constexpr = _KEYS // RUN
    local = gl.arange(0, ROWS, _ROW) // GROUP
    count = 0
    for turn in range(program, num_tasks, programs):
        item, head = task_of(turn, program, programs, num_tasks, NUM_KV_HEADS)
        item = items + item * _ITEM
        start, end, number, num_full, ahead = _extent(item, program, programs, BLOCK_RUNS)
        if number > 0:  # an item that the device planner had no room for has no runs
            query_start, query_end = gl.load(item + _QUERY_START), gl.load(item + _QUERY_END)
            scale = gl.load(scales[0] + head)
            _load_queries(q, queries, query_start, query_end, head, scale, q_tile, strides, GROUP)
            scale = gl.maximum(gl.abs(scale), 1e-37)  # a masked score, which is infinite, is to stay so
            used = query_start + local < query_end
            token = gl.load(queries + query_start + local, mask=used, other=0)
            slot = gl.load(slots + query_start + local, mask=used, other=_DIRECT)
            position = local
            if MASKED:
                position = gl.load(positions + token, mask=used, other=0)
            rows = (local, position, window)
            ring = count % _STAGES
            mbarrier.wait(k_ready.index(ring), count // _STAGES % 2)
            nothing = gl.zeros([ROWS, _KEYS], gl.float32, _ACC)
            scores = warpgroup_mma(q_tile, k_tiles.index(ring).permute((1, 0)), nothing, use_acc=False, is_async=True)
            first = start + _block(0, num_full, ahead) * BLOCK_RUNS
            seen = _seen(runs, first, end, local, position, window, RUN, MASKED)
            scores = warpgroup_mma_wait(0, deps=(scores,))
            give_back(ring, KEYS_BACK, _THREADS)
            state = (gl.full([ROWS], NOTHING, gl.float32, _ROW), gl.zeros([ROWS], gl.float32, _ROW))
            weights, _, state = softmax_block(state, scores, scale, seen, True)
            weights = gl.convert_layout(weights.to(q.dtype.element_ty), _OPERAND)
            acc = gl.zeros([ROWS, DIM], gl.float32, _ACC)
            count += 1
            mbarrier.wait(k_ready.index(count % _STAGES), count // _STAGES % 2, pred=number > 1)
            for part in range(3):  # with a mask, without, with a mask: a loop, so that its code is there once
                begin = gl.where(part == 0, 1, gl.maximum(gl.where(part == 1, ahead, ahead + num_full), 1))
                if part == 1:
                    for nth in range(begin, ahead + num_full):
                        acc, weights, state = _step(
                            acc, weights, state, scale, count, nth + 1 < number, (runs, start, end), rows, q_tile,
                            tiles, barriers, False, MASKED, RUN)  # fmt: skip
                        count += 1
                else:
                    for nth in range(begin, gl.where(part == 0, ahead, number)):
                        block = (runs, start + _block(nth, num_full, ahead) * BLOCK_RUNS, end)
                        acc, weights, state = _step(
                            acc, weights, state, scale, count, nth + 1 < number, block, rows, q_tile, tiles, barriers,
                            True, MASKED, RUN)  # fmt: skip
                        count += 1
            acc = last_values(acc, weights, count, v_tiles, v_ready, _THREADS, _STAGES)
            result, natural = normalized(acc, state)
            _finish(result, natural, (token, slot, used), q_tile, tensors, strides, head,
                    gl.load(scales[1] + head), NUM_QO_HEADS, GROUP, RETURN_LSE)  # fmt: skip


@gluon.jit(do_not_specialize=NUMBERS)
def decode_hopper_kernel(
    q, k_desc, v_desc, out, lse_out, partial, partial_lse,  # tensors
    items, counts, runs, queries, slots, positions,  # the plan
    logit_scale, v_scale, window,  # options
    q_stride_t, q_stride_h, out_stride_t, out_stride_h,
    first_bucket, last_bucket, items_size, queries_size, runs_size, first_program, programs, leads, follows,
    NUM_QO_HEADS: gl.constexpr, NUM_KV_HEADS: gl.constexpr, PAGE_SIZE: gl.constexpr, RUN: gl.constexpr,
    MASKED: gl.constexpr, RETURN_LSE: gl.constexpr,
):  # fmt: skip
    """The items of the buckets first to last, which merge nothing; see `TileList` for the arrays. *_size: of those.
    first_program: of this launch, among all `programs` that share the items. leads: the next launch may start early.
    follows: this one runs beside the launch ahead of it, of which it needs nothing, and ends after it, so that what
    waits for this one waits for both; if not, it waits before it begins.

    These are no constants, so that launches that run at once are the same code: two copies of it in a multiprocessor's
    instruction cache take up to twice as long."""
    if follows == 0:
        wait_for_the_launch_ahead()
    if leads != 0:
        launch_dependents()
    program = gl.program_id(0) + first_program
    _prefetch(items, items_size, program, 64)
    _prefetch(runs, runs_size, program, 512)
    _prefetch(queries, queries_size, program, 64)
    _prefetch(slots, queries_size, program, 64)
    dtype: gl.constexpr = q.dtype.element_ty
    k_ring = gl.allocate_shared_memory(dtype, [_STAGES * 2 * _BOXES, 1, BOX, 1, DIM // 2], k_desc.layout)
    v_ring = gl.allocate_shared_memory(dtype, [_STAGES * 2 * _BOXES, 1, BOX, 1, DIM // 2], v_desc.layout)
    q_tile = gl.allocate_shared_memory(dtype, [ROWS, DIM], TILE)
    gl.static_assert(KEYS_BACK + _STAGES <= VALUES_BACK)
    k_ready, v_ready = make_barriers(_STAGES), make_barriers(_STAGES)
    tiles = (tiles_of(k_ring, _KEYS, DIM, _STAGES), tiles_of(v_ring, _KEYS, DIM, _STAGES))
    barriers = (k_ready, v_ready)
    first_item = gl.load(counts + first_bucket)
    num_tasks = (gl.load(counts + last_bucket + 1) - first_item) * NUM_KV_HEADS
    tasks = (items + first_item * _ITEM, num_tasks, program, programs)
    plan = (runs, queries, slots, positions)
    tensors = (q, out, lse_out, partial, partial_lse)
    strides = (q_stride_t, q_stride_h, out_stride_t, out_stride_h)
    gl.warp_specialize(
        [
            (_consume, (tasks, plan, tensors, (logit_scale, v_scale), window, strides, q_tile, tiles, barriers,
                        NUM_QO_HEADS, NUM_KV_HEADS, MASKED, RETURN_LSE, RUN)),
            (_produce, (tasks, runs, k_desc, k_ring, k_ready, KEYS_BACK, NUM_KV_HEADS, PAGE_SIZE, RUN)),
            (_produce, (tasks, runs, v_desc, v_ring, v_ready, VALUES_BACK, NUM_KV_HEADS, PAGE_SIZE, RUN)),
        ],
        [1, 1],
        [_PRODUCER_REGISTERS, _PRODUCER_REGISTERS],
    )  # fmt: skip
    if (follows != 0) & (gl.program_id(0) == 0):
        wait_for_the_launch_ahead()


def supports(t: "Tensors", geometry: "Geometry", tile: "GpuTile") -> bool:
    """Whether `launch` computes this: what the copy engine reads, pages and groups that blocks and tiles hold whole."""
    group = geometry.num_qo_heads // geometry.num_kv_heads
    return (
        reads(t, geometry)
        and ROWS.value % group == 0
        and tile.block_m % group == 0
        and tile.block_m <= ROWS.value
        and (tile.block_n, tile.subtiles) == (_KEYS.value, 1)
        and _KEYS.value % geometry.run == 0
        and geometry.run % BOX.value == 0
    )


def launch(
    t: "Tensors", plan: "GpuPlan", buckets: tuple[int, int], programs: tuple[int, ...], options: dict[str, bool]
) -> None:
    """The items of all buckets from the first to the last, on the current stream. With a window up to 15 tokens before
    it are read with a weight of 0: they must be finite, as tokens of the sequence are.

    programs: of each of the launches, which run side by side. options: RETURN_LSE; LEADS: what comes next may start
    before this ends; FOLLOWS: this may start before what is ahead of it ends, of which it needs nothing."""
    geometry, arrays = plan.geometry, plan.arrays
    names = ("items", "counts", "runs", "queries", "slots", "positions")
    for number, count in enumerate(programs):
        leads, follows = options["LEADS"] or number + 1 < len(programs), options["FOLLOWS"] or number > 0
        decode_hopper_kernel[(count,)](
            t.q, descriptor(t.k_cache), descriptor(t.v_cache), t.out, t.lse, t.partial, t.partial_lse,
            *(arrays[name] for name in names), t.logit_scale, t.v_scale, geometry.window,
            *t.q.stride()[:2], *t.out.stride()[:2], *buckets,
            *(plan.sizes[name] for name in ("items", "queries", "runs")),
            sum(programs[:number]), sum(programs), int(leads), int(follows),
            NUM_QO_HEADS=geometry.num_qo_heads, NUM_KV_HEADS=geometry.num_kv_heads, PAGE_SIZE=geometry.page_size,
            RUN=geometry.run, MASKED=geometry.masked, RETURN_LSE=options["RETURN_LSE"],
            num_warps=4, maxnreg=REGISTERS, launch_pdl=True,
        )  # fmt: skip
