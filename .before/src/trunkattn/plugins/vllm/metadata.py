"""The plans of a step: one per kind of layer in an attention group, made once and run by every layer of that kind."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder

from trunkattn import BatchAttention, Plan
from trunkattn.plugins.vllm import versions
from trunkattn.plugins.vllm.impl import LayerKind
from trunkattn.plugins.vllm.metrics import Ledger, Traffic, step_path

logger = init_logger("vllm.trunkattn")


@dataclass
class StepPlans(AttentionMetadata):
    """What the layers of a group need of a step."""

    plans: dict[LayerKind, tuple[BatchAttention, Plan]]


class GroupBuilder(AttentionMetadataBuilder[Any]):
    """What planning an attention group takes on any device: layers of one back end in one KV-cache group.

    Raises:
        ValueError: with one line, if the group's KV cache holds something else than keys and values of one width.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.modules = get_layers_from_vllm_config(vllm_config, torch.nn.Module, layer_names)
        _check_group(kv_cache_spec, self.modules)
        self.layers: Counter[LayerKind] = Counter(layer.impl.kind for layer in self.modules.values())
        self.configs = {kind: kind.config(kv_cache_spec.block_size) for kind in self.layers}
        self.ledger = Ledger(vllm_config, {kind.sliding_window for kind in self.layers}, self.layers.total())

    @property
    def traffic(self) -> Traffic:
        """KV bytes so far."""
        return self.ledger.traffic

    def widths(self) -> list[int]:
        """Bytes of a KV token in all layers of a kind, for each kind."""
        return [
            (kind.kv_dtype or kind.dtype).itemsize * 2 * kind.head_dim * kind.num_kv_heads * count
            for kind, count in self.layers.items()
        ]


class TrunkAttentionBuilder(GroupBuilder):
    """Plans the steps of one attention group on a CPU."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        # one for all windows of an attention: they share the forest
        attentions = {config: BatchAttention(config, device) for config in self.configs.values()}
        self.attentions = {kind: attentions[config] for kind, config in self.configs.items()}
        for kind, count in self.layers.items():
            logger.info(
                "TrunkAttention runs prefill chunks, decoding and mixed batches of %d layers (%s; "
                "blocks of %d tokens).",
                *(count, features(kind), kv_cache_spec.block_size),
            )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepPlans:
        """Plans prefill chunks, decoding, drafts to verify and mixtures of them alike. common_prefix_len, always 0 from
        0.32 on, is not needed: what is shared is seen in the block table, whose padding rows have no query tokens."""
        step = common_attn_metadata
        check_causal(step)
        rows = step.num_reqs
        batch = (step.block_table_tensor[:rows], step.seq_lens[:rows], step.query_start_loc[: rows + 1])
        plans = {
            kind: (attention, attention.plan(*batch, sliding_window=kind.sliding_window))
            for kind, attention in self.attentions.items()
        }
        self._count(plans, batch[2].diff())
        return StepPlans(plans)

    def _count(self, plans: dict[LayerKind, tuple[BatchAttention, Plan]], query_lens: torch.Tensor) -> None:
        read = alone = 0
        for (_, plan), width in zip(plans.values(), self.widths(), strict=True):
            read += plan.stats.kv_tokens_read * width
            alone += plan.stats.kv_tokens_per_query * width
        self.ledger.step(step_path(query_lens, versions.decode_query_len(self.vllm_config)))
        self.ledger.read(read, alone, int((query_lens > 0).sum()))
        self.ledger.log()


def check_causal(step: Any) -> None:
    """Raises ValueError if some rows of the batch are not causal."""
    if step.causal is not True:
        raise ValueError("attention_backend=CUSTOM: TrunkAttention is causal, and this batch has rows that are not")


def features(kind: LayerKind) -> str:
    """A kind of layer, for the log."""
    found = [f"{kind.num_qo_heads}/{kind.num_kv_heads} heads of {kind.head_dim}, {kind.dtype}"]
    found += [f"KV cache {kind.kv_dtype}"] if kind.kv_dtype else []
    found += [f"window {kind.sliding_window}"] if kind.sliding_window else []
    found += [f"soft cap {kind.logits_soft_cap}"] if kind.logits_soft_cap else []
    found += ["sinks"] if kind.sinks else []
    return ", ".join(found)


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
