"""GPU executor of a tile list (PAT §3.4: pack, forward, merge): its arrays on the device, and its launches.

Launch order: the items of prompt chunks; items that merge nothing, by tile height; items that merge what those left;
the merges that no item does. Every launch is a number of programs that read their counts from device memory.
Executions: `serial`, where each launch may start while the one ahead of it ends; `overlapped`, the same with chunks and
some items of the lowest tile in one launch (POD-Attention §4); `streams`, where launches that wait for nothing run side
by side (PAT §6); `persistent`, one launch for everything but prompt chunks.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.kernels import prefill_plan
from trunkattn.kernels.decode import decode_kernel
from trunkattn.kernels.merge_partials import merge_kernel
from trunkattn.kernels.persistent import persistent_kernel
from trunkattn.kernels.prefill import prefill_kernel
from trunkattn.kernels.prefill_plan import Chunks, Packed, PrefillPlan, aligned
from trunkattn.kernels.tile_table import GpuTile, PrefillTile
from trunkattn.plan_format import ITEM_COLUMNS, QUERY_END, QUERY_START, PrefillLimits, PrefillList, TileLimits, TileList

_MERGE_PROGRAMS = 16  # of one warp, on a multiprocessor; each reads a few kilobytes


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
    """processors: multiprocessors. overlaps: a kernel may start before the one ahead of it ends (from sm_90 on).
    hopper: it is an sm_90, which has kernels of its own."""

    processors: int
    overlaps: bool
    hopper: bool = False


@dataclass(frozen=True)
class Launch:
    """buckets: whose items it computes, of one tile or of those of `decode_hopper`, ascending; none: it merges what no
    item does. spread: for `decode_hopper` several launches side by side, of a program a multiprocessor each; of one
    launch some multiprocessors would get two programs with work, where items are few, and others none."""

    buckets: tuple[int, ...]
    programs: int
    spread: bool = False


@dataclass(frozen=True)
class GpuPlan(Packed):
    """A tile list on the device, and the work items of prompt chunks, if there may be any.

    Its array `beside` [3]: items [first, last), of the lowest tile and merging nothing, that are computed in one launch
    with the chunks and are in no bucket of `counts`, and the most queries of one; only an overlapped execution has any.
    summary [3] int64: the tiling, KV tokens that its tiles read, and had every request read its own; only of a list
    that was made on the device.
    """

    launches: tuple[Launch, ...]
    geometry: Geometry
    execution: str
    summary: torch.Tensor | None = None
    prefill: PrefillPlan | None = None

    def without_chunks(self) -> "GpuPlan":
        """The same arrays, without the launch that computes prompt chunks."""
        execution = "serial" if self.execution == "overlapped" else self.execution
        return replace(self, execution=execution, prefill=None)

    def forget_prefill(self) -> None:
        """Takes the prompt chunks, if it may hold any, and the items beside them out of a plan that is filled on the
        device, on the current stream."""
        if self.prefill:
            self.arrays["prefill_count"].zero_()
            self.arrays["beside"].zero_()


def upload(
    tiles: TileList, positions: NDArray[np.int32], geometry: Geometry, card: Card, execution: str, device: torch.device,
    chunks: Chunks | None = None, beside: int = 0,
) -> GpuPlan:  # fmt: skip
    """Sends a tile list, and prompt chunks, to the device. positions [num_query_tokens]: place in the sequence.
    beside: so many items of the first bucket are computed beside the chunks; more than 0 only if it is overlapped."""
    host = _host_arrays(tiles, positions, len(chunks.listed.items) if chunks else 0, beside)
    sizes = {name: aligned(array.size) for name, array in host.items()}
    flat = torch.empty(sum(sizes.values()), dtype=torch.int32, device=device)
    heights, counts = len(tiles.counts) // 2, np.diff(host["counts"][:-1])
    merging = range(2 * heights - 1, heights - 1, -1)
    order: list[tuple[int, ...]] = [(bucket,) for bucket in (*range(heights - 1, -1, -1), *merging)]
    if tiles.merges_taller and execution == "serial" and counts[0] and counts[heights]:
        order = [*order[: heights - 1], (0, heights), *order[heights:-1]]  # a few long items alone would idle the card
    launches = [Launch(buckets, int(counts[[*buckets]].sum()) * geometry.num_kv_heads) for buckets in order]
    merges = Launch((), min(len(tiles.merge_queries) * geometry.num_qo_heads, card.processors * _MERGE_PROGRAMS))
    shape = (geometry.num_kv_heads, card.processors, beside > 0, device)
    prefill = prefill_plan.upload(chunks, *shape) if chunks else None
    kept = tuple(launch for launch in (*launches, merges) if launch.programs)
    plan = GpuPlan(flat, sizes, kept, geometry, execution, None, prefill)
    plan.send(host)
    return plan


@torch.inference_mode(False)
def reserve(
    limits: TileLimits, tiles: tuple[GpuTile, ...], geometry: Geometry, card: Card, execution: str,
    device: torch.device, chunks: tuple[PrefillLimits, PrefillTile] | None = None,
) -> GpuPlan:  # fmt: skip
    """An empty plan for any tile list, and any prompt chunks, within the limits. Each tile's items, and those of all
    tiles of `decode_hopper`, are launched at fixed size. Items may merge only under `serial` or `overlapped`, only of
    the lowest tile, and only what taller tiles leave."""
    heights = len(tiles)
    sizes = {
        "counts": 2 * heights + 2, "prefill_count": 1, "beside": 3, "positions": limits.query_tokens,
        "items": limits.items * ITEM_COLUMNS, "queries": limits.queries, "slots": limits.queries,
        "parts": 2 * limits.queries, "merge_queries": limits.merged, "merge_ranges": 2 * limits.merged,
        "runs": 3 * limits.runs,
    }  # fmt: skip
    sizes = {name: aligned(size) for name, size in sizes.items()}
    alone = [bucket for bucket in range(heights) if not tiles[bucket].hopper]
    launches = [Launch((bucket,), card.processors * tiles[bucket].programs) for bucket in alone]
    if execution in ("serial", "overlapped") and tiles[0].merges:
        launches[0] = Launch((0, heights), launches[0].programs)
    if together := tuple(bucket for bucket in range(heights) if tiles[bucket].hopper):
        launches.append(Launch(together, max(card.processors * tiles[bucket].programs for bucket in together), True))
    launches = [*reversed(launches), Launch((), card.processors * _MERGE_PROGRAMS)]
    flat = torch.zeros(sum(sizes.values()), dtype=torch.int32, device=device)
    summary = torch.zeros(3, dtype=torch.int64, device=device)
    prefill = prefill_plan.reserve(*chunks, geometry.num_kv_heads, card.processors, device) if chunks else None
    return GpuPlan(flat, sizes, tuple(launches), geometry, execution, summary, prefill)


def refill(
    plan: GpuPlan, tiles: TileList, positions: NDArray[np.int32], listed: PrefillList | None = None,
    beside: int = 0,
) -> None:  # fmt: skip
    """Puts another tile list, and other prompt chunks, within the limits, into a reserved plan; launches that were
    captured read it. beside: as of `upload`."""
    if listed:
        assert plan.prefill
        plan.prefill.fill(listed)
    plan.send(_host_arrays(tiles, positions, len(listed.items) if listed else 0, beside))


def _host_arrays(
    tiles: TileList, positions: NDArray[np.int32], chunk_items: int, beside: int
) -> dict[str, NDArray[np.int32]]:
    """What the kernels read; the run list, which is the longest, last. counts: buckets, then merged queries."""
    counts = np.append(tiles.counts, len(tiles.merge_queries)).astype(np.int32)
    queries = np.diff(tiles.items[:beside, [QUERY_START, QUERY_END]])
    counts[0] += beside
    return {
        "counts": counts, "prefill_count": np.array([chunk_items], np.int32),
        "beside": np.array([0, beside, queries.max(initial=0)], np.int32), "positions": positions,
        "items": tiles.items, "queries": tiles.queries, "slots": tiles.slots, "parts": tiles.parts,
        "merge_queries": tiles.merge_queries, "merge_ranges": tiles.merge_ranges, "runs": tiles.runs,
    }  # fmt: skip


@dataclass(frozen=True)
class Tensors:
    """One layer. q, out [T, Hq, D / Dv]; caches [pages, page_size, Hkv, D / Dv]; the rest float32.

    lse [T, Hq]; partial [slots, Hq, Dv], partial_lse [slots, Hq]; logit_scale [Hkv], log2(e) included unless there is a
    soft cap; v_scale [Hkv]; sinks [Hq] of any floating dtype; counters [2] int32, zero between launches.
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
    counters: torch.Tensor


def execute(plan: GpuPlan, tensors: Tensors, tiles: tuple[GpuTile, ...], card: Card, return_lse: bool) -> None:
    """Launches a plan, ordered on the current stream."""
    _EXECUTIONS[plan.execution](plan, tensors, tiles, card, return_lse)


def _serial(plan: GpuPlan, tensors: Tensors, tiles: tuple[GpuTile, ...], card: Card, return_lse: bool) -> None:
    if plan.prefill:
        leads = {"LEADS": card.overlaps and bool(plan.launches), "RETURN_LSE": return_lse}
        _prefill(plan, tensors, plan.prefill, card, leads)
    _in_order(plan, plan.launches, tensors, tiles, card, return_lse, plan.prefill is not None)


def _overlapped(plan: GpuPlan, tensors: Tensors, tiles: tuple[GpuTile, ...], card: Card, return_lse: bool) -> None:
    """Prompt chunks and the items beside them in one launch (POD-Attention §4), where there is a kernel for it."""
    assert plan.prefill
    options = {"LEADS": card.overlaps and bool(plan.launches), "RETURN_LSE": return_lse}
    if card.hopper and tensors.q.is_cuda:
        from trunkattn.kernels import hybrid  # Gluon, which other cards need not have

        if hybrid.supports(tensors, plan, tiles[0]):
            hybrid.launch(tensors, plan, card.processors, options)
            return _in_order(plan, plan.launches, tensors, tiles, card, return_lse, True)
    _prefill(plan, tensors, plan.prefill, card, options | {"LEADS": False})
    items = Launch((0,), card.processors * tiles[0].programs)
    _attend(plan, tensors, tiles, items, card, options | {"FOLLOWS": False}, plan.arrays["beside"])
    _in_order(plan, plan.launches, tensors, tiles, card, return_lse, True)


def _in_order(
    plan: GpuPlan, launches: tuple[Launch, ...], tensors: Tensors, tiles: tuple[GpuTile, ...], card: Card,
    return_lse: bool, follows: bool = False,
) -> None:  # fmt: skip
    """follows: another launch is ahead of them."""
    launches = tuple(part for launch in launches for part in _parts(plan, tensors, tiles, launch, card))
    for number, launch in enumerate(launches):
        overlap = {"FOLLOWS": card.overlaps and (number > 0 or follows), "RETURN_LSE": return_lse}
        if launch.buckets:
            overlap["LEADS"] = card.overlaps and number + 1 < len(launches)
            _attend(plan, tensors, tiles, launch, card, overlap)
        else:
            _merge(plan, tensors, 2 * len(tiles) + 1, launch.programs, overlap)


def _streams(plan: GpuPlan, tensors: Tensors, tiles: tuple[GpuTile, ...], card: Card, return_lse: bool) -> None:
    if not tensors.q.is_cuda:  # the interpreter has no streams
        return _serial(plan, tensors, tiles, card, return_lse)
    independent = [launch for launch in plan.launches if launch.buckets and launch.buckets[-1] < len(tiles)]
    alone = {"LEADS": False, "RETURN_LSE": return_lse}
    calls = [partial(_attend, plan, tensors, tiles, launch, card, alone | {"FOLLOWS": False}) for launch in independent]
    if plan.prefill:
        calls.insert(0, partial(_prefill, plan, tensors, plan.prefill, card, alone))
    main = torch.cuda.current_stream()
    streams = [main, *(torch.cuda.Stream() for _ in calls[1:])]
    for stream in streams[1:]:
        stream.wait_stream(main)
    for call, stream in zip(calls, streams, strict=False):
        with torch.cuda.stream(stream):
            call()
    for stream in streams[1:]:
        main.wait_stream(stream)
    dependent = tuple(launch for launch in plan.launches if launch not in independent)
    _in_order(plan, dependent, tensors, tiles, card, return_lse)


def padded(width: int) -> int:
    """The power of two that holds a head."""
    return max(16, 1 << (width - 1).bit_length())


def _on_hopper(plan: GpuPlan, t: Tensors, tiles: tuple[GpuTile, ...], launch: Launch, card: Card) -> bool:
    """Whether `decode_hopper` computes a launch, whose items then merge nothing."""
    tile = tiles[launch.buckets[0] % len(tiles)]
    if not (tile.hopper and card.hopper) or launch.buckets[-1] >= len(tiles):
        return False
    from trunkattn.kernels import decode_hopper  # Gluon, which other cards need not have

    return decode_hopper.supports(t, plan.geometry, tile)


def _parts(plan: GpuPlan, t: Tensors, tiles: tuple[GpuTile, ...], launch: Launch, card: Card) -> list[Launch]:
    """A launch for `decode_hopper` as launches of one tile each, where that does not compute them."""
    together = launch.buckets and tiles[launch.buckets[0] % len(tiles)].hopper
    if not together or _on_hopper(plan, t, tiles, launch, card):
        return [launch]
    return [replace(launch, buckets=(bucket,)) for bucket in launch.buckets]


def _attend(
    plan: GpuPlan, t: Tensors, tiles: tuple[GpuTile, ...], launch: Launch, card: Card, options: dict[str, Any],
    counts: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """counts: where the buckets begin; None: the plan's."""
    arrays, geometry, tile = plan.arrays, plan.geometry, tiles[launch.buckets[0] % len(tiles)]
    if _on_hopper(plan, t, tiles, launch, card):
        from trunkattn.kernels import decode_hopper

        most = (card.processors,) * tile.programs
        programs = most if launch.spread else (min(launch.programs, sum(most)),)
        return decode_hopper.launch(t, plan, (launch.buckets[0], launch.buckets[-1]), programs, options)
    options |= {"BUCKET": launch.buckets[0], "ALSO": -1, "MERGE": launch.buckets[-1] >= len(tiles)}
    if len(launch.buckets) > 1:
        options["ALSO"] = launch.buckets[1]
    names = ("runs", "queries", "slots", "parts", "positions")
    decode_kernel[(launch.programs,)](
        *_tensors(t), arrays["items"], arrays["counts"] if counts is None else counts,
        *(arrays[name] for name in names), *_options(t, geometry), *_strides(t), **_shape(t, geometry),
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, SUBTILES=tile.subtiles, PRIVATE_N=tile.private_n,
        STAGES=tile.stages, num_warps=tile.warps, **options, **_after(options),
    )  # fmt: skip


def _prefill(plan: GpuPlan, t: Tensors, prefill: PrefillPlan, card: Card, options: dict[str, Any]) -> None:
    arrays, tile, geometry = prefill.arrays, prefill.tile, plan.geometry
    count, positions = plan.arrays["prefill_count"], plan.arrays["positions"]
    if card.hopper:
        from trunkattn.kernels import prefill_hopper  # Gluon, which other cards need not have

        if prefill_hopper.supports(t, tile, geometry):
            return prefill_hopper.launch(t, prefill, (count, positions), geometry, options)
    shape = _shape(t, geometry)
    del shape["MASKED"]  # it always is where it has to be
    shape["RUN"] = prefill_plan.run_tokens(tile, geometry.page_size)
    prefill_kernel[(prefill.programs,)](
        *_tensors(t), arrays["items"], count, arrays["block_table"], arrays["queries"], arrays["slots"], positions,
        *_options(t, geometry), prefill.table_stride, *_strides(t), **shape,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STAGES=tile.stages, num_warps=tile.warps, **options,
    )  # fmt: skip


def persistent_shapes(tiles: tuple[GpuTile, ...]) -> dict[str, int]:
    """The tiles as `persistent_kernel` takes them; of a single one as both."""
    return {
        f"{name}_{field}": value
        for name, tile in (("LOW", tiles[0]), ("TALL", tiles[-1]))
        for field, value in zip(
            ("M", "N", "SUBTILES", "PRIVATE_N", "STAGES"),
            (tile.block_m, tile.block_n, tile.subtiles, tile.private_n, tile.stages),
            strict=True,
        )
    }


def persistent_launch(tiles: tuple[GpuTile, ...], hopper: bool) -> tuple[int, int]:
    """Programs of a multiprocessor, and warps of a program. hopper: from sm_90 on; before, shared memory holds one."""
    return min(tile.programs for tile in tiles) if hopper else 1, max(tile.warps for tile in tiles)


def _persistent(plan: GpuPlan, t: Tensors, tiles: tuple[GpuTile, ...], card: Card, return_lse: bool) -> None:
    if plan.prefill:
        _prefill(plan, t, plan.prefill, card, {"LEADS": False, "RETURN_LSE": return_lse})
    programs, warps = persistent_launch(tiles, card.overlaps)
    # a cooperative launch runs all of its programs at once or fails, so that none waits for one that cannot start
    cooperative = {"launch_cooperative_grid": True} if t.q.is_cuda else {}
    names = ("items", "counts", "runs", "queries", "slots", "parts", "positions", "merge_queries", "merge_ranges")
    persistent_kernel[(card.processors * programs if t.q.is_cuda else 1,)](
        *_tensors(t), *(plan.arrays[name] for name in names), *_options(t, plan.geometry), t.counters, *_strides(t),
        **_shape(t, plan.geometry), HEIGHTS=len(tiles), RETURN_LSE=return_lse, **persistent_shapes(tiles),
        **cooperative, num_warps=warps,
    )  # fmt: skip


def _tensors(t: Tensors) -> tuple[torch.Tensor, ...]:
    return t.q, t.k_cache, t.v_cache, t.out, t.lse, t.partial, t.partial_lse


def _options(t: Tensors, geometry: Geometry) -> tuple[Any, ...]:
    return t.logit_scale, t.v_scale, t.sinks, geometry.soft_cap or 0.0, geometry.window


def _strides(t: Tensors) -> tuple[int, ...]:
    return *t.q.stride()[:2], *t.out.stride()[:2], *t.k_cache.stride()[:3], *t.v_cache.stride()[:3]


def _shape(t: Tensors, geometry: Geometry) -> dict[str, Any]:
    """The constants that all tiles have in common."""
    return {
        "NUM_QO_HEADS": geometry.num_qo_heads, "NUM_KV_HEADS": geometry.num_kv_heads, "PAGE_SIZE": geometry.page_size,
        "RUN": geometry.run, "HEAD_DIM": geometry.head_dim, "HEAD_DIM_V": geometry.head_dim_v,
        "PADDED_DIM": padded(geometry.head_dim), "PADDED_DIM_V": padded(geometry.head_dim_v),
        "MASKED": geometry.masked, "SOFT_CAP": geometry.soft_cap is not None, "SINKS": geometry.sinks,
        "PRECISION": "ieee" if t.q.dtype == torch.float32 else "tf32",
    }  # fmt: skip


def _after(options: dict[str, Any]) -> dict[str, Any]:
    """How to launch what may start before the launch ahead of it ends (programmatic dependent launch)."""
    return {"launch_pdl": True} if options["FOLLOWS"] else {}


def _merge(plan: GpuPlan, t: Tensors, count_at: int, programs: int, options: dict[str, Any]) -> None:
    arrays, geometry = plan.arrays, plan.geometry
    merge_kernel[(programs,)](
        t.out, t.lse, t.partial, t.partial_lse, arrays["merge_queries"], arrays["merge_ranges"], arrays["counts"],
        t.v_scale, t.sinks, t.out.stride(0), t.out.stride(1),
        COUNT_AT=count_at, NUM_QO_HEADS=geometry.num_qo_heads, NUM_KV_HEADS=geometry.num_kv_heads,
        HEAD_DIM_V=geometry.head_dim_v, PADDED_DIM_V=padded(geometry.head_dim_v),
        SINKS=geometry.sinks, num_warps=1, **options, **_after(options),
    )  # fmt: skip


_EXECUTIONS = MappingProxyType(
    {"serial": _serial, "overlapped": _overlapped, "streams": _streams, "persistent": _persistent}
)
