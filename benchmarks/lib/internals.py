"""What benchmarks look at inside the library: these are no part of its interface."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest import mock

import torch

from trunkattn import BatchAttention, Plan, PrefixTree
from trunkattn.gpu.arrays import Arrays
from trunkattn.gpu.cards import card_at
from trunkattn.gpu.chunk_planner import ChunkPlanner
from trunkattn.gpu.hopper import spec as hopper
from trunkattn.gpu.kernel import Choice, Work, choose, kernel_named, portable_kernel
from trunkattn.gpu.tiles import PrefillTile
from trunkattn.training import op, spec
from trunkattn.training.cudnn_trees import intervals
from trunkattn.training.sequences import Sequences


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
    kernel = kernel_named(hopper.PREFILL) if tile.persistent else portable_kernel(Work.PREFILL)
    kernels = replace(backend._kernels, prefill=Choice(kernel, {}), both=None, prefill_tile=tile)
    backend._kernels, backend._planner.overlap = kernels, None
    backend._arrays = Arrays(kernels, card, attention.device)
    backend._chunks = ChunkPlanner(attention.config, tile, card.num_sms)


@contextmanager
def own_training_kernels() -> Iterator[None]:
    """Inside, kernels of this project compute the passes that a cuDNN or FlashAttention-4 computes by default."""
    cuda = torch.backends.cuda
    before = cuda.cudnn_sdp_enabled(), cuda.flash_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    cuda.enable_flash_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(before[0])
        cuda.enable_flash_sdp(before[1])


@contextmanager
def without_flash_attention_4() -> Iterator[None]:
    """Inside, FlashAttention-4 counts as not installed."""
    chosen = op._sources, import_module("trunkattn.training.flash_attention")._chosen
    with mock.patch.object(spec, "fa4_version", str):
        for cache in chosen:
            cache.cache_clear()
        try:
            yield
        finally:
            for cache in chosen:
                cache.cache_clear()


def own_flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    *,
    tree: PrefixTree | None = None,
    deterministic: bool = False,
) -> torch.Tensor:
    """`flash_attention` without the kernels that compute both passes at once. Inside `own_training_kernels`, those of
    this project compute each pass."""
    sequences = Sequences(causal, q.shape[-1] ** -0.5)
    if tree is not None:
        work = tree.work
        sequences = replace(sequences, causal=True, tree=tree.tables(q.device), pairs=work.pairs, largest=work.largest)
    return op.attention(q, k, v, *op.arguments_of(sequences, deterministic))[0]


def training_kernel(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, work: Work) -> str:
    """What `flash_attention` takes by default for a batch or a tree of tensors like q, k and v: a kernel of the table
    that computes both passes, or one for each."""
    if not q.is_cuda:
        return "CPU"
    options = ("tree",) * (work is Work.TREE)
    card, config = card_at(q.device), spec.TrainingConfig.of(q, k, v)
    if kernel := choose(work, config, card).kernel:
        return kernel.name
    config = config._replace(options=options)
    passes = choose(Work.FORWARD, config, card), choose(Work.BACKWARD, config, card)
    return ", ".join(choice.kernel.name for choice in passes if choice.kernel)


def tree_intervals(tree: PrefixTree, device: torch.device) -> torch.Tensor:
    """The keys that each token of a tree sees, as ends of intervals for cuDNN's flex_attention."""
    return intervals(tree.tables(device), tree.num_levels)
