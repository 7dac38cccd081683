"""Which keys of a block each query row sees, in the kernels on Hopper that own queries."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trunkattn.training.hopper.query_tiles import ALL_SEEN


class Sight(NamedTuple):
    """Bounds of what each of 64 rows sees. Outside a tree a row sees the keys up to `last`. With a window it sees only
    keys whose depth is at least `least`; outside a tree the depth of a key is its position."""

    last: Any
    least: Any


class _MaskArgs(NamedTuple):
    """What the mask of a block depends on.

    Attributes:
        first: the key in column 0 of the block.
        begin: the first column that belongs to this block. Columns before it belong to another block.
        sight: the bounds of the rows.
        ends: in a tree without a window, where the subtree of each key ends [block_n]. In a tree with a window, a
            pointer to the subtree end of the block's first key.
        depths: in a tree with a window, a pointer to the depth of the block's first key.
    """

    first: Any
    begin: Any
    sight: Sight
    ends: Any
    depths: Any


@gluon.jit
def mask_of(args, C: gl.constexpr, T: gl.constexpr):
    """Returns which row sees which key of a block, [64, block_n]."""
    n = gl.arange(0, T.block_n, gl.SliceLayout(0, T.scores))
    mask = n[None, :] <= (args.sight.last - args.first)[:, None]
    if C.variant.packed:
        mask = mask & (n >= args.begin)[None, :]
    if C.variant.tree or C.variant.window:
        mask = mask & mask_before(args, C, T)
    return mask


@gluon.jit
def mask_before(args, C: gl.constexpr, T: gl.constexpr):
    """Returns which row sees which key, [64, block_n], of a block whose keys all come before all rows."""
    if C.variant.tree:
        if C.variant.window:
            mask = args.sight.last[:, None] < _of_keys(args.ends, T)[None, :]
            mask = mask & (_of_keys(args.depths, T)[None, :] >= args.sight.least[:, None])
        else:
            mask = args.sight.last[:, None] < args.ends[None, :]
    else:
        n = gl.arange(0, T.block_n, gl.SliceLayout(0, T.scores))
        mask = n[None, :] >= (args.sight.least - args.first)[:, None]
    return mask


@gluon.jit
def _of_keys(first, T: gl.constexpr):
    """Loads the entries of a block's keys from a table of a tree, [block_n]. `first` points to the entry of the first
    key. No bound is checked, because the tables are longer than the tokens by one block."""
    return gl.load(first + gl.arange(0, T.block_n, gl.SliceLayout(0, T.scores)))


@gluon.jit
def mask_args_of(at, before, sight, tables, SEEN: gl.constexpr, C: gl.constexpr):
    """Returns the arguments of the mask of a block. Its first key is `at`, which lies in column `before`.

    Without a window the subtree ends are loaded here, so that they arrive while the product q·k runs. With a window,
    `mask_before` loads both tables itself: holding both during the product would leave too few registers for the
    scores."""
    T: gl.constexpr = C.mainloop
    ends, depths = 0, 0
    if C.variant.tree and SEEN != ALL_SEEN:
        ends = tables.subtree_end + at
        if C.variant.window:
            depths = tables.depths + at
        else:
            ends = _of_keys(ends, T)
    return _MaskArgs(at - before, before, sight, ends, depths)


@gluon.jit
def sight_of(tile, m, tables, C: gl.constexpr):
    """Returns the bounds of what rows m [64] of a tile see."""
    place = tile.first + m
    if not C.variant.tree:
        place += tile.len_k - tile.len_q
    last, least = place, 0
    if C.variant.window:
        depth = place
        if C.variant.tree:
            depth = gl.load(tables.depths + place, mask=place < tile.len_q, other=0)
        least = depth + 1 - tables.window
        if not C.variant.causal:
            last += tables.window - 1
    if not C.variant.tree:
        sees_part: gl.constexpr = C.variant.causal or C.variant.window
        last = gl.minimum(last, tile.len_k - 1) if sees_part else m * 0 + tile.len_k - 1
    return Sight(last, least)
