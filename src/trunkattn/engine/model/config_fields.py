"""Fields of a configuration that would change what a model computes, and that its model does not read or cannot."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from transformers import PretrainedConfig

from trunkattn.engine.model.files import plain

# Fields that change what a model computes -> the values that change nothing. A model that has no such field of its own
# would leave another value unread.
CHANGES: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
    {
        "attn_logit_softcapping": (0,),
        "final_logit_softcapping": (0,),
        "logit_scale": (1,),
        "logits_scaling": (1,),
        "embedding_multiplier": (1,),
        "residual_multiplier": (1,),
        "lm_head_multiplier": (1,),
        "scale_emb": (1,),
        "attention_multiplier": (),
        "query_pre_attn_scalar": (),
        "scale_depth": (),
        "rotary_pct": (1,),
        "clip_qkv": (0,),
        "no_rope_layers": ([],),
        "no_rope_layer_interval": (0,),
        "dim_model_base": (),
        **dict.fromkeys(("attention_in_multiplier", "attention_out_multiplier", "attention_value_scale"), (1,)),
        **dict.fromkeys(("key_multiplier", "embedding_scale", "route_scale", "router_scaling_factor"), (1,)),
        **dict.fromkeys(("routed_scaling_factor", "moe_routed_scaling_factor"), (1,)),
        **dict.fromkeys(("logits_soft_cap", "output_logit_soft_cap", "moe_router_logit_softcapping"), (0,)),
        **dict.fromkeys(("swiglu_limit", "attn_temperature_tuning", "scale_embedding", "mup_enabled"), (0,)),
        **dict.fromkeys(("use_parallel_residual", "parallel_attn", "scale_attn_by_inverse_layer_idx"), (0,)),
        "apply_residual_connection_post_layernorm": (0,),
    }
)
# Fields of a type that its model in transformers never reads -> what that computes.
COMPUTED: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "deepseek_v2": {"norm_topk_prob": False, "scoring_func": "softmax"},
        "deepseek_v3": {"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        "gpt_oss": {"hidden_act": "silu"},
    }
)
LARGEST_NUMBER: Final = torch.finfo(torch.float32).max


def unread_fields(config: PretrainedConfig) -> list[str]:
    """Fields that would change what the model computes, and that transformers' model of this type does not have."""
    given = {name: value for name, value in vars(config).items() if value is not None}
    computed = COMPUTED.get(config.model_type, {})
    told = {name: given[name] for name, value in computed.items() if given.get(name, value) != value}
    changed = {name: value for name, value in given.items() if name in CHANGES and value not in CHANGES[name]}
    if changed:
        known = known_fields(config)
        told |= {name: value for name, value in changed.items() if name not in known}
    return [
        f"its configuration has {plain(f'{name}={value!r}')}, which transformers' {config.model_type} does not read"
        for name, value in told.items()
    ]


def infinite_fields(config: PretrainedConfig) -> list[str]:
    """Fields with a number that is NaN or infinite in float32, except those that the type itself has so. JSON makes one
    of a number with a digit too many in its exponent, and most models compute something with it all the same."""
    found = {name: value for name, value in vars(config).items() if _has_infinity(value)}
    own = vars(type(config)()) if found else {}
    return [
        f"its configuration has {plain(f'{name}={value!r}')}: expected finite numbers"
        for name, value in found.items()
        if not _has_infinity(own.get(name))
    ]


def _has_infinity(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_has_infinity, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_has_infinity, value))
    return isinstance(value, float) and not abs(value) <= LARGEST_NUMBER


def known_fields(config: PretrainedConfig) -> frozenset[str]:
    """Fields that configurations of this type have of their own: any other name would be kept and read by nobody."""
    extra = {"head_dim"} & vars(config).keys()  # transformers' attention reads this one wherever it stands
    return frozenset({*vars(type(config)()), *type(config).attribute_map, *extra})
