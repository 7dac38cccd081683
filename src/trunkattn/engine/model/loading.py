"""A model's weights and tokenizer, as transformers reads them."""

import math
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, PretrainedConfig
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from trunkattn.engine.model.files import ModelFiles, check_one_value, plain
from trunkattn.engine.model.fused_norm import fuse_norms
from trunkattn.engine.model.gguf.header import read_header
from trunkattn.engine.model.gguf.sampling import gguf_sampling
from trunkattn.engine.model.gguf.tokenizer import gguf_tokenizer
from trunkattn.engine.model.gguf.weights import gguf_weights
from trunkattn.engine.model.hf_attention import ATTENTION_NAME
from trunkattn.engine.model.inspection import ModelInfo
from trunkattn.engine.model.latent import absorb_heads
from trunkattn.engine.model.packed_linear import can_pack, is_packed, pack_linears
from trunkattn.engine.model.path import TOKENIZER_FILES
from trunkattn.engine.model.support import hold_rope

DUMMY_SEED = 0
MOST_NAMES = 4  # in a message


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
