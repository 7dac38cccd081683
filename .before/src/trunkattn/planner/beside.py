"""How many items of a tile list to compute beside the prompt chunks of a step (POD-Attention §4), by predicted time."""

from typing import NamedTuple

import numpy as np
from numba import njit

from trunkattn.plan_format import QUERY_END, QUERY_START, RUN_END, RUN_FULL, RUN_START
from trunkattn.planner import tile_costs


class BesideTimes(NamedTuple):
    """Of the kernel that computes chunks and decodes at once, in integers.

    chunk_percent, decode_percent: speed of each while both run, of its speed there alone, with tiles of up to
    `narrow_rows` rows, and wider. block_ns: of a block of `block_runs` runs; item_ns: of an item besides; a
    multiprocessor computes one at a time. fixed_ns: of the launch.
    """

    chunk_percent: tuple[int, int]
    decode_percent: tuple[int, int]
    narrow_rows: int
    block_ns: int
    block_runs: int
    item_ns: int
    fixed_ns: int
    group_size: int
    num_kv_heads: int
    processors: int


@njit(cache=True)
def choose_beside(items, chunks_ns, times, stage, kind, costs):
    """(number, ns) of the first items, which merge nothing: all, or as many as fit whole rounds of the multiprocessors
    that end with the chunks, or one round more; and predicted time of all items and the chunks.

    chunks_ns: of the chunks alone, and of reading their keys and values, for which decodes wait; stage, kind, costs: of
    `tile_costs.stage_ns`, for what a launch of its own computes.
    """
    number, (chunk_ns, reads_ns) = len(items), chunks_ns
    blocks, until, wide = np.empty((number, 3), np.int64), np.empty(number, np.int64), np.empty(number, np.int64)
    _until_ns(items, times, blocks, until, wide)
    until += reads_ns
    both_ns = chunk_ns * 100 // times.chunk_percent[wide[-1]]  # of the chunks, beside decodes all the time
    most = np.searchsorted(until, both_ns * times.decode_percent[wide[-1]] // 100, side="right")
    rounds = most * times.num_kv_heads // times.processors
    best, least = 0, np.int64(0)
    for way in range(3):
        count = number if way == 0 else (rounds + way - 1) * times.processors // times.num_kv_heads
        if 0 < count <= number:
            total = _together_ns(chunk_ns, until[count - 1], times, wide[count - 1])
            if count < number:
                left = blocks[count:]
                memory = left[:, 2].sum() * costs.run_tokens
                total += tile_costs.stage_ns(left, memory, 0, stage, kind, True, costs)
            if best == 0 or total < least:
                best, least = count, total
    return best, least


@njit(cache=True)
def _until_ns(items, times, blocks, until, wide):
    """Fills blocks: those that all rows of an item see, others, and runs; until: ns until the kernel, without chunks,
    has computed an item and those before it, which is their share of every multiprocessor, or as many of the longest as
    some have; wide: 1 if one of them has more rows than the narrow tile."""
    total, latest, most = np.int64(0), np.int64(0), 0
    for item in range(len(items)):
        runs = np.int64(items[item, RUN_END]) - items[item, RUN_START]
        full = (np.int64(items[item, RUN_FULL]) - items[item, RUN_START]) // times.block_runs
        number = (runs + times.block_runs - 1) // times.block_runs
        blocks[item, 0], blocks[item, 1], blocks[item, 2] = full, number - full, runs
        each = number * times.block_ns + times.item_ns
        total += each
        rounds = ((item + 1) * times.num_kv_heads + times.processors - 1) // times.processors
        latest = max(latest, total * times.num_kv_heads // times.processors, rounds * each)
        most = max(most, items[item, QUERY_END] - items[item, QUERY_START])
        until[item], wide[item] = latest, most * times.group_size > times.narrow_rows


@njit(cache=True)
def _together_ns(chunk_ns, decode_ns, times, wide):
    """Of chunks and decodes that take so long in the kernel without the other: while both run, each has a share of its
    speed."""
    both_ns = chunk_ns * 100 // times.chunk_percent[wide]
    beside_ns = decode_ns * 100 // times.decode_percent[wide]
    if beside_ns > both_ns:
        return times.fixed_ns + both_ns + decode_ns - both_ns * times.decode_percent[wide] // 100
    return times.fixed_ns + chunk_ns + beside_ns * (100 - times.chunk_percent[wide]) // 100
