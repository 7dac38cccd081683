"""The blocks of keys of the backward pass on Hopper: their order, the queries that see each block, and the constants
that the kernel is compiled for."""

from typing import Any, Final, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trunkattn.gpu.hopper.online_softmax import copy_layout
from trunkattn.gpu.hopper.pipeline import PipelineShape
from trunkattn.numerics import LOG2_E
from trunkattn.training.arguments import Variant
from trunkattn.training.backward_keys import seen_by
from trunkattn.training.common import find_sequence, sequence_range_32
from trunkattn.training.spec import hopper_shares_keys, hopper_widths

_NUM_STAGES, _NUM_THREADS = 2, 288
_PANEL: Final = 64
_WIDEST_NARROW: Final = 128  # wider heads have sums in panels, and room for two panels of values
NARROW, PANELS, WIDE = "narrow", "panels", "wide"
_NEVER = gl.constexpr(2**30)
_LOG2_E = gl.constexpr(LOG2_E)
BAR_Q_EMPTY, BAR_DOUT_EMPTY = gl.constexpr(8), gl.constexpr(10)


class WidePart(NamedTuple):
    """Panels of 64 dims of wide heads that one warpgroup computes: 1 or 2 of them, from panel `first` on.
    `sums` is the layout of the warpgroup's matrix product, and `copy` the layout in which it is copied to memory."""

    first: int
    num_panels: int
    sums: Any
    copy: Any


class WideParts(NamedTuple):
    """What one warpgroup computes of dk and dv of wide heads."""

    dk: WidePart
    dv: WidePart


class HeadPart(NamedTuple):
    """Dims of a narrow head that one matrix product takes.

    Attributes:
        begin, width: the first dim, and how many there are, a power of two.
        sums: the layout of the sums [64, width].
        copy: the layout in which they are copied to memory.
    """

    begin: int
    width: int
    sums: Any
    copy: Any


class NarrowHead(NamedTuple):
    """A head of up to 128 dims.

    Attributes:
        dims: how many dims are multiplied. What lies behind them in shared memory is padding.
        parts: the parts that they are divided into.
        copy: the layout in which whole tiles are copied within shared memory.
    """

    dims: int
    parts: tuple[HeadPart, ...]
    copy: Any


class BackwardTile(NamedTuple):
    """Constants of the main loop.

    Attributes:
        block_m, block_n: queries and keys of a block.
        consumers: which consumers run: `NARROW`, `PANELS` or `WIDE`.
        columns: queries in the scores of one warpgroup.
        dim, dim_v: dims of keys and of values in shared memory.
        key_panels, value_panels: how many panels of 64 dims of a key and of a value are loaded.
        num_stages, num_threads, stored: fields of the `PipelineShape` of the pipeline of queries.
        dout: the shape of the pipeline of dout.
        scores: the layout of the scores.
        panel: the layout of a product [64, 64].
        copy_panel: the layout in which a panel is copied.
        keys, head_values: narrow keys and values; None for others.
        dq_widths: dims of the part of dq of narrow heads that each of the two warpgroups computes; empty for others.
        parts: what each of the two warpgroups computes of wide heads; None for others.
    """

    block_m: int
    block_n: int
    consumers: str
    columns: int
    dim: int
    dim_v: int
    key_panels: int
    value_panels: int
    num_stages: int
    num_threads: int
    stored: bool
    dout: PipelineShape
    scores: Any
    panel: Any
    copy_panel: Any
    keys: NarrowHead | None
    head_values: NarrowHead | None
    dq_widths: tuple[int, ...]
    parts: tuple[WideParts, WideParts] | None


@gluon.constexpr_function
def product_layout(columns: int) -> gl.NVMMADistributedLayout:
    """Returns the layout of a warpgroup's matrix product [64, columns]."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


def _narrow_head(head_dim: int, width: int) -> NarrowHead:
    """Returns the parts of a head. It is padded to 64, 96 or 128 dims, and to `width` dims in shared memory."""
    widths = (64,) if head_dim <= 64 else (64, 32) if head_dim <= 96 else (128,)
    parts = tuple(
        HeadPart(sum(widths[:number]), each, product_layout(each), copy_layout(each))
        for number, each in enumerate(widths)
    )
    return NarrowHead(sum(widths), parts, copy_layout(width))


def _part(panels: int, has_first: bool) -> WidePart:
    first = 2 if panels > 2 else 1
    begin, count = (0, first) if has_first else (first, max(1, panels - first))
    return WidePart(begin, count, product_layout(_PANEL * count), copy_layout(_PANEL * count))


def _wide_parts(key_panels: int, value_panels: int) -> tuple[WideParts, WideParts]:
    """Divides the panels between the two warpgroups. If keys and values have three each, one warpgroup computes two
    panels of dk, and the other one two panels of dv. A warpgroup for which no panel is left computes one that is not
    written."""
    first, second = (
        WideParts(_part(key_panels, has_first), _part(value_panels, not has_first)) for has_first in (True, False)
    )
    return first, second


def backward_tile(head_dim: int, head_dim_v: int) -> BackwardTile:
    """Returns the constants for heads of up to 256 dims.

    NARROW, for heads of up to 128: each warpgroup owns 64 keys, and a block of queries has two parts of dq, one for
    each warpgroup. Values are not padded beyond the width of keys, because shared memory holds no more.
    PANELS, for keys of up to 192 and values of up to 128: each warpgroup owns 64 keys, whose sums are panels.
    WIDE, for all others: both warpgroups share 64 keys, and each one owns some panels of them."""
    dim, dim_v = hopper_widths((head_dim, head_dim_v))
    dim = max(dim, dim_v)
    panels = -(-head_dim // _PANEL), -(-head_dim_v // _PANEL)
    if dim <= _WIDEST_NARROW:
        consumers, block_m, block_n = NARROW, 2 * _PANEL * _PANEL // dim, 2 * _PANEL
        columns, panels = block_m, (dim // _PANEL, dim_v // _PANEL)
    else:
        shares_keys = hopper_shares_keys((head_dim, head_dim_v))
        consumers, block_m, block_n = (WIDE, _PANEL, _PANEL) if shares_keys else (PANELS, _PANEL, 2 * _PANEL)
        columns, dim_v = _PANEL // 2, max(dim_v, _WIDEST_NARROW)
    narrow = consumers == NARROW
    # Beside wider values, keys of up to 64 have a second part, of zeros: there is dq for both warpgroups
    keys = _narrow_head(max(head_dim, dim // 2 + 1), dim) if narrow else None
    dq_widths = () if keys is None else (_PANEL, keys.dims - _PANEL if dim > _PANEL else _PANEL)
    dout = PipelineShape(
        head_dim=dim_v,
        block_n=block_m,
        num_stages=_NUM_STAGES,
        num_threads=_NUM_THREADS,
        empty=BAR_DOUT_EMPTY.value,
    )
    return BackwardTile(
        block_m=block_m,
        block_n=block_n,
        consumers=consumers,
        columns=columns,
        dim=dim,
        dim_v=dim_v,
        key_panels=panels[0],
        value_panels=panels[1],
        num_stages=_NUM_STAGES,
        num_threads=_NUM_THREADS,
        stored=False,
        dout=dout,
        scores=product_layout(columns),
        panel=product_layout(_PANEL),
        copy_panel=copy_layout(_PANEL),
        keys=keys,
        head_values=_narrow_head(head_dim_v, dim_v) if narrow else None,
        dq_widths=dq_widths,
        parts=_wide_parts(*panels) if consumers == WIDE else None,
    )


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
        num_runs: the number of (batch, KV head, part) triples. Each of them is a run of query heads.
        section: the number of runs whose blocks take turns.
        num_row_blocks: blocks of queries of one head in the arrays of rows.
    """

    dk: Any
    dv: Any
    block_depths: Any
    num_runs: Any
    section: Any
    num_row_blocks: Any


class KeyTask(NamedTuple):
    """The keys of a CTA, and the blocks of queries that see them.

    Attributes:
        row: the sequence's place in the batch.
        out_row: the row of dk and dv. The parts of a group lie one behind the other there.
        head: the first of the query heads.
        kv_head: their KV head.
        first: the first key, counted within the sequence.
        begin_q, len_q: the sequence has tokens [begin_q, begin_q + len_q) of the tensor of queries.
        begin_k, len_k: the same for the tensor of keys.
        begin, end: the blocks of queries that see the keys, counted within the sequence.
        full_begin, full_end: the blocks [begin, full_begin) and [full_end, end) need a mask; the others need none.
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
    end: Any
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


@gluon.jit
def find_keys(work, batch, C: gl.constexpr):
    """Returns the task of a CTA. Sections come one after the other, so that what CTAs read at the same time fits the L2
    cache. Within a section the first blocks come first, because most causal queries see them. If sequences are packed,
    a block of queries in which the sequence ends needs a mask."""
    TILE: gl.constexpr = C.tile
    VARIANT: gl.constexpr = C.variant
    BLOCK_M: gl.constexpr = TILE.block_m
    BLOCK_N: gl.constexpr = TILE.block_n
    of_section = work.section * batch.num_blocks
    first_run = gl.program_id(0) // of_section * work.section
    runs = gl.minimum(work.section, work.num_runs - first_run)  # the last section may have fewer
    rest = gl.program_id(0) % of_section
    number, run = rest // runs, first_run + rest % runs
    row, head = run * C.members // batch.num_qo_heads, run * C.members % batch.num_qo_heads
    out_row = row
    if C.members < C.group_size:
        out_row += head % C.group_size // C.members * (work.num_runs * C.members // batch.num_qo_heads)
    begin_q, begin_k, len_q, len_k = 0, 0, batch.seqlen_q, batch.seqlen_k
    row_block = run * C.members * work.num_row_blocks
    if VARIANT.packed:
        sequence, number = find_sequence(number, batch.cu_seqlens_k, batch.num_sequences, BLOCK_N)
        begin_q, len_q = sequence_range_32(batch.cu_seqlens_q, sequence, batch.seqlen_q)
        begin_k, len_k = sequence_range_32(batch.cu_seqlens_k, sequence, batch.seqlen_k)
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
        end=end,
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
def num_masked_blocks(task):
    """Returns the number of blocks of queries that need a mask."""
    return task.full_begin - task.begin + task.end - task.full_end


@gluon.jit
def masked_query_block(task, number):
    """Returns which block of the sequence the `number`-th block with a mask is."""
    m = task.begin + number
    return gl.where(m < task.full_begin, m, m - task.full_begin + task.full_end)


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
    if MASK:
        seen = _sees(first, keys, C)
        p = gl.where(seen, p, 0.0)
    if C.variant.soft_cap:
        sloped = p * (1.0 - tanh * tanh)
        if MASK:
            sloped = gl.where(seen, sloped, 0.0)  # scores of other packed sequences may be NaN
        return p, sloped
    else:
        return p, p
