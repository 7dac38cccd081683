"""The producer warp of the kernels on Hopper that own queries: the forward pass, and the gradients of queries."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from trunkattn.gpu.hopper.barriers import barrier_arrive, barrier_sync
from trunkattn.gpu.hopper.common import WARPGROUP_ROWS
from trunkattn.gpu.hopper.pipeline import (
    BAR_KV_EMPTY,
    KvPipelines,
    producer_acquire,
    warps_sync,
)
from trunkattn.training.hopper.memory import load_tile
from trunkattn.training.hopper.query_tiles import (
    FIELDS,
    IN_WARP,
    QueryTile,
    find_tile,
    last_box,
    tile_keys,
    tile_order,
    walk_keys,
)

BAR_Q_EMPTY = gl.constexpr(BAR_KV_EMPTY + 1)  # `query_gradients` has five stages, one more than others


class _Producer(NamedTuple):
    """Where a producer stands within a tile. The values of block `index` of the pipelines are not loaded yet, and
    `token` is the first token of that block."""

    token: Any
    index: Any


class _Loads(NamedTuple):
    """Where the blocks of a tile are loaded from, and the pipelines they go to. `begin` is the token of the sequence's
    first key."""

    k_desc: Any
    v_desc: Any
    kv: KvPipelines
    batch: Any
    head: Any
    begin: Any


@gluon.jit
def _load(desc, pipeline, index, token, loads, BAR_EMPTY: gl.constexpr, SHAPE: gl.constexpr):
    """Acquires the stage of block `index` and starts its loads. The block begins with `token`."""
    stage = index % SHAPE.num_stages
    full = pipeline.full.index(stage)
    producer_acquire(index, BAR_EMPTY, SHAPE)
    mbarrier.expect(full, SHAPE.block_n * SHAPE.head_dim * 2)
    load_tile(desc, loads.batch, token, loads.head, full, pipeline.boxes, stage, SHAPE)


@gluon.jit
def _load_step(state, at, more, loads, SEEN: gl.constexpr, C: gl.constexpr):
    """Loads the keys of a block, and the values that are multiplied at the same time: in the forward pass those of the
    block before it."""
    T: gl.constexpr = C.mainloop
    V: gl.constexpr = C.value_shape
    token = loads.begin + at
    _load(loads.k_desc, loads.kv.k, state.index + 1, token, loads, T.k_empty, T)
    if C.backward:
        _load(loads.v_desc, loads.kv.v, state.index + 1, token, loads, V.v_empty, V)
    else:
        _load(loads.v_desc, loads.kv.v, state.index, state.token, loads, V.v_empty, V)
    return _Producer(token, state.index + 1)


@gluon.jit
def _acquire_queries(C: gl.constexpr):
    """Waits until all consumer warps have released the queries."""
    barrier_sync(BAR_Q_EMPTY, C.mainloop.num_threads)


@gluon.jit
def release_queries(C: gl.constexpr):
    """Tells the producer that this warp has read the queries."""
    barrier_arrive(BAR_Q_EMPTY, C.mainloop.num_threads)


@gluon.jit
def _send_tile(q_desc, dout_desc, tile, memory, first, C: gl.constexpr):
    """Starts to load the queries of a tile, and in the backward pass their dout, and tells the consumers which tile it
    is. `first` says that no queries were loaded before, so there is nothing to wait for."""
    T: gl.constexpr = C.mainloop
    V: gl.constexpr = C.value_shape
    QUERY_DIMS: gl.constexpr = T.head_dim + V.head_dim if C.backward else T.head_dim
    CONSUMERS: gl.constexpr = C.tile.block_m // WARPGROUP_ROWS
    if not first:
        _acquire_queries(C)
    for i in gl.static_range(FIELDS):
        memory.info.index(i).store(gl.full([1], 0, gl.int32, IN_WARP) + tile[i])
    warps_sync()
    full = memory.q_full.index(0)
    if tile.head < 0:
        mbarrier.arrive(full, count=1)
    else:
        mbarrier.expect(full, C.tile.block_m * QUERY_DIMS * 2)
        for i in gl.static_range(CONSUMERS):
            token = tile.begin_q + tile.first + i * WARPGROUP_ROWS
            load_tile(q_desc, tile.batch, token, tile.head, full, memory.q_boxes, i, T)
            if C.backward:
                load_tile(dout_desc, tile.batch, token, tile.head, full, memory.out_boxes, i, V)


@gluon.jit
def produce(q_desc, dout_desc, k_desc, v_desc, tables, num_sequences, section, memory, C: gl.constexpr):
    """Runs the producer warp, which draws tiles and loads them. The forward pass does not use `dout_desc`."""
    T: gl.constexpr = C.mainloop
    V: gl.constexpr = C.value_shape
    order = tile_order(q_desc, num_sequences, section, C)
    number, index, turn = gl.program_id(0), 0, 0
    while number < order.num_blocks * order.num_heads:
        tile = find_tile(number, order, q_desc, k_desc, tables, num_sequences, C)
        if tile.first < tile.len_q:
            keys = tile_keys(tile, tables, IN_WARP, C)
            box = last_box(tile, keys, C)
            kv_head = tile.head // (q_desc.shape[2] // k_desc.shape[2])
            loads = _Loads(
                k_desc=k_desc, v_desc=v_desc, kv=memory.kv, batch=tile.batch, head=kv_head, begin=tile.begin_k
            )
            _load(k_desc, memory.kv.k, index, box.token, loads, T.k_empty, T)
            if C.backward:
                _load(v_desc, memory.kv.v, index, box.token, loads, V.v_empty, V)
            _send_tile(q_desc, dout_desc, tile, memory, turn == 0, C)
            turn += 1
            state = walk_keys(_load_step, _Producer(box.token, index), loads, tile, keys, tables, C)
            if not C.backward:
                _load(v_desc, memory.kv.v, state.index, state.token, loads, V.v_empty, V)
            index = state.index + 1
        # While the number is on its way, consumers have two blocks to compute
        number = gl.atomic_add(tables.next_tile, 1) + gl.num_programs(0)
    none = QueryTile(first=0, head=-1, batch=0, begin_q=0, len_q=0, begin_k=0, len_k=0)
    _send_tile(q_desc, dout_desc, none, memory, turn == 0, C)
