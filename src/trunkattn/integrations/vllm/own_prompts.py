"""Prompts of the layers that FlashAttention does not take (8-bit caches, float32) or may not (batch invariance): our
kernels compute them.

They are planned on the device, where the host knows their lengths and there is room (`prompt_plans`); otherwise, and if
they are batch-invariant, on the host, which waits for the device.
"""

from collections.abc import Mapping
from typing import Any

import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity, Plan, PromptChunks
from trunkattn.integrations.layer_spec import LayerSpec
from trunkattn.integrations.prompt_plans import PromptRoom, one_prompt
from trunkattn.integrations.warm_up import planner_compilation, run_zeros, warm_prompts

PromptPlan = tuple[BatchAttention, Plan]


class OwnPrompts:
    """Plans of the prompts of a group of layers.

    Args:
        configs: of those layers, by their specs.
        device: a GPU.
        decodes: the capacity of their decodes.
        room: for prompts that are planned on the device.
    """

    def __init__(
        self, configs: Mapping[LayerSpec, AttentionConfig], device: torch.device, decodes: Capacity, room: PromptRoom
    ) -> None:
        self._room, self._columns = room, decodes.max_pages_per_request
        on_host = {config: BatchAttention(config, device) for config in configs.values()}
        on_device = {
            config: room.attention(config, device, decodes) for config in on_host if not config.batch_invariant
        }
        self._on_host = {spec: on_host[config] for spec, config in configs.items()}
        self._on_device = {spec: on_device[config] for spec, config in configs.items() if config in on_device}
        self._plans: dict[LayerSpec, Plan] = {}  # made on the device; every step refills them

    def known(self, query_lens: torch.Tensor, seq_lens: torch.Tensor | None) -> PromptChunks | None:
        """What the host knows of a step's prompts; None: not enough to plan them on the device.

        Args:
            query_lens, seq_lens: [prompts] on the CPU; None: it does not know them.
        """
        return None if seq_lens is None or not self._on_device else self._room.chunks(query_lens, seq_lens)

    def plan(
        self,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        known: PromptChunks | None,
    ) -> dict[LayerSpec, PromptPlan]:
        """The plans of a step; see `BatchAttention.plan`."""
        return {spec: self._plan(spec, block_table, seq_lens, query_start_loc, known) for spec in self._on_host}

    def _plan(
        self,
        spec: LayerSpec,
        block_table: torch.Tensor,
        seq_lens: torch.Tensor,
        query_start_loc: torch.Tensor,
        known: PromptChunks | None,
    ) -> PromptPlan:
        attention, window = self._on_device.get(spec), spec.sliding_window
        if attention is None or known is None:
            planner_compilation(spec.batch_invariant).wait()
            attention = self._on_host[spec]
            return attention, attention.plan(block_table, seq_lens, query_start_loc, sliding_window=window)
        options: dict[str, Any] = {"sliding_window": window, "into": self._plans.get(spec), "chunks": known}
        plan = attention.plan(block_table, seq_lens, query_start_loc, **options)
        self._plans[spec] = plan
        return attention, plan.only("chunks")

    def run_once(self, caches: Mapping[LayerSpec, tuple[torch.Tensor, torch.Tensor | None]], page_size: int) -> None:
        """Plans and runs what needs each kernel of the layers, on queries that are zeros; caches: theirs."""
        for spec, on_host in self._on_host.items():
            if spec in self._on_device:
                tables, known = one_prompt(on_host.device)
                plans = [self._plan(spec, *tables, known)]
            else:
                steps = warm_prompts(self._columns, page_size, on_host.device)
                plans = [self._plan(spec, *tables, None) for tables in steps]
            for attention, plan in plans:
                run_zeros(attention, plan, caches[spec], plan.num_query_tokens)
