"""Launches of a GPU plan (PAT §3.4: pack, forward, merge).

Launch order: the items of prompt chunks; items that merge nothing, by tile height; items that merge what those left;
the merges that no item does. Every launch is a number of CTAs that read their counts from device memory.
Executions: `serial`, where each launch may start while the one ahead of it ends (programmatic dependent launch, PDL);
`overlapped`, the same with chunks and some items of the lowest tile in one launch (POD-Attention §4); `streams`, where
launches that wait for nothing run side by side (PAT §6).
"""

from collections.abc import Callable
from dataclasses import replace

import torch

from trunkattn.gpu.bound import BoundLaunches, Grid, layer_key
from trunkattn.gpu.plan import DeviceInfo, GpuPlan, Launch, Tensors
from trunkattn.gpu.triton import arguments, decode, merge, prefill
from trunkattn.gpu.tuning.decode import GpuTile

Run = Callable[[Tensors], None]


def execute(plan: GpuPlan, t: Tensors, tiles: tuple[GpuTile, ...], device_info: DeviceInfo, return_lse: bool) -> None:
    """Computes a layer on the current stream. The plan's launches are bound once for all layers of a kind."""
    key = layer_key(t, return_lse)
    run = plan.bound.get(key)
    if run is None:
        run = plan.bound[key] = _Binder(plan, t, tiles, device_info, return_lse).bind()
    run(t)


class _Sequence:
    """Launches one after the other."""

    def __init__(self, launches: list[Run]) -> None:
        self._launches = tuple(launches)

    def __call__(self, t: Tensors) -> None:
        for launch in self._launches:
            launch(t)


class _Streams:
    """Launches that wait for nothing on streams of their own; then the others."""

    def __init__(self, independent: list[Run], dependent: list[Run]) -> None:
        self._independent, self._dependent = tuple(independent), _Sequence(dependent)
        self._streams = [torch.cuda.Stream() for _ in independent[1:]]

    def __call__(self, t: Tensors) -> None:
        main = torch.cuda.current_stream()
        for stream in self._streams:
            stream.wait_stream(main)
        for launch, stream in zip(self._independent, (main, *self._streams), strict=False):
            with torch.cuda.stream(stream):
                launch(t)
        for stream in self._streams:
            main.wait_stream(stream)
        self._dependent(t)


class _Binder:
    """Decides which kernels compute a plan for layers like `t`, and binds their arguments."""

    def __init__(
        self, plan: GpuPlan, t: Tensors, tiles: tuple[GpuTile, ...], device_info: DeviceInfo, return_lse: bool
    ) -> None:
        self._plan, self._t, self._tiles, self._device_info, self._return_lse = plan, t, tiles, device_info, return_lse

    def bind(self) -> Run:
        """By the plan's execution."""
        if self._plan.execution == "overlapped":
            return _Sequence(self._overlapped())
        if self._plan.execution == "streams" and self._t.q.is_cuda:  # the interpreter has no streams
            return self._streams()
        return _Sequence(self._serial())

    def _serial(self) -> list[Run]:
        plan = self._plan
        chunks = [self._chunks(trigger=self._device_info.overlaps and bool(plan.launches))] if plan.prefill else []
        return [*chunks, *self._in_order(plan.launches, launches_ahead=bool(chunks))]

    def _overlapped(self) -> list[Run]:
        """Prompt chunks and the items that overlap them in one launch (POD-Attention §4), if a kernel takes both."""
        plan, device_info = self._plan, self._device_info
        trigger = device_info.overlaps and bool(plan.launches)
        if device_info.hopper and self._t.q.is_cuda:
            from trunkattn.gpu.hopper import prefill_decode  # Gluon, which other cards need not have

            if prefill_decode.supports(self._t, plan, self._tiles[0]):
                both = prefill_decode.bind(self._t, plan, device_info.num_sms, trigger, self._return_lse)
                return [both, *self._in_order(plan.launches, launches_ahead=True)]
        items = Launch((0,), device_info.num_sms * self._tiles[0].ctas_per_sm)
        decodes = self._items(items, trigger, wait=False, counts=plan.arrays["overlapped"])
        return [self._chunks(trigger=False), decodes, *self._in_order(plan.launches, launches_ahead=True)]

    def _streams(self) -> Run:
        independent: list[Launch] = []
        dependent: list[Launch] = []
        for launch in self._plan.launches:
            alone = launch.buckets and launch.buckets[-1] < len(self._tiles)
            (independent if alone else dependent).append(launch)
        side_by_side = [self._items(launch, trigger=False, wait=False) for launch in independent]
        if self._plan.prefill:
            side_by_side.insert(0, self._chunks(trigger=False))
        return _Streams(side_by_side, self._in_order(tuple(dependent), launches_ahead=False))

    def _in_order(self, launches: tuple[Launch, ...], launches_ahead: bool) -> list[Run]:
        """launches_ahead: another launch precedes them."""
        launches = tuple(part for launch in launches for part in self._parts(launch))
        bound: list[Run] = []
        for number, launch in enumerate(launches):
            wait = self._device_info.overlaps and (number > 0 or launches_ahead)
            if launch.buckets:
                trigger = self._device_info.overlaps and number + 1 < len(launches)
                bound.append(self._items(launch, trigger, wait))
            else:
                bound.append(self._merge(launch.num_programs, wait))
        return bound

    def _hopper_tile(self, launch: Launch) -> bool:
        """Whether the Hopper decode kernel computes a launch, whose items then merge nothing."""
        tile = self._tiles[launch.buckets[0] % len(self._tiles)]
        if not (tile.hopper and self._device_info.hopper) or launch.buckets[-1] >= len(self._tiles):
            return False
        from trunkattn.gpu.hopper import decode as hopper_decode  # Gluon, which other cards need not have

        return hopper_decode.supports(self._t, self._plan.geometry, tile)

    def _parts(self, launch: Launch) -> list[Launch]:
        """A launch of all tiles of the Hopper kernel as launches of one tile each, where it does not compute them."""
        all_tiles = launch.buckets and self._tiles[launch.buckets[0] % len(self._tiles)].hopper
        if not all_tiles or self._hopper_tile(launch):
            return [launch]
        return [replace(launch, buckets=(bucket,)) for bucket in launch.buckets]

    def _items(self, launch: Launch, trigger: bool, wait: bool, counts: torch.Tensor | None = None) -> Run:
        """counts: where the buckets begin, for the portable kernel; None: the plan's."""
        plan, t = self._plan, self._t
        tile, merges = self._tiles[launch.buckets[0] % len(self._tiles)], launch.buckets[-1] >= len(self._tiles)
        if counts is None and self._hopper_tile(launch):
            from trunkattn.gpu.hopper import decode as hopper_decode

            most = (self._device_info.num_sms,) * tile.ctas_per_sm
            spread = launch.spread and plan.geometry.num_kv_heads > 1
            num_programs = most if spread else (min(launch.num_programs, sum(most)),)
            first_and_last, pdl = (launch.buckets[0], launch.buckets[-1]), hopper_decode.Pdl(trigger, wait)
            return hopper_decode.bind(t, plan, first_and_last, num_programs, pdl, self._return_lse)
        second = launch.buckets[1] if len(launch.buckets) > 1 else -1
        stride = decode.spread_stride(launch.num_programs) if launch.spread else 1
        buckets = decode.Buckets(launch.buckets[0], second, merges, stride)
        given = decode.launch_arguments(plan, t, tile, buckets, self._return_lse, counts)
        given |= {"PDL_TRIGGER": trigger, **_waits(wait)}
        grids, of_layer = [Grid(launch.num_programs, given)], arguments.of_layer(plan.geometry)
        return BoundLaunches(decode.decode_kernel, grids, arguments.LAYER, of_layer)

    def _chunks(self, trigger: bool) -> Run:
        plan, t = self._plan, self._t
        assert plan.prefill
        if self._device_info.hopper:
            from trunkattn.gpu.hopper import prefill as hopper_prefill  # Gluon, which other cards need not have

            if hopper_prefill.supports(t, plan.prefill.tile, plan.geometry):
                return hopper_prefill.bind(t, plan, trigger, self._return_lse)
        given = prefill.launch_arguments(plan, t, self._return_lse) | {"PDL_TRIGGER": trigger}
        grids, of_layer = [Grid(plan.prefill.num_programs, given)], arguments.of_layer(plan.geometry)
        return BoundLaunches(prefill.prefill_kernel, grids, arguments.LAYER, of_layer)

    def _merge(self, num_programs: int, wait: bool) -> Run:
        count_at = 2 * len(self._tiles) + 1
        given = merge.launch_arguments(self._plan, self._t, count_at, self._return_lse) | _waits(wait)
        return BoundLaunches(merge.merge_kernel, [Grid(num_programs, given)], merge.LAYER, merge.of_layer)


def _waits(wait: bool) -> dict[str, bool]:
    """Options of a launch that may start before the launch ahead of it ends (programmatic dependent launch)."""
    return {"PDL_WAIT": True, "launch_pdl": True} if wait else {"PDL_WAIT": False}
