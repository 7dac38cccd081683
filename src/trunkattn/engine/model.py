"""What a model is before its weights are loaded; then its weights and tokenizer. transformers reads all of them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig

from trunkattn.engine.hf_attention import ATTENTION_NAME
from trunkattn.engine.model_files import ModelFiles, find_model_files
from trunkattn.engine.model_support import (
    AttentionGeometry,
    check_supported,
    hold_rope,
    max_positions,
    probe_attention,
)
from trunkattn.engine.packed_linear import can_pack, pack_linears

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
DUMMY_SEED = 0


@dataclass(frozen=True)
class ModelInfo:
    """A supported model before any weight is loaded.

    Attributes:
        files: where it is.
        config: its transformers configuration.
        geometry: its attention.
        max_model_len: longest sequence, in tokens.
        dtype, device: type and place of the weights.
        load_format: "auto" or "dummy", see `EngineConfig`.
    """

    files: ModelFiles
    config: PretrainedConfig
    geometry: AttentionGeometry
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    load_format: str = "auto"

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)


def inspect_model(model: str | Path, dtype: str = "auto", device: str = "cpu", load_format: str = "auto") -> ModelInfo:
    """Checks that a model can run here, before any weight is loaded.

    Args:
        model: a local Hugging Face folder (config.json and safetensors) or a GGUF file.
        dtype: "auto" (float32 on a CPU, else the checkpoint's) or the name of a torch dtype.
        device: a torch device.
        load_format: with "dummy" the folder needs no safetensors.

    Raises:
        TypeError, ValueError: naming the path and what is wrong: missing, foreign or truncated files, or the reasons
            why the model is not supported.
    """
    torch_device = _device(device)
    files = find_model_files(model, with_weights=load_format != "dummy")
    config = _read_config(files)
    reasons = check_supported(config)
    geometry, _ = (None, reasons) if reasons else probe_attention(config)
    if geometry is None:
        raise ValueError(f"model={str(model)!r} ({config.model_type}) is not supported: {'; '.join(reasons)}")
    torch_dtype = _dtype(dtype, config, torch_device)
    return ModelInfo(files, config, geometry, max_positions(config), torch_dtype, torch_device, load_format)


def load_model(info: ModelInfo) -> Any:
    """The model with its weights, on `info.device`, in evaluation mode, with trunkattn's attention.

    Raises:
        ValueError: a weight is missing, or transformers cannot load the files.
    """
    model = _dummy_model(info) if info.load_format == "dummy" else _saved_model(info)
    model = model.to(info.device).eval().requires_grad_(False)
    hold_rope(model)
    if can_pack(info.dtype, info.device):
        pack_linears(model)
    return model


def _read_config(files: ModelFiles) -> PretrainedConfig:
    """The model's configuration. For a GGUF file this is also the check of its header and, for most architectures, of
    its length; see `engine.model_files`."""
    try:
        return AutoConfig.from_pretrained(files.folder, **files.load_options)
    except Exception as error:  # a foreign file can make a reader raise nearly anything
        reason = f"{type(error).__name__}: {error}"
        if files.gguf_file is None:
            message = f"transformers cannot read its configuration ({reason}); correct its config.json"
        else:
            message = (
                f"transformers cannot read it ({reason}); expected a complete GGUF file, so copy or download it again"
            )
        raise ValueError(f"model={str(files.path)!r}: {message}") from error


def _saved_model(info: ModelInfo) -> Any:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            info.files.folder,
            config=info.config,
            dtype=info.dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            **info.files.load_options,
        )
    except Exception as error:  # as in _read_config
        raise ValueError(
            f"model={str(info.files.path)!r}: transformers cannot load its weights ({error}); expected the files that "
            f"its configuration describes"
        ) from error
    model, loading = loaded
    if loading["missing_keys"]:
        missing = ", ".join(sorted(loading["missing_keys"])[:4])
        raise ValueError(
            f"model={str(info.files.path)!r}: its files lack {missing}; expected every weight of the model"
        )
    return model


def _dummy_model(info: ModelInfo) -> Any:
    """Random weights as the model's own code initialises them for training, from one seed, made on the device."""
    devices = [info.device] if info.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(info.device):
        torch.manual_seed(DUMMY_SEED)
        return AutoModelForCausalLM.from_config(info.config, attn_implementation=ATTENTION_NAME, dtype=info.dtype)


def load_tokenizer(info: ModelInfo) -> Any | None:
    """The tokenizer; None if the folder has none, and then prompts are token ids."""
    if info.files.gguf_file is None and not any((info.files.folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    return AutoTokenizer.from_pretrained(info.files.folder, **info.files.load_options)


def eos_token_ids(generation_config: GenerationConfig | None, tokenizer: Any | None) -> frozenset[int]:
    """End-of-sequence ids: those of the generation configuration, or else the tokenizer's."""
    eos = getattr(generation_config, "eos_token_id", None)
    if eos is None:
        eos = getattr(tokenizer, "eos_token_id", None)
    if eos is None:
        return frozenset()
    return frozenset(int(token_id) for token_id in (eos if isinstance(eos, list | tuple) else [eos]))


def _device(name: str) -> torch.device:
    try:
        return torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"device={name!r}: expected the name of a torch device, such as cpu, cuda or cuda:1"
        ) from error


def _dtype(name: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    if name != "auto":
        return getattr(torch, name)
    return config.dtype if isinstance(config.dtype, torch.dtype) and device.type != "cpu" else torch.float32
