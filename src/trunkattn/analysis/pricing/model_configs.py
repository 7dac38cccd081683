"""Configurations of well-known models, as far as an analysis needs them, by the name that `--model` takes."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, intermediate: int, vocab: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "intermediate_size": intermediate,
        "vocab_size": vocab,
        "tie_word_embeddings": False,
    }


def _gpt_oss(layers: int, experts: int) -> dict[str, Any]:
    return {
        **_llama(2880, layers, 64, 8, 2880, 201_088),
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "quantization_config": {"quant_method": "mxfp4"},
    }


def _deepseek(hidden: int, layers: int, heads: int, experts: int, moe_size: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "n_routed_experts": experts,
        "moe_intermediate_size": moe_size,
        "tie_word_embeddings": False,
    }


CONFIGS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "llama-3-8b": _llama(4096, 32, 32, 8, 14_336, 128_256),
        "llama-3-70b": _llama(8192, 80, 64, 8, 28_672, 128_256),
        "mistral-7b": _llama(4096, 32, 32, 8, 14_336, 32_768),
        "qwen2.5-7b": _llama(3584, 28, 28, 4, 18_944, 152_064),
        "qwen3-8b": _llama(4096, 36, 32, 8, 12_288, 151_936),
        "qwen3-32b": _llama(5120, 64, 64, 8, 25_600, 151_936),
        "qwen3-30b-a3b": {
            **_llama(2048, 48, 32, 4, 6144, 151_936),
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        "gemma-3-12b": {
            **_llama(3840, 48, 16, 8, 15_360, 262_208),
            "head_dim": 256,
            "tie_word_embeddings": True,
            "sliding_window": 1024,
            "sliding_window_pattern": 6,
        },
        "gpt-oss-20b": _gpt_oss(24, 32),
        "gpt-oss-120b": _gpt_oss(36, 128),
        "deepseek-v2-lite": {
            **_deepseek(2048, 27, 16, 64, 1408),
            "intermediate_size": 10_944,
            "vocab_size": 102_400,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
        },
        "deepseek-v3": {
            **_deepseek(7168, 61, 128, 256, 2048),
            "intermediate_size": 18_432,
            "vocab_size": 129_280,
            "q_lora_rank": 1536,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "first_k_dense_replace": 3,
            "quantization_config": {"quant_method": "fp8"},
        },
    }
)
