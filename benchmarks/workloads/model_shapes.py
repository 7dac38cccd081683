"""Models of real shapes for the engines' benchmarks: a config.json is all that weights of load_format="dummy" need."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """A model.

    Attributes:
        config: of transformers.
        differs: what the real model has, where it is not this.
        options: of vLLM.
        backends: that are compared; none: those of every model.
    """

    config: dict[str, Any]
    differs: str = ""
    options: Mapping[str, Any] = MappingProxyType({})
    backends: tuple[str, ...] = ()


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

DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280, "hidden_size": 4096,
    "num_hidden_layers": 27, "num_attention_heads": 16, "num_key_value_heads": 16, "q_lora_rank": 1536,
    "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
    "intermediate_size": 4096, "moe_intermediate_size": 512, "n_routed_experts": 8, "n_shared_experts": 1,
    "num_experts_per_tok": 2, "first_k_dense_replace": 27, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5,
    "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "max_position_embeddings": 32768,
    "rope_theta": 10000, "torch_dtype": "bfloat16", "attention_bias": False, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip

# The real layers in number, since time per token is that of all; experts, which do not attend, are fewer.
SHAPES = {
    "gpt-oss": Shape(GPT_OSS, "GPT-OSS-20B has 32 experts of 4 bits, about as many bytes as these 8 of 16"),
    "gemma-3": Shape(GEMMA_3),  # 12B
    "qwen2.5-7b": Shape(QWEN_2_5),
    # FlashInfer, which vLLM chooses for the prompts of linear layers on Hopper, compiles when it is first called.
    "qwen3-next": Shape(QWEN_3_NEXT, "Qwen3-Next-80B has 512 experts", {"gdn_prefill_backend": "triton"}),
    # FlashMLA takes only blocks of 64 tokens.
    "deepseek-v3-16": Shape(
        DEEPSEEK_V3,
        "DeepSeek-V3 has 128 heads, of which these are a rank of 8, 61 layers, 58 of them with experts, and is wider",
        backends=("FLASH_ATTN_MLA", "FLASHMLA@64", "TRUNK_MLA@64"),
    ),
}


def write_config(name: str, folder: Path) -> Path:
    """A folder with the config.json of a shape, for vLLM's option `model`."""
    model = folder / name
    model.mkdir()
    (model / "config.json").write_text(json.dumps(SHAPES[name].config, indent=1))
    return model
