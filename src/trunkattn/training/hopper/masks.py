"""What rows of queries see of a block of keys, in the forward pass on Hopper."""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trunkattn.training.hopper.query_tiles import ALL_SEEN


class Sight(NamedTuple):
    """What rows see, [64]: keys up to `last`, were it no tree, and with a window those of depth `least` and more."""

    last: Any
    least: Any


class _MaskArgs(NamedTuple):
    """A block whose column 0 is key `first`. Columns before `begin` belong to another block. In a tree, without a
    window, ends [block_n] are the ends of the keys' subtrees; with a window, ends and depths are where the tables hold
    those of the block's first key."""

    first: Any
    begin: Any
    sight: Sight
    ends: Any
    depths: Any


@gluon.jit
def mask_of(args, C: gl.constexpr, T: gl.constexpr):
    """[64, block_n] which row sees which key of a block."""
    n = gl.arange(0, T.block_n, gl.SliceLayout(0, T.scores))
    mask = n[None, :] <= (args.sight.last - args.first)[:, None]
    if C.variant.packed:
        mask = mask & (n >= args.begin)[None, :]
    if C.variant.tree or C.variant.window:
        mask = mask & mask_before(args, C, T)
    return mask


@gluon.jit
def mask_before(args, C: gl.constexpr, T: gl.constexpr):
    """[64, block_n] which row sees which key of a block, whose keys come before all rows."""
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
    """[block_n] what a tree's table says of a block's keys, from the entry of its first key on. No bound is needed: the
    tables reach a block beyond the tokens."""
    return gl.load(first + gl.arange(0, T.block_n, gl.SliceLayout(0, T.scores)))


@gluon.jit
def mask_args_of(at, before, sight, tables, SEEN: gl.constexpr, C: gl.constexpr):
    """Mask of the block whose first key is `at`, `before` columns behind column 0.

    The ends are read here, so that they arrive while the product q·k runs. With a window, `mask_before` reads both
    tables: two kept during the product leave too few registers for the scores."""
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
    """What rows m [64] of a tile see."""
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
