"""Rope scaling that a GGUF file stores and transformers' loader does not read, put into the configuration.

Without it every position is rotated wrongly, and nothing else shows that. What has an exact counterpart among
transformers' rope types is taken over; any other scaling is a reason to refuse the file.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from transformers import PretrainedConfig

from trunkattn.engine.model.gguf.header import GgufHeader

FREQUENCY_DIVISORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
LINEAR_KEYS = frozenset({"type", "factor", "finetuned"})
YARN_KEYS = frozenset({"type", "factor", "finetuned", "original_context_length"})
# Numbers that change nothing without a kind of scaling -> their values then. NAMES are no numbers of the rotation.
NEUTRAL: Final[Mapping[str, tuple[float, ...]]] = MappingProxyType(
    {"factor": (0.0, 1.0), "attn_factor": (1.0,), "yarn_log_multiplier": (0.0,)}
)
NAMES: Final = frozenset({"type", "finetuned", "original_context_length"})
LONGROPE_KEYS = frozenset({"type", "finetuned", "factor", "attn_factor", "original_context_length"})


def apply_gguf_rope(config: PretrainedConfig, header: GgufHeader) -> None:
    """Puts the rope scaling of a GGUF file into `config.rope_parameters`.

    Raises:
        ValueError: naming the file's key or tensor that has no exact counterpart.
    """
    prefix = f"{header.architecture}.rope."
    rope = {key.removeprefix("rope."): value for key, value in header.facts.items() if key.startswith("rope.")}
    scaling = {key.removeprefix("scaling."): value for key, value in rope.items() if key.startswith("scaling.")}
    if "scale_linear" in rope:  # the older name
        scaling = {"type": "linear", "factor": rope["scale_linear"], **scaling}
    tensors = [name for name in (FREQUENCY_DIVISORS, LONG_FACTORS, SHORT_FACTORS) if name in header.tensors]
    used = [*tensors, *(f"{prefix}scaling.{key}" for key in sorted(scaling))]
    parameters = _rope_parameters(scaling, tensors, header, config)
    if parameters is None:
        raise ValueError(
            f"its rope scaling ({', '.join(used)}) cannot be taken over exactly; use the model's safetensors folder"
        )
    _check_rotated(config, rope.get("dimension_count"), f"{prefix}dimension_count")
    if not parameters:
        return
    current = getattr(config, "rope_parameters", None) or {}
    if current.get("rope_type", "default") not in ("default", parameters["rope_type"]):
        raise ValueError(
            f"its rope scaling ({', '.join(used)}) meets rope_type {current['rope_type']!r} of its configuration; use "
            f"the model's safetensors folder"
        )
    config.rope_parameters = {**current, **parameters}


def _rope_parameters(
    scaling: Mapping[str, Any], tensors: list[str], header: GgufHeader, config: PretrainedConfig
) -> dict[str, Any] | None:
    """transformers' parameters of a scaling; {} if there is none, None if it has no exact counterpart."""
    kind, keys, length = scaling.get("type", "none"), frozenset(scaling), scaling.get("original_context_length")
    current = getattr(config, "rope_parameters", None) or {}
    if kind == "none" and tensors[:1] != [LONG_FACTORS] and not _is_neutral(scaling):
        return None
    if current and "rope_theta" not in current:  # one mapping per layer type, and the file has one for all
        return {} if kind == "none" and not tensors else None
    if tensors == [FREQUENCY_DIVISORS] and kind == "none":
        divisors, limit = _values(header, FREQUENCY_DIVISORS), config.max_position_embeddings
        return {**_longrope(divisors, divisors, limit), "attention_factor": 1.0}
    if tensors == [LONG_FACTORS, SHORT_FACTORS] and kind in ("none", "longrope") and keys <= LONGROPE_KEYS and length:
        if scaling.get("factor") not in (None, *NEUTRAL["factor"]):  # llama.cpp divides by it beside the factors
            return None
        parameters = _longrope(_values(header, LONG_FACTORS), _values(header, SHORT_FACTORS), length)
        return {**parameters, "attention_factor": float(scaling.get("attn_factor", 1.0))}  # 1 is llama.cpp's default
    if tensors:
        return None
    if kind == "none":
        return {}
    if kind == "linear" and keys <= LINEAR_KEYS and scaling.get("factor"):
        return {"rope_type": "linear", "factor": float(scaling["factor"])}
    if kind == "yarn" and keys <= YARN_KEYS and scaling.get("factor") and length:
        factor = float(scaling["factor"])
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": int(length)}
    return None


def _is_neutral(scaling: Mapping[str, Any]) -> bool:
    """Whether keys without a kind of scaling change nothing. A factor without one is linear to llama.cpp, and an
    attention factor scales every rotation."""
    return all(key in NAMES or value in NEUTRAL.get(key, ()) for key, value in scaling.items())


def _longrope(long: list[float], short: list[float], length: int) -> dict[str, Any]:
    """Each frequency is divided by its own factor; which factors, the sequence's length decides."""
    lengths = {"original_max_position_embeddings": int(length)}
    return {"rope_type": "longrope", "long_factor": long, "short_factor": short, **lengths}


def _values(header: GgufHeader, name: str) -> list[float]:
    return [float(value) for value in header.values(name)]


def _check_rotated(config: PretrainedConfig, rotated: int | None, key: str) -> None:
    """Raises ValueError if the file rotates another part of each head than the configuration does."""
    heads = getattr(config, "num_attention_heads", None)
    parameters = getattr(config, "rope_parameters", None) or {}
    of_layers = [parameters] if "rope_theta" in parameters else [one for one in parameters.values() if one]
    if not heads or not of_layers or hasattr(config, "rotary_dim"):
        return
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    rotated = rotated or head_dim  # llama.cpp's default
    expected = int(head_dim * of_layers[0].get("partial_rotary_factor", 1.0))
    if rotated != expected:
        raise ValueError(
            f"{key}={rotated}: expected {expected}, the elements of each head that transformers rotates; use the "
            f"model's safetensors folder"
        )
