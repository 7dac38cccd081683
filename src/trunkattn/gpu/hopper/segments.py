"""Row tiles as the Hopper kernels read them: the arrays of a `TileList`, its segments, and where TMA finds tokens.

A segment is a stretch of tokens that lie together in one page. An item lists its segments, and with each segment the
item's queries that see it. A block consists of whole segments.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.hopper import spec
from trunkattn.gpu.hopper.common import BOX_TOKENS
from trunkattn.gpu.hopper.pipeline import Boxes
from trunkattn.planner.work_list import (
    SEGMENT_COLUMNS,
    SEGMENT_END,
    SEGMENT_POSITION,
    SEGMENT_QUERIES,
    SEGMENT_SHARED_END,
    SEGMENT_START,
)

BLOCK_TOKENS = gl.constexpr(spec.BOTH_KEYS)
# Columns of an item, which has segments [start, end). Those before shared_end are whole and seen by all of its queries.
ITEM_SEGMENT_START, ITEM_SHARED_END = gl.constexpr(SEGMENT_START), gl.constexpr(SEGMENT_SHARED_END)
ITEM_SEGMENT_END = gl.constexpr(SEGMENT_END)
# Columns of a segment. Column 0 is the place of its first token in the cache.
_SEGMENT_QUERIES, _SEGMENT_POSITION = gl.constexpr(SEGMENT_QUERIES), gl.constexpr(SEGMENT_POSITION)
_SEGMENT_COLUMNS = gl.constexpr(SEGMENT_COLUMNS)


class RowTiles(NamedTuple):
    """Arrays of a `TileList` on the device."""

    items: Any
    segments: Any
    queries: Any
    partial_slots: Any
    positions: Any


class BlockMask(NamedTuple):
    """What the mask of a block depends on. The block begins with segment `at`, and the item's segments end at `end`.
    `query` and `position` [rows] say where each row's query stands in the item and in its sequence. `window` is in
    tokens."""

    segments: Any
    at: Any
    end: Any
    query: Any
    position: Any
    window: Any


@gluon.jit
def locate_boxes(segments, at, end, C: gl.constexpr, BLOCK_N: gl.constexpr):
    """Returns the TMA boxes of a block that begins with segment `at`. A box with fewer than 16 tokens ends with the
    last of them, since what lies behind it may be NaN. The box is filled up with tokens that come before, or with zeros
    from TMA."""
    page: gl.tuple = ()
    token: gl.tuple = ()
    for i in gl.static_range(BLOCK_N // BOX_TOKENS):
        index = at + i * BOX_TOKENS // C.segment_size
        segment = segments + gl.maximum(gl.minimum(index, end - 1), 0) * _SEGMENT_COLUMNS
        first = gl.load(segment)
        tokens = gl.where(index < end, gl.load(segment + _SEGMENT_QUERIES) >> 16, 0) - i * BOX_TOKENS % C.segment_size
        tokens = gl.minimum(gl.maximum(tokens, 0), BOX_TOKENS)
        page += (first // C.page_size,)
        begin = first % C.page_size + i * BOX_TOKENS % C.segment_size + tokens - BOX_TOKENS
        token += (gl.where(tokens > 0, begin, -BOX_TOKENS),)
    return Boxes(page, token)


@gluon.jit
def mask_rows(args, C: gl.constexpr, T: gl.constexpr):
    """Returns which row sees which key of a block, [rows, block_n]."""
    n = gl.arange(0, T.block_n, gl.SliceLayout(0, T.scores))
    if C.masked:
        return _mask_stretches(args, n, C, T)
    else:
        return _mask_boxes(args, n, C, T)


@gluon.jit
def _load_box(args, i, C: gl.constexpr):
    """Returns a pointer to the segment of box `i` of a block, the segment's column of queries and tokens, and how many
    of its tokens are in the box."""
    index = args.at + i * BOX_TOKENS // C.segment_size
    segment = args.segments + index * _SEGMENT_COLUMNS
    packed = gl.load(segment + _SEGMENT_QUERIES, mask=index < args.end, other=0)
    tokens = gl.minimum(gl.maximum((packed >> 16) - i * BOX_TOKENS % C.segment_size, 0), BOX_TOKENS)
    return segment, packed, tokens


@gluon.jit
def _mask_boxes(args, n, C: gl.constexpr, T: gl.constexpr):
    """Returns the mask if a row sees either all keys of a box or none."""
    boxes_seen = args.query * 0  # one bit for each box that the row's query sees
    place = n * 0  # which token of its box a key is, plus BOX_TOKENS: a box ends with its last token
    for i in gl.static_range(T.block_n // BOX_TOKENS):
        _, packed, tokens = _load_box(args, i, C)
        boxes_seen |= gl.where((args.query >= (packed & 255)) & (args.query < (packed >> 8 & 255)), 1 << i, 0)
        place = gl.where(n // BOX_TOKENS == i, n % BOX_TOKENS + tokens, place)
    box_seen = (boxes_seen[:, None] >> (n // BOX_TOKENS)[None, :]) & 1 != 0
    return box_seen & (place >= BOX_TOKENS)[None, :]


@gluon.jit
def _mask_stretches(args, n, C: gl.constexpr, T: gl.constexpr):
    """Returns the mask if a row's position and the window matter, too. A row then sees one stretch of keys in each box.
    Whatever is the same for all keys of a box is computed once, and two comparisons decide on each key, so that the
    mask takes few registers."""
    place = n % BOX_TOKENS - BOX_TOKENS  # of a key, relative to the end of its box, where its last token ends
    before = args.query[:, None] * 0 + (n * 0)[None, :]  # a row sees the keys behind this place
    until = before  # up to this one
    for i in gl.static_range(T.block_n // BOX_TOKENS):
        segment, packed, tokens = _load_box(args, i, C)
        first = gl.load(segment + _SEGMENT_POSITION, mask=tokens > 0, other=0)
        end = first + i * BOX_TOKENS % C.segment_size + tokens  # position behind the box's last token
        hidden = gl.maximum(args.position - args.window, -1)  # the last position that the window hides
        low = gl.maximum(hidden - end, -1 - tokens)
        is_listed = (args.query >= (packed & 255)) & (args.query < (packed >> 8 & 255))
        high = gl.where(is_listed, gl.minimum(args.position - end, -1), -1 - BOX_TOKENS)
        in_box = (n // BOX_TOKENS == i)[None, :]
        before = gl.where(in_box, low[:, None], before)
        until = gl.where(in_box, high[:, None], until)
    return (place[None, :] > before) & (place[None, :] <= until)


@gluon.jit
def mask_gathered(args, C: gl.constexpr, T: gl.constexpr):
    """Returns which row sees which key of a gathered block, [rows, block_n]. Its tokens lie in the order of the
    segments."""
    n = gl.arange(0, T.block_n, gl.SliceLayout(0, T.scores))
    index = args.at + n // C.segment_size
    segment = args.segments + index * _SEGMENT_COLUMNS
    packed = gl.load(segment + _SEGMENT_QUERIES, mask=index < args.end, other=0)
    begin, until = gl.where(n % C.segment_size < packed >> 16, packed & 255, 256), packed >> 8 & 255
    mask = (args.query[:, None] >= begin[None, :]) & (args.query[:, None] < until[None, :])
    if C.masked:
        key = gl.load(segment + _SEGMENT_POSITION, mask=index < args.end, other=0) + n % C.segment_size
        mask = mask & (key[None, :] <= args.position[:, None])
        mask = mask & (key[None, :] > (args.position - args.window)[:, None])
    return mask


@gluon.jit
def mask_columns(args, ACC: gl.constexpr, C: gl.constexpr):
    """Returns which row sees which key of a block, [BLOCK_TOKENS, rows], in the layout `ACC`."""
    n = gl.arange(0, BLOCK_TOKENS, gl.SliceLayout(1, ACC))
    index = args.at + n // C.segment_size
    segment = args.segments + index * _SEGMENT_COLUMNS
    packed = gl.load(segment + _SEGMENT_QUERIES, mask=index < args.end, other=0)
    first = n % C.segment_size // BOX_TOKENS * BOX_TOKENS  # of the box, in the segment
    tokens = gl.minimum(gl.maximum((packed >> 16) - first, 0), BOX_TOKENS)
    missing = BOX_TOKENS - tokens  # a box ends with its last token
    begin, until = gl.where(n % BOX_TOKENS >= missing, packed & 255, 256), packed >> 8 & 255
    mask = (args.query[None, :] >= begin[:, None]) & (args.query[None, :] < until[:, None])
    if C.masked:
        key = gl.load(segment + _SEGMENT_POSITION, mask=index < args.end, other=0) + n % C.segment_size - missing
        mask = mask & (key[:, None] <= args.position[None, :])
        mask = mask & (key[:, None] > (args.position - args.window)[None, :])
    return mask


def row_tiles_of(plan: GpuPlan) -> RowTiles:
    """Returns the arrays of a plan's tile list."""
    arrays = plan.arrays
    return RowTiles(
        arrays["items"], arrays["segments"], arrays["queries"], arrays["partial_slots"], arrays["positions"]
    )
