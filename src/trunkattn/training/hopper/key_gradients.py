"""The consumer warps of the backward pass on Hopper, for heads of up to 128, in Gluon: all gradients in one pass, or
those of keys and values.

A CTA holds 128 keys and values of a KV head. It streams blocks of the queries that see them, for every query head of
the group or for a part of the heads. A producer warp loads by TMA and two consumer warpgroups compute. Each warpgroup
owns 64 of the keys, and keeps their rows of dk and dv in registers. For each block of queries it computes the following
(as FlashAttention-3 does, https://arxiv.org/abs/2407.08608, with the recomputation of FlashAttention-2,
https://arxiv.org/abs/2307.08691):

    sᵀ = k qᵀ, dpᵀ = v doutᵀ            operands are swapped, so that registers hold p and ds as dv and dk need them
    pᵀ = exp2(sᵀ · scale - shift), dv += pᵀ dout
    dsᵀ = pᵀ · (dpᵀ - delta), dk += dsᵀ q
    dq = ds k                           ds of both warpgroups comes through shared memory

A soft cap multiplies ds by its slope. The shift includes the sinks.

Each warpgroup computes a part of a block's dq, [64, 64] or narrower, over all 128 keys. TMA adds it to memory in
float32, in the order in which CTAs happen to run. Where `Division.adds_dq` is false, as for deterministic gradients,
`query_gradients` computes dq, and the last line above is left out.

The width of a tensor is a power of two. Heads of 72 to 96 therefore consist of two parts, of 64 and of 32 dims, which
are columns of one tile in shared memory.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from trunkattn.gpu.hopper.common import SWIZZLED, WARPGROUP_ROWS, reinterpret
from trunkattn.gpu.hopper.pipeline import consumer_release, consumer_wait, tma_add
from trunkattn.training.hopper.key_blocks import MASKED, BackwardConstants, find_keys, own_keys, skips_blocks, weights
from trunkattn.training.hopper.key_loads import (
    FLOAT_BOX,
    Full,
    consumers_meet,
    walk_queries,
    write_rows,
    zero_rows,
)
from trunkattn.training.hopper.key_tile import BAR_DOUT_EMPTY, BAR_Q_EMPTY, BackwardTile, NarrowHead, product_layout


class NarrowMemory(NamedTuple):
    """Shared memory of the consumers. `loaded` is a `KeyMemory`. `ds` holds dsᵀ of two blocks of queries, each in two
    parts, one for each warpgroup. `ds_panels` is the same memory in panels of 64 queries. `dq` holds each warpgroup's
    part of a block's dq, at most [64, 64], and `dq_boxes` is the same memory as TMA reads it."""

    loaded: Any
    ds: Any
    ds_panels: Any
    dq: Any
    dq_boxes: Any


class _Given(NamedTuple):
    """What a consumer reads, in addition to its sums."""

    keys: Any
    memory: Any
    dq_desc: Any


class _State(NamedTuple):
    """The sums dk and dv over queries, for the keys of a warpgroup, each as a tuple of parts [64, width]. dk is not yet
    multiplied by sm_scale. `scores` is sᵀ of the next block of queries, if it is computed ahead."""

    dk: Any
    dv: Any
    scores: Any


@gluon.jit
def _columns_of(tile, HEAD: gl.constexpr, PART: gl.constexpr):
    """Returns the columns of a tile in shared memory that belong to a part."""
    if len(HEAD.parts) == 1:
        return tile
    else:
        BEGIN: gl.constexpr = HEAD.parts[PART].begin
        WIDTH: gl.constexpr = HEAD.parts[PART].width
        return tile.slice(BEGIN, WIDTH, dim=1)


@gluon.jit
def _start_product(own, block, HEAD: gl.constexpr, T: gl.constexpr):
    """Starts the product [64, block_m] of the warpgroup's keys (or values) and a block of queries (or of dout)."""
    BLOCK_M: gl.constexpr = T.block_m
    SCORES: gl.constexpr = T.scores
    product = gl.zeros([WARPGROUP_ROWS, BLOCK_M], gl.float32, SCORES)
    for i in gl.static_range(len(HEAD.parts)):
        columns = _columns_of(block, HEAD, i).permute((1, 0))
        product = warpgroup_mma(_columns_of(own, HEAD, i), columns, product, use_acc=i > 0, is_async=True)
    return product


@gluon.jit
def _start_scores(WARPGROUP: gl.constexpr, index, there, memory, T: gl.constexpr):
    """Starts the product sᵀ of block `index` of queries. If there is no such block (`there` is false), the product is
    not used, and it does not matter what the memory holds."""
    consumer_wait(Full(memory.q_full), index, T, there)
    q_tile = memory.q.index(index % T.num_stages)
    KEYS: gl.constexpr = T.keys
    return _start_product(memory.k.index(WARPGROUP), q_tile, KEYS, T)  # Sᵀ = K·Qᵀ


@gluon.jit
def _start_dp(WARPGROUP: gl.constexpr, dout_tile, memory, T: gl.constexpr):
    """Starts the product dpᵀ of a block of queries."""
    VALUES: gl.constexpr = T.head_values
    return _start_product(memory.v.index(WARPGROUP), dout_tile, VALUES, T)  # dPᵀ = V·dOᵀ


@gluon.jit
def _no_sums(HEAD: gl.constexpr):
    sums: gl.tuple = ()
    for i in gl.static_range(len(HEAD.parts)):
        sums += (_no_sum(HEAD, i),)
    return sums


@gluon.jit
def _no_sum(HEAD: gl.constexpr, PART: gl.constexpr):
    WIDTH: gl.constexpr = HEAD.parts[PART].width
    SUMS: gl.constexpr = HEAD.parts[PART].sums
    return gl.zeros([WARPGROUP_ROWS, WIDTH], gl.float32, SUMS)


@gluon.jit
def _operands(values, HEAD: gl.constexpr):
    """Returns values [64, block_m] as operands of the products with each part."""
    operands: gl.tuple = ()
    for i in gl.static_range(len(HEAD.parts)):
        operands += (_operand(values, HEAD, i),)
    return operands


@gluon.jit
def _operand(values, HEAD: gl.constexpr, PART: gl.constexpr):
    SUMS: gl.constexpr = HEAD.parts[PART].sums
    return gl.convert_layout(values, gl.DotOperandLayout(0, SUMS, 2))


@gluon.jit
def _add_products(sums, operands, block, HEAD: gl.constexpr):
    """Starts to add the products of the operands and a block of queries (or of dout) to the parts of sums."""
    added: gl.tuple = ()
    for i in gl.static_range(len(HEAD.parts)):
        added += (warpgroup_mma(operands[i], _columns_of(block, HEAD, i), sums[i], is_async=True),)
    return added


@gluon.jit
def _zero_tail(WARPGROUP: gl.constexpr, q_tile, dout_tile, rows, T: gl.constexpr):
    """Writes zeros behind the first `rows` rows of a block of queries and of its dout: each warpgroup to one of them,
    and both then read them. The other warpgroup's scores, which are computed ahead, may see these rows either way,
    because a mask drops them."""
    COPY_K: gl.constexpr = T.keys.copy
    COPY_V: gl.constexpr = T.head_values.copy
    if WARPGROUP == 0:
        zero_rows(q_tile, rows, COPY_K)
    else:
        zero_rows(dout_tile, rows, COPY_V)
    fence_async_shared()
    consumers_meet()


@gluon.constexpr_function
def _query_panel(WARPGROUP: int, T: BackwardTile) -> int:
    """The panel of 64 queries to which a warpgroup's part of dq belongs."""
    return WARPGROUP if T.block_m == 128 else 0


@gluon.constexpr_function
def _dim_panel(WARPGROUP: int, T: BackwardTile) -> int:
    """The panel of 64 dims to which a warpgroup's part of dq belongs."""
    return 0 if T.block_m == 128 else WARPGROUP


@gluon.jit
def _start_dq(WARPGROUP: gl.constexpr, buffer, narrow, T: gl.constexpr):
    """Starts the product for a warpgroup's part of dq, over the keys of both warpgroups. It reads dsᵀ of block
    `buffer`, 0 or 1."""
    PANELS: gl.constexpr = T.block_m // 64
    K_PANELS: gl.constexpr = T.dim // 64
    PANEL_Q: gl.constexpr = _query_panel(WARPGROUP, T)
    PANEL_D: gl.constexpr = _dim_panel(WARPGROUP, T)
    WIDTH: gl.constexpr = T.dq_widths[WARPGROUP]
    DQ: gl.constexpr = product_layout(WIDTH)
    dq = gl.zeros([64, WIDTH], gl.float32, DQ)
    ds_0 = narrow.ds_panels.index(2 * buffer * PANELS + PANEL_Q).permute((1, 0))
    ds_1 = narrow.ds_panels.index((2 * buffer + 1) * PANELS + PANEL_Q).permute((1, 0))
    k_0, k_1 = narrow.loaded.k_panels.index(PANEL_D), narrow.loaded.k_panels.index(K_PANELS + PANEL_D)
    if WIDTH < 64:
        k_0, k_1 = k_0.slice(0, WIDTH, dim=1), k_1.slice(0, WIDTH, dim=1)
    # dQ = dS·K
    dq = warpgroup_mma(ds_0, k_0, dq, use_acc=False, is_async=True)
    return warpgroup_mma(ds_1, k_1, dq, is_async=True)


@gluon.jit
def _add_dq(WARPGROUP: gl.constexpr, dq, m, member, task, given, T: gl.constexpr):
    """Starts to add a warpgroup's part of dq to memory."""
    PANEL_Q: gl.constexpr = _query_panel(WARPGROUP, T)
    PANEL_D: gl.constexpr = _dim_panel(WARPGROUP, T)
    BOXES: gl.constexpr = T.dq_widths[WARPGROUP] // FLOAT_BOX
    if BOXES == 2:
        given.memory.dq.index(WARPGROUP).store(dq)
    else:
        given.memory.dq_boxes.index(2 * WARPGROUP).store(dq)
    fence_async_shared()
    row = (task.row_block + member * task.num_row_blocks + m) * T.block_m + PANEL_Q * 64
    for part in gl.static_range(BOXES):
        box = given.memory.dq_boxes.index(2 * WARPGROUP + part)
        tma_add(given.dq_desc, [row, PANEL_D * 64 + part * FLOAT_BOX], box)


@gluon.jit
def _add_queries(WARPGROUP: gl.constexpr, state, m, member, index, task, given, MASK: gl.constexpr, C: gl.constexpr):
    """Adds what a block of queries contributes to dk and dv, and adds its dq to memory."""
    T: gl.constexpr = C.tile
    DOUT: gl.constexpr = T.dout
    keys, memory = given.keys, given.memory.loaded
    BLOCK_M: gl.constexpr = T.block_m
    SCORES: gl.constexpr = T.scores
    KEYS: gl.constexpr = T.keys
    VALUES: gl.constexpr = T.head_values
    KEY_PARTS: gl.constexpr = len(KEYS.parts)
    VALUE_PARTS: gl.constexpr = len(VALUES.parts)
    AHEAD: gl.constexpr = 0 if skips_blocks(C) else 1
    stage, buffer = index % T.num_stages, index % 2
    q_tile, dout_tile = memory.q.index(stage), memory.dout.index(stage)
    if AHEAD:
        scores = state.scores
        consumer_wait(Full(memory.dout_full), index, DOUT)
    else:
        scores = _start_scores(WARPGROUP, index, True, memory, T)
        consumer_wait(Full(memory.dout_full), index, DOUT)
        scores = warpgroup_mma_wait(0, deps=(scores,))
    rows = task.len_q - m * BLOCK_M
    if MASK == MASKED and C.variant.packed and rows < BLOCK_M:
        _zero_tail(WARPGROUP, q_tile, dout_tile, rows, T)
    if AHEAD:
        dp = _start_dp(WARPGROUP, dout_tile, memory, T)
    shift = memory.rows.index(2 * stage).load(gl.SliceLayout(0, SCORES))
    p, sloped = weights(scores, shift, m * BLOCK_M, keys, MASK, C)
    if not AHEAD:
        dp = _start_dp(WARPGROUP, dout_tile, memory, T)
    p_half = _operands(p.to(q_tile.dtype), VALUES)
    dv = _add_products(state.dv, p_half, dout_tile, VALUES)  # dV += Pᵀ·dO
    dp = warpgroup_mma_wait(VALUE_PARTS, deps=(dp,))
    delta = memory.rows.index(2 * stage + 1).load(gl.SliceLayout(0, SCORES))
    ds = (sloped * (dp - delta[None, :])).to(q_tile.dtype)
    ds_half = _operands(ds, KEYS)
    dk = _add_products(state.dk, ds_half, q_tile, KEYS)  # dK += dSᵀ·Q
    dv = warpgroup_mma_wait(KEY_PARTS, deps=dv + p_half)[:VALUE_PARTS]
    consumer_release(index, BAR_DOUT_EMPTY, DOUT)
    if C.adds_dq:
        given.memory.ds.index(2 * buffer + WARPGROUP).store(ds)
        fence_async_shared()
        consumers_meet()
        dq = _start_dq(WARPGROUP, buffer, given.memory, T)
    next_scores = state.scores
    if AHEAD:
        next_scores = _start_scores(WARPGROUP, index + 1, index + 1 < keys.count, memory, T)
    LATER: gl.constexpr = AHEAD * KEY_PARTS
    ADDED: gl.constexpr = 2 if C.adds_dq else 0
    dk = warpgroup_mma_wait(ADDED + LATER, deps=dk + ds_half)[:KEY_PARTS]
    consumer_release(index, BAR_Q_EMPTY, T)
    if C.adds_dq:
        tma.store_wait(0)
        dq = warpgroup_mma_wait(LATER, deps=(dq,))
        _add_dq(WARPGROUP, dq, m, member, task, given, T)
    if AHEAD:
        next_scores = warpgroup_mma_wait(0, deps=(next_scores,))
    return _State(dk, dv, next_scores)


@gluon.jit
def narrow_memory(loaded, dq_desc, dtype: gl.constexpr, C: gl.constexpr):
    """Allocates a `NarrowMemory`. If the kernel adds nothing to dq, it has no memory for that."""
    T: gl.constexpr = C.tile
    if C.adds_dq:
        return _memory_for_dq(loaded, dq_desc, dtype, T)
    else:
        return NarrowMemory(loaded, 0, 0, 0, 0)


@gluon.jit
def _memory_for_dq(loaded, dq_desc, dtype: gl.constexpr, T: gl.constexpr):
    BLOCK_M: gl.constexpr = T.block_m
    DQ: gl.constexpr = gl.NVMMASharedLayout(128, 32, 2)
    ds = gl.allocate_shared_memory(dtype, [4, WARPGROUP_ROWS, BLOCK_M], SWIZZLED)
    dq_boxes = gl.allocate_shared_memory(gl.float32, [4, 64, FLOAT_BOX], dq_desc.layout)
    return NarrowMemory(
        loaded=loaded,
        ds=ds,
        ds_panels=reinterpret(ds, dtype, (4 * BLOCK_M // 64, WARPGROUP_ROWS, 64), SWIZZLED),
        dq=reinterpret(dq_boxes, gl.float32, (2, 64, 64), DQ),
        dq_boxes=dq_boxes,
    )


@gluon.jit
def consume_narrow(WARPGROUP: gl.constexpr, work, batch, scales, dq_desc, narrow, C: gl.constexpr):
    """Runs consumer warpgroup 0 or 1."""
    T: gl.constexpr = C.tile
    task, memory = find_keys(work, batch, C), narrow.loaded
    COPY_K: gl.constexpr = T.keys.copy
    COPY_V: gl.constexpr = T.head_values.copy
    HEAD_DIM: gl.constexpr = C.head_dim
    HEAD_DIM_V: gl.constexpr = C.head_dim_v
    KEYS: gl.constexpr = T.keys
    VALUES: gl.constexpr = T.head_values
    dk, dv = _no_sums(KEYS), _no_sums(VALUES)
    own_first = task.first + WARPGROUP * WARPGROUP_ROWS
    if task.end > task.begin:
        n = own_first + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, T.scores))
        keys = own_keys(n, task, batch, scales, C)
        mbarrier.wait(memory.kv_full.index(0), 0)
        if C.variant.packed:
            zero_rows(memory.k.index(WARPGROUP), task.len_k - own_first, COPY_K)
            zero_rows(memory.v.index(WARPGROUP), task.len_k - own_first, COPY_V)
            fence_async_shared()
        scores = 0
        if not skips_blocks(C):
            scores = warpgroup_mma_wait(0, deps=(_start_scores(WARPGROUP, 0, True, memory, T),))
        state = _State(dk, dv, scores)
        state = walk_queries(_add_queries, WARPGROUP, state, task, work, _Given(keys, narrow, dq_desc), C)
        dk, dv = state.dk, state.dv
    tma.store_wait(0)
    consumers_meet()
    k_tile, v_tile = memory.k.index(WARPGROUP), memory.v.index(WARPGROUP)
    _write(dk, scales.sm_scale, k_tile, work.dk, own_first, task, work, batch, HEAD_DIM, KEYS, C)
    _write(dv, 1.0, v_tile, work.dv, own_first, task, work, batch, HEAD_DIM_V, VALUES, C)


@gluon.constexpr_function
def _begin_of(HEAD: NarrowHead, PART: int) -> int:
    return HEAD.parts[PART].begin


@gluon.constexpr_function
def _layout_of(HEAD: NarrowHead, PART: int, C: BackwardConstants) -> Any:
    """The layout in which `write_rows` stores a part of dk or dv."""
    return HEAD.parts[PART].sums if C.members < C.group_size else HEAD.parts[PART].copy


@gluon.jit
def _write(sums, factor, tile, out, first, task, work, batch, DIM: gl.constexpr, HEAD: gl.constexpr, C: gl.constexpr):
    """Writes the parts of dk or dv of a warpgroup's keys, which begin with key `first`, multiplied by `factor`, through
    the shared memory of the keys or values."""
    token = task.out_row * work.numbers.seqlen_k + task.begin_k + first
    rows, num_heads = task.len_k - first, batch.num_qo_heads // C.group_size
    for i in gl.static_range(len(HEAD.parts)):
        place, begin = _columns_of(tile, HEAD, i), _begin_of(HEAD, i)
        values = sums[i] * factor
        write_rows(place, values, out, token, rows, task.kv_head, num_heads, begin, DIM, _layout_of(HEAD, i, C))
