"""The memory of an engine: pages of its KV cache that fit, and the messages about a model or a cache that does not."""

import os
from dataclasses import replace
from typing import Any

import torch

from trunkattn.dtypes import dtype_name
from trunkattn.engine.assembly import make_cache, make_runner, page_sizes, step_tokens
from trunkattn.engine.config import DEFAULT_CACHE_BYTES, DEFAULT_GPU_SHARE, EngineConfig
from trunkattn.engine.model.inspection import ModelInfo
from trunkattn.kv_cache.tensors import KVCache


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
    page_bytes = KVCache.bytes_per_page(**page_sizes(info, config.page_size))
    num_pages = config.num_pages
    if num_pages is None:
        useful = config.max_num_seqs * -(-limit // config.page_size)
        num_pages = min(_cache_bytes(info, config, model, limit) // page_bytes, useful)
    else:
        _check_free(info, "num_pages", num_pages, num_pages * page_bytes)
    capacity = num_pages * config.page_size
    if capacity < (config.max_model_len or 2):
        sizes = ("num_pages", "kv_cache_bytes", "gpu_memory_utilization")
        raised = next((name for name in sizes if getattr(config, name)), "kv_cache_bytes")
        lowered = "" if config.max_model_len is None else " or lower max_model_len"
        raise ValueError(
            f"the KV cache of {num_pages} pages holds {capacity} tokens: expected at least "
            f"{config.max_model_len or 2} for one sequence; raise {raised} (a page of {config.page_size} tokens takes "
            f"{page_bytes} bytes){lowered}"
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
    runner.warm_up([step_tokens(config, max_model_len)])
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
