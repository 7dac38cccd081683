"""Planning on the device, second step: the tiles of every stage, and what they cost (`planner.tiles`).

A stage's tile holds consecutive entries, so of the forest it needs only what separates those: between two entries
stands the number of tokens that they share. A node of the forest, clipped to the tile, is a range of entries whose
separators are no lower than its end; nodes that are clipped to the same entries stand one after the other and are taken
as one. A tile therefore has at most two nodes for each entry, found from all pairs of them (`_nodes`).
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trunkattn.gpu.device_planner.common import BIG, NUMBERS, counts_of, fields_at, load_row, trigger_and_wait
from trunkattn.gpu.device_planner.formulas import tile_blocks
from trunkattn.planner.tiles.layout import Stage

_STAGE_COLUMNS = tl.constexpr(len(Stage._fields))


class Layout(NamedTuple):
    """The tiles of all stages. Its arrays are nodes [stages, NODE_FIELDS, 2 * tokens], tiles [stages, TILE_FIELDS,
    tokens], and totals [stages, TOTAL_FIELDS], which are sums over the tiles."""

    nodes: Any
    tiles: Any
    totals: Any


class NodeArrays(NamedTuple):
    """The nodes of a stage's tiles. There is room for two for each entry, and the nodes of a tile stand from twice its
    first entry on."""

    rows: Any  # first entry of the tile | end << 8
    start: Any
    end: Any
    offset: Any
    segments: Any
    full: Any
    full_end: Any


NODE_FIELDS = tl.constexpr(len(NodeArrays._fields))


class Node(NamedTuple):
    """A node of a tile. The loads of fields that a kernel does not use are not compiled."""

    first: Any  # entry of the tile
    stop: Any
    start: Any  # first token that one of its entries sees
    end: Any
    offset: Any  # segments of the tile before it
    segments: Any
    full: Any  # the segments [full, full_end) of the tile are whole and seen by all of the node's entries
    full_end: Any


class TileArrays(NamedTuple):
    """The tiles of a stage."""

    segments: Any
    full: Any  # blocks that all of the tile sees
    masked: Any  # other blocks


TILE_FIELDS = tl.constexpr(len(TileArrays._fields))


class Totals(NamedTuple):
    """Sums over the tiles of a stage, int64. The last three count tokens as `planner.tiles.cost.stage_tokens` does."""

    segments: Any
    once: Any
    common: Any
    again: Any


TOTAL_FIELDS = tl.constexpr(len(Totals._fields))


@triton.jit
def load_stage(stages, stage):
    """Loads a row of the table of stages, whose columns are the fields of `Stage`."""
    return Stage(*load_row(stages + stage * _STAGE_COLUMNS, _STAGE_COLUMNS))


@triton.jit
def node_arrays(nodes, ENTRIES: tl.constexpr):
    """Returns the arrays from a tile's first node on. `nodes` points to that node in the first array of its stage."""
    return NodeArrays(*fields_at(nodes, 2 * ENTRIES, NODE_FIELDS))


@triton.jit
def first_node(stage, entry, ENTRIES: tl.constexpr):
    """Returns where the nodes of a tile begin. entry: the first entry of the tile."""
    return stage * NODE_FIELDS * 2 * ENTRIES + 2 * entry


@triton.jit
def load_nodes(arrays, k, used):
    """Loads nodes k of a tile. They have no segments where they are not `used`."""
    rows = tl.load(arrays.rows + k, mask=used, other=0)
    return Node(
        first=rows & 255,
        stop=rows >> 8,
        start=tl.load(arrays.start + k, mask=used, other=0),
        end=tl.load(arrays.end + k, mask=used, other=0),
        offset=tl.load(arrays.offset + k, mask=used, other=0),
        segments=tl.load(arrays.segments + k, mask=used, other=0),
        full=tl.load(arrays.full + k, mask=used, other=0),
        full_end=tl.load(arrays.full_end + k, mask=used, other=0),
    )


@triton.jit
def store_nodes(arrays, k, node, used):
    """Stores nodes k of a tile where they are `used`; `load_nodes` reads them back."""
    tl.store(arrays.rows + k, node.first | node.stop << 8, mask=used)
    tl.store(arrays.start + k, node.start, mask=used)
    tl.store(arrays.end + k, node.end, mask=used)
    tl.store(arrays.offset + k, node.offset, mask=used)
    tl.store(arrays.segments + k, node.segments, mask=used)
    tl.store(arrays.full + k, node.full, mask=used)
    tl.store(arrays.full_end + k, node.full_end, mask=used)


@triton.jit
def tile_arrays(tiles, stage, ENTRIES: tl.constexpr):
    """Returns the arrays of a stage."""
    return TileArrays(*fields_at(tiles + stage * TILE_FIELDS * ENTRIES, ENTRIES, TILE_FIELDS))


@triton.jit
def totals_of(totals, stage):
    """Returns pointers to the sums of a stage."""
    row = totals + stage * TOTAL_FIELDS
    return Totals(segments=row, once=row + 1, common=row + 2, again=row + 3)


@triton.jit
def _tile_of(task, num_tiles, LANES: tl.constexpr):
    """Returns the stage and the tile of a task. `num_tiles` says how many tiles each stage has. The tiles of all stages
    are numbered through."""
    stage = tl.sum((tl.cumsum(num_tiles, 0) <= task).to(tl.int32), 0)
    return stage, task - tl.sum(tl.where(tl.arange(0, LANES) < stage, num_tiles, 0), 0)


@triton.jit
def _tall_tokens(at, first, end, least, num_entries, shared, SIZES: tl.constexpr):
    """Returns how many tokens of each entry's path, counted from the start, belong to nodes of at least `least`
    entries. They are the most that any `least` consecutive entries, this one among them, have in common. `at` are the
    entries of [first, end)."""
    window = first - least + 1 + tl.arange(0, SIZES.windows)
    gap = tl.arange(0, SIZES.most_least)
    used = (window >= 0) & (window < end) & (window + least <= num_entries)
    separators = shared + window[:, None] + 1 + gap[None, :]
    common = tl.min(tl.load(separators, mask=used[:, None] & (gap < least - 1)[None, :], other=BIG), 1)
    common = tl.where(used, common, 0)
    holds = (window[None, :] <= at[:, None]) & (at[:, None] < window[None, :] + least)
    return tl.max(tl.where(holds, common[None, :], 0), 1)


@triton.jit
def _nodes(value, base, position, num_rows, window, SEGMENT_SIZE: tl.constexpr, NODES: tl.constexpr):
    """The nodes of a tile, a vector of NODES places.

    An odd place stands for an entry, and its value is the number of tokens on the entry's path. An even place stands
    for the separator before an entry, and its value is the number of tokens that the entry shares with the one before.

        value
         116          e0              e1              e2
          96           |      s1       |               |
          64           |       |       |      s2       |
           0   s0      |       |       |       |       |
        place   0      1       2       3       4       5

    Around each place lies the widest range of values that are no lower. It spans the entries of one node, whose tokens
    end at the place's value and begin at the greater of the two values that bound the range: around s1 lie e0 and e1,
    which share the tokens [64, 96); around e0 lies only itself, with the tokens [96, 116). Of equal values in one range
    the first stands for the node.

    Args:
        value: -1 where a place is not used.
        base: where the stage's part of an entry's path begins.
        position: of the entry, at both of its places.
        num_rows: entries of the tile.
    """
    place = tl.arange(0, NODES)
    other = place[None, :]
    lower = value[None, :] < value[:, None]
    left = tl.max(tl.where(lower & (other < place[:, None]), other, 0), 1)
    right = tl.min(tl.where(lower & (other > place[:, None]), other, 2 * num_rows), 1)
    inside = (other > left[:, None]) & (other < right[:, None])
    is_bound = (other == left[:, None]) | (other == right[:, None])
    parent_end = tl.max(tl.where(is_bound, value[None, :], 0), 1)
    earlier = inside & (other < place[:, None])
    is_repeated = tl.max((earlier & (value[None, :] == value[:, None])).to(tl.int32), 1)
    lowest = tl.min(tl.where(inside, position[None, :], BIG), 1)
    highest = tl.max(tl.where(inside, position[None, :], -1), 1)
    start = tl.maximum(tl.maximum(parent_end, base), lowest + 1 - window)
    end = tl.minimum(value, highest + 1)
    segments = tl.where((is_repeated == 0) & (start < end), tl.cdiv(end, SEGMENT_SIZE) - start // SEGMENT_SIZE, 0)
    first, stop = left // 2, right // 2
    before = (first[None, :] < first[:, None]) | ((first[None, :] == first[:, None]) & lower)
    offset = tl.sum(tl.where(before, segments[None, :], 0), 1)
    full = offset + tl.cdiv(tl.maximum(start, highest + 1 - window), SEGMENT_SIZE) - start // SEGMENT_SIZE
    full_end = offset + tl.minimum(end, lowest + 1) // SEGMENT_SIZE - start // SEGMENT_SIZE
    return Node(
        first=first, stop=stop, start=start, end=end, offset=offset, segments=segments, full=full, full_end=full_end
    )


@triton.jit
def _blocks(node, segments, num_rows, stage, SUBTILES: tl.constexpr):
    """Returns the blocks of keys of a tile that is not cut: how many all of it sees, and how many others there are."""
    height = tl.maximum(stage.height // stage.subtiles, 1)
    is_shared = (node.first == 0) & (node.stop == num_rows)
    shared_segments = tl.sum(tl.where(is_shared, segments, 0), 0)
    private_segments = 0
    for subtile in tl.static_range(SUBTILES):
        touches = (node.first // height <= subtile) & ((node.stop - 1) // height >= subtile)
        touches = touches & (subtile < stage.subtiles) & (is_shared == 0)
        private_segments = tl.maximum(private_segments, tl.sum(tl.where(touches, segments, 0), 0))
    return tile_blocks(shared_segments, private_segments, stage)


@triton.jit
def _tokens(at, used, tile, tall, stage, entries, window, NODES: tl.constexpr):
    """Returns (once, common, again) of a tile, as `planner.tiles.cost.stage_tokens` counts them. `at` are its entries,
    and `used` holds each of them once."""
    begin = tile * stage.height
    position = tl.load(entries.position + at, mask=used, other=0)
    previous = tl.load(entries.position + at - 1, mask=used & (at > 0), other=0)
    shared = tl.minimum(tl.load(entries.shared + at, mask=used, other=0), previous + 1)
    end = position + 1
    start = tl.maximum(end - window, 0)
    end = tl.where(stage.least > 1, tl.minimum(end, tall), end)
    start = tl.where(stage.below < BIG, tl.maximum(start, tall), start)
    once = tl.sum(tl.where(used, tl.maximum(end - tl.maximum(start, shared), 0), 0), 0)
    leads = used & (at == tl.where(tile > 0, begin, -1))
    crossing = tl.where(leads, tl.maximum(tl.minimum(end, shared) - start, 0), 0)
    back = begin - stage.height + tl.arange(0, NODES)
    inside = (back > 0) & (back <= tl.where(tile > 1, begin, 0))
    before = tl.minimum(
        tl.load(entries.shared + back, mask=inside, other=BIG),
        tl.load(entries.position + back - 1, mask=inside, other=BIG) + 1,
    )
    carried = tl.where(tile > 1, tl.min(before, 0), 0)
    common = crossing - tl.minimum(crossing, tl.maximum(carried - start, 0))
    return once, tl.sum(common, 0), tl.sum(crossing, 0)


@triton.jit(do_not_specialize=NUMBERS)
def tiles_kernel(entries, status, stages, layout, window, SIZES: tl.constexpr, PDL: tl.constexpr):
    """Finds every tile of every stage."""
    lane = tl.arange(0, SIZES.stage_lanes)
    heights = tl.load(stages + lane * _STAGE_COLUMNS, mask=lane < SIZES.stages, other=BIG)  # the first column
    # tiles of the whole capacity, which are known before the batch is
    most = tl.where(lane < SIZES.stages, tl.cdiv(SIZES.tokens, heights), 0)
    number, tile = _tile_of(tl.program_id(0), most, SIZES.stage_lanes)
    stage = load_stage(stages, number)
    begin = tile * stage.height
    k = tl.arange(0, SIZES.nodes)
    at = begin + k // 2
    trigger_and_wait(PDL)
    num_entries = tl.load(counts_of(status).num_entries)
    length = tl.load(entries.length + at, mask=at < SIZES.tokens, other=0)
    shared = tl.load(entries.shared + at, mask=at < SIZES.tokens, other=0)
    position = tl.load(entries.position + at, mask=at < SIZES.tokens, other=0)
    if begin >= num_entries:
        return
    num_rows = tl.minimum(stage.height, num_entries - begin)
    used = k < 2 * num_rows
    value = tl.where(k % 2 == 1, length, tl.where(k > 0, shared, -1))
    NODES: tl.constexpr = SIZES.nodes
    base, tall = tl.zeros([NODES], tl.int32), tl.zeros([NODES], tl.int32)
    if (stage.least > 1) | (stage.below < BIG):
        least = tl.where(stage.least > 1, stage.least, stage.below)
        tall = _tall_tokens(at, begin, begin + num_rows, least, num_entries, entries.shared, SIZES)
        base = tl.where(stage.least > 1, 0, tall)
        value = tl.where(stage.least > 1, tl.minimum(value, tall), value)
    value = tl.where(used, value, -1)
    node = _nodes(value, base, position, num_rows, window, SIZES.segment_size, SIZES.nodes)
    store_nodes(node_arrays(layout.nodes + first_node(number, begin, SIZES.tokens), SIZES.tokens), k, node, used)
    full, masked = _blocks(node, tl.where(used, node.segments, 0), num_rows, stage, SIZES.subtiles)
    is_entry = used & (k % 2 == 1)
    once, common, again = _tokens(at, is_entry, tile, tall, stage, entries, window, SIZES.nodes)
    arrays = tile_arrays(layout.tiles, number, SIZES.tokens)
    segments = tl.sum(node.segments, 0)
    tl.store(arrays.segments + tile, segments)
    tl.store(arrays.full + tile, full)
    tl.store(arrays.masked + tile, masked)
    _add_totals(totals_of(layout.totals, number), Totals(segments=segments, once=once, common=common, again=again))


@triton.jit
def _add_totals(to, totals):
    """Adds a tile's numbers in one instruction for the whole CTA."""
    field = tl.arange(0, TOTAL_FIELDS)
    value = tl.where(field == 0, totals.segments, tl.where(field == 1, totals.once, totals.again))
    value = tl.where(field == 2, totals.common, value).to(tl.int64)
    tl.atomic_add(to.segments + field, value, sem="relaxed")
