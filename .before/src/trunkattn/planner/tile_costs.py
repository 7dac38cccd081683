"""What row tiles cost: blocks and tokens of a stage, and the time of every way to tile a step, from sums and maxima.

Nothing is simulated, so that a GPU finds the same integers in parallel (`kernels.device_choice`).
"""

from typing import NamedTuple

import numpy as np
from numba import njit
from numpy.typing import NDArray

from trunkattn.planner.tiles import Stage, segments, share_of, step_of

EVERY = 1 << 30  # more entries than any node has
# Of one round of low items that read memory: after this time each block takes a third longer than its chain, which was
# measured where few were in flight. Fitted to the decodes of the 330 batches of benchmarks/hybrid.py on an H200: with
# 0.5 to 0.7 items a slot they took 1.12 to 1.52 times what memory alone does
FILLED_NS = 20_000
# Of the time of a block when all items run, what arithmetic alone takes; the rest is memory, which few leave idle. With
# 144 items of 264 slots, two of 132 multiprocessors' programs each, 32 rows took 1.43 µs a block, 1.85 with 264
ALONE_PERCENT = 75
# Of several rounds of items, the part of the lesser of arithmetic and memory that the other does not hide: rounds begin
# and end at different times. Without it an H100, of less bandwidth, is indifferent between tilings of equal bytes: 17
# calibrated batches change, 1 to 6 % faster there, and one on an H200, 1 % slower
HIDDEN_PARTS = 16
# Percent by which memory takes longer, times the share of slots that are idle. With it three ragged batches of 256 are
# cut, 4 % faster on an H100, and 256 equal requests on 128 of 264 slots (1 %; an H200: 4)
IDLE_PERCENT = 8
# What the L2 cache of an H100 or H200 serves: 32 x (256 shared + 128) tokens of 32/32 heads, one by one, take 50 µs on
# an H100, of which memory needs 23; packed by `relay` 40 (benchmarks/relay.py)
L2_BYTES_PER_US = 6_000_000
Int64Array = NDArray[np.int64]


class Costs(NamedTuple):
    """Of a device and an attention; int64, by tile kind. See `TilingRule`."""

    block_ns: Int64Array  # [kinds, 2]
    chain_ns: Int64Array  # [kinds, 2]
    slots: Int64Array  # [kinds] items of one KV head that run at once
    together: Int64Array  # [kinds] of all heads, those that run at once on a multiprocessor
    read_percent: Int64Array  # [kinds] of the bandwidth that they reach
    launch_ns: int
    bytes_per_us: int
    token_bytes: int  # keys and values of all heads
    partial_bytes: int
    l2_tokens: int  # that the L2 cache holds
    l2_percent: int  # of the time of memory that it takes to serve as much
    run_tokens: int


class StageLoads(NamedTuple):
    """Of a list of stages that are not cut."""

    blocks: Int64Array  # [tiles, 4] of all stages, one after the other; see `stage_blocks`
    indptr: Int64Array  # [stages + 1] into blocks
    memory: Int64Array  # [stages] tokens that leave memory
    num_queries: int


@njit(cache=True)
def stage_blocks(forest, entries, stage, window, run):
    """[tiles that have any, 4] blocks of nodes that hold the whole tile, and of others; runs; entries."""
    indptr, nodes, num_runs = segments(forest, entries, stage, window, run)
    blocks = np.zeros((len(indptr) - 1, 4), np.int64)
    height = stage.height // stage.subtiles
    private = np.zeros(stage.subtiles, np.int64)
    for tile in range(len(blocks)):
        first, last = tile * stage.height, min((tile + 1) * stage.height, len(entries.query))
        whole = np.int64(0)
        private[:] = 0
        for i in range(indptr[tile], indptr[tile + 1]):
            low, high = max(entries.node_start[nodes[i]], first), min(entries.node_end[nodes[i]], last)
            if low == first and high == last:
                whole += num_runs[i]
            else:
                for subtile in range((low - first) // height, (high - 1 - first) // height + 1):
                    private[subtile] += num_runs[i]
        blocks[tile, 0] = whole // stage.block_runs
        left, step = whole % stage.block_runs, stage.block_runs if stage.subtiles == 1 else stage.private_runs
        blocks[tile, 1] = (private.max() + left + step - 1) // step
        blocks[tile, 2] = num_runs[indptr[tile] : indptr[tile + 1]].sum()
        blocks[tile, 3] = last - first
    return blocks[blocks[:, 2] > 0]


@njit(cache=True)
def shared_tokens(forest, entries, least):
    """Of each entry: tokens that it has in common with the one before it; tokens in nodes of at least `least` entries.

    The first of these is at most what the entry before it sees.
    """
    shared = np.zeros(len(entries.query), np.int64)
    tall = np.zeros(len(entries.query), np.int64)
    for node in range(len(forest.parent)):  # a node comes after its ancestors
        start, end = entries.node_start[node], entries.node_end[node]
        shared[start + 1 : end] = forest.token_end[node]
        if end - start >= least:
            tall[start:end] = forest.token_end[node]
    for i in range(1, len(shared)):
        shared[i] = min(shared[i], entries.position[i - 1] + 1)
    return shared, tall


@njit(cache=True)
def stage_tokens(position, shared, tall, stage, window):
    """Tokens that leave memory: each once; those that two tiles share; and how many tokens the later tiles read again.

    A stage takes an entry's tokens in nodes of enough entries, which are the first ones, or those after them.
    """
    once, common, again = np.int64(0), np.int64(0), np.int64(0)
    carried = np.int64(0)  # tokens that have been common to all entries since before the last tile began
    for i in range(len(position)):
        end = np.int64(position[i] + 1)
        begin = max(np.int64(0), end - window)
        if stage.least > 1:
            end = min(end, tall[i])
        if stage.below < EVERY:
            begin = max(begin, tall[i])
        once += max(0, end - max(begin, shared[i]))
        carried = min(carried, shared[i])
        if i and i % stage.height == 0:
            crossing = max(0, min(end, shared[i]) - begin)
            again += crossing
            common += crossing - min(crossing, max(0, carried - begin))
            carried = shared[i]
    return once, common, again


@njit(cache=True)
def stage_loads(forest, entries, stages, l2_tokens, window, run):
    """The loads of `stages` [stages, fields of Stage], whose num_parts are not looked at."""
    most = np.int64(0)
    for i in range(len(stages)):
        most += (len(entries.query) + stages[i, 0] - 1) // stages[i, 0]
    blocks = np.empty((most, 4), np.int64)
    indptr = np.zeros(len(stages) + 1, np.int64)
    memory = np.zeros(len(stages), np.int64)
    for i in range(len(stages)):
        height, least, below, block_runs, parts, subtiles, private = stages[i]
        stage = Stage(height, least, below, block_runs, parts, subtiles, private)
        found = stage_blocks(forest, entries, stage, window, run)
        indptr[i + 1] = indptr[i] + len(found)
        blocks[indptr[i] : indptr[i + 1]] = found
        shared, tall = shared_tokens(forest, entries, least if least > 1 else below)
        once, common, again = stage_tokens(entries.position, shared, tall, stage, window)
        memory[i] = once + again * max(0, common - l2_tokens) // max(1, common)  # the L2 cache keeps the others
    return StageLoads(blocks[: indptr[-1]], indptr, memory, len(entries.query))


@njit(cache=True)
def stage_ns(blocks, memory, num_queries, stage, kind, last, costs):
    """A stage takes what its slots, its longest item or its memory take; launches and partial states come on top.

    Items that are left after whole rounds of the slots are too few to keep memory busy, and take as long as one does;
    so do those of one round that is not full.
    """
    total = blocks[:, 2].sum()
    share = share_of(total, stage.num_parts, stage.block_runs)
    items, work, dearest, longest, partials = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    for tile in range(len(blocks)):
        step = step_of(blocks[tile, 2], share, stage.block_runs)
        parts = (blocks[tile, 2] + step - 1) // step
        # a part of a tile holds the private runs of few requests, mostly of one subtile
        masked = blocks[tile, 1] * (stage.subtiles if parts > 1 else 1)
        cost = (blocks[tile, 0] * costs.block_ns[kind, 0] + masked * costs.block_ns[kind, 1]) // parts
        chain = (blocks[tile, 0] * costs.chain_ns[kind, 0] + masked * costs.chain_ns[kind, 1]) // parts
        items, work = items + parts, work + cost * parts
        dearest, longest = max(dearest, cost), max(longest, chain)
        partials += parts * blocks[tile, 3] if parts > 1 else 0
    slots = costs.slots[kind]
    if items <= slots:  # each runs the faster for it, but not those that meet on a multiprocessor
        together = costs.together[kind]
        most = (items * together + slots - 1) // slots
        busy = max(dearest * items // slots, dearest * most * ALONE_PERCENT // (100 * together))
    else:
        mean = work // items
        busy = max(work // slots + dearest - mean, (items + slots - 1) // slots * mean)
    percent = 100 + IDLE_PERCENT * max(0, slots - items) // slots
    tokens = max(1, total * costs.run_tokens)
    read = max(memory, tokens * costs.l2_percent // 100)
    bytes_ns = read * costs.token_bytes * 1000 // costs.bytes_per_us * percent // costs.read_percent[kind]
    if items <= slots and stage.subtiles == 1:
        slower = max(0, longest - FILLED_NS) * min(memory, tokens) // (3 * tokens)
        bytes_ns = max(bytes_ns, longest + slower)
    left = items % slots
    if left:
        bytes_ns = bytes_ns * (items - left) // items + max(bytes_ns * left // items, longest)
    if not last:
        partials = num_queries
    launches = 2 if last and partials else 1
    states_ns = partials * costs.partial_bytes * 1000 // costs.bytes_per_us
    alone = max(busy, longest)
    seen = min(alone, bytes_ns) // HIDDEN_PARTS if items > slots else 0
    return max(alone, bytes_ns) + seen + launches * costs.launch_ns + states_ns


@njit(cache=True)
def ways_ns(loads, stages, uses, costs):
    """[ways] time of each. uses [ways, 2, 3]: stage or -1, its tile kind and num_parts, in the order of launches."""
    times = np.zeros(len(uses), np.int64)
    for way in range(len(uses)):
        for nth in range(2):
            which, kind, num_parts = uses[way, nth]
            if which < 0 or loads.indptr[which] == loads.indptr[which + 1]:
                continue
            height, least, below, block_runs, _, subtiles, private = stages[which]
            stage = Stage(height, least, below, block_runs, num_parts, subtiles, private)
            blocks = loads.blocks[loads.indptr[which] : loads.indptr[which + 1]]
            last = nth == 1 or uses[way, 1, 0] < 0
            times[way] += stage_ns(blocks, loads.memory[which], loads.num_queries, stage, kind, last, costs)
    return times


@njit(cache=True)
def ways_fit(forest, entries, stages, uses, limits, window, run):
    """[ways] whether each surely keeps within limits, [3] of items, runs and partial states; of two stages, each within
    half of them. A tile's items may all hold all of its entries, and its runs be dealt to one subtile."""
    runs_of = np.zeros((len(stages), len(entries.query)), np.int64)
    for i in range(len(stages)):
        height, least, below, block_runs, parts, subtiles, private = stages[i]
        stage = Stage(height, least, below, block_runs, parts, subtiles, private)
        indptr, _, num_runs = segments(forest, entries, stage, window, run)
        for tile in range(len(indptr) - 1):
            runs_of[i, tile] = num_runs[indptr[tile] : indptr[tile + 1]].sum()
    fit = np.ones(len(uses), np.bool_)
    for way in range(len(uses)):
        pair = uses[way, 1, 0] >= 0
        for nth in range(1 + pair):
            which, _, num_parts = uses[way, nth]
            height, _, _, block_runs, _, subtiles, private = stages[which]
            total = runs_of[which].sum()
            share = share_of(total, num_parts, block_runs)
            items, pieces = np.int64(0), np.int64(0)
            for tile in range((len(entries.query) + height - 1) // height):
                size = runs_of[which, tile]
                step = step_of(size, share, block_runs)
                count = (size + step - 1) // step
                items += count
                if count > 1 or pair:
                    pieces += count * min(height, len(entries.query) - tile * height)
            listed = total if subtiles == 1 else total * subtiles + items * subtiles * private
            most = limits // (1 + pair)
            fit[way] &= items <= most[0] and listed <= most[1] and pieces <= most[2]
    return fit
