"""One record for each card: everything that was fitted to it."""

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from trunkattn.config import AttentionConfig
from trunkattn.dtypes import HOPPER_PADDED_HEAD_DIMS
from trunkattn.planner.row_tiles.cost import CardTimes

TIMED_CAPABILITY: Final = 90  # compute capability of the cards on which the tiles were timed


class GpuFacts(NamedTuple):
    """What CUDA says of a GPU. capability: 90 for 9.0."""

    name: str
    num_sms: int
    capability: int
    l2_bytes: int


def facts_of(device: torch.device) -> GpuFacts:
    """Of a CUDA device."""
    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    return GpuFacts(properties.name, properties.multi_processor_count, capability, properties.L2_cache_size)


class Shares(NamedTuple):
    """Speed of prompt chunks and of decodes while one kernel computes both, of their speed there alone."""

    chunk_percent: int
    decode_percent: int


@dataclass(frozen=True)
class OverlapTimes:
    """The kernel that computes prompt chunks and decodes at once.

    Attributes:
        flops_per_ns: of prompt chunks alone.
        narrow: with decode tiles of 8 rows.
        wide: with decode tiles of 16 rows.
        block_ns: of a block of a decode item. An SM computes one item at a time.
        item_ns: of an item besides its blocks.
        fixed_ns: of the launch, and of what follows it.
        reads_percent: decodes wait for so much of the time in which memory gives the chunks' keys and values once.
    """

    flops_per_ns: int
    narrow: Shares
    wide: Shares
    block_ns: int
    item_ns: int
    fixed_ns: int
    reads_percent: int


@dataclass(frozen=True)
class Card:
    """A model of card.

    Attributes:
        name: for `stats.reason`.
        times: for the choice of row tiles.
        hopper_tiles: whether the times of `HOPPER_TILES` hold. Other cards of compute capability 9.0 may have
            less arithmetic to spare.
        hopper_family: whether they are trusted for everything else that the Hopper kernels compute, too: other heads
            than those of 128, other groups than 1, 2, 4, 8 and 16, sinks, soft caps, 8-bit caches and pages that are
            not of whole 16 tokens. Prompts were timed on an H200 alone.
        hopper_padded: whether they are trusted for heads that the decode kernel pads.
        overlap: for decodes that overlap prompt chunks; None: nothing is known of them on this card.
    """

    name: str
    times: CardTimes
    hopper_tiles: bool = False
    hopper_family: bool = False
    hopper_padded: bool = False
    overlap: OverlapTimes | None = None

    @property
    def description(self) -> str:
        """Its name, and what is assumed of a card that was not measured."""
        return f"{self.name}, which was not measured (2 TB/s assumed)" if self.times is _UNMEASURED else self.name

    def why_portable_decodes(self, config: AttentionConfig) -> list[str]:
        """Why the Hopper decode kernel is not trusted with an attention here; empty: it is."""
        if misfits := config.decode_misfits:
            return misfits
        if not self.hopper_tiles:
            return [f"the fast kernel was not timed on {self.name}"]
        if not self.hopper_padded and config.head_dim in HOPPER_PADDED_HEAD_DIMS:
            return [f"head_dim {config.head_dim}: the fast kernel is slower for some batches on {self.name}"]
        return [] if self.hopper_family or config.on_hopper else [self._untimed]

    def why_portable_prompts(self, config: AttentionConfig) -> list[str]:
        """The same of the kernel for prompt chunks."""
        if misfits := config.prompt_misfits:
            return misfits
        return [] if self.hopper_family or config.is_plain else [self._untimed]

    @property
    def _untimed(self) -> str:
        return f"nothing like it was timed in the fast kernel on {self.name}"


H100: Final = Card(
    name="NVIDIA H100",
    times=CardTimes(
        bytes_per_us=3_125_000,
        launch_ns=5300,
        l2_bytes_per_us=6_000_000,
        filled_ns=20_000,
        arithmetic_percent=75,
        unhidden_part=16,
        idle_percent=8,
    ),
    hopper_tiles=True,
    hopper_family=True,
    overlap=OverlapTimes(
        flops_per_ns=585_000,
        narrow=Shares(80, 87),
        wide=Shares(83, 78),
        block_ns=1352,
        item_ns=1130,
        fixed_ns=14_400,
        reads_percent=100,
    ),
)

H200: Final = Card(
    name="NVIDIA H200",
    times=CardTimes(
        bytes_per_us=4_665_000,
        launch_ns=5300,
        l2_bytes_per_us=6_000_000,
        filled_ns=20_000,
        arithmetic_percent=75,
        unhidden_part=16,
        idle_percent=8,
    ),
    hopper_tiles=True,
    hopper_family=True,
    hopper_padded=True,
    overlap=OverlapTimes(
        flops_per_ns=544_000,
        narrow=Shares(90, 68),
        wide=Shares(84, 56),
        block_ns=1030,
        item_ns=1400,
        fixed_ns=8300,
        reads_percent=0,
    ),
)

# CUDA's names are matched as a whole: the H100 PCIe and the NVL cards have other clocks, memory or power.
_CARDS: Final = (
    ("NVIDIA H100 80GB HBM3", 132, H100),
    ("NVIDIA H100", 132, H100),
    ("NVIDIA H200", 132, H200),
)

_UNMEASURED: Final = CardTimes(
    bytes_per_us=2_000_000,
    launch_ns=5000,
    l2_bytes_per_us=6_000_000,
    filled_ns=20_000,
    arithmetic_percent=75,
    unhidden_part=16,
    idle_percent=8,
)


def card_of(name: str, num_sms: int) -> Card:
    """The record of a card. Cards that were not measured get cautious values, and their description says so.

    Args:
        name: what CUDA calls the card.
        num_sms: its multiprocessors; a part of a card has fewer.
    """
    for known_name, known_sms, card in _CARDS:
        if (name, num_sms) == (known_name, known_sms):
            return card
    return Card(f"{name} with {num_sms} SMs", _UNMEASURED)
