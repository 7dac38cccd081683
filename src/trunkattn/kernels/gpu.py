"""GPU executor of a tile list (PAT §3.4: pack, forward, merge): its arrays on the device, and its launches.

Launch order: items that merge nothing, by tile height; then items that merge what those left; then the merges that no
item does. Every launch is a number of programs that read their counts from device memory.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.kernels.decode import decode_kernel
from trunkattn.kernels.merge_partials import merge_kernel
from trunkattn.kernels.tile_table import GpuTile
from trunkattn.plan_format import TileList

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
class GpuPlan:
    """A tile list on the device. counts: its buckets and the number of merged queries, on the host as well."""

    arrays: dict[str, torch.Tensor]
    counts: list[int]
    geometry: Geometry
    num_slots: int


def upload(tile_list: TileList, positions: NDArray[np.int32], geometry: Geometry, device: torch.device) -> GpuPlan:
    """Sends a tile list to the device in one copy. positions [num_query_tokens]: place in the sequence."""
    host = {field.name: getattr(tile_list, field.name) for field in fields(tile_list) if field.name != "num_slots"}
    counts = np.append(tile_list.counts, len(tile_list.merge_queries)).astype(np.int32)
    host |= {"counts": counts, "positions": positions}
    sizes = [-(-array.size // 4) * 4 for array in host.values()]  # 16-byte aligned
    staging = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    at, flat = 0, staging.numpy()
    for array, size in zip(host.values(), sizes, strict=True):
        flat[at : at + array.size] = array.ravel()
        at += size
    pieces = staging.to(device, non_blocking=True).split(sizes)
    arrays = {
        name: piece[: array.size].view(array.shape) for (name, array), piece in zip(host.items(), pieces, strict=True)
    }
    return GpuPlan(arrays, counts.tolist(), geometry, tile_list.num_slots)


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


@dataclass(frozen=True)
class Card:
    """processors: multiprocessors. overlaps: a kernel may start before the one ahead of it ends (from sm_90 on)."""

    processors: int
    overlaps: bool


def execute(plan: GpuPlan, tensors: Tensors, tiles: tuple[GpuTile, ...], card: Card, return_lse: bool) -> None:
    """Launches a plan on the current stream."""
    buckets = [bucket for bucket in range(2 * len(tiles)) if plan.counts[bucket + 1] > plan.counts[bucket]]
    for bucket in buckets:
        # only the launch that directly follows the partials' writer may start before that one ends
        overlap = card.overlaps and len(buckets) == 2 and buckets[0] < len(tiles) <= buckets[1]
        _launch(plan, tensors, (bucket, len(tiles), overlap, return_lse), tiles[bucket % len(tiles)])
    if plan.counts[-1]:
        _merge(plan, tensors, card.processors, return_lse)


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _launch(plan: GpuPlan, t: Tensors, launch: tuple[int, int, bool, bool], tile: GpuTile) -> None:
    bucket, heights, overlap, return_lse = launch
    arrays, geometry = plan.arrays, plan.geometry
    merges = bucket >= heights
    programs = (plan.counts[bucket + 1] - plan.counts[bucket]) * geometry.num_kv_heads
    options: dict[str, Any] = {"launch_pdl": True} if overlap and merges else {}
    if tile.max_registers and t.q.is_cuda:
        options["maxnreg"] = tile.max_registers
    decode_kernel[(programs,)](
        t.q, t.k_cache, t.v_cache, t.out, t.lse, t.partial, t.partial_lse,
        arrays["items"], arrays["runs"], arrays["queries"], arrays["slots"], arrays["parts"], arrays["positions"],
        arrays["counts"], t.logit_scale, t.v_scale, t.sinks, geometry.soft_cap or 0.0, geometry.window,
        t.q.stride(0), t.q.stride(1), t.out.stride(0), t.out.stride(1),
        *t.k_cache.stride()[:3], *t.v_cache.stride()[:3],
        BUCKET=bucket, NUM_QO_HEADS=geometry.num_qo_heads, NUM_KV_HEADS=geometry.num_kv_heads,
        PAGE_SIZE=geometry.page_size, RUN=geometry.run, HEAD_DIM=geometry.head_dim, HEAD_DIM_V=geometry.head_dim_v,
        PADDED_DIM=_padded(geometry.head_dim), PADDED_DIM_V=_padded(geometry.head_dim_v),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, MASKED=geometry.masked, MERGE=merges,
        SOFT_CAP=geometry.soft_cap is not None, SINKS=geometry.sinks, RETURN_LSE=return_lse, STAGES=tile.stages,
        PRECISION="ieee" if t.q.dtype == torch.float32 else "tf32", OVERLAP=overlap, num_warps=tile.warps, **options,
    )  # fmt: skip


def _merge(plan: GpuPlan, t: Tensors, processors: int, return_lse: bool) -> None:
    arrays, geometry = plan.arrays, plan.geometry
    programs = min(plan.counts[-1] * geometry.num_qo_heads, processors * _MERGE_PROGRAMS)
    merge_kernel[(programs,)](
        t.out, t.lse, t.partial, t.partial_lse, arrays["merge_queries"], arrays["merge_ranges"], arrays["counts"],
        t.v_scale, t.sinks, t.out.stride(0), t.out.stride(1),
        COUNT_AT=len(plan.counts) - 1, NUM_QO_HEADS=geometry.num_qo_heads, NUM_KV_HEADS=geometry.num_kv_heads,
        HEAD_DIM_V=geometry.head_dim_v, PADDED_DIM_V=_padded(geometry.head_dim_v), BLOCK_P=16,
        SINKS=geometry.sinks, RETURN_LSE=return_lse, num_warps=2,
    )  # fmt: skip
