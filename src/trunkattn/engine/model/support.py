"""Whether a model can run here, found only from its configuration: the reasons if not, or its attention's geometry."""

import copy
import inspect
import math
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, DynamicCache, PretrainedConfig
from transformers.modeling_rope_utils import RopeParameters

from trunkattn.engine.model.config_fields import infinite_fields, known_fields, unread_fields
from trunkattn.engine.model.files import one_line
from trunkattn.engine.model.hf_attention import ATTENTION_NAME, AttentionProbe, LayerAttention
from trunkattn.engine.model.hf_masks import UnsupportedAttention
from trunkattn.engine.model.latent import absorb_heads

ATTENTION_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
UNSUPPORTED_OPTIONS = (  # a field that is set in the configuration -> its meaning
    ("is_encoder_decoder", "it is an encoder-decoder model"),
    ("index_topk", "its attention selects the keys of each query (sparse attention)"),
    ("alibi", "its attention has ALiBi position biases"),
    ("attention_chunk_size", "it uses chunked attention"),
    ("use_bidirectional_attention", "its attention is bidirectional"),
    ("num_kv_shared_layers", "some of its layers share KV"),
    ("add_cross_attention", "it has cross-attention"),
)
# Parameters of a rotation that scale it -> the rope types that read them; a factor of 1 changes nothing.
ROPE_SCALES: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "factor": frozenset({"linear", "dynamic", "proportional", "yarn", "longrope", "llama3"}),
        "attention_factor": frozenset({"yarn", "longrope"}),
    }
)
# Other parameters: those that transformers documents belong to some rope type, and these change no text.
ROPE_NAMES: Final = frozenset({*RopeParameters.__annotations__, "type", "finetuned", "mrope_interleaved"})
# Fields that ask for a norm of queries and keys, and the modules that are one. Some models have it whatever their
# configuration says.
NORM_FIELDS: Final = ("use_qk_norm", "qk_norm", "qk_layernorm")
NORM: Final = re.compile(r"(.*\.)?(q|k|qk|query|key)_?(layer)?_?norm")
MOST_MADE = 2000  # tensors of a model that its files are far too small for: more of them would only take time
MANY_TIMES = 16  # as many weights as numbers in the files; while a model is made, tied weights count several times
MAKERS: Final = frozenset(  # of the tensors of weights
    {torch.ops.aten.empty.memory_format, torch.ops.aten.ones.default, torch.ops.aten.zeros.default}
)
PROBE_TOKENS = 1  # with one token, models with recurrent layers look at no values of the attention mask


@dataclass(frozen=True)
class AttentionGeometry:
    """The attention of a whole model: one geometry for all layers, and a window for each; and the model's size.

    Attributes:
        layer: the attention of each layer.
        windows: sliding window of each layer, None for full attention.
        num_parameters: numbers in all weights of the model; those that are tied count once.
    """

    layer: LayerAttention
    windows: tuple[int | None, ...]
    num_parameters: int

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def check_supported(config: PretrainedConfig) -> list[str]:
    """Reasons why the model of `config` cannot run here; empty if it can. No weight is loaded."""
    return check_config(config) or probe_attention(config)[1]


def probe_attention(
    config: PretrainedConfig, trust_remote_code: bool = False, num_values: float = math.inf
) -> tuple[AttentionGeometry | None, list[str]]:
    """The attention as the model's own code calls it in a forward pass on the meta device, and the reasons against it.

    Args:
        config, trust_remote_code: of the model.
        num_values: numbers in the model's files. If they are far too few, a model of many layers or experts is not made
            to its end, so that wrong counts take no time.

    Returns:
        (geometry, []) or (None, reasons).
    """
    probe = AttentionProbe()
    try:
        num_parameters = _forward_on_meta(copy.deepcopy(config), probe, trust_remote_code, num_values)
    except UnsupportedAttention as reason:
        return None, [str(reason)]
    except Exception as error:  # any error of the model's code is a reason
        return None, [_failure(error)]
    layers = probe.layers
    if sorted(layers) != list(range(config.num_hidden_layers)):
        return None, [f"only layers {sorted(layers)} call attention, not all {config.num_hidden_layers}"]
    in_order = [layers[index] for index in sorted(layers)]
    geometries = {_without_window(layer) for layer in in_order}
    if len(geometries) != 1:
        return None, [f"its layers differ in their attention: {_differences(geometries)}"]
    layer = geometries.pop()
    if layer.latent_dim is None and layer.head_dim != layer.head_dim_v:
        return None, [f"its keys have head_dim {layer.head_dim} and its values {layer.head_dim_v}: expected the same"]
    soft_cap = getattr(config, "attn_logit_softcapping", None)
    if soft_cap and layer.logits_soft_cap != soft_cap:
        return None, [f"its configuration has attn_logit_softcapping={soft_cap}, which its code does not apply"]
    windows = tuple(found.sliding_window for found in in_order)
    reasons = _window_reasons(config, windows) or _cache_reasons(config, windows)
    return (None, reasons) if reasons else (AttentionGeometry(layer, windows, num_parameters), [])


def _differences(layers: Collection[LayerAttention]) -> str:
    """The fields in which layers differ, with their values."""
    values = {name: sorted({str(vars(layer)[name]) for layer in layers}) for name in vars(next(iter(layers)))}
    return ", ".join(f"{name} {' or '.join(found)}" for name, found in values.items() if len(found) > 1)


def _window_reasons(config: PretrainedConfig, windows: tuple[int | None, ...]) -> list[str]:
    """Whether the configuration says that a layer sees all tokens, and the model's code shows it a window."""
    types = getattr(config, "layer_types", None) or ()
    for layer, (layer_type, window) in enumerate(zip(types, windows, strict=False)):
        if layer_type == "full_attention" and window is not None:
            return [
                f"its configuration has layer_types[{layer}]='full_attention', which transformers' {config.model_type} "
                f"does not read: the layer sees a window of {window} tokens"
            ]
    return []


def _cache_reasons(config: PretrainedConfig, windows: tuple[int | None, ...]) -> list[str]:
    """Whether transformers' own cache forgets keys that the masks leave visible: its answers then depend on it."""
    layers = DynamicCache(config=copy.deepcopy(config)).layers
    kept = [getattr(layer, "sliding_window", None) for layer in layers[: len(windows)]]
    other = [(keep, window) for keep, window in zip(kept, windows, strict=False) if keep and keep != window]
    if not other:
        return []
    window = "every earlier token" if other[0][1] is None else f"a window of {other[0][1]} tokens"
    return [f"its cache keeps {other[0][0]} tokens, but its attention mask shows {window}"]


def max_positions(config: PretrainedConfig) -> int:
    """Longest sequence, in tokens, whose result does not depend on the other sequences of the batch.

    The rope type "longrope" changes the rotation of every position once a sequence exceeds the original length, so that
    length is its limit.

    Raises:
        ValueError: the configuration has no limit.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    limits += [
        rope.get("original_max_position_embeddings")
        for rope in _rope_parameters(config)
        if rope.get("rope_type") == "longrope"
    ]
    known = [int(limit) for limit in limits if limit and limit > 0]
    if not known:
        raise ValueError(
            f"model: the configuration of {config.model_type} has no max_position_embeddings: expected a number of "
            f"tokens of at least 1"
        )
    return min(known)


def check_config(config: PretrainedConfig, trust_remote_code: bool = False) -> list[str]:
    """The reasons that the fields of the configuration show."""
    reasons = [meaning for name, meaning in UNSUPPORTED_OPTIONS if getattr(config, name, None)]
    if not _is_text_only(config):
        reasons.append("it is a multimodal model")
    elif trust_remote_code and "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        pass  # the folder's own code, which the probe runs
    elif type(config) not in AutoModelForCausalLM._model_mapping:
        reasons.append(f"transformers' AutoModelForCausalLM has no model of type {config.model_type!r}")
    else:
        model_class: Any = AutoModelForCausalLM._model_mapping[type(config)]
        if not model_class._supports_attention_backend:
            reasons.append("its attention does not go through transformers' AttentionInterface")
    others = sorted(set(getattr(config, "layer_types", None) or ()) - ATTENTION_LAYER_TYPES)
    if others:
        reasons.append(f"it has layers of type {', '.join(others)}")
    if not reasons and type(config) in AutoModelForCausalLM._model_mapping:
        reasons += unread_fields(config)
    if not reasons:
        reasons += infinite_fields(config)
    quantization = getattr(config, "quantization_config", None)
    if quantization is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization.quant_method
        reasons.append(f"its weights are quantized ({method}); expected plain safetensors or GGUF")
    return reasons


def _is_text_only(config: PretrainedConfig) -> bool:
    try:
        return config.get_text_config() is config
    except ValueError:  # it has several
        return False


class _OnMeta(TorchDispatchMode):
    """Lets `nonzero` find nothing on the meta device, where it fails otherwise: experts that look for their tokens then
    have none. It sees what its own thread makes.

    Args:
        num_values: numbers in the model's files. As soon as there are more than `MOST_MADE` tensors, with more than
            `MANY_TIMES` as many numbers, it raises UnsupportedAttention.
    """

    def __init__(self, num_values: float) -> None:
        super().__init__()
        self._num_values, self._num_tensors, self._num_made = num_values, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.nonzero.default and args[0].is_meta:
            return args[0].new_empty(0, args[0].dim(), dtype=torch.int64)
        found = func(*args, **(kwargs or {}))
        if func in MAKERS:
            self._num_tensors, self._num_made = self._num_tensors + 1, self._num_made + found.numel()
            if self._num_tensors > MOST_MADE and self._num_made > MANY_TIMES * self._num_values:
                raise UnsupportedAttention(
                    f"its configuration describes more than a model of {self._num_made:,} weights, and its files hold "
                    f"{self._num_values:,} numbers; correct the sizes in its configuration, or copy the files again"
                )
        return found


def _forward_on_meta(
    config: PretrainedConfig, probe: AttentionProbe, trust_remote_code: bool, num_values: float
) -> int:
    """Shows the probe the model's attention; returns the number of its parameters."""
    with torch.device("meta"), torch.inference_mode(), _OnMeta(num_values):
        # On the meta device some grouped matrix products exist for bfloat16 only.
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=torch.bfloat16, trust_remote_code=trust_remote_code
        )
        num_parameters: int = sum(parameter.numel() for parameter in model.parameters())
        token_ids = torch.zeros(1, PROBE_TOKENS, dtype=torch.int64, device="meta")
        _check_rotation(model, config)
        _check_rope_parameters(model, config)
        _check_norms(model, config)
        hold_rope(model)
        absorb_heads(model)
        model.eval()(
            input_ids=token_ids,
            position_ids=token_ids,
            attention_mask=torch.ones_like(token_ids),  # without it transformers reads the values of position_ids
            use_cache=False,
            logits_to_keep=token_ids[0, :1],
            trunk_step=probe,
        )
    return num_parameters


def _check_rotation(model: nn.Module, config: PretrainedConfig) -> None:
    """Raises UnsupportedAttention if the configuration rotates a part of each head and the model another one."""
    widths = {2 * buffer.shape[-1] for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    shares = [(rope.get("partial_rotary_factor"), rope.get("rope_type")) for rope in _rope_parameters(config)]
    own = getattr(config, "partial_rotary_factor", None)
    if own not in [share for share, _ in shares]:
        shares.append((own, None))
    for share, rope_type in shares:
        if share in (None, 1) or rope_type == "proportional" or not widths:  # that type rotates the rest by zero
            continue
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        if int(head_dim * share) not in widths:
            raise UnsupportedAttention(
                f"its configuration has partial_rotary_factor={share}, and transformers' {config.model_type} rotates "
                f"{' or '.join(map(str, sorted(widths)))} of the {head_dim} numbers of a head"
            )


def _check_rope_parameters(model: nn.Module, config: PretrainedConfig) -> None:
    """Raises UnsupportedAttention for a parameter of the rotation that neither its rope type nor the model's own code
    reads. transformers only warns of it."""
    source = inspect.getsource(sys.modules[type(model).__module__])
    names = ROPE_NAMES | set(getattr(config, "ignore_keys_at_rope_validation", None) or ())  # the type's own
    for rope in _rope_parameters(config):
        for name, value in rope.items():
            read_by, rope_type = ROPE_SCALES.get(name), rope.get("rope_type")
            is_read = rope_type in read_by if read_by else name in names or f'"{name}"' in source
            if not is_read and value is not None and not (name.endswith("factor") and value == 1):
                raise UnsupportedAttention(
                    f"its rope parameters have {name}={value!r}, which transformers' {config.model_type} does not read "
                    f"with rope_type={rope_type!r}"
                )


def _check_norms(model: nn.Module, config: PretrainedConfig) -> None:
    """Raises UnsupportedAttention if the configuration asks for a norm of queries and keys that the model has not."""
    for field in NORM_FIELDS:
        asks = getattr(config, field, None) and field not in known_fields(config)
        if asks and not any(NORM.fullmatch(name) for name, _ in model.named_modules()):
            raise UnsupportedAttention(
                f"its configuration has {field}={getattr(config, field)!r}, which transformers' {config.model_type} "
                f"does not read"
            )


def _failure(error: Exception) -> str:
    if "meta" in str(error):
        return (
            "its code decides by the values of tensors, so its attention cannot be found before its weights are loaded"
        )
    return f"its code fails in a forward pass without weights ({one_line(error)})"


def hold_rope(model: nn.Module) -> None:
    """Keeps the rotation that "dynamic" rope has up to the model's longest sequence (`max_positions`).

    transformers recomputes it beyond that length only, but compares the lengths in every step, on the host.
    """
    for module in model.modules():
        rope_type = getattr(module, "rope_type", None)
        if isinstance(rope_type, str):
            module.rope_type = _held(rope_type)  # type: ignore[assignment]
        elif isinstance(rope_type, Mapping):
            module.rope_type = {layer_type: _held(name) for layer_type, name in rope_type.items()}  # type: ignore[assignment]


def _held(rope_type: str) -> str:
    return "default" if "dynamic" in rope_type else rope_type


def _without_window(layer: LayerAttention) -> LayerAttention:
    return replace(layer, sliding_window=None)


def _rope_parameters(config: PretrainedConfig) -> Iterable[Mapping[str, Any]]:
    """The rotary parameters: one mapping for all layers, or one per layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters] if "rope_type" in parameters else [rope for rope in parameters.values() if rope]
