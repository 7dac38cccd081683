"""Tile rules, random batches for them, and one small tree."""

from dataclasses import replace

import numpy as np
from hypothesis import strategies as st

from benchmarks.workloads import parse_tree, random_forest, tree_batch
from trunkattn.gpu.cards import H200
from trunkattn.gpu.hopper.spec import tiles_of as hopper_tiles
from trunkattn.gpu.overlap import Overlap
from trunkattn.gpu.portable.spec import tiles_of as decode_tiles
from trunkattn.gpu.tiles import GpuTile, tile_config
from trunkattn.planner.check import check_tiles
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.candidates import Tiling, TilingRule, candidates
from trunkattn.planner.tiles.overlap import ChunkTimes, Overlapped, choose_overlap
from trunkattn.planner.tiles.step import TiledStep
from trunkattn.planner.work_list import UNLIMITED, TileLimits, TileList

from .specs import as_batch, forest_of

CARD_TIMES = H200.times._replace(bytes_per_us=4_540_000, launch_ns=2340)
SEEDS = st.integers(0, 2**32 - 1)
PAGE_SIZES = st.one_of(st.integers(1, 64), st.sampled_from([1, 2, 16, 32, 64]))
WINDOWS = st.one_of(st.just(UNLIMITED), st.integers(1, 150))
GROUP_SIZES = st.one_of(st.integers(1, 16), st.sampled_from([5, 7, 12, 16, 24, 32]))
NUM_SMS = st.sampled_from([1, 3, 16, 132])
CACHES = ((2, 128), (1, 128), (2, 256))  # bytes of an element and head_dim: the table has tiles for each of them
HOPPER_CACHES = ((2, 64), *CACHES)


def make_rule(
    group_size: int,
    page_size: int,
    num_sms: int,
    *,
    shapes: tuple[GpuTile, ...] = (),
    num_kv_heads: int = 1,
    fuse_up_to: int = 8,
    l2_bytes: int = 50 << 20,
) -> TilingRule:
    """By default of the tiles for a 16-bit cache."""
    tiles = (tile_config(replace(it, ctas_per_sm=2), num_sms) for it in shapes or decode_tiles(2, 128, group_size))
    return TilingRule(
        tiles=tuple(tiles),
        group_size=group_size,
        num_kv_heads=num_kv_heads,
        page_size=page_size,
        card_times=CARD_TIMES,
        token_bytes=512 * num_kv_heads,
        partial_bytes=group_size * num_kv_heads * 129 * 8,
        fuse_up_to=fuse_up_to,
        l2_bytes=l2_bytes,
    )


@st.composite
def low_tiles(draw: st.DrawFn, group_size: int) -> tuple[GpuTile, ...]:
    """So low that a small batch fills many of each height; rows of a subtile that hold no whole group stay unused."""
    shapes = []
    for _ in range(draw(st.integers(1, 4))):
        subtiles, private = draw(st.sampled_from([1, 2, 4, 8])), draw(st.sampled_from([4, 8, 16, 32]))
        rows = subtiles * (draw(st.integers(1, 3)) * group_size + draw(st.integers(0, group_size - 1)))
        keys = private * draw(st.sampled_from([1, 2, 4]))
        shape = GpuTile(rows, keys, 1, 1, 2, (2000, 3000), (1500, 2500), subtiles, private)
        if subtiles == 1:
            shape = replace(shape, blocks_at_once=draw(st.sampled_from([1, 2])), item_blocks=draw(st.integers(0, 3)))
        shapes.append(shape)
    return tuple(sorted(shapes, key=lambda shape: shape.block_m))


@st.composite
def rules(draw: st.DrawFn, page_size: int, listed: bool = False) -> TilingRule:
    """Of the table, or, unless they must be `listed`, of low tiles."""
    group_size = draw(GROUP_SIZES)
    hopper = (tuple(tile for tile in hopper_tiles(*cache, 16) if tile.block_m >= group_size) for cache in HOPPER_CACHES)
    table = st.sampled_from([*(decode_tiles(*cache, group_size) for cache in CACHES), *hopper])
    return make_rule(
        group_size,
        page_size,
        draw(NUM_SMS),
        shapes=draw(table if listed else st.one_of(table, low_tiles(group_size))),
        num_kv_heads=draw(st.sampled_from([1, 2, 8])),
        fuse_up_to=draw(st.sampled_from([0, 1, 8])),
        l2_bytes=draw(st.sampled_from([0, 1 << 16, 50 << 20])),
    )


def unnested(rule: TilingRule) -> TilingRule:
    """As the packing policies take the tiles."""
    return replace(rule, tiles=tuple(replace(tile, subtiles=1) for tile in rule.tiles))


@st.composite
def cases(draw: st.DrawFn, listed: bool = False) -> tuple[TilingRule, StepTables]:
    page_size = draw(PAGE_SIZES)
    paged = random_forest(
        np.random.default_rng(draw(SEEDS)),
        page_size=page_size,
        max_requests=draw(st.sampled_from([3, 6, 12])),
        max_own_tokens=draw(st.sampled_from([8, 60])),
        max_query_len=draw(st.sampled_from([1, 12, 40])),
    )
    return draw(rules(page_size, listed)), as_batch(paged, draw(WINDOWS))


def arrays(batch: StepTables) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return batch.block_table, batch.seq_lens, batch.query_start_loc


def tiled(rule: TilingRule, batch: StepTables, limits: TileLimits | None = None) -> TiledStep:
    return TiledStep(rule, forest_of(batch, rule.page_size), batch, limits)


def items_to_overlap(overlap: Overlap, tiles: TileList, chunks: ChunkTimes) -> Overlapped:
    """The items of a tile list, all of them in low tiles, that are to overlap chunks, by the formula that `TiledStep`
    asks for each candidate."""
    items = tiles.items[: tiles.counts[1] - tiles.counts[0]]
    index, stage = overlap.leftover
    return Overlapped(
        *choose_overlap(items, tiles.num_slots, chunks, overlap.costs, stage, index, overlap.rule.priced.costs)
    )


def predicted(rule: TilingRule, batch: StepTables) -> dict[Tiling, int]:
    """Predicted ns of every candidate."""
    return dict(zip(candidates(rule), tiled(rule, batch).predict().tolist(), strict=True))


def tile(rule: TilingRule, tiling: Tiling, batch: StepTables) -> TileList:
    return tiled(rule, batch).emit(tiling)


TREE = tree_batch(parse_tree("1,2,12_64,32,20"), 16, row_seed=0, page_seed=1)
TREE_BATCH = as_batch(TREE)


def tree_tiles(name: str, num_sms: int, nested: bool = True) -> tuple[TileList, TilingRule]:
    """12 requests of 4 heads: 64 tokens for all, 32 for six, 20 each (the last 4 in a segment that is not full)."""
    rule = make_rule(4, 16, num_sms, num_kv_heads=2)
    rule = rule if nested else unnested(rule)
    tiling = next(tiling for tiling in candidates(rule) if tiling.name(rule) == name)
    tile_list = tile(rule, tiling, TREE_BATCH)
    check_tiles(tile_list, TREE_BATCH, rule)
    return tile_list, rule
