"""Assembly of a model runner from a checked model and options: the attention, the KV cache, the graphs."""

from typing import Any

import torch

from trunkattn.attention import BatchAttention
from trunkattn.config import AttentionConfig, Capacity
from trunkattn.engine.config import EngineConfig
from trunkattn.engine.graphs import LARGEST_GRAPH, CudaCapture, Graphs, graph_sizes
from trunkattn.engine.model.expanded import ChunkExpansion
from trunkattn.engine.model.inspection import ModelInfo
from trunkattn.engine.model.packed_linear import can_pack, unpacked_weights
from trunkattn.engine.runner import ModelRunner
from trunkattn.kv_cache.tensors import KVCache


def attention_config(info: ModelInfo, config: EngineConfig) -> AttentionConfig:
    """The attention of every layer.

    Raises:
        ValueError: the policy or execution is unknown, the geometry has no kernel, the device does not exist, or its
            matrix products are not batch-invariant, or not those that are quantised.
    """
    if config.batch_invariant and not can_pack(info.dtype, info.device):
        raise ValueError(
            f"batch_invariant=True: expected dtype float32 on a CPU, not {info.dtype} on {info.device}, where torch "
            f"multiplies another number of rows in another order; leave it out or change dtype or device"
        )
    if config.quantization is not None and not can_pack(info.dtype, info.device):
        raise ValueError(
            f"quantization={config.quantization!r}: expected dtype float32 on a CPU, not {info.dtype} on {info.device}"
            f"; leave it out or change dtype or device"
        )
    layer = info.geometry.layer
    attention = AttentionConfig(
        num_qo_heads=layer.num_qo_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim=layer.head_dim,
        page_size=config.page_size,
        dtype=info.dtype,
        kv_dtype=info.kv_dtype,
        sm_scale=layer.sm_scale,
        logits_soft_cap=layer.logits_soft_cap,
        sinks=layer.sinks,
        policy=config.policy,
        batch_invariant=config.batch_invariant,
        execution=config.execution,
        latent_dim=layer.latent_dim,
    )
    reasons = attention.supports(info.device)
    if reasons:
        raise ValueError(
            f"device={str(info.device)!r} cannot run this model's attention: {'; '.join(reasons)}; choose "
            f"another device or model"
        )
    return attention


def keys_per_token(info: ModelInfo) -> int | None:
    """How many keys a token attends to in the time that the rest of the model takes for it: see `WorkPrices.of_keys`.

    A layer of hidden size h multiplies each token by about 10 h² weights, and its attention multiplies each query with
    a key and its value, of the width of all heads. Layers with a window see few keys, so they are left out.
    """
    layer, windows = info.geometry.layer, info.geometry.windows
    width = layer.num_qo_heads * layer.head_dim
    hidden_size = int(getattr(info.config.get_text_config(), "hidden_size", width))
    num_full = windows.count(None)
    return max(1, 10 * hidden_size**2 * len(windows) // (2 * width * num_full)) if num_full else None


def page_sizes(info: ModelInfo, page_size: int) -> dict[str, Any]:
    """What the bytes of a page depend on."""
    layer = info.geometry.layer
    return {
        "num_layers": info.geometry.num_layers,
        "page_size": page_size,
        "num_kv_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "dtype": info.cache_dtype,
        "latent_dim": layer.latent_dim,
    }


def make_cache(info: ModelInfo, page_size: int, num_pages: int) -> KVCache:
    """The tensors of the KV pages."""
    return KVCache(num_pages=num_pages, device=info.device, **page_sizes(info, page_size))


def make_runner(
    model: Any, info: ModelInfo, config: EngineConfig, kv_cache: KVCache, max_model_len: int
) -> ModelRunner:
    """A model runner that has run one step. On a GPU it has plans for any step that the options allow and, unless
    `enforce_eager`, graphs.

    Runners may share a model and a KV cache.

    Raises:
        ValueError: the model's code fails in a step, or `batch_invariant` is not to be had with it.
    """
    if config.batch_invariant and (names := unpacked_weights(model)):
        raise ValueError(
            f"batch_invariant=True: expected a model whose products are all plain linear layers, but {names[0]} is "
            f"multiplied by the model's own code, in an order that depends on the batch; leave it out"
        )
    capacity = graphs = None
    if info.device.type == "cuda":
        capacity = Capacity(
            max_requests=config.max_num_seqs,
            max_query_tokens=step_tokens(config, max_model_len),
            max_pages_per_request=-(-max_model_len // config.page_size),
            num_pages=kv_cache.num_pages,
        )
        if not config.enforce_eager:
            sizes = graph_sizes(min(config.max_num_batched_tokens, LARGEST_GRAPH))
            graphs = Graphs(sizes, config.max_num_seqs, CudaCapture(info.device))
    attention = BatchAttention(attention_config(info, config), info.device, capacity)
    windows = info.geometry.windows
    expansion = _expansion(attention, info)
    runner = ModelRunner(model, attention, windows, kv_cache, config.max_num_seqs, max_model_len, graphs, expansion)
    _try_step(runner, info)
    return runner


def _expansion(attention: BatchAttention, info: ModelInfo) -> ChunkExpansion | None:
    """What chooses prompt chunks for the expanded form: of a latent attention on a CPU. A GPU's steps are graphs, which
    hold no chunks whose lengths vary."""
    widths = info.geometry.layer.expanded
    is_absorbed = attention.config.batch_invariant or attention.device.type != "cpu" or any(info.geometry.windows)
    return None if widths is None or is_absorbed else ChunkExpansion(attention.config, widths)


def _try_step(runner: ModelRunner, info: ModelInfo) -> None:
    try:
        runner.try_step()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # the model's own code can raise anything
        raise ValueError(
            f"model={str(info.files.path)!r}: a step of two tokens fails on {info.device} ({type(error).__name__}: "
            f"{error}); expected a model that runs in this version of transformers, so try another device or dtype"
        ) from error


def step_tokens(config: EngineConfig, max_model_len: int) -> int:
    """Most tokens of a step: `prefill_first` computes a whole prompt in one step."""
    longest = max_model_len if config.scheduler_policy == "prefill_first" else 0
    return max(config.max_num_batched_tokens, longest)
