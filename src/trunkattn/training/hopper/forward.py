"""The forward pass of training on Hopper, warp specialized, in Gluon: FlashAttention-3's design.

A CTA stays on its SM and computes one tile of queries after another. A tile has 64 queries of one head for each
consumer warpgroup (see `query_tiles`). A producer warp loads queries, and blocks of keys and of values, by TMA. While
the consumers compute the softmax of a block, the tensor cores compute the product p·v of the block before, and the
products of the other warpgroup (FlashAttention-3, §3.1 and §3.2, https://arxiv.org/abs/2407.08608). Blocks are computed
from the last to the first, so that the few blocks that need a mask come first. The queries and keys of the next tile
are loaded while TMA writes the outputs of this one.

Packed sequences may begin at any token, and TMA boxes may too. In a prefix tree, producer and consumers go up the
segments from the tile to the root.
"""

from typing import Any, Final, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from trunkattn.gpu.bound import BoundLaunch, Grid, kept, tensor_kind
from trunkattn.gpu.hopper.common import NEG_INF, WARPGROUP_ROWS
from trunkattn.gpu.hopper.online_softmax import (
    AttentionState,
    attend_block,
    attend_first_block,
    finish_attention,
    times_rows,
)
from trunkattn.gpu.hopper.pipeline import (
    KvPipelines,
    consumer_wait,
    warps_sync,
)
from trunkattn.numerics import LOG2_E
from trunkattn.training.arguments import with_batch
from trunkattn.training.hopper.common import TensorMap, readable_by_tma
from trunkattn.training.hopper.common import reads as reads
from trunkattn.training.hopper.forward_arguments import (
    BROUGHT,
    ForwardArguments,
    Outputs,
    forward_constants,
)
from trunkattn.training.hopper.masks import Sight, mask_args_of, mask_before, mask_of, sight_of
from trunkattn.training.hopper.memory import allocate
from trunkattn.training.hopper.producer import produce, release_queries
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
from trunkattn.training.spec import FlashTile, hopper_forward_tile

LAUNCH_REGISTERS: Final = 168  # of each thread at launch
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
_LOG2_E = gl.constexpr(LOG2_E)


class _Consumer(NamedTuple):
    """Where a consumer stands within a tile. Block `index` of the pipelines comes next."""

    attention: AttentionState
    index: Any


class _Rows(NamedTuple):
    """The query rows of a warpgroup, and what it needs to compute their attention."""

    q_tile: Any
    kv: KvPipelines
    sight: Sight
    scale: Any
    tables: Any


@gluon.jit
def _attend_step(state, at, more, rows, SEEN: gl.constexpr, C: gl.constexpr):
    """Adds a block. `attend_block` explains the wait for the keys of the next block."""
    T: gl.constexpr = C.mainloop
    consumer_wait(rows.kv.k, state.index, T)
    mask_args = mask_args_of(at, 0, rows.sight, rows.tables, SEEN, C)
    MASK: gl.constexpr = None if SEEN == ALL_SEEN else mask_of if SEEN == MASKED else mask_before
    attention = attend_block(
        state.attention, rows.q_tile, rows.kv, state.index, more, rows.scale, MASK, mask_args, C, T
    )
    return _Consumer(attention, state.index + 1)


@gluon.jit
def _with_sink(lse, sink):
    """Returns the lse of rows with the sink as one more logit, and the factor by which the outputs shrink. The given
    lse is finite."""
    largest = gl.maximum(lse, sink)
    own, rest = gl.exp2((sink - largest) * _LOG2_E), gl.exp2((lse - largest) * _LOG2_E)
    return largest + gl.log(own + rest), rest / (own + rest)


@gluon.jit
def _attend_tile(tile, m, q_tile, index, scale, tables, kv, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """Computes rows m [64] of a tile. Returns their outputs, their lse and the index of the next block of the
    pipelines."""
    T: gl.constexpr = C.mainloop
    V: gl.constexpr = C.value_shape
    sight, keys = sight_of(tile, m, tables, C), tile_keys(tile, tables, IN_WARPGROUP, C)
    box = last_box(tile, keys, C)
    rows = _Rows(q_tile=q_tile, kv=kv, sight=sight, scale=scale, tables=tables)
    args = mask_args_of(keys.last, box.before, sight, tables, MASKED, C)
    more = keys.last > keys.ranges.begin
    attention = attend_first_block(q_tile, kv, index, more, scale, mask_of, args, C, T)
    state = walk_keys(_attend_step, _Consumer(attention, index + 1), rows, tile, keys, tables, C)
    if C.own_out:
        release_queries(C)
    if C.variant.packed:
        clear_rows(kv.v, index, box.before - keys.last, WARPGROUP, V)
    parts, lse = finish_attention(state.attention, kv, state.index, T)
    if C.variant.sinks:
        sink = gl.load(tables.sinks + tile.head)
        if C.variant.packed:
            sink = gl.where(tile.begin_k < 0, -float("inf"), sink)  # tokens of no sequence see nothing
        lse, share = _with_sink(lse, sink)
        parts = times_rows(parts, share, T)
    return parts, gl.where(lse == NEG_INF, -float("inf"), lse), state.index


@gluon.jit
def _consume(WARPGROUP: gl.constexpr, out_desc, outputs, tables, scale, memory, C: gl.constexpr):
    """Runs a consumer warpgroup, which computes 64 queries of each tile."""
    T: gl.constexpr = C.mainloop
    V: gl.constexpr = C.value_shape
    SCORES: gl.constexpr = C.mainloop.scores
    ACC: gl.constexpr = C.mainloop.acc
    seqlen_q, num_heads = out_desc.shape[1], out_desc.shape[2]
    begin: gl.constexpr = WARPGROUP * WARPGROUP_ROWS
    index, turn = 0, 0
    full = memory.q_full.index(0)
    tile = read_tile(memory.info, full, turn)
    while tile.head >= 0:
        m = begin + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, SCORES))
        q_tile = tile_at(memory.q_tiles, WARPGROUP, T)
        parts, lse, index = _attend_tile(tile, m, q_tile, index, scale, tables, memory.kv, WARPGROUP, C)
        if C.own_out:
            tma.store_wait(0)  # TMA has read the outputs of the tile before
            warps_sync()
        out = Written(out_desc, outputs.out, memory.out_boxes, memory.out_tiles)
        write_tile(parts, tile, out, WARPGROUP, V, C.value_dim)
        if not C.own_out:
            tma.store_wait(0)
            warps_sync()
            release_queries(C)
        m = tile.first + begin + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, ACC))
        row = (tile.batch * num_heads + tile.head).to(gl.int64) * seqlen_q + tile.begin_q + m
        gl.store(outputs.lse + row, lse, mask=m < tile.len_q)
        turn += 1
        tile = read_tile(memory.info, full, turn)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_sequences", "section"])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, outputs, tables, num_sequences, section, scale, C: gl.constexpr
):
    """Computes all tiles of queries. `num_sequences` counts packed sequences, and is 0 without packing. `section` is
    the number of heads, over all sequences of a batch, whose tiles are computed at the same time."""
    memory = allocate(q_desc, k_desc, v_desc, out_desc, C)
    gl.warp_specialize(
        [
            (_consume, (0, out_desc, outputs, tables, scale, memory, C)),
            (_consume, (1, out_desc, outputs, tables, scale, memory, C)),
            (produce, (q_desc, q_desc, k_desc, v_desc, tables, num_sequences, section, memory, C)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )


class _Bound(NamedTuple):
    """The part of a call that does not depend on the addresses of its tensors. `window` is the one in `Tables`."""

    launch: BoundLaunch
    q_map: TensorMap
    k_map: TensorMap
    v_map: TensorMap
    out_map: TensorMap
    lse_shape: tuple[int, ...]
    window: int


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, tile: FlashTile | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Computes out and lse like the portable `forward`, on the current stream and device."""
    q, k, v = readable_by_tma(q, k, v)
    key = "hopper forward", q.device, tensor_kind(q), tensor_kind(k), tensor_kind(v), sequences.kind, tile
    bound = kept(key, lambda: _bind(q, k, v, sequences, tile))
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(bound.lse_shape, dtype=torch.float32, device=q.device)
    tables = query_tables(sequences, bound.window, q.device)
    descriptors = bound.q_map.of(q), bound.k_map.of(k), bound.v_map.of(v), bound.out_map.of(out)
    bound.launch((*descriptors, Outputs(out, lse), tables))
    return out, lse


def _bind(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, tile: FlashTile | None) -> _Bound:
    """Prepares the launch for tensors and sequences of these kinds."""
    q, k, v = (with_batch(tensor, sequences) for tensor in (q, k, v))
    batch, seqlen_q, heads, head_dim = q.shape
    head_dims = head_dim, v.shape[-1]
    tile = hopper_forward_tile(head_dims) if tile is None else tile
    constants = forward_constants(head_dims, tile, query_variant(sequences), sequences.soft_cap or 0.0)
    numbers = query_launch(q, k, v, sequences, tile)
    given = ForwardArguments(
        **dict.fromkeys(BROUGHT),
        num_sequences=numbers.num_sequences,
        section=numbers.section,
        scale=sequences.sm_scale * (LOG2_E if sequences.soft_cap is None else 1.0),
        C=constants,
    )._asdict()
    given |= {"num_warps": 4, "maxnreg": LAUNCH_REGISTERS}
    out = torch.empty(*q.shape[:-1], v.shape[-1], dtype=q.dtype, device="meta")
    q_map, k_map, v_map, out_map = query_maps(q, k, v, out, constants)
    return _Bound(
        launch=BoundLaunch(hopper_forward_kernel, Grid(numbers.num_ctas, given), BROUGHT),
        q_map=q_map,
        k_map=k_map,
        v_map=v_map,
        out_map=out_map,
        lse_shape=(batch, heads, seqlen_q) if sequences.has_batch else (heads, seqlen_q),
        window=numbers.window,
    )
