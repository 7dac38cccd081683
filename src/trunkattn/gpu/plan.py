"""A GPU plan: the arrays of a tile list on the device, and the list of its launches."""

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.gpu import prefill_plan
from trunkattn.gpu.prefill_plan import Chunks, Packed, PrefillPlan, aligned
from trunkattn.gpu.tuning.decode import GpuTile
from trunkattn.gpu.tuning.merge import MergeTile, merge_tile
from trunkattn.gpu.tuning.prefill import PrefillTile, tile_under
from trunkattn.planner.work_list import (
    ITEM_COLUMNS,
    QUERY_END,
    QUERY_START,
    SEGMENT_COLUMNS,
    PrefillLimits,
    PrefillList,
    TileLimits,
    TileList,
)


@dataclass(frozen=True)
class Geometry:
    """What the launches must know of an attention and a step, besides the tensors."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    segment_size: int  # tokens
    window: int
    masked: bool  # queries of one sequence see different tokens
    soft_cap: float | None
    sinks: bool
    batch_invariant: bool = False

    @property
    def merge_tile(self) -> MergeTile:
        """The tile of the merges."""
        return merge_tile(self.num_qo_heads, self.head_dim_v, self.batch_invariant)


@dataclass(frozen=True)
class DeviceInfo:
    """What a device says of itself.

    Attributes:
        num_sms: streaming multiprocessors.
        overlaps: a kernel may start before the one ahead of it ends (from sm_90 on).
        hopper: it is an sm_90, which has kernels of its own.
    """

    num_sms: int
    overlaps: bool
    hopper: bool = False


@dataclass(frozen=True)
class Launch:
    """buckets: whose items it computes, of one tile or of those of `hopper.decode`, ascending; none: it merges what no
    item does. spread: where items are few, no SM gets two CTAs with work while others have none, though a launch ahead
    may still be busy on some: `hopper.decode` has several launches side by side, of a CTA an SM each, and the portable
    kernel spreads its tasks (`spread_stride`). With one KV head a launch would cost more than that saves, and it has
    one."""

    buckets: tuple[int, ...]
    num_programs: int
    spread: bool = False


@dataclass(frozen=True)
class GpuPlan(Packed):
    """A tile list on the device, and the work items of prompt chunks, if there may be any.

    Its array `overlapped` [3]: items [first, last), of the lowest tile and merging nothing, that are co-scheduled with
    the chunks in one launch and are in no bucket of `counts`, and the most queries of one; only an overlapped execution
    has any.
    summary [3] int64: the tiling, KV tokens that its tiles read, and had every request read its own; only of a list
    that was made on the device. bound: its launches, ready for layers of a kind (`gpu.launch.execute`).
    """

    launches: tuple[Launch, ...]
    geometry: Geometry
    execution: str
    summary: torch.Tensor | None = None
    prefill: PrefillPlan | None = None
    bound: dict[Hashable, Callable[["Tensors"], None]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def without_chunks(self) -> "GpuPlan":
        """The same arrays, without the launch that computes prompt chunks."""
        execution = "serial" if self.execution == "overlapped" else self.execution
        return replace(self, execution=execution, prefill=None)

    @cached_property
    def of_chunks_alone(self) -> "GpuPlan":
        """The same arrays, with no launch but the one that computes prompt chunks."""
        return replace(self, execution="serial", launches=())

    def forget_tiles(self) -> None:
        """Takes all rows of tiles out of a plan that is filled on the device, on the current stream."""
        assert self.summary is not None
        self.arrays["counts"].zero_()
        self.summary.zero_()

    def forget_prefill(self) -> None:
        """Takes the prompt chunks, if it may hold any, and the items that overlap them out of a plan that is filled on
        the device, on the current stream."""
        if self.prefill:
            self.arrays["prefill_count"].zero_()
            self.arrays["overlapped"].zero_()


def upload(
    tiles: TileList,
    positions: NDArray[np.int32],
    geometry: Geometry,
    device_info: DeviceInfo,
    execution: str,
    device: torch.device,
    chunks: Chunks | None = None,
    num_overlapped: int = 0,
) -> GpuPlan:
    """Sends a tile list, and prompt chunks, to the device. positions [num_query_tokens]: place in the sequence.
    num_overlapped: so many items of the first bucket are co-scheduled with the chunks; more than 0 only if `execution`
    is "overlapped"."""
    host = _host_arrays(tiles, positions, len(chunks.listed.items) if chunks else 0, num_overlapped)
    sizes = {name: aligned(array.size) for name, array in host.items()}
    flat = torch.empty(sum(sizes.values()), dtype=torch.int32, device=device)
    heights, counts = len(tiles.counts) // 2, np.diff(host["counts"][:-1])
    merging = range(2 * heights - 1, heights - 1, -1)
    order: list[tuple[int, ...]] = [(bucket,) for bucket in (*range(heights - 1, -1, -1), *merging)]
    if tiles.merges_taller and execution == "serial" and counts[0] and counts[heights]:
        order = [*order[: heights - 1], (0, heights), *order[heights:-1]]  # a few long items alone would idle the card
    launches = [Launch(buckets, int(counts[[*buckets]].sum()) * geometry.num_kv_heads) for buckets in order]
    most = device_info.num_sms * geometry.merge_tile.ctas_per_sm
    merge_tasks = geometry.merge_tile.most_tasks(len(tiles.merge_queries) * geometry.num_qo_heads)
    merges = Launch((), min(merge_tasks, most))
    prefill = None
    if chunks:
        chunks = replace(chunks, tile=tile_under(chunks.tile, geometry.head_dim, geometry.window))
        shape = (geometry.num_kv_heads, device_info.num_sms)
        prefill = prefill_plan.upload(chunks, *shape, num_overlapped > 0, device)
    kept = tuple(launch for launch in (*launches, merges) if launch.num_programs)
    plan = GpuPlan(flat, sizes, kept, geometry, execution, None, prefill)
    plan.send(host)
    return plan


@torch.inference_mode(False)
def reserve(
    limits: TileLimits,
    tiles: tuple[GpuTile, ...],
    geometry: Geometry,
    device_info: DeviceInfo,
    execution: str,
    device: torch.device,
    chunks: tuple[PrefillLimits, PrefillTile] | None = None,
) -> GpuPlan:
    """An empty plan for any tile list, and any prompt chunks, within the limits. Each tile's items, and those of all
    tiles of `hopper.decode`, are launched at fixed size. Items may merge only under `serial` or `overlapped`, only of
    the lowest tile, and only what taller tiles leave."""
    heights = len(tiles)
    sizes = {
        "counts": 2 * heights + 2,
        "prefill_count": 1,
        "overlapped": 3,
        "positions": limits.query_tokens,
        "items": limits.items * ITEM_COLUMNS,
        "queries": limits.queries,
        "slots": limits.queries,
        "parts": 2 * limits.queries,
        "merge_queries": limits.merged,
        "merge_ranges": 2 * limits.merged,
        "segments": SEGMENT_COLUMNS * limits.segments,
    }
    sizes = {name: aligned(size) for name, size in sizes.items()}
    alone = [bucket for bucket in range(heights) if not tiles[bucket].hopper]
    launches = [Launch((bucket,), device_info.num_sms * tiles[bucket].ctas_per_sm, True) for bucket in alone]
    if tiles[0].queued_per_sm and all(tile.hopper for tile in tiles[1:]):
        launches[0] = Launch((0,), device_info.num_sms * tiles[0].queued_per_sm)
    elif execution in ("serial", "overlapped") and tiles[0].merges:
        launches[0] = replace(launches[0], buckets=(0, heights))
    if of_hopper := tuple(bucket for bucket in range(heights) if tiles[bucket].hopper):
        most = max(tiles[bucket].ctas_per_sm for bucket in of_hopper)
        launches.append(Launch(of_hopper, device_info.num_sms * most, True))
    launches = [*reversed(launches), Launch((), device_info.num_sms * geometry.merge_tile.ctas_per_sm)]
    flat = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
    summary = torch.zeros(3, dtype=torch.int64, device=device)
    prefill = None
    if chunks:
        room, tile = chunks[0], tile_under(chunks[1], geometry.head_dim, geometry.window)
        prefill = prefill_plan.reserve(room, tile, geometry.num_kv_heads, device_info.num_sms, device)
    return GpuPlan(flat, sizes, tuple(launches), geometry, execution, summary, prefill)


def refill(
    plan: GpuPlan,
    tiles: TileList,
    positions: NDArray[np.int32],
    listed: PrefillList | None = None,
    num_overlapped: int = 0,
) -> None:
    """Puts another tile list, and other prompt chunks, within the limits, into a reserved plan; launches that were
    captured read it. num_overlapped: as of `upload`."""
    if listed:
        assert plan.prefill
        plan.prefill.fill(listed)
    plan.send(_host_arrays(tiles, positions, len(listed.items) if listed else 0, num_overlapped))


def _host_arrays(
    tiles: TileList, positions: NDArray[np.int32], chunk_items: int, num_overlapped: int
) -> dict[str, NDArray[np.int32]]:
    """What the kernels read; the segment list, which is the longest, last. counts: buckets, then merged queries."""
    counts = np.empty(len(tiles.counts) + 1, np.int32)
    counts[:-1], counts[-1] = tiles.counts, len(tiles.merge_queries)
    counts[0] += num_overlapped
    overlapped = tiles.items[:num_overlapped]
    most = int((overlapped[:, QUERY_END] - overlapped[:, QUERY_START]).max()) if num_overlapped else 0
    return {
        "counts": counts,
        "prefill_count": np.array([chunk_items], np.int32),
        "overlapped": np.array([0, num_overlapped, most], np.int32),
        "positions": positions,
        "items": tiles.items,
        "queries": tiles.queries,
        "slots": tiles.slots,
        "parts": tiles.parts,
        "merge_queries": tiles.merge_queries,
        "merge_ranges": tiles.merge_ranges,
        "segments": tiles.segments,
    }


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
