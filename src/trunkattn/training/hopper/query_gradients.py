"""The gradients of queries on Hopper, warp specialized, in Gluon.

A CTA computes one tile of queries after another, as the forward pass does, with the same tiles, order and producer
warp. Each consumer warpgroup owns 64 queries of a head, streams the blocks of keys and values that they see, and keeps
their dq in registers:

    s = q kᵀ, dp = dout vᵀ
    p = exp2(s · scale - shift), ds = p · (dp - delta), dq += ds k

While ds of a block is computed, the product ds·k of the block before it runs on the tensor cores.
"""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma, warpgroup_mma_wait

from trunkattn.gpu.bound import BoundLaunch, Grid
from trunkattn.gpu.hopper.common import WARPGROUP_ROWS
from trunkattn.gpu.hopper.online_softmax import (
    MainloopTile,
    add_values,
    mainloop_tile,
    no_output,
    part_of,
    soft_capped,
    start_scores,
)
from trunkattn.gpu.hopper.pipeline import KvPipelines, consumer_release, consumer_wait, warps_sync
from trunkattn.numerics import LOG2_E
from trunkattn.training.arguments import Scales, Variant
from trunkattn.training.hopper.common import TensorMap, tensor_map
from trunkattn.training.hopper.masks import Sight, mask_args_of, mask_before, mask_of, sight_of
from trunkattn.training.hopper.memory import allocate
from trunkattn.training.hopper.producer import BAR_Q_EMPTY, produce, release_queries
from trunkattn.training.hopper.query_launch import query_launch, query_maps, query_tables, query_variant
from trunkattn.training.hopper.query_tiles import (
    ALL_SEEN,
    IN_WARPGROUP,
    MASKED,
    last_box,
    read_tile,
    tile_keys,
    walk_keys,
)
from trunkattn.training.hopper.tile_rows import Written, clear_rows, tile_at, write_tile
from trunkattn.training.sequences import Sequences
from trunkattn.training.spec import FlashTile, hopper_query_widths

_LOG2_E = gl.constexpr(LOG2_E)
LAUNCH_REGISTERS: Final = 168  # of each thread at launch
_KEY_STAGES: Final = 3  # the products of two blocks of keys run at the same time, and another block is loaded
_BROUGHT: Final = ("q_desc", "k_desc", "v_desc", "dout_desc", "dq_desc", "tensors", "tables")
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)


class QueryConstants(NamedTuple):
    """What the kernel is compiled for. Fields have the meaning that they have in `ForwardConstants`. `key_dim` is the
    number of dims of a key in memory, without padding."""

    tile: FlashTile
    variant: Variant
    mainloop: MainloopTile
    value_shape: MainloopTile
    key_dim: int
    own_out: bool
    soft_cap: float
    backward: bool


class RowTensors(NamedTuple):
    """Numbers of each query, [batch, num_qo_heads, seqlen_q], and dq [batch, seqlen_q, num_qo_heads, head_dim]."""

    lse: Any
    delta: Any
    dq: Any


class QueryArguments(NamedTuple):
    """The parameters of `query_gradients_kernel`."""

    q_desc: Any
    k_desc: Any
    v_desc: Any
    dout_desc: Any
    dq_desc: Any
    tensors: Any
    tables: Any
    num_sequences: Any
    section: Any
    scales: Any
    C: QueryConstants


class _Given(NamedTuple):
    """Arguments of the kernel that a consumer reads for each tile."""

    dq_desc: Any
    tensors: Any
    tables: Any
    scales: Any


class _State(NamedTuple):
    """dq [64, head_dim] in parts, without the last block of keys and not yet multiplied by sm_scale. `ds` [64, block_n]
    is that of the last block. Block `index` of the pipelines comes next."""

    dq: Any
    ds: Any
    index: Any


class _Rows(NamedTuple):
    """The queries of a warpgroup, and what it needs to compute their gradients. `shift` and `delta` are those of each
    query [64]."""

    q_tile: Any
    dout_tile: Any
    kv: KvPipelines
    sight: Sight
    shift: Any
    delta: Any
    scales: Any
    tables: Any


@gluon.jit
def _start_products(rows, index, C: gl.constexpr):
    """Starts the products of the queries with a block of keys, and of their dout with its values."""
    T: gl.constexpr = C.mainloop
    V: gl.constexpr = C.value_shape
    consumer_wait(rows.kv.k, index, T)
    scores = start_scores(rows.q_tile, rows.kv.k, index, T)  # S = Q·Kᵀ
    consumer_wait(rows.kv.v, index, V)
    return scores, start_scores(rows.dout_tile, rows.kv.v, index, V)  # dP = dO·Vᵀ


@gluon.jit
def _ds_of(scores, dp, rows, mask, MASK: gl.constexpr, C: gl.constexpr):
    """Returns ds of a block as an operand of the product ds·k."""
    T: gl.constexpr = C.mainloop
    if C.soft_cap > 0:
        tanh = soft_capped(scores, rows.scales.sm_scale, C.soft_cap)
        p = gl.exp2(gl.fma(tanh, gl.to_tensor(C.soft_cap * _LOG2_E), -rows.shift[:, None])) * (1.0 - tanh * tanh)
    else:
        p = gl.exp2(gl.fma(scores, gl.to_tensor(rows.scales.log2), -rows.shift[:, None]))
    ds = p * (dp - rows.delta[:, None])
    if MASK:
        ds = gl.where(mask, ds, 0.0)
    ds = ds.to(part_of(rows.q_tile, 0, T).dtype)
    return gl.convert_layout(ds, gl.DotOperandLayout(0, T.acc, 2))


@gluon.jit
def _first_block(rows, index, args, C: gl.constexpr):
    """Computes ds of a tile's first block, which is always masked."""
    T: gl.constexpr = C.mainloop
    V: gl.constexpr = C.value_shape
    scores, dp = _start_products(rows, index, C)
    scores, dp = warpgroup_mma_wait(0, deps=(scores, dp))
    consumer_release(index, V.v_empty, V)
    dq: gl.tuple = ()
    for i in gl.static_range(len(T.value_parts)):
        dq += (no_output(i, T),)
    ds = _ds_of(scores, dp, rows, mask_of(args, C, T), True, C)
    return _State(dq, ds, index + 1)


@gluon.jit
def _step(state, at, more, rows, SEEN: gl.constexpr, C: gl.constexpr):
    """Computes ds of a block, and adds what the block before it contributes to dq. The second wait for its keys is over
    at once, but its branch keeps ptxas from moving the exponentials behind the wait for dq."""
    T: gl.constexpr = C.mainloop
    V: gl.constexpr = C.value_shape
    NUM_PARTS: gl.constexpr = len(T.value_parts)
    index = state.index
    mask_args = mask_args_of(at, 0, rows.sight, rows.tables, SEEN, C)
    scores, dp = _start_products(rows, index, C)
    dq = add_values(state.dq, state.ds, rows.kv.k, index - 1, T)  # dQ += dS·K
    scores, dp = warpgroup_mma_wait(NUM_PARTS, deps=(scores, dp))
    consumer_release(index, V.v_empty, V)
    mask = 0
    if SEEN != ALL_SEEN:
        mask = mask_of(mask_args, C, T) if SEEN == MASKED else mask_before(mask_args, C, T)
    ds = _ds_of(scores, dp, rows, mask, SEEN != ALL_SEEN, C)
    consumer_wait(rows.kv.k, index, T)
    dq += (state.ds, ds)
    done = warpgroup_mma_wait(0, deps=dq)
    consumer_release(index - 1, T.k_empty, T)
    return _State(done[:NUM_PARTS], done[NUM_PARTS + 1], index + 1)


@gluon.jit
def _shift_and_delta(tile, token, given, C: gl.constexpr):
    """Returns two numbers for each token [64] of a tile: lse in base 2, or +inf if it sees nothing, and delta."""
    head = (tile.batch * given.dq_desc.shape[2] + tile.head).to(gl.int64)
    at = head * given.dq_desc.shape[1] + tile.begin_q + token
    lse = gl.load(given.tensors.lse + at, mask=token < tile.len_q, other=-float("inf"))
    delta = gl.load(given.tensors.delta + at, mask=token < tile.len_q, other=0.0)
    return gl.where(lse == -float("inf"), float("inf"), lse * _LOG2_E), delta


@gluon.jit
def _tile_gradients(tile, index, given, memory, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """Computes dq of the rows of a warpgroup in a tile. Returns its parts, and the index of the next block of the
    pipelines."""
    T: gl.constexpr = C.mainloop
    V: gl.constexpr = C.value_shape
    NUM_PARTS: gl.constexpr = len(T.value_parts)
    m = WARPGROUP * WARPGROUP_ROWS + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, T.scores))
    shift, delta = _shift_and_delta(tile, tile.first + m, given, C)
    rows = _Rows(
        q_tile=tile_at(memory.q_tiles, WARPGROUP, T),
        dout_tile=tile_at(memory.out_tiles, WARPGROUP, V),
        kv=memory.kv,
        sight=sight_of(tile, m, given.tables, C),
        shift=shift,
        delta=delta,
        scales=given.scales,
        tables=given.tables,
    )
    keys = tile_keys(tile, rows.tables, IN_WARPGROUP, C)
    box = last_box(tile, keys, C)
    args = mask_args_of(keys.last, box.before, rows.sight, rows.tables, MASKED, C)
    state = _first_block(rows, index, args, C)
    state = walk_keys(_step, state, rows, tile, keys, rows.tables, C)
    if C.variant.packed:
        clear_rows(rows.kv.k, index, box.before - keys.last, WARPGROUP, T)
    dq = add_values(state.dq, state.ds, rows.kv.k, state.index - 1, T)  # dQ += dS·K
    dq += (state.ds,)
    dq = warpgroup_mma_wait(0, deps=dq)
    consumer_release(state.index - 1, T.k_empty, T)
    scaled: gl.tuple = ()
    for i in gl.static_range(NUM_PARTS):
        scaled += (dq[i] * given.scales.sm_scale,)
    return scaled, state.index


@gluon.jit
def _consume(WARPGROUP: gl.constexpr, dq_desc, tensors, tables, scales, memory, C: gl.constexpr):
    """Runs a consumer warpgroup, which computes 64 queries of each tile."""
    T: gl.constexpr = C.mainloop
    given = _Given(dq_desc, tensors, tables, scales)
    written = Written(dq_desc, tensors.dq, memory.q_boxes, memory.q_tiles)
    index, turn = 0, 0
    full = memory.q_full.index(0)
    tile = read_tile(memory.info, full, turn)
    while tile.head >= 0:
        dq, index = _tile_gradients(tile, index, given, memory, WARPGROUP, C)
        write_tile(dq, tile, written, WARPGROUP, T, C.key_dim)
        tma.store_wait(0)
        warps_sync()
        release_queries(C)
        turn += 1
        tile = read_tile(memory.info, full, turn)


@gluon.jit(do_not_specialize=["num_sequences", "section"])
def query_gradients_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, tensors, tables, num_sequences, section, scales, C: gl.constexpr
):
    """Writes dq of all tiles of queries. `tensors` are `RowTensors`, and `scales` are `Scales`. The other arguments are
    those of `hopper_forward_kernel`."""
    memory = allocate(q_desc, k_desc, v_desc, dout_desc, C)
    gl.warp_specialize(
        [
            (_consume, (0, dq_desc, tensors, tables, scales, memory, C)),
            (_consume, (1, dq_desc, tensors, tables, scales, memory, C)),
            (produce, (q_desc, dout_desc, k_desc, v_desc, tables, num_sequences, section, memory, C)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )


@lru_cache
def query_constants(head_dims: tuple[int, int], variant: Variant, soft_cap: float) -> QueryConstants:
    """Returns what the kernel is compiled for. `head_dims` are the dims of keys and of values."""
    widths = hopper_query_widths(head_dims)
    block_n = 128 if max(widths) <= 64 else 64 if widths.keys <= 192 and sum(widths) <= 384 else 32
    mainloop, value_shape = (
        mainloop_tile(width, block_n, 2, 8, mask_ahead=False, key_dim=dim)
        for width, dim in zip(widths, head_dims, strict=True)
    )
    mainloop = mainloop._replace(num_stages=_KEY_STAGES)
    value_shape = value_shape._replace(v_empty=mainloop.k_empty + _KEY_STAGES)
    assert value_shape.v_empty + value_shape.num_stages <= BAR_Q_EMPTY.value
    tile = FlashTile(128, block_n, 9, _KEY_STAGES)
    return QueryConstants(
        tile=tile,
        variant=variant,
        mainloop=mainloop,
        value_shape=value_shape,
        key_dim=head_dims[0],
        own_out=True,
        soft_cap=soft_cap,
        backward=True,
    )


class BoundQueries(NamedTuple):
    """The part of a call that does not depend on the addresses of its tensors. `window` is the one in `Tables`."""

    launch: BoundLaunch
    maps: tuple[TensorMap, ...]
    window: int


def query_gradients(
    bound: BoundQueries,
    tensors: tuple[torch.Tensor, ...],
    rows: tuple[torch.Tensor, torch.Tensor],
    dq: torch.Tensor,
    sequences: Sequences,
) -> None:
    """Writes dq. `tensors` are q, k, v and dout, and `rows` are lse and delta [batch, num_qo_heads, seqlen_q]."""
    descriptors = [each.of(tensor) for each, tensor in zip(bound.maps, (*tensors, dq), strict=True)]
    bound.launch((*descriptors, RowTensors(*rows, dq), query_tables(sequences, bound.window, dq.device)))


def bind_query_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, sequences: Sequences
) -> BoundQueries:
    """Prepares the launch for tensors [batch, ...] and sequences of these kinds."""
    variant = query_variant(sequences)._replace(sinks=False)  # lse includes them
    constants = query_constants((q.shape[-1], v.shape[-1]), variant, sequences.soft_cap or 0.0)
    numbers = query_launch(q, k, v, sequences, constants.tile)
    given = QueryArguments(
        **dict.fromkeys(_BROUGHT),
        num_sequences=numbers.num_sequences,
        section=numbers.section,
        scales=Scales(sequences.sm_scale * LOG2_E, sequences.sm_scale, sequences.soft_cap or 0.0),
        C=constants,
    )._asdict()
    given |= {"num_warps": 4, "maxnreg": LAUNCH_REGISTERS}
    maps = query_maps(q, k, v, dout, constants)
    q_map = maps[0]
    dq = torch.empty(q.shape, dtype=q.dtype, device="meta")
    return BoundQueries(
        launch=BoundLaunch(query_gradients_kernel, Grid(numbers.num_ctas, given), _BROUGHT),
        maps=(*maps, tensor_map(dq, q_map.box[1], q_map.box[3])),
        window=numbers.window,
    )
