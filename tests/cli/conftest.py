"""A tiny random model that speaks SmolLM2's tokens, so that the commands run whole within seconds."""

from pathlib import Path

import pytest

from trunkattn.engine.model.inspection import inspect_model
from trunkattn.engine.model.loading import load_tokenizer

from ..smollm2 import gguf_file, save_tiny_speaker


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder: two random layers, SmolLM2's tokenizer and chat template."""
    path = tmp_path_factory.mktemp("tiny")
    save_tiny_speaker(load_tokenizer(inspect_model(gguf_file()).files), path)
    return path
