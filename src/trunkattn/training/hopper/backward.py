"""The backward pass on Hopper. There are two ways, as in the portable `backward`.

For heads of up to 128 dims, one kernel computes all gradients (see `key_gradients`), between one that prepares and one
that converts dq, which is summed in float32 in the order in which CTAs happen to run.

For wider heads, for deterministic gradients, and where queries see few keys (see `division`), one kernel computes dk
and dv, and another one dq (`query_gradients`). Both compute the scores. In these cases this takes less time than adding
dq to memory for every block of keys.

Either way, if several CTAs computed parts of dk and dv, the last kernel adds the parts.
"""

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trunkattn.gpu.bound import BoundLaunch, Grid, kept, tensor_kind
from trunkattn.gpu.hopper.common import PRODUCER_REGISTERS, WARPGROUP_ROWS
from trunkattn.gpu.hopper.spec import BOX_DIMS
from trunkattn.numerics import LN_2
from trunkattn.training.arguments import Batch, Numbers, Width, arguments, contiguous_or_none, with_batch, with_tables
from trunkattn.training.backward import row_values
from trunkattn.training.common import find_sequence, sequence_range, store_tile
from trunkattn.training.hopper.common import TensorMap, readable_by_tma, tensor_map
from trunkattn.training.hopper.common import reads as reads
from trunkattn.training.hopper.division import Division, division
from trunkattn.training.hopper.key_blocks import BackwardConstants, KeyWork
from trunkattn.training.hopper.key_gradients import consume_narrow, narrow_memory
from trunkattn.training.hopper.key_loads import DQ_BOX, allocate, produce
from trunkattn.training.hopper.key_tile import BackwardTile, backward_tile
from trunkattn.training.hopper.panel_gradients import consume_panels, panel_memory
from trunkattn.training.hopper.query_gradients import BoundQueries, bind_query_gradients, query_gradients
from trunkattn.training.hopper.wide_gradients import consume_wide, wide_memory
from trunkattn.training.sequences import Sequences
from trunkattn.training.spec import FlashTile

_SECTION_BYTES: Final = 8 * 2**20  # CTAs that run at the same time stream this much, a part of the L2 cache
SUMMED = tl.constexpr(2048)  # a CTA adds the parts of this many numbers of dk or dv
REGISTERS: Final = 168  # of each thread at launch
_CONSUMER_REGISTERS = gl.constexpr(240)
_SUMS_LAYOUT: Final = gl.NVMMASharedLayout(128, 32, 2)
_ROWS_LAYOUT: Final = gl.NVMMASharedLayout(0, 32, 2)
# The arguments that each call brings to the first and the last kernel, and those that it brings to the second
_ROWS: Final = ("tensors", "cu_seqlens_q")
_BROUGHT: Final = ("q_desc", "k_desc", "v_desc", "dout_desc", "dq_desc", "rows_desc", "work", "batch")


class RowsTensors(NamedTuple):
    """Tensors of the first and the last kernel. A packed sequence begins with a block of its own.

    Attributes:
        out, dout, dq: contiguous tensors in the dtype of q.
        lse, dlse: [batch, num_qo_heads, seqlen_q]. dlse may be None, which means 0.
        rows: shift and delta of each block of queries [batch, num_qo_heads, blocks, 2, block], float32.
        dq_sums: dq of each block of queries [batch, num_qo_heads, blocks, block, `NarrowHead.dims` of keys], float32;
            None if `query_gradients` computes dq.
        delta: delta [batch, num_qo_heads, seqlen_q], float32, if `query_gradients` computes dq; otherwise None.
        depths: in a tree with a window, the depth of each token [tokens]; otherwise None.
        block_depths: in a tree with a window, the smallest depth in each block [blocks]; otherwise None.
    """

    out: Any
    dout: Any
    lse: Any
    dlse: Any
    rows: Any
    dq_sums: Any
    delta: Any
    dq: Any
    depths: Any = None
    block_depths: Any = None


class PartsTensors(NamedTuple):
    """The parts of dk and dv that the last kernel sums.

    If there is only one part, nothing is summed: the tensors are None and the counts are 0.

    Attributes:
        dk_parts, dv_parts: the parts, float32.
        dk, dv: where their sums are written.
        key_numbers, value_numbers: how many numbers a part of dk and a part of dv have.
    """

    dk_parts: Any
    dv_parts: Any
    dk: Any
    dv: Any
    key_numbers: Any
    value_numbers: Any


class RowsConstants(NamedTuple):
    """What the first and the last kernel are compiled for.

    Attributes:
        width: the numbers of out and dout, or of q and dq.
        dim: the numbers of a row of `dq_sums` in registers.
        dq_dim: those in memory, 0 without `dq_sums`.
        block: the queries of a block.
        packed: whether sequences are packed.
    """

    width: Width
    dim: int
    dq_dim: int
    block: int
    packed: bool


class _Block(NamedTuple):
    """A block of queries. It begins with query `first` of a sequence that begins at token `begin` and has `length`
    queries. `row` is the sequence's place in the batch."""

    row: Any
    head: Any
    first: Any
    begin: Any
    length: Any


@triton.jit
def _find_block(cu_seqlens_q, num_sequences, seqlen_q, num_blocks, num_qo_heads, C: tl.constexpr):
    number, other = tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks
    head, row = (other % num_qo_heads).to(tl.int64), (other // num_qo_heads).to(tl.int64)
    begin, length = 0, seqlen_q
    if C.packed:
        sequence, number = find_sequence(number, cu_seqlens_q, num_sequences, C.block)
        begin, length = sequence_range(cu_seqlens_q, sequence, seqlen_q)
    return _Block(row, head, number * C.block, begin, length)


@triton.jit(do_not_specialize=["num_sequences", "seqlen_q", "num_blocks"])
def prepare_rows_kernel(
    tensors: RowsTensors, cu_seqlens_q, num_sequences, seqlen_q, num_blocks, num_qo_heads, C: tl.constexpr
):
    """Writes shift and delta of a block of queries, and sets its dq_sums to 0, if there are any. Rows behind the last
    query get +inf and 0. `cu_seqlens_q` is None if queries are not packed. A head has `num_blocks` blocks."""
    WIDTH: tl.constexpr = C.width
    DIM: tl.constexpr = C.dim
    DQ_DIM: tl.constexpr = C.dq_dim
    BLOCK: tl.constexpr = C.block
    block = _find_block(cu_seqlens_q, num_sequences, seqlen_q, num_blocks, num_qo_heads, C)
    token_stride = num_qo_heads * WIDTH.dim
    at = (block.row * seqlen_q + block.begin) * token_stride + block.head * WIDTH.dim
    row_at = (block.row * num_qo_heads + block.head) * seqlen_q + block.begin
    found = row_values(tensors, at, row_at, block.first, block.length, token_stride, WIDTH, BLOCK)
    m = tl.arange(0, BLOCK)
    index = tl.program_id(0).to(tl.int64) * BLOCK
    tl.store(tensors.rows + 2 * index + m, found.shift)
    tl.store(tensors.rows + 2 * index + BLOCK + m, found.delta)
    if tensors.delta is not None:
        tl.store(tensors.delta + row_at + block.first + m, found.delta, mask=block.first + m < block.length)
    if tensors.depths is not None and block.head == 0:
        inside = block.first + m < block.length
        depths = tl.load(tensors.depths + block.first + m, mask=inside, other=2147483647)
        tl.store(tensors.block_depths + block.first // BLOCK, tl.min(depths))
    if tensors.dq_sums is not None:
        d = tl.arange(0, DIM)
        at_sums = (index + m)[:, None] * DQ_DIM + d[None, :]
        tl.store(tensors.dq_sums + at_sums, tl.zeros([BLOCK, DIM], tl.float32), mask=(d < DQ_DIM)[None, :])


@triton.jit(do_not_specialize=["num_sequences", "seqlen_q", "num_blocks", "row_blocks"])
def write_gradients_kernel(
    tensors: RowsTensors,
    cu_seqlens_q,
    parts: PartsTensors,
    num_sequences,
    seqlen_q,
    num_blocks,
    row_blocks,
    num_qo_heads,
    sm_scale,
    C: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Writes dq of a block of queries from its sums. The CTAs behind those of the `row_blocks` blocks add parts of dk,
    then parts of dv. There are no row blocks without dq_sums. The arguments are those of `prepare_rows_kernel`."""
    WIDTH: tl.constexpr = C.width
    DIM: tl.constexpr = C.dim
    DQ_DIM: tl.constexpr = C.dq_dim
    BLOCK: tl.constexpr = C.block
    number = tl.program_id(0)
    if tensors.dq_sums is not None:  # noqa: SIM102 - Triton decides this one when it compiles
        if number < row_blocks:
            block = _find_block(cu_seqlens_q, num_sequences, seqlen_q, num_blocks, num_qo_heads, C)
            m, d = tl.arange(0, BLOCK), tl.arange(0, DIM)
            at_sums = (number.to(tl.int64) * BLOCK + m)[:, None] * DQ_DIM + d[None, :]
            sums = tl.load(tensors.dq_sums + at_sums, mask=(d < DQ_DIM)[None, :])
            token_stride = num_qo_heads * WIDTH.dim
            at = (block.row * seqlen_q + block.begin) * token_stride + block.head * WIDTH.dim
            store_tile(tensors.dq + at, block.first, token_stride, block.length, sums * sm_scale, WIDTH)
    if PARTS > 1:
        number -= row_blocks
        key_blocks = tl.cdiv(parts.key_numbers, SUMMED)
        if (number >= 0) & (number < key_blocks):
            _add_parts(parts.dk_parts, parts.dk, parts.key_numbers, number, PARTS)
        if number >= key_blocks:
            _add_parts(parts.dv_parts, parts.dv, parts.value_numbers, number - key_blocks, PARTS)


@triton.jit
def _add_parts(parts, total, numbers, block, PARTS: tl.constexpr):
    """Writes a block of sums over the parts, which lie one after the other in memory."""
    at = block.to(tl.int64) * SUMMED + tl.arange(0, SUMMED)
    inside = at < numbers
    found = tl.load(parts + at, mask=inside)
    for part in range(1, PARTS):
        found += tl.load(parts + tl.cast(part, tl.int64) * numbers + at, mask=inside)
    tl.store(total + at, found.to(total.dtype.element_ty), mask=inside)


@gluon.jit(do_not_specialize=["num_sequences", "section"])
def hopper_backward_kernel(
    q_desc, k_desc, v_desc, dout_desc, dq_desc, rows_desc, work, batch, num_sequences, section, scales, C: gl.constexpr
):
    """Computes dk and dv of a block of keys of a KV head, over some of its query heads, and with narrow heads adds to
    the sums of dq what the block contributes, unless `dq_desc` is None. The shapes of the descriptors and the grid give
    the numbers of `work`, since Triton would compile for their values in a tuple (see `Numbers`)."""
    T: gl.constexpr = C.tile
    num_runs = k_desc.shape[0] * k_desc.shape[2] * (C.group_size // C.members)
    num_row_blocks = rows_desc.shape[0] // (2 * num_runs * C.members)
    numbers = Numbers(num_sequences, q_desc.shape[1], k_desc.shape[1], gl.num_programs(0) // num_runs)
    work = KeyWork(
        dk=work.dk,
        dv=work.dv,
        block_depths=work.block_depths,
        section=section,
        num_runs=num_runs,
        num_row_blocks=num_row_blocks,
        numbers=numbers,
    )
    memory = allocate(q_desc, k_desc, v_desc, dout_desc, rows_desc, T)
    if T.consumers == "narrow":
        narrow = narrow_memory(memory, dq_desc, q_desc.dtype, C)
        gl.warp_specialize(
            [
                (consume_narrow, (0, work, batch, scales, dq_desc, narrow, C)),
                (consume_narrow, (1, work, batch, scales, dq_desc, narrow, C)),
                (produce, (work, batch, q_desc, k_desc, v_desc, dout_desc, rows_desc, memory, C)),
            ],
            [4, 1],
            [_CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    elif T.consumers == "panels":
        panels = panel_memory(memory, q_desc.dtype, T)
        gl.warp_specialize(
            [
                (consume_panels, (0, work, batch, scales, panels, C)),
                (consume_panels, (1, work, batch, scales, panels, C)),
                (produce, (work, batch, q_desc, k_desc, v_desc, dout_desc, rows_desc, memory, C)),
            ],
            [4, 1],
            [_CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        wide = wide_memory(memory, q_desc.dtype, T)
        gl.warp_specialize(
            [
                (consume_wide, (0, work, batch, scales, wide, C)),
                (consume_wide, (1, work, batch, scales, wide, C)),
                (produce, (work, batch, q_desc, k_desc, v_desc, dout_desc, rows_desc, memory, C)),
            ],
            [4, 1],
            [_CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


class _Maps(NamedTuple):
    """The descriptors of the second kernel, without their tensors. `dq_sums` is None if it adds nothing to dq."""

    q: TensorMap
    k: TensorMap
    v: TensorMap
    dout: TensorMap
    dq_sums: TensorMap | None
    rows: TensorMap


class _Bound(NamedTuple):
    """The part of a call that does not depend on the addresses of its tensors.

    Attributes:
        prepare, main, queries, write: the launches. Each is None if there is nothing to compute.
        maps: descriptors without tensors.
        batch: the batch, without tables.
        parts: how many CTAs share the query heads of a group.
        rows_shape, sums_shape: shapes of `RowsTensors.rows` and `RowsTensors.dq_sums`, which may be None.
    """

    prepare: BoundLaunch | None
    main: BoundLaunch | None
    queries: BoundQueries | None
    write: BoundLaunch | None
    maps: _Maps
    batch: Batch
    parts: int
    rows_shape: tuple[int, ...]
    sums_shape: tuple[int, ...] | None


def backward(
    gradients: tuple[torch.Tensor, torch.Tensor | None],
    saved: tuple[torch.Tensor, ...],
    sequences: Sequences,
    deterministic: bool,
) -> tuple[torch.Tensor, ...]:
    """Computes dq, dk, dv and dsinks, with the arguments and results of `training.backward.backward`."""
    q, k, v, dout = readable_by_tma(*saved[:3], gradients[0].contiguous())
    out, lse, dlse = saved[3].contiguous(), saved[4].contiguous(), contiguous_or_none(gradients[1])
    kinds = [None if each is None else tensor_kind(each) for each in (q, k, v, out, lse, dout, dlse)]
    divided = division(q, k, v, sequences, deterministic)
    key = "hopper backward", q.device, *kinds, sequences.kind, divided
    bound = kept(key, lambda: _bind(q, k, v, dout, sequences, divided))
    make = torch.zeros if sequences.packed else torch.empty
    dq = make(q.shape, dtype=q.dtype, device=q.device)
    summed = bound.parts > 1
    dk, dv = ((torch.empty if summed else make)(each.shape, dtype=q.dtype, device=q.device) for each in (k, v))
    parts = PartsTensors(dk_parts=None, dv_parts=None, dk=None, dv=None, key_numbers=0, value_numbers=0)
    if summed:
        dk_parts, dv_parts = (make((bound.parts, *each.shape), dtype=torch.float32, device=q.device) for each in (k, v))
        parts = PartsTensors(
            dk_parts=dk_parts, dv_parts=dv_parts, dk=dk, dv=dv, key_numbers=k.numel(), value_numbers=v.numel()
        )
    rows = torch.empty(bound.rows_shape, dtype=torch.float32, device=q.device)
    dq_sums = delta = None
    if bound.sums_shape is None:
        delta = torch.empty_like(lse)
    else:
        dq_sums = torch.empty(bound.sums_shape, dtype=torch.float32, device=q.device)
    tensors = RowsTensors(out=out, dout=dout, lse=lse, dlse=dlse, rows=rows, dq_sums=dq_sums, delta=delta, dq=dq)
    if sequences.tree is not None and sequences.sliding_window is not None:
        block_depths = torch.empty(bound.rows_shape[2], dtype=torch.int32, device=q.device)
        tensors = tensors._replace(depths=sequences.tree.depths, block_depths=block_depths)
    if bound.prepare is not None:
        bound.prepare((tensors, sequences.cu_seqlens_q))
    if bound.main is not None:
        given = (q, k, v, dout, dq_sums, rows)
        pairs = zip(bound.maps, given, strict=True)
        descriptors = [None if each is None or base is None else each.of(base) for each, base in pairs]
        written = parts[:2] if summed else (dk, dv)
        work = KeyWork(dk=written[0], dv=written[1], block_depths=tensors.block_depths)
        bound.main((*descriptors, work, with_tables(bound.batch, sequences)))
    if bound.queries is not None and delta is not None:
        query_gradients(bound.queries, (q, k, v, dout), (lse, delta), dq, sequences)
    if bound.write is not None:
        bound.write((tensors, sequences.cu_seqlens_q, parts))
    dsinks = lse.new_empty(0)
    if sequences.sinks is not None:
        shifts, deltas = rows.unbind(3)
        dsinks = sequences.sink_gradients(deltas.flatten(2), shifts.flatten(2) * LN_2)
    return dq, dk, dv, dsinks


def _bind(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dout: torch.Tensor, sequences: Sequences, divided: Division
) -> _Bound:
    """Prepares the launches for tensors and sequences of these kinds."""
    q, k, v, dout = (with_batch(tensor, sequences) for tensor in (q, k, v, dout))
    tile = backward_tile(q.shape[-1], v.shape[-1])
    parts, adds_dq = divided
    batch, seqlen_q, num_qo_heads, head_dim = q.shape
    sums = sequences.cu_seqlens_q
    num_blocks = sequences.blocks(sums, seqlen_q, tile.block_m)
    row_blocks = batch * num_qo_heads * num_blocks
    dq_dim = tile.keys.dims if tile.keys is not None and adds_dq else 0
    fixed = {"seqlen_q": seqlen_q, "num_blocks": num_blocks, "num_qo_heads": num_qo_heads, "num_warps": 4}
    fixed["num_sequences"] = 0 if sums is None else len(sums) - 1
    constants = RowsConstants(Width(v.shape[-1], tile.dim_v), tile.dim, dq_dim, tile.block_m, sequences.packed)
    dq_blocks = row_blocks if adds_dq else 0
    of_dout = fixed | {"C": constants}
    of_q = fixed | {"C": constants._replace(width=Width(head_dim, tile.dim)), "sm_scale": sequences.sm_scale}
    of_q |= {"row_blocks": dq_blocks, "PARTS": parts}
    sum_blocks = sum(-(-tensor.numel() // SUMMED.value) for tensor in (k, v)) if parts > 1 else 0
    main, kept_batch = _bind_main(q, k, v, parts, sequences, tile, dq_dim)
    sums_map = TensorMap([row_blocks * tile.block_m, dq_dim], [dq_dim, 1], [*DQ_BOX], _SUMS_LAYOUT)
    return _Bound(
        prepare=BoundLaunch(prepare_rows_kernel, Grid(row_blocks, of_dout), _ROWS) if row_blocks else None,
        main=main if row_blocks else None,
        queries=bind_query_gradients(q, k, v, dout, sequences) if row_blocks and not adds_dq else None,
        write=BoundLaunch(write_gradients_kernel, Grid(dq_blocks + sum_blocks, of_q), (*_ROWS, "parts"))
        if dq_blocks + sum_blocks
        else None,
        maps=_Maps(
            q=tensor_map(q, tile.block_m, BOX_DIMS),
            k=tensor_map(k, WARPGROUP_ROWS.value, BOX_DIMS),
            v=tensor_map(v, WARPGROUP_ROWS.value, BOX_DIMS),
            dout=tensor_map(dout, tile.block_m, BOX_DIMS),
            dq_sums=sums_map if adds_dq else None,
            rows=TensorMap([row_blocks * 2, tile.block_m], [tile.block_m, 1], [2, tile.block_m], _ROWS_LAYOUT),
        ),
        batch=kept_batch,
        parts=parts,
        rows_shape=(batch, num_qo_heads, num_blocks, 2, tile.block_m),
        sums_shape=(row_blocks * tile.block_m, dq_dim) if adds_dq else None,
    )


def _bind_main(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    parts: int,
    sequences: Sequences,
    tile: BackwardTile,
    dq_dim: int,
) -> tuple[BoundLaunch | None, Batch]:
    """Prepares the launch that adds to dq_sums and writes dk and dv. Returns it, or None if there are no keys, with its
    batch, which does not hold tensors yet. `dq_dim` is the width of the sums of dq, or 0 if it adds nothing to dq."""
    seqlen_q, num_qo_heads = q.shape[1:3]
    batch, seqlen_k, num_kv_heads, _ = k.shape
    group_size = num_qo_heads // num_kv_heads
    num_blocks = sequences.blocks(sequences.cu_seqlens_k, seqlen_k, tile.block_n)
    num_runs = batch * num_kv_heads * parts
    blocks = FlashTile(tile.block_m, tile.block_n, 9, tile.num_stages)
    given = arguments(q, k, v, sequences, blocks, num_blocks)
    head_bytes = seqlen_q * (4 * dq_dim + 2 * tile.dim + 2 * tile.dim_v)
    section = num_runs if sequences.tree is not None else min(num_runs, max(1, _SECTION_BYTES // head_bytes))
    even_k = given.variant.even_k and sequences.tree is None  # one kernel computes every tree
    constants = BackwardConstants(
        tile=tile,
        variant=given.variant._replace(even_q=False, even_k=even_k, sinks=False),
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        group_size=group_size,
        members=group_size // parts,
        adds_dq=dq_dim > 0,
    )
    fixed = {"scales": given.scales, "C": constants, "num_warps": 4, "maxnreg": REGISTERS}
    fixed |= {"num_sequences": given.numbers.num_sequences, "section": section}
    launch = BoundLaunch(hopper_backward_kernel, Grid(num_blocks * num_runs, fixed), _BROUGHT) if num_blocks else None
    return launch, given.batch
