"""The plans of a step: one per kind of layer in an attention group, made once and run by every layer of that kind."""

import time
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder

from trunkattn import BatchAttention, Plan
from trunkattn.plugins.vllm import versions
from trunkattn.plugins.vllm.impl import LayerKind

logger = init_logger("vllm.trunkattn")
LOG_INTERVAL: Final = 10.0  # seconds, that of vLLM's own statistics


@dataclass
class StepPlans(AttentionMetadata):
    """What the layers of a group need of a step."""

    plans: dict[LayerKind, tuple[BatchAttention, Plan]]


@dataclass
class Traffic:
    """KV bytes of the steps so far, over all layers of a group; `alone`: as if every request read its own."""

    steps: int = 0
    read: int = 0
    alone: int = 0

    def __str__(self) -> str:
        saved = self.alone - self.read
        share = saved / self.alone if self.alone else 0.0
        return f"{self.steps} steps, {self.read / 1e6:.1f} MB of KV read, {saved / 1e6:.1f} MB ({share:.0%}) saved"


class TrunkAttentionBuilder(AttentionMetadataBuilder[StepPlans]):
    """Plans the steps of one attention group: layers of one back end in one KV-cache group.

    Raises:
        ValueError: with one line, if the group's KV cache holds something else than keys and values of one width.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = get_layers_from_vllm_config(vllm_config, torch.nn.Module, layer_names)
        _check_group(kv_cache_spec, layers)
        self.layers: Counter[LayerKind] = Counter(layer.impl.kind for layer in layers.values())
        configs = {kind: kind.config(kv_cache_spec.block_size) for kind in self.layers}
        # one for all windows of an attention: they share the forest
        attentions = {config: BatchAttention(config, device) for config in configs.values()}
        self.attentions = {kind: attentions[config] for kind, config in configs.items()}
        self.traffic = Traffic()
        self._logged = time.monotonic()
        for kind, count in self.layers.items():
            _log_layers(kind, count, kv_cache_spec.block_size)

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepPlans:
        """Plans prefill chunks, decoding, drafts to verify and mixtures of them alike. common_prefix_len, always 0 from
        0.32 on, is not needed: what is shared is seen in the block table, whose padding rows have no query tokens."""
        step = common_attn_metadata
        if step.causal is not True:
            raise ValueError("attention_backend=CUSTOM: TrunkAttention is causal, and this batch has rows that are not")
        rows = step.num_reqs
        batch = (step.block_table_tensor[:rows], step.seq_lens[:rows], step.query_start_loc[: rows + 1])
        plans = {
            kind: (attention, attention.plan(*batch, sliding_window=kind.sliding_window))
            for kind, attention in self.attentions.items()
        }
        self._count(plans)
        return StepPlans(plans)

    def _count(self, plans: dict[LayerKind, tuple[BatchAttention, Plan]]) -> None:
        self.traffic.steps += 1
        for kind, (_, plan) in plans.items():
            width = (kind.kv_dtype or kind.dtype).itemsize * 2 * kind.head_dim * kind.num_kv_heads * self.layers[kind]
            self.traffic.read += plan.stats.kv_tokens_read * width
            self.traffic.alone += plan.stats.kv_tokens_per_query * width
        now = time.monotonic()
        if now >= self._logged + LOG_INTERVAL:
            self._logged = now
            logger.info("TrunkAttention, %d layers: %s by sharing", self.layers.total(), self.traffic)


def _check_group(kv_cache_spec: Any, layers: dict[str, Any]) -> None:
    spec = type(kv_cache_spec).__name__
    problem = None
    if spec not in versions.SUPPORTED_SPECS:
        problem = f"a KV cache of kind {spec}, only {', '.join(sorted(versions.SUPPORTED_SPECS))}"
    for name, layer in layers.items():
        width = getattr(layer, "head_size_v", layer.impl.head_size)
        if width != layer.impl.head_size:
            problem = f"values of another width than keys ({width} and {layer.impl.head_size} in {name})"
    if problem:
        raise ValueError(f"attention_backend=CUSTOM: TrunkAttention does not support {problem}; leave it out")


def _log_layers(kind: LayerKind, count: int, page_size: int) -> None:
    features = [f"{kind.num_qo_heads}/{kind.num_kv_heads} heads of {kind.head_dim}, {kind.dtype}"]
    features += [f"KV cache {kind.kv_dtype}"] if kind.kv_dtype else []
    features += [f"window {kind.sliding_window}"] if kind.sliding_window else []
    features += [f"soft cap {kind.logits_soft_cap}"] if kind.logits_soft_cap else []
    features += ["sinks"] if kind.sinks else []
    logger.info(
        "TrunkAttention runs prefill chunks, decoding and mixed batches of %d layers (%s; blocks of %d tokens).",
        *(count, ", ".join(features), page_size),
    )
