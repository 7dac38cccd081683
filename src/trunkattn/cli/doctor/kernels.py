"""Which kernel computes the attention of common models on a GPU, for `trunkattn doctor` and the support matrix."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

import torch

from trunkattn.config import AttentionConfig
from trunkattn.gpu.cards import Card
from trunkattn.gpu.kernel import KERNELS, Choice, Kernel, kernel_named, kernels_of, refusals

_MLA: Final = MappingProxyType({"num_kv_heads": 1, "head_dim": 512 + 64, "latent_dim": 512, "sm_scale": 192**-0.5})
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
        "Kimi-K2 over 8 GPUs": {**_MLA, "num_qo_heads": 8},
        "DeepSeek-V3 over 8 GPUs, DeepSeek-V2-Lite": {**_MLA, "num_qo_heads": 16},
        "GLM-4.7-Flash": {**_MLA, "num_qo_heads": 20, "sm_scale": 256**-0.5},
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
class KernelsInWords:
    """The kernels of an attention for decodes and for prompt chunks, in words: "fast", or "portable" or "no" and
    why."""

    attention: str
    decodes: str
    prompts: str


def attention_of(changes: Mapping[str, Any]) -> AttentionConfig:
    """The attention of a model with a 16-bit cache and pages of 16 tokens, but for the changes."""
    return AttentionConfig(**{**LLAMA, **changes})


def kernels_on(card: Card, table: tuple[Kernel, ...] = KERNELS) -> tuple[KernelsInWords, ...]:
    """The kernels of the models and options above on a card."""
    return tuple(_kernels(name, attention_of(changes), card, table) for name, changes in EXAMPLES.items())


def _kernels(name: str, config: AttentionConfig, card: Card, table: tuple[Kernel, ...]) -> KernelsInWords:
    if reasons := refusals(config, card, table):
        refused = f"no: {', '.join(reasons)}"
        return KernelsInWords(name, refused, refused)
    kernels = kernels_of(config, card, table)
    decodes = _named(kernels.decode)
    if kernels.decode.is_fast and kernel_named(kernels.tiles[0].kernel, table).portable:
        decodes += "; single requests portable, which is faster"
    return KernelsInWords(name, decodes, _named(kernels.prefill or kernels.decode))


def _named(choice: Choice) -> str:
    if choice.is_fast:
        return "fast"
    return f"portable: {', '.join(choice.reasons)}" if choice.reasons else "portable"
