"""Launches of a GPU plan (PAT §3.4: pack, forward, merge).

A plan lists its launches in their order: prompt chunks; items that merge nothing, by tile height; items that merge what
those left; the merges that no item does. Each is a number of CTAs that read their counts from device memory. It may
start while the one ahead of it ends (programmatic dependent launch, PDL). With streams, launches that wait for nothing
run side by side instead (PAT §6).

Launches are bound once for all layers of a kind. Where a kernel cannot read such layers, the portable kernel of the
same work takes the launch, and the plan keeps the reason for its statistics.
"""

from collections.abc import Callable
from typing import Protocol

import torch

from trunkattn.gpu.arrays import GpuPlan, Launch, LaunchOptions
from trunkattn.gpu.bound import layer_key
from trunkattn.gpu.kernel import Work, kernel_named, portable_kernel
from trunkattn.gpu.layer import Pdl, Tensors

Run = Callable[[Tensors], None]


class KernelSource(Protocol):
    """What the source of an attention kernel has."""

    def bind(self, plan: GpuPlan, t: Tensors, launch: Launch, options: LaunchOptions) -> Run:
        """The launch, its grid, arrays and constants settled, for every layer like `t`."""


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


def _bind(plan: GpuPlan, t: Tensors, return_lse: bool) -> Run:
    """The launches of a plan for layers like `t`."""
    launches = [each for launch in plan.launches for each in _readable(plan, t, launch)]
    if plan.streams and t.q.is_cuda:  # the interpreter has no streams
        independent = [launch for launch in launches if _waits_for_nothing(plan, launch)]
        dependent = [launch for launch in launches if launch not in independent]
        options = LaunchOptions(Pdl(trigger=False, wait=False), return_lse)
        side_by_side = [_bound(plan, t, launch, options) for launch in independent]
        return _Streams(side_by_side, _in_order(plan, t, dependent, return_lse))
    return _Sequence(_in_order(plan, t, launches, return_lse))


def _waits_for_nothing(plan: GpuPlan, launch: Launch) -> bool:
    """Whether a launch merges nothing."""
    return launch.work is not Work.MERGE and all(bucket < len(plan.tiles) for bucket in launch.buckets)


def _in_order(plan: GpuPlan, t: Tensors, launches: list[Launch], return_lse: bool) -> list[Run]:
    has_pdl, last = plan.card.has_pdl and t.q.is_cuda, len(launches) - 1  # the interpreter has none
    options = [
        LaunchOptions(Pdl(trigger=has_pdl and number < last, wait=has_pdl and number > 0), return_lse)
        for number in range(len(launches))
    ]
    return [_bound(plan, t, *each) for each in zip(launches, options, strict=True)]


def _bound(plan: GpuPlan, t: Tensors, launch: Launch, options: LaunchOptions) -> Run:
    source: KernelSource = kernel_named(launch.kernel).source()
    return source.bind(plan, t, launch, options)


def _readable(plan: GpuPlan, t: Tensors, launch: Launch) -> list[Launch]:
    """A launch, or the launches of portable kernels that compute the same where its kernel cannot read the layer."""
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
