"""Tiles of the decode kernels, as data (PAT §5.2)."""

from dataclasses import dataclass, replace
from typing import Final

from trunkattn.gpu.tuning.cards import TIMED_CAPABILITY
from trunkattn.planner.row_tiles.choice import TileKind
from trunkattn.planner.work_list import DeviceModel


@dataclass(frozen=True)
class Tile:
    """BLOCK_M query rows × BLOCK_N keys of one program. warps, stages: how it is compiled. programs: that run at once
    on a multiprocessor."""

    block_m: int
    block_n: int
    warps: int
    stages: int
    programs: int


@dataclass(frozen=True)
class GpuTile(Tile):
    """A tile of `decode_kernel` or of `hopper.decode`, and what the planner must know of it.

    block_ns: time of a block of keys when all those programs run: one that all rows see whole, and one with a mask.
    chain_ns: the same of one block after another in one program. subtiles: equal parts of the rows that read keys of
    their own side by side, private_n each at a time; such blocks are the ones with a mask. flat_n: BLOCK_N without
    subtiles. hopper: `hopper.decode` computes it, in a plan of fixed size all such tiles at once, and leaves no nodes
    to another tile. read_percent: of the bandwidth that it reaches.
    """

    block_ns: tuple[int, int]
    chain_ns: tuple[int, int]
    subtiles: int = 1
    private_n: int = 32
    flat_n: int = 64
    hopper: bool = False
    read_percent: int = 100

    @property
    def merges(self) -> bool:
        """Whether its items may merge partials of other launches: with those of more rows it would spill."""
        return self.block_m == 16


# Measured on an H200 (head_dim 128, page 16): the best two of 19 low and 25 tall tiles. The best tiling of these two
# is 0.1 % slower in the mean, 3.4 % at most, than the best of five tiles on 80 batches (docs/
# performance.md). The times are a fit to those runs (benchmarks/calibrate.py).
_LOW: Final = GpuTile(16, 64, 2, 2, programs=4, block_ns=(2130, 3470), chain_ns=(2150, 2160))
_TALL: Final = GpuTile(64, 64, 4, 3, programs=2, block_ns=(2090, 1940), chain_ns=(490, 2550), subtiles=4)
DECODE_TILES: Final = (_LOW, _TALL)
# 8-bit keys are converted by every warp: 256_1024 takes 142 µs with one warp of 32 keys, 170 to 221 with the others.
# For 64 rows converted keys go back to shared memory; a trunk is still faster there (1,1024_2048,32: 185 µs, low 255).
# Twice the private keys spill 184 bytes, and 28 shared batches take 2.5 % longer on an H100; with half the shared keys
# they take 3.5 % longer.
DECODE_TILES_FP8: Final = (
    GpuTile(16, 32, 1, 3, programs=8, block_ns=(2290, 2300), chain_ns=(900, 1500)),
    replace(_TALL, block_ns=(3240, 2200), chain_ns=(760, 2000), private_n=16),
)
# head_dim over 128: of 64 rows the accumulators alone would fill the registers. Low tiles in 2 warps spill where they
# merge, and 11 batches of an H100 (head_dim 256 and 192) take 1 to 11 % longer.
DECODE_TILES_WIDE: Final = (
    replace(_LOW, warps=4, programs=2),
    GpuTile(32, 64, 4, 2, 2, (2480, 3550), (1000, 2430), subtiles=2, private_n=16, flat_n=32),
)
# float32 is multiplied without tensor cores: 64_1024 of 16/8 heads takes 427 µs on an H100, with 32 keys in 4 warps 668
# and in 8 721; with head_dim 256 950 in 4 warps, which spill, and 2,800 in 2; 8 do not spill, and were not timed. The
# times in the rows are of the tiles of other types.
DECODE_TILES_FP32: Final = (
    replace(_LOW, warps=4, programs=2),
    GpuTile(32, 64, 8, 2, 2, (2480, 3550), (1000, 2430), subtiles=2, private_n=16, flat_n=32),
)
DECODE_TILES_FP32_WIDE: Final = (
    replace(_LOW, warps=8, programs=1),
    GpuTile(32, 32, 8, 2, 1, (1240, 3550), (500, 2430), subtiles=2, private_n=16, flat_n=32),
)
# On cards that were not timed: they spill neither on an sm_80 nor on an sm_100
_FP32_UNTIMED: Final = (
    GpuTile(16, 32, 8, 2, programs=2, block_ns=(1065, 1735), chain_ns=(1075, 1080)),
    GpuTile(32, 16, 8, 2, 1, (310, 1775), (250, 2430), subtiles=2, private_n=16, flat_n=16),
)
# On an sm_90 (head_dim 128, 16 bits), for all but single queries: `hopper.decode` of 64 rows, and of 32 where those
# would leave multiprocessors idle. Other rows, keys, stages and arrangements: docs/performance.md. The times are of the
# kernel before it had less code; with them the choice loses 0.6 % in the mean (results/calibration-h200.json).
DECODE_TILES_HOPPER: Final = (
    replace(_LOW, read_percent=98),  # as fast a reader as the others, but this decides as was measured
    GpuTile(32, 64, 4, 2, programs=2, block_ns=(1340, 1850), chain_ns=(870, 720), hopper=True),
    GpuTile(64, 64, 4, 2, programs=2, block_ns=(1460, 1820), chain_ns=(1000, 800), hopper=True),
)
WIDE: Final = 128


def decode_tiles(
    kv_itemsize: int, width: int, group_size: int, hopper: bool = False, capability: int = TIMED_CAPABILITY
) -> tuple[GpuTile, ...]:
    """The tiles of an attention, ascending. kv_itemsize in bytes; width: the larger of head_dim and head_dim_v. hopper:
    `hopper.decode` computes it, of 16 bits and 128 wide. capability: of the card, 80 for 8.0."""
    timed, wide = capability == TIMED_CAPABILITY, width > WIDE
    tiles: tuple[GpuTile, ...] = DECODE_TILES_HOPPER if hopper else DECODE_TILES
    if kv_itemsize > 2:
        tiles = (DECODE_TILES_FP32_WIDE if wide else DECODE_TILES_FP32) if timed else _FP32_UNTIMED
    elif wide:
        tiles = DECODE_TILES_WIDE
    elif kv_itemsize == 1:
        tiles = DECODE_TILES_FP8
    if not timed or (wide and kv_itemsize == 1):  # wide fp8 spills in 4 warps on an sm_90, and was not timed
        tiles = tuple(_in_eight_warps(tile) for tile in tiles)
    tiles = tuple(tile for tile in tiles if tile.block_m >= group_size)
    fits = all(tile.block_m // tile.subtiles >= group_size for tile in tiles)
    return tiles if fits else without_subtiles(tiles)


def _in_eight_warps(tile: GpuTile) -> GpuTile:
    """What a card that was not timed takes: tall tiles in 4 warps spill on an sm_80 or an sm_100, or both. One program
    of 8 is taken to compute what two of 4 do."""
    if tile.subtiles == 1 or tile.warps == 8:
        return tile
    full, masked = tile.block_ns
    return replace(tile, warps=8, programs=1, block_ns=(full // 2, masked // 2), private_n=16, flat_n=32)


def without_subtiles(tiles: tuple[GpuTile, ...]) -> tuple[GpuTile, ...]:
    """The same tiles, all of whose rows read all keys: for items that are packs."""
    return tuple(_flat(tile) if tile.subtiles > 1 else tile for tile in tiles)


def _flat(tile: GpuTile) -> GpuTile:
    """A block takes as much less time as it has fewer keys."""
    less = tile.block_n // tile.flat_n
    block_ns, chain_ns = ((full // less, masked // less) for full, masked in (tile.block_ns, tile.chain_ns))
    return replace(tile, subtiles=1, block_n=tile.flat_n, block_ns=block_ns, chain_ns=chain_ns)


def gpu_device(processors: int, rows: int) -> DeviceModel:
    """A GPU as the packing policies see it: rows of the tallest tile, 2 programs a multiprocessor, 170 FLOP in the time
    of a byte."""
    return DeviceModel(
        name="gpu",
        tile_rows=rows,
        row_unit=16,
        num_slots=2 * processors,
        item_bytes=12_000,
        flops_per_byte=170,
        split_above_mean=True,
        split_grid=64,
    )


def tile_kind(tile: GpuTile, processors: int, key_bytes: int = 512) -> TileKind:
    """A tile of the table as the planner sees it. key_bytes: of a key and its value; the table's times are for 512."""
    return TileKind(
        rows=tile.block_m,
        block_tokens=tile.block_n,
        programs=processors * tile.programs,
        block_ns=(tile.block_ns[0] * key_bytes // 512, tile.block_ns[1] * key_bytes // 512),
        chain_ns=(tile.chain_ns[0] * key_bytes // 512, tile.chain_ns[1] * key_bytes // 512),
        subtiles=tile.subtiles,
        private_tokens=tile.private_n,
        paired=not tile.hopper,
        read_percent=tile.read_percent,
        together=tile.programs,
    )
