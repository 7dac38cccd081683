"""One task of the CPU executor, compiled: tiled attention with online softmax (FlashAttention), and the merge (PAT §7).

A task is one work item for one KV head. Its query rows lie along the vector lanes, [head_dim, rows], so keys and values
are used where they are in the paged cache, without a copy, whatever the page size: the register tile takes a list of
row addresses. Softmax statistics are per lane; every row's arithmetic is the same whatever rows lie beside it. That is
what makes batch-invariant plans possible.
"""

from typing import NamedTuple

import numpy as np
from numba import njit

from trunkattn.kernels.cpu_math import FLOAT32, as_float32, exp2, tanh, to_floats
from trunkattn.kernels.cpu_tile import ACCUMULATE, LANES, OVERWRITE, OVERWRITE_AHEAD, TILES, multiply_add_tile
from trunkattn.kernels.tile_table import BLOCK_TOKENS
from trunkattn.plan_format import DIRECT, KV_END, KV_ROW, KV_START, QUERY_END, QUERY_START

_LOG2_E = np.float32(1.4426950408889634)
_LN_2 = np.float32(0.6931471805599453)
_NOTHING = np.float32(-1e30)  # maximum of no logit: finite, so that differences are never NaN

_SCORE_KEYS = TILES.score_keys
_SCORE_LANES = TILES.score_vectors * LANES
_OUTPUT_ROWS = TILES.output_rows
_OUTPUT_LANES = TILES.output_vectors * LANES
_SCORES_WIDE = TILES.score_keys * 10000 + TILES.score_vectors * 100 + OVERWRITE
_SCORES_WIDE_AHEAD = TILES.score_keys * 10000 + TILES.score_vectors * 100 + OVERWRITE_AHEAD
_SCORES_NARROW = TILES.score_keys * 10000 + 100 + OVERWRITE
_SCORES_NARROW_AHEAD = TILES.score_keys * 10000 + 100 + OVERWRITE_AHEAD
_OUTPUT_TALL_WIDE = TILES.output_rows * 10000 + TILES.output_vectors * 100 + ACCUMULATE
_OUTPUT_TALL_NARROW = TILES.output_rows * 10000 + 100 + ACCUMULATE
_OUTPUT_ROW_WIDE = 10000 + TILES.output_vectors * 100 + ACCUMULATE
_OUTPUT_ROW_NARROW = 10000 + 100 + ACCUMULATE
_LINE_BYTES = 64


class Shape(NamedTuple):
    """Sizes of one attention, and how the kernels read the cache (strides in elements)."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    kv_kind: int
    window: int
    aligned_blocks: bool  # blocks of keys start at multiples of BLOCK_TOKENS, whatever the item's first token


class Strides(NamedTuple):
    """Element strides of a cache [num_pages, page_size, num_kv_heads, head_dim], last dimension contiguous."""

    page: int
    token: int
    head: int


SHAPE_FIELDS = len(Shape._fields)


@njit(cache=True)
def shape_of(sizes):
    return Shape(sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7] != 0)


@njit(cache=True, fastmath={"contract", "nsz"})
def _scores(scores, keys, key_rows, q, q_rows, rows, depth, tokens, ahead):
    """scores[t, m] = keys[t] · q[:, m] for a block of keys; the lines of the next block are fetched meanwhile."""
    for t in range(0, tokens, _SCORE_KEYS):
        lines, at = ahead[t // _SCORE_KEYS], t * rows
        if rows >= _SCORE_LANES:
            m = _SCORE_LANES
            multiply_add_tile(
                (scores, at, rows), (keys, key_rows, t, 1), (q, q_rows, 0), depth, lines, _SCORES_WIDE_AHEAD
            )
        else:
            m = LANES
            multiply_add_tile(
                (scores, at, rows), (keys, key_rows, t, 1), (q, q_rows, 0), depth, lines, _SCORES_NARROW_AHEAD
            )
        while m + _SCORE_LANES <= rows:
            multiply_add_tile(
                (scores, at + m, rows), (keys, key_rows, t, 1), (q, q_rows, m), depth, lines, _SCORES_WIDE
            )
            m += _SCORE_LANES
        while m < rows:
            multiply_add_tile(
                (scores, at + m, rows), (keys, key_rows, t, 1), (q, q_rows, m), depth, lines, _SCORES_NARROW
            )
            m += LANES


@njit(cache=True, fastmath={"contract", "nsz"})
def _outputs(out, scores, lane, values, value_rows, used, rows, width, tokens):
    """out[m, :] += Σ_t scores[t, m] · values[t]."""
    n, none = tokens, value_rows
    for d in range(0, width // _OUTPUT_LANES * _OUTPUT_LANES, _OUTPUT_LANES):
        m = 0
        while m + _OUTPUT_ROWS <= used:
            at = m * width + d
            multiply_add_tile(
                (out, at, width), (scores, lane, m, rows), (values, value_rows, d), n, none, _OUTPUT_TALL_WIDE
            )
            m += _OUTPUT_ROWS
        while m < used:
            at = m * width + d
            multiply_add_tile(
                (out, at, width), (scores, lane, m, rows), (values, value_rows, d), n, none, _OUTPUT_ROW_WIDE
            )
            m += 1
    for d in range(width // _OUTPUT_LANES * _OUTPUT_LANES, width, LANES):
        m = 0
        while m + _OUTPUT_ROWS <= used:
            at = m * width + d
            multiply_add_tile(
                (out, at, width), (scores, lane, m, rows), (values, value_rows, d), n, none, _OUTPUT_TALL_NARROW
            )
            m += _OUTPUT_ROWS
        while m < used:
            at = m * width + d
            multiply_add_tile(
                (out, at, width), (scores, lane, m, rows), (values, value_rows, d), n, none, _OUTPUT_ROW_NARROW
            )
            m += 1


@njit(cache=True, error_model="numpy", fastmath={"contract", "nsz", "arcp"})
def _soft_cap(scores, count, cap):
    """Logits to cap · tanh(logit / cap), in base 2."""
    for i in range(count):
        scores[i] = cap * _LOG2_E * tanh(scores[i] / cap)


@njit(cache=True)
def _mask(scores, rows, used, position, first, tokens, kv_range, window):
    """Removes what a row must not see: tokens outside the item, after its position, or before its window."""
    kv_start, kv_end = kv_range
    for t in range(tokens):
        token = first + t
        outside = token < kv_start or token >= kv_end
        for m in range(used):
            if outside or token > position[m] or token <= position[m] - window:
                scores[t * rows + m] = -np.inf


@njit(cache=True, fastmath={"contract", "nsz"})
def _online_softmax(scores, rows, tokens, top, total, rescale):
    """Scores become weights 2^(s - max); `rescale` is what earlier weights must be multiplied by."""
    for m in range(rows):
        rescale[m] = top[m]
    for t in range(tokens):
        line = t * rows
        for m in range(rows):
            top[m] = max(top[m], scores[line + m])
    for m in range(rows):
        rescale[m] = exp2(rescale[m] - top[m])
        total[m] *= rescale[m]
    for t in range(tokens):
        line = t * rows
        for m in range(rows):
            weight = exp2(scores[line + m] - top[m])
            scores[line + m] = weight
            total[m] += weight


@njit(cache=True)
def _block_rows(k_rows, v_rows, where, first, tokens, page_size, strides):
    """Element offsets of a block's keys and values; tokens outside the item stand at one inside, and are masked."""
    pages, kv_range, head = where
    k_strides, v_strides = strides
    token = min(max(first, kv_range[0]), kv_range[1] - 1)
    column, offset = token // page_size, token % page_size
    for t in range(tokens):
        page = np.int64(pages[column])
        k_rows[t] = page * k_strides.page + offset * k_strides.token + head * k_strides.head
        v_rows[t] = page * v_strides.page + offset * v_strides.token + head * v_strides.head
        if first + t >= token and token < kv_range[1] - 1:  # divisions would cost as much as the products do
            token += 1
            offset += 1
            if offset == page_size:
                offset = 0
                column += 1


@njit(cache=True)
def _stage(staged, staged_rows, cache, cache_rows, tokens, width, padded, kind):
    """Copies a block to float32, padded to whole vectors with zeros."""
    for t in range(tokens):
        at = t * padded
        staged_rows[t] = at
        to_floats(staged, at, cache, cache_rows[t], width, kind)
        for d in range(width, padded):
            staged[at + d] = np.float32(0.0)


@njit(cache=True)
def _load_queries(q, shape, scale, head, tokens, rows, q_lanes, positions, position):
    """q_lanes[d, m] = q · scale, rows ordered by token then head of the group; idle lanes are zero."""
    group = shape.num_qo_heads // shape.num_kv_heads
    used = len(tokens) * group
    for i in range(len(tokens)):
        for g in range(group):
            m = i * group + g
            position[m] = positions[tokens[i]]
            at = (np.int64(tokens[i]) * shape.num_qo_heads + head * group + g) * shape.head_dim
            for d in range(shape.head_dim):
                q_lanes[d * rows + m] = q[at + d] * scale
    for d in range(shape.head_dim):
        for m in range(used, rows):
            q_lanes[d * rows + m] = np.float32(0.0)
    return used


@njit(cache=True, error_model="numpy")
def _write(token, query_head, shape, state, target, sinks):
    """Final output of one row: normalised state, value scale and sink applied. state: acc, at, total, lse, v_scale.

    By NumPy's rules 0 / 0 is NaN in that row; by Python's it would end the batch.
    """
    acc, at, total, lse, v_scale = state
    out, out_lse = target
    factor = v_scale / total
    if len(sinks) > 0:  # an extra logit without a value
        factor *= np.float32(1.0) / (np.float32(1.0) + np.float32(np.exp(sinks[query_head] - lse)))
    to = (np.int64(token) * shape.num_qo_heads + query_head) * shape.head_dim_v
    for d in range(shape.head_dim_v):
        out[to + d] = acc[at + d] * factor
    out_lse[token, query_head] = lse


@njit(cache=True)
def _carve(floats, ints, shape, rows, width):
    """A task's arrays out of its thread's workspace; see `workspace_sizes`."""
    block, depth = BLOCK_TOKENS, shape.head_dim
    scores_at = depth * rows
    acc_at = scores_at + block * rows
    top_at = acc_at + rows * width
    keys_at = top_at + 3 * rows
    values_at = keys_at + block * depth
    top, total = floats[top_at : top_at + rows], floats[top_at + rows : top_at + 2 * rows]
    state = (floats[acc_at:top_at], top, total, floats[top_at + 2 * rows : keys_at])
    staged = (floats[keys_at:values_at], floats[values_at : values_at + block * width])
    q_rows, lane, position = ints[:depth], ints[depth : depth + rows], ints[depth + rows : depth + 2 * rows]
    rows_at = depth + 2 * rows
    ahead_at = rows_at + 4 * block
    row_space = ints[rows_at:ahead_at].reshape(4, block)
    ahead = ints[ahead_at : ahead_at + block // _SCORE_KEYS * depth].reshape(block // _SCORE_KEYS, depth)
    for d in range(depth):
        q_rows[d] = d * rows
    for m in range(rows):
        lane[m] = m
    return floats[:scores_at], floats[scores_at:acc_at], state, staged, (q_rows, lane, position, row_space, ahead)


@njit(cache=True)
def _blocks(kv_range, aligned):
    """First token of an item's first block, and tokens of a block: equal ones, so that no short one is left over."""
    if aligned:
        return kv_range[0] // BLOCK_TOKENS * BLOCK_TOKENS, BLOCK_TOKENS
    count = kv_range[1] - kv_range[0]
    blocks = (count + BLOCK_TOKENS - 1) // BLOCK_TOKENS
    return kv_range[0], _whole_tiles((count + blocks - 1) // blocks)


@njit(cache=True)
def _whole_tiles(tokens):
    return (tokens + _SCORE_KEYS - 1) // _SCORE_KEYS * _SCORE_KEYS


@njit(cache=True)
def _look_ahead(ahead, tiles, rows, where, first, step, shape, caches):
    """Addresses of the cache lines of the block that follows, as many as fit into the steps of `tiles` tiles."""
    k_cache, v_cache, k_strides, v_strides = caches
    tokens = min(step, _whole_tiles(where[1][1] - first))
    _block_rows(rows[0], rows[1], where, first, tokens, shape.page_size, (k_strides, v_strides))
    k_bytes, v_bytes = shape.head_dim * k_cache.itemsize, shape.head_dim_v * v_cache.itemsize
    k_base, v_base = k_cache.ctypes.data, v_cache.ctypes.data
    lines = ahead.reshape(-1)[: tiles * shape.head_dim]
    at = 0
    for t in range(tokens):
        k_at, v_at = k_base + rows[0, t] * k_cache.itemsize, v_base + rows[1, t] * v_cache.itemsize
        if at + (k_bytes + v_bytes) // _LINE_BYTES + 2 > len(lines):
            break
        for d in range(0, k_bytes, _LINE_BYTES):
            lines[at] = k_at + d
            at += 1
        for d in range(0, v_bytes, _LINE_BYTES):
            lines[at] = v_at + d
            at += 1
    lines[at:] = k_base


@njit(cache=True, fastmath={"contract", "nsz"})
def _block(where, first, tokens, queries, shape, caches, arrays, soft_cap):
    """One block of keys: scores, mask, online softmax, output."""
    kv_range = where[1]
    used, rows, width, lowest, highest = queries
    k_cache, v_cache, k_strides, v_strides = caches
    q_lanes, scores, (acc, top, total, rescale), (staged_k, staged_v), (q_rows, lane, position, row_space, ahead) = (
        arrays
    )
    depth, kind = shape.head_dim, shape.kv_kind
    stage_v = kind != FLOAT32 or width != shape.head_dim_v
    _block_rows(row_space[0], row_space[1], where, first, tokens, shape.page_size, (k_strides, v_strides))
    if kind != FLOAT32:
        _stage(staged_k, row_space[2], k_cache, row_space[0], tokens, depth, depth, kind)
    keys, key_rows = as_float32(k_cache, staged_k), row_space[2 if kind != FLOAT32 else 0]
    _scores(scores, keys, key_rows, q_lanes, q_rows, rows, depth, tokens, ahead)
    if soft_cap > 0:
        _soft_cap(scores, tokens * rows, soft_cap)
    last = first + tokens
    if first < kv_range[0] or last > kv_range[1] or last - 1 > lowest or first <= highest - shape.window:
        _mask(scores, rows, used, position, first, tokens, kv_range, shape.window)
    _online_softmax(scores, rows, tokens, top, total, rescale)
    for m in range(used):
        if rescale[m] != np.float32(1.0):
            for d in range(width):
                acc[m * width + d] *= rescale[m]
    if stage_v:
        _stage(staged_v, row_space[3], v_cache, row_space[1], tokens, shape.head_dim_v, width, kind)
    values = staged_v if stage_v else as_float32(v_cache, staged_v)
    _outputs(acc, scores, lane, values, row_space[3 if stage_v else 1], used, rows, width, tokens)


@njit(cache=True)
def _where(task, shape, plan):
    """Keys of a task: its row of the block table, token range and KV head."""
    block_table, items = plan[0], plan[1]
    item, head = task // shape.num_kv_heads, task % shape.num_kv_heads
    return block_table[items[item, KV_ROW]], (np.int64(items[item, KV_START]), np.int64(items[item, KV_END])), head


@njit(cache=True, error_model="numpy", fastmath={"contract", "nsz"})
def run_task(task, following, shape, q, caches, plan, options, outputs, workspace):
    """One work item for one KV head: its partial states, or the output of queries that have no other item.

    `following` is the thread's next task, whose first keys are fetched while the last ones of this are used.
    """
    _block_table, items, queries, slots, positions = plan
    logit_scale, v_scale, soft_cap, sinks = options
    out, out_lse, partial, partial_lse = outputs
    item = task // shape.num_kv_heads
    begin, end = items[item, QUERY_START], items[item, QUERY_END]
    group = shape.num_qo_heads // shape.num_kv_heads
    tokens = queries[begin:end]
    rows = (len(tokens) * group + LANES - 1) // LANES * LANES
    width = (shape.head_dim_v + LANES - 1) // LANES * LANES
    arrays = _carve(workspace[0], workspace[1], shape, rows, width)
    q_lanes, (acc, top, total, _), (position, row_space, ahead) = arrays[0], arrays[2], arrays[4][2:]
    where, where_next = _where(task, shape, plan), _where(following, shape, plan)
    head = where[2]
    used = _load_queries(q, shape, logit_scale[head], head, tokens, rows, q_lanes, positions, position)
    top[:] = _NOTHING
    total[:] = np.float32(0.0)
    acc[:] = np.float32(0.0)
    work = (used, rows, width, position[:used].min(), position[:used].max())
    first, step = _blocks(where[1], shape.aligned_blocks)
    first_next, step_next = _blocks(where_next[1], shape.aligned_blocks)
    while first < where[1][1]:
        count = min(step, _whole_tiles(where[1][1] - first))
        tiles = count // _SCORE_KEYS
        if first + step < where[1][1]:
            _look_ahead(ahead, tiles, row_space, where, first + step, step, shape, caches)
        else:
            _look_ahead(ahead, tiles, row_space, where_next, first_next, step_next, shape, caches)
        _block(where, first, count, work, shape, caches, arrays, soft_cap)
        first += step
    for m in range(used):
        query_head = head * group + m % group
        lse = top[m] * _LN_2 + np.float32(np.log(total[m]))
        slot = slots[begin + m // group]
        if slot == DIRECT:
            state = (acc, m * width, total[m], lse, v_scale[head])
            _write(tokens[m // group], query_head, shape, state, (out, out_lse), sinks)
        else:
            for d in range(shape.head_dim_v):
                partial[slot, query_head, d] = acc[m * width + d] / total[m]
            partial_lse[slot, query_head] = lse


@njit(cache=True)
def run_merge(i, head, shape, merge, outputs, options, acc):
    """Online-softmax merge of one query token's partials, in token order (PAT §7, RelayAttention §3.3)."""
    merge_queries, merge_indptr = merge
    out, out_lse, partial, partial_lse = outputs
    _logit_scale, v_scale, _soft_cap, sinks = options
    top = _NOTHING
    for slot in range(merge_indptr[i], merge_indptr[i + 1]):
        top = max(top, partial_lse[slot, head])
    total = np.float32(0.0)
    acc[: shape.head_dim_v] = np.float32(0.0)
    for slot in range(merge_indptr[i], merge_indptr[i + 1]):
        weight = exp2((partial_lse[slot, head] - top) * _LOG2_E)
        total += weight
        for d in range(shape.head_dim_v):
            acc[d] += weight * partial[slot, head, d]
    group = shape.num_qo_heads // shape.num_kv_heads
    state = (acc, 0, total, top + np.float32(np.log(total)), v_scale[head // group])
    _write(merge_queries[i], head, shape, state, (out, out_lse), sinks)
