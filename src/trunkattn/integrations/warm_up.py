"""A plug-in's kernels compiled, and run once, before a request waits for them."""

from collections.abc import Callable
from contextlib import nullcontext

import torch

from trunkattn.attention import BatchAttention, Plan
from trunkattn.gpu.compiling import compiled_together


def warm_up(work: Callable[[], None]) -> None:
    """Compiles all kernels of some plans and layers at once. Then runs them, which loads them onto the device."""
    for context in (compiled_together(), nullcontext()):
        with context:
            work()


def run_zeros(
    attention: BatchAttention,
    plan: Plan,
    caches: tuple[torch.Tensor, torch.Tensor],
    rows: int,
    return_lse: bool = False,
) -> None:
    """Runs a layer on queries that are zeros, and drops the result.

    Args:
        attention: the layer's.
        plan: of at most `rows` query tokens.
        caches: the layer's, of 8 bits or not.
        rows: of the queries.
        return_lse: as of `BatchAttention.run`.
    """
    config, device = attention.config, caches[0].device
    q = torch.zeros(rows, config.num_qo_heads, config.head_dim, dtype=config.dtype, device=device)
    sinks = torch.zeros(config.num_qo_heads, device=device) if config.sinks else None
    scale = 1.0 if caches[0].element_size() == 1 else None
    attention.run(plan, q, *caches, return_lse=return_lse, k_scale=scale, v_scale=scale, sinks=sinks)
