"""The forward pass of training on Hopper, warp specialized, in Gluon: FlashAttention-3's design.

A CTA stays on its SM and computes tiles of queries, 64 for each of its consumer warpgroups, of one head each (see
`query_tiles`). A producer warp loads queries and blocks of keys and of values by TMA. Consumers compute the softmax of
a block while the tensor cores work on its product with the values of the block before, and on the other warpgroups'
products (FlashAttention-3, §3.1 and §3.2, https://arxiv.org/abs/2407.08608). Blocks are taken from the last to the
first, so that the few that need a mask come before all others. The next tile's queries and keys come while the outputs
of this one leave by TMA.

Packed sequences begin at any token, and so do the boxes of TMA. In a prefix tree producer and consumers go up the
segments from a tile to the root.
"""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trunkattn.gpu.hopper.common import NEG_INF, WARPGROUP_ROWS
from trunkattn.gpu.hopper.online_softmax import (
    AttentionState,
    MainloopTile,
    attend_block,
    attend_first_block,
    finish_attention,
    mainloop_tile,
)
from trunkattn.gpu.hopper.pipeline import (
    KvPipelines,
    consumer_wait,
    warps_sync,
)
from trunkattn.numerics import LOG2_E
from trunkattn.training.common import Variant, with_batch
from trunkattn.training.hopper.common import reads as reads
from trunkattn.training.hopper.common import tma_descriptor
from trunkattn.training.hopper.producer import allocate, produce, release_queries
from trunkattn.training.hopper.query_tiles import (
    ALL_SEEN,
    MASKED,
    Tables,
    last_box,
    read_tile,
    tile_keys,
    walk_keys,
)
from trunkattn.training.sequences import Sequences
from trunkattn.training.spec import FlashTile, hopper_forward_tile, hopper_widths

LAUNCH_REGISTERS: Final = 168  # of a thread
_CONSUMER_REGISTERS, _PRODUCER_REGISTERS = gl.constexpr(240), gl.constexpr(24)
_MOST_WITH_OWN_OUT: Final = 384  # dims of a key and a value: shared memory holds no more of larger heads
_SECTION_BYTES: Final = 4 << 20  # of keys and values of a section, which has a KV head at least
_CLEARED_ROWS = gl.constexpr(32)  # at once

tma_store = tma.async_store if hasattr(tma, "async_store") else tma.async_copy_shared_to_global  # 3.9, and 3.6


class ForwardConstants(NamedTuple):
    """What the kernel is compiled for. mainloop: of the pipeline of keys, too; value_shape: of the pipeline of values.
    Both have padded heads; value_dim is that of values in memory. own_out: outputs leave from memory of their own, not
    from that of the queries. soft_cap: 0 for none, which the main loop asks for."""

    tile: FlashTile
    variant: Variant
    mainloop: MainloopTile
    value_shape: MainloopTile
    value_dim: int
    own_out: bool
    soft_cap: float = 0.0


class Outputs(NamedTuple):
    """out [batch, seqlen_q, num_qo_heads, head_dim of v]; lse [batch, num_qo_heads, seqlen_q]."""

    out: Any
    lse: Any


class ForwardArguments(NamedTuple):
    """The parameters of `hopper_forward_kernel`."""

    q_desc: TensorDescriptor
    k_desc: TensorDescriptor
    v_desc: TensorDescriptor
    out_desc: TensorDescriptor
    outputs: Outputs
    tables: Tables
    num_sequences: Any
    section: Any
    scale: Any
    C: ForwardConstants


class _Consumer(NamedTuple):
    """A consumer within a tile; block `index` of the pipelines is the next one."""

    attention: AttentionState
    index: Any


class _Rows(NamedTuple):
    """The queries of a warpgroup. last [64]: the last key that a row sees, were it no tree. length: of the sequence."""

    q_tile: Any
    kv: KvPipelines
    last: Any
    length: Any
    scale: Any
    tables: Any


class _MaskArgs(NamedTuple):
    """A block whose column 0 is key `first`. Columns before `begin` belong to another block. ends [block_n]: the ends
    of the keys' subtrees, in a tree."""

    first: Any
    begin: Any
    last: Any
    ends: Any


@gluon.jit
def _mask(args, C: gl.constexpr, T: gl.constexpr):
    """[64, block_n] which row sees which key of a block."""
    n = gl.arange(0, T.block_n, gl.SliceLayout(0, T.scores))
    mask = n[None, :] <= (args.last - args.first)[:, None]
    if C.variant.packed:
        mask = mask & (n >= args.begin)[None, :]
    if C.variant.tree:
        mask = mask & (args.last[:, None] < args.ends[None, :])
    return mask


@gluon.jit
def _mask_above(args, C: gl.constexpr, T: gl.constexpr):
    """[64, block_n] which row sees which key of a block, whose keys come before all rows."""
    return args.last[:, None] < args.ends[None, :]


@gluon.jit
def _subtree_ends(at, length, tables, SEEN: gl.constexpr, C: gl.constexpr):
    """The ends of the subtrees of a block's keys, where a mask needs them; they arrive while the product q·k runs."""
    if C.variant.tree and SEEN != ALL_SEEN:
        key = at + gl.arange(0, C.mainloop.block_n, gl.SliceLayout(0, C.mainloop.scores))
        return gl.load(tables.subtree_end + key, mask=key < length, other=0)
    else:
        return 0


@gluon.jit
def _attend_step(state, at, more, rows, SEEN: gl.constexpr, C: gl.constexpr):
    """Adds a block. The wait for the keys of the next one is explained in `attend_block`."""
    T: gl.constexpr = C.mainloop
    consumer_wait(rows.kv.k, state.index, T)
    mask_args = _MaskArgs(at, 0, rows.last, _subtree_ends(at, rows.length, rows.tables, SEEN, C))
    MASK: gl.constexpr = None if SEEN == ALL_SEEN else _mask if SEEN == MASKED else _mask_above
    attention = attend_block(
        state.attention, rows.q_tile, rows.kv, state.index, more, rows.scale, MASK, mask_args, C, T
    )
    return _Consumer(attention, state.index + 1)


@gluon.jit
def _attend_tile(tile, m, q_tile, index, scale, tables, kv, C: gl.constexpr):
    """Rows m [64] of a tile. Returns their outputs, lse and the index of the next block of the pipelines."""
    T: gl.constexpr = C.mainloop
    last = tile.first + m
    if not C.variant.tree:
        last += tile.len_k - tile.len_q
        last = gl.minimum(last, tile.len_k - 1) if C.variant.causal else m * 0 + tile.len_k - 1
    keys = tile_keys(tile, tables, C)
    box = last_box(tile, keys, C)
    rows = _Rows(q_tile=q_tile, kv=kv, last=last, length=tile.len_q, scale=scale, tables=tables)
    args = _MaskArgs(keys.last - box.before, box.before, last, _subtree_ends(keys.last, tile.len_q, tables, MASKED, C))
    more = keys.last > keys.ranges.begin
    attention = attend_first_block(q_tile, kv, index, more, scale, _mask, args, C, T)
    state = walk_keys(_attend_step, _Consumer(attention, index + 1), rows, tile, keys, tables, C)
    if C.own_out:
        release_queries(C)
    if C.variant.packed:
        _clear_values(kv, index, box.before - keys.last, C)
    out, lse = finish_attention(state.attention, kv, state.index, T)
    return out, gl.where(lse == NEG_INF, -float("inf"), lse), state.index


@gluon.jit
def _clear_values(kv, index, count, C: gl.constexpr):
    """Sets the first values of block `index` to 0, if count > 0. Then it is the only block of its sequence, and they
    are of the sequence before, and may be NaN. Every warpgroup stores the same."""
    V: gl.constexpr = C.value_shape
    COPY: gl.constexpr = V.copy
    PARTS: gl.constexpr = V.block_n // _CLEARED_ROWS
    if count > 0:
        consumer_wait(kv.v, index, V)
        tile = kv.v.tiles.index(index % V.num_stages)
        for i in gl.static_range(PARTS):
            part = tile.slice(i * _CLEARED_ROWS, _CLEARED_ROWS)
            row = i * _CLEARED_ROWS + gl.arange(0, _CLEARED_ROWS, gl.SliceLayout(1, COPY))
            cleared = part.load(COPY)
            part.store(gl.where((row < count)[:, None], 0.0, cleared).to(cleared.dtype))
        fence_async_shared()
        warps_sync()


@gluon.jit
def _write_out(rows, tile, out_desc, outputs, memory, seqlen_q, WARPGROUP: gl.constexpr, C: gl.constexpr):
    """Writes 64 rows of outputs, by TMA unless the sequence ends among them."""
    DIM: gl.constexpr = C.value_dim
    WIDTH: gl.constexpr = C.value_shape.head_dim
    COPY: gl.constexpr = C.value_shape.copy
    out_tile = memory.out_tiles.index(WARPGROUP)
    first = tile.first + WARPGROUP * WARPGROUP_ROWS
    if C.own_out:
        tma.store_wait(0)  # the tile before has left
        warps_sync()
    out_tile.store(rows.to(out_tile.dtype))
    fence_async_shared()
    warps_sync()
    if first + WARPGROUP_ROWS <= tile.len_q:
        box = memory.out_boxes.index(WARPGROUP)
        tma_store(out_desc, [tile.batch, tile.begin_q + first, tile.head, 0], box)
    else:
        m = first + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, COPY))
        d = gl.arange(0, WIDTH, gl.SliceLayout(0, COPY))[None, :]
        token = (tile.batch * seqlen_q + tile.begin_q).to(gl.int64) + m
        at = (token * out_desc.shape[2] + tile.head)[:, None] * DIM + d
        gl.store(outputs.out + at, out_tile.load(COPY), mask=(m < tile.len_q)[:, None] & (d < DIM))
    if not C.own_out:
        tma.store_wait(0)
        warps_sync()
        release_queries(C)


@gluon.jit
def _consume(WARPGROUP: gl.constexpr, out_desc, outputs, tables, scale, memory, C: gl.constexpr):
    """Consumer warpgroup: 64 queries of each tile."""
    SCORES: gl.constexpr = C.mainloop.scores
    ACC: gl.constexpr = C.mainloop.acc
    seqlen_q, num_heads = out_desc.shape[1], out_desc.shape[2]
    begin: gl.constexpr = WARPGROUP * WARPGROUP_ROWS
    index, turn = 0, 0
    mbarrier.wait(memory.q_full.index(0), 0)
    tile = read_tile(memory.info)
    while tile.head >= 0:
        m = begin + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, SCORES))
        q_tile = memory.q_tiles.index(WARPGROUP)
        out, lse, index = _attend_tile(tile, m, q_tile, index, scale, tables, memory.kv, C)
        _write_out(out, tile, out_desc, outputs, memory, seqlen_q, WARPGROUP, C)
        m = tile.first + begin + gl.arange(0, WARPGROUP_ROWS, gl.SliceLayout(1, ACC))
        row = (tile.batch * num_heads + tile.head).to(gl.int64) * seqlen_q + tile.begin_q + m
        gl.store(outputs.lse + row, lse, mask=m < tile.len_q)
        turn += 1
        mbarrier.wait(memory.q_full.index(0), turn % 2)
        tile = read_tile(memory.info)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["num_sequences", "section"])
def hopper_forward_kernel(
    q_desc, k_desc, v_desc, out_desc, outputs, tables, num_sequences, section, scale, C: gl.constexpr
):
    """All tiles of queries. num_sequences: if they are packed. section: heads whose tiles are computed at the same
    time, of all sequences of a batch."""
    memory = allocate(q_desc, k_desc, v_desc, out_desc, C)
    gl.warp_specialize(
        [
            (_consume, (0, out_desc, outputs, tables, scale, memory, C)),
            (_consume, (1, out_desc, outputs, tables, scale, memory, C)),
            (produce, (q_desc, k_desc, v_desc, tables, num_sequences, section, memory, C)),
        ],
        [4, 1],
        [_CONSUMER_REGISTERS, _PRODUCER_REGISTERS],
    )


@lru_cache
def forward_constants(head_dims: tuple[int, int], tile: FlashTile, variant: Variant) -> ForwardConstants:
    """What the kernel is compiled for. head_dims: of keys and of values."""
    widths = hopper_widths(head_dims)
    mainloop, value_shape = (
        mainloop_tile(
            width,
            tile.block_n,
            tile.stages,
            tile.block_m // 16,
            mask_ahead=False,
            value_dim=widths.head_values,
            key_dim=head_dims[0],
        )
        for width in widths
    )
    return ForwardConstants(
        tile=tile,
        variant=variant,
        mainloop=mainloop,
        value_shape=value_shape,
        value_dim=head_dims[1],
        own_out=sum(widths) <= _MOST_WITH_OWN_OUT,
    )


def forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: Sequences, tile: FlashTile | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse, as those of the portable `forward`, of tensors that TMA reads, on the current stream and device."""
    q4, k4, v4 = (with_batch(tensor, sequences) for tensor in (q, k, v))
    batch, seqlen_q, heads, head_dim = q4.shape
    head_dims = head_dim, v.shape[-1]
    tile = hopper_forward_tile(head_dims) if tile is None else tile
    out = torch.empty(*q4.shape[:-1], v.shape[-1], dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, seqlen_q, dtype=torch.float32, device=q.device)
    tree = sequences.tree
    num_sequences = 0 if sequences.cu_seqlens_q is None else len(sequences.cu_seqlens_q) - 1
    causal = sequences.causal or tree is not None
    variant = Variant(
        causal=causal,
        packed=sequences.packed,
        tree=tree is not None,
        window=False,
        soft_cap=False,
        sinks=False,
        even_q=False,
        even_k=False,
    )
    group = heads // k4.shape[2]
    section = max(_SECTION_BYTES // (k4.shape[1] * sum(head_dims) * q.itemsize), 1) * group if causal else 1
    tables = Tables(
        cu_seqlens_q=sequences.cu_seqlens_q,
        cu_seqlens_k=sequences.cu_seqlens_k,
        subtree_end=None if tree is None else tree.subtree_end,
        segment_of=None if tree is None else tree.segment_of,
        segments=None if tree is None else tree.segments,
        next_tile=torch.zeros(1, dtype=torch.int32, device=q.device),
    )
    constants, rows = forward_constants(head_dims, tile, variant), WARPGROUP_ROWS.value
    widths = hopper_widths(head_dims)
    given = ForwardArguments(
        q_desc=tma_descriptor(q4, rows, widths.keys),
        k_desc=tma_descriptor(k4, tile.block_n, widths.keys),
        v_desc=tma_descriptor(v4, tile.block_n, widths.head_values),
        out_desc=tma_descriptor(out, rows, widths.head_values),
        outputs=Outputs(out, lse),
        tables=tables,
        num_sequences=num_sequences,
        section=min(section, heads * batch),
        scale=sequences.sm_scale * LOG2_E,
        C=constants,
    )
    num_tiles = (sequences.blocks(sequences.cu_seqlens_q, seqlen_q, tile.block_m) + sequences.packed) * heads * batch
    num_sms = torch.cuda.get_device_properties(q.device).multi_processor_count
    launch = hopper_forward_kernel[(min(num_sms, num_tiles),)]
    launch(**given._asdict(), num_warps=4, maxnreg=LAUNCH_REGISTERS)
    return (out, lse) if sequences.has_batch else (out[0], lse[0])
