"""The blocks of keys of the backward pass on Hopper: their order, the queries that see each, and constants."""

from typing import Any, Final, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trunkattn.gpu.hopper.online_softmax import copy_layout
from trunkattn.training.backward_keys import seen_by
from trunkattn.training.common import Variant, find_sequence, span
from trunkattn.training.spec import hopper_widths

BLOCK_N: Final = 128  # keys of a CTA
_NUM_STAGES, _NUM_THREADS = 2, 288
_PANEL: Final = 64  # rows and columns of dq that a warpgroup computes


class BackwardTile(NamedTuple):
    """Constants of the main loop. block_m queries × block_n keys. dim, dim_v: of keys and of values, padded. num_stages
    to stored: as of `PipelineShape`. ahead: scores are computed a block ahead, which takes registers that only narrow
    heads have. scores, dk, dv, dq: layouts of the products. copy_k, copy_v: of copies to memory."""

    block_m: int
    block_n: int
    dim: int
    dim_v: int
    num_stages: int
    num_threads: int
    stored: bool
    ahead: bool
    scores: Any
    dk: Any
    dv: Any
    dq: Any
    copy_k: Any
    copy_v: Any


def backward_tile(head_dim: int, head_dim_v: int) -> BackwardTile:
    """The constants for heads of up to 128. A block of queries has two panels of dq, one for each warpgroup. Values are
    not padded to more than keys, because shared memory ends."""
    dim, dim_v = hopper_widths((head_dim, head_dim_v))
    dim = max(dim, dim_v)
    block_m = 2 * _PANEL * _PANEL // dim
    scores, dk, dv, dq = (
        gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])
        for columns in (block_m, dim, dim_v, _PANEL)
    )
    return BackwardTile(
        block_m=block_m,
        block_n=BLOCK_N,
        dim=dim,
        dim_v=dim_v,
        num_stages=_NUM_STAGES,
        num_threads=_NUM_THREADS,
        stored=False,
        ahead=dim == 64,
        scores=scores,
        dk=dk,
        dv=dv,
        dq=dq,
        copy_k=copy_layout(dim),
        copy_v=copy_layout(dim_v),
    )


class BackwardConstants(NamedTuple):
    """What the kernel is compiled for. head_dim, head_dim_v: of keys and of values, in memory."""

    tile: BackwardTile
    variant: Variant
    head_dim: int
    head_dim_v: int
    group_size: int


class KeyWork(NamedTuple):
    """What is written, and in which order. dk, dv: contiguous. section: pairs (batch, KV head) whose blocks take turns.
    num_row_blocks: blocks of queries of a head in the arrays of rows."""

    dk: Any
    dv: Any
    num_kv_heads: Any
    num_pairs: Any
    section: Any
    num_row_blocks: Any


class KeyTask(NamedTuple):
    """The keys of a CTA: those from `first` on of a sequence of len_k, which begins at token begin_k, and the blocks of
    queries that see them, by their numbers in the sequence: those in [begin, full_begin) and [full_end, end) need a
    mask. row: of a batch. row_block: where the first one of the first head of the group lies in the arrays of rows;
    those of the next head lie num_row_blocks behind."""

    row: Any
    kv_head: Any
    first: Any
    begin_q: Any
    begin_k: Any
    len_q: Any
    len_k: Any
    begin: Any
    full_begin: Any
    full_end: Any
    end: Any
    row_block: Any
    num_row_blocks: Any


@gluon.jit
def _span(cu_seqlens, sequence, tokens):
    begin, length = span(cu_seqlens, sequence, tokens)
    return begin.to(gl.int32), length.to(gl.int32)


@gluon.jit
def find_keys(work, batch, C: gl.constexpr):
    """The task of a CTA. Sections come one after the other, so that what CTAs read at the same time fits the L2 cache;
    the first blocks of a section, which most causal queries see, go first. A packed block of queries that its sequence
    ends in needs a mask."""
    TILE: gl.constexpr = C.tile
    VARIANT: gl.constexpr = C.variant
    BLOCK_M: gl.constexpr = TILE.block_m
    BLOCK_N: gl.constexpr = TILE.block_n
    of_section = work.section * batch.num_blocks
    first_pair = gl.program_id(0) // of_section * work.section
    pairs = gl.minimum(work.section, work.num_pairs - first_pair)  # the last section may have fewer
    rest = gl.program_id(0) % of_section
    number, pair = rest // pairs, first_pair + rest % pairs
    row, kv_head = pair // work.num_kv_heads, pair % work.num_kv_heads
    begin_q, begin_k, len_q, len_k = 0, 0, batch.seqlen_q, batch.seqlen_k
    row_block = pair * C.group_size * work.num_row_blocks
    if VARIANT.packed:
        sequence, number = find_sequence(number, batch.cu_seqlens_k, batch.num_sequences, BLOCK_N)
        begin_q, len_q = _span(batch.cu_seqlens_q, sequence, batch.seqlen_q)
        begin_k, len_k = _span(batch.cu_seqlens_k, sequence, batch.seqlen_k)
        row_block += begin_q // BLOCK_M + sequence
    first = number * BLOCK_N
    n = first + gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    ranges = seen_by(batch, n, first, len_q, len_k, TILE, VARIANT)
    full_begin = (ranges.full_begin + BLOCK_M - 1) // BLOCK_M
    full_end = (ranges.full_end + BLOCK_M - 1) // BLOCK_M
    if VARIANT.packed:
        full_end = gl.minimum(full_end, len_q // BLOCK_M)
    full_end = gl.maximum(full_end, full_begin)
    begin, end = ranges.begin // BLOCK_M, (ranges.end + BLOCK_M - 1) // BLOCK_M
    return KeyTask(
        row=row,
        kv_head=kv_head,
        first=first,
        begin_q=begin_q,
        begin_k=begin_k,
        len_q=len_q,
        len_k=len_k,
        begin=begin,
        full_begin=full_begin,
        full_end=full_end,
        end=end,
        row_block=row_block,
        num_row_blocks=work.num_row_blocks,
    )


@gluon.constexpr_function
def needs_masks(C: BackwardConstants) -> bool:
    """Whether some block of queries may need a mask."""
    return C.variant.causal or C.variant.packed or not C.variant.even_k


@gluon.jit
def num_masked_blocks(task):
    """The number of blocks of queries that need a mask."""
    return task.full_begin - task.begin + task.end - task.full_end


@gluon.jit
def masked_query_block(task, number):
    """Number of such a block in the sequence."""
    m = task.begin + number
    return gl.where(m < task.full_begin, m, m - task.full_begin + task.full_end)
