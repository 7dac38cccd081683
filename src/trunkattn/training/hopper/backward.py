"""The backward pass on Hopper: three kernels. One prepares, one computes all gradients (see `key_gradients`), and the
last one writes dq, whose sums lie in float32, in the dtype of q.
"""

from typing import Any, Final, NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trunkattn.gpu.hopper.common import PRODUCER_REGISTERS, WARPGROUP_ROWS
from trunkattn.gpu.hopper.spec import BOX_DIMS
from trunkattn.numerics import LN_2
from trunkattn.training.backward import row_values
from trunkattn.training.common import Width, arguments, find_sequence, span, store_tile, with_batch
from trunkattn.training.hopper.common import reads as reads
from trunkattn.training.hopper.common import tma_descriptor
from trunkattn.training.hopper.key_blocks import BackwardConstants, BackwardTile, KeyWork, backward_tile
from trunkattn.training.hopper.key_gradients import consume_narrow, narrow_memory
from trunkattn.training.hopper.key_loads import DQ_BOX, allocate, produce
from trunkattn.training.hopper.wide_gradients import consume_wide, wide_memory
from trunkattn.training.sequences import Sequences
from trunkattn.training.spec import FlashTile

_SECTION_BYTES: Final = 8 * 2**20  # what CTAs that run at the same time stream, a part of the L2 cache
_CTAS_OF_AN_SM: Final = 4
REGISTERS: Final = 168  # of a thread at launch
_CONSUMER_REGISTERS = gl.constexpr(240)


class RowsTensors(NamedTuple):
    """Tensors of the first and the last kernel. out, dout, dq: contiguous. lse, dlse [batch, num_qo_heads, seqlen_q].
    Others are float32: rows [batch, num_qo_heads, blocks, 2, block], shift and delta of blocks of queries, and dq_sums
    [batch, num_qo_heads, blocks, block, dim], their dq. A packed sequence begins with a block of its own. Of a tree
    with a window depths [tokens], and block_depths [blocks], the smallest of each block; else both are None."""

    out: Any
    dout: Any
    lse: Any
    dlse: Any
    rows: Any
    dq_sums: Any
    dq: Any
    depths: Any = None
    block_depths: Any = None


class RowsBatch(NamedTuple):
    """The queries. cu_seqlens_q: None if they are not packed. num_blocks: of a head."""

    cu_seqlens_q: Any
    num_sequences: Any
    seqlen_q: Any
    num_qo_heads: Any
    num_blocks: Any


class _Block(NamedTuple):
    """A block of queries: `first` of a sequence of `length`, which begins at token `begin`."""

    row: Any
    head: Any
    first: Any
    begin: Any
    length: Any


@triton.jit
def _find_block(batch, BLOCK: tl.constexpr, PACKED: tl.constexpr):
    number, other = tl.program_id(0) % batch.num_blocks, tl.program_id(0) // batch.num_blocks
    head, row = (other % batch.num_qo_heads).to(tl.int64), (other // batch.num_qo_heads).to(tl.int64)
    begin, length = 0, batch.seqlen_q
    if PACKED:
        sequence, number = find_sequence(number, batch.cu_seqlens_q, batch.num_sequences, BLOCK)
        begin, length = span(batch.cu_seqlens_q, sequence, batch.seqlen_q)
    return _Block(row, head, number * BLOCK, begin, length)


@triton.jit
def prepare_rows_kernel(
    tensors: RowsTensors,
    batch: RowsBatch,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Writes shift and delta of a block of queries, +inf and 0 behind the last one, and zeros for its dq."""
    block = _find_block(batch, BLOCK, PACKED)
    token_stride = batch.num_qo_heads * WIDTH.dim
    at = (block.row * batch.seqlen_q + block.begin) * token_stride + block.head * WIDTH.dim
    row_at = (block.row * batch.num_qo_heads + block.head) * batch.seqlen_q + block.begin
    found = row_values(tensors, at, row_at, block.first, block.length, token_stride, WIDTH, BLOCK)
    m = tl.arange(0, BLOCK)
    index = tl.program_id(0).to(tl.int64) * BLOCK
    tl.store(tensors.rows + 2 * index + m, found.shift)
    tl.store(tensors.rows + 2 * index + BLOCK + m, found.delta)
    if tensors.depths is not None and block.head == 0:
        inside = block.first + m < block.length
        depths = tl.load(tensors.depths + block.first + m, mask=inside, other=2147483647)
        tl.store(tensors.block_depths + block.first // BLOCK, tl.min(depths))
    d = tl.arange(0, DIM)
    tl.store(tensors.dq_sums + (index + m)[:, None] * DIM + d[None, :], tl.zeros([BLOCK, DIM], tl.float32))


@triton.jit
def write_dq_kernel(
    tensors: RowsTensors,
    batch: RowsBatch,
    sm_scale,
    WIDTH: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK: tl.constexpr,
    PACKED: tl.constexpr,
):
    """Writes dq of a block of queries from its sums."""
    block = _find_block(batch, BLOCK, PACKED)
    index = tl.program_id(0).to(tl.int64) * BLOCK
    m, d = tl.arange(0, BLOCK), tl.arange(0, DIM)
    sums = tl.load(tensors.dq_sums + (index + m)[:, None] * DIM + d[None, :])
    token_stride = batch.num_qo_heads * WIDTH.dim
    at = (block.row * batch.seqlen_q + block.begin) * token_stride + block.head * WIDTH.dim
    store_tile(tensors.dq + at, block.first, token_stride, block.length, sums * sm_scale, WIDTH)


@gluon.jit
def hopper_backward_kernel(q_desc, k_desc, v_desc, dout_desc, dq_desc, rows_desc, work, batch, scales, C: gl.constexpr):
    """dk and dv of a block of keys of a KV head over some of its query heads, and what they add to dq."""
    T: gl.constexpr = C.tile
    memory = allocate(q_desc, k_desc, v_desc, dout_desc, dq_desc, rows_desc, T)
    if T.wide:
        wide = wide_memory(memory, q_desc.dtype, T)
        gl.warp_specialize(
            [
                (consume_wide, (0, work, batch, scales, dq_desc, wide, C)),
                (consume_wide, (1, work, batch, scales, dq_desc, wide, C)),
                (produce, (work, batch, q_desc, k_desc, v_desc, dout_desc, rows_desc, memory, C)),
            ],
            [4, 1],
            [_CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        narrow = narrow_memory(memory, q_desc.dtype, T)
        gl.warp_specialize(
            [
                (consume_narrow, (0, work, batch, scales, dq_desc, narrow, C)),
                (consume_narrow, (1, work, batch, scales, dq_desc, narrow, C)),
                (produce, (work, batch, q_desc, k_desc, v_desc, dout_desc, rows_desc, memory, C)),
            ],
            [4, 1],
            [_CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )


def backward(
    gradients: tuple[torch.Tensor, torch.Tensor],
    saved: tuple[torch.Tensor, ...],
    sequences: Sequences,
    deterministic: bool,
) -> tuple[torch.Tensor, ...]:
    """dq, dk, dv and dsinks, as of `training.backward.backward` in one pass. Nothing here is deterministic: sums of dq
    depend on the order of CTAs."""
    assert not deterministic
    q, k, v = (with_batch(tensor, sequences) for tensor in saved[:3])
    out, dout = (with_batch(tensor, sequences).contiguous() for tensor in (saved[3], gradients[0]))
    dout = dout if reads(dout) else dout.clone()
    lse, dlse = saved[4].contiguous(), gradients[1].contiguous()
    make = torch.zeros if sequences.packed else torch.empty
    tile = backward_tile(q.shape[-1], v.shape[-1])
    parts = _parts(k, q.shape[2], sequences, tile)
    dq = make(q.shape, dtype=q.dtype, device=q.device)
    dtype = q.dtype if parts == 1 else torch.float32
    dk, dv = (make((parts, *tensor.shape), dtype=dtype, device=q.device) for tensor in (k, v))
    batch, seqlen_q, num_qo_heads, head_dim = q.shape
    num_blocks = sequences.blocks(sequences.cu_seqlens_q, seqlen_q, tile.block_m)
    row_blocks = batch * num_qo_heads * num_blocks
    rows = torch.empty(row_blocks * 2, tile.block_m, dtype=torch.float32, device=q.device)
    dq_sums = torch.empty(row_blocks * tile.block_m, tile.dim, dtype=torch.float32, device=q.device)
    tensors = RowsTensors(out=out, dout=dout, lse=lse, dlse=dlse, rows=rows, dq_sums=dq_sums, dq=dq)
    if sequences.tree is not None and sequences.sliding_window is not None:
        block_depths = torch.empty(num_blocks, dtype=torch.int32, device=q.device)
        tensors = tensors._replace(depths=sequences.tree.depths, block_depths=block_depths)
    sums = sequences.cu_seqlens_q
    given = RowsBatch(sums, 0 if sums is None else len(sums) - 1, seqlen_q, num_qo_heads, num_blocks)
    constants = {"DIM": tile.dim, "BLOCK": tile.block_m, "PACKED": sequences.packed, "num_warps": 4}
    if row_blocks:
        prepare_rows_kernel[(row_blocks,)](tensors, given, WIDTH=Width(v.shape[-1], tile.dim_v), **constants)
        _launch((q, k, v, dout), tensors, (dk, dv), sequences, tile)
        widths = Width(head_dim, tile.dim)
        write_dq_kernel[(row_blocks,)](tensors, given, sequences.sm_scale, WIDTH=widths, **constants)
    dk, dv = (part[0] if parts == 1 else part.sum(0).to(q.dtype) for part in (dk, dv))
    dsinks = lse.new_empty(0)
    if sequences.sinks is not None:
        shift, delta = rows.view(batch, num_qo_heads, num_blocks, 2, tile.block_m).unbind(3)
        dsinks = sequences.sink_gradients(delta.flatten(2), shift.flatten(2) * LN_2)
    return (dq, dk, dv, dsinks) if sequences.has_batch else (dq[0], dk[0], dv[0], dsinks)


def _parts(k: torch.Tensor, num_qo_heads: int, sequences: Sequences, tile: BackwardTile) -> int:
    """How many CTAs share the query heads of a group: so many that every SM has some, as far as heads go. Their parts
    of dk and dv are summed in float32."""
    batch, seqlen_k, num_kv_heads, _ = k.shape
    group_size = num_qo_heads // num_kv_heads
    ctas = sequences.blocks(sequences.cu_seqlens_k, seqlen_k, tile.block_n) * batch * num_kv_heads
    wanted = _CTAS_OF_AN_SM * torch.cuda.get_device_properties(k.device).multi_processor_count
    divisors = [parts for parts in range(1, group_size + 1) if group_size % parts == 0]
    return next((parts for parts in divisors if ctas * parts >= wanted), group_size)


def _launch(
    inputs: tuple[torch.Tensor, ...],
    tensors: RowsTensors,
    gradients: tuple[torch.Tensor, torch.Tensor],
    sequences: Sequences,
    tile: BackwardTile,
) -> None:
    """Adds to dq_sums, and writes dk and dv, the gradients, of inputs: q, k, v and dout."""
    q, k, v, dout = inputs
    seqlen_q, num_qo_heads = q.shape[1:3]
    batch, seqlen_k, num_kv_heads, _ = k.shape
    parts, group_size = len(gradients[0]), num_qo_heads // num_kv_heads
    num_blocks = sequences.blocks(sequences.cu_seqlens_k, seqlen_k, tile.block_n)
    num_runs = batch * num_kv_heads * parts
    blocks = FlashTile(tile.block_m, tile.block_n, 9, tile.num_stages)
    given = arguments(q, k, v, sequences, blocks, num_blocks)
    head_bytes = seqlen_q * (4 * tile.dim + 2 * tile.dim + 2 * tile.dim_v)
    work = KeyWork(
        dk=gradients[0],
        dv=gradients[1],
        block_depths=tensors.block_depths,
        num_runs=num_runs,
        section=num_runs if sequences.tree is not None else min(num_runs, max(1, _SECTION_BYTES // head_bytes)),
        num_row_blocks=len(tensors.rows) // (2 * batch * num_qo_heads),
    )
    constants = BackwardConstants(
        tile=tile,
        variant=given.variant._replace(even_q=False, sinks=False),
        head_dim=q.shape[3],
        head_dim_v=v.shape[3],
        group_size=group_size,
        members=group_size // parts,
    )
    if num_blocks:
        hopper_backward_kernel[(num_blocks * num_runs,)](
            q_desc=tma_descriptor(q, tile.block_m, BOX_DIMS),
            k_desc=tma_descriptor(k, WARPGROUP_ROWS.value, BOX_DIMS),
            v_desc=tma_descriptor(v, WARPGROUP_ROWS.value, BOX_DIMS),
            dout_desc=tma_descriptor(dout, tile.block_m, BOX_DIMS),
            dq_desc=TensorDescriptor.from_tensor(tensors.dq_sums, [*DQ_BOX], gl.NVMMASharedLayout(128, 32, 2)),
            rows_desc=TensorDescriptor.from_tensor(tensors.rows, [2, tile.block_m], gl.NVMMASharedLayout(0, 32, 2)),
            work=work,
            batch=given.batch,
            scales=given.scales,
            C=constants,
            num_warps=4,
            maxnreg=REGISTERS,
        )
