"""Tiny models with random weights, written to a folder: Llama, Qwen3, Gemma 2 (soft cap, window), GPT-OSS (sinks)."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen3Config,
)

VOCABULARY = 512
WINDOW = 64
COMMON = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
)
LAYER_TYPES = ("sliding_attention", "full_attention") * 2


def _config(name: str) -> PretrainedConfig:
    dense = {**COMMON, "intermediate_size": 256}
    windowed = {"sliding_window": WINDOW, "layer_types": list(LAYER_TYPES)}
    if name == "llama":
        return LlamaConfig(**dense, num_key_value_heads=2, tie_word_embeddings=False)
    if name == "qwen3":
        return Qwen3Config(**dense, num_key_value_heads=1, tie_word_embeddings=False)
    if name == "gemma2":
        caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 32}
        return Gemma2Config(**dense, **caps, **windowed, num_key_value_heads=4)
    if name == "gpt_oss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
        return GptOssConfig(**COMMON, **experts, **windowed, num_key_value_heads=2, tie_word_embeddings=False)
    raise ValueError(f"{name}: expected llama, qwen3, gemma2 or gpt_oss")


def _gain(name: str) -> float:
    """Sharper attention and logits: with plain random weights greedy output hardly depends on the context."""
    if "q_proj.weight" in name or "k_proj.weight" in name or "q_norm" in name:
        return 2.0
    return 3.0 if "lm_head" in name else 1.0


def write_model(name: str, folder: Path) -> None:
    """Writes config.json and model.safetensors in float32; vLLM is to skip the tokenizer."""
    torch.manual_seed(5)
    config: Any = _config(name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "sinks" in parameter_name:
                parameter.normal_(1.0, 1.0)
            else:
                parameter.mul_(_gain(parameter_name))
    model.save_pretrained(folder)
