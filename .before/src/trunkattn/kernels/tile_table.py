"""Tiles per device, as data, with the measurement that chose each (PAT §5.2).

CPU: one work item is computed by blocks of BLOCK_TOKENS keys for all its query rows; inside, two register tiles do the
matrix products. A register tile of `rows` × `vectors` keeps rows·vectors accumulators in registers: as many as fit
beside the `vectors` operands and one broadcast.
"""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from trunkattn.plan_format import DeviceModel


@dataclass(frozen=True)
class RegisterTiles:
    """Register tiles for one vector width: scores are keys × query rows, the output query rows × values.

    lanes: float32 per vector; the widths are in vectors.
    """

    lanes: int
    score_keys: int
    score_vectors: int
    output_rows: int
    output_vectors: int


# 2 Zen 5 cores at 16 lanes: 470 GFLOP/s for the scores, 250 per core for the output, against 110 per core for the
# BLAS that torch 2.13 calls there. 8 lanes: 16 registers hold 12 + 3 + 1. 4 lanes (NEON) has 32 registers again.
REGISTER_TILES: Final = MappingProxyType(
    {
        16: RegisterTiles(lanes=16, score_keys=8, score_vectors=3, output_rows=6, output_vectors=4),
        8: RegisterTiles(lanes=8, score_keys=4, score_vectors=3, output_rows=4, output_vectors=2),
        4: RegisterTiles(lanes=4, score_keys=8, score_vectors=3, output_rows=6, output_vectors=4),
    }
)

BLOCK_TOKENS: Final = 64  # 64 keys × 96 rows of scores (24 KiB) stay in a 48 KiB L1; 128 was no faster

# A token of a batch-invariant plan is always computed in the same chunk of its sequence, whatever it is batched with.
INVARIANT_CHUNK_TOKENS: Final = 256


def cpu_device(num_threads: int) -> DeviceModel:
    """The CPU as the planner sees it. 10 GB/s and 250 GFLOP/s per core give 25 FLOP/byte; a work item costs 1.5 µs."""
    return DeviceModel(
        name="cpu",
        tile_rows=512,
        row_unit=16,
        num_slots=num_threads,
        item_bytes=16_384,
        flops_per_byte=25,
        split_above_mean=False,
        split_grid=256,
    )


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
    """A tile of `decode_kernel` or of `decode_hopper`, and what the planner must know of it.

    block_ns: time of a block of keys when all those programs run: one that all rows see whole, and one with a mask.
    chain_ns: the same of one block after another in one program. subtiles: equal parts of the rows that read keys of
    their own side by side, private_n each at a time; such blocks are the ones with a mask. flat_n: BLOCK_N without
    subtiles. hopper: `decode_hopper` computes it, in a plan of fixed size all such tiles at once, and leaves no nodes
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
# On an sm_90 (head_dim 128, 16 bits), for all but single queries: `decode_hopper` of 64 rows, and of 32 where those
# would leave multiprocessors idle. Other rows, keys, stages and arrangements: docs/performance.md. The times are of the
# kernel before it had less code; with them the choice loses 0.6 % in the mean (results/calibration-h200.json).
DECODE_TILES_HOPPER: Final = (
    replace(_LOW, read_percent=98),  # as fast a reader as the others, but this decides as was measured
    GpuTile(32, 64, 4, 2, programs=2, block_ns=(1340, 1850), chain_ns=(870, 720), hopper=True),
    GpuTile(64, 64, 4, 2, programs=2, block_ns=(1460, 1820), chain_ns=(1000, 800), hopper=True),
)
TIMED_CAPABILITY: Final = 90  # of the cards on which these tiles were timed
_WIDE: Final = 128


def decode_tiles(
    kv_itemsize: int, width: int, group_size: int, hopper: bool = False, capability: int = TIMED_CAPABILITY
) -> tuple[GpuTile, ...]:
    """The tiles of an attention, ascending. kv_itemsize in bytes; width: the larger of head_dim and head_dim_v. hopper:
    `decode_hopper` computes it, of 16 bits and 128 wide. capability: of the card, 80 for 8.0."""
    timed, wide = capability == TIMED_CAPABILITY, width > _WIDE
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


@dataclass(frozen=True)
class PrefillTile(Tile):
    """A tile of `prefill_kernel`. above_rows: requests with more rows (query tokens × group size) take it."""

    above_rows: int = 64  # about what the tallest decode tile holds: up to there one tile reads a request's KV once


# 128 rows × 64 keys in 8 warps: the largest that compiles for sm_90 without spilling (head_dim 128). 370 to 396 TFLOP/s
# on long cells of an H200 (results/prefill-h200.json), where 64x32 in 4 warps reached 344 to 369 (docs/performance.md);
# others were not timed. `prefill_hopper` takes the items of 128 rows, too.
PREFILL_TILE: Final = PrefillTile(128, 64, 8, 3, programs=1)
# head_dim over 128: this spills 88 bytes on an sm_90 and reaches 200 TFLOP/s; 64x32, which spills 16, 146; of what
# does not, 32x32 in 4 warps 136, 32x64 in 8 102 and 64x16 90 (2,048 tokens behind 8k, head_dim 256, an H100)
PREFILL_TILE_WIDE: Final = PrefillTile(64, 64, 8, 2, programs=1)
# float32 (11 TFLOP/s; 32x32: 6), and heads over 128 on cards that were not timed
PREFILL_TILE_SMALL: Final = PrefillTile(64, 32, 8, 2, programs=1)
# An sm_80 keeps the queries in registers too, and would spill some 230 bytes a thread: half the keys do not
_PREFILL_TILE_UNTIMED: Final = replace(PREFILL_TILE, block_n=32)


def prefill_tile(kv_itemsize: int, width: int, capability: int = TIMED_CAPABILITY) -> PrefillTile:
    """The tile of an attention; arguments as of `decode_tiles`. Its rows hold any group that those tiles hold."""
    timed = capability == TIMED_CAPABILITY
    if kv_itemsize > 2:
        return PREFILL_TILE_SMALL
    if width > _WIDE:
        return PREFILL_TILE_WIDE if timed else PREFILL_TILE_SMALL
    return PREFILL_TILE if timed else _PREFILL_TILE_UNTIMED


@dataclass(frozen=True)
class GpuLimits:
    """Of a card. launch_ns: what a launch adds that waits for another, fitted with the tiles' times. reason: for
    `stats.reason`."""

    bytes_per_us: int
    launch_ns: int
    reason: str


_LIMITS: Final = MappingProxyType(
    {
        "NVIDIA H200": GpuLimits(4_665_000, 5300, "NVIDIA H200"),  # measured: a reduction over 4 GiB
        "NVIDIA H100": GpuLimits(3_125_000, 5300, "NVIDIA H100"),  # likewise; launch_ns of the H200
    }
)
_OTHER_CARD: Final = GpuLimits(2_000_000, 5000, "an unmeasured card (2 TB/s assumed)")


class Shares(NamedTuple):
    """Speed of chunks and of decodes while the hybrid kernel computes both, of their speed there alone."""

    chunk_percent: int
    decode_percent: int


@dataclass(frozen=True)
class HybridTimes:
    """Of the hybrid kernel on a card. flops_per_ns: of prompt chunks alone. narrow, wide: with decode tiles of 8 rows
    and of 16. block_ns: of a block of a decode item; item_ns: of an item besides; a multiprocessor computes one at a
    time. fixed_ns: of its launch, and of what follows. reads_percent: of the time in which memory gives the chunks'
    keys once; decodes wait for so much of it."""

    flops_per_ns: int
    narrow: Shares
    wide: Shares
    block_ns: int
    item_ns: int
    fixed_ns: int
    reads_percent: int


HYBRID_ROWS: Final = 16  # of a decode tile of the hybrid kernel
HYBRID_NARROW: Final = 8  # of those that it computes faster
HYBRID_KEYS: Final = 64  # of a block of one
HYBRID_WIDTH: Final = 128  # head_dim and head_dim_v; this, groups and pages: of `decode_hopper`, too
HYBRID_GROUPS: Final = (1, 2, 4, 8, 16)  # query heads a KV head
HYBRID_PAGE: Final = 16  # tokens that a page holds a multiple of
MEASURED_CARD: Final = "NVIDIA H200"
_HYBRID: Final = MappingProxyType(
    {
        # fitted to every fifth of the 330 batches of benchmarks/hybrid.py, each with four tile lists whose decodes all
        # run beside the chunks (spread of prediction over time 3.6 %), with the kernel of 5273126, whose KV heads were
        # in groups: with the one of e7b6892 32/32 takes 6 % longer than predicted. Without the reading of keys, with
        # which 24 of 110 batches at 32/32 chose lists that took 4 % longer
        "NVIDIA H200": HybridTimes(544_000, Shares(90, 68), Shares(84, 56), 1030, 1400, 8300, reads_percent=0),
        # fitted likewise, to the kernel of 9ba32d2 (spread 4.1 %; 5.8 % if decodes did not wait while keys are read);
        # with that of 1f7bec5, whose heads all take turns, 32/32 takes 8 % longer than predicted, 32/4 and 32/8 as long
        "NVIDIA H100": HybridTimes(585_000, Shares(80, 87), Shares(83, 78), 1352, 1130, 14_400, reads_percent=100),
    }
)


def hybrid_times(name: str) -> HybridTimes | None:
    """Of the card that CUDA calls `name`; None: nothing is known of it."""
    return next((times for card, times in _HYBRID.items() if name.startswith(card)), None)


def runs_hopper_tiles(name: str) -> bool:
    """Whether the card that CUDA calls `name` has the multiprocessors that the times of DECODE_TILES_HOPPER are of;
    others of compute capability 9.0 may have less arithmetic to spare."""
    return any(name.startswith(card) for card in _LIMITS)


def gpu_limits(name: str) -> GpuLimits:
    """Limits of the card that CUDA calls `name`; a card that was not measured gets a cautious default that says so."""
    return next((limits for card, limits in _LIMITS.items() if name.startswith(card)), _OTHER_CARD)


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


def prefill_device(processors: int, tile: PrefillTile) -> DeviceModel:
    """A GPU as the planner of prompt chunks sees it: a tile is computed whole, whatever rows it has; an item takes 4 µs
    to begin and to end, in which a multiprocessor reads 120 kB (128x64 on an H200: 7.5 µs of a launch of one item for
    each multiprocessor do not depend on its keys; results/prefill-h200.json)."""
    return DeviceModel(
        name=f"{tile.block_m}x{tile.block_n} prefill",
        tile_rows=tile.block_m,
        row_unit=tile.block_m,
        num_slots=processors * tile.programs,
        item_bytes=120_000,
        flops_per_byte=170,
        split_above_mean=False,
        split_grid=128,
        by_schedule=True,
    )
