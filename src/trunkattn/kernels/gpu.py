"""GPU executor of a tile list (PAT §3.4: pack, forward, merge): its arrays on the device, and its launches.

Launch order: items that merge nothing, by tile height; then items that merge what those left; then the merges that no
item does. Every launch is a number of programs that read their counts from device memory.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.kernels.decode import decode_kernel
from trunkattn.kernels.merge_partials import merge_kernel
from trunkattn.kernels.tile_table import GpuTile
from trunkattn.plan_format import ITEM_COLUMNS, TileLimits, TileList

_MERGE_PROGRAMS = 16  # of one warp or two on a multiprocessor; each reads a few kilobytes


@dataclass(frozen=True)
class Geometry:
    """What the launches must know of an attention and a step, besides the tensors."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    run: int  # tokens of a run
    window: int
    masked: bool  # queries of one sequence see different tokens
    soft_cap: float | None
    sinks: bool


@dataclass(frozen=True)
class Card:
    """processors: multiprocessors. overlaps: a kernel may start before the one ahead of it ends (from sm_90 on)."""

    processors: int
    overlaps: bool


@dataclass(frozen=True)
class GpuPlan:
    """A tile list on the device: arrays of `sizes` elements, one after the other in `flat`.

    launches: (bucket, programs); the bucket after the last, 2 * heights, is the merge kernel.
    """

    flat: torch.Tensor
    sizes: dict[str, int]
    launches: tuple[tuple[int, int], ...]
    geometry: Geometry

    @cached_property
    def arrays(self) -> dict[str, torch.Tensor]:
        """The parts of `flat` by name."""
        return dict(zip(self.sizes, self.flat.split(list(self.sizes.values())), strict=True))


def launch_order(heights: int) -> list[int]:
    """Buckets that merge nothing before those that do, the tallest first."""
    return [*range(heights - 1, -1, -1), *range(2 * heights - 1, heights - 1, -1)]


def upload(
    tiles: TileList, positions: NDArray[np.int32], geometry: Geometry, card: Card, device: torch.device
) -> GpuPlan:
    """Sends a tile list to the device. positions [num_query_tokens]: place in the sequence."""
    host = _host_arrays(tiles, positions)
    sizes = {name: _aligned(array.size) for name, array in host.items()}
    flat = torch.empty(sum(sizes.values()), dtype=torch.int32, device=device)
    heights, counts = len(tiles.counts) // 2, np.diff(tiles.counts)
    tasks = [(bucket, int(counts[bucket]) * geometry.num_kv_heads) for bucket in launch_order(heights)]
    tasks.append(
        (2 * heights, min(len(tiles.merge_queries) * geometry.num_qo_heads, card.processors * _MERGE_PROGRAMS))
    )
    plan = GpuPlan(flat, sizes, tuple(launch for launch in tasks if launch[1]), geometry)
    _send(plan, host)
    return plan


def reserve(
    limits: TileLimits, tiles: tuple[GpuTile, ...], geometry: Geometry, card: Card, device: torch.device
) -> GpuPlan:
    """An empty plan for any tile list within the limits: every launch, with as many programs as the device holds."""
    heights = len(tiles)
    sizes = {
        "counts": 2 * heights + 2, "positions": limits.query_tokens, "items": limits.items * ITEM_COLUMNS,
        "queries": limits.queries, "slots": limits.queries, "parts": 2 * limits.queries,
        "merge_queries": limits.merged, "merge_ranges": 2 * limits.merged, "runs": 3 * limits.runs,
    }  # fmt: skip
    sizes = {name: _aligned(size) for name, size in sizes.items()}
    programs = [(bucket, card.processors * tiles[bucket % heights].programs) for bucket in launch_order(heights)]
    launches = (*programs, (2 * heights, card.processors * _MERGE_PROGRAMS))
    flat = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
    return GpuPlan(flat, sizes, launches, geometry)


def refill(plan: GpuPlan, tiles: TileList, positions: NDArray[np.int32]) -> None:
    """Puts another tile list, within the limits, into a reserved plan; launches that were captured read it."""
    _send(plan, _host_arrays(tiles, positions))


def _host_arrays(tiles: TileList, positions: NDArray[np.int32]) -> dict[str, NDArray[np.int32]]:
    """What the kernels read; the run list, which is the longest, last. counts: buckets, then merged queries."""
    counts = np.append(tiles.counts, len(tiles.merge_queries)).astype(np.int32)
    return {
        "counts": counts, "positions": positions, "items": tiles.items, "queries": tiles.queries, "slots": tiles.slots,
        "parts": tiles.parts, "merge_queries": tiles.merge_queries, "merge_ranges": tiles.merge_ranges,
        "runs": tiles.runs,
    }  # fmt: skip


def _aligned(size: int) -> int:
    return -(-size // 4) * 4  # 16 bytes


def _send(plan: GpuPlan, host: dict[str, NDArray[np.int32]]) -> None:
    """In one copy, up to the end of the run list."""
    used = sum(plan.sizes.values()) - plan.sizes["runs"] + host["runs"].size
    staging = torch.empty(used, dtype=torch.int32, pin_memory=plan.flat.is_cuda)
    at, flat = 0, staging.numpy()
    for name, array in host.items():
        flat[at : at + array.size] = array.ravel()
        at += plan.sizes[name]
    plan.flat[:used].copy_(staging, non_blocking=True)


@dataclass(frozen=True)
class Tensors:
    """One layer. q, out [T, Hq, D / Dv]; caches [pages, page_size, Hkv, D / Dv]; the rest float32.

    lse [T, Hq]; partial [slots, Hq, Dv], partial_lse [slots, Hq]; logit_scale [Hkv], log2(e) included unless there is a
    soft cap; v_scale [Hkv]; sinks [Hq] of any floating dtype.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor
    logit_scale: torch.Tensor
    v_scale: torch.Tensor
    sinks: torch.Tensor


def execute(plan: GpuPlan, tensors: Tensors, tiles: tuple[GpuTile, ...], card: Card, return_lse: bool) -> None:
    """Launches a plan on the current stream. Each launch may start while the one ahead of it ends."""
    arrays = plan.arrays
    for number, (bucket, programs) in enumerate(plan.launches):
        overlap = {"FOLLOWS": card.overlaps and number > 0}
        if bucket == 2 * len(tiles):
            _merge(plan.geometry, arrays, tensors, (bucket + 1, programs), overlap | {"RETURN_LSE": return_lse})
            continue
        overlap["LEADS"] = card.overlaps and number + 1 < len(plan.launches)
        options = overlap | {"RETURN_LSE": return_lse, "BUCKET": bucket, "MERGE": bucket >= len(tiles)}
        _attend(plan.geometry, arrays, tensors, tiles[bucket % len(tiles)], programs, options)


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _attend(
    geometry: Geometry,
    arrays: dict[str, torch.Tensor],
    t: Tensors,
    tile: GpuTile,
    programs: int,
    options: dict[str, Any],
) -> None:
    launch = {"num_warps": tile.warps} | ({"launch_pdl": True} if options["FOLLOWS"] else {})
    decode_kernel[(programs,)](
        t.q, t.k_cache, t.v_cache, t.out, t.lse, t.partial, t.partial_lse,
        arrays["items"], arrays["runs"], arrays["queries"], arrays["slots"], arrays["parts"], arrays["positions"],
        arrays["counts"], t.logit_scale, t.v_scale, t.sinks, geometry.soft_cap or 0.0, geometry.window,
        t.q.stride(0), t.q.stride(1), t.out.stride(0), t.out.stride(1),
        *t.k_cache.stride()[:3], *t.v_cache.stride()[:3],
        NUM_QO_HEADS=geometry.num_qo_heads, NUM_KV_HEADS=geometry.num_kv_heads,
        PAGE_SIZE=geometry.page_size, RUN=geometry.run, HEAD_DIM=geometry.head_dim, HEAD_DIM_V=geometry.head_dim_v,
        PADDED_DIM=_padded(geometry.head_dim), PADDED_DIM_V=_padded(geometry.head_dim_v),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, SUBTILES=tile.subtiles, PRIVATE_N=tile.private_n,
        MASKED=geometry.masked, SOFT_CAP=geometry.soft_cap is not None, SINKS=geometry.sinks, STAGES=tile.stages,
        PRECISION="ieee" if t.q.dtype == torch.float32 else "tf32", **options, **launch,
    )  # fmt: skip


def _merge(
    geometry: Geometry, arrays: dict[str, torch.Tensor], t: Tensors, where: tuple[int, int], options: dict[str, Any]
) -> None:
    count_at, programs = where
    merge_kernel[(programs,)](
        t.out, t.lse, t.partial, t.partial_lse, arrays["merge_queries"], arrays["merge_ranges"], arrays["counts"],
        t.v_scale, t.sinks, t.out.stride(0), t.out.stride(1),
        COUNT_AT=count_at, NUM_QO_HEADS=geometry.num_qo_heads, NUM_KV_HEADS=geometry.num_kv_heads,
        HEAD_DIM_V=geometry.head_dim_v, PADDED_DIM_V=_padded(geometry.head_dim_v), BLOCK_P=16,
        SINKS=geometry.sinks, num_warps=2, **options, **({"launch_pdl": True} if options["FOLLOWS"] else {}),
    )  # fmt: skip
