"""Decode context parallelism: each rank of a group holds a part of every request's keys and values.

Tokens go round the ranks, `interleave` of them at a time. A rank attends with the query heads of the whole group to the
keys that it holds, and the ranks merge their outputs by their log-sum-exps. Then each has its own heads.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from trunkattn.integrations.vllm import versions


@dataclass(frozen=True)
class ContextRanks:
    """A rank of the group.

    Attributes:
        size: ranks of the group.
        rank: which one this is.
        interleave: consecutive tokens that one rank holds.
    """

    size: int
    rank: int
    interleave: int

    def local_lens(self, lens: torch.Tensor) -> torch.Tensor:
        """Tokens that this rank holds of sequences of `lens` tokens; nothing waits for the device."""
        whole = lens // (self.size * self.interleave) * self.interleave
        rest = lens - whole * self.size - self.rank * self.interleave
        return whole + rest.clamp(0, self.interleave)

    def most_local(self, longest: int) -> int:
        """An upper bound of `local_lens` of sequences of up to `longest` tokens, the same on every rank."""
        return -(-longest // (self.size * self.interleave)) * self.interleave


def context_ranks(layers: Iterable[Any], vllm_config: Any) -> ContextRanks | None:
    """How the ranks share the requests of a group's layers; None: each request is on one rank. A draft model's may be
    on one although the engine has several."""
    impl = next(iter(layers)).impl
    if impl.dcp_world_size == 1:
        return None
    return ContextRanks(impl.dcp_world_size, impl.dcp_rank, vllm_config.parallel_config.cp_kv_cache_interleave_size)


@dataclass(frozen=True)
class ContextGroup:
    """What a layer does with the other ranks. Every rank must call each method equally often.

    Attributes:
        group: vLLM's group of ranks.
        combine: vLLM's function that merges the ranks' outputs.
    """

    group: Any
    combine: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def gather_heads(self, query: torch.Tensor) -> torch.Tensor:
        """[tokens, heads of all ranks, head_dim] of this rank's query heads."""
        gathered: torch.Tensor = self.group.all_gather(query.contiguous(), dim=1)
        return gathered

    def merge(self, out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of this rank's heads over the keys of all ranks. Overwrites `out`.

        Args:
            out: [tokens, heads of all ranks, head_dim] over this rank's keys; where `lse` is -inf it may be anything.
            lse: [tokens, heads of all ranks] float32.
        """
        return self.combine(out, lse, self.group, return_lse=True)


def find_group(vllm_config: Any) -> ContextGroup:
    """The group of this rank; only with more than one rank. Raises ValueError if vLLM cannot merge its results."""
    from vllm.distributed.parallel_state import get_dcp_group

    group = get_dcp_group()
    check_merge(group, versions.merges_all_to_all(vllm_config))
    return ContextGroup(group, versions.context_combine(vllm_config))


def check_merge(group: Any, all_to_all: bool) -> None:
    """vLLM does not say so when it cannot load the NCCL that it wants: its reduce-scatter then writes nothing, and the
    ranks go on with whatever is in memory. The merge that sends all to all uses torch's NCCL instead.

    Raises:
        ValueError: the group merges with a reduce-scatter, and has no NCCL for it.
    """
    nccl = getattr(getattr(group, "device_communicator", None), "pynccl_comm", None)
    if not all_to_all and nccl is not None and nccl.disabled:
        raise ValueError(
            "attention_backend=CUSTOM: vLLM could not load the NCCL that it wants (from 0.32 on 2.29.7 or newer) and "
            "would leave results of decode context parallelism unmerged: set dcp_comm_backend=a2a, or install that NCCL"
        )


def context_refusals(spec: Any, flash: Any, flash_note: str, reads_another: bool = False) -> list[str]:
    """Why a layer cannot run on several ranks; empty if it can. reads_another: whether it reads another layer's KV
    cache."""
    found = []
    if reads_another:
        found.append("layers that read the KV cache of another layer, as they have no keys of a prompt at hand")
    if spec.sliding_window is not None:
        found.append("sliding windows, since a rank does not know how far its keys are from a query")
    if spec.sinks:
        found.append("sinks, which each rank would add")
    if flash is None:
        found.append(f"layers whose prompts FlashAttention does not run ({flash_note})")
    elif flash.version == 2:
        found.append("FlashAttention 2, which fails at prompts of which a rank holds nothing")
    return [f"decode context parallelism with {reason}" for reason in found]
