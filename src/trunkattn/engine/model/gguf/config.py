"""A model's configuration from a GGUF file's header: every key of the architecture is used, harmless, or refused.

transformers names the fields of most architectures, but leaves out keys, and its defaults then stand for what the file
says. Here the file's values are compared with the configuration, put into it where they differ, and compared again.
"""

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from transformers import CONFIG_MAPPING, PretrainedConfig

from trunkattn.engine.model.config_fields import known_fields
from trunkattn.engine.model.files import plain
from trunkattn.engine.model.gguf.header import GgufHeader
from trunkattn.engine.model.gguf.rope import apply_gguf_rope
from trunkattn.engine.model.gguf.sampling import gguf_sampling
from trunkattn.interrupts import temporary_folder

# A key of the architecture -> the configuration's field of that meaning: the first that the model's type has.
FIELDS: Final[Mapping[str, tuple[str, ...]]] = MappingProxyType(
    {
        "context_length": ("max_position_embeddings", "n_positions"),
        "embedding_length": ("hidden_size",),
        "block_count": ("num_hidden_layers",),
        "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
        "vocab_size": ("vocab_size",),
        "attention.head_count": ("num_attention_heads",),
        "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
        "attention.key_length": ("head_dim",),
        "attention.value_length": ("head_dim",),
        "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
        "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon", "norm_eps"),
        "attention.scale": ("attention_multiplier",),
        "attention.sliding_window": ("sliding_window",),
        "attn_logit_softcapping": ("attn_logit_softcapping",),
        "final_logit_softcapping": ("final_logit_softcapping",),
        "logit_scale": ("logit_scale",),
        "expert_count": ("num_experts", "num_local_experts"),
        "expert_used_count": ("num_experts_per_tok",),
        "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
        "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
        "expert_weights_norm": ("norm_topk_prob",),
        "use_parallel_residual": ("use_parallel_residual",),
    }
)
# Keys that change nothing where they have one of these values.
HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.clamp_kqv": (0.0,),
        "attention.max_alibi_bias": (0.0,),
        "attention.sliding_window": (0,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "pooling_type": (0,),
        "rope.dimension_count": (0,),
    }
)
# Keys of the tokenizer, without "tokenizer." before them: those that transformers reads, and those that change nothing
# where they have one of these values. Any number of a token is harmless: it only names the token.
TOKENIZER_KEYS: Final = frozenset({
    "chat_template", "chat_templates", "huggingface.json", "ggml.model", "ggml.pre", "ggml.tokens", "ggml.scores",
    "ggml.token_type", "ggml.merges", "ggml.precompiled_charsmap", "ggml.add_space_prefix", "ggml.add_bos_token",
    "ggml.add_eos_token", "ggml.token_type_count",
})  # fmt: skip
HARMLESS_OF_TOKENIZER: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {"ggml.add_sep_token": (False,), "ggml.remove_extra_whitespaces": (False,)}
)
# Architectures whose windows transformers gives to the same layers as llama.cpp's files mean.
WINDOWED: Final = frozenset({"gemma2", "gemma3", "gpt-oss", "phi3"})
# Gemma's models with this number of layers scale by their width per head, not by head_dim (llama.cpp's rule).
WIDE_SCALES: Final[Mapping[str, int]] = MappingProxyType({"gemma2": 46, "gemma3": 62})
# Biases that a configuration must announce -> a tensor that shows them.
BIASES: Final[Mapping[str, str]] = MappingProxyType(
    {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
)
# Keys without which llama.cpp loads no file: one of each line.
REQUIRED: Final = (
    ("context_length",),
    ("attention.head_count",),
    ("attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"),
)
# Keys that must be there if transformers' model has the field: its default would be a guess.
WITHOUT_DEFAULT: Final = ("attention.sliding_window", "expert_used_count")
# The architecture for whose old files, which name no window, llama.cpp takes the same default as transformers.
KNOWN_WINDOW: Final = "gemma2"
# Keys of FIELDS that are true or false; ends of the names of others that are whole numbers; numbers that are not 0.
SWITCHES: Final = frozenset({"expert_weights_norm", "use_parallel_residual"})
COUNTS: Final = ("_count", "_count_kv", "_length", "vocab_size", "sliding_window")
POSITIVE: Final = frozenset(
    {"embedding_length", "block_count", "attention.head_count", "attention.head_count_kv", "rope.freq_base"}
)
LARGEST_COUNT, LARGEST_NUMBER = 2**31 - 1, 3e38  # of the types in which transformers is given them
ROPE_BASE, DEFAULT_ROPE_BASE = "rope.freq_base", 10_000.0
SPECIAL_TOKENS: Final = "tokenizer.ggml."
# Tokens that end an answer: of the text, of a turn of a chat, and of a message that calls a tool.
END_TOKENS: Final = tuple(f"{SPECIAL_TOKENS}{name}_token_id" for name in ("eos", "eot", "eom"))


def gguf_config(header: GgufHeader) -> PretrainedConfig:
    """The configuration of the model in a file.

    Raises:
        ValueError: naming a key that transformers' configuration has no field for, or whose value its model cannot
            have.
    """
    _check_file(header)
    values = _by_transformers(header)
    if values["model_type"] not in CONFIG_MAPPING:
        raise ValueError(f"its key general.architecture={header.architecture!r} names no model of transformers")
    facts = _facts(header)
    config = CONFIG_MAPPING[values["model_type"]].from_dict(dict(values))
    changed = {name: value for name, value in _wanted(header, facts, config).items() if not _has(config, name, value)}
    if changed:
        config = CONFIG_MAPPING[values["model_type"]].from_dict({**values, **changed})
    apply_gguf_rope(config, header)
    _check_keys(header, facts, config)
    _check_defaults(header, config)
    return config


def _check_file(header: GgufHeader) -> None:
    """Raises ValueError unless the file holds one whole model, and every key of its tokenizer and of sampling is known.
    Other keys outside of the architecture only describe the file's origin."""
    kind, parts = header.keys.get("general.type", "model"), header.keys.get("split.count", 1)
    if parts not in (0, 1):  # of which only the first may say what the model is
        raise ValueError(f"its key split.count={parts} says that it is one part of a model; merge them with gguf-split")
    if "general.architecture" not in header.keys:
        raise ValueError("it has no key general.architecture; expected a whole GGUF file of a model")
    gguf_sampling(header)
    if kind != "model":
        raise ValueError(f"its key general.type={kind!r} says that it is no model; expected 'model'")
    for names in REQUIRED:
        if not any(name in header.facts for name in names):
            keys = " or ".join(f"{header.architecture}.{name}" for name in names)
            raise ValueError(f"it has no key {keys}; expected the number that the model was made with")
    _check_numbers(header)
    layers = header.facts.get("block_count", 0)
    if isinstance(layers, list) or layers > len(header.tensors):
        raise ValueError(
            f"its key {header.architecture}.block_count={plain(repr(layers), 80)}: expected at most "
            f"{len(header.tensors)}, the number of its tensors"
        )
    for key, value in header.keys.items():
        prefix, _, name = key.partition(".")
        is_known = name in TOKENIZER_KEYS or name.endswith("_token_id") or name.startswith("chat_template.")
        if prefix == "tokenizer" and not is_known and value not in HARMLESS_OF_TOKENIZER.get(name, ()):
            raise ValueError(
                f"its key {key}={value!r} is none that transformers' tokenizers follow; use the model's safetensors "
                f"folder"
            )


def _check_numbers(header: GgufHeader) -> None:
    """Raises ValueError for a key of the architecture that is not the number, or the list of numbers, that its name
    asks for."""
    for name in (*FIELDS, ROPE_BASE, "rope.dimension_count"):
        value = header.facts.get(name)
        if value is None or name in SWITCHES:
            continue
        is_count, is_list = name.endswith(COUNTS), isinstance(value, list)
        for one in value if is_list and is_count else [value]:  # a list has a number for each layer
            is_number = type(one) is int or (type(one) is float and not is_count)
            least = 0 if is_list or name not in POSITIVE else math.ulp(0)
            if not is_number or not least <= one <= (LARGEST_COUNT if type(one) is int else LARGEST_NUMBER):
                raise ValueError(
                    f"its key {header.architecture}.{name}={plain(repr(value), 80)}: expected "
                    f"{'a whole number' if is_count else 'a number'} {'above' if least else 'of at least'} 0, up to "
                    f"{LARGEST_COUNT if is_count else LARGEST_NUMBER}"
                )


def _by_transformers(header: GgufHeader) -> dict[str, Any]:
    """The configuration values that transformers reads from the header. It is given a small file with the header's
    short keys and the names of the tensors."""
    from gguf import GGUFValueType, GGUFWriter

    with temporary_folder() as folder:
        writer = GGUFWriter(folder / "header.gguf", header.architecture)
        vocabulary = f"{header.architecture}.vocab_size"
        for key, value in {vocabulary: _vocab_size(header), **header.keys}.items():
            is_token = key.startswith(SPECIAL_TOKENS) and key.endswith("_token_id")
            is_rope = key.startswith(f"{header.architecture}.rope.scal")  # `apply_gguf_rope` reads these
            if (key.startswith(f"{header.architecture}.") and not is_rope) or is_token:
                writer.add_key_value(key, value, GGUFValueType.get_type(value))
        writer.add_token_list(["only its number is needed"])
        for name in header.tensors:
            writer.add_tensor(name, np.zeros(1, np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        values, _ = PretrainedConfig.get_config_dict(folder, gguf_file="header.gguf", local_files_only=True)
    first = values.get("eos_token_id")
    ends = [
        *(first if isinstance(first, list) else []),
        *(header.keys[key] for key in END_TOKENS if key in header.keys),
    ]
    ends = [*dict.fromkeys(ends)]
    return {**values, "vocab_size": _vocab_size(header), "eos_token_id": ends if len(ends) != 1 else ends[0]}


def _vocab_size(header: GgufHeader) -> int:
    return int(header.keys.get(f"{header.architecture}.vocab_size", header.keys.get("tokenizer.ggml.tokens", 0)))


def _facts(header: GgufHeader) -> dict[str, Any]:
    """The keys of the architecture. A list of equal values is replaced by that value."""
    return {
        key: value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value
        for key, value in header.facts.items()
    }


def _defaults(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The values that llama.cpp takes for keys that a file leaves out."""
    heads, width = facts.get("attention.head_count"), facts.get("embedding_length")
    if not isinstance(heads, int) or not isinstance(width, int) or not heads:
        return {ROPE_BASE: DEFAULT_ROPE_BASE}
    lengths = dict.fromkeys(("attention.key_length", "attention.value_length"), width // heads)
    return {**lengths, "attention.head_count_kv": heads, ROPE_BASE: DEFAULT_ROPE_BASE}


def _wanted(header: GgufHeader, facts: Mapping[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """The fields of the configuration that the file determines, with its values."""
    known, facts = known_fields(config), {**_defaults(facts), **facts}
    wanted = {
        field: value
        for key, value in facts.items()
        if (field := _field(key, known)) and key != "attention.value_length" and value not in HARMLESS.get(key, ())
    }
    if "query_pre_attn_scalar" in known and header.architecture in WIDE_SCALES:
        is_wide = facts.get("block_count") == WIDE_SCALES[header.architecture]
        per_head = _defaults(facts)["attention.key_length"]
        wanted["query_pre_attn_scalar"] = per_head if is_wide else facts["attention.key_length"]
    wanted |= {field: True for field, tensor in BIASES.items() if field in known and tensor in header.tensors}
    if _rope_bases(config):
        wanted["rope_theta"] = facts[ROPE_BASE]
    return wanted


def _field(key: str, known: frozenset[str]) -> str | None:
    return next((field for field in FIELDS.get(key, ()) if field in known), None)


def _rope_bases(config: PretrainedConfig) -> list[float]:
    """The base of the rotation of the layers that see every token; empty without a rotation."""
    parameters = getattr(config, "rope_parameters", None) or {}
    found = parameters.get("full_attention", parameters)
    return [found["rope_theta"]] if "rope_theta" in found else []


def _has(config: PretrainedConfig, field: str, value: Any) -> bool:
    """Whether a field of a configuration has a value, up to the rounding of numbers in a file."""
    found = _rope_bases(config)[0] if field == "rope_theta" else getattr(config, field, None)
    if isinstance(value, float) and isinstance(found, int | float):
        return math.isclose(found, value, rel_tol=1e-6)
    return bool(found == value)


def _check_keys(header: GgufHeader, facts: Mapping[str, Any], config: PretrainedConfig) -> None:
    """Raises ValueError for a key of the architecture that has no effect in transformers' model."""
    known, defaults = known_fields(config), _defaults(facts)
    for key, value in facts.items():
        field = "rope_theta" if key == ROPE_BASE and _rope_bases(config) else _field(key, known)
        if value in HARMLESS.get(key, ()) or (field is None and value == defaults.get(key)):
            continue
        if key.startswith("rope.scal") or key == "rope.dimension_count":  # `apply_gguf_rope` has checked these
            continue
        is_elsewhere = key == "attention.sliding_window" and header.architecture not in WINDOWED
        if field is None or is_elsewhere or not _has(config, field, value):
            has = "" if field is None else f", whose {field} is {getattr(config, field, None)!r}"
            raise ValueError(
                f"its key {header.architecture}.{key}={value!r} has no counterpart in transformers' {config.model_type}"
                f"{has}; use the model's safetensors folder"
            )


def _check_defaults(header: GgufHeader, config: PretrainedConfig) -> None:
    """Raises ValueError if a default of transformers decides what the file should say."""
    known = known_fields(config)
    for key in WITHOUT_DEFAULT:
        field = _field(key, known)
        value = None if field is None else getattr(config, field, None)
        if value and not header.facts.get(key) and header.architecture != KNOWN_WINDOW:
            raise ValueError(
                f"it has no key {header.architecture}.{key}, and transformers' {config.model_type} has {field}={value} "
                f"then; use the model's safetensors folder"
            )
