"""A kernel as the rest of the house sees it, the table of all kernels, and the choice among them.

What differs between kernels is one value, `Kernel`. What it says is in a file `spec.py` beside the kernel's source. A
spec imports no compiler, so a plan, `AttentionConfig.supports`, `trunkattn doctor`, the support matrix and the plug-ins
for other engines all ask this table.

To add a kernel: a folder with its source and its spec, and a row in `KERNELS`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Final, NamedTuple

import torch

from trunkattn.config import AttentionConfig
from trunkattn.gpu.cards import Card, card_at
from trunkattn.gpu.hopper import spec as hopper
from trunkattn.gpu.layer import Geometry, Tensors
from trunkattn.gpu.mla import spec as mla
from trunkattn.gpu.portable import spec as portable
from trunkattn.gpu.tiles import PORTABLE_DECODE, GpuTile, MergeTile, PrefillTile
from trunkattn.numerics import MAX_GPU_SOFT_CAP
from trunkattn.training import spec as training


class Work(Enum):
    """What a launch computes."""

    DECODE = "rows of tiles"
    LATENT = "rows of tiles over a latent cache"
    PREFILL = "prompt chunks"
    BOTH = "prompt chunks and rows of tiles at once"
    MERGE = "partial results"
    FORWARD = "the forward pass of training"
    BACKWARD = "the backward pass of training"
    TREE = "both passes of training on a prefix tree"
    BATCH = "both passes of training on sequences of one length"


def _reads_any(tensors: Tensors, geometry: Geometry) -> list[str]:
    return []


@dataclass(frozen=True)
class Kernel:
    """One kernel. Its configuration is an `AttentionConfig`, in training a `TrainingConfig`.

    Attributes:
        name: what `stats.reason` and the support matrix call it.
        work: what it computes.
        module: its source, imported when it is first used. That of attention has `bind`, see `gpu.launch.KernelSource`.
            That of a pass of training has `forward` or `backward`, as `training.forward` and `training.backward` have
            them, and, unless it is portable, `reads(q, k, v)`: whether it takes these tensors. That of both passes has
            `attend`, as `training.cudnn_trees` and `training.torch_cudnn` have it.
        refuses: why it does not compute a configuration on a card; empty: it does.
        tiles: what a planner may choose from, with their prices, in ascending heights; in training the preferred one
            comes first.
        refuses_layer: why it cannot read the tensors of a layer, which are known only at `run`; empty: it can.
        portable: it stands in for the others of its work where they refuse a layer.
    """

    name: str
    work: Work
    module: str
    refuses: Callable[[Any, Card], list[str]]
    tiles: Callable[[Any, Card], tuple[Any, ...]]
    refuses_layer: Callable[[Tensors, Geometry], list[str]] = _reads_any
    portable: bool = False

    def source(self) -> ModuleType:
        """The module of its source. Imports its compiler."""
        return import_module(self.module)


# The first that does not refuse is taken. Portable kernels stand last and refuse least.
KERNELS: Final = (
    Kernel(
        name=hopper.DECODE,
        work=Work.DECODE,
        module=f"{hopper.MODULE}.decode",
        refuses=hopper.refuses_decode,
        tiles=hopper.decode_tiles,
        refuses_layer=hopper.refuses_layer,
    ),
    Kernel(
        name=hopper.PREFILL,
        work=Work.PREFILL,
        module=f"{hopper.MODULE}.prefill",
        refuses=hopper.refuses_prefill,
        tiles=hopper.prefill_tiles,
        refuses_layer=hopper.refuses_layer,
    ),
    Kernel(
        name=hopper.BOTH,
        work=Work.BOTH,
        module=f"{hopper.MODULE}.prefill_decode",
        refuses=hopper.refuses_both,
        tiles=hopper.prefill_tiles,
        refuses_layer=hopper.refuses_layer,
    ),
    Kernel(
        name=PORTABLE_DECODE,
        work=Work.DECODE,
        module=f"{portable.MODULE}.decode",
        refuses=portable.refuses,
        tiles=portable.decode_tiles,
        portable=True,
    ),
    Kernel(
        name=mla.DECODE,
        work=Work.LATENT,
        module=f"{mla.MODULE}.decode",
        refuses=mla.refuses_decode,
        tiles=mla.decode_tiles,
        refuses_layer=mla.refuses_layer,
    ),
    Kernel(
        name=mla.PORTABLE,
        work=Work.LATENT,
        module=f"{mla.MODULE}.portable",
        refuses=mla.refuses_portable,
        tiles=mla.portable_tiles,
        portable=True,
    ),
    Kernel(
        name="portable prefill",
        work=Work.PREFILL,
        module=f"{portable.MODULE}.prefill",
        refuses=portable.refuses,
        tiles=portable.prefill_tiles,
        portable=True,
    ),
    Kernel(
        name="portable merge",
        work=Work.MERGE,
        module=f"{portable.MODULE}.merge",
        refuses=portable.refuses_merge,
        tiles=portable.merge_tiles,
        portable=True,
    ),
    Kernel(
        name="cuDNN flex_attention",
        work=Work.TREE,
        module="trunkattn.training.cudnn_trees",
        refuses=training.refuses_cudnn,
        tiles=training.no_tiles,
    ),
    Kernel(
        name="cuDNN of PyTorch",
        work=Work.BATCH,
        module="trunkattn.training.torch_cudnn",
        refuses=training.refuses_torch_cudnn,
        tiles=training.no_tiles,
    ),
    Kernel(
        name="FlashAttention-4 forward",
        work=Work.FORWARD,
        module="trunkattn.training.flash_attention_4",
        refuses=training.refuses_fa4_forward,
        tiles=training.no_tiles,
    ),
    Kernel(
        name="cuDNN forward",
        work=Work.FORWARD,
        module="trunkattn.training.cudnn_forward",
        refuses=training.refuses_cudnn_forward,
        tiles=training.no_tiles,
    ),
    Kernel(
        name="Hopper forward",
        work=Work.FORWARD,
        module=f"{training.HOPPER_MODULE}.forward",
        refuses=training.refuses_hopper_forward,
        tiles=training.hopper_forward_tiles,
    ),
    Kernel(
        name="portable forward",
        work=Work.FORWARD,
        module="trunkattn.training.forward",
        refuses=training.refuses,
        tiles=training.forward_tiles,
        portable=True,
    ),
    Kernel(
        name="FlashAttention-4 backward",
        work=Work.BACKWARD,
        module="trunkattn.training.flash_attention_4",
        refuses=training.refuses_fa4_backward,
        tiles=training.no_tiles,
    ),
    Kernel(
        name="Hopper backward",
        work=Work.BACKWARD,
        module=f"{training.HOPPER_MODULE}.backward",
        refuses=training.refuses_hopper_backward,
        tiles=training.hopper_backward_tiles,
    ),
    Kernel(
        name="portable backward",
        work=Work.BACKWARD,
        module="trunkattn.training.backward",
        refuses=training.refuses,
        tiles=training.backward_tiles,
        portable=True,
    ),
)


class Choice(NamedTuple):
    """The kernel for some work, and why each kernel before it in the table refuses. kernel: None if all refuse."""

    kernel: Kernel | None
    passed_over: Mapping[str, tuple[str, ...]]

    @property
    def is_fast(self) -> bool:
        """Whether a kernel was chosen that is no portable one."""
        return self.kernel is not None and not self.kernel.portable

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why only a portable kernel computes it, or none: what each kernel before it said, each reason once. Empty if
        a fast kernel was chosen, whatever those for other cards said."""
        if self.is_fast:
            return ()
        return tuple(dict.fromkeys(reason for reasons in self.passed_over.values() for reason in reasons))


def choose(work: Work, config: Any, card: Card, table: tuple[Kernel, ...] = KERNELS) -> Choice:
    """The first kernel of the table that does not refuse some work of a configuration on a card.

    Args:
        work: the work. `DECODE` and `LATENT` are equivalent: the configuration tells whether its cache is latent.
        config: an `AttentionConfig`, in training a `TrainingConfig`.
        card: the card.
        table: the kernels, in the order in which they are asked.
    """
    passed_over: dict[str, tuple[str, ...]] = {}
    if work in (Work.DECODE, Work.LATENT):
        work = Work.DECODE if config.latent_dim is None else Work.LATENT
    for kernel in (each for each in table if each.work is work):
        reasons = kernel.refuses(config, card)
        if not reasons:
            return Choice(kernel, passed_over)
        passed_over[kernel.name] = tuple(reasons)
    return Choice(None, passed_over)


def all_that_compute(work: Work, config: Any, card: Card) -> list[Kernel]:
    """Every kernel that does not refuse, in the table's order. If one cannot read some tensors, the next one replaces
    it."""
    return [kernel for kernel in KERNELS if kernel.work is work and not kernel.refuses(config, card)]


def kernel_named(name: str, table: tuple[Kernel, ...] = KERNELS) -> Kernel:
    """The kernel with this name, which launches and tiles carry."""
    return next(kernel for kernel in table if kernel.name == name)


def portable_kernel(work: Work) -> Kernel:
    """The portable kernel for some work, which replaces a kernel that cannot read a layer."""
    return next(kernel for kernel in KERNELS if kernel.work is work and kernel.portable)


@dataclass(frozen=True)
class Kernels:
    """The kernels of an attention on a card, and their tiles.

    Attributes:
        decode, prefill: the choices. prefill is None with batch invariance and for a latent cache: all requests are
            rows of tiles then (see `gpu.attention`).
        both: the kernel that computes prompt chunks and decodes at once; None if they need two launches.
        tiles: the tiles of decodes. A tile names its kernel, which may differ from `decode`.
        prefill_tile: the tile of prompt chunks; None if `prefill` is.
        merge: the kernel for the partial results that no other kernel merges.
        merge_tile: its tile.
    """

    decode: Choice
    prefill: Choice | None
    both: Kernel | None
    tiles: tuple[GpuTile, ...]
    prefill_tile: PrefillTile | None
    merge: Kernel
    merge_tile: MergeTile


def kernels_of(config: AttentionConfig, card: Card, table: tuple[Kernel, ...] = KERNELS) -> Kernels:
    """The kernels of an attention on a card.

    Raises:
        ValueError: no kernel computes some work of it; the message has every reason. A missing kernel for prompt chunks
            and decodes at once is no error, because two launches do the same.
    """
    if reasons := refusals(replace(config, execution="auto"), card, table):
        raise ValueError("; ".join(reasons))
    decode, merge = choose(Work.DECODE, config, card, table), choose(Work.MERGE, config, card, table).kernel
    prefill = both = prefill_tile = None
    if _has_prefill(config):
        prefill = choose(Work.PREFILL, config, card, table)
        both = choose(Work.BOTH, config, card, table).kernel
        assert prefill.kernel
        (prefill_tile,) = prefill.kernel.tiles(config, card)
    assert decode.kernel and merge
    (merge_tile,) = merge.tiles(config, card)
    return Kernels(
        decode=decode,
        prefill=prefill,
        both=both,
        tiles=decode.kernel.tiles(config, card),
        prefill_tile=prefill_tile,
        merge=merge,
        merge_tile=merge_tile,
    )


def _has_prefill(config: AttentionConfig) -> bool:
    """Whether prompt chunks have their own kernel."""
    return not config.batch_invariant and config.latent_dim is None


def refusals(config: AttentionConfig, card: Card, table: tuple[Kernel, ...] = KERNELS) -> list[str]:
    """Why an attention cannot run on a card; empty if it can. For each work that all kernels refuse, the reasons are
    those of the last one, which refuses least."""
    if config.logits_soft_cap is not None and config.logits_soft_cap > MAX_GPU_SOFT_CAP:
        return [f"logits_soft_cap={config.logits_soft_cap}: expected at most {MAX_GPU_SOFT_CAP:g}, or None for no cap"]
    works = [Work.DECODE, *([Work.PREFILL] if _has_prefill(config) else [])]
    works += [Work.BOTH] if config.execution == "overlapped" else []
    reasons = list[str]()
    for work in works:
        choice = choose(work, config, card, table)
        if choice.kernel is None:
            last = list(choice.passed_over.values())[-1] if choice.passed_over else (f"nothing computes {work.value}",)
            if work is Work.BOTH:
                last = (f"execution='overlapped': {', '.join(last)}; use execution='auto' or 'serial'",)
            reasons += last
    return list(dict.fromkeys(reasons))


def unsupported(config: AttentionConfig, device: torch.device) -> list[str]:
    """Why a GPU does not run an attention; empty: it does."""
    if 0 < torch.cuda.device_count() <= (device.index or 0):
        return [f"torch finds {torch.cuda.device_count()} CUDA devices, numbered from 0"]
    reasons = []
    if not torch.cuda.is_available():
        reasons.append("torch finds no CUDA device; use the device cpu, or a CUDA build of torch and an NVIDIA GPU")
    if find_spec("triton") is None:
        reasons.append("the package triton is not installed; use pip install triton")
    return reasons + refusals(config, card_at(device))
