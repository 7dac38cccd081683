"""Whether a model can use our attention, found from its classes. Attention and masks get only the configuration of a
model. From the name of its module, `configuration_X`, follows that of the model's module, `modeling_X`."""

import inspect
import re
import sys
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from transformers import PreTrainedModel

# Layers whose attention obeys a mask, and layers that compute each token by itself.
_ATTEND: Final = frozenset({"full_attention", "sliding_attention", "chunked_attention", "dense", "sparse", "moe"})
# Layers whose queries see only some of the earlier tokens, or sums of them.
_SELECT: Final = frozenset({"indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention"})
# Finds the values that source code gives to `is_causal`, a variable, an attribute or an argument.
_IS_CAUSAL: Final = re.compile(r"\bis_causal\b(?:\s*:[^=,)\n]*)?\s*=\s*([^,)#\s]+)")
_NOT_CAUSAL: Final = frozenset({"False", "None", "is_causal", "self.is_causal"})
_FROM_PADDING: Final = "def create_position_ids_from_input_ids("  # all of these models call it so
_SUPPORTED: Final = ("_supports_sdpa", "_supports_flash_attn", "_supports_attention_backend")


class _Facts(NamedTuple):
    """What the classes of a model allow.

    Attributes:
        takes_attention: the attention can be chosen. Older models compute it themselves and would add our mask to
            their logits.
        is_stateful: some layers keep a state.
        takes_positions: the model takes position_ids.
        is_causal: some layer may call its attention with `is_causal`.
        from_padding: the model numbers tokens from padding_idx + 1 on.
    """

    takes_attention: bool = True
    is_stateful: bool = False
    takes_positions: bool = True
    is_causal: bool = True
    from_padding: bool = False


def why_not(config: Any) -> str | None:
    """Why models of a configuration cannot use another attention; None if no reason is known."""
    selecting = [str(layer) for layer in getattr(config, "layer_types", None) or () if layer in _SELECT]
    if selecting:
        return f"have layers of {selecting[0]}"
    return None if _facts_of(type(config).__module__).takes_attention else "take no attention but their own"


def why_no_tree(config: Any) -> str | None:
    """Why a model computes the packed tokens of a tree differently from its sequences; None if no reason is known."""
    facts, layers = _facts_of(type(config).__module__), getattr(config, "layer_types", None)
    others = [str(layer) for layer in layers or () if layer not in _ATTEND]
    if others or (layers is None and facts.is_stateful):
        return f"has layers of {others[0] if others else 'a state'}, which take packed tokens as one sequence"
    if not facts.takes_positions:
        return "takes no position_ids, so it numbers packed tokens as one sequence"
    return "numbers tokens from its padding_idx + 1 on, and those of a tree from 0 on" if facts.from_padding else None


def why_not_causal(config: Any) -> str | None:
    """Why a causal mask does not mean causal layers in models of a configuration; None if no reason is known. Our masks
    leave causality to `is_causal` of each layer."""
    both_ways = getattr(config, "use_bidirectional_attention", None) in (True, "all")
    if both_ways or not _facts_of(type(config).__module__).is_causal:
        return "make a causal mask for layers that say that they are not causal"
    return None


@torch.compiler.assume_constant_result
def _facts_of(configuration: str) -> _Facts:
    return _looked_up(configuration)


@lru_cache
def _looked_up(configuration: str) -> _Facts:
    """The facts of the models that belong to a module of configurations."""
    name = configuration.replace("configuration_", "modeling_")
    found = [each for each in vars(sys.modules.get(name, object)).values() if isinstance(each, type)]
    models = [each for each in found if issubclass(each, PreTrainedModel) and each.__module__ == name]
    if not models:
        return _Facts()
    source = inspect.getsource(sys.modules[name])
    return _Facts(
        takes_attention=any(
            model._can_set_attn_implementation() and any(getattr(model, flag, False) for flag in _SUPPORTED)
            for model in models
        ),
        is_stateful=any(model._is_stateful for model in models),
        takes_positions=any("position_ids" in inspect.signature(model.forward).parameters for model in models),
        is_causal=_may_be_causal(source),
        from_padding=_FROM_PADDING in source,
    )


def _may_be_causal(source: str) -> bool:
    """Whether some attention in the source code of a module may be causal. Without `is_causal` it is."""
    values = set(_IS_CAUSAL.findall(source))
    return not values or not values <= _NOT_CAUSAL
