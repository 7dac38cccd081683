"""Which kernel computes the attention of common models on a GPU, for `trunkattn doctor` and the support matrix."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from trunkattn.config import AttentionConfig
from trunkattn.gpu.tuning.cards import GpuFacts, card_of
from trunkattn.gpu.tuning.choice import choose_tiles, why_portable

LLAMA: Final = MappingProxyType(
    {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16}
)
# What differs from the first one
MODELS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "Llama-3-8B, Mistral-7B, Qwen3-8B": {},
        "Llama-3-70B, Qwen3-32B": {"num_qo_heads": 64},
        "Llama-2-7B": {"num_kv_heads": 32},
        "Llama-3.2-1B": {"head_dim": 64},
        "Phi-3-mini": {"num_kv_heads": 32, "head_dim": 96},
        "Qwen2.5-7B": {"num_qo_heads": 28, "num_kv_heads": 4},
        "Qwen3-14B": {"num_qo_heads": 40},
        "Gemma-2-9B": {"num_qo_heads": 16, "head_dim": 256, "logits_soft_cap": 50.0},
        "gpt-oss-20b": {"num_qo_heads": 64, "head_dim": 64, "sinks": True},
    }
)
EXAMPLES: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        **MODELS,
        "Llama-3-8B with an fp8 cache": {"kv_dtype": torch.float8_e4m3fn},
        "Llama-3-8B with pages of 1 token": {"page_size": 1},
        "Llama-3-8B, batch invariant": {"batch_invariant": True},
        "Llama-3-8B in float32": {"dtype": torch.float32},
    }
)


@dataclass(frozen=True)
class Kernels:
    """Of an attention: "fast", or "portable" or "no" and why. prompts: of prompt chunks."""

    attention: str
    decodes: str
    prompts: str


def attention_of(changes: Mapping[str, Any]) -> AttentionConfig:
    """Of a model with a 16-bit cache and pages of 16 tokens, but for the changes."""
    return AttentionConfig(**{**LLAMA, **changes})


def kernels_on(facts: GpuFacts, refusals: Callable[[AttentionConfig], list[str]]) -> tuple[Kernels, ...]:
    """On a GPU, of the models and options above. refusals: why it does not run an attention; empty: it does."""
    return tuple(_kernels(name, attention_of(changes), facts, refusals) for name, changes in EXAMPLES.items())


def _kernels(
    name: str, config: AttentionConfig, facts: GpuFacts, refusals: Callable[[AttentionConfig], list[str]]
) -> Kernels:
    if reasons := refusals(config):
        refused = f"no: {', '.join(reasons)}"
        return Kernels(name, refused, refused)
    card = card_of(facts.name, facts.num_sms)
    why, low = why_portable(config, card, facts.capability), choose_tiles(config, card, facts.capability)[0]
    decodes = _named(why.decodes)
    if not why.decodes and not low.hopper:
        decodes += "; single requests portable, which is faster"
    return Kernels(name, decodes, _named(why.prompts))


def _named(why: tuple[str, ...]) -> str:
    return f"portable: {', '.join(why)}" if why else "fast"
