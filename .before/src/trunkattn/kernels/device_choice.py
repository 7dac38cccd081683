"""Planning on the device, third step: the time of every tiling (`planner.tile_costs.ways_ns`), and its items by tile.

One program for each stage of each tiling finds its time from sums and maxima over its tiles, and the number of items of
each tile. Whoever comes after takes the tiling of least time, the first of equals.
"""

import triton
import triton.language as tl

from trunkattn.kernels.device_order import NUM_ENTRIES, in_turn
from trunkattn.kernels.device_tiles import (
    BLOCK_RUNS,
    HEIGHT,
    PRIVATE_RUNS,
    SUBTILES,
    TILE_FIELDS,
    TILE_FULL,
    TILE_MASKED,
    TILE_RUNS,
    TOTAL_AGAIN,
    TOTAL_COMMON,
    TOTAL_ONCE,
    TOTAL_RUNS,
    TOTALS,
)

# Columns of the table of tilings: the same for each of two stages
USE_STAGE = tl.constexpr(0)  # -1: none
USE_KIND = tl.constexpr(1)
USE_PARTS = tl.constexpr(2)
USE_SHAPE = tl.constexpr(3)  # the stage's own columns
USE_SUBTILE_ENTRIES = tl.constexpr(10)
USE_COLUMNS = tl.constexpr(11)

# Columns of the table of tile kinds, int64
KIND_FULL_NS = tl.constexpr(0)
KIND_MASKED_NS = tl.constexpr(1)
KIND_FULL_CHAIN_NS = tl.constexpr(2)
KIND_MASKED_CHAIN_NS = tl.constexpr(3)
KIND_SLOTS = tl.constexpr(4)
KIND_READ_PERCENT = tl.constexpr(5)
KIND_TOGETHER = tl.constexpr(6)
KIND_COLUMNS = tl.constexpr(7)

# Places in the costs, int64
LAUNCH_NS = tl.constexpr(0)
BYTES_PER_US = tl.constexpr(1)
TOKEN_BYTES = tl.constexpr(2)
PARTIAL_BYTES = tl.constexpr(3)
L2_TOKENS = tl.constexpr(4)
RUN_TOKENS = tl.constexpr(5)
FILLED_NS = tl.constexpr(6)
ALONE_PERCENT = tl.constexpr(7)
HIDDEN_PARTS = tl.constexpr(8)
IDLE_PERCENT = tl.constexpr(9)
L2_PERCENT = tl.constexpr(10)

# Fields of a tiling's use of a stage
CUT_SHARE = tl.constexpr(0)  # runs of an item
CUT_ITEMS = tl.constexpr(1)
CUT_FIELDS = tl.constexpr(2)

NEVER = tl.constexpr(1 << 61)  # ns of what does not fit


@triton.jit
def parts_of(runs, share, block_runs):
    """Runs of each item of a tile, and how many items it has; as `planner.tiles.emit_stage` cuts it."""
    parts = tl.maximum((runs + share // 2) // share, 1)
    step = tl.cdiv(tl.cdiv(runs, parts), block_runs) * block_runs
    return step, tl.cdiv(runs, tl.maximum(step, 1))


@triton.jit
def _parameters(use, uses, kinds):
    """(stage or -1, num_parts, its shape, its kind) of a tiling's use of a stage, all loaded at once."""
    of = uses + use * USE_COLUMNS
    stage, which, num_parts = tl.load(of + USE_STAGE), tl.load(of + USE_KIND), tl.load(of + USE_PARTS)
    of, kind = of + USE_SHAPE, kinds + tl.maximum(which, 0) * KIND_COLUMNS
    shape = (tl.load(of + HEIGHT), tl.load(of + BLOCK_RUNS), tl.load(of + SUBTILES), tl.load(of + PRIVATE_RUNS))
    times = (
        tl.load(kind + KIND_FULL_NS), tl.load(kind + KIND_MASKED_NS), tl.load(kind + KIND_FULL_CHAIN_NS),
        tl.load(kind + KIND_MASKED_CHAIN_NS), tl.load(kind + KIND_SLOTS), tl.load(kind + KIND_READ_PERCENT),
        tl.load(kind + KIND_TOGETHER),
    )  # fmt: skip
    return stage, num_parts, shape, times


@triton.jit
def _sums_and_maxima(
    work_a, partials_a, pieces_a, dearest_a, longest_a, work_b, partials_b, pieces_b, dearest_b, longest_b
):
    """Three sums and two maxima: one reduction waits for the program's warps once."""
    return (
        work_a + work_b, partials_a + partials_b, pieces_a + pieces_b,
        tl.maximum(dearest_a, dearest_b), tl.maximum(longest_a, longest_b),
    )  # fmt: skip


@triton.jit
def _tile_loads(tiles, tile, end, ENTRIES: tl.constexpr):
    """Blocks that all of a tile sees, other blocks, runs; of tiles before `end`."""
    return (
        tl.load(tiles + TILE_FULL * ENTRIES + tile, mask=tile < end, other=0),
        tl.load(tiles + TILE_MASKED * ENTRIES + tile, mask=tile < end, other=0),
        tl.load(tiles + TILE_RUNS * ENTRIES + tile, mask=tile < end, other=0),
    )


@triton.jit
def _work(
    tiles, num_tiles, num_entries, share, shape, kind, one_stage, item_starts, ENTRIES: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Of a stage: places that its items' queries take in the lists of partial states, where there are such; and (how
    many items, their time in all, the dearest, the longest chain, entries of partial states). share: see `parts_of`.
    item_starts: items before each tile."""
    height, block_runs, subtiles, _private = shape
    full_ns, masked_ns, full_chain_ns, masked_chain_ns, _slots, _read_percent, _together = kind
    num_items, pieces = tl.zeros([], tl.int32), tl.zeros([BLOCK], tl.int64)
    work, partials = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    dearest, longest = tl.zeros([BLOCK], tl.int64), tl.zeros([BLOCK], tl.int64)
    tile = tl.arange(0, BLOCK)
    full, masked, runs = _tile_loads(tiles, tile, tl.cdiv(ENTRIES, height), ENTRIES)  # before num_tiles is there
    for _begin in range(0, num_tiles, BLOCK):
        some = tile < num_tiles
        full, masked = tl.where(some, full, 0).to(tl.int64), tl.where(some, masked, 0).to(tl.int64)
        runs = tl.where(some, runs, 0)
        _step, parts = parts_of(runs, share, block_runs)
        ends = num_items + tl.cumsum(parts, 0)
        tl.store(item_starts + tile, ends - parts, mask=tile < num_tiles)
        num_items = tl.max(ends, 0)
        rows = tl.minimum(height, tl.maximum(num_entries - tile * height, 0))
        pieces += tl.where((parts > 1) | (one_stage == 0), parts * rows, 0)
        each = tl.maximum(parts, 1)
        masked *= tl.where(parts > 1, subtiles, 1)
        cost = (full * full_ns + masked * masked_ns) // each
        work += cost * parts
        dearest = tl.maximum(dearest, cost)
        longest = tl.maximum(longest, (full * full_chain_ns + masked * masked_chain_ns) // each)
        partials += tl.where(parts > 1, parts * rows, 0)
        tile += BLOCK
        full, masked, runs = _tile_loads(tiles, tile, num_tiles, ENTRIES)
    work, partials, pieces, dearest, longest = tl.reduce(
        (work, partials, pieces, dearest, longest), 0, _sums_and_maxima
    )
    return pieces, (num_items, work, dearest, longest, partials)


@triton.jit
def _stage_ns(work, memory, tokens, num_queries, kind, low, last, costs):
    """As `planner.tile_costs.stage_ns`. work: the second of what `_work` returns; tokens: of all runs; low: without
    subtiles."""
    slots, read_percent, together = kind[4], kind[5], kind[6]
    items, total, dearest, longest, partials = work
    launch_ns, bytes_per_us, token_bytes, partial_bytes = costs[0], costs[1], costs[2], costs[3]
    filled_ns, alone_percent, hidden_parts, idle_percent, l2_percent = costs[4], costs[5], costs[6], costs[7], costs[8]
    mean = total // tl.maximum(items, 1)
    few, meet = slots.to(tl.int32), together.to(tl.int32)  # a division of 64 bits is a function call
    several = tl.maximum(total // slots + dearest - mean, (items + few - 1) // few * mean)
    most = (items * meet + few - 1) // few
    one_round = tl.maximum(dearest * items // slots, dearest * most * alone_percent // (100 * together))
    busy = tl.where(items <= slots, one_round, several)
    percent = 100 + idle_percent.to(tl.int32) * tl.maximum(few - items, 0) // few
    tokens = tl.maximum(tokens, 1)
    read = tl.maximum(memory, tokens * l2_percent // 100)
    bytes_ns = read * token_bytes * 1000 // bytes_per_us * percent // read_percent
    slower = tl.maximum(longest - filled_ns, 0) * tl.minimum(memory, tokens) // (3 * tokens)
    bytes_ns = tl.where(low & (items <= slots), tl.maximum(bytes_ns, longest + slower), bytes_ns)
    left, some = items % few, tl.maximum(items, 1)
    rounds_ns = bytes_ns * (items - left) // some + tl.maximum(bytes_ns * left // some, longest)
    bytes_ns = tl.where(left > 0, rounds_ns, bytes_ns)
    partials = tl.where(last, partials, num_queries)
    launches = tl.where(last & (partials > 0), 2, 1)
    alone = tl.maximum(busy, longest)
    seen = tl.where(items > slots, tl.minimum(alone, bytes_ns) // hidden_parts, 0)
    return tl.maximum(alone, bytes_ns) + seen + launches * launch_ns + (partials * partial_bytes * 1000 // bytes_per_us)


@triton.jit
def choice_kernel(
    uses, kinds, costs, tiles, totals, state, times, cuts, item_starts, max_items, max_runs, max_slots,
    ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """One program a tiling and stage. times [tilings, 2] int64: predicted ns, NEVER where it might have more items,
    runs or partial states than its share of the limits; cuts [tilings, 2, CUT_FIELDS] int32; item_starts [tilings, 2,
    ENTRIES]: items of the stage before each tile. See `planner.tile_costs.ways_fit`."""
    way, nth = tl.program_id(0), tl.program_id(1)
    use = way * 2 + nth
    stage, num_parts, shape, kind = _parameters(use, uses, kinds)
    one_stage = tl.load(uses + (way * 2 + 1) * USE_COLUMNS + USE_STAGE) < 0
    prices = (
        tl.load(costs + LAUNCH_NS), tl.load(costs + BYTES_PER_US), tl.load(costs + TOKEN_BYTES),
        tl.load(costs + PARTIAL_BYTES), tl.load(costs + FILLED_NS), tl.load(costs + ALONE_PERCENT),
        tl.load(costs + HIDDEN_PARTS), tl.load(costs + IDLE_PERCENT), tl.load(costs + L2_PERCENT),
    )  # fmt: skip
    kept, run_tokens = tl.load(costs + L2_TOKENS), tl.load(costs + RUN_TOKENS)
    in_turn(FOLLOWS, LEADS)  # the tables were there before
    num_entries = tl.load(state + NUM_ENTRIES)
    height, block_runs, subtiles, private = shape
    its_tiles = tiles + tl.maximum(stage, 0) * TILE_FIELDS * ENTRIES
    num_tiles = tl.where(stage >= 0, tl.cdiv(num_entries, height), 0)
    of = totals + tl.maximum(stage, 0) * TOTALS
    used = stage >= 0
    runs, once = tl.load(of + TOTAL_RUNS, mask=used, other=0), tl.load(of + TOTAL_ONCE, mask=used, other=0)
    common, again = tl.load(of + TOTAL_COMMON, mask=used, other=0), tl.load(of + TOTAL_AGAIN, mask=used, other=0)
    share = tl.maximum((runs + num_parts - 1) // tl.maximum(num_parts, 1), block_runs)
    share = tl.where(num_parts > 0, share, runs + 1)
    pieces, work = _work(
        its_tiles, num_tiles, num_entries, share.to(tl.int32), shape, kind, one_stage, item_starts + use * ENTRIES,
        ENTRIES, BLOCK,
    )  # fmt: skip
    num_items = work[0]
    tl.store(cuts + use * CUT_FIELDS + CUT_SHARE, share.to(tl.int32))
    tl.store(cuts + use * CUT_FIELDS + CUT_ITEMS, num_items)
    memory = once + again * tl.maximum(common - kept, 0) // tl.maximum(common, 1)
    tokens, last = runs * run_tokens, one_stage | (nth == 1)
    time = _stage_ns(work, memory, tokens, num_entries, kind, subtiles == 1, last, prices)
    time = tl.where(runs > 0, time, 0)
    listed = tl.where(subtiles == 1, runs, runs * subtiles + num_items * subtiles * private)
    parts = tl.where(one_stage, 1, 2)
    fits = (num_items <= max_items // parts) & (listed <= max_runs // parts) & (pieces <= max_slots // parts)
    tl.store(times + use, tl.where(fits, time, NEVER))


@triton.jit
def chosen(times, NUM_WAYS: tl.constexpr, WAYS: tl.constexpr):
    """The tiling of least time, the first of equals."""
    way = tl.arange(0, WAYS)
    time = tl.load(times + 2 * way, mask=way < NUM_WAYS, other=NEVER)
    time += tl.load(times + 2 * way + 1, mask=way < NUM_WAYS, other=NEVER)
    return tl.argmin(time, 0)  # ties to the left
