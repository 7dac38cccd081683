"""Tiny models of transformers with eager attention and with ours."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from trunkattn.integrations.transformers import register  # noqa: E402

SMALL = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0, "max_position_embeddings": 128,
}  # fmt: skip
GEMMA = SMALL | {"sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
MODELS: dict[str, dict[str, Any]] = {
    "Llama": SMALL,
    "Qwen3": SMALL,
    "Mistral": SMALL | {"sliding_window": 6},
    "Gemma2": GEMMA | {"attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 4},
    "Gemma3Text": GEMMA,
    "GptOss": GEMMA | {"num_local_experts": 2, "num_experts_per_tok": 2},
}
TOKENS = torch.randint(1, 50, (2, 17), generator=torch.Generator().manual_seed(0))
PACKED = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 0, 1]])
KEPT = torch.ones(2, 17, dtype=torch.long)
ENDS, HOLES = KEPT.clone(), KEPT.clone()
ENDS[0, 12:], HOLES[0, 4:7] = 0, 0
WINDOW = SMALL | {"sliding_window": 5}
CHUNKS = SMALL | {
    "attention_chunk_size": 5, "num_local_experts": 2, "intermediate_size_mlp": 48, "moe_layers": [],
    "layer_types": ["chunked_attention", "full_attention"],
}  # fmt: skip
IN_CHUNKS = "the model attends in chunks, and "


def both(name: str, options: dict[str, Any]) -> tuple[nn.Module, nn.Module]:
    """A causal model with eager attention, and the same with ours."""
    register()
    config = getattr(transformers, f"{name}Config")(**options)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    other = copy.deepcopy(model)
    other.set_attn_implementation("trunkattn")
    return model, other
