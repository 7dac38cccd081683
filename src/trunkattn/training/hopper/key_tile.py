"""The tiles of the kernel for dk and dv on Hopper: how blocks of keys and queries lie in memory and registers."""

from typing import Any, Final, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trunkattn.gpu.hopper.online_softmax import copy_layout
from trunkattn.gpu.hopper.pipeline import PipelineShape
from trunkattn.training.spec import hopper_shares_keys, hopper_widths

_NUM_STAGES, _NUM_THREADS = 2, 288
_PANEL: Final = 64
WIDEST_NARROW: Final = 128  # wider heads have sums in panels, and room for two panels of values
NARROW, PANELS, WIDE = "narrow", "panels", "wide"
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
    if dim <= WIDEST_NARROW:
        consumers, block_m, block_n = NARROW, 2 * _PANEL * _PANEL // dim, 2 * _PANEL
        columns, panels = block_m, (dim // _PANEL, dim_v // _PANEL)
    else:
        shares_keys = hopper_shares_keys((head_dim, head_dim_v))
        consumers, block_m, block_n = (WIDE, _PANEL, _PANEL) if shares_keys else (PANELS, _PANEL, 2 * _PANEL)
        columns, dim_v = _PANEL // 2, max(dim_v, WIDEST_NARROW)
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
