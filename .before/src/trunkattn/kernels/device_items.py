"""Planning on the device, fourth step: the items, and which of them merge (`planner.tiles.finish`, `nest`).

Items are numbered as the host emits them: by stage, tile and part. Of each it is enough to know which runs of its tile
it takes; which queries those concern, and how many of them lead without a mask, follows from the tile's nodes.
"""

import triton
import triton.language as tl

from trunkattn.kernels.device_choice import (
    CUT_FIELDS,
    CUT_ITEMS,
    CUT_SHARE,
    USE_COLUMNS,
    USE_KIND,
    USE_SHAPE,
    USE_STAGE,
    USE_SUBTILE_ENTRIES,
    chosen,
    parts_of,
)
from trunkattn.kernels.device_order import BIG, MANY_ITEMS, NUM_ENTRIES, NUM_ITEMS, NUMBERS, flag, in_turn
from trunkattn.kernels.device_summary import summarize
from trunkattn.kernels.device_tiles import (
    BLOCK_RUNS,
    HEIGHT,
    NODE_FIELDS,
    NODE_FULL,
    NODE_FULL_END,
    NODE_OFFSET,
    NODE_ROWS,
    NODE_RUNS,
    PRIVATE_RUNS,
    SUBTILES,
    TILE_FIELDS,
    TILE_RUNS,
)

# Fields of an item, arrays of the most items
ITEM_USE = tl.constexpr(0)  # of a stage by the tiling, even for its first
ITEM_ENTRY = tl.constexpr(1)  # first entry of its tile
ITEM_TILE = tl.constexpr(2)  # first item of its tile
ITEM_BEGIN = tl.constexpr(3)  # runs of the tile [BEGIN, END)
ITEM_END = tl.constexpr(4)
ITEM_LOW = tl.constexpr(5)  # entries of the tile [LOW, HIGH)
ITEM_HIGH = tl.constexpr(6)
ITEM_FULL = tl.constexpr(7)  # leading runs without a mask
ITEM_SIZE = tl.constexpr(8)  # runs that it lists
ITEM_BUCKET = tl.constexpr(9)
ITEM_NODES = tl.constexpr(10)  # where its tile's nodes begin
ITEM_ROWS = tl.constexpr(11)  # entries of its tile
ITEM_SUBTILES = tl.constexpr(12)
ITEM_FIELDS = tl.constexpr(13)

# Arrays by query token
TALL_PIECES = tl.constexpr(0)  # items of the tiling's first stage that hold it
LOW_PIECES = tl.constexpr(1)  # of its second
FUSED = tl.constexpr(2)  # whether an item merges them
PIECE_FIELDS = tl.constexpr(3)


@triton.jit
def _cut_of(use, uses, cuts):
    """A tiling's use of a stage: (its items, runs of one, stage, kind, height, runs of a block, subtiles, runs of a
    private block, entries of a subtile)."""
    cut, of = cuts + use * CUT_FIELDS, uses + use * USE_COLUMNS
    shape = of + USE_SHAPE
    return (
        tl.load(cut + CUT_ITEMS), tl.load(cut + CUT_SHARE), tl.load(of + USE_STAGE), tl.load(of + USE_KIND),
        tl.load(shape + HEIGHT), tl.load(shape + BLOCK_RUNS), tl.load(shape + SUBTILES), tl.load(shape + PRIVATE_RUNS),
        tl.load(of + USE_SUBTILE_ENTRIES),
    )  # fmt: skip


@triton.jit
def _one_of(second, tall, low):
    """The cut that an item is of. Both are loaded before that is known, so that it need not be waited for."""
    return (
        tl.where(second, low[0], tall[0]), tl.where(second, low[1], tall[1]), tl.where(second, low[2], tall[2]),
        tl.where(second, low[3], tall[3]), tl.where(second, low[4], tall[4]), tl.where(second, low[5], tall[5]),
        tl.where(second, low[6], tall[6]), tl.where(second, low[7], tall[7]), tl.where(second, low[8], tall[8]),
    )  # fmt: skip


@triton.jit
def touching(first, stop, low, subtile, subtile_entries):
    """Whether a node's entries [first, stop) are in a subtile of an item whose entries begin at `low`."""
    return ((first - low) // subtile_entries <= subtile) & ((stop - 1 - low) // subtile_entries >= subtile)


@triton.jit
def _item(nodes, rows, begin, end, cut, ENTRIES: tl.constexpr, NODES: tl.constexpr, MOST_SUBTILES: tl.constexpr):
    """(first and end entry, leading runs without a mask, runs listed) of the runs [begin, end) of a tile."""
    _items, _share, _stage, _kind, _height, block_runs, subtiles, block, subtile_entries = cut
    k = tl.arange(0, NODES)
    used = k < 2 * rows
    packed = tl.load(nodes + NODE_ROWS * 2 * ENTRIES + k, mask=used, other=0)
    offset = tl.load(nodes + NODE_OFFSET * 2 * ENTRIES + k, mask=used, other=0)
    runs = tl.load(nodes + NODE_RUNS * 2 * ENTRIES + k, mask=used, other=0)
    full = tl.load(nodes + NODE_FULL * 2 * ENTRIES + k, mask=used, other=0)
    full_end = tl.load(nodes + NODE_FULL_END * 2 * ENTRIES + k, mask=used, other=0)
    first, stop = packed & 255, packed >> 8
    a, b = tl.maximum(offset, begin), tl.minimum(offset + runs, end)
    here = a < b
    low, high = tl.min(tl.where(here, first, 255), 0), tl.max(tl.where(here, stop, 0), 0)
    unmasked = (first == low) & (stop == high) & (a >= full) & (a < full_end)
    masked_from = tl.where(unmasked, tl.where(full_end < b, full_end, BIG), a)
    leading = tl.minimum(tl.min(tl.where(here, masked_from, BIG), 0), end) - begin
    leading = leading // block_runs * block_runs
    size = end - begin
    if subtiles > 1:
        left = tl.where(here, tl.maximum(b - tl.maximum(a, begin + leading), 0), 0)
        longest = 0
        for subtile in tl.static_range(MOST_SUBTILES):
            touches = touching(first, stop, low, subtile, subtile_entries) & (subtile < subtiles)
            longest = tl.maximum(longest, tl.sum(tl.where(touches, left, 0), 0))
        size = leading + tl.cdiv(longest, block) * block * subtiles
    return low, high, leading, size


@triton.jit
def _tall_pieces(
    at, first, end, cut, num_entries, nodes, tiles,
    ENTRIES: tl.constexpr, NODES: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Items of the tiling's first stage that hold each entry of [first, end), a few parts of a tile at a time."""
    _items, share, stage, _kind, height, block_runs, _subtiles, _block, _subtile_entries = cut
    of = nodes + stage * NODE_FIELDS * 2 * ENTRIES
    k = tl.arange(0, NODES)
    found = tl.zeros([NODES // 2], tl.int32)
    for tile in range(first // height, tl.cdiv(end, height)):
        begin = tile * height
        used = k < 2 * tl.minimum(height, num_entries - begin)
        packed = tl.load(of + NODE_ROWS * 2 * ENTRIES + 2 * begin + k, mask=used, other=0)[:, None]
        offset = tl.load(of + NODE_OFFSET * 2 * ENTRIES + 2 * begin + k, mask=used, other=0)[:, None]
        length = tl.load(of + NODE_RUNS * 2 * ENTRIES + 2 * begin + k, mask=used, other=0)[:, None]
        runs = tl.load(tiles + (stage * TILE_FIELDS + TILE_RUNS) * ENTRIES + tile)
        step, count = parts_of(runs, share, block_runs)
        for part in range(0, count, PARTS):
            from_run = (part + tl.arange(0, PARTS)[None, :]) * step
            here = tl.maximum(offset, from_run) < tl.minimum(offset + length, from_run + step)
            low = begin + tl.min(tl.where(here, packed & 255, 255), 0)
            high = begin + tl.max(tl.where(here, packed >> 8, 0), 0)
            found += tl.sum(((low[None, :] <= at[:, None]) & (at[:, None] < high[None, :])).to(tl.int32), 1)
    return found


@triton.jit(do_not_specialize=NUMBERS)
def items_kernel(
    seq_lens, query_start_loc, num_rows, row_tokens, max_tokens, max_query_len, window,  # the batch
    entry_token, state, uses, nodes, tiles, totals, times, cuts, item_starts, items, pieces, errors, summary, max_items,
    fuse_up_to, num_kinds,
    ENTRIES: tl.constexpr, NODES: tl.constexpr, NUM_WAYS: tl.constexpr, WAYS: tl.constexpr,
    MOST_SUBTILES: tl.constexpr, BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Every item of the chosen tiling: items [ITEM_FIELDS, max_items], and the pieces of each query token. Only a low
    tile that is not cut can hold the last piece of all its queries when there are others, and, of the lowest kind,
    merge them. The last program, which often has no item, sums up the plan."""
    in_turn(FOLLOWS, LEADS)
    way = chosen(times, NUM_WAYS, WAYS)
    num_entries = tl.load(state + NUM_ENTRIES)
    tall, low_cut = _cut_of(way * 2, uses, cuts), _cut_of(way * 2 + 1, uses, cuts)
    split = tall[0]
    num_items = tl.minimum(split + low_cut[0], max_items)
    if tl.program_id(0) == 0:
        tl.store(state + NUM_ITEMS, num_items)
        flag(errors, tl.where(split + low_cut[0] > max_items, MANY_ITEMS, 0))
    if tl.program_id(0) == tl.num_programs(0) - 1:
        batch = (seq_lens, query_start_loc, num_rows, row_tokens, max_tokens, max_query_len)
        summarize(way, batch, uses, totals, summary, window, BLOCK)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        nth = tl.where(item >= split, 1, 0)
        cut, skipped = _one_of(nth == 1, tall, low_cut), tl.where(nth == 1, split, 0)
        _items, share, stage, kind, height, block_runs, subtiles, _block, _subtile_entries = cut
        starts = item_starts + (way * 2 + nth) * ENTRIES
        tile = -1  # the last one that begins no later
        for begin in range(0, tl.cdiv(num_entries, height), BLOCK):
            some = begin + tl.arange(0, BLOCK)
            start = tl.load(starts + some, mask=some < tl.cdiv(num_entries, height), other=BIG)
            tile += tl.sum((start <= item - skipped).to(tl.int32), 0)
        entry = tile * height
        rows, its_nodes = tl.minimum(height, num_entries - entry), stage * NODE_FIELDS * 2 * ENTRIES + 2 * entry
        i = tl.arange(0, NODES // 2)
        token = tl.load(entry_token + entry + i, mask=i < rows, other=0)
        first_item = tl.load(starts + tile) + skipped
        runs = tl.load(tiles + (stage * TILE_FIELDS + TILE_RUNS) * ENTRIES + tile)
        step, count = parts_of(runs, share, block_runs)
        begin = (item - first_item) * step
        end = tl.minimum(begin + step, runs)
        low, high, full, size = _item(nodes + its_nodes, rows, begin, end, cut, ENTRIES, NODES, MOST_SUBTILES)
        holds = (low <= i) & (i < high)
        tl.atomic_add(pieces + nth * ENTRIES + token, 1, mask=holds, sem="relaxed")
        to = items + item
        tl.store(to + ITEM_USE * max_items, way * 2 + nth)
        tl.store(to + ITEM_ENTRY * max_items, entry)
        tl.store(to + ITEM_TILE * max_items, first_item)
        tl.store(to + ITEM_BEGIN * max_items, begin)
        tl.store(to + ITEM_END * max_items, end)
        tl.store(to + ITEM_LOW * max_items, low)
        tl.store(to + ITEM_HIGH * max_items, high)
        tl.store(to + ITEM_FULL * max_items, full)
        tl.store(to + ITEM_SIZE * max_items, size)
        tl.store(to + ITEM_NODES * max_items, its_nodes)
        tl.store(to + ITEM_ROWS * max_items, rows)
        tl.store(to + ITEM_SUBTILES * max_items, subtiles)
        merges = 0
        if (nth == 1) & (count == 1) & (kind == 0):
            others = _tall_pieces(
                entry + i, entry + low, entry + high, tall, num_entries, nodes, tiles, ENTRIES, NODES, 16
            )
            others = tl.where(holds, others, 0)
            most = tl.max(others, 0)
            merges = ((most > 0) & (most <= fuse_up_to)).to(tl.int32)
            fused = tl.where(merges > 0, others, 0) > 0
            tl.store(pieces + FUSED * ENTRIES + token, tl.full([NODES // 2], 1, tl.int32), mask=fused)
        tl.store(to + ITEM_BUCKET * max_items, kind + merges * num_kinds)


@triton.jit
def several_pieces(pieces, token, used, ENTRIES: tl.constexpr):
    """Pieces of query tokens, 0 where one item writes the final output."""
    count = tl.load(pieces + TALL_PIECES * ENTRIES + token, mask=used, other=0)
    count += tl.load(pieces + LOW_PIECES * ENTRIES + token, mask=used, other=0)
    return tl.where(count > 1, count, 0)
