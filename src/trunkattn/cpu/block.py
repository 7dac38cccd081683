"""One block of keys for the query rows of one task: scores, mask, online softmax, output."""

from typing import NamedTuple

import numpy as np

from trunkattn import numerics
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

NEG_INF, _LOG2_E = np.float32(numerics.NEG_INF), np.float32(numerics.LOG2_E)
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
    aligned_blocks: bool  # blocks of keys start at multiples of BLOCK_TOKENS of the sequence, not at the item's start


class Cache(NamedTuple):
    """Keys or values [num_pages, page_size, num_kv_heads, width]: their address, and strides in elements."""

    address: int
    page_stride: int
    token_stride: int
    head_stride: int


class Keys(NamedTuple):
    """The keys of a task: tokens [start, end) for one KV head, in blocks of `step` tokens from token `first` on."""

    pages: int  # address of the task's row of the block table
    start: int
    end: int
    head: int
    first: int
    step: int


class Queries(NamedTuple):
    """The query rows of a task. lanes: rows padded to whole vectors; width: head_dim_v padded to whole vectors."""

    rows: int
    lanes: int
    width: int
    first_position: int  # the least of the rows' positions in their sequences
    last_position: int


class Workspace(NamedTuple):
    """Addresses of a thread's arrays.

    They are addresses, not arrays, because Numba copies the whole tuple whenever it reads a field, and an array is
    seven numbers. Offsets count elements of the array that they index.
    """

    q: int  # [head_dim, lanes] float32, scaled
    scores: int  # [BLOCK_TOKENS, lanes] float32, logits, then p
    acc: int  # [lanes, width] float32, the output before it is divided by row_sum
    row_max: int  # [lanes] float32, as the two below
    row_sum: int
    rescale: int
    keys: int  # [BLOCK_TOKENS, head_dim] float32, the keys of a block, converted from a narrower dtype
    values: int  # [BLOCK_TOKENS, width] float32, its values
    q_offsets: int  # [head_dim] int64 into q; all arrays below are int64, too
    lane_offsets: int  # [lanes] into a line of scores
    positions: int  # [lanes] positions of the query rows in their sequences
    key_offsets: int  # [BLOCK_TOKENS] into the key cache, and below it into the value cache
    value_offsets: int
    staged_key_offsets: int  # [BLOCK_TOKENS] into `keys` and `values`
    staged_value_offsets: int
    lines: int  # [BLOCK_TOKENS / score_keys, head_dim] addresses of cache lines to fetch


def padded(count: int) -> int:
    """`count` rounded up to whole vectors."""
    return (count + LANES - 1) // LANES * LANES


def workspace_sizes(lanes: int, shape: Shape) -> tuple[int, int]:
    """(float32 elements, int64 elements) of a thread's workspace; see `workspace_at`."""
    width = padded(shape.head_dim_v)
    floats = lanes * (shape.head_dim + BLOCK_TOKENS + width + 3) + BLOCK_TOKENS * (shape.head_dim + width)
    return floats, shape.head_dim + 2 * lanes + 4 * BLOCK_TOKENS + BLOCK_TOKENS // _SCORE_KEYS * shape.head_dim


@njit(inline="always")
def workspace_at(floats, ints, head_dim, lanes, width):
    """The arrays of a task in its thread's workspace, whose float32 and int64 parts begin at two addresses."""
    scores = floats + 4 * head_dim * lanes
    acc = scores + 4 * BLOCK_TOKENS * lanes
    row_max = acc + 4 * lanes * width
    keys = row_max + 4 * 3 * lanes
    lane_offsets = ints + 8 * head_dim
    key_offsets = lane_offsets + 8 * 2 * lanes
    q_offsets, lanes_in_line = array_at(ints, np.int64), array_at(lane_offsets, np.int64)
    for d in range(head_dim):
        q_offsets[d] = d * lanes
    for m in range(lanes):
        lanes_in_line[m] = m
    return Workspace(
        q=floats,
        scores=scores,
        acc=acc,
        row_max=row_max,
        row_sum=row_max + 4 * lanes,
        rescale=row_max + 4 * 2 * lanes,
        keys=keys,
        values=keys + 4 * BLOCK_TOKENS * head_dim,
        q_offsets=ints,
        lane_offsets=lane_offsets,
        positions=lane_offsets + 8 * lanes,
        key_offsets=key_offsets,
        value_offsets=key_offsets + 8 * BLOCK_TOKENS,
        staged_key_offsets=key_offsets + 8 * 2 * BLOCK_TOKENS,
        staged_value_offsets=key_offsets + 8 * 3 * BLOCK_TOKENS,
        lines=key_offsets + 8 * 4 * BLOCK_TOKENS,
    )


@njit(inline="always")
def whole_tiles(tokens):
    """Tokens rounded up to whole register tiles."""
    return (tokens + _SCORE_KEYS - 1) // _SCORE_KEYS * _SCORE_KEYS


@njit(inline="always")
def attend_block(keys, first, tokens, queries, shape, k_cache, v_cache, kv_bits, ws, soft_cap):
    """Tokens first .. first + tokens - 1 for every row: acc, row_max and row_sum take them in."""
    lanes, width = queries.lanes, queries.width
    narrow = shape.kv_kind != FLOAT32
    _cache_offsets(ws, keys, first, tokens, shape.page_size, k_cache, v_cache)
    k_elements, v_elements = array_at(k_cache.address, kv_bits), array_at(v_cache.address, kv_bits)
    staged_keys, staged_values = array_at(ws.keys, np.float32), array_at(ws.values, np.float32)
    offsets = ws.key_offsets
    if narrow:
        offsets, depth = ws.staged_key_offsets, shape.head_dim
        _stage(staged_keys, offsets, k_elements, ws.key_offsets, tokens, depth, depth, shape.kv_kind)
    _scores(ws, as_float32(k_elements, staged_keys), offsets, lanes, shape.head_dim, tokens)
    if soft_cap > 0:
        _soft_cap(ws, tokens * lanes, soft_cap)
    last = first + tokens
    outside = first < keys.start or last > keys.end
    leaves_window = first <= queries.last_position - shape.window
    if outside or last - 1 > queries.first_position or leaves_window:
        _mask(ws, lanes, queries.rows, first, tokens, keys.start, keys.end, shape.window)
    _online_softmax(ws, lanes, tokens)
    rescale = array_at(ws.rescale, np.float32)
    for m in range(queries.rows):
        factor, acc = rescale[m], array_at(ws.acc + 4 * m * width, np.float32)
        if factor != np.float32(1.0):
            for d in range(width):
                acc[d] *= factor
    values, offsets = as_float32(v_elements, staged_values), ws.value_offsets
    if narrow or width != shape.head_dim_v or leaves_window:
        values, offsets = staged_values, ws.staged_value_offsets
        _stage(values, offsets, v_elements, ws.value_offsets, tokens, shape.head_dim_v, width, shape.kv_kind)
    if leaves_window:
        _add_infinite(ws, keys, first, tokens, queries, shape.window)
    _outputs(ws, values, offsets, queries.rows, lanes, width, tokens)


@njit(inline="always")
def look_ahead(ws, tiles, keys, first, shape, k_cache, v_cache, itemsize):
    """Addresses of the cache lines of the block at token `first`, as many as fit into the steps of `tiles` tiles."""
    tokens = min(keys.step, whole_tiles(keys.end - first))
    _cache_offsets(ws, keys, first, tokens, shape.page_size, k_cache, v_cache)
    key_offsets, value_offsets = array_at(ws.key_offsets, np.int64), array_at(ws.value_offsets, np.int64)
    lines = array_at(ws.lines, np.int64)
    k_bytes, v_bytes = shape.head_dim * itemsize, shape.head_dim_v * itemsize
    room = tiles * shape.head_dim
    at = 0
    for t in range(tokens):
        if at + (k_bytes + v_bytes) // _LINE_BYTES + 2 > room:
            break
        key, value = k_cache.address + key_offsets[t] * itemsize, v_cache.address + value_offsets[t] * itemsize
        for d in range(0, k_bytes, _LINE_BYTES):
            lines[at] = key + d
            at += 1
        for d in range(0, v_bytes, _LINE_BYTES):
            lines[at] = value + d
            at += 1
    for i in range(at, room):
        lines[i] = k_cache.address


@njit(inner=True, fastmath={"contract", "nsz"})
def _scores(ws, keys, offsets, lanes, depth, tokens):
    """scores[t, m] = keys[t] · q[:, m]; the cache lines at ws.lines are fetched meanwhile."""
    scores, q = array_at(ws.scores, np.float32), array_at(ws.q, np.float32)
    key_offsets, q_offsets = array_at(offsets, np.int64), array_at(ws.q_offsets, np.int64)
    for t in range(0, tokens, _SCORE_KEYS):
        left, at = LeftOperand(keys, key_offsets, t, 1), t * lanes
        ahead = array_at(ws.lines + 8 * (t // _SCORE_KEYS) * depth, np.int64)
        output, right = OutputTile(scores, at, lanes), RightOperand(q, q_offsets, 0)
        if lanes >= _SCORE_LANES:
            m = _SCORE_LANES
            multiply_add_tile(output, left, right, depth, ahead, SCORES_WIDE_AHEAD)
        else:
            m = LANES
            multiply_add_tile(output, left, right, depth, ahead, SCORES_NARROW_AHEAD)
        while m + _SCORE_LANES <= lanes:
            output, right = OutputTile(scores, at + m, lanes), RightOperand(q, q_offsets, m)
            multiply_add_tile(output, left, right, depth, ahead, SCORES_WIDE)
            m += _SCORE_LANES
        while m < lanes:
            output, right = OutputTile(scores, at + m, lanes), RightOperand(q, q_offsets, m)
            multiply_add_tile(output, left, right, depth, ahead, SCORES_NARROW)
            m += LANES


@njit(inner=True, fastmath={"contract", "nsz"})
def _outputs(ws, values, offsets, rows, lanes, width, tokens):
    """acc[m, :] += Σ_t p[t, m] · values[t]."""
    acc, p = array_at(ws.acc, np.float32), array_at(ws.scores, np.float32)
    lane_offsets, value_offsets = array_at(ws.lane_offsets, np.int64), array_at(offsets, np.int64)
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


@njit(inner=True, error_model="numpy", fastmath={"contract", "nsz", "arcp"})
def _soft_cap(ws, count, cap):
    """Logits to cap · tanh(logit / cap), in base 2."""
    scores = array_at(ws.scores, np.float32)
    for i in range(count):
        scores[i] = cap * _LOG2_E * tanh(scores[i] / cap)


@njit(inner=True)
def _mask(ws, lanes, rows, first, tokens, start, end, window):
    """Masks the tokens that a row must not see: those outside the item, after its position, or before its window."""
    scores, positions = array_at(ws.scores, np.float32), array_at(ws.positions, np.int64)
    for t in range(tokens):
        token = first + t
        outside = token < start or token >= end
        for m in range(rows):
            if outside or token > positions[m] or token <= positions[m] - window:
                scores[t * lanes + m] = -np.inf


@njit(inner=True, fastmath={"contract", "reassoc"})
def _add_infinite(ws, keys, first, tokens, queries, window):
    """Takes staged values that are not finite out of a block whose first keys some rows no longer see, and adds them to
    the rows that see them. A weight of 0 times such a value is NaN, and rows may be of several requests."""
    lanes, width = queries.lanes, queries.width
    p, positions = array_at(ws.scores, np.float32), array_at(ws.positions, np.int64)
    for t in range(tokens):
        token, value = first + t, array_at(ws.values + 4 * t * width, np.float32)
        zero = np.float32(0.0)
        for d in range(width):
            zero += value[d] * np.float32(0.0)
        if zero == 0:
            continue
        for m in range(queries.rows):
            if keys.start <= token < keys.end and positions[m] - window < token <= positions[m]:
                acc = array_at(ws.acc + 4 * m * width, np.float32)
                for d in range(width):
                    acc[d] += p[t * lanes + m] * value[d]
        for d in range(width):
            value[d] = np.float32(0.0)


@njit(inner=True, fastmath={"contract", "nsz"})
def _online_softmax(ws, lanes, tokens):
    """Turns scores into p = 2^(score - row_max). `rescale` gets the factors for the sums of earlier blocks."""
    scores, rescale = array_at(ws.scores, np.float32), array_at(ws.rescale, np.float32)
    row_max, row_sum = array_at(ws.row_max, np.float32), array_at(ws.row_sum, np.float32)
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


@njit(inner=True)
def _cache_offsets(ws, keys, first, tokens, page_size, k_cache, v_cache):
    """Finds where a block's keys and values begin. Tokens outside the item get the place of one inside, and are
    masked."""
    pages = array_at(keys.pages, np.int32)
    k_offsets, v_offsets = array_at(ws.key_offsets, np.int64), array_at(ws.value_offsets, np.int64)
    token = min(max(first, keys.start), keys.end - 1)
    column, offset = token // page_size, token % page_size
    for t in range(tokens):
        page = np.int64(pages[column])
        k_offsets[t] = page * k_cache.page_stride + offset * k_cache.token_stride + keys.head * k_cache.head_stride
        v_offsets[t] = page * v_cache.page_stride + offset * v_cache.token_stride + keys.head * v_cache.head_stride
        if first + t >= token and token < keys.end - 1:  # divisions would cost as much as the products do
            token += 1
            offset += 1
            if offset == page_size:
                offset = 0
                column += 1


@njit(inner=True)
def _stage(staged, staged_offsets_at, elements, offsets_at, tokens, width, padded_width, kind):
    """Copies a block to float32, padded to whole vectors with zeros."""
    staged_offsets, offsets = array_at(staged_offsets_at, np.int64), array_at(offsets_at, np.int64)
    for t in range(tokens):
        at = t * padded_width
        staged_offsets[t] = at
        to_floats(staged, at, elements, offsets[t], width, kind)
        for d in range(width, padded_width):
            staged[at + d] = np.float32(0.0)
