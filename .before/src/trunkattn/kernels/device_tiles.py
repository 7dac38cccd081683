"""Planning on the device, second step: the tiles of every stage, and what they cost (`planner.tiles`, `tile_costs`).

A stage's tile holds consecutive entries, so of the forest it needs only what separates those: between two entries
stands the number of tokens that they share. A node of the forest, clipped to the tile, is a range of entries whose
separators are no lower than its end; nodes that are clipped to the same entries stand one after the other and are taken
as one. A tile therefore has at most two nodes an entry, found from all pairs of them.
"""

import triton
import triton.language as tl

from trunkattn.kernels.device_order import BIG, NUM_ENTRIES, NUMBERS, in_turn

# Columns of the table of stages, as in `planner.tiles.Stage`
HEIGHT = tl.constexpr(0)
LEAST = tl.constexpr(1)
BELOW = tl.constexpr(2)
BLOCK_RUNS = tl.constexpr(3)
SUBTILES = tl.constexpr(5)
PRIVATE_RUNS = tl.constexpr(6)
STAGE_COLUMNS = tl.constexpr(7)

# Fields of a tile, an array for each stage
TILE_RUNS = tl.constexpr(0)
TILE_FULL = tl.constexpr(1)  # blocks that all of it sees
TILE_MASKED = tl.constexpr(2)  # other blocks
TILE_FIELDS = tl.constexpr(3)

# Sums over the tiles of a stage, int64
TOTAL_RUNS = tl.constexpr(0)
TOTAL_ONCE = tl.constexpr(1)  # tokens, see `planner.tile_costs.stage_tokens`
TOTAL_COMMON = tl.constexpr(2)
TOTAL_AGAIN = tl.constexpr(3)
TOTALS = tl.constexpr(4)

# Fields of a node, arrays of two elements an entry for each stage
NODE_ROWS = tl.constexpr(0)  # first entry of the tile | end << 8
NODE_START = tl.constexpr(1)  # first token seen
NODE_END = tl.constexpr(2)
NODE_OFFSET = tl.constexpr(3)  # runs of the tile before it
NODE_RUNS = tl.constexpr(4)
NODE_FULL = tl.constexpr(5)  # runs of the tile [FULL, FULL_END) are whole and seen by all the node's entries
NODE_FULL_END = tl.constexpr(6)
NODE_FIELDS = tl.constexpr(7)


@triton.jit
def _stage_of(task, tiles, STAGES: tl.constexpr):
    """(stage, tile) of a task, where the tiles of all stages are numbered through."""
    chosen = tl.sum((tl.cumsum(tiles, 0) <= task).to(tl.int32), 0)
    return chosen, task - tl.sum(tl.where(tl.arange(0, STAGES) < chosen, tiles, 0), 0)


@triton.jit
def _tall_tokens(at, first, end, least, num_entries, entry_shared, MOST_LEAST: tl.constexpr, WINDOWS: tl.constexpr):
    """Tokens of each entry's path, from the start, that belong to nodes of at least `least` entries: the most that any
    `least` consecutive entries, this one among them, have in common. at: entries of [first, end)."""
    window = first - least + 1 + tl.arange(0, WINDOWS)
    gap = tl.arange(0, MOST_LEAST)
    used = (window >= 0) & (window < end) & (window + least <= num_entries)
    separators = entry_shared + window[:, None] + 1 + gap[None, :]
    common = tl.min(tl.load(separators, mask=used[:, None] & (gap < least - 1)[None, :], other=BIG), 1)
    common = tl.where(used, common, 0)
    holds = (window[None, :] <= at[:, None]) & (at[:, None] < window[None, :] + least)
    return tl.max(tl.where(holds, common[None, :], 0), 1)


@triton.jit
def _nodes(value, base, position, rows_used, window, RUN: tl.constexpr, NODES: tl.constexpr):
    """The nodes of a tile. Vectors of NODES: 2i is the separator before entry i, 2i + 1 the entry itself; `value` is
    the end of the tokens that it stands for, -1 for none; base: where the stage's part of the path begins. Returns
    first and end entry, first and end token, runs before, runs, and which runs of the tile all its entries see whole.
    """
    k = tl.arange(0, NODES)
    j = k[None, :]
    smaller = value[None, :] < value[:, None]
    left = tl.max(tl.where(smaller & (j < k[:, None]), j, 0), 1)
    right = tl.min(tl.where(smaller & (j > k[:, None]), j, 2 * rows_used), 1)
    inside = (j > left[:, None]) & (j < right[:, None])
    bounds = (j == left[:, None]) | (j == right[:, None])
    parent = tl.max(tl.where(bounds, value[None, :], 0), 1)
    repeated = tl.max((inside & (j < k[:, None]) & (value[None, :] == value[:, None])).to(tl.int32), 1)
    lowest = tl.min(tl.where(inside, position[None, :], BIG), 1)
    highest = tl.max(tl.where(inside, position[None, :], -1), 1)
    start = tl.maximum(tl.maximum(parent, base), lowest + 1 - window)
    end = tl.minimum(value, highest + 1)
    runs = tl.where((repeated == 0) & (start < end), tl.cdiv(end, RUN) - start // RUN, 0)
    first, stop = left // 2, right // 2
    before = (first[None, :] < first[:, None]) | ((first[None, :] == first[:, None]) & smaller)
    offset = tl.sum(tl.where(before, runs[None, :], 0), 1)
    full = offset + tl.cdiv(tl.maximum(start, highest + 1 - window), RUN) - start // RUN
    full_end = offset + tl.minimum(end, lowest + 1) // RUN - start // RUN
    return first, stop, start, end, offset, runs, full, full_end


@triton.jit
def _blocks(first, stop, runs, rows, shape, MOST_SUBTILES: tl.constexpr):
    """Blocks of keys of a tile that is not cut: of nodes that hold all of it, and others."""
    block_runs, subtiles = tl.load(shape + BLOCK_RUNS), tl.load(shape + SUBTILES)
    step = tl.where(subtiles == 1, block_runs, tl.load(shape + PRIVATE_RUNS))
    height = tl.maximum(tl.load(shape + HEIGHT) // subtiles, 1)
    all_of_it = (first == 0) & (stop == rows)
    whole = tl.sum(tl.where(all_of_it, runs, 0), 0)
    longest = 0
    for subtile in tl.static_range(MOST_SUBTILES):
        touches = (first // height <= subtile) & ((stop - 1) // height >= subtile) & (subtile < subtiles)
        longest = tl.maximum(longest, tl.sum(tl.where(touches & (all_of_it == 0), runs, 0), 0))
    return whole // block_runs, tl.cdiv(longest + whole % block_runs, step)


@triton.jit
def _seen(at, used, begin, tile, tall, height, shape, entry_position, entry_shared, window, NODES: tl.constexpr):
    """Tokens of a tile, as `planner.tile_costs.stage_tokens` counts them. at: its entries, each once in `used`."""
    position = tl.load(entry_position + at, mask=used, other=0)
    previous = tl.load(entry_position + at - 1, mask=used & (at > 0), other=0)
    shared = tl.minimum(tl.load(entry_shared + at, mask=used, other=0), previous + 1)
    end = position + 1
    start = tl.maximum(end - window, 0)
    end = tl.where(tl.load(shape + LEAST) > 1, tl.minimum(end, tall), end)
    start = tl.where(tl.load(shape + BELOW) < BIG, tl.maximum(start, tall), start)
    once = tl.sum(tl.where(used, tl.maximum(end - tl.maximum(start, shared), 0), 0), 0)
    leads = used & (at == tl.where(tile > 0, begin, -1))
    crossing = tl.where(leads, tl.maximum(tl.minimum(end, shared) - start, 0), 0)
    back = begin - height + tl.arange(0, NODES)
    inside = (back > 0) & (back <= tl.where(tile > 1, begin, 0))
    before = tl.minimum(
        tl.load(entry_shared + back, mask=inside, other=BIG),
        tl.load(entry_position + back - 1, mask=inside, other=BIG) + 1,
    )
    carried = tl.where(tile > 1, tl.min(before, 0), 0)
    common = crossing - tl.minimum(crossing, tl.maximum(carried - start, 0))
    return once, tl.sum(common, 0), tl.sum(crossing, 0)


@triton.jit(do_not_specialize=NUMBERS)
def tiles_kernel(
    entry_position, entry_length, entry_shared, state, stages, nodes, tiles, totals, window,
    ENTRIES: tl.constexpr, RUN: tl.constexpr, NODES: tl.constexpr, NUM_STAGES: tl.constexpr, STAGES: tl.constexpr,
    MOST_LEAST: tl.constexpr, WINDOWS: tl.constexpr, MOST_SUBTILES: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Every tile of every stage: its nodes [stages, NODE_FIELDS, 2 * ENTRIES], runs and blocks [stages, TILE_FIELDS,
    ENTRIES]; sums over them [stages, TOTALS]."""
    every = tl.arange(0, STAGES)
    heights = tl.load(stages + every * STAGE_COLUMNS + HEIGHT, mask=every < NUM_STAGES, other=BIG)
    most = tl.where(every < NUM_STAGES, tl.cdiv(ENTRIES, heights), 0)  # of the capacity: known before the batch is
    stage, tile = _stage_of(tl.program_id(0), most, STAGES)
    shape = stages + stage * STAGE_COLUMNS
    height, least, below = tl.load(shape + HEIGHT), tl.load(shape + LEAST), tl.load(shape + BELOW)
    begin = tile * height
    k = tl.arange(0, NODES)
    at = begin + k // 2
    in_turn(FOLLOWS, LEADS)
    num_entries = tl.load(state + NUM_ENTRIES)
    length = tl.load(entry_length + at, mask=at < ENTRIES, other=0)
    shared = tl.load(entry_shared + at, mask=at < ENTRIES, other=0)
    position = tl.load(entry_position + at, mask=at < ENTRIES, other=0)
    if begin >= num_entries:
        return
    rows = tl.minimum(height, num_entries - begin)
    used = k < 2 * rows
    value = tl.where(k % 2 == 1, length, tl.where(k > 0, shared, -1))
    base, tall = tl.zeros([NODES], tl.int32), tl.zeros([NODES], tl.int32)
    if (least > 1) | (below < BIG):
        tall = _tall_tokens(
            at, begin, begin + rows, tl.where(least > 1, least, below), num_entries, entry_shared,
            MOST_LEAST, WINDOWS,
        )  # fmt: skip
        base = tl.where(least > 1, 0, tall)
        value = tl.where(least > 1, tl.minimum(value, tall), value)
    value = tl.where(used, value, -1)
    first, stop, start, end, offset, runs, full, full_end = _nodes(value, base, position, rows, window, RUN, NODES)
    to = nodes + stage * NODE_FIELDS * 2 * ENTRIES + 2 * begin + k
    tl.store(to + NODE_ROWS * 2 * ENTRIES, first | stop << 8, mask=used)
    tl.store(to + NODE_START * 2 * ENTRIES, start, mask=used)
    tl.store(to + NODE_END * 2 * ENTRIES, end, mask=used)
    tl.store(to + NODE_OFFSET * 2 * ENTRIES, offset, mask=used)
    tl.store(to + NODE_RUNS * 2 * ENTRIES, runs, mask=used)
    tl.store(to + NODE_FULL * 2 * ENTRIES, full, mask=used)
    tl.store(to + NODE_FULL_END * 2 * ENTRIES, full_end, mask=used)
    whole, masked = _blocks(first, stop, tl.where(used, runs, 0), rows, shape, MOST_SUBTILES)
    once, common, again = _seen(
        at, used & (k % 2 == 1), begin, tile, tall, height, shape, entry_position, entry_shared, window, NODES
    )
    to = tiles + stage * TILE_FIELDS * ENTRIES + tile
    size = tl.sum(runs, 0)
    tl.store(to + TILE_RUNS * ENTRIES, size)
    tl.store(to + TILE_FULL * ENTRIES, whole)
    tl.store(to + TILE_MASKED * ENTRIES, masked)
    field = tl.arange(0, TOTALS)
    total = tl.where(field == TOTAL_RUNS, size, tl.where(field == TOTAL_ONCE, once, again))
    total = tl.where(field == TOTAL_COMMON, common, total).to(tl.int64)
    tl.atomic_add(totals + stage * TOTALS + field, total, sem="relaxed")
