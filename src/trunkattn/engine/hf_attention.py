"""The bridge to transformers: an attention function that gets the step's plan by keyword.

`model.forward(..., trunk_step=step)` passes the keyword to every attention layer, and the layer calls `step.attend`.
The step is a `TrunkStep`, which computes, or an `AttentionProbe`, which records what each layer needs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from trunkattn.attention import BatchAttention, Plan
from trunkattn.engine.hf_masks import UnsupportedAttention, request_mask, window_of
from trunkattn.engine.latent import latent_heads
from trunkattn.kv_cache.tensors import KVCache
from trunkattn.ops.write_kv import write_kv, write_latent

ATTENTION_NAME = "trunkattn_step"  # "trunkattn" is the name for training
# Keywords that transformers passes to the attention and that do not change it.
NO_EFFECT = frozenset(
    {"position_ids", "use_cache", "output_router_logits", "output_attentions", "output_hidden_states"}
)


@dataclass(frozen=True)
class LayerAttention:
    """The attention of one layer.

    Attributes:
        num_qo_heads, num_kv_heads, head_dim: geometry of queries and keys.
        head_dim_v: head dimension of the values.
        sm_scale: factor of the logits.
        sliding_window: keys that a query sees, its own included; None: all.
        logits_soft_cap: c of c * tanh(logits / c); None: no cap.
        sinks: whether each query head has a sink logit.
        latent_dim: columns of a latent cache that are the values, see `AttentionConfig`; None: it caches keys and
            values apart.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    sm_scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    sinks: bool
    latent_dim: int | None = None


@dataclass(frozen=True)
class LayerTensors:
    """One layer's inputs: q [T, Hq, D], k and v [T, Hkv, D], sinks [Hq] or None.

    Of a latent attention q is the pair [T, Hq, latent] and [T, Hq, rope], k [T, 1, latent] and v [T, 1, rope].
    """

    q: torch.Tensor | tuple[torch.Tensor, torch.Tensor]
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None


class AttentionStep(Protocol):
    """A forward pass calls it for each layer's attention."""

    def attend(self, layer_idx: int, layer: LayerAttention, tensors: LayerTensors) -> torch.Tensor:
        """The layer's output, [T, Hq, Dv]."""


@dataclass(frozen=True)
class TrunkStep:
    """One step's batch: it writes the layer's keys and values, then attends by the plan of the layer's window.

    Attributes:
        attention: shared by all layers.
        windows: sliding window of each layer; the probe found it in the layer's mask.
        plans: sliding window -> plan.
        kv_cache: pages of all layers.
        slot_mapping: [T] int64, page * page_size + slot of each token.
    """

    attention: BatchAttention
    windows: Sequence[int | None]
    plans: Mapping[int | None, Plan]
    kv_cache: KVCache
    slot_mapping: torch.Tensor

    def attend(self, layer_idx: int, layer: LayerAttention, tensors: LayerTensors) -> torch.Tensor:
        k_cache, v_cache = self.kv_cache.layer(layer_idx)
        if v_cache is None:
            write_latent(tensors.k.squeeze(1), tensors.v.squeeze(1), k_cache, self.slot_mapping)
        else:
            write_kv(tensors.k, tensors.v, k_cache, v_cache, self.slot_mapping)
        out = tensors.k.new_empty(len(tensors.k), layer.num_qo_heads, layer.head_dim_v)
        plan = self.plans[self.windows[layer_idx]]
        self.attention.run(plan, tensors.q, k_cache, v_cache, out=out, sinks=tensors.sinks)
        return out


@dataclass(frozen=True)
class AttentionProbe:
    """Records each layer's attention in a forward pass without weights, on the meta device."""

    layers: dict[int, LayerAttention] = field(default_factory=dict)

    def attend(self, layer_idx: int, layer: LayerAttention, tensors: LayerTensors) -> torch.Tensor:
        if layer_idx in self.layers:
            raise UnsupportedAttention(f"its layer {layer_idx} calls its attention twice")
        self.layers[layer_idx] = layer
        return tensors.k.new_empty(len(tensors.k), layer.num_qo_heads, layer.head_dim_v)


def trunk_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    trunk_step: AttentionStep | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface over one packed batch.

    Args:
        module: the attention layer; its `layer_idx` selects the KV pages.
        query, key, value: [1, heads, T, head_dim], after the rotary embedding. Of an absorbed attention (`latent`),
            key and value are latent rows [1, 1, T, latent] and rope rows [1, 1, T, rope].
        attention_mask: a `RequestedMask` on the meta device; else it must be None, because the plan knows which keys
            each query sees.
        trunk_step: the step.
        options: `scaling`, `sliding_window`, `softcap` and `s_aux` as transformers' models pass them.

    Returns:
        The output [1, T, Hq, Dv], and None instead of attention weights.

    Raises:
        UnsupportedAttention: an option changes attention in a way that is not supported.
    """
    if trunk_step is None:
        raise UnsupportedAttention("it does not pass keywords (trunk_step) on to its attention")
    scaling, soft_cap = options.pop("scaling", None), options.pop("softcap", None)
    window, sinks = options.pop("sliding_window", None), options.pop("s_aux", None)
    if attention_mask is not None:
        window = window_of(attention_mask)
    _check_options(module, options)
    layer = LayerAttention(
        num_qo_heads=query.shape[1],
        num_kv_heads=key.shape[1],
        head_dim=query.shape[3],
        head_dim_v=value.shape[3],
        sm_scale=query.shape[3] ** -0.5 if scaling is None else scaling,
        sliding_window=window,
        logits_soft_cap=soft_cap,
        sinks=sinks is not None,
    )
    tensors = LayerTensors(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), sinks)
    heads, layer_idx = latent_heads(module), int(module.layer_idx)  # type: ignore[arg-type]
    if heads is None:
        return trunk_step.attend(layer_idx, layer, tensors).unsqueeze(0), None
    latent_dim, rope_dim = key.shape[3], value.shape[3]
    layer = replace(layer, head_dim=latent_dim + rope_dim, head_dim_v=latent_dim, latent_dim=latent_dim)
    tensors = replace(tensors, q=heads.queries(query[0].transpose(0, 1)))
    return heads.expand(trunk_step.attend(layer_idx, layer, tensors)).unsqueeze(0), None


def _check_options(module: nn.Module, options: dict[str, Any]) -> None:
    if options.pop("dropout", 0.0):
        raise UnsupportedAttention("its attention has dropout in evaluation mode")
    if options.pop("is_causal", None) is False or getattr(module, "is_causal", True) is False:
        raise UnsupportedAttention("its attention is bidirectional")
    unknown = sorted(name for name, value in options.items() if value is not None and name not in NO_EFFECT)
    if unknown:
        raise UnsupportedAttention(f"its attention has the options {', '.join(unknown)}")


AttentionInterface.register(ATTENTION_NAME, trunk_attention)
AttentionMaskInterface.register(ATTENTION_NAME, request_mask)
