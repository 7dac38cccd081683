"""What a model is before its weights are loaded: its configuration, checked, and where and how it will run."""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, PretrainedConfig

from trunkattn.config import AttentionConfig
from trunkattn.dtypes import dtype_name
from trunkattn.engine.model.files import ModelFiles, check_older_defaults, find_model_files, one_line, plain
from trunkattn.engine.model.gguf.config import gguf_config
from trunkattn.engine.model.gguf.header import read_header
from trunkattn.engine.model.support import AttentionGeometry, check_config, max_positions, probe_attention
from trunkattn.names import FP8_CACHES

# Types that have Python of their own beside their weights, and what transformers calls models that compute the same
KNOWN_AS = MappingProxyType({"kimi_k2": "deepseek_v3"})
MOST_MISSING = 2  # times as many weights as its files hold, for a model that is tried
MOST_LAYERS = 10_000  # of a model without files
NUM_LAYERS = re.compile(r"(num|n)(_\w+)?_layers?")


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
        kv_dtype: type of the KV cache; None: `dtype`.
    """

    files: ModelFiles
    config: PretrainedConfig
    geometry: AttentionGeometry
    max_model_len: int
    dtype: torch.dtype
    device: torch.device
    load_format: str = "auto"
    kv_dtype: torch.dtype | None = None

    @property
    def cache_dtype(self) -> torch.dtype:
        """Type of the KV cache."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def vocab_size(self) -> int:
        return int(self.config.vocab_size)


def inspect_model(
    model: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    load_format: str = "auto",
    trust_remote_code: bool = False,
    kv_cache_dtype: str = "auto",
) -> ModelInfo:
    """Checks that a model can run here, before any weight is loaded.

    Args:
        model: a local Hugging Face folder (config.json and safetensors) or a GGUF file.
        dtype: "auto" (float32 on a CPU, else the checkpoint's) or the name of a torch dtype.
        device: see `EngineConfig`.
        load_format: with "dummy" the folder needs no safetensors.
        trust_remote_code: whether the folder's own Python may run.
        kv_cache_dtype: see `EngineConfig`.

    Raises:
        TypeError, ValueError: naming the path and what is wrong: missing, foreign or truncated files, or the reasons
            why the model is not supported.
    """
    torch_device = _device(device)
    files = find_model_files(model, load_format != "dummy", trust_remote_code)
    config = _read_config(files)
    num_values = math.inf if load_format == "dummy" else _num_values(files)
    try:
        reasons = check_config(config, trust_remote_code)
        geometry, reasons = (None, reasons) if reasons else probe_attention(config, trust_remote_code, num_values)
        longest = 0 if reasons else max_positions(config)
    except Exception as error:  # a configuration with a value for each layer can raise at any attribute
        geometry, longest = None, 0
        reasons = [f"its configuration cannot be read as one for all layers ({one_line(error)})"]
    if geometry is None:
        raise ValueError(f"model={str(model)!r} ({config.model_type}) is not supported: {plain('; '.join(reasons))}")
    _check_size(files, geometry.num_parameters, num_values)
    check_older_defaults(files)
    torch_dtype = _dtype(dtype, config, torch_device)
    kv_dtype = None if kv_cache_dtype == "auto" else getattr(torch, FP8_CACHES[kv_cache_dtype])
    return ModelInfo(
        files=files,
        config=config,
        geometry=geometry,
        max_model_len=longest,
        dtype=torch_dtype,
        device=torch_device,
        load_format=load_format,
        kv_dtype=kv_dtype,
    )


def _read_config(files: ModelFiles) -> PretrainedConfig:
    """The model's configuration. For a GGUF file this is also the check of its header and of its length."""
    if files.gguf_file is not None:
        try:
            header = read_header(files.path)
        except ValueError as error:
            raise ValueError(
                f"model={str(files.path)!r}: {plain(str(error))}; expected a complete GGUF file, so copy or download "
                f"it again"
            ) from error
        try:
            return gguf_config(header)
        except Exception as error:  # a foreign file can make transformers raise nearly anything
            reason = plain(str(error)) if isinstance(error, ValueError) else one_line(error)
            raise ValueError(f"model={str(files.path)!r}: {reason}") from error
    config = json.loads((files.folder / "config.json").read_text("utf-8"))
    _check_layers(files, config)
    known_as = KNOWN_AS.get(config.get("model_type"))
    if known_as is None:
        _check_code(files, config)
    with files.readable("read its configuration", "correct its config.json") as folder:
        if known_as is None:
            found: PretrainedConfig = AutoConfig.from_pretrained(folder, **files.load_options)
            return found
        own = {key: value for key, value in config.items() if key != "auto_map"}
        return CONFIG_MAPPING[known_as].from_dict({**own, "model_type": known_as})


def _check_code(files: ModelFiles, config: Mapping[str, Any]) -> None:
    """Raises ValueError if only the folder's own Python can make the model, and it may not run."""
    if "auto_map" in config and config["model_type"] not in CONFIG_MAPPING and not files.trust_remote_code:
        raise ValueError(
            f"model={str(files.path)!r}: transformers has no model of type {config['model_type']!r}, and the folder's "
            f"own Python does not run without leave; set trust_remote_code=True if you trust it"
        )


def _check_layers(files: ModelFiles, config: Mapping[str, Any]) -> None:
    """Raises ValueError for a number of layers beyond that of the files' tensors. Configurations make lists as long as
    this before anything can be compared with them."""
    most, waiting = len(files.tensors) or MOST_LAYERS, [config]
    while waiting:
        for name, value in waiting.pop().items():
            if isinstance(value, Mapping):
                waiting.append(value)
            elif NUM_LAYERS.fullmatch(name) and isinstance(value, int) and value > most:
                raise ValueError(
                    f"model={str(files.path)!r}: config.json has {name}={plain(str(value))}: expected at most {most}"
                    f"{', the tensors in its files' if files.tensors else ''}"
                )


def _num_values(files: ModelFiles) -> int:
    """Numbers in the files' tensors."""
    if files.gguf_file is None:
        return files.num_values()
    return sum(math.prod(tensor.shape) for tensor in read_header(files.path).tensors.values())


def _check_size(files: ModelFiles, num_parameters: int, num_values: float) -> None:
    """Raises ValueError if the files hold far fewer numbers than the model has weights. Otherwise transformers would
    allocate all missing weights before it names them. If only a few are missing, it names them soon enough."""
    if num_parameters > MOST_MISSING * num_values:
        raise ValueError(
            f"model={str(files.path)!r}: its configuration describes a model of {num_parameters:,} weights, and its "
            f"files hold {num_values:,} numbers; expected the weights of that model, so correct the sizes in its "
            f"config.json, or copy the files again"
        )


def _device(name: str) -> torch.device:
    """The device that an option names. "auto" is the GPU if it can compute a plain attention, else the CPU."""
    if name != "auto":
        return torch.device(name)
    plain = AttentionConfig(num_qo_heads=1, num_kv_heads=1, head_dim=64, page_size=16, dtype=torch.float16)
    return torch.device("cpu" if torch.version.cuda is None or plain.supports("cuda") else "cuda")


def _dtype(name: str, config: PretrainedConfig, device: torch.device) -> torch.dtype:
    if name != "auto":
        named: torch.dtype = getattr(torch, name)
        return named
    if isinstance(config.dtype, torch.dtype) and not config.dtype.is_floating_point:
        raise ValueError(
            f"model: its configuration has dtype={dtype_name(config.dtype)!r}: expected one in which "
            f"weights are stored, such as bfloat16; correct its config.json"
        )
    return config.dtype if isinstance(config.dtype, torch.dtype) and device.type != "cpu" else torch.float32
