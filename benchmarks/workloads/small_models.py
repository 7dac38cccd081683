"""Small models of random weights whose answers hang on far context, and prompts that share and ask for it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

DENSE = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 128, "vocab_size": 32000, "max_position_embeddings": 16384,
    "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu"}
MANY_HEADS = LLAMA | {"num_attention_heads": 32, "num_key_value_heads": 8}
ONE_KV_HEAD = LLAMA | {"num_key_value_heads": 1}
MISTRAL = {
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rms_norm_eps": 1e-5, "hidden_act": "silu",
    "sliding_window": 512,
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "rms_norm_eps": 1e-6, "sliding_window": 512,
    "attn_logit_softcapping": 20.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 128,
    "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
}  # fmt: skip
GEMMA_3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "rms_norm_eps": 1e-6, "sliding_window": 512,
    "num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "num_attention_heads": 4,
    "head_dim": 256, "query_pre_attn_scalar": 256, "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
}  # fmt: skip
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "rms_norm_eps": 1e-5, "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 2, "num_attention_heads": 16, "head_dim": 64,
    "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 512,
}  # fmt: skip
GROUP_7 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "num_attention_heads": 14, "hidden_size": 1792,
}  # fmt: skip
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 512}
COHERE = WINDOWS | {
    "architectures": ["Cohere2ForCausalLM"], "model_type": "cohere2", "layer_norm_eps": 1e-5, "hidden_act": "silu",
    "logit_scale": 1.0, "tie_word_embeddings": True,
}  # fmt: skip
HYBRID = COHERE | {"is_hybrid_swa": True, "hybrid_layer_pattern": [1, 0, 1, 0]}
QUICK = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
SHARED, LARGEST_TOKEN = 1040, 30000


def folder_name(shape: Mapping[str, Any]) -> str:
    """The folder's name of a model."""
    kv_heads = {1: "-one-kv-head", 8: "-many-heads"}.get(shape.get("num_key_value_heads", 0), "")
    return shape["model_type"] + ("-hybrid" if "is_hybrid_swa" in shape else "") + kv_heads


def save_model(folder: Path, shape: Mapping[str, Any], dtype: str = "bfloat16") -> None:
    """A model of random weights that let attention matter: logits of attention that are far from even."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(1)
    kind = dict(shape)
    config = AutoConfig.for_model(kind.pop("model_type"), **(DENSE | kind))
    model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            fill(name, weight, config)
    model.save_pretrained(folder)


def fill(name: str, weight: Any, config: Any) -> None:
    """Random numbers with which attention and the answer are far from even."""
    gemma = config.model_type.startswith("gemma")  # its norms scale by 1 + weight, and one matrix embeds and predicts
    if "sinks" in name:
        weight.normal_(7.0, 2.0)  # beside the logits of some hundred keys
    elif name.endswith("bias"):
        weight.normal_(0.0, 0.1)
    elif "q_norm" in name or "k_norm" in name:
        weight.fill_(1.6 - gemma)
    elif gemma and ("post_attention_layernorm" in name or "post_feedforward_layernorm" in name):
        weight.fill_(8.0)  # or each token would predict itself
    elif weight.dim() < 2:
        weight.fill_(1.0 - gemma)
    else:
        own = "embed" in name and not config.tie_word_embeddings  # a tied one makes the logits
        scale = 1.0 if own else weight.shape[1] ** -0.5
        weight.normal_(0.0, scale * (1.6 if "q_proj" in name or "k_proj" in name else 1.0))


def prompts(changed: bool) -> list[list[int]]:
    """24 prompts, 16 of them after one prefix. changed: the first half of each is made of other tokens."""
    rng = np.random.default_rng(0)
    shared = rng.integers(3, LARGEST_TOKEN, SHARED).tolist()
    found = [shared + rng.integers(3, LARGEST_TOKEN, 5 + 37 * i).tolist() for i in range(16)]
    found += [rng.integers(3, LARGEST_TOKEN, 300 + 31 * i).tolist() for i in range(8)]
    return with_other_tokens(found) if changed else found


def long_prompts(changed: bool) -> list[list[int]]:
    """24 prompts of some thousand tokens that share nothing. changed: see `prompts`."""
    rng = np.random.default_rng(0)
    found = [rng.integers(3, LARGEST_TOKEN, 3000 + 37 * i).tolist() for i in range(24)]
    return with_other_tokens(found) if changed else found


def with_other_tokens(found: list[list[int]]) -> list[list[int]]:
    """The prompts, with other tokens in the first half of each."""
    rng = np.random.default_rng(1)
    for prompt in found:
        half = len(prompt) // 2
        prompt[:half] = rng.integers(3, LARGEST_TOKEN, half).tolist()
    return found
