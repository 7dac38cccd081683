"""One record for each model of card, with every constant that was fitted to it. A `Card` adds what CUDA reports.

torch is imported where CUDA is asked, because a command finds a card by its name before torch is loaded.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from trunkattn.planner.device import CardTimes

if TYPE_CHECKING:
    import torch

E4M3_NEEDS: Final = "expected compute capability 8.9 or later for this dtype; use torch.float8_e5m2 on this GPU"
_HAS_E4M3: Final = 89  # compute capability
_OLDEST: Final = 80  # compute capability from which on the portable kernels run
HOPPER: Final = 90  # compute capability of the cards on which the tiles were timed, and of the Hopper kernels


class GpuFacts(NamedTuple):
    """The properties that CUDA reports of a GPU. capability: 90 for compute capability 9.0."""

    name: str
    num_sms: int
    capability: int
    l2_bytes: int


def facts_of(device: "torch.device") -> GpuFacts:
    """The properties that CUDA reports of a device."""
    import torch

    properties = torch.cuda.get_device_properties(device)
    capability = 10 * properties.major + properties.minor
    return GpuFacts(properties.name, properties.multi_processor_count, capability, properties.L2_cache_size)


class Speeds(NamedTuple):
    """Speed of prompt chunks and of decodes while one kernel computes both, in percent of their speed if it computes
    only one of them."""

    chunk_percent: int
    decode_percent: int


@dataclass(frozen=True)
class OverlapTimes:
    """Measured times of the kernel that computes prompt chunks and decodes at once.

    Attributes:
        flops_per_ns: arithmetic rate of prompt chunks without decodes.
        narrow: speeds with decode tiles of 8 rows.
        wide: speeds with decode tiles of 16 rows.
        block_ns: time of a block of a decode item. An SM computes one item at a time.
        item_ns: time of a decode item in addition to its blocks.
        fixed_ns: time of the launch and of what follows it.
        reads_percent: decodes wait for this percentage of the time in which the chunks' keys and values are read once.
    """

    flops_per_ns: int
    narrow: Speeds
    wide: Speeds
    block_ns: int
    item_ns: int
    fixed_ns: int
    reads_percent: int


@dataclass(frozen=True)
class EngineTimes:
    """Times of a serving engine's step on a card, without our attention, fitted to measured times per token.

    Attributes:
        flops_per_us: rate of matrix products with weights in steps of decodes.
        prompt_flops_per_us: the same rate in steps with prompt chunks.
        prompt_us: time that a step with prompt chunks takes in addition, because no CUDA graph covers all of it.
        layer_us: time of a layer's norms, rotations and all else that is neither weights nor attention.
        sequence_us: time to sample one sequence from 128,256 logits.
        flash_us: fixed time of FlashAttention's decode kernel.
        flash_bytes_per_us: rate at which it reads distinct keys and values; the time adds to that of the next field.
        flash_keys_per_us: rate at which it computes with keys and values, each counted for every query that sees it, as
            bytes of 16-bit numbers.
        memory_bytes: memory of the card.
    """

    flops_per_us: float
    prompt_flops_per_us: float
    prompt_us: float
    layer_us: float
    sequence_us: float
    flash_us: float
    flash_bytes_per_us: float
    flash_keys_per_us: float
    memory_bytes: int


@dataclass(frozen=True)
class CardModel:
    """The measurements of a model of card.

    Attributes:
        name: its name in `stats.reason`.
        times: the times for the choice of row tiles.
        runs_hopper_kernels: whether the times of the Hopper kernels' tiles are valid. Other cards of compute capability
            9.0 may have less arithmetic to spare.
        pads_heads: whether the Hopper kernel is also faster for heads that it pads.
        overlap: the times of decodes that overlap prompt chunks; None: not measured.
        engine: the times for predictions of whole steps; None: no engine was measured on it.
    """

    name: str
    times: CardTimes
    runs_hopper_kernels: bool = False
    pads_heads: bool = False
    overlap: OverlapTimes | None = None
    engine: EngineTimes | None = None


@dataclass(frozen=True)
class Card:
    """A card: the properties that CUDA reports, and the measurements of its model."""

    facts: GpuFacts
    model: CardModel

    @property
    def num_sms(self) -> int:
        """Streaming multiprocessors."""
        return self.facts.num_sms

    @property
    def capability(self) -> int:
        """Compute capability, 90 for 9.0."""
        return self.facts.capability

    @property
    def has_pdl(self) -> bool:
        """Whether a kernel may start before the one ahead of it ends (programmatic dependent launch)."""
        return self.capability >= HOPPER

    @property
    def has_e4m3(self) -> bool:
        """Whether the card converts float8_e4m3fn."""
        return self.capability >= _HAS_E4M3

    @property
    def why_too_old(self) -> list[str]:
        """Why no kernel at all runs on the card; empty if some do."""
        if self.capability >= _OLDEST:
            return []
        return ["compute capability {}.{}: expected 8.0 or later".format(*divmod(self.capability, 10))]

    @property
    def why_not_hopper(self) -> list[str]:
        """Why kernels for compute capability 9.0 do not run on the card; empty if they do."""
        major, minor = divmod(self.capability, 10)
        is_hopper = self.capability == HOPPER
        return [] if is_hopper else [f"compute capability {major}.{minor}: the fast kernels are for 9.0"]

    @property
    def why_hopper_untimed(self) -> list[str]:
        """Why the times of the Hopper kernels for decodes do not hold on the card; empty if they do."""
        return [] if self.model.runs_hopper_kernels else [f"the fast kernel was not timed on {self.model.name}"]

    @property
    def description(self) -> str:
        """The card's name, and what is assumed if it was not measured."""
        name = self.model.name
        return f"{name}, which was not measured (2 TB/s assumed)" if self.model.times is _UNMEASURED else name


H100: Final = CardModel(
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
    runs_hopper_kernels=True,
    overlap=OverlapTimes(
        flops_per_ns=585_000,
        narrow=Speeds(80, 87),
        wide=Speeds(83, 78),
        block_ns=1352,
        item_ns=1130,
        fixed_ns=14_400,
        reads_percent=100,
    ),
    engine=EngineTimes(
        flops_per_us=895e6,
        prompt_flops_per_us=600e6,
        prompt_us=2500.0,
        layer_us=38.2,
        sequence_us=7.2,
        flash_us=10.5,
        flash_bytes_per_us=4.98e6,
        flash_keys_per_us=6.83e6,
        memory_bytes=80 * 10**9,
    ),
)

H200: Final = CardModel(
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
    runs_hopper_kernels=True,
    pads_heads=True,
    overlap=OverlapTimes(
        flops_per_ns=544_000,
        narrow=Speeds(90, 68),
        wide=Speeds(84, 56),
        block_ns=1030,
        item_ns=1400,
        fixed_ns=8300,
        reads_percent=0,
    ),
    engine=EngineTimes(
        flops_per_us=1027e6,
        prompt_flops_per_us=600e6,
        prompt_us=2500.0,
        layer_us=37.2,
        sequence_us=9.85,
        flash_us=9.87,
        flash_bytes_per_us=9.65e6,
        flash_keys_per_us=6.59e6,
        memory_bytes=141 * 10**9,
    ),
)

# CUDA's names are matched as a whole: the H100 PCIe and the NVL cards have other clocks, memory or power.
_MODELS: Final = (
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


def card_of(facts: GpuFacts) -> Card:
    """The card that CUDA describes. A partition of a card has fewer SMs, so it counts as another model. Cards that
    were not measured get cautious values, and their description says so."""
    for name, num_sms, model in _MODELS:
        if (facts.name, facts.num_sms) == (name, num_sms):
            return Card(facts, model)
    return Card(facts, CardModel(f"{facts.name} with {facts.num_sms} SMs", _UNMEASURED))


_L2_BYTES: Final = 50 << 20  # of all cards in the table

# Stands in where there is no GPU: what an H100 refuses, every card does.
ASSUMED: Final = card_of(GpuFacts("NVIDIA H100 80GB HBM3", 132, HOPPER, _L2_BYTES))


def card_named(name: str) -> Card:
    """The card with this name, or of the model with this name, in upper or lower case, on which engines were measured.

    Raises:
        ValueError: there is no such card.
    """
    for cuda_name, num_sms, model in _MODELS:
        if model.engine and name.lower() in (cuda_name.lower(), model.name.lower(), model.name.split()[-1].lower()):
            return Card(GpuFacts(cuda_name, num_sms, HOPPER, _L2_BYTES), model)
    known = ", ".join(dict.fromkeys(model.name for _, _, model in _MODELS if model.engine))
    raise ValueError(f"gpu={name!r}: expected a card whose engines were measured: {known}")


def card_at(device: "torch.device | str") -> Card:
    """The card of a CUDA device. Without a GPU, an H100 stands in."""
    import torch

    return card_of(facts_of(torch.device(device))) if torch.cuda.is_available() else ASSUMED
