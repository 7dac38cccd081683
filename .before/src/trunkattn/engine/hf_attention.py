"""The bridge to transformers: an attention function that gets the step's plan by keyword.

`model.forward(..., trunk_step=step)` hands the keyword to every attention layer, and the layer to `step.attend`. The
step is a `TrunkStep`, which computes, or an `AttentionProbe`, which notes what the layers ask for.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface

from trunkattn.attention import BatchAttention, Plan
from trunkattn.cache.kv_cache import KVCache
from trunkattn.kernels.write_kv import write_kv

ATTENTION_NAME = "trunkattn"
# Keywords that reach the attention and change nothing in it.
NO_EFFECT = frozenset({"position_ids", "use_cache", "output_router_logits"})


@dataclass(frozen=True)
class LayerAttention:
    """What one layer's attention is.

    Attributes:
        num_qo_heads, num_kv_heads, head_dim, head_dim_v: geometry; `head_dim_v` is that of the values.
        sm_scale: factor of the logits.
        sliding_window: keys that a query sees, itself included; None: all.
        logits_soft_cap: c of c * tanh(logits / c); None: no cap.
        sinks: whether there is a sink logit per query head.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    sm_scale: float
    sliding_window: int | None
    logits_soft_cap: float | None
    sinks: bool


@dataclass(frozen=True)
class LayerTensors:
    """One layer's inputs: q [T, Hq, D], k and v [T, Hkv, D], sinks [Hq] or None."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None


class AttentionStep(Protocol):
    """What a forward pass does with each layer's attention."""

    def attend(self, layer_idx: int, layer: LayerAttention, tensors: LayerTensors) -> torch.Tensor:
        """The layer's output, [T, Hq, Dv]."""


@dataclass(frozen=True)
class TrunkStep:
    """One step's batch: writes the layer's K/V, then attends by the plan of the layer's window.

    Attributes:
        attention: shared by all layers.
        plans: sliding window -> plan.
        kv_cache: pages of all layers.
        slot_mapping: [T] int64, page * page_size + slot of each token.
    """

    attention: BatchAttention
    plans: Mapping[int | None, Plan]
    kv_cache: KVCache
    slot_mapping: torch.Tensor

    def attend(self, layer_idx: int, layer: LayerAttention, tensors: LayerTensors) -> torch.Tensor:
        k_cache, v_cache = self.kv_cache.layer(layer_idx)
        write_kv(tensors.k, tensors.v, k_cache, v_cache, self.slot_mapping)
        out = tensors.q.new_empty(*tensors.q.shape[:2], layer.head_dim_v)
        plan = self.plans[layer.sliding_window]
        self.attention.run(plan, tensors.q, k_cache, v_cache, out=out, sinks=tensors.sinks)
        return out


@dataclass(frozen=True)
class AttentionProbe:
    """Notes each layer's attention; for a forward pass without weights, on the meta device."""

    layers: dict[int, LayerAttention] = field(default_factory=dict)

    def attend(self, layer_idx: int, layer: LayerAttention, tensors: LayerTensors) -> torch.Tensor:
        if layer_idx in self.layers:
            raise ValueError(f"layer {layer_idx} calls its attention twice")
        self.layers[layer_idx] = layer
        return tensors.q.new_empty(*tensors.q.shape[:2], layer.head_dim_v)


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
        module: the attention layer; its `layer_idx` chooses the KV pages.
        query, key, value: [1, heads, T, head_dim], rotary positions applied.
        attention_mask: None; the plan knows who sees what.
        trunk_step: the step.
        options: `scaling`, `sliding_window`, `softcap` and `s_aux` as transformers' models pass them.

    Returns:
        [1, T, Hq, Dv] and no weights.

    Raises:
        ValueError: an option that changes attention in a way that is not known here.
    """
    if trunk_step is None:
        raise ValueError("the model does not pass keyword arguments on to its attention: expected trunk_step")
    scaling, soft_cap = options.pop("scaling", None), options.pop("softcap", None)
    window, sinks = options.pop("sliding_window", None), options.pop("s_aux", None)
    _check_options(module, attention_mask, options)
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
    return trunk_step.attend(module.layer_idx, layer, tensors).unsqueeze(0), None  # type: ignore[arg-type]


def _check_options(module: nn.Module, attention_mask: torch.Tensor | None, options: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise ValueError("the model builds an attention mask of its own: expected None")
    if options.pop("dropout", 0.0):
        raise ValueError("the attention has dropout: expected a model in evaluation mode")
    if options.pop("is_causal", None) is False or getattr(module, "is_causal", True) is False:
        raise ValueError("the attention is bidirectional: expected causal attention")
    unknown = sorted(name for name, value in options.items() if value is not None and name not in NO_EFFECT)
    if unknown:
        raise ValueError(f"the attention takes {', '.join(unknown)}, which is not supported")


def no_mask(*_: Any, **__: Any) -> None:
    """transformers' mask interface: nothing is built, because the plan holds causality and windows."""


AttentionInterface.register(ATTENTION_NAME, trunk_attention)
AttentionMaskInterface.register(ATTENTION_NAME, no_mask)
