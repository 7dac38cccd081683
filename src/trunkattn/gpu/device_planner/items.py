"""Planning on the device, fourth step: the items, and which of them merge (`planner.tiles.layout`: `emit_stage`,
`nest`, `finish`).

Items are numbered as the host emits them: by launch, tile and split. Of each it is enough to know which segments of its
tile it takes; which queries those concern, and how many of them lead without a mask, follows from the tile's nodes.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from trunkattn.gpu.device_planner.common import (
    BIG,
    MANY_ITEMS,
    NUMBERS,
    counts_of,
    fields_at,
    flag,
    load_fields,
    trigger_and_wait,
)
from trunkattn.gpu.device_planner.cost import chosen, load_launch
from trunkattn.gpu.device_planner.formulas import splits_of, step_of
from trunkattn.gpu.device_planner.layout import first_node, load_nodes, node_arrays, tile_arrays
from trunkattn.gpu.device_planner.prefix_forest import Bounds
from trunkattn.gpu.device_planner.stats import summarize


class Item(NamedTuple):
    """The fields of an item, or pointers to these fields."""

    launch_number: Any  # row of the table of launches: even for the first launch of a candidate
    entry: Any  # first entry of its tile
    tile_item: Any  # first item of its tile
    begin: Any  # segments of the tile [begin, end)
    end: Any
    low: Any  # entries of the tile [low, high)
    high: Any
    full: Any  # leading segments without a mask
    size: Any  # segments that it lists
    bucket: Any
    nodes: Any  # first node of its tile
    rows: Any  # number of entries of its tile
    subtiles: Any


ITEM_FIELDS = tl.constexpr(len(Item._fields))


class PartialArrays(NamedTuple):
    """Arrays that hold the number of partials of each query token."""

    tall: Any  # items of the candidate's first launch that hold the query
    low: Any  # items of its second launch that hold it
    fused: Any  # whether an item merges them


class WorkArrays(NamedTuple):
    """The arrays that describe the work: items [ITEM_FIELDS, limits.items], partials [fields of PartialArrays, tokens],
    and the summary [3] of the plan."""

    items: Any
    partials: Any
    summary: Any


class TiledBatch(NamedTuple):
    """What the launches ahead leave: the entries of the batch, its status, the tiles of every stage, and the candidates
    with their times (`EntryArrays`, `Status`, `Layout`, `ChoiceArrays`)."""

    entries: Any
    status: Any
    layout: Any
    choice: Any


class Cut(NamedTuple):
    """A launch of the chosen candidate. From `stage` on the fields are those of `CandidateLaunch`."""

    num_items: Any
    target: Any  # segments that an item should have
    stage: Any
    tile_index: Any
    num_splits: Any
    item_segments: Any
    height: Any
    block_segments: Any
    subtiles: Any
    private_segments: Any
    subtile_entries: Any


class ItemRange(NamedTuple):
    """The segments [begin, end) of a tile that an item takes. The tile has `num_items` items, the first of which is
    `tile_item`."""

    tile_item: Any
    begin: Any
    end: Any
    num_items: Any


class Split(NamedTuple):
    """The part of a tile that an item computes. Its fields are those of `Item`."""

    low: Any
    high: Any
    full: Any
    size: Any


@triton.jit
def item_arrays(items, max_items):
    """Returns pointers to the fields of the items. `items` points to the first field."""
    return Item(*fields_at(items, max_items, ITEM_FIELDS))


@triton.jit
def load_item(arrays, i):
    """Loads one item."""
    return Item(*load_fields(arrays, i))


@triton.jit
def _store_item(to, item):
    for field in tl.static_range(ITEM_FIELDS):
        tl.store(to[field], item[field])


@triton.jit
def partial_arrays(partials, TOKENS: tl.constexpr):
    """Returns the arrays by query token."""
    return PartialArrays(partials, partials + TOKENS, partials + 2 * TOKENS)


@triton.jit
def count_partials(partials, token, used):
    """Returns the number of partials of query tokens. It is 0 where one item writes the final output."""
    count = tl.load(partials.tall + token, mask=used, other=0)
    count += tl.load(partials.low + token, mask=used, other=0)
    return tl.where(count > 1, count, 0)


@triton.jit
def _load_cut(choice, number):
    own = (tl.load(choice.num_items + number), tl.load(choice.target + number))
    return Cut(*own, *load_launch(choice.launches, number))


@triton.jit
def _select(condition, a, b):
    """Returns the cut `a` or `b`. Both are loaded before the condition is known, so that their loads need not wait for
    it."""
    fields: tl.tuple = ()
    for field in tl.static_range(len(a)):
        fields += (tl.where(condition, a[field], b[field]),)
    return Cut(*fields)


@triton.jit
def touches(node, low, subtile, subtile_entries):
    """Returns whether a node's entries are in a subtile of an item whose entries begin at `low`."""
    starts_by = (node.first - low) // subtile_entries <= subtile
    return starts_by & ((node.stop - 1 - low) // subtile_entries >= subtile)


@triton.jit
def _split_of(arrays, rows, begin, end, cut, SIZES: tl.constexpr):
    """Returns which entries the segments [begin, end) of a tile concern, how many of the segments lead without a mask,
    and how many segments the item lists. `arrays` are those of the tile's nodes."""
    k = tl.arange(0, SIZES.nodes)
    node = load_nodes(arrays, k, k < 2 * rows)
    a, b = tl.maximum(node.offset, begin), tl.minimum(node.offset + node.segments, end)
    is_here = a < b
    low = tl.min(tl.where(is_here, node.first, 255), 0)
    high = tl.max(tl.where(is_here, node.stop, 0), 0)
    is_unmasked = (node.first == low) & (node.stop == high) & (a >= node.full) & (a < node.full_end)
    masked_from = tl.where(is_unmasked, tl.where(node.full_end < b, node.full_end, BIG), a)
    full = tl.minimum(tl.min(tl.where(is_here, masked_from, BIG), 0), end) - begin
    full = full // cut.block_segments * cut.block_segments
    size = end - begin
    SUBTILES: tl.constexpr = SIZES.subtiles
    if cut.subtiles > 1:
        left = tl.where(is_here, tl.maximum(b - tl.maximum(a, begin + full), 0), 0)
        longest = 0
        for subtile in tl.static_range(SUBTILES):
            its_own = touches(node, low, subtile, cut.subtile_entries) & (subtile < cut.subtiles)
            longest = tl.maximum(longest, tl.sum(tl.where(its_own, left, 0), 0))
        size = full + tl.cdiv(longest, cut.private_segments) * cut.private_segments * cut.subtiles
    return Split(low, high, full, size)


@triton.jit
def _tall_partials(at, first, end, cut, leads, num_entries, layout, SIZES: tl.constexpr, SPLITS: tl.constexpr):
    """Returns how many items of the candidate's first launch hold each entry of [first, end). It looks at a few splits
    of a tile at a time."""
    k = tl.arange(0, SIZES.nodes)
    ENTRIES: tl.constexpr = SIZES.nodes // 2
    found = tl.zeros([ENTRIES], tl.int32)
    segments_of = tile_arrays(layout.tiles, cut.stage, SIZES.tokens).segments
    for tile in range(first // cut.height, tl.cdiv(end, cut.height)):
        begin = tile * cut.height
        arrays = node_arrays(layout.nodes + first_node(cut.stage, begin, SIZES.tokens), SIZES.tokens)
        node = load_nodes(arrays, k, k < 2 * tl.minimum(cut.height, num_entries - begin))
        node_begin, node_end = node.offset[:, None], (node.offset + node.segments)[:, None]
        segments = tl.load(segments_of + tile)
        step, lead = step_of(segments, cut.target, cut.block_segments, cut.item_segments), tl.load(leads + tile)
        for split in range(0, splits_of(segments, lead, step), SPLITS):
            to_segment = lead + (split + tl.arange(0, SPLITS)[None, :]) * step
            is_here = tl.maximum(node_begin, to_segment - step) < tl.minimum(node_end, to_segment)
            low = begin + tl.min(tl.where(is_here, node.first[:, None], 255), 0)
            high = begin + tl.max(tl.where(is_here, node.stop[:, None], 0), 0)
            found += tl.sum(((low[None, :] <= at[:, None]) & (at[:, None] < high[None, :])).to(tl.int32), 1)
    return found


@triton.jit
def _merges(entry, split, token, tall, leads, num_entries, layout, of_token, SIZES: tl.constexpr):
    """Returns 1 if an item merges the partials of its queries, else 0, and marks the queries whose partials it merges.

    It is the only item of a lowest tile, and so holds the last partial of all its queries. It merges if there are
    others, and not too many. `entry` is the first one of the tile, and `token` has the query tokens of all."""
    ENTRIES: tl.constexpr = SIZES.nodes // 2
    i = tl.arange(0, ENTRIES)
    others = _tall_partials(
        entry + i, entry + split.low, entry + split.high, tall, leads, num_entries, layout, SIZES, 16
    )
    others = tl.where((split.low <= i) & (i < split.high), others, 0)
    most = tl.max(others, 0)
    merges = ((most > 0) & (most <= SIZES.fuse_up_to)).to(tl.int32)
    is_fused = tl.where(merges > 0, others, 0) > 0
    tl.store(of_token.fused + token, tl.full([ENTRIES], 1, tl.int32), mask=is_fused)
    return merges


@triton.jit
def _tile_of(item, starts, num_tiles, BLOCK: tl.constexpr):
    """Returns the tile of an item, which is the last one whose items begin no later than that item."""
    tile = -1
    for begin in range(0, num_tiles, BLOCK):
        other = begin + tl.arange(0, BLOCK)
        start = tl.load(starts + other, mask=other < num_tiles, other=BIG)
        tile += tl.sum((start <= item).to(tl.int32), 0)
    return tile


@triton.jit
def _range_of(item, tile, starts, leads, skipped, cut, layout, SIZES: tl.constexpr):
    """Returns the `ItemRange` of an item. `starts` points to the first items of the launch's tiles, which are counted
    without the `skipped` items of the launch before. `leads` points to the segments of these first items."""
    tile_item = tl.load(starts + tile) + skipped
    segments = tl.load(tile_arrays(layout.tiles, cut.stage, SIZES.tokens).segments + tile)
    step, lead = step_of(segments, cut.target, cut.block_segments, cut.item_segments), tl.load(leads + tile)
    end = lead + (item - tile_item) * step
    begin = tl.maximum(end - step, 0)
    return ItemRange(tile_item, begin, tl.minimum(end, segments), splits_of(segments, lead, step))


@triton.jit
def _store_num_items(tall, low, counts, status, limits):
    """Returns the number of items of both launches, at most the limit. The first CTA stores it, and flags what exceeds
    the limit."""
    num_items = tl.minimum(tall.num_items + low.num_items, limits.items)
    if tl.program_id(0) == 0:
        tl.store(counts.num_items, num_items)
        flag(status, tl.where(tall.num_items + low.num_items > limits.items, MANY_ITEMS, 0))
    return num_items


@triton.jit(do_not_specialize=NUMBERS)
def items_kernel(
    tables,
    num_rows,
    num_columns,
    window,
    tiled,
    work,
    limits,
    SIZES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Writes every item of the chosen candidate, and counts the partials of each query token. The last CTA, which often
    has no item, sums up the plan."""
    trigger_and_wait(PDL)
    entries, status, layout, choice = tiled
    candidate = chosen(choice.times, SIZES)
    counts = counts_of(status)
    num_entries = tl.load(counts.num_entries)
    tall, low = _load_cut(choice, candidate * 2), _load_cut(choice, candidate * 2 + 1)
    num_items = _store_num_items(tall, low, counts, status, limits)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        bounds = Bounds(num_rows, num_columns, limits.max_query_len)
        summarize(candidate, tables, bounds, window, choice.launches, layout.totals, work.summary, SIZES)
    of_token = partial_arrays(work.partials, SIZES.tokens)
    ENTRIES: tl.constexpr = SIZES.nodes // 2  # of a tile
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        nth = tl.where(item >= tall.num_items, 1, 0)
        cut, skipped = _select(nth == 1, low, tall), tl.where(nth == 1, tall.num_items, 0)
        starts = choice.item_starts + (candidate * 2 + nth) * SIZES.tokens
        leads = choice.leads + candidate * 2 * SIZES.tokens
        tile = _tile_of(item - skipped, starts, tl.cdiv(num_entries, cut.height), SIZES.block)
        entry = tile * cut.height
        rows, its_nodes = tl.minimum(cut.height, num_entries - entry), first_node(cut.stage, entry, SIZES.tokens)
        i = tl.arange(0, ENTRIES)
        token = tl.load(entries.token + entry + i, mask=i < rows, other=0)
        taken = _range_of(item, tile, starts, leads + nth * SIZES.tokens, skipped, cut, layout, SIZES)
        nodes = node_arrays(layout.nodes + its_nodes, SIZES.tokens)
        split = _split_of(nodes, rows, taken.begin, taken.end, cut, SIZES)
        holds = (split.low <= i) & (i < split.high)
        tl.atomic_add(of_token.tall + nth * SIZES.tokens + token, 1, mask=holds, sem="relaxed")
        merges = 0
        if (nth == 1) & (taken.num_items == 1) & (cut.tile_index == 0):
            merges = _merges(entry, split, token, tall, leads, num_entries, layout, of_token, SIZES)
        bucket = cut.tile_index + merges * SIZES.heights
        _store_item(
            item_arrays(work.items + item, limits.items),
            Item(
                launch_number=candidate * 2 + nth,
                entry=entry,
                tile_item=taken.tile_item,
                begin=taken.begin,
                end=taken.end,
                low=split.low,
                high=split.high,
                full=split.full,
                size=split.size,
                bucket=bucket,
                nodes=its_nodes,
                rows=rows,
                subtiles=cut.subtiles,
            ),
        )
