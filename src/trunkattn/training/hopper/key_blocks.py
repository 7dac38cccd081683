"""The blocks of keys of the backward pass on Hopper: their order, the queries that see each block, and the constants
that the kernel is compiled for."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trunkattn.numerics import LOG2_E
from trunkattn.training.arguments import Variant
from trunkattn.training.backward_keys import seen_by
from trunkattn.training.common import find_sequence, sequence_range_32
from trunkattn.training.hopper.key_tile import BackwardTile

_NEVER = gl.constexpr(2**30)
_LOG2_E = gl.constexpr(LOG2_E)
# Which keys the queries of a block see. ALL_SEEN: every query sees all of them. PART_SEEN: every query sees those whose
# subtrees end last, `KeyTask.part_to`, and no others. MASKED: those that `_sees` says.
ALL_SEEN, PART_SEEN, MASKED = gl.constexpr(0), gl.constexpr(1), gl.constexpr(2)


class BackwardConstants(NamedTuple):
    """What the kernel is compiled for. `head_dim` and `head_dim_v` are the dims of keys and of values in memory.
    `members` is the number of query heads that a CTA computes: the whole group or a part of it. `adds_dq` says that the
    kernel also adds to dq."""

    tile: BackwardTile
    variant: Variant
    head_dim: int
    head_dim_v: int
    group_size: int
    members: int
    adds_dq: bool


class KeyWork(NamedTuple):
    """What is written, and in which order.

    Attributes:
        dk, dv: the gradients [parts of a group, batch, seqlen_k, num_kv_heads, ...], contiguous. They are float32 if a
            group has several parts.
        block_depths: in a tree with a window, the smallest depth in each block of queries; otherwise None.
        section: the number of runs whose blocks take turns. It is None, as the following are, outside the kernel.
        num_runs: the number of (batch, KV head, part) triples. Each of them is a run of query heads.
        num_row_blocks: blocks of queries of one head in the arrays of rows.
        numbers: the `Numbers`.
    """

    dk: Any
    dv: Any
    block_depths: Any
    section: Any = None
    num_runs: Any = None
    num_row_blocks: Any = None
    numbers: Any = None


class KeyTask(NamedTuple):
    """The keys of a CTA, and the blocks of queries that see them.

    Attributes:
        row: the sequence's place in the batch.
        out_row: the row of dk and dv. The parts of a group lie one after the other there.
        head: the first of the query heads.
        kv_head: their KV head.
        first: the first key, counted within the sequence.
        begin_q, len_q: the sequence has tokens [begin_q, begin_q + len_q) of the tensor of queries.
        begin_k, len_k: the same for the tensor of keys.
        begin, end: the blocks of queries that see the keys, counted within the sequence.
        full_begin, full_end: every query of the blocks [full_begin, full_end) sees all keys.
        part_begin, part_end: every query of the blocks [part_begin, part_end), which come behind `full_end`, sees the
            same part of the keys. There are such blocks only where `sees_parts` says so.
        part_to: this part consists of the keys whose subtrees end here, later than those of all others.
        row_block: where the first block of queries of `head` lies in the arrays of rows.
        num_row_blocks: the distance to the first block of the next head there.
        depth_end: in a tree with a window, queries of this depth and deeper see none of the keys.
    """

    row: Any
    out_row: Any
    head: Any
    kv_head: Any
    first: Any
    begin_q: Any
    begin_k: Any
    len_q: Any
    len_k: Any
    begin: Any
    full_begin: Any
    full_end: Any
    part_begin: Any
    part_end: Any
    end: Any
    part_to: Any
    row_block: Any
    num_row_blocks: Any
    depth_end: Any


class OwnKeys(NamedTuple):
    """The keys of a warpgroup [64]. A key is seen by the queries [seen_from, seen_to). In a tree with a window, only
    those queries among them see it whose depth is below `depth_end`; `depths` points to the depths. `count` is the
    number of blocks of queries of all heads."""

    task: Any
    seen_from: Any
    seen_to: Any
    depths: Any
    depth_end: Any
    scales: Any
    count: Any


@gluon.constexpr_function
def skips_blocks(C: BackwardConstants) -> bool:
    """Whether whole blocks of queries may be skipped. In a tree with a window, blocks beyond the window lie between
    others, since tokens are in pre-order. Where nothing is skipped and no keys are shared, the next scores are computed
    ahead."""
    return C.variant.tree and C.variant.window


@gluon.constexpr_function
def sees_parts(C: BackwardConstants) -> bool:
    """Whether blocks of queries may be `PART_SEEN`. A block of keys may lie in a root of a tree and in its first child.
    All queries behind that child see the root's keys and no others, unless there is a window."""
    return C.variant.tree and not C.variant.window


@gluon.jit
def _ceil(number, BLOCK: gl.constexpr):
    """Returns the number of blocks up to a token."""
    return (number + BLOCK - 1) // BLOCK


@gluon.jit
def find_keys(work, batch, C: gl.constexpr):
    """Returns the task of a CTA. Sections come one after the other, so that what CTAs read at the same time fits the L2
    cache. Within a section the first blocks come first, because most causal queries see them. If sequences are packed,
    a block of queries in which the sequence ends needs a mask."""
    TILE: gl.constexpr = C.tile
    VARIANT: gl.constexpr = C.variant
    BLOCK_M: gl.constexpr = TILE.block_m
    BLOCK_N: gl.constexpr = TILE.block_n
    of_section = work.section * work.numbers.num_blocks
    first_run = gl.program_id(0) // of_section * work.section
    runs = gl.minimum(work.section, work.num_runs - first_run)  # the last section may have fewer
    rest = gl.program_id(0) % of_section
    number, run = rest // runs, first_run + rest % runs
    row, head = run * C.members // batch.num_qo_heads, run * C.members % batch.num_qo_heads
    out_row = row
    if C.members < C.group_size:
        out_row += head % C.group_size // C.members * (work.num_runs * C.members // batch.num_qo_heads)
    begin_q, begin_k, len_q, len_k = 0, 0, work.numbers.seqlen_q, work.numbers.seqlen_k
    row_block = run * C.members * work.num_row_blocks
    if VARIANT.packed:
        sequence, number = find_sequence(number, batch.cu_seqlens_k, work.numbers.num_sequences, BLOCK_N)
        begin_q, len_q = sequence_range_32(batch.cu_seqlens_q, sequence, work.numbers.seqlen_q)
        begin_k, len_k = sequence_range_32(batch.cu_seqlens_k, sequence, work.numbers.seqlen_k)
        row_block += begin_q // BLOCK_M + sequence
    first = number * BLOCK_N
    n = first + gl.arange(0, BLOCK_N, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    ranges = seen_by(batch, n, first, len_q, len_k, TILE, VARIANT)
    full_begin, full_end = _ceil(ranges.full_begin, BLOCK_M), _ceil(ranges.full_end, BLOCK_M)
    if VARIANT.packed:
        full_end = gl.minimum(full_end, len_q // BLOCK_M)
    full_end = gl.maximum(full_end, full_begin)
    begin, end = ranges.begin // BLOCK_M, _ceil(ranges.end, BLOCK_M)
    part_begin, part_end = end, end
    if sees_parts(C):
        no_full, after = full_begin >= full_end, gl.minimum(_ceil(first + BLOCK_N - 1, BLOCK_M), end)
        full_begin, full_end = gl.where(no_full, after, full_begin), gl.where(no_full, after, full_end)
        ends = gl.load(batch.subtree_end + n, mask=n < len_k, other=0)
        shorter = gl.max(gl.where(ends < ranges.end, ends, 0), 0)
        part_begin = gl.minimum(gl.maximum(_ceil(shorter, BLOCK_M), full_end), end)
        part_end = gl.maximum(gl.where(ranges.end < len_q, ranges.end // BLOCK_M, end), part_begin)
    depth_end = 0
    if skips_blocks(C):
        depth_end = gl.max(gl.load(batch.depths + n, mask=n < len_k, other=0), 0) + batch.window
    return KeyTask(
        row=row,
        out_row=out_row,
        head=head,
        kv_head=head // C.group_size,
        first=first,
        begin_q=begin_q,
        begin_k=begin_k,
        len_q=len_q,
        len_k=len_k,
        begin=begin,
        full_begin=full_begin,
        full_end=full_end,
        part_begin=part_begin,
        part_end=part_end,
        end=end,
        part_to=ranges.end,
        row_block=row_block,
        num_row_blocks=work.num_row_blocks,
        depth_end=depth_end,
    )


@gluon.constexpr_function
def needs_masks(C: BackwardConstants) -> bool:
    """Whether some block of queries may need a mask."""
    return C.variant.causal or C.variant.packed or C.variant.window or not C.variant.even_k


@gluon.jit
def is_reached(work, task, m, C: gl.constexpr):
    """Whether some query of block m of a sequence may see a key of the task. Every task with blocks of queries has such
    a block, because a token sees itself, and `wide_gradients` relies on this."""
    if skips_blocks(C):
        return gl.load(work.block_depths + m) < task.depth_end
    else:
        return True


@gluon.jit
def num_masked_blocks(task, C: gl.constexpr):
    """Returns the number of blocks of queries that need a mask."""
    count = task.full_begin - task.begin + task.end - task.full_end
    if sees_parts(C):
        count -= task.part_end - task.part_begin
    return count


@gluon.jit
def masked_query_block(task, number, C: gl.constexpr):
    """Returns which block of the sequence the `number`-th block with a mask is."""
    m = task.begin + number
    m = gl.where(m < task.full_begin, m, m - task.full_begin + task.full_end)
    if sees_parts(C):
        m = gl.where(m < task.part_begin, m, m - task.part_begin + task.part_end)
    return m


@gluon.jit
def own_keys(n, task, batch, scales, C: gl.constexpr):
    """Returns `OwnKeys` for the keys n of a sequence."""
    position = n - (task.len_k - task.len_q)  # of the query that is the same token as the key
    seen_from = position if C.variant.causal else n * 0
    seen_to, depths, depth_end = seen_from, seen_from, seen_from  # Triton 3.6 takes no None here
    if C.variant.tree:
        seen_to = gl.load(batch.subtree_end + n, mask=n < task.len_k, other=0)
        if C.variant.window:
            depths = batch.depths
            depth_end = gl.load(depths + n, mask=n < task.len_k, other=0) + batch.window
    elif C.variant.window:
        seen_to = position + batch.window
        if not C.variant.causal:
            seen_from = position + 1 - batch.window
    if not C.variant.even_k:
        seen_from = gl.where(n < task.len_k, seen_from, _NEVER)
    count = C.members * (task.end - task.begin)
    return OwnKeys(
        task=task,
        seen_from=seen_from,
        seen_to=seen_to,
        depths=depths,
        depth_end=depth_end,
        scales=scales,
        count=count,
    )


@gluon.jit
def _sees(first, keys, C: gl.constexpr):
    """Returns which key is seen by which query, [64, columns]. The first query is `first`."""
    T: gl.constexpr = C.tile
    column = gl.arange(0, T.columns, gl.SliceLayout(0, T.scores))
    seen = column[None, :] >= (keys.seen_from - first)[:, None]
    if C.variant.tree or C.variant.window:
        seen = seen & (column[None, :] < (keys.seen_to - first)[:, None])
    if C.variant.packed:
        seen = seen & (column < keys.task.len_q - first)[None, :]
    if skips_blocks(C):
        depth = gl.load(keys.depths + first + column, mask=column < keys.task.len_q - first, other=0)
        seen = seen & (depth[None, :] < keys.depth_end[:, None])
    return seen


@gluon.jit
def weights(scores, shift, first, keys, MASK: gl.constexpr, C: gl.constexpr):
    """Returns pᵀ of the queries that begin with `first`, and pᵀ times the slope of the soft cap, which is the factor of
    their dsᵀ."""
    scales = keys.scales
    if C.variant.soft_cap:
        tanh = 2.0 / (1.0 + gl.exp2(scores * (-2.0 * scales.log2 / scales.soft_cap))) - 1.0
        p = gl.exp2(gl.fma(tanh, gl.to_tensor(scales.soft_cap * _LOG2_E), -shift[None, :]))
    else:
        p = gl.exp2(gl.fma(scores, gl.to_tensor(scales.log2), -shift[None, :]))
    seen = True
    if MASK == PART_SEEN:
        p = gl.where((keys.seen_to == keys.task.part_to)[:, None], p, 0.0)
    elif MASK == MASKED:
        seen = _sees(first, keys, C)
        p = gl.where(seen, p, 0.0)
    if C.variant.soft_cap:
        sloped = p * (1.0 - tanh * tanh)
        if MASK == MASKED:
            sloped = gl.where(seen, sloped, 0.0)  # scores of other packed sequences may be NaN
        return p, sloped
    else:
        return p, p
