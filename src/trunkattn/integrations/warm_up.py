"""Compiles a plug-in's kernels, runs them once, and compiles its planner on the host, before a request needs them."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from typing import Final

import torch

from trunkattn.attention import BatchAttention, Plan
from trunkattn.gpu.cards import facts_of
from trunkattn.gpu.compiling import compiled_together
from trunkattn.gpu.planner_compilation.process import PlannerCompilation, compile_ahead
from trunkattn.planner.tiles.batch_invariant import SPAN_TOKENS

# Of the prompts of a warm-up
_PROMPT_TOKENS: Final = (2, 128)
_PROMPT_LENS: Final = (2 * SPAN_TOKENS, 128)


@cache  # one process compiles for all layers
def planner_compilation(batch_invariant: bool) -> PlannerCompilation:
    """The compilation of the host's planner for this GPU, by another process. It begins with the first call."""
    return compile_ahead(facts_of(torch.device("cuda")), batch_invariant)


def warm_up(work: Callable[[], None]) -> None:
    """Compiles all kernels of some plans and layers at once. Then runs them, which loads them onto the device."""
    for context in (compiled_together(), nullcontext()):
        with context:
            work()


def warm_prompts(
    max_pages: int, page_size: int, device: torch.device
) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """The tables of two steps for `BatchAttention.plan`, each with two prompts. A batch-invariant plan cuts and merges
    only those of the first step.

    Args:
        max_pages: columns of the block table.
        page_size: tokens.
        device: of the tables.
    """
    pages = torch.arange(2, dtype=torch.int32, device=device)  # each prompt has one page, again and again
    steps = []
    for length in _PROMPT_LENS:
        length = min(length, max_pages * page_size)
        starts = torch.tensor((0, *_PROMPT_TOKENS), dtype=torch.int32, device="cpu").clamp(max=length)
        starts = starts.cumsum(0, dtype=torch.int32).to(device)
        steps.append((pages[:, None].repeat(1, max_pages), torch.full_like(pages, length), starts))
    return steps


def run_zeros(
    attention: BatchAttention,
    plan: Plan,
    caches: tuple[torch.Tensor, torch.Tensor | None],
    rows: int,
    return_lse: bool = False,
) -> None:
    """Runs a layer on queries that are zeros, and drops the result.

    Args:
        attention: the layer's.
        plan: of at most `rows` query tokens.
        caches: the layer's, of 8 bits or not.
        rows: of the queries.
        return_lse: see `BatchAttention.run`.
    """
    config, device = attention.config, caches[0].device
    q = torch.zeros(rows, config.num_qo_heads, config.head_dim, dtype=config.dtype, device=device)
    sinks = torch.zeros(config.num_qo_heads, dtype=torch.float32, device=device) if config.sinks else None
    scale = 1.0 if caches[0].element_size() == 1 else None
    attention.run(plan, q, *caches, return_lse=return_lse, k_scale=scale, v_scale=scale, sinks=sinks)
