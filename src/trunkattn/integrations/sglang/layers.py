"""The attention layers of a model: their attention, the place of their keys and values, and what is not supported."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from trunkattn.integrations.layer_spec import LayerSpec
from trunkattn.integrations.sglang import versions


class LayerKind(NamedTuple):
    """Layers of one kind share a step's plan.

    Attributes:
        spec: their attention.
        in_window_pool: whether their keys and values are in the pool for layers with a window, which has slots of its
            own.
    """

    spec: LayerSpec
    in_window_pool: bool


def attention_layers(runner: Any) -> list[Any]:
    """The layers that SGLang asks a back end for. Those that read what another one has stored have its layer_id. A
    model with latent attention has further ones, of its prompts, which have another width, and one with linear
    attention may have further ones that store nothing in the KV pool."""
    layers = [module for module in runner.model.modules() if type(module).__name__ == "RadixAttention"]
    pool = runner.token_to_kv_pool
    if is_beside_linear(pool):
        layers = [layer for layer in layers if layer.layer_id in pool.full_attention_layer_id_mapping]
    if runner.use_mla_backend:
        row = runner.model_config.kv_lora_rank + runner.model_config.qk_rope_head_dim
        layers = [layer for layer in layers if (layer.tp_k_head_num, layer.qk_head_dim) == (1, row)]
    return layers


def layer_spec(layer: Any, sinks: bool, dtype: torch.dtype, kv_dtype: torch.dtype) -> LayerSpec:
    """The attention of a layer. SGLang counts the tokens of a window without the query's own. Values that are narrower
    than keys are their first columns: other layers of that kind are refused.

    Args:
        layer: SGLang's layer.
        sinks: whether each query head has a sink logit. SGLang passes them to the layer's call.
        dtype: of queries.
        kv_dtype: of the KV cache.
    """
    before = layer.sliding_window_size
    return LayerSpec(
        num_qo_heads=layer.tp_q_head_num,
        num_kv_heads=layer.tp_k_head_num,
        head_dim=layer.qk_head_dim,
        dtype=dtype,
        kv_dtype=None if kv_dtype == dtype else kv_dtype,
        sm_scale=float(layer.scaling),
        logits_soft_cap=float(layer.logit_cap) if layer.logit_cap else None,
        sinks=sinks,
        sliding_window=None if before is None or before < 0 else before + 1,
        latent_dim=layer.v_head_dim if layer.v_head_dim < layer.qk_head_dim else None,
    )


def is_beside_linear(pool: Any) -> bool:
    """Whether a pool is that of a model with linear attention. It keeps what the other layers store in a further pool,
    and finds it by the layers' numbers in the model."""
    return type(pool).__name__ == versions.LINEAR_POOL


def in_window_pool(pool: Any, layer_id: int) -> bool:
    """Whether a layer's keys and values are in the window part of a hybrid pool."""
    return type(pool).__name__ == versions.WINDOW_POOL and bool(pool.layers_mapping[layer_id][1])


def layer_refusals(layer: Any, latent: bool = False) -> list[str]:
    """Unsupported attention of a layer; empty if it is supported. latent: whether its values are a part of its keys."""
    found = []
    kind = str(getattr(layer.attn_type, "value", layer.attn_type))
    if kind != "decoder":
        found.append(f"{kind} attention, only decoder self-attention")
    if layer.is_cross_attention:
        found.append("cross attention")
    if layer.v_head_dim != layer.qk_head_dim and not latent:
        found.append(f"values of another width than keys ({layer.v_head_dim} and {layer.qk_head_dim})")
    if layer.logit_cap and layer.logit_capping_method != "tanh":
        found.append(f"a soft cap by {layer.logit_capping_method}, only by tanh")
    if layer.pos_encoding_mode != "NONE":
        found.append(f"positions encoded in the attention (pos_encoding_mode={layer.pos_encoding_mode})")
    if layer.xai_temperature_len > 0:
        found.append("temperatures by position")
    if getattr(layer, "use_irope", False) and layer.sliding_window_size in (None, -1):
        found.append("attention within chunks")
    return found


def latent_pool_refusals(pool: Any, page_size: int) -> list[str]:
    """Unsupported storage of latent rows; empty if it is supported."""
    name = type(pool).__name__
    if getattr(pool, "use_dsa", False):
        return ["sparse attention, which selects keys for each query (dsa and others do)"]
    if name != versions.LATENT_POOL:
        return [f"a pool of latent rows of type {name}, only {versions.LATENT_POOL}"]
    return [f"pages of {pool.page_size} tokens in the pool, beside {page_size}"] if pool.page_size != page_size else []


def pool_refusals(pool: Any, page_size: int) -> list[str]:
    """Unsupported storage of keys and values; empty if it is supported."""
    name = type(pool).__name__
    if name not in (versions.PLAIN_POOL, versions.WINDOW_POOL):
        return [f"a KV pool of type {name}, only {versions.PLAIN_POOL} and {versions.WINDOW_POOL}"]
    parts = (pool,) if name == versions.PLAIN_POOL else (pool.full_kv_pool, pool.swa_kv_pool)
    found = []
    for part in parts:
        if type(part).__name__ != versions.PLAIN_POOL:
            found.append(f"a part of the KV pool of type {type(part).__name__}, only {versions.PLAIN_POOL}")
        elif getattr(part, "kv_cache_layout", "nhd") != "nhd":
            found.append(f"the KV layout {part.kv_cache_layout}, only nhd")
        elif getattr(part, "is_quantized_kv_cache", False):
            found.append(f"a KV cache quantized as {part.quant_method.name}")
        elif part.page_size != page_size:
            found.append(f"pages of {part.page_size} tokens in a part of the KV pool, beside {page_size}")
    if getattr(pool, "swa_req_ring_size", None) is not None or getattr(pool, "request_window", None) is not None:
        found.append("windows that are stored by request")
    return found


def refusals(runner: Any, layers: Iterable[Any], serves_prompts: bool) -> list[str]:
    """The unsupported properties of a model, its options or its KV cache; empty if all are supported.

    Args:
        runner: SGLang's model runner.
        layers: the model's attention layers.
        serves_prompts: whether prompts run here too.
    """
    options = versions.options_in_effect(runner)
    found = versions.refused_options(options)
    if not runner.spec_algorithm.is_none() and not found:
        found.append("speculative decoding")
    if runner.use_mla_backend and serves_prompts:
        found.append(f"prompts of latent attention (MLA), only its decoding: add {versions.OTHER_PROMPTS}")
    if getattr(runner.model_config, "is_encoder_decoder", False):
        found.append("encoder-decoder models")
    # Such a model prepares the mask of a step for SGLang's triton, and for any other goes on without one.
    if hasattr(runner.model, "prepare_attn_masks") and getattr(runner.model_config, "is_multimodal", False):
        found.append("image tokens that see each other in both directions, which only SGLang's triton supports")
    if getattr(runner, "prefill_aware_swa", False):
        found.append("windows beside which a query sees the whole prompt, which SGLang's fa3 supports")
    if runner.device == "cpu" and getattr(options, "enable_torch_compile", False):
        found.append("torch.compile on a CPU (enable_torch_compile=True)")
    if serves_prompts and runner.device != "cpu" and versions.prompt_graphs(options) == "full":
        found.append("prompts in full CUDA graphs (cuda_graph_backend_prefill=full)")
    if found:  # the rest would only repeat it
        return found
    if runner.kv_cache_dtype not in versions.KV_DTYPES:
        found.append(f"a KV cache of {runner.kv_cache_dtype}")
    latent = bool(runner.use_mla_backend)
    pool = runner.token_to_kv_pool
    stored = pool.full_kv_pool if is_beside_linear(pool) else pool
    found += (latent_pool_refusals if latent else pool_refusals)(stored, runner.page_size)
    for layer in layers:
        found += [each for each in layer_refusals(layer, latent) if each not in found]
    if found:
        return found
    for spec in {layer_spec(layer, False, runner.dtype, runner.kv_cache_dtype) for layer in layers}:
        found += spec.config(runner.page_size).supports(str(runner.device))
    return found


def check_supported(unsupported: list[str]) -> None:
    """Raises ValueError, with one line, if there is anything."""
    if unsupported:
        raise ValueError(
            f"attention_backend=trunk: TrunkAttention does not support {'; nor '.join(unsupported)}; "
            "turn it off or choose another attention back end"
        )
