"""The path of a model, checked before any package that reads models is imported."""

import re
from pathlib import Path

from trunkattn.validate import expanded

EXPECTED_MODEL = "a local Hugging Face folder (config.json and *.safetensors) or a .gguf file"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?<!\.gguf)")


def existing_path(model: object) -> Path:
    """The path that `model` is. A folder has a config.json; nothing is read.

    Raises:
        TypeError, ValueError: naming the value, which is not a path, or a path where no model is. If it is the name of
            a model on Hugging Face, the message says how to download it to a folder.
    """
    if not isinstance(model, str | Path):
        raise TypeError(f"model={model!r}: expected {EXPECTED_MODEL}")
    path = expanded(model)
    if path.is_file() or (path / "config.json").is_file():
        return path
    if path.is_dir():
        raise ValueError(f"model={str(model)!r}: there is no config.json in this folder; expected {EXPECTED_MODEL}")
    if HUB_NAME.fullmatch(str(model)):
        raise ValueError(
            f"model={str(model)!r}: there is no such file or folder, and models are not downloaded from Hugging Face "
            f"here; run hf download {model} --local-dir {path.name}, then give {path.name}"
        )
    raise ValueError(f"model={str(model)!r}: there is no such file or folder; expected {EXPECTED_MODEL}")
