"""Which kernel computes the attention of common models on a GPU, for `trunkattn doctor` and the support matrix."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from trunkattn.config import AttentionConfig
from trunkattn.gpu.tuning.cards import GpuFacts, card_of
from trunkattn.gpu.tuning.why_portable import why_portable

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
OPTIONS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "Llama-3-8B with an fp8 cache": {"kv_dtype": torch.float8_e4m3fn},
        "Llama-3-8B with pages of 1 token": {"page_size": 1},
        "Llama-3-8B, batch invariant": {"batch_invariant": True},
        "Llama-3-8B in float32": {"dtype": torch.float32},
    }
)


@dataclass(frozen=True)
class Kernels:
    """Of an attention: "fast", or "portable" and why. prompts: of prompt chunks."""

    attention: str
    decodes: str
    prompts: str


def attention_of(changes: Mapping[str, Any]) -> AttentionConfig:
    """Of a model with a 16-bit cache and pages of 16 tokens, but for the changes."""
    return AttentionConfig(**{**LLAMA, **changes})


def kernels_on(facts: GpuFacts) -> tuple[Kernels, ...]:
    """On a GPU, of the models and options above."""
    card, found = card_of(facts.name, facts.num_sms), list[Kernels]()
    for name, changes in {**MODELS, **OPTIONS}.items():
        why = why_portable(attention_of(changes), card, facts.capability)
        found.append(Kernels(name, _named(why.decodes), _named(why.prompts)))
    return tuple(found)


def _named(why: tuple[str, ...]) -> str:
    return f"portable: {', '.join(why)}" if why else "fast"
