"""Launches of a GPU plan (PAT §3.4: pack, forward, merge).

A plan lists its launches in this order: prompt chunks; items that merge nothing, by tile height; items that merge the
partials of those; and the remaining merges. CTAs read from device memory how much there is to do. A launch may start
while the one before it ends (programmatic dependent launch, PDL). With streams, independent launches run at the same
time instead (PAT §6).

Launches are bound once for all layers with the same key. If a kernel cannot read such layers, the portable kernel for
the same work replaces it, and the plan keeps the reason for its statistics.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.bound import layer_key
from trunkattn.gpu.kernel import Work, kernel_named, portable_kernel
from trunkattn.gpu.launch_order import Launch, LaunchOptions
from trunkattn.gpu.layer import Pdl, Tensors

Run = Callable[[Tensors], None]


class KernelSource(Protocol):
    """The interface of a module with the source of an attention kernel."""

    def bind(self, plan: GpuPlan, t: Tensors, launch: Launch, options: LaunchOptions) -> Run:
        """Binds the grid, arrays and constants of a launch for every layer with the same key as `t`."""


def execute(plan: GpuPlan, t: Tensors, return_lse: bool) -> None:
    """Computes a layer on the current stream."""
    key = layer_key(t, return_lse)
    run = plan.bound.get(key)
    if run is None:
        run = plan.bound[key] = _bind(plan, t, return_lse)
    run(t)


class _Sequence:
    """Launches one after the other."""

    def __init__(self, launches: list[Run]) -> None:
        self._launches = tuple(launches)

    def __call__(self, t: Tensors) -> None:
        for launch in self._launches:
            launch(t)


class _Streams:
    """Independent launches on separate streams, then the others in order."""

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


def _bind(plan: GpuPlan, t: Tensors, return_lse: bool) -> Run:
    """Binds the launches of a plan for layers with the same key as `t`."""
    launches = [each for launch in plan.launches for each in _launches_for(plan, t, launch)]
    if plan.streams and t.q.is_cuda:  # the interpreter has no streams
        independent = [launch for launch in launches if _waits_for_nothing(plan, launch)]
        dependent = [launch for launch in launches if launch not in independent]
        options = LaunchOptions(Pdl(trigger=False, wait=False), return_lse)
        side_by_side = [_bound(plan, t, launch, options) for launch in independent]
        return _Streams(side_by_side, _in_order(plan, t, dependent, return_lse))
    return _Sequence(_in_order(plan, t, launches, return_lse))


def _waits_for_nothing(plan: GpuPlan, launch: Launch) -> bool:
    """Whether a launch merges nothing, so that it depends on no other launch."""
    return launch.work is not Work.MERGE and all(bucket < len(plan.tiles) for bucket in launch.buckets)


def _in_order(plan: GpuPlan, t: Tensors, launches: list[Launch], return_lse: bool) -> list[Run]:
    has_pdl, last = plan.card.has_pdl and t.q.is_cuda, len(launches) - 1  # Triton's interpreter has no PDL
    options = [
        LaunchOptions(Pdl(trigger=has_pdl and number < last, wait=has_pdl and number > 0), return_lse)
        for number in range(len(launches))
    ]
    return [_bound(plan, t, *each) for each in zip(launches, options, strict=True)]


def _bound(plan: GpuPlan, t: Tensors, launch: Launch, options: LaunchOptions) -> Run:
    source: KernelSource = kernel_named(launch.kernel).source()
    return source.bind(plan, t, launch, options)


def _launches_for(plan: GpuPlan, t: Tensors, launch: Launch) -> list[Launch]:
    """The launch itself, or launches of portable kernels for the same work if its kernel cannot read the layer."""
    kernel = kernel_named(launch.kernel)
    reasons = kernel.refuses_layer(t, plan.geometry)
    if not reasons:
        return [launch]
    plan.unreadable.update(dict.fromkeys(f"{kernel.name}: {reason}" for reason in reasons))
    if launch.work is not Work.BOTH:
        buckets: list[tuple[int, ...]] = [(bucket,) for bucket in launch.buckets] or [()]
        return [launch._replace(kernel=portable_kernel(launch.work).name, buckets=each) for each in buckets]
    assert plan.chunks
    chunks = Launch(portable_kernel(Work.PREFILL).name, Work.PREFILL, plan.chunks.num_ctas)
    num_ctas = plan.card.num_sms * plan.tiles[0].ctas_per_sm
    decodes = Launch(portable_kernel(Work.DECODE).name, Work.DECODE, num_ctas, (0,), counts="overlapped")
    return [chunks, decodes]
