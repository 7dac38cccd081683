"""Launches of a GPU plan (PAT §3.4: pack, forward, merge).

Launch order: the items of prompt chunks; items that merge nothing, by tile height; items that merge what those left;
the merges that no item does. Every launch is a number of programs that read their counts from device memory.
Executions: `serial`, where each launch may start while the one ahead of it ends; `overlapped`, the same with chunks and
some items of the lowest tile in one launch (POD-Attention §4); `streams`, where launches that wait for nothing run side
by side (PAT §6).
"""

from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from trunkattn.gpu import prefill_plan
from trunkattn.gpu.plan import DeviceInfo, Geometry, GpuPlan, Launch, Tensors
from trunkattn.gpu.prefill_plan import PrefillPlan
from trunkattn.gpu.triton.decode import decode_kernel
from trunkattn.gpu.triton.merge import merge_kernel
from trunkattn.gpu.triton.prefill import prefill_kernel
from trunkattn.gpu.tuning.decode import GpuTile


def execute(plan: GpuPlan, tensors: Tensors, tiles: tuple[GpuTile, ...], card: DeviceInfo, return_lse: bool) -> None:
    """Launches a plan, ordered on the current stream."""
    _EXECUTIONS[plan.execution](plan, tensors, tiles, card, return_lse)


def _serial(plan: GpuPlan, tensors: Tensors, tiles: tuple[GpuTile, ...], card: DeviceInfo, return_lse: bool) -> None:
    if plan.prefill:
        leads = {"LEADS": card.overlaps and bool(plan.launches), "RETURN_LSE": return_lse}
        _prefill(plan, tensors, plan.prefill, card, leads)
    _in_order(plan, plan.launches, tensors, tiles, card, return_lse, plan.prefill is not None)


def _overlapped(
    plan: GpuPlan, tensors: Tensors, tiles: tuple[GpuTile, ...], card: DeviceInfo, return_lse: bool
) -> None:
    """Prompt chunks and the items beside them in one launch (POD-Attention §4), where there is a kernel for it."""
    assert plan.prefill
    options = {"LEADS": card.overlaps and bool(plan.launches), "RETURN_LSE": return_lse}
    if card.hopper and tensors.q.is_cuda:
        from trunkattn.gpu.hopper import prefill_decode as hopper_prefill_decode  # Gluon, which others need not have

        if hopper_prefill_decode.supports(tensors, plan, tiles[0]):
            hopper_prefill_decode.launch(tensors, plan, card.processors, options["LEADS"], return_lse)
            return _in_order(plan, plan.launches, tensors, tiles, card, return_lse, True)
    _prefill(plan, tensors, plan.prefill, card, options | {"LEADS": False})
    items = Launch((0,), card.processors * tiles[0].programs)
    _attend(plan, tensors, tiles, items, card, options | {"FOLLOWS": False}, plan.arrays["beside"])
    _in_order(plan, plan.launches, tensors, tiles, card, return_lse, True)


def _in_order(
    plan: GpuPlan, launches: tuple[Launch, ...], tensors: Tensors, tiles: tuple[GpuTile, ...], card: DeviceInfo,
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


def _streams(plan: GpuPlan, tensors: Tensors, tiles: tuple[GpuTile, ...], card: DeviceInfo, return_lse: bool) -> None:
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


def _on_hopper(plan: GpuPlan, t: Tensors, tiles: tuple[GpuTile, ...], launch: Launch, card: DeviceInfo) -> bool:
    """Whether `hopper_decode_kernel` computes a launch, whose items then merge nothing."""
    tile = tiles[launch.buckets[0] % len(tiles)]
    if not (tile.hopper and card.hopper) or launch.buckets[-1] >= len(tiles):
        return False
    from trunkattn.gpu.hopper import decode as hopper_decode  # Gluon, which other cards need not have

    return hopper_decode.supports(t, plan.geometry, tile)


def _parts(plan: GpuPlan, t: Tensors, tiles: tuple[GpuTile, ...], launch: Launch, card: DeviceInfo) -> list[Launch]:
    """A launch for `hopper_decode_kernel` as launches of one tile each, where that does not compute them."""
    together = launch.buckets and tiles[launch.buckets[0] % len(tiles)].hopper
    if not together or _on_hopper(plan, t, tiles, launch, card):
        return [launch]
    return [replace(launch, buckets=(bucket,)) for bucket in launch.buckets]


def _attend(
    plan: GpuPlan, t: Tensors, tiles: tuple[GpuTile, ...], launch: Launch, card: DeviceInfo, options: dict[str, Any],
    counts: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """counts: where the buckets begin; None: the plan's."""
    arrays, geometry, tile = plan.arrays, plan.geometry, tiles[launch.buckets[0] % len(tiles)]
    if _on_hopper(plan, t, tiles, launch, card):
        from trunkattn.gpu.hopper import decode as hopper_decode

        most = (card.processors,) * tile.programs
        programs = most if launch.spread else (min(launch.programs, sum(most)),)
        pdl = hopper_decode.Pdl(trigger=options["LEADS"], overlaps=options["FOLLOWS"])
        buckets = (launch.buckets[0], launch.buckets[-1])
        return hopper_decode.launch(t, plan, buckets, programs, pdl, options["RETURN_LSE"])
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


def _prefill(plan: GpuPlan, t: Tensors, prefill: PrefillPlan, card: DeviceInfo, options: dict[str, Any]) -> None:
    arrays, tile, geometry = prefill.arrays, prefill.tile, plan.geometry
    count, positions = plan.arrays["prefill_count"], plan.arrays["positions"]
    if card.hopper:
        from trunkattn.gpu.hopper import prefill as hopper_prefill  # Gluon, which other cards need not have

        if hopper_prefill.supports(t, tile, geometry):
            return hopper_prefill.launch(t, plan, options["LEADS"], options["RETURN_LSE"])
    shape = _shape(t, geometry)
    del shape["MASKED"]  # it always is where it has to be
    shape["RUN"] = prefill_plan.run_tokens(tile, geometry.page_size)
    prefill_kernel[(prefill.programs,)](
        *_tensors(t), arrays["items"], count, arrays["block_table"], arrays["queries"], arrays["slots"], positions,
        *_options(t, geometry), prefill.table_stride, *_strides(t), **shape,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, STAGES=tile.stages, num_warps=tile.warps, **options,
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


_EXECUTIONS = MappingProxyType({"serial": _serial, "overlapped": _overlapped, "streams": _streams})
