"""Cards."""

from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, NamedTuple


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


TIMED_CAPABILITY: Final = 90  # of the cards on which these tiles were timed
