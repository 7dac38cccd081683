"""The cost model of row tiles: blocks and tokens of a stage, and the time of each candidate tiling of a step.

Times follow from sums and maxima over tiles, not from a simulation, so a GPU can compute the same integers in parallel.
The device planner compiles the formulas `tile_blocks`, `item_ns`, `memory_tokens`, `portion_ns`, `load_ns` and
`listed_segments` of this file with Triton. They must use only arithmetic that both compilers know.
"""

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trunkattn.compiled import njit
from trunkattn.planner.tiles.layout import (
    cut_stage,
    lead_of,
    pitch_of,
    splits_of,
    stage_nodes,
    stage_of,
    step_of,
    target_of,
)

EVERY = 1 << 30  # more entries than any node has

# Columns of what tiles or items read; see `stage_blocks`
FULL_BLOCKS: Final = 0  # of segments that all entries see
MASKED_BLOCKS: Final = 1
NUM_SEGMENTS: Final = 2
NUM_ENTRIES: Final = 3
BLOCK_COLUMNS: Final = 4

# Columns of a launch of a candidate. A candidate has one, or two: for tall tiles and for low ones
LAUNCH_STAGE: Final = 0  # index of its stage; -1: the candidate has no such launch
LAUNCH_TILE: Final = 1  # index of its tile
LAUNCH_SPLITS: Final = 2  # its num_splits
LAUNCH_ITEM: Final = 3  # its item_segments
LAUNCH_COLUMNS: Final = 4

Int64Array = NDArray[np.int64]


class TileTimes(NamedTuple):
    """Times of a tile, for one KV head.

    full_ns, masked_ns: time of a block of keys that all rows see, and of a masked block, while all CTAs run.
    full_chain_ns, masked_chain_ns: the same for blocks one after another in a single CTA.
    num_slots: items that run at once on the device.
    ctas_per_sm: CTAs that run at once on an SM, of any KV head.
    read_percent: the percentage of the memory bandwidth that it reaches.
    item_ns: what each item adds where a CTA computes several; 0: nothing.
    """

    full_ns: int
    masked_ns: int
    full_chain_ns: int
    masked_chain_ns: int
    num_slots: int
    ctas_per_sm: int
    read_percent: int
    item_ns: int


class Costs(NamedTuple):
    """A card and an attention. The fields after `l2_percent` are those of `CardTimes`."""

    tiles: Int64Array  # [tiles of the rule, fields of TileTimes]
    token_bytes: int  # keys and values of all heads
    partial_bytes: int  # one partial result of all heads, written and read
    segment_size: int
    l2_tokens: int  # tokens that the L2 cache holds
    l2_percent: int  # time of a read from the L2 cache, in percent of the same read from memory
    bytes_per_us: int
    launch_ns: int
    filled_ns: int
    arithmetic_percent: int
    unhidden_part: int
    idle_percent: int


class StageLoads(NamedTuple):
    """What the tiles of all stages read, before any is cut into items."""

    blocks: Int64Array  # [tiles, BLOCK_COLUMNS] of all stages, one after the other; see `stage_blocks`
    indptr: Int64Array  # [stages + 1] into blocks
    memory: Int64Array  # [stages] tokens read from memory
    num_queries: int


class StageLoad(NamedTuple):
    """Sums and maxima over the items of a stage, and the tokens that they read. Where tiles are cut into portions, a
    portion counts as an item, except that `num_partials` counts those of items."""

    num_items: int
    work_ns: int  # sum of the items' times while all CTAs run
    max_item_ns: int
    max_chain_ns: int  # the longest time of an item in a single CTA
    num_partials: int
    tokens: int  # tokens that its tiles read, from memory or the L2 cache
    memory_tokens: int  # tokens that they read from memory


@njit
def tile_blocks(shared_segments, private_segments, stage):
    """(full blocks, which all rows see, and masked blocks) of a tile. private_segments: those of its fullest
    subtile."""
    step = stage.block_segments
    if stage.subtiles > 1:
        step = stage.private_segments
    left = shared_segments % stage.block_segments
    return shared_segments // stage.block_segments, (private_segments + left + step - 1) // step


@njit
def item_ns(full_blocks, masked_blocks, num_splits, subtiles, full_ns, masked_ns):
    """Time of each split of a tile. A split holds the private segments of a few requests, mostly of one subtile, so if
    a tile is cut its subtiles do not share the masked blocks."""
    is_cut = min(num_splits - 1, 1)
    masked_blocks = masked_blocks * (1 + (subtiles - 1) * is_cut)
    return (full_blocks * full_ns + masked_blocks * masked_ns) // max(num_splits, 1)


@njit
def portion_ns(tiles_ns, num_segments, target, item_segments):
    """Time of a portion if all tiles take `tiles_ns` and have `num_segments`. `target` holds what the items take to
    begin and to end that begin with their tile. A portion that begins inside a tile has another one, and three of
    four portions are taken to do so."""
    return tiles_ns * (target + 3 * item_segments // 4) // max(num_segments, 1)


@njit
def memory_tokens(once, common, again, l2_tokens):
    """Tokens read from memory: each token once, and again if it is shared and the L2 cache no longer holds it."""
    return once + again * max(common - l2_tokens, 0) // max(common, 1)


@njit
def listed_segments(num_segments, num_items, stage):
    """An upper bound of the segment list of a stage: all private segments of a tile may go to one subtile."""
    listed = num_segments
    if stage.subtiles > 1:
        listed = num_segments * stage.subtiles + num_items * stage.subtiles * stage.private_segments
    return listed


@njit
def load_ns(load, tile, costs, is_flat, is_last):
    """Predicted time of a launch in ns: the time of its SMs, of its longest item or of its memory traffic, whichever is
    the most. The costs of the launch itself and of the partial results are added.

    A round is one item for each slot. The items of a last round that is not full are too few to keep memory busy, so
    that round takes as long as a single item. The same holds for a single round that is not full. is_flat: the tile
    has no subtiles; is_last: no later launch of the candidate reads the partial results, so a merge launch does.
    """
    items, slots = load.num_items, tile.num_slots
    tokens = max(load.tokens, 1)
    read_tokens = max(load.memory_tokens, tokens * costs.l2_percent // 100)
    percent = 100 + costs.idle_percent * max(slots - items, 0) // slots
    bytes_ns = read_tokens * costs.token_bytes * 1000 // costs.bytes_per_us * percent // tile.read_percent
    if items <= slots:  # each item has more of its SM to itself, unless several meet on one SM
        meeting = (items * tile.ctas_per_sm + slots - 1) // slots
        longest_ns = load.max_item_ns * meeting * costs.arithmetic_percent // (100 * tile.ctas_per_sm)
        busy_ns = max(load.max_item_ns * items // slots, longest_ns)
        if is_flat:
            waiting_ns = max(load.max_chain_ns - costs.filled_ns, 0)
            waiting_ns = waiting_ns * min(load.memory_tokens, tokens) // (3 * tokens)
            bytes_ns = max(bytes_ns, load.max_chain_ns + waiting_ns)
    else:
        mean_ns = load.work_ns // items
        rounds_ns = (items + slots - 1) // slots * mean_ns
        busy_ns = max(load.work_ns // slots + load.max_item_ns - mean_ns, rounds_ns)
        busy_ns += (items + slots - 1) // slots * tile.item_ns
    left = items % slots
    if left > 0:
        bytes_ns = bytes_ns * (items - left) // items + max(bytes_ns * left // items, load.max_chain_ns)
    arithmetic_ns = max(busy_ns, load.max_chain_ns)
    total_ns = max(arithmetic_ns, bytes_ns) + costs.launch_ns
    if items > slots:
        total_ns += min(arithmetic_ns, bytes_ns) // costs.unhidden_part
    if is_last and load.num_partials > 0:
        total_ns += costs.launch_ns
    return total_ns + load.num_partials * costs.partial_bytes * 1000 // costs.bytes_per_us


@njit
def tiles_of(num_queries, stage):
    """Number of tiles of a stage. Some of them may have nothing to read."""
    return (num_queries + stage.height - 1) // stage.height


@njit
def stage_blocks(forest, entries, stage, window, segment_size):
    """[tiles with segments, BLOCK_COLUMNS]. The full blocks are those of nodes that hold the whole tile."""
    indptr, nodes, num_segments = stage_nodes(forest, entries, stage, window, segment_size)
    blocks = np.zeros((len(indptr) - 1, BLOCK_COLUMNS), np.int64)
    height = stage.height // stage.subtiles
    private = np.zeros(stage.subtiles, np.int64)
    for tile in range(len(blocks)):
        first, last = tile * stage.height, min((tile + 1) * stage.height, len(entries.query))
        whole = np.int64(0)
        private[:] = 0
        for i in range(indptr[tile], indptr[tile + 1]):
            low, high = max(entries.node_start[nodes[i]], first), min(entries.node_end[nodes[i]], last)
            if low == first and high == last:
                whole += num_segments[i]
            else:
                for subtile in range((low - first) // height, (high - 1 - first) // height + 1):
                    private[subtile] += num_segments[i]
        blocks[tile, FULL_BLOCKS], blocks[tile, MASKED_BLOCKS] = tile_blocks(whole, private.max(), stage)
        blocks[tile, NUM_SEGMENTS] = num_segments[indptr[tile] : indptr[tile + 1]].sum()
        blocks[tile, NUM_ENTRIES] = last - first
    return blocks[blocks[:, NUM_SEGMENTS] > 0]


@njit
def shared_tokens(forest, entries, least):
    """Returns two arrays [entries]: tokens that an entry shares with the entry before it, as far as that one sees them;
    and tokens of its path in nodes of at least `least` entries."""
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


@njit
def stage_tokens(position, shared, tall, stage, window):
    """(once, common, again): distinct tokens that a stage reads; those of them that two tiles or more share; and tokens
    that later tiles read again.

    Of an entry's path, a tall stage takes the leading tokens, in nodes of many entries; a low stage takes the others.
    """
    once, common, again = np.int64(0), np.int64(0), np.int64(0)
    carried = np.int64(0)  # tokens that all entries have shared since before the last tile began
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


@njit
def stage_loads(forest, entries, stages, l2_tokens, window, segment_size):
    """The loads of `stages` [stages, fields of Stage]. How they are cut is ignored."""
    most = np.int64(0)
    for i in range(len(stages)):
        most += tiles_of(np.int64(len(entries.query)), stage_of(stages[i]))
    blocks = np.empty((most, BLOCK_COLUMNS), np.int64)
    indptr = np.zeros(len(stages) + 1, np.int64)
    memory = np.zeros(len(stages), np.int64)
    for i in range(len(stages)):
        stage = stage_of(stages[i])
        found = stage_blocks(forest, entries, stage, window, segment_size)
        indptr[i + 1] = indptr[i] + len(found)
        blocks[indptr[i] : indptr[i + 1]] = found
        shared, tall = shared_tokens(forest, entries, stage.least if stage.least > 1 else stage.below)
        once, common, again = stage_tokens(entries.position, shared, tall, stage, window)
        memory[i] = memory_tokens(once, common, again, l2_tokens)
    return StageLoads(blocks[: indptr[-1]], indptr, memory, len(entries.query))


@njit
def launched_stage(stages, launch):
    """The stage of a launch of a candidate, cut as the launch says. launch: [LAUNCH_COLUMNS]."""
    return cut_stage(stage_of(stages[launch[LAUNCH_STAGE]]), launch[LAUNCH_SPLITS], launch[LAUNCH_ITEM])


@njit
def tile_times(costs, tile_index):
    """The times of a tile of the rule."""
    full, masked, full_chain, masked_chain, num_slots, ctas_per_sm, read_percent, own = costs.tiles[tile_index]
    return TileTimes(
        full_ns=full,
        masked_ns=masked,
        full_chain_ns=full_chain,
        masked_chain_ns=masked_chain,
        num_slots=num_slots,
        ctas_per_sm=ctas_per_sm,
        read_percent=read_percent,
        item_ns=own,
    )


@njit
def stage_ns(blocks, memory, num_queries, stage, tile_index, last, costs):
    """Predicted time of a stage in ns. blocks: see `stage_blocks`; memory: tokens read from memory; num_queries: query
    tokens, each of which leaves a partial unless the stage is the last."""
    tile = tile_times(costs, tile_index)
    total, block, own = blocks[:, NUM_SEGMENTS].sum(), stage.block_segments, stage.item_segments
    target = target_of(total, tiles_of(num_queries, stage), stage.num_splits, block, own)
    items, work, chains, partials, before = np.int64(0), np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    max_item, max_chain = np.int64(0), np.int64(0)
    for i in range(len(blocks)):
        full, masked, segments = blocks[i, FULL_BLOCKS], blocks[i, MASKED_BLOCKS], blocks[i, NUM_SEGMENTS]
        step = step_of(segments, target, block, own)
        splits = splits_of(segments, lead_of(step, before, own), step)
        cost = item_ns(full, masked, splits, stage.subtiles, tile.full_ns, tile.masked_ns)
        chain = item_ns(full, masked, splits, stage.subtiles, tile.full_chain_ns, tile.masked_chain_ns)
        items, work, chains = items + splits, work + cost * splits, chains + chain * splits
        max_item, max_chain = max(max_item, cost), max(max_chain, chain)
        partials += splits * blocks[i, NUM_ENTRIES] if splits > 1 else 0
        before += pitch_of(segments, block, own)
    if own > 0:
        items = (before + target - 1) // target
        max_item, max_chain = portion_ns(work, total, target, own), portion_ns(chains, total, target, own)
    if not last:
        partials = np.int64(num_queries)
    load = StageLoad(
        num_items=items,
        work_ns=work,
        max_item_ns=max_item,
        max_chain_ns=max_chain,
        num_partials=partials,
        tokens=total * costs.segment_size,
        memory_tokens=np.int64(memory),
    )
    return load_ns(load, tile, costs, stage.subtiles == 1, last)


@njit
def tilings_ns(loads, stages, launches, costs):
    """[candidates] predicted time of each candidate in ns. launches: [candidates, launches, LAUNCH_COLUMNS]."""
    times = np.zeros(len(launches), np.int64)
    for candidate in range(len(launches)):
        for nth in range(2):
            stage_index = launches[candidate, nth, LAUNCH_STAGE]
            if stage_index < 0 or loads.indptr[stage_index] == loads.indptr[stage_index + 1]:
                continue
            stage = launched_stage(stages, launches[candidate, nth])
            blocks = loads.blocks[loads.indptr[stage_index] : loads.indptr[stage_index + 1]]
            memory, tile_index = loads.memory[stage_index], launches[candidate, nth, LAUNCH_TILE]
            last = nth == 1 or launches[candidate, 1, LAUNCH_STAGE] < 0
            times[candidate] += stage_ns(blocks, memory, loads.num_queries, stage, tile_index, last, costs)
    return times


@njit
def tilings_fit(loads, stages, launches, limits):
    """[candidates] whether each candidate surely keeps within the limits [3] of items, segments and partials. If it has
    two stages, each gets half of them. The bound assumes that every item of a tile holds all of its entries, and that
    all segments are dealt to one subtile."""
    fit = np.ones(len(launches), np.bool_)
    for candidate in range(len(launches)):
        num_launches = 2 if launches[candidate, 1, LAUNCH_STAGE] >= 0 else 1
        for nth in range(num_launches):
            stage_index, stage = (
                launches[candidate, nth, LAUNCH_STAGE],
                launched_stage(stages, launches[candidate, nth]),
            )
            blocks = loads.blocks[loads.indptr[stage_index] : loads.indptr[stage_index + 1]]
            total, block, own = blocks[:, NUM_SEGMENTS].sum(), stage.block_segments, stage.item_segments
            target = target_of(total, tiles_of(loads.num_queries, stage), stage.num_splits, block, own)
            items, partials, before = np.int64(0), np.int64(0), np.int64(0)
            for tile in range(len(blocks)):
                segments = blocks[tile, NUM_SEGMENTS]
                step = step_of(segments, target, block, own)
                count = splits_of(segments, lead_of(step, before, own), step)
                items += count
                if count > 1 or num_launches > 1:
                    partials += count * blocks[tile, NUM_ENTRIES]
                before += pitch_of(segments, block, own)
            listed = listed_segments(total, items, stage)
            most = limits // num_launches
            fit[candidate] &= items <= most[0] and listed <= most[1] and partials <= most[2]
    return fit
