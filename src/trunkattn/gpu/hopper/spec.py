"""The specification of the Hopper kernels, which are written in Gluon for compute capability 9.0: what they refuse, and
their tiles with the prices of these.

This module does not import Triton.
"""

from dataclasses import replace
from enum import IntEnum
from types import MappingProxyType
from typing import Final, NamedTuple

import torch

from trunkattn.config import AttentionConfig
from trunkattn.dtypes import dtype_name
from trunkattn.gpu.cards import Card
from trunkattn.gpu.layer import Geometry, Tensors, why_not_by_tma
from trunkattn.gpu.portable.spec import (
    DECODE_TILES,
    DECODE_TILES_FP8,
    DECODE_TILES_WIDE,
    PREFILL_TILE,
    READS_NO_LATENT,
    WIDE,
)
from trunkattn.gpu.tiles import GpuTile, PrefillTile

MODULE: Final = "trunkattn.gpu.hopper"
DECODE: Final = "Hopper decode"
PREFILL: Final = "Hopper prefill"
BOTH: Final = "Hopper prefill and decode"

DTYPES: Final = (torch.bfloat16, torch.float16)
DTYPES_8_BIT: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
PAGE_UNIT: Final = 16  # tokens that TMA loads at a time
BOX_DIMS: Final = 64
HEAD_DIMS: Final = (64, 128, 256)
# Heads that are padded to wider ones when they decode. They have 16 bits, and page_size is a multiple of PAGE_UNIT.
PADDED_HEAD_DIMS: Final = MappingProxyType({96: 128})
DECODE_ROWS: Final = 64  # rows of a tile, which holds all heads of a query's group
PREFILL_ROWS: Final = 128  # rows of an item, which holds whole groups
# The kernel that computes decodes together with prompt chunks
BOTH_HEAD_DIM: Final = 128
BOTH_GROUPS: Final = (1, 2, 4, 8, 16)  # query heads per KV head
BOTH_ROWS: Final = 16  # rows of a decode tile
BOTH_NARROW_ROWS: Final = 8  # rows of a narrow decode tile, which is faster
BOTH_KEYS: Final = 64  # keys of a block of a decode tile


class Source(IntEnum):
    """How the Hopper decode kernel gets its keys and values."""

    LOADED = 0  # 16-bit numbers, by TMA
    WIDENED = 1  # 8-bit numbers by TMA, which producer warps convert to 16-bit ones
    GATHERED = 2  # by producer warps, because TMA cannot load pages whose size is no multiple of 16 tokens


class TileTimes(NamedTuple):
    """Times of a tile in ns. `GpuTile` explains the fields."""

    block_ns: tuple[int, int]
    chain_ns: tuple[int, int]


class HopperTile(NamedTuple):
    """Tiles of the Hopper decode kernel and their times, for one source and head_dim.

    Attributes:
        block_n, ctas_per_sm: the same for all of these tiles.
        low, middle, tall: times of tiles of 16, 32 and 64 rows. `low` is None if the low tile is a portable one.
        low_read_percent: `read_percent` of the low tile. Less than 100 breaks ties with the taller tiles.
    """

    block_n: int
    ctas_per_sm: int
    low: TileTimes | None
    middle: TileTimes
    tall: TileTimes
    low_read_percent: int = 100


# `benchmarks/kernels/calibrate_shapes.py` fits the times. Heads that none of its shapes has use the times of others:
# 8-bit heads of 64 use those of 128, and gathered heads of 256 use those of widened ones. The times of 16-bit heads of
# 128 suit an H100, too. An SM holds two CTAs, or one if heads of 256 are in 8 bits.
TILES: Final = MappingProxyType(
    {
        (Source.LOADED, 64): HopperTile(
            block_n=128,
            ctas_per_sm=2,
            low=TileTimes((2000, 2130), (1300, 1100)),
            middle=TileTimes((2270, 1640), (1280, 1090)),
            tall=TileTimes((3520, 1160), (1240, 1090)),
        ),
        (Source.LOADED, 128): HopperTile(
            block_n=64,
            ctas_per_sm=2,
            low=TileTimes((2130, 3470), (2150, 2160)),
            middle=TileTimes((1340, 1850), (870, 720)),
            tall=TileTimes((1460, 1820), (1000, 800)),
            low_read_percent=98,
        ),
        (Source.LOADED, 256): HopperTile(
            block_n=32,
            ctas_per_sm=2,
            low=TileTimes((1390, 1510), (1030, 600)),
            middle=TileTimes((1470, 1740), (760, 590)),
            tall=TileTimes((2250, 680), (720, 590)),
        ),
        (Source.WIDENED, 64): HopperTile(
            block_n=128,
            ctas_per_sm=2,
            low=None,
            middle=TileTimes((1960, 1520), (1270, 830)),
            tall=TileTimes((1880, 1490), (1130, 810)),
        ),
        (Source.WIDENED, 128): HopperTile(
            block_n=64,
            ctas_per_sm=2,
            low=None,
            middle=TileTimes((1960, 1520), (1270, 830)),
            tall=TileTimes((1880, 1490), (1130, 810)),
        ),
        (Source.WIDENED, 256): HopperTile(
            block_n=64,
            ctas_per_sm=1,
            low=TileTimes((1360, 1340), (1060, 1060)),
            middle=TileTimes((1190, 1270), (1080, 1050)),
            tall=TileTimes((1330, 1210), (1070, 1060)),
        ),
        (Source.GATHERED, 64): HopperTile(
            block_n=64,
            ctas_per_sm=2,
            low=TileTimes((390, 490), (4000, 3380)),
            middle=TileTimes((2070, 1200), (1300, 760)),
            tall=TileTimes((2660, 730), (1270, 980)),
        ),
        (Source.GATHERED, 128): HopperTile(
            block_n=64,
            ctas_per_sm=2,
            low=TileTimes((2830, 3730), (2130, 1890)),
            middle=TileTimes((2460, 2060), (1550, 940)),
            tall=TileTimes((2850, 1930), (1490, 930)),
        ),
        (Source.GATHERED, 256): HopperTile(
            block_n=64,
            ctas_per_sm=1,
            low=None,
            middle=TileTimes((1190, 1270), (1080, 1050)),
            tall=TileTimes((1330, 1210), (1070, 1060)),
        ),
    }
)

# These are the largest tiles that do not spill. The main loop takes these kernels half as long as the portable one, so
# the begin and the end of an item, and its partials, weigh more. The merge begins while the last items end.
_PREFILL_TILE: Final = replace(PREFILL_TILE, persistent=True, item_bytes=240_000, partial_factor=6, merge_bytes=0)
_PREFILL_TILE_WIDE: Final = replace(_PREFILL_TILE, block_n=32, stages=2)
# Only heads of 64 allow two CTAs on an SM. With larger heads they would have too few registers.
_PREFILL_TILE_64: Final = replace(_PREFILL_TILE, ctas_under_short_window=2)


def width_of(head_dim: int) -> int:
    """Returns the dims of a head in the decode kernel, which pads some heads with zeros."""
    return PADDED_HEAD_DIMS.get(head_dim, head_dim)


def source_of(kv_itemsize: int, page_size: int) -> Source:
    """Returns how the decode kernel gets keys and values from a cache with this itemsize and page_size."""
    if page_size % PAGE_UNIT:
        return Source.GATHERED
    return Source.WIDENED if kv_itemsize == 1 else Source.LOADED


def refuses_decode(config: AttentionConfig, card: Card) -> list[str]:
    """Returns why the kernel for decodes does not compute an attention on a card. The list is empty if it does."""
    if reasons := card.why_not_hopper or _decode_misfits(config) or card.why_hopper_untimed:
        return reasons
    if not card.model.pads_heads and config.head_dim in PADDED_HEAD_DIMS:
        return [f"head_dim {config.head_dim}: the fast kernel is slower for some batches on {card.model.name}"]
    return []


def refuses_prefill(config: AttentionConfig, card: Card) -> list[str]:
    """Returns why the kernel for prompt chunks does not compute an attention on a card. The list is empty if it
    does."""
    return card.why_not_hopper or _prefill_misfits(config) or _untimed(config, card)


def refuses_both(config: AttentionConfig, card: Card) -> list[str]:
    """Returns why the kernel for prompt chunks and decodes at once (POD-Attention §4) does not compute an attention on
    a card. The list is empty if it does."""
    if reasons := card.why_not_hopper:
        return reasons
    reasons = list(dict.fromkeys([*_decode_misfits(config), *_prefill_misfits(config)]))
    if config.head_dim in HEAD_DIMS and config.head_dim != BOTH_HEAD_DIM:
        reasons.append(f"head_dim {config.head_dim}: expected {BOTH_HEAD_DIM}")
    if config.group_size not in BOTH_GROUPS:
        reasons.append(
            f"{config.group_size} query heads per KV head: expected one of {', '.join(map(str, BOTH_GROUPS))}"
        )
    if config.execution not in ("auto", "overlapped"):
        reasons.append(f"execution={config.execution!r}: expected 'auto' or 'overlapped'")
    if card.model.overlap is None and config.execution != "overlapped":
        reasons.append(f"prompt chunks and decodes at once were not timed on {card.model.name}")
    return reasons or _untimed(config, card)


def _untimed(config: AttentionConfig, card: Card) -> list[str]:
    """Returns why an attention is not trusted to a Hopper card that was not timed. The list is empty if it is. Such a
    card is trusted with heads of 128 and groups that fill the rows of an item, without a soft cap and without sinks."""
    whole = PREFILL_ROWS % config.group_size == 0
    plain = config.head_dim == BOTH_HEAD_DIM and whole and config.logits_soft_cap is None and not config.sinks
    trusted = plain or card.model.runs_hopper_kernels
    return [] if trusted else [f"nothing like it was timed in the fast kernel on {card.model.name}"]


def _decode_misfits(config: AttentionConfig) -> list[str]:
    heads = tuple(sorted((*HEAD_DIMS, *PADDED_HEAD_DIMS)))
    misfits = _misfits(config, heads, DTYPES_8_BIT)
    padded, has_8_bits = config.head_dim in PADDED_HEAD_DIMS, config.cache_dtype.itemsize == 1
    if padded and has_8_bits:
        misfits.append(f"{dtype_name(config.cache_dtype)} caches of heads of {config.head_dim}: expected 16 bits")
    if config.page_size % PAGE_UNIT and (padded or (config.head_dim == max(HEAD_DIMS) and not has_8_bits)):
        misfits.append(
            f"page_size {config.page_size} with heads of {config.head_dim}: expected a multiple of {PAGE_UNIT}"
        )
    if config.policy != "auto":
        misfits.append(f"policy={config.policy!r}: expected 'auto'")
    if config.batch_invariant:  # where the last tokens lie in a block depends on where the tile ends
        misfits.append("batch_invariant=True: expected False")
    if config.execution == "streams":  # PAT's launches side by side, for comparisons
        misfits.append("execution='streams': expected 'auto', 'serial' or 'overlapped'")
    return misfits


def _prefill_misfits(config: AttentionConfig) -> list[str]:
    misfits = _misfits(config, HEAD_DIMS, ())
    if config.page_size % PAGE_UNIT:
        misfits.append(f"page_size {config.page_size}: expected a multiple of {PAGE_UNIT}")
    return misfits


def _misfits(config: AttentionConfig, heads: tuple[int, ...], other_caches: tuple[torch.dtype, ...]) -> list[str]:
    """Returns what all Hopper kernels refuse. `heads` are the head dims that the kernel takes, and `other_caches` the
    dtypes of caches that it takes besides the dtype of the queries."""
    if config.latent_dim is not None:
        return [READS_NO_LATENT]
    queries, cache, misfits = config.dtype, config.cache_dtype, list[str]()
    if queries not in DTYPES:
        misfits.append(f"{dtype_name(queries)} queries: expected bfloat16 or float16")
    elif cache not in (queries, *other_caches):
        others = ", or 8 bits" * bool(other_caches)
        misfits.append(f"{dtype_name(cache)} caches: expected {dtype_name(queries)}, as the queries{others}")
    if config.head_dim not in heads:
        *most, last = heads
        misfits.append(f"head_dim {config.head_dim}: expected {', '.join(map(str, most))} or {last}")
    if config.value_dim != config.head_dim:
        misfits.append(f"values of {config.value_dim} dims: expected {config.head_dim}, as keys")
    if config.group_size > DECODE_ROWS:
        misfits.append(f"{config.group_size} query heads per KV head: expected at most {DECODE_ROWS}")
    return misfits


def refuses_layer(t: Tensors, geometry: Geometry) -> list[str]:
    """Returns why the kernels cannot read the tensors of a layer. The list is empty if they can. Query tokens must
    lie less than 2^32 elements apart."""
    reasons = [] if t.q.is_cuda else ["tensors on a CPU: expected a GPU"]
    for name, cache in (("k_cache", t.k_cache), ("v_cache", t.v_cache)):
        reasons += why_not_by_tma(name, cache, dims=3)
    far = [name for name, tensor in (("q", t.q), ("out", t.out)) if tensor.stride(0) >= 2**32]
    return reasons + [f"{name} has tokens 2^32 elements or more apart" for name in far]


def decode_tiles(config: AttentionConfig, card: Card) -> tuple[GpuTile, ...]:
    """Returns the tiles of decodes, in ascending order of rows.

    Tiles of 16 rows are for single queries and for decodes that are co-scheduled with prompt chunks. Tiles of 32 rows
    are for batches whose tiles of 64 rows would leave SMs idle. One kernel computes them all, so that a plan of fixed
    size is one launch and the merge. For single queries with small pages, or with 8-bit heads up to 128, a portable
    tile is faster and replaces the tile of 16 rows.
    """
    tiles = tiles_of(config.cache_dtype.itemsize, config.head_dim, config.page_size)
    return tuple(tile for tile in tiles if tile.block_m >= config.group_size)


def tiles_of(kv_itemsize: int, head_dim: int, page_size: int) -> tuple[GpuTile, GpuTile, GpuTile]:
    """Returns the tiles for any group. `kv_itemsize` is the number of bytes of an element of the cache."""
    source, head_dim = source_of(kv_itemsize, page_size), width_of(head_dim)
    shape = TILES[source, head_dim]
    tall = GpuTile(
        block_m=64,
        block_n=shape.block_n,
        warps=4,
        stages=2,
        ctas_per_sm=shape.ctas_per_sm,
        **shape.tall._asdict(),
        flat_n=shape.block_n,
        kernel=DECODE,
        one_launch=True,
    )
    middle = replace(tall, block_m=32, **shape.middle._asdict())
    if source is Source.LOADED or (source is Source.WIDENED and head_dim > WIDE):
        assert shape.low
        low = replace(tall, block_m=16, read_percent=shape.low_read_percent, **shape.low._asdict())
        return low, middle, tall
    portable = DECODE_TILES_WIDE if head_dim > WIDE else DECODE_TILES_FP8 if kv_itemsize == 1 else DECODE_TILES
    times = shape.low._asdict() if shape.low and kv_itemsize > 1 else {}
    return replace(portable[0], read_percent=98, **times), middle, tall


def prefill_tiles(config: AttentionConfig, card: Card) -> tuple[PrefillTile, ...]:
    """Returns the tile of prompt chunks, whether decodes are co-scheduled with them or not."""
    return (prefill_tile(config.head_dim),)


def prefill_tile(head_dim: int) -> PrefillTile:
    """Returns the tile of prompt chunks with heads of 64, 128 or 256."""
    if head_dim > WIDE:
        return _PREFILL_TILE_WIDE
    return _PREFILL_TILE_64 if head_dim == min(HEAD_DIMS) else _PREFILL_TILE
