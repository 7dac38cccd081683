"""What the portable kernels refuse, and their tiles with their prices. Triton is not imported here."""

from dataclasses import replace
from math import gcd
from typing import Final

import torch

from trunkattn.config import AttentionConfig
from trunkattn.gpu.cards import E4M3_NEEDS, HOPPER, Card
from trunkattn.gpu.tiles import GpuTile, MergeTile, PrefillTile
from trunkattn.numerics import padded_head_dim

MODULE: Final = "trunkattn.gpu.portable"
WIDE: Final = 128  # wider heads have separate tiles
READS_NO_LATENT: Final = "a latent cache: expected keys and values apart"

_MAX_HEAD_DIM: Final = 256
_MAX_GROUP_SIZE: Final = 64  # rows of the tallest tile, for head_dim up to WIDE and elements of up to 16 bits
_MAX_GROUP_SIZE_OF_LARGE_TILES: Final = 32

# More than two tiles would gain next to nothing. `benchmarks/kernels/calibrate.py` fits the times of all tiles.
_LOW: Final = GpuTile(16, 64, warps=2, stages=2, ctas_per_sm=4, block_ns=(2130, 3470), chain_ns=(2150, 2160))
_TALL: Final = GpuTile(
    64, 64, warps=4, stages=3, ctas_per_sm=2, block_ns=(2090, 1940), chain_ns=(490, 2550), subtiles=4
)
DECODE_TILES: Final = (_LOW, _TALL)
# Every warp converts 8-bit keys, so a low tile has one warp. The tall tile puts converted keys back into shared memory
# and still reads a trunk faster. With twice the private keys it would spill.
DECODE_TILES_FP8: Final = (
    GpuTile(16, 32, warps=1, stages=3, ctas_per_sm=8, block_ns=(2290, 2300), chain_ns=(900, 1500), queued_per_sm=30),
    replace(_TALL, block_ns=(3240, 2200), chain_ns=(760, 2000), private_n=16),
)
_WIDE: Final = GpuTile(
    32,
    64,
    warps=4,
    stages=2,
    ctas_per_sm=2,
    block_ns=(2480, 3550),
    chain_ns=(1000, 2430),
    subtiles=2,
    private_n=16,
    flat_n=32,
)
# With a head_dim over 128 the accumulators of 64 rows would fill the registers. Low tiles in 2 warps spill where they
# merge.
DECODE_TILES_WIDE: Final = (
    replace(_LOW, warps=4, ctas_per_sm=2),
    _WIDE,
)
# Tensor cores do not multiply float32, and its tiles need more warps so that they do not spill. The times are not
# measured but those of 16-bit tiles.
DECODE_TILES_FP32: Final = (
    replace(_LOW, warps=4, ctas_per_sm=2),
    replace(_WIDE, warps=8),
)
DECODE_TILES_FP32_WIDE: Final = (
    replace(_LOW, warps=8, ctas_per_sm=1),
    replace(_WIDE, block_n=32, warps=8, ctas_per_sm=1, block_ns=(1240, 3550), chain_ns=(500, 2430)),
)
# For cards that were not timed: these spill neither on an sm_80 nor on an sm_100.
_FP32_UNTIMED: Final = (
    GpuTile(16, 32, warps=8, stages=2, ctas_per_sm=2, block_ns=(1065, 1735), chain_ns=(1075, 1080)),
    replace(_WIDE, block_n=16, warps=8, ctas_per_sm=1, block_ns=(310, 1775), chain_ns=(250, 2430), flat_n=16),
)


# The tile for all rows of a batch-invariant plan: low enough for requests that share nothing, and tall enough for those
# that share. Its times are never compared with others.
INVARIANT_TILE: Final = GpuTile(32, 64, warps=2, stages=2, ctas_per_sm=4, block_ns=(2130, 3470), chain_ns=(2150, 2160))


# The largest tile that compiles for an sm_90 without spilling at a head_dim of 128.
PREFILL_TILE: Final = PrefillTile(128, 64, 8, 3, ctas_per_sm=1)


# For a head_dim over 128. It spills a little and is still faster than smaller tiles, which do not.
PREFILL_TILE_WIDE: Final = PrefillTile(64, 64, 8, 2, ctas_per_sm=1)

# For float32, and for a head_dim over 128 on cards that were not timed.
PREFILL_TILE_SMALL: Final = PrefillTile(64, 32, 8, 2, ctas_per_sm=1)


# An sm_80 keeps the queries in registers too and would spill with 64 keys.
_PREFILL_TILE_UNTIMED: Final = replace(PREFILL_TILE, block_n=32)

_NARROW: Final = 128  # one warp merges a head of up to this width
_SEVERAL: Final = 512  # total width of the heads of a merge task
_SEVERAL_LATENT: Final = 2048  # the same if one head is at least as wide as _SEVERAL
_SLICES: Final = 4  # slices of a head of up to _NARROW; more than 2 of a wider one would take more registers
_NARROWEST: Final = 16  # the fewest dims of a slice; a sector of memory holds 8
_SLICED: Final = 256  # the most heads that are sliced: with more, one task per head occupies the card


def refuses_card(config: AttentionConfig, card: Card) -> list[str]:
    """Returns why a card runs no kernel of Triton, or none that reads the attention's cache. The list is empty if it
    does."""
    reasons = card.why_too_old
    if config.cache_dtype == torch.float8_e4m3fn and not card.has_e4m3:
        reasons.append(f"kv_dtype={config.cache_dtype}: {E4M3_NEEDS}")
    return reasons


def refuses(config: AttentionConfig, card: Card) -> list[str]:
    """Returns why the kernels for decodes and for prompt chunks do not compute an attention on a card. The list is
    empty if they do."""
    if config.latent_dim is not None:
        return [READS_NO_LATENT]
    reasons = refuses_card(config, card)
    width = _width(config)
    if width > _MAX_HEAD_DIM:
        reasons.append(f"head_dim {width}: expected at most {_MAX_HEAD_DIM}; use the CPU")
    small = width <= WIDE and tile_itemsize(config) <= 2
    most = _MAX_GROUP_SIZE if small else _MAX_GROUP_SIZE_OF_LARGE_TILES
    if config.group_size > most:
        reasons.append(
            f"{config.group_size} query heads per KV head: expected at most {most} with head_dim {width}, "
            f"{config.dtype} queries and {config.cache_dtype} caches; use the CPU"
        )
    return reasons


def refuses_merge(config: AttentionConfig, card: Card) -> list[str]:
    """Returns why the merge does not take partial results of an attention. It takes those of every kernel."""
    return []


def tile_itemsize(config: AttentionConfig) -> int:
    """Returns the bytes of an element of the keys in a tile. Float32 queries convert the cache's elements to
    float32."""
    return max(config.cache_dtype.itemsize, config.dtype.itemsize if config.dtype.itemsize > 2 else 0)


def _width(config: AttentionConfig) -> int:
    return max(config.head_dim, config.value_dim)


def decode_tiles(config: AttentionConfig, card: Card) -> tuple[GpuTile, ...]:
    """Returns the tiles of decodes, in ascending order of rows. A batch-invariant attention has one tile for all rows,
    because another one would sum the same numbers in another order. Items that are packs read all keys with all
    rows."""
    itemsize, width = tile_itemsize(config), _width(config)
    tiles = tiles_of(itemsize, width, config.group_size, card.capability)
    if config.batch_invariant:
        return invariant_tiles(itemsize, width, tiles, card.capability)
    return tiles if config.policy == "auto" else without_subtiles(tiles)


def tiles_of(itemsize: int, width: int, group_size: int, capability: int = HOPPER) -> tuple[GpuTile, ...]:
    """Returns the tiles of decodes, in ascending order of rows.

    Args:
        itemsize: bytes of an element of the cache.
        width: the larger of head_dim and head_dim_v.
        group_size: query heads of a KV head, which a tile holds whole.
        capability: of the card, 80 for 8.0.
    """
    timed, wide = capability == HOPPER, width > WIDE
    tiles: tuple[GpuTile, ...] = DECODE_TILES
    if itemsize > 2:
        tiles = (DECODE_TILES_FP32_WIDE if wide else DECODE_TILES_FP32) if timed else _FP32_UNTIMED
    elif wide:
        tiles = DECODE_TILES_WIDE
    elif itemsize == 1:
        tiles = DECODE_TILES_FP8
    if not timed or (wide and itemsize == 1):  # wide fp8 would spill in 4 warps
        tiles = tuple(_in_eight_warps(tile) for tile in tiles)
    tiles = tuple(tile for tile in tiles if tile.block_m >= group_size)
    fits = all(tile.block_m // tile.subtiles >= group_size for tile in tiles)
    return tiles if fits else without_subtiles(tiles)


def invariant_tiles(
    itemsize: int, width: int, tiles: tuple[GpuTile, ...], capability: int = HOPPER
) -> tuple[GpuTile, ...]:
    """Returns the tile of a batch-invariant attention, one for all rows, because another one would sum the same numbers
    in another order. `tiles` are those that the attention has otherwise. The lower one was timed with 16-bit heads up
    to 128 in groups up to 16, and holds too few requests of larger groups."""
    tallest = without_subtiles(tiles)[-1]
    fits = tallest.block_m >= INVARIANT_TILE.block_m and tiles[0].block_m <= INVARIANT_TILE.block_m
    is_timed = itemsize == 2 and width <= WIDE and capability == HOPPER
    return (INVARIANT_TILE if fits and is_timed else tallest,)


def _in_eight_warps(tile: GpuTile) -> GpuTile:
    """Returns the tile for a card that was not timed, because tall tiles in 4 warps spill on an sm_80 or an sm_100. One
    CTA of 8 warps is assumed to be as fast as two of 4."""
    if tile.subtiles == 1 or tile.warps == 8:
        return tile
    full, masked = tile.block_ns
    return replace(tile, warps=8, ctas_per_sm=1, block_ns=(full // 2, masked // 2), private_n=16, flat_n=32)


def without_subtiles(tiles: tuple[GpuTile, ...]) -> tuple[GpuTile, ...]:
    """Returns the tiles without subtiles: all rows of a tile read all its keys, as items that are packs need it."""
    return tuple(_flat(tile) if tile.subtiles > 1 else tile for tile in tiles)


def _flat(tile: GpuTile) -> GpuTile:
    """Returns the tile without subtiles. A block takes as much less time as it has fewer keys."""
    less = tile.block_n // tile.flat_n
    block_ns, chain_ns = ((full // less, masked // less) for full, masked in (tile.block_ns, tile.chain_ns))
    return replace(tile, subtiles=1, block_n=tile.flat_n, block_ns=block_ns, chain_ns=chain_ns)


def prefill_tiles(config: AttentionConfig, card: Card) -> tuple[PrefillTile, ...]:
    """Returns the tile of prompt chunks. Its rows hold any group that the tiles of decodes hold."""
    return (prefill_tile(tile_itemsize(config), _width(config), card.capability),)


def prefill_tile(itemsize: int, width: int, capability: int = HOPPER) -> PrefillTile:
    """Returns the tile of prompt chunks. The arguments are those of `tiles_of`."""
    timed = capability == HOPPER
    if itemsize > 2:
        return PREFILL_TILE_SMALL
    if width > WIDE:
        return PREFILL_TILE_WIDE if timed else PREFILL_TILE_SMALL
    return PREFILL_TILE if timed else _PREFILL_TILE_UNTIMED


def merge_tiles(config: AttentionConfig, card: Card) -> tuple[MergeTile, ...]:
    """Returns the tile of the merge, on every card."""
    return (merge_tile(config.num_qo_heads, config.value_dim, config.batch_invariant),)


def merge_tile(num_qo_heads: int, head_dim_v: int, batch_invariant: bool = False) -> MergeTile:
    """Returns the tile of an attention. If it is `batch_invariant`, a task is always one head, and the kernel has no
    other way to compute one. The ways add in different orders, and which one is taken depends on the batch."""
    width = padded_head_dim(head_dim_v)
    together = _SEVERAL if width < _SEVERAL else _SEVERAL_LATENT
    heads = 1 if batch_invariant else gcd(num_qo_heads, max(1, together // width))
    most, warps, ctas_per_sm = (_SLICES, 1, 16) if width <= _NARROW else (2, 4, 8)
    slices = 1 if batch_invariant else max(1, min(most, width // _NARROWEST))
    return MergeTile(heads, slices, _SLICED if slices > 1 else 0, warps, ctas_per_sm)
