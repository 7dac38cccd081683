"""Models of real shapes for the engines' benchmarks: a config.json is all that weights of load_format="dummy" need."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """config: of transformers. differs: what the real model has, where it is not this. options: of vLLM."""

    config: dict[str, Any]
    differs: str = ""
    options: Mapping[str, Any] = MappingProxyType({})


GPT_OSS = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "vocab_size": 201088, "hidden_size": 2880,
    "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64,
    "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention"] * 12, "attention_bias": True,
    "intermediate_size": 2880, "num_local_experts": 8, "num_experts_per_tok": 4, "hidden_act": "silu",
    "swiglu_limit": 7.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "max_position_embeddings": 131072,
    "rope_theta": 150000, "rope_scaling": {
        "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
        "beta_slow": 1.0, "truncate": False,
    },
}  # fmt: skip
GEMMA_3 = {
    "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "vocab_size": 262208, "hidden_size": 3840,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 256,
    "sliding_window": 1024, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 8,
    "query_pre_attn_scalar": 256, "attn_logit_softcapping": None, "final_logit_softcapping": None,
    "intermediate_size": 15360, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "max_position_embeddings": 131072, "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}  # fmt: skip
QWEN_2_5 = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32768,
    "rope_theta": 1000000.0, "use_sliding_window": False,
}  # fmt: skip
QWEN_3_NEXT = {
    "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "vocab_size": 151936, "hidden_size": 2048,
    "num_hidden_layers": 48, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 12, "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
    "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "attention_bias": False,
    "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
    "num_experts": 32, "num_experts_per_tok": 10, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [], "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "max_position_embeddings": 262144, "rope_theta": 10000000.0,
}  # fmt: skip

# The real layers in number, since time per token is that of all; experts, which do not attend, are fewer.
SHAPES = {
    "gpt-oss": Shape(GPT_OSS, "GPT-OSS-20B has 32 experts of 4 bits, about as many bytes as these 8 of 16"),
    "gemma-3": Shape(GEMMA_3),  # 12B
    "qwen2.5-7b": Shape(QWEN_2_5),
    # FlashInfer, which vLLM chooses for the prompts of linear layers on Hopper, compiles when it is first called.
    "qwen3-next": Shape(QWEN_3_NEXT, "Qwen3-Next-80B has 512 experts", {"gdn_prefill_backend": "triton"}),
}


def write_config(name: str, folder: Path) -> Path:
    """A folder with the config.json of a shape, for vLLM's option `model`."""
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPES[name].config, indent=1))
    return model
