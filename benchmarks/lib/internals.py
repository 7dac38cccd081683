"""What benchmarks look at inside the library: these are no part of its interface."""

from dataclasses import replace
from typing import Any

from trunkattn import BatchAttention, Plan
from trunkattn.gpu.arrays import Arrays
from trunkattn.gpu.cards import card_at
from trunkattn.gpu.chunk_planner import ChunkPlanner
from trunkattn.gpu.kernel import Choice, Work, kernel_named, portable_kernel
from trunkattn.gpu.tiles import PrefillTile


def backend_of(attention: BatchAttention) -> Any:
    """What plans and runs, a `GpuBackend` or a `CpuBackend`."""
    return attention._backend


def step_of(plan: Plan) -> Any:
    """What was planned, a `GpuStep` or a `CpuStep`."""
    return plan.step


def execution_of(plan: Plan) -> str:
    """Whether decodes of a plan overlap its prompt chunks."""
    return "overlapped" if step_of(plan).gpu_plan.launches[0].work is Work.BOTH else "serial"


def take_prefill_tile(attention: BatchAttention, tile: PrefillTile) -> None:
    """Makes an attention on a GPU compute prompt chunks in a tile, and by the kernel whose tile it is."""
    backend, card = backend_of(attention), card_at(attention.device)
    kernel = kernel_named("Hopper prefill") if tile.persistent else portable_kernel(Work.PREFILL)
    kernels = replace(backend._kernels, prefill=Choice(kernel, {}), both=None, prefill_tile=tile)
    backend._kernels, backend._planner.overlap = kernels, None
    backend._arrays = Arrays(kernels, card, attention.device)
    backend._chunks = ChunkPlanner(attention.config, tile, card.num_sms)
