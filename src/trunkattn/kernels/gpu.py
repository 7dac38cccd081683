"""GPU executor of a work list: device arrays of a plan, and its launches (PAT §3.4: pack, forward, merge).

Launch order: trunks by tile height, then leaves (which merge what the trunks left), then the merges that no leaf does.
Every launch is a fixed number of programs that read their counts from device memory.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trunkattn.kernels.arrange import arrange
from trunkattn.kernels.decode import decode_kernel
from trunkattn.kernels.merge_partials import merge_kernel
from trunkattn.kernels.tile_table import GpuTile
from trunkattn.plan_format import WorkList

_FIELDS = ("items", "queries", "slots", "parts", "counts", "merge_queries", "merge_ranges")


@dataclass(frozen=True)
class Geometry:
    """What the launches must know of an attention, besides its tensors."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    window: int
    masked: bool  # some item holds tokens that some of its queries must not see
    soft_cap: float | None
    sinks: bool


@dataclass(frozen=True)
class GpuPlan:
    """A plan on the device, all int32; the arrays are those of `Arranged`."""

    arrays: dict[str, torch.Tensor]
    block_table: torch.Tensor
    positions: torch.Tensor  # [num_query_tokens] place in the sequence
    counts: list[int]  # the same as arrays["counts"], on the host
    num_merged: int
    num_slots: int


def upload(
    work: WorkList, batch: tuple[np.ndarray, np.ndarray, np.ndarray], group_size: int, tiles: tuple[GpuTile, ...],
    fuse_up_to: int, device: torch.device,
) -> GpuPlan:  # fmt: skip
    """Arranges a work list and sends it to the device in one copy. batch: block_table, seq_lens, query_start_loc."""
    table, seq_lens, starts = batch
    arranged = arrange(work, group_size, tuple(tile.block_m for tile in tiles), fuse_up_to)
    row_of = np.repeat(np.arange(len(seq_lens)), np.diff(starts))
    positions = (seq_lens[row_of] - starts[row_of + 1] + np.arange(len(row_of))).astype(np.int32)
    counts = np.append(arranged.counts, len(arranged.merge_queries)).astype(np.int32)
    parts = {name: getattr(arranged, name) for name in _FIELDS} | {"counts": counts}
    parts |= {"block_table": table, "positions": positions}
    sizes = [-(-array.size // 4) * 4 for array in parts.values()]  # 16-byte aligned
    host = torch.empty(sum(sizes), dtype=torch.int32, pin_memory=device.type == "cuda")
    at, flat = 0, host.numpy()
    for array, size in zip(parts.values(), sizes, strict=True):
        flat[at : at + array.size] = array.ravel()
        at += size
    pieces = host.to(device, non_blocking=True).split(sizes)
    arrays = {
        name: piece[: array.size].view(array.shape)
        for (name, array), piece in zip(parts.items(), pieces, strict=True)
    }
    table_on_device, positions_on_device = arrays.pop("block_table"), arrays.pop("positions")
    return GpuPlan(
        arrays, table_on_device, positions_on_device, counts[:-1].tolist(), int(counts[-1]), work.num_slots
    )  # fmt: skip


@dataclass(frozen=True)
class Tensors:
    """One layer: q, out [T, Hq, D], caches [pages, page_size, Hkv, D]; lse, partial, partial_lse float32."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor
    logit_scale: torch.Tensor  # [Hkv] float32, log2(e) included unless there is a soft cap
    v_scale: torch.Tensor  # [Hkv] float32
    sinks: torch.Tensor


def execute(
    plan: GpuPlan, geometry: Geometry, tensors: Tensors, tiles: tuple[GpuTile, ...], slots: int, return_lse: bool
) -> None:
    """Launches a plan on the current stream. slots: multiprocessors."""
    for bucket in range(2 * len(tiles)):
        items = plan.counts[bucket + 1] - plan.counts[bucket]
        if items:
            tile = tiles[bucket % len(tiles)]
            tasks = items * geometry.num_kv_heads
            _launch(plan, geometry, tensors, tile, (bucket, min(tasks, slots * tile.programs), return_lse, len(tiles)))
    if plan.num_merged:
        tasks = plan.num_merged * geometry.num_qo_heads
        _merge(plan, geometry, tensors, (min(tasks, slots * 16), 2 * len(tiles) + 1, return_lse))


def _padded(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _launch(plan: GpuPlan, geometry: Geometry, t: Tensors, tile: GpuTile, launch: tuple[int, int, bool, int]) -> None:
    bucket, programs, return_lse, classes = launch
    arrays = plan.arrays
    precision: Any = "ieee" if t.q.dtype == torch.float32 else "tf32"
    decode_kernel[(programs,)](
        t.q, t.k_cache, t.v_cache, t.out, t.lse, t.partial, t.partial_lse,
        plan.block_table, arrays["items"], arrays["queries"], arrays["slots"], arrays["parts"], plan.positions,
        arrays["counts"], t.logit_scale, t.v_scale, t.sinks, geometry.soft_cap or 0.0, geometry.window,
        plan.block_table.stride(0), t.q.stride(0), t.q.stride(1), t.out.stride(0), t.out.stride(1),
        *t.k_cache.stride()[:3], *t.v_cache.stride()[:3],
        CLASS=bucket, NUM_QO_HEADS=geometry.num_qo_heads, NUM_KV_HEADS=geometry.num_kv_heads,
        PAGE_SIZE=geometry.page_size, HEAD_DIM=geometry.head_dim, HEAD_DIM_V=geometry.head_dim_v,
        PADDED_DIM=_padded(geometry.head_dim), PADDED_DIM_V=_padded(geometry.head_dim_v),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, MASKED=geometry.masked, MERGE=bucket >= classes,
        SOFT_CAP=geometry.soft_cap is not None, SINKS=geometry.sinks, RETURN_LSE=return_lse, STAGES=tile.stages,
        PRECISION=precision, num_warps=tile.warps,
    )  # fmt: skip


def _merge(plan: GpuPlan, geometry: Geometry, t: Tensors, launch: tuple[int, int, bool]) -> None:
    programs, count_at, return_lse = launch
    arrays = plan.arrays
    merge_kernel[(programs,)](
        t.out, t.lse, t.partial, t.partial_lse, arrays["merge_queries"], arrays["merge_ranges"], arrays["counts"],
        t.v_scale, t.sinks, t.out.stride(0), t.out.stride(1),
        COUNT_AT=count_at, NUM_QO_HEADS=geometry.num_qo_heads, NUM_KV_HEADS=geometry.num_kv_heads,
        HEAD_DIM_V=geometry.head_dim_v, PADDED_DIM_V=_padded(geometry.head_dim_v), BLOCK_P=16,
        SINKS=geometry.sinks, RETURN_LSE=return_lse, num_warps=2,
    )  # fmt: skip
