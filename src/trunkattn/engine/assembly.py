"""Assembly of a model runner from a checked model and options: the attention, the KV cache, the graphs, and their
sizes."""

import os
from dataclasses import replace
from typing import Any

import torch

from trunkattn.attention import BatchAttention
from trunkattn.config import AttentionConfig, Capacity
from trunkattn.dtypes import dtype_name
from trunkattn.engine.config import DEFAULT_CACHE_BYTES, DEFAULT_GPU_SHARE, EngineConfig
from trunkattn.engine.graphs import LARGEST_GRAPH, CudaCapture, Graphs, graph_sizes
from trunkattn.engine.model.expanded import ChunkExpansion
from trunkattn.engine.model.loading import ModelInfo
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


def size_cache(info: ModelInfo, config: EngineConfig, model: Any | None = None) -> tuple[int, int]:
    """Pages of the KV cache, and most tokens of a sequence within the model's limit and the cache's.

    On a GPU without the loaded `model` both are upper bounds, which find bad options before the weights are loaded.

    Raises:
        ValueError: an option is too large, or the memory is too small for one sequence.
    """
    limit = info.max_model_len
    if config.max_model_len is not None:
        if config.max_model_len > limit:
            raise ValueError(
                f"max_model_len={config.max_model_len}: expected at most the model's limit, {limit} tokens"
            )
        limit = config.max_model_len
    page_bytes = KVCache.bytes_per_page(**_page_sizes(info, config.page_size))
    num_pages = config.num_pages
    if num_pages is None:
        useful = config.max_num_seqs * -(-limit // config.page_size)
        num_pages = min(_cache_bytes(info, config, model, limit) // page_bytes, useful)
    else:
        _check_free(info, "num_pages", num_pages, num_pages * page_bytes)
    capacity = num_pages * config.page_size
    if capacity < (config.max_model_len or 2):
        raise ValueError(
            f"the KV cache of {num_pages} pages holds {capacity} tokens: expected at least "
            f"{config.max_model_len or 2} for one sequence; raise num_pages or kv_cache_bytes (a page of "
            f"{config.page_size} tokens takes {page_bytes} bytes) or lower max_model_len"
        )
    return num_pages, min(limit, capacity)


def check_memory(info: ModelInfo) -> None:
    """Raises ValueError if the memory is too small for the model's weights. None is loaded; a CPU's system would end
    the process, or others, while they are."""
    num_bytes, free = info.geometry.num_parameters * info.dtype.itemsize, _free_bytes(info)
    if num_bytes > free:
        kind = "memory" if info.device.type == "cpu" else "free memory"
        raise ValueError(
            f"model={str(info.files.path)!r}: its {info.geometry.num_parameters:,} weights take {num_bytes} bytes as "
            f"{dtype_name(info.dtype)}, and the {kind} of {info.device} is {free} bytes; expected a "
            f"model that fits, or the sizes of the right one in its config.json"
        )


def no_room(info: ModelInfo, config: EngineConfig, asked: str) -> str:
    """The message that there is no memory for a model that is made. asked: the bytes that were asked for at last."""
    names = ["max_num_batched_tokens", "max_num_seqs"]
    names += [name for name in ("num_pages", "kv_cache_bytes", "gpu_memory_utilization") if getattr(config, name)]
    given = " and ".join(f"{name}={getattr(config, name)}" for name in names)
    free = "" if info.device.type == "cpu" else ", or more free memory there"
    return (
        f"{given}: expected values with which model={str(info.files.path)!r} fits into the memory of {info.device}, "
        f"where the last {asked} that it asked for are not free; lower one of them{free}"
    )


def keys_per_token(info: ModelInfo) -> int | None:
    """How many keys a token attends to in the time that the rest of the model takes for it: see `StepWork.of_keys`.

    A layer of hidden size h multiplies each token by about 10 h² weights, and its attention multiplies each query with
    a key and its value, of the width of all heads. Layers with a window see few keys, so they are left out.
    """
    layer, windows = info.geometry.layer, info.geometry.windows
    width = layer.num_qo_heads * layer.head_dim
    hidden_size = int(getattr(info.config.get_text_config(), "hidden_size", width))
    num_full = windows.count(None)
    return max(1, 10 * hidden_size**2 * len(windows) // (2 * width * num_full)) if num_full else None


def make_cache(info: ModelInfo, page_size: int, num_pages: int) -> KVCache:
    """The tensors of the KV pages."""
    return KVCache(num_pages=num_pages, device=info.device, **_page_sizes(info, page_size))


def _page_sizes(info: ModelInfo, page_size: int) -> dict[str, Any]:
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
            max_query_tokens=_step_tokens(config, max_model_len),
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


def _step_tokens(config: EngineConfig, max_model_len: int) -> int:
    """Most tokens of a step: `prefill_first` computes a whole prompt in one step."""
    longest = max_model_len if config.scheduler_policy == "prefill_first" else 0
    return max(config.max_num_batched_tokens, longest)


def _cache_bytes(info: ModelInfo, config: EngineConfig, model: Any | None, max_model_len: int) -> int:
    """Most bytes that the KV cache may have."""
    if info.device.type == "cpu":
        if config.gpu_memory_utilization is not None:
            raise ValueError(
                f"gpu_memory_utilization={config.gpu_memory_utilization}: expected None on a CPU; use kv_cache_bytes"
            )
        most = _free_bytes(info) // 2
        if config.kv_cache_bytes is not None and config.kv_cache_bytes > most:
            raise ValueError(
                f"kv_cache_bytes={config.kv_cache_bytes}: expected at most half of the memory, {most} bytes"
            )
        return config.kv_cache_bytes or min(DEFAULT_CACHE_BYTES, most)
    if config.kv_cache_bytes is not None:
        _check_free(info, "kv_cache_bytes", config.kv_cache_bytes, config.kv_cache_bytes)
        return config.kv_cache_bytes
    step_bytes = 0 if model is None else _step_bytes(model, info, config, max_model_len)
    share = DEFAULT_GPU_SHARE if config.gpu_memory_utilization is None else config.gpu_memory_utilization
    return int(share * max(0, _free_bytes(info) - step_bytes))


def _step_bytes(model: Any, info: ModelInfo, config: EngineConfig, max_model_len: int) -> int:
    """Bytes that the largest step needs besides weights and KV cache, measured by running one of padding tokens."""
    before = torch.cuda.memory_allocated(info.device)
    torch.cuda.reset_peak_memory_stats(info.device)
    eager = replace(config, enforce_eager=True)
    runner = make_runner(model, info, eager, make_cache(info, config.page_size, 1), max_model_len)
    runner.warm_up([_step_tokens(config, max_model_len)])
    return torch.cuda.max_memory_allocated(info.device) - before


def _free_bytes(info: ModelInfo) -> int:
    """Free bytes of a GPU, or all of a CPU's memory."""
    if info.device.type == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(info.device)[0]


def _check_free(info: ModelInfo, name: str, value: int, num_bytes: int) -> None:
    free = _free_bytes(info)
    if num_bytes > free:
        kind = "memory" if info.device.type == "cpu" else "free memory"
        raise ValueError(
            f"{name}={value}: expected at most the {kind} of {info.device}, {free} bytes, but it needs {num_bytes}"
        )
