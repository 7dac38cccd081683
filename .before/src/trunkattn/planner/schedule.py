"""Cuts of row tiles by a simulated schedule: where a tile costs arithmetic, every cut costs partials (PAT §6).

Chunks of prompts fill their tiles, so the device is busy with few of them, and the last ones to start decide when it
ends. Tiles are cut into equal parts of at most some share of a slot's work: of the shares tried, that one is taken
with which the slots, given the heaviest item next, would end first.
"""

from typing import Final

import numpy as np
from numba import njit

from trunkattn.plan_format import KV_END, KV_START, QUERY_END, QUERY_START

_NEVER: Final = np.iinfo(np.int64).max
_MERGE: Final = 2  # a merge is a launch more, which takes about as long as it takes to begin and end so many items
FINEST: Final = 3  # items of a slot, at most, that tiles are cut for


@njit(cache=True)
def weight_of(rule, tokens, queries):
    """Time of one item on one head, in bytes."""
    rows = (np.int64(queries) * rule.group_size + rule.row_unit - 1) & -rule.row_unit
    return np.int64(tokens) * (rule.head_bytes + rows * rule.row_bytes)


@njit(cache=True)
def scheduled_parts(rule, tiles):
    """[T] int32: tokens of each part a tile is cut into, as `splitting.part_length`."""
    lengths = tiles[:, 2] - tiles[:, 1]
    weights = np.empty(len(tiles), np.int64)
    for t in range(len(tiles)):
        weights[t] = weight_of(rule, lengths[t], tiles[t, 4] - tiles[t, 3])
    whole = lengths.astype(np.int32)
    share = (weights.sum() + rule.item_bytes * len(tiles)) * rule.num_kv_heads // rule.num_slots
    enough = share + share // 16
    if len(tiles) == 0 or weights.max() <= share // 16:
        return whole
    best, best_time, whole_time = whole, _NEVER, _time(rule, tiles, weights, whole)
    # of an item, in shares; a little over, so that tiles of a little over n shares are cut into n parts
    for sixteenths, pieces in ((17, 1), (18, 1), (17, 2), (17, FINEST)):
        if min(whole_time, best_time) <= enough:
            break
        parts = _cut(rule, lengths, weights, max(np.int64(1), share * sixteenths // (16 * pieces)))
        time = _time(rule, tiles, weights, parts)
        if time < best_time:
            best, best_time = parts, time
    # no prediction is exact
    return best if best_time + _MERGE * rule.item_bytes < whole_time - whole_time // 16 else whole


@njit(cache=True)
def _cut(rule, lengths, weights, most):
    """Parts of about equal weight, of at most `most` but for the grid."""
    parts = np.empty(len(lengths), np.int32)
    for t in range(len(lengths)):
        pieces = min((weights[t] + most - 1) // most, np.int64((lengths[t] + rule.grid - 1) // rule.grid))
        part = (lengths[t] + pieces - 1) // pieces
        parts[t] = lengths[t] if pieces == 1 else (part + rule.grid - 1) // rule.grid * rule.grid
    return parts


@njit(cache=True)
def _time(rule, tiles, weights, parts):
    """Time until the last slot ends, and the slots' shares of the partials."""
    most = np.int64(0)
    for t in range(len(tiles)):
        most += (tiles[t, 2] - tiles[t, 1] + parts[t] - 1) // parts[t]
    items = np.empty(most, np.int64)
    count, partials = 0, np.int64(0)
    for t in range(len(tiles)):
        length = np.int64(tiles[t, 2] - tiles[t, 1])
        for begin in range(0, length, parts[t]):
            items[count] = weights[t] * min(np.int64(parts[t]), length - begin) // length + rule.item_bytes
            count += 1
        if parts[t] < length:
            pieces = (length + parts[t] - 1) // parts[t]
            partials += pieces * (tiles[t, 4] - tiles[t, 3]) * rule.group_size * rule.partial_bytes
    return _end(rule, items) + partials * rule.num_kv_heads // rule.num_slots


@njit(cache=True)
def work_time(rule, items, num_partials):
    """Time of a work list's items until the last slot ends, and of its partials: one for each query token and slot."""
    weights = np.empty(len(items), np.int64)
    for i in range(len(items)):
        tokens, queries = items[i, KV_END] - items[i, KV_START], items[i, QUERY_END] - items[i, QUERY_START]
        weights[i] = weight_of(rule, tokens, queries) + rule.item_bytes
    partials = np.int64(num_partials) * rule.group_size * rule.partial_bytes * rule.num_kv_heads // rule.num_slots
    return _end(rule, weights) + partials + (_MERGE * rule.item_bytes if num_partials else 0)


@njit(cache=True)
def _end(rule, weights):
    """When the last slot ends, the heaviest item going next to the slot that ends first, once for each head."""
    ends = np.zeros(rule.num_slots, np.int64)  # a heap: no slot ends later than its two children
    for item in np.argsort(-weights, kind="mergesort"):
        for _ in range(rule.num_kv_heads):
            _take(ends, weights[item])
    return ends.max()


@njit(cache=True)
def _take(ends, weight):
    """Gives an item to the slot that ends first."""
    end, at = ends[0] + weight, 0
    while 2 * at + 1 < len(ends):
        child = 2 * at + 1
        if child + 1 < len(ends) and ends[child + 1] < ends[child]:
            child += 1
        if ends[child] >= end:
            break
        ends[at] = ends[child]
        at = child
    ends[at] = end
