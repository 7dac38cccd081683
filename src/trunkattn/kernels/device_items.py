"""Planning on the device, last steps: items, partial slots and merges, and the lists (`planner.tiles.finish`, `nest`).

Items are numbered as the host emits them: by stage, tile and part. Of each it is enough to know which runs of its tile
it takes; which queries those concern, and how many of them lead without a mask, follows from the tile's nodes.
"""

import triton
import triton.language as tl

from trunkattn.kernels.device_choice import (
    CUT_FIELDS,
    CUT_ITEMS,
    CUT_SHARE,
    KIND_COLUMNS,
    KIND_SUBTILE_ENTRIES,
    USE_COLUMNS,
    USE_KIND,
    USE_STAGE,
    chosen,
    parts_of,
)
from trunkattn.kernels.device_order import BIG, MANY_ITEMS, MANY_SLOTS, NUM_ENTRIES, NUM_TOKENS, flag, in_turn
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
    STAGE_COLUMNS,
    SUBTILES,
    TILE_FIELDS,
    TILE_RUNS,
)

# Fields of an item, arrays of the most items
ITEM_NTH = tl.constexpr(0)  # stage of the tiling, 0 or 1
ITEM_ENTRY = tl.constexpr(1)  # first entry of its tile
ITEM_TILE = tl.constexpr(2)  # first item of its tile
ITEM_BEGIN = tl.constexpr(3)  # runs of the tile [BEGIN, END)
ITEM_END = tl.constexpr(4)
ITEM_LOW = tl.constexpr(5)  # entries of the tile [LOW, HIGH)
ITEM_HIGH = tl.constexpr(6)
ITEM_FULL = tl.constexpr(7)  # leading runs without a mask
ITEM_SIZE = tl.constexpr(8)  # runs that it lists
ITEM_UNCUT = tl.constexpr(9)
ITEM_BUCKET = tl.constexpr(10)
ITEM_FIELDS = tl.constexpr(11)

# Arrays by query token
TALL_PIECES = tl.constexpr(0)  # items of the tiling's first stage that hold it
LOW_PIECES = tl.constexpr(1)  # of its second
FUSED = tl.constexpr(2)  # whether an item merges them
FIRST_SLOT = tl.constexpr(3)
PIECE_FIELDS = tl.constexpr(4)


@triton.jit
def count_items(cuts, way, max_items):
    """(items of the first stage, items) of a tiling, as far as they are held."""
    split = tl.load(cuts + way * 2 * CUT_FIELDS + CUT_ITEMS)
    total = split + tl.load(cuts + (way * 2 + 1) * CUT_FIELDS + CUT_ITEMS)
    return split, tl.minimum(total, max_items)


@triton.jit
def touching(first, stop, low, subtile, subtile_entries):
    """Whether a node's entries [first, stop) are in a subtile of an item whose entries begin at `low`."""
    return ((first - low) // subtile_entries <= subtile) & ((stop - 1 - low) // subtile_entries >= subtile)


@triton.jit
def _item(nodes, rows, begin, end, shape, kind, ENTRIES: tl.constexpr, NODES: tl.constexpr,
          MOST_SUBTILES: tl.constexpr):  # fmt: skip
    """(first and end entry, leading runs without a mask, runs listed) of the runs [begin, end) of a tile."""
    block_runs, subtiles = tl.load(shape + BLOCK_RUNS), tl.load(shape + SUBTILES)
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
        entries = tl.load(kind + KIND_SUBTILE_ENTRIES).to(tl.int32)
        block = tl.load(shape + PRIVATE_RUNS)
        left = tl.where(here, tl.maximum(b - tl.maximum(a, begin + leading), 0), 0)
        longest = 0
        for subtile in tl.static_range(MOST_SUBTILES):
            touches = touching(first, stop, low, subtile, entries) & (subtile < subtiles)
            longest = tl.maximum(longest, tl.sum(tl.where(touches, left, 0), 0))
        size = leading + tl.cdiv(longest, block) * block * subtiles
    return low, high, leading, size


@triton.jit
def items_kernel(
    entry_token, state, stages, uses, kinds, nodes, tiles, times, cuts, item_starts, items, pieces, errors, max_items,
    ENTRIES: tl.constexpr, NODES: tl.constexpr, NUM_WAYS: tl.constexpr, WAYS: tl.constexpr,
    MOST_SUBTILES: tl.constexpr, BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """Every item of the chosen tiling: items [ITEM_FIELDS, max_items], and the pieces of each query token."""
    in_turn(FOLLOWS, LEADS)
    way = chosen(times, NUM_WAYS, WAYS)
    num_entries = tl.load(state + NUM_ENTRIES)
    split, num_items = count_items(cuts, way, max_items)
    if tl.program_id(0) == 0:
        wanted = split + tl.load(cuts + (way * 2 + 1) * CUT_FIELDS + CUT_ITEMS)
        flag(errors, tl.where(wanted > max_items, MANY_ITEMS, 0))
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        nth = tl.where(item >= split, 1, 0)
        use = uses + (way * 2 + nth) * USE_COLUMNS
        stage, kind = tl.load(use + USE_STAGE), kinds + tl.load(use + USE_KIND) * KIND_COLUMNS
        shape = stages + stage * STAGE_COLUMNS
        height = tl.load(shape + HEIGHT)
        starts = item_starts + (way * 2 + nth) * ENTRIES
        tile = -1  # the last one that begins no later
        for begin in range(0, tl.cdiv(num_entries, height), BLOCK):
            some = begin + tl.arange(0, BLOCK)
            start = tl.load(starts + some, mask=some < tl.cdiv(num_entries, height), other=BIG)
            tile += tl.sum((start <= item - tl.where(nth == 1, split, 0)).to(tl.int32), 0)
        first_item = tl.load(starts + tile) + tl.where(nth == 1, split, 0)
        runs = tl.load(tiles + (stage * TILE_FIELDS + TILE_RUNS) * ENTRIES + tile)
        share = tl.load(cuts + (way * 2 + nth) * CUT_FIELDS + CUT_SHARE)
        step, count = parts_of(runs, share, tl.load(shape + BLOCK_RUNS))
        begin = (item - first_item) * step
        end = tl.minimum(begin + step, runs)
        entry = tile * height
        low, high, full, size = _item(
            nodes + stage * NODE_FIELDS * 2 * ENTRIES + 2 * entry, tl.minimum(height, num_entries - entry), begin, end,
            shape, kind, ENTRIES, NODES, MOST_SUBTILES,
        )  # fmt: skip
        to = items + item
        tl.store(to + ITEM_NTH * max_items, nth)
        tl.store(to + ITEM_ENTRY * max_items, entry)
        tl.store(to + ITEM_TILE * max_items, first_item)
        tl.store(to + ITEM_BEGIN * max_items, begin)
        tl.store(to + ITEM_END * max_items, end)
        tl.store(to + ITEM_LOW * max_items, low)
        tl.store(to + ITEM_HIGH * max_items, high)
        tl.store(to + ITEM_FULL * max_items, full)
        tl.store(to + ITEM_SIZE * max_items, size)
        tl.store(to + ITEM_UNCUT * max_items, tl.where(count == 1, 1, 0))
        i = tl.arange(0, NODES // 2)
        token = tl.load(entry_token + entry + low + i, mask=i < high - low, other=0)
        tl.atomic_add(pieces + nth * ENTRIES + token, 1, mask=i < high - low)


@triton.jit
def several_pieces(pieces, token, used, ENTRIES: tl.constexpr):
    """Pieces of query tokens, 0 where one item writes the final output."""
    count = tl.load(pieces + TALL_PIECES * ENTRIES + token, mask=used, other=0)
    count += tl.load(pieces + LOW_PIECES * ENTRIES + token, mask=used, other=0)
    return tl.where(count > 1, count, 0)


@triton.jit
def slots_kernel(
    entry_token, state, uses, times, cuts, items, pieces, errors, max_items, max_slots, fuse_up_to, num_kinds,
    ENTRIES: tl.constexpr, NODES: tl.constexpr, NUM_WAYS: tl.constexpr, WAYS: tl.constexpr, BLOCK: tl.constexpr,
    FOLLOWS: tl.constexpr, LEADS: tl.constexpr,
):  # fmt: skip
    """The bucket of every item, whether an item merges a token's pieces, and the first slot of each token. Only a low
    tile that is not cut can hold the last piece of all its queries when there are others."""
    in_turn(FOLLOWS, LEADS)
    way = chosen(times, NUM_WAYS, WAYS)
    _, num_items = count_items(cuts, way, max_items)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        of = items + item
        nth = tl.load(of + ITEM_NTH * max_items)
        low, high = tl.load(of + ITEM_LOW * max_items), tl.load(of + ITEM_HIGH * max_items)
        last = (nth == 1) & (tl.load(of + ITEM_UNCUT * max_items) == 1)
        i = tl.arange(0, NODES // 2)
        used = i < tl.where(last, high - low, 0)
        token = tl.load(entry_token + tl.load(of + ITEM_ENTRY * max_items) + low + i, mask=used, other=0)
        others = tl.load(pieces + TALL_PIECES * ENTRIES + token, mask=used, other=0)
        most = tl.max(others, 0)
        merges = (most > 0) & (most <= fuse_up_to)
        fused = tl.where(merges, others, 0) > 0
        tl.store(pieces + FUSED * ENTRIES + token, tl.full([NODES // 2], 1, tl.int32), mask=fused)
        kind = tl.load(uses + (way * 2 + nth) * USE_COLUMNS + USE_KIND)
        tl.store(of + ITEM_BUCKET * max_items, kind + tl.where(merges, num_kinds, 0))
    num_tokens = tl.load(state + NUM_TOKENS)
    for block in range(tl.program_id(0), tl.cdiv(num_tokens, BLOCK), tl.num_programs(0)):
        before = 0
        for begin in range(0, block * BLOCK, BLOCK):
            before += tl.sum(several_pieces(pieces, begin + tl.arange(0, BLOCK), True, ENTRIES), 0)
        token = block * BLOCK + tl.arange(0, BLOCK)
        count = several_pieces(pieces, token, token < num_tokens, ENTRIES)
        ends = before + tl.cumsum(count, 0)
        tl.store(pieces + FIRST_SLOT * ENTRIES + token, ends - count, mask=token < num_tokens)
        flag(errors, tl.where(tl.max(ends, 0) > max_slots, MANY_SLOTS, 0))
