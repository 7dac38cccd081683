"""Cards, kernels and plans for tests that need no GPU."""

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.gpu.arrays import Arrays, GpuPlan, Lists
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.cards import H200, Card, CardModel, GpuFacts
from trunkattn.gpu.hopper import spec as hopper
from trunkattn.gpu.kernel import Choice, Kernels, Work, kernel_named, portable_kernel
from trunkattn.gpu.layer import Geometry
from trunkattn.gpu.portable.spec import merge_tile
from trunkattn.gpu.tiles import GpuTile, PrefillTile
from trunkattn.planner.work_list import ChunkLimits, TileLimits, TileList

CPU = torch.device("cpu")


def make_card(num_sms: int = 132, capability: int = 90, model: CardModel = H200) -> Card:
    """A card of any size and generation with the constants of a known one."""
    return Card(GpuFacts(model.name, num_sms, capability, 50 << 20), model)


def kernels_with(
    tiles: Sequence[GpuTile], geometry: Geometry, prefill_tile: PrefillTile | None = None, both: bool = False
) -> Kernels:
    """The kernels that tiles name. both: prompt chunks and decodes share one."""
    prefill = portable_kernel(Work.PREFILL)
    if prefill_tile and prefill_tile.persistent:
        prefill = kernel_named(hopper.PREFILL)
    return Kernels(
        decode=Choice(kernel_named(tiles[-1].kernel), {}),
        prefill=Choice(prefill, {}) if prefill_tile else None,
        both=kernel_named(hopper.BOTH) if both else None,
        tiles=tuple(tiles),
        prefill_tile=prefill_tile,
        merge=portable_kernel(Work.MERGE),
        merge_tile=merge_tile(geometry.num_qo_heads, geometry.head_dim_v),
    )


def plan_with(
    lists: Lists | tuple[TileList, NDArray[np.int32]],
    geometry: Geometry,
    tiles: Sequence[GpuTile],
    card: Card,
    prefill_tile: PrefillTile | None = None,
    streams: bool = False,
) -> GpuPlan:
    """A plan of its own size on the CPU."""
    lists = Lists(*lists)
    kernels = kernels_with(tiles, geometry, prefill_tile, both=lists.num_overlapped > 0)
    return Arrays(kernels, card, CPU, streams).place(lists, geometry)


def reserved(
    limits: TileLimits,
    geometry: Geometry,
    tiles: Sequence[GpuTile],
    card: Card,
    chunks: tuple[ChunkLimits, PrefillTile, bool] | None = None,
    device: str | torch.device = "cpu",
) -> GpuPlan:
    """An empty plan of fixed size. chunks: limits, tile, and whether they share a kernel with decodes."""
    room, prefill_tile, both = chunks or (None, None, False)
    kernels = kernels_with(tiles, geometry, prefill_tile, both)
    return Arrays(kernels, card, torch.device(device)).reserve(limits, geometry, room)


def refilled(plan: GpuPlan, lists: Lists | tuple[TileList, NDArray[np.int32]]) -> GpuPlan:
    """A reserved plan with other lists."""
    kernels = kernels_with(plan.tiles, plan.geometry, plan.chunks.tile if plan.chunks else None, both=True)
    return Arrays(kernels, plan.card, plan.flat.device).place(Lists(*lists), plan.geometry, plan)


def overlap_always(backend: GpuBackend) -> None:
    """Decodes beside prompt chunks always share a launch with them, for which portable kernels stand in."""
    kernels = replace(backend._kernels, both=kernel_named(hopper.BOTH))
    backend._kernels, backend._arrays = kernels, Arrays(kernels, backend._arrays._card, backend.device)
    backend._planner.overlap = SimpleNamespace(is_worth_for=lambda chunks, other: True)  # type: ignore[misc,assignment]
