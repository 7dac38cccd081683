"""One block of keys for the query rows of one task: scores, mask, online softmax, output."""

from typing import Any, NamedTuple

import numpy as np

from trunkattn.compiled import njit
from trunkattn.cpu.arguments import array_at
from trunkattn.cpu.convert import as_float32, exp2, tanh, to_floats
from trunkattn.cpu.microkernel import (
    LANES,
    OUTPUT_NARROW,
    OUTPUT_ROW_NARROW,
    OUTPUT_ROW_WIDE,
    OUTPUT_WIDE,
    SCORES_NARROW,
    SCORES_NARROW_AHEAD,
    SCORES_WIDE,
    SCORES_WIDE_AHEAD,
    TILES,
    LeftOperand,
    OutputTile,
    RightOperand,
    multiply_add_tile,
)
from trunkattn.cpu.tuning import BLOCK_TOKENS
from trunkattn.dtypes import FLOAT32

NEG_INF = np.float32(-1e30)  # the maximum of no logit: finite, so that differences are never NaN
_LOG2_E = np.float32(1.4426950408889634)
_SCORE_KEYS = TILES.score_keys
_SCORE_LANES = TILES.score_vectors * LANES
_OUTPUT_ROWS, _OUTPUT_LANES = TILES.output_rows, TILES.output_vectors * LANES
_LINE_BYTES = 64


class Shape(NamedTuple):
    """Sizes of one attention, and how its kernels read the cache."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    kv_kind: int
    window: int
    aligned_blocks: bool  # blocks of keys start at multiples of BLOCK_TOKENS, whatever the item's first token


class Cache(NamedTuple):
    """Keys or values, [num_pages, page_size, num_kv_heads, width]: their bits, flat, and strides in elements."""

    elements: Any
    address: int
    page_stride: int
    token_stride: int
    head_stride: int


class Keys(NamedTuple):
    """The keys of a task: tokens start .. end - 1 of the pages at block_table[row_at:], for one KV head."""

    block_table: Any
    row_at: int
    start: int
    end: int
    head: int


class Queries(NamedTuple):
    """The query rows of a task. `lanes`: rows padded to whole vectors; `width`: head_dim_v likewise."""

    rows: int
    lanes: int
    width: int
    first_position: int  # the least of the rows' positions in their sequences
    last_position: int


class Workspace(NamedTuple):
    """A thread's arrays, all flat. Offsets are in elements of what they point into."""

    q: Any  # [head_dim, lanes] float32, scaled
    scores: Any  # [BLOCK_TOKENS, lanes] logits, then p
    acc: Any  # [lanes, width] the output before it is divided by row_sum
    row_max: Any  # [lanes], as the two below
    row_sum: Any
    rescale: Any
    keys: Any  # [BLOCK_TOKENS, head_dim] a narrow block as float32
    values: Any  # [BLOCK_TOKENS, width]
    q_offsets: Any  # [head_dim] int64 into q, as all below
    lane_offsets: Any  # [lanes] into a line of scores
    positions: Any  # [lanes] of the query rows in their sequences
    key_offsets: Any  # [BLOCK_TOKENS] into the cache, and the same of values
    value_offsets: Any
    staged_key_offsets: Any  # [BLOCK_TOKENS] into `keys` and `values`
    staged_value_offsets: Any
    lines: Any  # [BLOCK_TOKENS / score_keys, head_dim] addresses of cache lines to fetch


def padded(count: int) -> int:
    """`count` rounded up to whole vectors."""
    return (count + LANES - 1) // LANES * LANES


def workspace_sizes(lanes: int, shape: Shape) -> tuple[int, int]:
    """float32 and int64 elements of a thread's workspace; see `workspace_at`."""
    width = padded(shape.head_dim_v)
    floats = lanes * (shape.head_dim + BLOCK_TOKENS + width + 3) + BLOCK_TOKENS * (shape.head_dim + width)
    return floats, shape.head_dim + 2 * lanes + 4 * BLOCK_TOKENS + BLOCK_TOKENS // _SCORE_KEYS * shape.head_dim


@njit(inline="always")
def workspace_at(floats, ints, head_dim, lanes, width):
    """The arrays of a task in its thread's workspace, which begins at two addresses."""
    scores = floats + 4 * head_dim * lanes
    acc = scores + 4 * BLOCK_TOKENS * lanes
    row_max = acc + 4 * lanes * width
    keys = row_max + 4 * 3 * lanes
    lane_offsets = ints + 8 * head_dim
    key_offsets = lane_offsets + 8 * 2 * lanes
    ws = Workspace(
        q=array_at(floats, np.float32),
        scores=array_at(scores, np.float32),
        acc=array_at(acc, np.float32),
        row_max=array_at(row_max, np.float32),
        row_sum=array_at(row_max + 4 * lanes, np.float32),
        rescale=array_at(row_max + 4 * 2 * lanes, np.float32),
        keys=array_at(keys, np.float32),
        values=array_at(keys + 4 * BLOCK_TOKENS * head_dim, np.float32),
        q_offsets=array_at(ints, np.int64),
        lane_offsets=array_at(lane_offsets, np.int64),
        positions=array_at(lane_offsets + 8 * lanes, np.int64),
        key_offsets=array_at(key_offsets, np.int64),
        value_offsets=array_at(key_offsets + 8 * BLOCK_TOKENS, np.int64),
        staged_key_offsets=array_at(key_offsets + 8 * 2 * BLOCK_TOKENS, np.int64),
        staged_value_offsets=array_at(key_offsets + 8 * 3 * BLOCK_TOKENS, np.int64),
        lines=array_at(key_offsets + 8 * 4 * BLOCK_TOKENS, np.int64),
    )
    for d in range(head_dim):
        ws.q_offsets[d] = d * lanes
    for m in range(lanes):
        ws.lane_offsets[m] = m
    return ws


@njit(inline="always")
def first_block(keys, aligned):
    """First token of a task's first block."""
    return keys.start // BLOCK_TOKENS * BLOCK_TOKENS if aligned else keys.start


@njit(inline="always")
def tokens_of_block(keys, aligned):
    """Tokens of each block of a task: equal ones, so that no short one is left over."""
    if aligned:
        return BLOCK_TOKENS
    blocks = (keys.end - keys.start + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    return whole_tiles((keys.end - keys.start + blocks - 1) // blocks)


@njit(inline="always")
def whole_tiles(tokens):
    """Tokens rounded up to whole register tiles."""
    return (tokens + _SCORE_KEYS - 1) // _SCORE_KEYS * _SCORE_KEYS


@njit(inline="always")
def attend_block(keys, first, tokens, queries, shape, k_cache, v_cache, ws, soft_cap):
    """Tokens first .. first + tokens - 1 for every row: `acc`, `row_max` and `row_sum` take them in."""
    lanes, width = queries.lanes, queries.width
    narrow = shape.kv_kind != FLOAT32
    _cache_offsets(ws.key_offsets, ws.value_offsets, keys, first, tokens, shape.page_size, k_cache, v_cache)
    key_offsets = ws.key_offsets
    if narrow:
        _stage(ws.keys, ws.staged_key_offsets, k_cache.elements, ws.key_offsets, tokens, shape.head_dim,
               shape.head_dim, shape.kv_kind)  # fmt: skip
        key_offsets = ws.staged_key_offsets
    k = as_float32(k_cache.elements, ws.keys)
    _scores(ws.scores, k, key_offsets, ws.q, ws.q_offsets, lanes, shape.head_dim, tokens, ws.lines)
    if soft_cap > 0:
        _soft_cap(ws.scores, tokens * lanes, soft_cap)
    last = first + tokens
    outside = first < keys.start or last > keys.end
    if outside or last - 1 > queries.first_position or first <= queries.last_position - shape.window:
        _mask(ws.scores, lanes, queries.rows, ws.positions, first, tokens, keys.start, keys.end, shape.window)
    _online_softmax(ws.scores, lanes, tokens, ws.row_max, ws.row_sum, ws.rescale)
    for m in range(queries.rows):
        if ws.rescale[m] != np.float32(1.0):
            for d in range(width):
                ws.acc[m * width + d] *= ws.rescale[m]
    value_offsets = ws.value_offsets
    v = as_float32(v_cache.elements, ws.values)
    if narrow or width != shape.head_dim_v:
        _stage(ws.values, ws.staged_value_offsets, v_cache.elements, ws.value_offsets, tokens, shape.head_dim_v,
               width, shape.kv_kind)  # fmt: skip
        value_offsets, v = ws.staged_value_offsets, ws.values
    _outputs(ws.acc, ws.scores, ws.lane_offsets, v, value_offsets, queries.rows, lanes, width, tokens)


@njit(inline="always")
def look_ahead(ws, tiles, keys, first, tokens, shape, k_cache, v_cache):
    """Addresses of the cache lines of the block that follows, as many as fit into the steps of `tiles` tiles."""
    tokens = min(tokens, whole_tiles(keys.end - first))
    _cache_offsets(ws.key_offsets, ws.value_offsets, keys, first, tokens, shape.page_size, k_cache, v_cache)
    itemsize = k_cache.elements.itemsize
    k_bytes, v_bytes = shape.head_dim * itemsize, shape.head_dim_v * itemsize
    room = tiles * shape.head_dim
    at = 0
    for t in range(tokens):
        if at + (k_bytes + v_bytes) // _LINE_BYTES + 2 > room:
            break
        key, value = k_cache.address + ws.key_offsets[t] * itemsize, v_cache.address + ws.value_offsets[t] * itemsize
        for d in range(0, k_bytes, _LINE_BYTES):
            ws.lines[at] = key + d
            at += 1
        for d in range(0, v_bytes, _LINE_BYTES):
            ws.lines[at] = value + d
            at += 1
    for i in range(at, room):
        ws.lines[i] = k_cache.address


@njit(cached=False, fastmath={"contract", "nsz"})
def _scores(scores, keys, key_offsets, q, q_offsets, lanes, depth, tokens, lines):
    """scores[t, m] = keys[t] · q[:, m]; the cache lines at `lines` are fetched meanwhile."""
    for t in range(0, tokens, _SCORE_KEYS):
        left = LeftOperand(keys, key_offsets, t, 1)
        ahead = lines[t // _SCORE_KEYS * depth :]
        at = t * lanes
        m = LANES
        if lanes >= _SCORE_LANES:
            m = _SCORE_LANES
            multiply_add_tile(
                OutputTile(scores, at, lanes), left, RightOperand(q, q_offsets, 0), depth, ahead, SCORES_WIDE_AHEAD
            )
        else:
            multiply_add_tile(
                OutputTile(scores, at, lanes), left, RightOperand(q, q_offsets, 0), depth, ahead, SCORES_NARROW_AHEAD
            )
        while m + _SCORE_LANES <= lanes:
            multiply_add_tile(
                OutputTile(scores, at + m, lanes), left, RightOperand(q, q_offsets, m), depth, ahead, SCORES_WIDE
            )
            m += _SCORE_LANES
        while m < lanes:
            multiply_add_tile(
                OutputTile(scores, at + m, lanes), left, RightOperand(q, q_offsets, m), depth, ahead, SCORES_NARROW
            )
            m += LANES


@njit(cached=False, fastmath={"contract", "nsz"})
def _outputs(acc, p, lane_offsets, values, value_offsets, rows, lanes, width, tokens):
    """acc[m, :] += Σ_t p[t, m] · values[t]."""
    unused = value_offsets  # these tiles fetch nothing ahead
    wide = width // _OUTPUT_LANES * _OUTPUT_LANES
    for d in range(0, wide, _OUTPUT_LANES):
        right = RightOperand(values, value_offsets, d)
        m = 0
        while m + _OUTPUT_ROWS <= rows:
            output, left = OutputTile(acc, m * width + d, width), LeftOperand(p, lane_offsets, m, lanes)
            multiply_add_tile(output, left, right, tokens, unused, OUTPUT_WIDE)
            m += _OUTPUT_ROWS
        while m < rows:
            output, left = OutputTile(acc, m * width + d, width), LeftOperand(p, lane_offsets, m, lanes)
            multiply_add_tile(output, left, right, tokens, unused, OUTPUT_ROW_WIDE)
            m += 1
    for d in range(wide, width, LANES):
        right = RightOperand(values, value_offsets, d)
        m = 0
        while m + _OUTPUT_ROWS <= rows:
            output, left = OutputTile(acc, m * width + d, width), LeftOperand(p, lane_offsets, m, lanes)
            multiply_add_tile(output, left, right, tokens, unused, OUTPUT_NARROW)
            m += _OUTPUT_ROWS
        while m < rows:
            output, left = OutputTile(acc, m * width + d, width), LeftOperand(p, lane_offsets, m, lanes)
            multiply_add_tile(output, left, right, tokens, unused, OUTPUT_ROW_NARROW)
            m += 1


@njit(cached=False, error_model="numpy", fastmath={"contract", "nsz", "arcp"})
def _soft_cap(scores, count, cap):
    """Logits to cap · tanh(logit / cap), in base 2."""
    for i in range(count):
        scores[i] = cap * _LOG2_E * tanh(scores[i] / cap)


@njit(cached=False)
def _mask(scores, lanes, rows, positions, first, tokens, start, end, window):
    """Removes what a row must not see: tokens outside the item, after its position, or before its window."""
    for t in range(tokens):
        token = first + t
        outside = token < start or token >= end
        for m in range(rows):
            if outside or token > positions[m] or token <= positions[m] - window:
                scores[t * lanes + m] = -np.inf


@njit(cached=False, fastmath={"contract", "nsz"})
def _online_softmax(scores, lanes, tokens, row_max, row_sum, rescale):
    """Scores become p = 2^(score - row_max); `rescale` is what earlier ones must be multiplied by."""
    for m in range(lanes):
        rescale[m] = row_max[m]
    for t in range(tokens):
        line = t * lanes
        for m in range(lanes):
            row_max[m] = max(row_max[m], scores[line + m])
    for m in range(lanes):
        rescale[m] = exp2(rescale[m] - row_max[m])
        row_sum[m] *= rescale[m]
    for t in range(tokens):
        line = t * lanes
        for m in range(lanes):
            p = exp2(scores[line + m] - row_max[m])
            scores[line + m] = p
            row_sum[m] += p


@njit(cached=False)
def _cache_offsets(k_offsets, v_offsets, keys, first, tokens, page_size, k_cache, v_cache):
    """Where a block's keys and values begin; tokens outside the item stand at one inside, and are masked."""
    token = min(max(first, keys.start), keys.end - 1)
    column, offset = token // page_size, token % page_size
    for t in range(tokens):
        page = np.int64(keys.block_table[keys.row_at + column])
        k_offsets[t] = page * k_cache.page_stride + offset * k_cache.token_stride + keys.head * k_cache.head_stride
        v_offsets[t] = page * v_cache.page_stride + offset * v_cache.token_stride + keys.head * v_cache.head_stride
        if first + t >= token and token < keys.end - 1:  # divisions would cost as much as the products do
            token += 1
            offset += 1
            if offset == page_size:
                offset = 0
                column += 1


@njit(cached=False)
def _stage(staged, staged_offsets, elements, offsets, tokens, width, padded_width, kind):
    """Copies a block to float32, padded to whole vectors with zeros."""
    for t in range(tokens):
        at = t * padded_width
        staged_offsets[t] = at
        to_floats(staged, at, elements, offsets[t], width, kind)
        for d in range(width, padded_width):
            staged[at + d] = np.float32(0.0)
