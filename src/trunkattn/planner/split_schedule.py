"""Where to split pack tiles of prompt chunks: the schedule is simulated (PAT, https://arxiv.org/abs/2511.22333, §6).

A tile of a prompt chunk is full of query rows. Its time is arithmetic, and each split costs partial results, which are
written, read and merged. A few such tiles keep a device busy, and whichever ends last decides when the step is over:

    3 workers, 4 equal tiles           the same tiles, each in 3 splits
    |--- 0 ---|--- 3 ---|              |-0-|-1-|-2-|-3-|
    |--- 1 ---|  idle                  |-0-|-1-|-2-|-3-|
    |--- 2 ---|  idle                  |-0-|-1-|-2-|-3-|

So several limits to the size of an item are tried. For each, the items are assigned heaviest first, each to the worker
that is free first. The limit with which the last worker ends first wins. A *worker* computes one item of one KV head at
a time: it is a CTA on a GPU and a thread on a CPU. `SplitRule.num_workers` of them work at once.

Times are in bytes: a time of n is the time in which a worker reads n bytes of KV.
"""

from typing import Any, Final, NamedTuple

import numpy as np

from trunkattn.compiled import njit
from trunkattn.planner.work_list import KV_END, KV_START, QUERY_END, QUERY_START

_NEVER: Final = np.iinfo(np.int64).max
_TRUSTED: Final = 16  # predictions that differ by less than 1/16 count as equal
MAX_ITEMS_PER_WORKER: Final = 3  # the most items per worker that tiles are split into


class _ItemLimit(NamedTuple):
    """The largest item allowed: `sixteenths` / 16 of a worker's share of all work, divided by `items_per_worker`."""

    sixteenths: int
    items_per_worker: int


# Limits are a little above the share, so that a tile of slightly more than n shares is split into n items, not n + 1.
_LIMITS: Final = (_ItemLimit(17, 1), _ItemLimit(18, 1), _ItemLimit(17, 2), _ItemLimit(17, MAX_ITEMS_PER_WORKER))


def weight(rule: Any, tokens: Any, queries: Any) -> Any:
    """Time of an item, or of an array of items, for one head, without the fixed cost. Rows are rounded up to whole
    units of `row_unit`."""
    rows = (np.int64(queries) * rule.group_size + rule.row_unit - 1) & -rule.row_unit
    return np.int64(tokens) * (rule.head_bytes + rows * rule.row_bytes)


weight_of = njit(weight, inline="always")  # for compiled functions


@njit(inner=True)
def heaviest_first(weights):
    """The stable order of items by descending weight.

    This bottom-up merge sort compiles much faster in Numba than NumPy's argsort.
    """
    count = len(weights)
    order, merged = np.empty(count, np.int32), np.empty(count, np.int32)
    for i in range(count):
        order[i] = i
    width = 1
    while width < count:
        for begin in range(0, count, 2 * width):
            middle, end = min(begin + width, count), min(begin + 2 * width, count)
            left, right = begin, middle
            for i in range(begin, end):
                if right == end or (left < middle and weights[order[left]] >= weights[order[right]]):
                    merged[i] = order[left]
                    left += 1
                else:
                    merged[i] = order[right]
                    right += 1
        order, merged = merged, order
        width *= 2
    return order


@njit(inline="always")
def split_evenly(rule, tokens, num_splits):
    """Tokens of each of about `num_splits` equal splits. Borders lie on the grid, so there may be fewer splits."""
    num_splits = min(num_splits, (tokens + rule.grid - 1) // rule.grid)
    length = (tokens + num_splits - 1) // num_splits
    return tokens if num_splits == 1 else (length + rule.grid - 1) // rule.grid * rule.grid


@njit
def scheduled_splits(rule, tiles):
    """[T] int32: tokens per split of each tile; a tile that is not split has all of its tokens in one.

    tiles: see `splitting.PackTiles.tiles`.
    """
    lengths = tiles[:, KV_END] - tiles[:, KV_START]
    weights = np.empty(len(tiles), np.int64)
    for t in range(len(tiles)):
        weights[t] = weight_of(rule, lengths[t], tiles[t, QUERY_END] - tiles[t, QUERY_START])
    whole = lengths.astype(np.int32)
    share = (weights.sum() + rule.item_bytes * len(tiles)) * rule.num_kv_heads // rule.num_workers
    good_enough = share + share // _TRUSTED
    if len(tiles) == 0 or weights.max() <= share // _TRUSTED:
        return whole
    best, best_time, whole_time = whole, _NEVER, _schedule_time(rule, tiles, weights, whole)
    for limit in _LIMITS:
        if min(whole_time, best_time) <= good_enough:
            break
        most = share * limit.sixteenths // (16 * limit.items_per_worker)
        splits = _split_above(rule, lengths, weights, max(np.int64(1), most))
        time = _schedule_time(rule, tiles, weights, splits)
        if time < best_time:
            best, best_time = splits, time
    gains = best_time + rule.merge_bytes < whole_time - whole_time // _TRUSTED
    return best if gains else whole


@njit(inner=True)
def _split_above(rule, lengths, weights, most):
    """[T] tokens per split, for splits of about equal weight, at most `most` each as far as the grid allows."""
    splits = np.empty(len(lengths), np.int32)
    for t in range(len(lengths)):
        splits[t] = split_evenly(rule, np.int64(lengths[t]), (weights[t] + most - 1) // most)
    return splits


@njit
def _schedule_time(rule, tiles, weights, splits):
    """Time until the last worker ends, plus each worker's share of writing and reading partials."""
    num_items = np.int64(0)
    for t in range(len(tiles)):
        num_items += (tiles[t, KV_END] - tiles[t, KV_START] + splits[t] - 1) // splits[t]
    items = np.empty(num_items, np.int64)
    count, partial_bytes = 0, np.int64(0)
    for t in range(len(tiles)):
        length = np.int64(tiles[t, KV_END] - tiles[t, KV_START])
        for begin in range(0, length, splits[t]):
            items[count] = weights[t] // length * min(np.int64(splits[t]), length - begin) + rule.item_bytes
            count += 1
        if splits[t] < length:
            rows = (tiles[t, QUERY_END] - tiles[t, QUERY_START]) * rule.group_size
            partial_bytes += (length + splits[t] - 1) // splits[t] * rows * rule.partial_bytes
    return _last_end(rule, items) + partial_bytes * rule.num_kv_heads // rule.num_workers


@njit
def work_time(rule, items, num_partials):
    """Time of a work list: until the last worker ends, plus the time of its `num_partials` partial slots."""
    weights = np.empty(len(items), np.int64)
    for i in range(len(items)):
        tokens, queries = items[i, KV_END] - items[i, KV_START], items[i, QUERY_END] - items[i, QUERY_START]
        weights[i] = weight_of(rule, tokens, queries) + rule.item_bytes
    partials = np.int64(num_partials) * rule.group_size * rule.partial_bytes * rule.num_kv_heads // rule.num_workers
    return _last_end(rule, weights) + partials + (rule.merge_bytes if num_partials else 0)


@njit(inner=True)
def _last_end(rule, weights):
    """Time when the last worker ends if items are assigned heaviest first, once per head, to the worker that is free
    first."""
    ends = np.zeros(rule.num_workers, np.int64)  # a heap: no worker ends later than its two children
    for item in heaviest_first(weights):
        for _ in range(rule.num_kv_heads):
            _give_to_first(ends, weights[item])
    return ends.max()


@njit(inner=True)
def _give_to_first(ends, weight):
    """Gives an item to the worker that is free first, and moves that worker down the heap."""
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
