"""What a model is before its weights are loaded; then its weights and tokenizer. transformers reads all of them."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
)
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from trunkattn.config import AttentionConfig
from trunkattn.dtypes import dtype_name
from trunkattn.engine.model.files import ModelFiles, check_one_value, find_model_files, one_line, plain
from trunkattn.engine.model.fused_norm import fuse_norms
from trunkattn.engine.model.gguf.config import gguf_config
from trunkattn.engine.model.gguf.header import read_header
from trunkattn.engine.model.gguf.sampling import gguf_sampling
from trunkattn.engine.model.gguf.tokenizer import gguf_tokenizer
from trunkattn.engine.model.gguf.weights import gguf_weights
from trunkattn.engine.model.hf_attention import ATTENTION_NAME
from trunkattn.engine.model.latent import absorb_heads
from trunkattn.engine.model.packed_linear import can_pack, is_packed, pack_linears
from trunkattn.engine.model.path import TOKENIZER_FILES
from trunkattn.engine.model.support import (
    AttentionGeometry,
    check_config,
    hold_rope,
    max_positions,
    probe_attention,
)
from trunkattn.names import FP8_CACHES

# Types that have Python of their own beside their weights, and what transformers calls models that compute the same
KNOWN_AS = MappingProxyType({"kimi_k2": "deepseek_v3"})
DUMMY_SEED = 0
MOST_NAMES = 4  # in a message
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


def load_model(info: ModelInfo, quantization: str | None = None) -> Any:
    """The model with its weights, on `info.device`, in evaluation mode, with trunkattn's attention. quantization: see
    `EngineConfig`.

    Raises:
        ValueError: a weight is missing, or transformers cannot load the files.
    """
    model = _dummy_model(info) if info.load_format == "dummy" else _saved_model(info)
    model = model.to(info.device).eval().requires_grad_(False)
    hold_rope(model)
    absorb_heads(model)
    packs = can_pack(info.dtype, info.device)
    if info.device.type == "cpu":
        _leave_files(model, packs)
    if packs:
        pack_linears(model, to_int8=quantization == "int8")
        fuse_norms(model)
    return model


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


def _saved_model(info: ModelInfo) -> Any:
    files = info.files
    readable = files.readable("load its weights", "expected the files that its configuration describes")
    sampling: dict[str, Any] = {}  # of a GGUF file; from a folder transformers reads it
    with torch.device("cpu"), readable as folder:  # transformers would use the program's default device
        model_class: Any = AutoModelForCausalLM
        source: dict[str, Any] = {"pretrained_model_name_or_path": folder, **files.load_options}
        if files.gguf_file is not None:
            model_class = AutoModelForCausalLM._model_mapping[type(info.config)]
            header = read_header(files.path)
            weights, sampling = gguf_weights(header, info.config, info.dtype), gguf_sampling(header)
            source = {"pretrained_model_name_or_path": None, "state_dict": weights}
        model, loading = model_class.from_pretrained(
            config=info.config,
            dtype=info.dtype,
            attn_implementation=ATTENTION_NAME,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # transformers would not say which
            **source,
        )
    _check_names(files, map(_shapes, loading["mismatched_keys"]), "hold", "the shapes that its configuration describes")
    _check_names(files, loading["missing_keys"], "lack", "every weight of the model")
    _check_names(files, loading["unexpected_keys"], "hold", "no tensor that the model of its configuration has not")
    _check_one_name_each(files, model)
    _check_ties(files, model)
    vars(model.generation_config).update(sampling)
    return model


def _leave_files(model: Any, packs: bool) -> None:
    """Copies the weights. transformers leaves them in files that it has mapped, and whoever writes such a file again
    changes them, or ends the process. packs: `pack_linears` follows, which copies most of them."""
    for module in model.modules():
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and not (packs and name == "weight" and is_packed(module)):
                tensor.data = tensor.data.clone()


def _check_one_name_each(files: ModelFiles, model: Any) -> None:
    """Raises ValueError if two different tensors are read as the same weight: transformers would take either one."""
    weights = model.state_dict()
    changes = get_model_conversion_mapping(model)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    names: dict[str, list[str]] = {}
    for name in files.tensors:
        weight, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, weights)
        if pattern is None:  # otherwise it may be a part of the weight
            names.setdefault(weight if weight in weights else name, []).append(name)
    for weight, both in names.items():
        check_one_value(files, both, weight)


def _check_ties(files: ModelFiles, model: Any) -> None:
    """Raises ValueError if the files hold two different values of weights that the configuration ties.

    In this case transformers does not tie them, and other engines drop one of the two.
    """
    for tied, source in model.get_expanded_tied_weights_keys(all_submodels=True).items():
        if model.get_parameter_or_buffer(tied) is not model.get_parameter_or_buffer(source):
            raise ValueError(
                f"model={str(files.path)!r}: its configuration ties {tied} to {source}, and its files hold another "
                f"value for each; set tie_word_embeddings to false in its config.json if both are meant, or else "
                f"remove {tied} from its files"
            )


def _check_names(files: ModelFiles, names: Iterable[str], what: str, expected: str) -> None:
    """Raises ValueError if `names`, of missing or unknown tensors, is not empty. what: "lack" or "hold"."""
    found = sorted(names)
    if found:
        raise ValueError(f"model={str(files.path)!r}: its files {what} {_some(found)}; expected {expected}")


def _shapes(mismatched: tuple[str, Sequence[int], Sequence[int]]) -> str:
    """A tensor that has another shape than the model's weight."""
    name, found, expected = mismatched
    return f"{name} of shape {[*found]} instead of {[*expected]}"


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return plain(", ".join(names[:MOST_NAMES])) + more


def _dummy_model(info: ModelInfo) -> Any:
    """A model with random weights, always the same ones, as its own code initialises them for training."""
    devices = [info.device] if info.device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.device(info.device):
        torch.manual_seed(DUMMY_SEED)
        return AutoModelForCausalLM.from_config(
            info.config,
            attn_implementation=ATTENTION_NAME,
            dtype=info.dtype,
            trust_remote_code=info.files.trust_remote_code,
        )


def load_tokenizer(files: ModelFiles) -> Any | None:
    """The tokenizer of a model; None if its folder has none, so that prompts must be token ids.

    Raises:
        ValueError: naming the path: its files are damaged or incomplete, or need a package that is not installed.
    """
    if files.gguf_file is None and not any((files.folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    _check_sentencepiece(files)
    expected = (
        "expected whole tokenizer files, best a tokenizer.json, so copy or download them again, or remove them to give "
        "prompts as token ids"
    )
    with files.readable("read its tokenizer", expected) as folder:
        if files.gguf_file is None:
            tokenizer: Any = AutoTokenizer.from_pretrained(folder, **files.load_options)
        else:
            tokenizer = gguf_tokenizer(read_header(files.path))
        tokenizer("")  # some of what is wrong with its files shows only now; not every vocabulary can write a letter
    tokenizer.name_or_path = str(files.path)
    return tokenizer


def _check_sentencepiece(files: ModelFiles) -> None:
    """Raises ValueError if the tokenizer needs the package sentencepiece and it is missing. transformers would ask for
    another package."""
    is_needed = (files.folder / "tokenizer.model").is_file() and not (files.folder / "tokenizer.json").is_file()
    if files.gguf_file is None and is_needed and find_spec("sentencepiece") is None:
        raise ValueError(
            f"model={str(files.path)!r}: its tokenizer.model needs the package sentencepiece; install it, or add a "
            f"tokenizer.json"
        )


def eos_token_ids(
    generation_config: GenerationConfig | None, tokenizer: Any | None, config: PretrainedConfig | None = None
) -> frozenset[int]:
    """The end-of-sequence ids of the configuration, the generation configuration and the tokenizer together. Ids
    outside of the vocabulary, such as -1, are left out."""
    found = (getattr(source, "eos_token_id", None) for source in (config, generation_config, tokenizer))
    lists = (eos if isinstance(eos, list | tuple) else [eos] for eos in found if eos is not None)
    size = getattr(config, "vocab_size", None) or math.inf
    return frozenset(int(token_id) for eos in lists for token_id in eos if 0 <= int(token_id) < size)


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
