"""Tiles of the decode kernels, as data (PAT §5.2)."""

from dataclasses import dataclass, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Final, NamedTuple

from trunkattn.dtypes import HOPPER_PAGE_UNIT, hopper_width
from trunkattn.gpu.tuning.cards import TIMED_CAPABILITY
from trunkattn.planner.row_tiles.choice import TileConfig
from trunkattn.planner.work_list import DeviceModel


@dataclass(frozen=True)
class Tile:
    """A tile of BLOCK_M query rows × BLOCK_N keys, which one CTA computes.

    Attributes:
        warps, stages: how it is compiled.
        ctas_per_sm: CTAs that run at once on an SM.
    """

    block_m: int
    block_n: int
    warps: int
    stages: int
    ctas_per_sm: int


@dataclass(frozen=True)
class GpuTile(Tile):
    """A tile of a decode kernel, and what the planner must know of it.

    Attributes:
        block_ns: time of a block of keys when all CTAs run: of one that all rows see whole, and of one with a mask.
        chain_ns: the same for one block after another in one CTA.
        subtiles: equal parts of the rows that read keys of their own side by side. Blocks with a mask are theirs.
        private_n: keys of a subtile's block.
        flat_n: BLOCK_N without subtiles.
        hopper: the Hopper kernel computes it. It leaves no nodes to another tile, and a plan of fixed size computes all
            such tiles in one launch.
        read_percent: share of the bandwidth that it reaches.
        queued_per_sm: CTAs on an SM in plans of fixed size, more than run at once, if taller tiles are the Hopper
            kernel's: nothing is left to merge then, and a card that starts a CTA where another one ends deals the tasks
            out more evenly than CTAs that take turns. 0: as many as run at once.
    """

    block_ns: tuple[int, int]
    chain_ns: tuple[int, int]
    subtiles: int = 1
    private_n: int = 32
    flat_n: int = 64
    hopper: bool = False
    read_percent: int = 100
    queued_per_sm: int = 0

    @property
    def merges(self) -> bool:
        """Whether its items may merge partial states of other launches. Tiles of more rows would spill, and the Hopper
        kernel does not."""
        return self.block_m == 16 and not self.hopper


# Two tiles are nearly as good as any number of them. `benchmarks/kernels/calibrate.py` fits the times of all tiles.
_LOW: Final = GpuTile(16, 64, 2, 2, ctas_per_sm=4, block_ns=(2130, 3470), chain_ns=(2150, 2160))
_TALL: Final = GpuTile(64, 64, 4, 3, ctas_per_sm=2, block_ns=(2090, 1940), chain_ns=(490, 2550), subtiles=4)
DECODE_TILES: Final = (_LOW, _TALL)
# Every warp converts 8-bit keys, so a low tile has one warp. The tall tile puts converted keys back into shared memory
# and still reads a trunk faster. With twice the private keys it would spill.
DECODE_TILES_FP8: Final = (
    GpuTile(16, 32, 1, 3, ctas_per_sm=8, block_ns=(2290, 2300), chain_ns=(900, 1500), queued_per_sm=30),
    replace(_TALL, block_ns=(3240, 2200), chain_ns=(760, 2000), private_n=16),
)
# With a head_dim over 128 the accumulators of 64 rows would fill the registers. Low tiles in 2 warps spill where they
# merge.
DECODE_TILES_WIDE: Final = (
    replace(_LOW, warps=4, ctas_per_sm=2),
    GpuTile(32, 64, 4, 2, 2, (2480, 3550), (1000, 2430), subtiles=2, private_n=16, flat_n=32),
)
# Tensor cores do not multiply float32, and its tiles need more warps not to spill. The times are those of other types.
DECODE_TILES_FP32: Final = (
    replace(_LOW, warps=4, ctas_per_sm=2),
    GpuTile(32, 64, 8, 2, 2, (2480, 3550), (1000, 2430), subtiles=2, private_n=16, flat_n=32),
)
DECODE_TILES_FP32_WIDE: Final = (
    replace(_LOW, warps=8, ctas_per_sm=1),
    GpuTile(32, 32, 8, 2, 1, (1240, 3550), (500, 2430), subtiles=2, private_n=16, flat_n=32),
)
# For cards that were not timed: these spill neither on an sm_80 nor on an sm_100.
_FP32_UNTIMED: Final = (
    GpuTile(16, 32, 8, 2, ctas_per_sm=2, block_ns=(1065, 1735), chain_ns=(1075, 1080)),
    GpuTile(32, 16, 8, 2, 1, (310, 1775), (250, 2430), subtiles=2, private_n=16, flat_n=16),
)


# For all rows of a batch-invariant plan: low enough for requests that share nothing, and tall enough for those that
# share. Its times choose nothing.
INVARIANT_TILE: Final = GpuTile(32, 64, 2, 2, ctas_per_sm=4, block_ns=(2130, 3470), chain_ns=(2150, 2160))


class HopperSource(IntEnum):
    """How the Hopper decode kernel gets its keys and values."""

    LOADED = 0  # 16-bit numbers, by TMA
    WIDENED = 1  # 8-bit numbers by TMA, which producer warps make 16-bit ones
    GATHERED = 2  # by producer warps, from pages that are not of whole 16 tokens, which TMA does not load


class TileTimes(NamedTuple):
    """As in `GpuTile`."""

    block_ns: tuple[int, int]
    chain_ns: tuple[int, int]


class HopperTile(NamedTuple):
    """Of the Hopper decode kernel, for one source and head_dim.

    Attributes:
        block_n, ctas_per_sm: of all its tiles.
        low, middle, tall: times of tiles of 16, 32 and 64 rows; None: those of a portable tile, which is the low one.
        low_read_percent: of a low tile of this kernel; less than 100 breaks ties with the taller ones.
    """

    block_n: int
    ctas_per_sm: int
    low: TileTimes | None
    middle: TileTimes
    tall: TileTimes
    low_read_percent: int = 100


# `benchmarks/kernels/calibrate_shapes.py` fits the times, but for what no shape has: 8-bit heads of 64 have the times
# of heads of 128, and gathered heads of 256 those of widened ones. 16-bit heads of 128 have times that suit an H100,
# too. Two CTAs fit on an SM, or one with 8-bit heads of 256.
HOPPER_TILES: Final = MappingProxyType(
    {
        (HopperSource.LOADED, 64): HopperTile(
            128,
            2,
            TileTimes((2000, 2130), (1300, 1100)),
            TileTimes((2270, 1640), (1280, 1090)),
            TileTimes((3520, 1160), (1240, 1090)),
        ),
        (HopperSource.LOADED, 128): HopperTile(
            64,
            2,
            TileTimes((2130, 3470), (2150, 2160)),
            TileTimes((1340, 1850), (870, 720)),
            TileTimes((1460, 1820), (1000, 800)),
            98,
        ),
        (HopperSource.LOADED, 256): HopperTile(
            32,
            2,
            TileTimes((1390, 1510), (1030, 600)),
            TileTimes((1470, 1740), (760, 590)),
            TileTimes((2250, 680), (720, 590)),
        ),
        (HopperSource.WIDENED, 64): HopperTile(
            128,
            2,
            None,
            TileTimes((1960, 1520), (1270, 830)),
            TileTimes((1880, 1490), (1130, 810)),
        ),
        (HopperSource.WIDENED, 128): HopperTile(
            64,
            2,
            None,
            TileTimes((1960, 1520), (1270, 830)),
            TileTimes((1880, 1490), (1130, 810)),
        ),
        (HopperSource.WIDENED, 256): HopperTile(
            64,
            1,
            TileTimes((1360, 1340), (1060, 1060)),
            TileTimes((1190, 1270), (1080, 1050)),
            TileTimes((1330, 1210), (1070, 1060)),
        ),
        (HopperSource.GATHERED, 64): HopperTile(
            64,
            2,
            TileTimes((390, 490), (4000, 3380)),
            TileTimes((2070, 1200), (1300, 760)),
            TileTimes((2660, 730), (1270, 980)),
        ),
        (HopperSource.GATHERED, 128): HopperTile(
            64,
            2,
            TileTimes((2830, 3730), (2130, 1890)),
            TileTimes((2460, 2060), (1550, 940)),
            TileTimes((2850, 1930), (1490, 930)),
        ),
        (HopperSource.GATHERED, 256): HopperTile(
            64,
            1,
            None,
            TileTimes((1190, 1270), (1080, 1050)),
            TileTimes((1330, 1210), (1070, 1060)),
        ),
    }
)
WIDE: Final = 128


def hopper_source(kv_itemsize: int, page_size: int) -> HopperSource:
    """Where the Hopper decode kernel gets keys and values of such a cache from."""
    if page_size % HOPPER_PAGE_UNIT:
        return HopperSource.GATHERED
    return HopperSource.WIDENED if kv_itemsize == 1 else HopperSource.LOADED


def hopper_tiles(kv_itemsize: int, head_dim: int, page_size: int) -> tuple[GpuTile, ...]:
    """The tiles of an attention that the Hopper kernel computes.

    Tiles of 16 rows are for single queries and for decodes beside prompt chunks, those of 32 rows for batches whose
    tiles of 64 rows would leave SMs idle. One kernel computes them all, so that a plan of fixed size is one launch and
    the merge. Single queries of small pages, and of 8-bit heads up to 128, are read faster by a portable tile.
    """
    source, head_dim = hopper_source(kv_itemsize, page_size), hopper_width(head_dim)
    shape = HOPPER_TILES[source, head_dim]
    tall = GpuTile(64, shape.block_n, 4, 2, shape.ctas_per_sm, *shape.tall, flat_n=shape.block_n, hopper=True)
    middle = replace(tall, block_m=32, **shape.middle._asdict())
    if source is HopperSource.LOADED or (source is HopperSource.WIDENED and head_dim > WIDE):
        assert shape.low
        low = replace(tall, block_m=16, read_percent=shape.low_read_percent, **shape.low._asdict())
        return low, middle, tall
    portable = DECODE_TILES_WIDE if head_dim > WIDE else DECODE_TILES_FP8 if kv_itemsize == 1 else DECODE_TILES
    times = shape.low._asdict() if shape.low and kv_itemsize > 1 else {}
    return replace(portable[0], read_percent=98, **times), middle, tall


def decode_tiles(
    kv_itemsize: int,
    width: int,
    group_size: int,
    hopper: tuple[GpuTile, ...] | None = None,
    capability: int = TIMED_CAPABILITY,
) -> tuple[GpuTile, ...]:
    """The tiles of an attention, in ascending order of rows.

    Args:
        kv_itemsize: bytes of an element of the cache.
        width: the larger of head_dim and head_dim_v.
        group_size: query heads of a KV head.
        hopper: those of an attention that the Hopper kernel computes (`hopper_tiles`).
        capability: of the card, 80 for 8.0.
    """
    timed, wide = capability == TIMED_CAPABILITY, width > WIDE
    tiles: tuple[GpuTile, ...] = DECODE_TILES
    if hopper:
        tiles = hopper
    elif kv_itemsize > 2:
        tiles = (DECODE_TILES_FP32_WIDE if wide else DECODE_TILES_FP32) if timed else _FP32_UNTIMED
    elif wide:
        tiles = DECODE_TILES_WIDE
    elif kv_itemsize == 1:
        tiles = DECODE_TILES_FP8
    if not timed or (wide and kv_itemsize == 1):  # wide fp8 would spill in 4 warps
        tiles = tuple(_in_eight_warps(tile) for tile in tiles)
    tiles = tuple(tile for tile in tiles if tile.block_m >= group_size)
    fits = all(tile.block_m // tile.subtiles >= group_size for tile in tiles)
    return tiles if fits else without_subtiles(tiles)


def invariant_tiles(
    kv_itemsize: int, width: int, tiles: tuple[GpuTile, ...], capability: int = TIMED_CAPABILITY
) -> tuple[GpuTile, ...]:
    """The tile of a batch-invariant attention, one for all rows: another would sum the same numbers in another order.
    tiles: of the attention otherwise. The lower one was timed with 16-bit heads up to 128 in groups up to 16, and holds
    too few requests of larger groups."""
    tallest = without_subtiles(tiles)[-1]
    fits = tallest.block_m >= INVARIANT_TILE.block_m and tiles[0].block_m <= INVARIANT_TILE.block_m
    is_timed = kv_itemsize == 2 and width <= WIDE and capability == TIMED_CAPABILITY
    return (INVARIANT_TILE if fits and is_timed else tallest,)


def _in_eight_warps(tile: GpuTile) -> GpuTile:
    """The tile for a card that was not timed: tall tiles in 4 warps spill on an sm_80 or an sm_100. One CTA of 8 warps
    is assumed to be as fast as two of 4."""
    if tile.subtiles == 1 or tile.warps == 8:
        return tile
    full, masked = tile.block_ns
    return replace(tile, warps=8, ctas_per_sm=1, block_ns=(full // 2, masked // 2), private_n=16, flat_n=32)


def without_subtiles(tiles: tuple[GpuTile, ...]) -> tuple[GpuTile, ...]:
    """The same tiles, all of whose rows read all keys: for items that are packs."""
    return tuple(_flat(tile) if tile.subtiles > 1 else tile for tile in tiles)


def _flat(tile: GpuTile) -> GpuTile:
    """A block takes as much less time as it has fewer keys."""
    less = tile.block_n // tile.flat_n
    block_ns, chain_ns = ((full // less, masked // less) for full, masked in (tile.block_ns, tile.chain_ns))
    return replace(tile, subtiles=1, block_n=tile.flat_n, block_ns=block_ns, chain_ns=chain_ns)


def gpu_device(num_sms: int, rows: int) -> DeviceModel:
    """A GPU as the packing policies see it: rows of the tallest tile, 2 CTAs on an SM, 170 FLOP in the time of a
    byte."""
    return DeviceModel(
        name="gpu",
        tile_rows=rows,
        row_unit=16,
        num_workers=2 * num_sms,
        item_bytes=12_000,
        flops_per_byte=170,
        split_above_mean=True,
        split_grid=64,
    )


def tile_config(tile: GpuTile, num_sms: int, key_bytes: int = 512) -> TileConfig:
    """A tile of the table as the planner sees it. key_bytes: of a key and its value; the times of portable tiles are
    for 512, those of the Hopper kernel for its head_dim, or that to which it is padded."""
    scale = 512 if tile.hopper else key_bytes
    return TileConfig(
        rows=tile.block_m,
        block_tokens=tile.block_n,
        num_programs=num_sms * tile.ctas_per_sm,
        block_ns=(tile.block_ns[0] * scale // 512, tile.block_ns[1] * scale // 512),
        chain_ns=(tile.chain_ns[0] * scale // 512, tile.chain_ns[1] * scale // 512),
        subtiles=tile.subtiles,
        private_tokens=tile.private_n,
        paired=not tile.hopper,
        read_percent=tile.read_percent,
        ctas_per_sm=tile.ctas_per_sm,
    )
