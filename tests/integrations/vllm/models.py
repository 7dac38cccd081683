"""Tiny models with random weights, written to a folder: Llama, Qwen3, Gemma 2 (soft cap, window), Gemma 3 (window),
GPT-OSS (sinks), Qwen3-Next (every other layer is linear attention; heads of 256), Cohere 2 (window), and with the same
weights cohere2_pools, to whose windows SGLang gives a KV pool of their own; Llama 4 (chunks); Gemma 4 (its last two
layers read the keys and values of earlier ones; heads of 32 with a window and of 64 without); DeepSeek-V3 (latent
attention; rows of 512 + 64, the only ones that vLLM's own back end for CPUs takes)."""

from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    DeepseekV3Config,
    Gemma2Config,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3NextConfig,
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
    if name == "llama4":
        chunks = {"attention_chunk_size": WINDOW, "no_rope_layers": [1, 0, 1, 0], "num_key_value_heads": 2}
        experts = {"moe_layers": [], "interleave_moe_layer_step": 5, "intermediate_size_mlp": 256}
        return Llama4TextConfig(**dense, **chunks, **experts, tie_word_embeddings=False)
    if name == "qwen3":
        return Qwen3Config(**dense, num_key_value_heads=1, tie_word_embeddings=False)
    if name == "gemma2":
        caps = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 32}
        return Gemma2Config(**dense, **caps, **windowed, num_key_value_heads=4)
    if name == "gemma3":
        return Gemma3TextConfig(**dense, **windowed, query_pre_attn_scalar=32, num_key_value_heads=4)
    if name == "gemma4":
        layers = {"num_hidden_layers": 6, "layer_types": list(LAYER_TYPES[:2]) * 3, "num_kv_shared_layers": 2}
        inputs = {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 16}
        options = {**dense, **windowed, **layers, **inputs, "global_head_dim": 64}
        return Gemma4TextConfig(**options, num_key_value_heads=2)
    if name.startswith("cohere2"):
        pools = {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0, 1, 0]} if name == "cohere2_pools" else {}
        heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
        return Cohere2Config(**{**dense, **windowed, **heads, **pools}, logit_scale=4.0)
    if name == "gpt_oss":
        experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128}
        return GptOssConfig(**COMMON, **experts, **windowed, num_key_value_heads=2, tie_word_embeddings=False)
    if name == "qwen3_next":
        # A state of 32 heads has the bytes of the keys and values of over 512 tokens, which are a block then.
        sizes = {"linear_num_key_heads": 2, "linear_num_value_heads": 32, "linear_key_head_dim": 64}
        sizes |= {"linear_value_head_dim": 64, "head_dim": 256, "num_attention_heads": 4, "num_key_value_heads": 1}
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        experts |= {"shared_expert_intermediate_size": 64}
        types = ["linear_attention", "full_attention"] * 2
        options = {**dense, **sizes, **experts, "layer_types": types, "mlp_only_layers": [0, 1, 2]}
        return Qwen3NextConfig(**options, tie_word_embeddings=False)
    if name == "deepseek_v3":
        sizes = {"q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64}
        sizes |= {"v_head_dim": 32, "num_key_value_heads": 8, "first_k_dense_replace": 4, "n_routed_experts": 4}
        experts = {"num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "moe_intermediate_size": 64}
        given = {key: value for key, value in dense.items() if key != "head_dim"}
        return DeepseekV3Config(**given, **sizes, **experts, tie_word_embeddings=False)
    raise ValueError(
        f"{name}: expected llama, llama4, qwen3, gemma2, gemma3, gemma4, gpt_oss, qwen3_next, cohere2, "
        "cohere2_pools or deepseek_v3"
    )


def _sharpen(name: str, parameter: torch.Tensor) -> None:
    """Sharper attention and logits: with plain random weights greedy output hardly depends on the context."""
    if "sinks" in name:
        parameter.normal_(1.0, 1.0)
    elif any(part in name for part in ("q_proj.weight", "k_proj.weight", "q_b_proj.weight")):
        parameter.mul_(2.0)
    elif "lm_head" in name:
        parameter.mul_(3.0)
    elif "q_norm" in name and parameter.eq(0).all():
        parameter.fill_(1.0)  # Gemma 3 scales by 1 + weight
    elif ("post_attention_layernorm" in name or "post_feedforward_layernorm" in name) and parameter.eq(0).all():
        parameter.fill_(8.0)  # Gemma 2 scales by 1 + weight, and embeds and predicts with one matrix
    elif "post_feedforward_layernorm" in name:
        parameter.fill_(9.0)  # Gemma 4 scales by the weight


def write_eagle(folder: Path) -> None:
    """Writes a draft model of one layer for the Llama: it continues from that one's hidden states (EAGLE)."""
    torch.manual_seed(6)
    config: Any = _config("llama")
    config.num_hidden_layers = 1
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    weights = {name.removeprefix("model."): weight.clone() for name, weight in model.state_dict().items()}
    unused = ("lm_head.weight", "norm.weight", "layers.0.input_layernorm.weight")
    weights = {name: weight for name, weight in weights.items() if name not in unused}
    width = config.hidden_size
    weights["fc.weight"] = torch.cat([torch.randn(width, width) * 0.02, torch.eye(width)], 1)
    save_file(weights, folder / "model.safetensors")


def write_model(name: str, folder: Path) -> None:
    """Writes config.json, model.safetensors in float32, and a tokenizer whose tokens are bytes."""
    torch.manual_seed(5)
    config: Any = _config(name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _sharpen(parameter_name, parameter)
    model.save_pretrained(folder)
    bytes_and_marks = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(bytes_and_marks)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    marks = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **marks).save_pretrained(folder)
