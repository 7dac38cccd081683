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

from trunkattn.gpu.plan import Card, GpuPlan, Launch, Tensors
from trunkattn.gpu.prefill_plan import PrefillPlan
from trunkattn.gpu.triton import decode, merge
from trunkattn.gpu.triton import prefill as prefill_triton
from trunkattn.gpu.triton.decode import Buckets, decode_kernel
from trunkattn.gpu.triton.merge import merge_kernel
from trunkattn.gpu.triton.prefill import prefill_kernel
from trunkattn.gpu.tuning.decode import GpuTile


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
        from trunkattn.gpu.hopper import prefill_decode as hybrid  # Gluon, which other cards need not have

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


def _on_hopper(plan: GpuPlan, t: Tensors, tiles: tuple[GpuTile, ...], launch: Launch, card: Card) -> bool:
    """Whether `decode_hopper` computes a launch, whose items then merge nothing."""
    tile = tiles[launch.buckets[0] % len(tiles)]
    if not (tile.hopper and card.hopper) or launch.buckets[-1] >= len(tiles):
        return False
    from trunkattn.gpu.hopper import decode as decode_hopper  # Gluon, which other cards need not have

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
    tile, merges = tiles[launch.buckets[0] % len(tiles)], launch.buckets[-1] >= len(tiles)
    if _on_hopper(plan, t, tiles, launch, card):
        from trunkattn.gpu.hopper import decode as decode_hopper

        most = (card.processors,) * tile.programs
        programs = most if launch.spread else (min(launch.programs, sum(most)),)
        return decode_hopper.launch(t, plan, (launch.buckets[0], launch.buckets[-1]), programs, options)
    buckets = Buckets(launch.buckets[0], launch.buckets[1] if len(launch.buckets) > 1 else -1, merges)
    given = decode.launch_arguments(plan, t, tile, buckets, options["RETURN_LSE"], counts)
    decode_kernel[(launch.programs,)](**given, PDL_TRIGGER=options["LEADS"], **_waits(options["FOLLOWS"]))


def _prefill(plan: GpuPlan, t: Tensors, prefill: PrefillPlan, card: Card, options: dict[str, Any]) -> None:
    tile, geometry = prefill.tile, plan.geometry
    count, positions = plan.arrays["prefill_count"], plan.arrays["positions"]
    if card.hopper:
        from trunkattn.gpu.hopper import prefill as prefill_hopper  # Gluon, which other cards need not have

        if prefill_hopper.supports(t, tile, geometry):
            return prefill_hopper.launch(t, prefill, (count, positions), geometry, options)
    given = prefill_triton.launch_arguments(plan, t, options["RETURN_LSE"])
    prefill_kernel[(prefill.programs,)](**given, PDL_TRIGGER=options["LEADS"])


def _merge(plan: GpuPlan, t: Tensors, count_at: int, programs: int, options: dict[str, Any]) -> None:
    given = merge.launch_arguments(plan, t, count_at, options["RETURN_LSE"])
    merge_kernel[(programs,)](**given, **_waits(options["FOLLOWS"]))


def _waits(follows: bool) -> dict[str, bool]:
    """How to launch what may start before the launch ahead of it ends (programmatic dependent launch)."""
    return {"PDL_WAIT": True, "launch_pdl": True} if follows else {"PDL_WAIT": False}


_EXECUTIONS = MappingProxyType({"serial": _serial, "overlapped": _overlapped, "streams": _streams})
