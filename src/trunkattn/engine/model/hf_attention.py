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
from trunkattn.engine.model.expanded import ExpandedChunks
from trunkattn.engine.model.hf_masks import UnsupportedAttention, request_mask, window_of
from trunkattn.engine.model.latent import HeadWidths, LatentHeads, latent_heads
from trunkattn.kv_cache.tensors import KVCache
from trunkattn.ops.write_kv import write_known, write_kv, write_latent

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
        expanded: widths of a head's keys and values in the expanded form of a latent attention, else None.
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
    expanded: HeadWidths | None = None

    @property
    def out_dim(self) -> int:
        """Columns of a head's output."""
        return self.head_dim_v if self.expanded is None else self.expanded.value


@dataclass(frozen=True)
class LayerTensors:
    """One layer's inputs: q [T, Hq, D], k and v [T, Hkv, D], sinks [Hq] or None.

    Of a latent attention q is [T, Hq, nope + rope], k [T, 1, latent] and v [T, 1, rope]; heads are what it multiplies
    by, else None.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None
    heads: LatentHeads | None = None


class AttentionStep(Protocol):
    """A forward pass calls it for each layer's attention."""

    def attend(self, layer_idx: int, layer: LayerAttention, tensors: LayerTensors) -> torch.Tensor:
        """The layer's output, [T, Hq, layer.out_dim]."""


@dataclass(frozen=True)
class TrunkStep:
    """One step's batch: it writes the layer's keys and values, then attends by the plan of the layer's window.

    Attributes:
        attention: shared by all layers.
        windows: sliding window of each layer; the probe found it in the layer's mask.
        plans: sliding window -> plan.
        kv_cache: pages of all layers.
        slot_mapping: [T] int64, page * page_size + slot of each token.
        expanded: prompt chunks of a latent attention that the plans leave out; None: the plans have all requests.
        checked: layers whose tensors an earlier step has checked. A model gives a layer the same dtypes and shapes in
            every step, so that later steps need no check.
    """

    attention: BatchAttention
    windows: Sequence[int | None]
    plans: Mapping[int | None, Plan]
    kv_cache: KVCache
    slot_mapping: torch.Tensor
    expanded: ExpandedChunks | None = None
    checked: set[int] = field(default_factory=set)

    def attend(self, layer_idx: int, layer: LayerAttention, tensors: LayerTensors) -> torch.Tensor:
        k_cache, v_cache = self.kv_cache.layer(layer_idx)
        q, plan = tensors.q, self.plans[self.windows[layer_idx]]
        if v_cache is not None:
            out = q.new_empty(*q.shape[:2], layer.head_dim_v)
            if layer_idx in self.checked:
                write_known(tensors.k, tensors.v, k_cache, v_cache, self.slot_mapping)
                self.attention.run_known(plan, q, k_cache, v_cache, out, tensors.sinks)
            else:
                write_kv(tensors.k, tensors.v, k_cache, v_cache, self.slot_mapping)
                self.attention.run(plan, q, k_cache, v_cache, out=out, sinks=tensors.sinks)
                self.checked.add(layer_idx)
            return out
        write_latent(tensors.k.squeeze(1), tensors.v.squeeze(1), k_cache, self.slot_mapping)
        if self.expanded is None or tensors.heads is None:
            return self._absorbed(plan, tensors, q, k_cache)
        out = q.new_empty(*q.shape[:2], layer.out_dim)
        rows, others = self.expanded.rows, self.expanded.other_rows
        out[rows] = self.expanded.attend(tensors.heads, q[rows], k_cache, tensors.sinks)
        if len(others):
            out[others] = self._absorbed(plan, tensors, q[others], k_cache)
        return out

    def _absorbed(self, plan: Plan, tensors: LayerTensors, q: torch.Tensor, k_cache: torch.Tensor) -> torch.Tensor:
        """Outputs [T, Hq, v] of queries q [T, Hq, nope + rope] over the cached rows."""
        assert tensors.heads is not None
        latents = tensors.k.new_empty(*q.shape[:2], tensors.k.shape[2])
        self.attention.run(plan, tensors.heads.queries(q), k_cache, out=latents, sinks=tensors.sinks)
        outputs: torch.Tensor = tensors.heads.expand(latents)
        return outputs


@dataclass(frozen=True)
class AttentionProbe:
    """Records each layer's attention in a forward pass without weights, on the meta device."""

    layers: dict[int, LayerAttention] = field(default_factory=dict)

    def attend(self, layer_idx: int, layer: LayerAttention, tensors: LayerTensors) -> torch.Tensor:
        if layer_idx in self.layers:
            raise UnsupportedAttention(f"its layer {layer_idx} calls its attention twice")
        self.layers[layer_idx] = layer
        return tensors.q.new_empty(*tensors.q.shape[:2], layer.out_dim)


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
    heads = latent_heads(module)
    if heads is not None:
        latent_dim = key.shape[3]
        row_dim = latent_dim + value.shape[3]
        layer = replace(layer, head_dim=row_dim, head_dim_v=latent_dim, latent_dim=latent_dim, expanded=heads.widths)
    q, k, v = (each[0].transpose(0, 1) for each in (query, key, value))
    tensors = LayerTensors(q, k, v, sinks, heads)
    layer_idx = int(module.layer_idx)  # type: ignore[arg-type]
    return trunk_step.attend(layer_idx, layer, tensors).unsqueeze(0), None


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
