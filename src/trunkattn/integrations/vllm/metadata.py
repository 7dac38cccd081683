"""The plans of a step: one per layer spec in an attention group, made once and run by every layer of that spec."""

from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import get_layers_from_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import AttentionMetadata, AttentionMetadataBuilder

from trunkattn import BatchAttention, Plan
from trunkattn.integrations.kv_traffic import Traffic, step_path, tokens_of
from trunkattn.integrations.layer_spec import LayerSpec
from trunkattn.integrations.vllm import NAME, versions
from trunkattn.integrations.vllm.impl import check_supported
from trunkattn.integrations.vllm.metrics import kv_read_stats

logger = init_logger("vllm.trunkattn")


@dataclass
class StepPlans(AttentionMetadata):
    """A step's plans for the layers of a group; none in a step that no layer runs."""

    plans: dict[LayerSpec, tuple[BatchAttention, Plan]]


class LayerGroup:
    """What all builders have: an attention group, that is, the layers of one back end in one KV-cache group."""

    supported_specs: ClassVar[frozenset[str]] = versions.SUPPORTED_SPECS

    @classmethod
    def backend_name(cls) -> str:
        """The back end's name in vLLM, for messages."""
        return NAME

    def init_group(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any) -> None:
        """Finds the layers, for what is said and refused at the start. The list of names may grow later."""
        self._group = kv_cache_spec, layer_names, vllm_config
        self.find_layers()

    def find_layers(self) -> None:
        """Finds the layers, what their attention is, and their counters. Builders call it again before their first
        step: of a draft model vLLM tells the first layer only, and adds the others once the builder is made.

        Raises:
            ValueError: with one line, if the group's KV cache holds anything else than the back end reads.
        """
        kv_cache_spec, layer_names, vllm_config = self._group
        found = get_layers_from_vllm_config(vllm_config, torch.nn.Module, layer_names)
        # Layers that run only drafts have another builder, too.
        own = {
            name: layer
            for name, layer in found.items()
            if not versions.runs_only_drafts(layer.impl.draft_tag, vllm_config)
        }
        self.modules = own or found
        self._only_drafts = not own and versions.has_model_runner_v1(vllm_config)
        self._check_group(kv_cache_spec, self.modules)
        self.layers: Counter[LayerSpec] = Counter(layer.impl.layer_spec for layer in self.modules.values())
        self.configs = {spec: spec.config(kv_cache_spec.block_size) for spec in self.layers}
        self.stats = kv_read_stats(vllm_config, {spec.sliding_window for spec in self.layers}, self.layers.total())

    def is_run(self, fast_build: bool) -> bool:
        """Whether layers run the step that vLLM asks for. Model runner V1 asks a group of draft layers for each step of
        the model too, which only the model's own layers run; it wants the steps for drafting built fast.

        Args:
            fast_build: an argument of vLLM's `build`.
        """
        return fast_build or not self._only_drafts

    @classmethod
    def _check_group(cls, kv_cache_spec: Any, layers: dict[str, Any]) -> None:
        kind = type(kv_cache_spec).__name__
        problems = []
        if kind not in cls.supported_specs:
            problems = [f"a KV cache of kind {kind}, only {', '.join(sorted(cls.supported_specs))}"]
        if getattr(kv_cache_spec, "non_causal", False):
            problems.append("attention in both directions over prompts, which layers of this model have")
        for name, layer in layers.items():
            width = getattr(layer, "head_size_v", layer.impl.head_size)
            if width != layer.impl.head_size:
                problems = [f"values of another width than keys ({width} and {layer.impl.head_size} in {name})"]
        check_supported(problems, cls.backend_name())

    @property
    def attends_in_chunks(self) -> bool:
        """Whether vLLM cuts requests into chunks of tokens that do not see each other, and plans each as a row."""
        return any(getattr(layer, "attention_chunk_size", None) for layer in self.modules.values())

    @property
    def traffic(self) -> Traffic:
        """KV bytes so far."""
        return self.stats.traffic

    def kv_token_bytes(self) -> list[int]:
        """Returns, by layer spec, the bytes of one KV token in all layers of that spec."""
        return [spec.kv_token_bytes * count for spec, count in self.layers.items()]


class GroupBuilder(LayerGroup, AttentionMetadataBuilder[Any]):
    """Base of the builders of keys and values.

    Raises:
        ValueError: with one line, if the group's KV cache holds anything but keys and values of the same width.
    """

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.init_group(kv_cache_spec, layer_names, vllm_config)


class TrunkAttentionBuilder(GroupBuilder):
    """Plans the steps of one attention group on a CPU."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.attentions: dict[LayerSpec, BatchAttention] = {}  # the first step makes them
        for spec, count in self.layers.items():
            logger.info(
                "TrunkAttention runs prefill chunks, decoding and mixed batches in %d layers (%s; blocks of %d "
                "tokens).",
                *(count, spec, kv_cache_spec.block_size),
            )
        if any(spec.batch_invariant for spec in self.layers):
            logger.warning_once(
                "VLLM_BATCH_INVARIANT=1: attention on this CPU is batch invariant, but vLLM's linear layers for CPUs "
                "need not be, so a request's bits may still depend on its batch."
            )

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> StepPlans:
        """Plans a step of prefill chunks, decodes, drafts to verify, or any mixture of them.

        `common_prefix_len` is not used (from 0.32 on it is always 0): the plan finds shared prefixes in the block
        table. Padding rows have no query tokens.
        """
        if not self.is_run(fast_build):
            return StepPlans({})
        step = common_attn_metadata
        check_causal(step)
        if not self.attentions:
            self._make_attentions()
        rows = step.num_reqs
        batch = (step.block_table_tensor[:rows], step.seq_lens[:rows], step.query_start_loc[: rows + 1])
        plans = {
            spec: (attention, attention.plan(*batch, sliding_window=spec.sliding_window))
            for spec, attention in self.attentions.items()
        }
        self._count(plans, batch[2].diff())
        return StepPlans(plans)

    def _make_attentions(self) -> None:
        """One attention serves all windows of a configuration, so that they share the forest."""
        self.find_layers()
        attentions = {config: BatchAttention(config, self.device) for config in self.configs.values()}
        self.attentions = {spec: attentions[config] for spec, config in self.configs.items()}

    def _count(self, plans: dict[LayerSpec, tuple[BatchAttention, Plan]], query_lens: torch.Tensor) -> None:
        self.stats.count_step(step_path(query_lens, versions.decode_query_len(self.vllm_config)))
        kv_tokens = [tokens_of(plan) for _, plan in plans.values()]
        self.stats.count_tokens(kv_tokens, self.kv_token_bytes(), int((query_lens > 0).sum()))
        self.stats.log()


def check_causal(step: Any, name: str = NAME) -> None:
    """Raises ValueError if a row of the batch is not causal. name: of the back end."""
    if step.causal is not True:
        raise ValueError(
            f"attention_backend={name}: TrunkAttention is causal, and this batch has rows that are not; leave "
            "attention_backend out"
        )
