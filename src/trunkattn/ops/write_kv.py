"""Writes new keys and values into a paged cache (PagedAttention, Kwon et al. 2023, https://arxiv.org/abs/2309.06180)."""

from typing import Any, NamedTuple

import torch
from torch import library

from trunkattn.cpu.write_kv import write_on_cpu
from trunkattn.derivatives import check_none
from trunkattn.dtypes import KV_KINDS
from trunkattn.gpu.cards import E4M3_NEEDS, card_at
from trunkattn.validate import (
    check_apart,
    check_dense,
    check_disjoint,
    check_memory,
    check_plain,
    described,
    shape_text,
)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Stores token i's key and value in slot `slot_mapping[i]` = page * page_size + offset; slot -1 is skipped.

    All tensors are on the CPU or on one GPU, and new values are no part of a cache. Values are cast to the cache's
    dtype. On a GPU the host does not look at the slots, and the kernel skips one outside the cache. Source:
    PagedAttention, https://arxiv.org/abs/2309.06180, §4.

    Args:
        k: [num_tokens, num_kv_heads, head_dim].
        v: [num_tokens, num_kv_heads, head_dim_v].
        k_cache, v_cache: [num_pages, page_size, num_kv_heads, head_dim or head_dim_v], any strides with a contiguous
            last dimension; float32, bfloat16, float16, float8_e4m3fn or float8_e5m2.
        slot_mapping: [num_tokens] int64.

    Raises:
        ValueError: a shape, stride or device does not fit, new values lie in a cache or one cache in the other, a
            tensor requires a gradient where torch records them or has a tangent or, on a CPU, a slot lies outside the
            cache. Nothing is written then.
        TypeError: an argument is not a tensor, or has a dtype that is not accepted.

    Example:
        >>> k_cache = torch.zeros(4, 16, 1, 8)  # 4 pages of 16 tokens
        >>> v_cache = torch.zeros(4, 16, 1, 8)
        >>> k, v = torch.ones(2, 1, 8), torch.ones(2, 1, 8)
        >>> write_kv(k, v, k_cache, v_cache, torch.tensor([2 * 16 + 5, -1]))  # page 2, offset 5; the second is skipped
        >>> int(k_cache.sum())
        8
    """
    _check_all(_New("k", k, "k_cache", k_cache), _New("v", v, "v_cache", v_cache), slot_mapping)
    write = torch.ops.trunkattn.write_kv if torch.compiler.is_compiling() else write_known
    write(k, v, k_cache, v_cache, slot_mapping)


def write_latent(latent: torch.Tensor, rope: torch.Tensor, cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Stores token i's latent and rope columns in slot `slot_mapping[i]` of a latent cache, as `write_kv` does.

    Args:
        latent: [num_tokens, latent_dim], the columns that are keys and values.
        rope: [num_tokens, head_dim - latent_dim], the columns that are only keys.
        cache: [num_pages, page_size, head_dim], any strides with a contiguous last dimension, of a dtype of `write_kv`.
        slot_mapping: [num_tokens] int64.

    Raises:
        ValueError, TypeError: as `write_kv`; nothing is written then.

    Example:
        >>> cache = torch.zeros(4, 16, 8 + 2)  # 4 pages of 16 tokens
        >>> write_latent(torch.ones(1, 8), 2 * torch.ones(1, 2), cache, torch.tensor([2 * 16 + 5]))  # page 2, offset 5
        >>> cache[2, 5].tolist()
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0]
    """
    _check_slots(slot_mapping)
    num_tokens = slot_mapping.shape[0]  # len() would be a constant where torch.export leaves it open
    for name, tensor, axes, first in (
        ("latent", latent, ("num_tokens", "latent_dim"), num_tokens),
        ("rope", rope, ("num_tokens", "head_dim - latent_dim"), num_tokens),
        ("cache", cache, ("num_pages", "page_size", "head_dim"), None),
    ):
        _check_tensor(name, tensor)
        if tensor.dim() != len(axes) or (first is not None and tensor.shape[0] != first):
            expected = shape_text(axes, (first, *[None] * (len(axes) - 1)))
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {expected}")
    width = latent.shape[1]
    if width + rope.shape[1] != cache.shape[2]:
        raise ValueError(
            f"cache has rows of {cache.shape[2]} numbers: expected {width} + {rope.shape[1]}, those of latent and rope"
        )
    rows = cache.unsqueeze(2)
    keys_and_values = _New("latent", latent.unsqueeze(1), "cache", rows[..., :width])
    keys = _New("rope", rope.unsqueeze(1), "cache", rows[..., width:])
    _check_all(keys_and_values, keys, slot_mapping)
    if torch.compiler.is_compiling():
        torch.ops.trunkattn.write_latent(latent, rope, cache, slot_mapping)
    else:
        write_known(keys_and_values.tensor, keys.tensor, keys_and_values.cache, keys.cache, slot_mapping)


def write_known(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Does what `write_kv` does for tensors that are known to fit: on a CPU it checks the slots, and nothing else.

    The embedded engine calls it, which makes the cache and the slots itself and has checked a model's shapes.
    """
    if k.is_cuda:
        from trunkattn.gpu.portable.write_kv import write_on_gpu  # needs Triton, which a CPU does not

        with torch.cuda.device(k.device):  # launches go to the current device
            write_on_gpu(k, v, k_cache, v_cache, slot_mapping.contiguous())
    else:
        write_on_cpu(k, v, k_cache, v_cache, slot_mapping)


class _New(NamedTuple):
    """New keys or values [num_tokens, num_kv_heads, width], the cache that they go to, and the names of both."""

    name: str
    tensor: torch.Tensor
    cache_name: str
    cache: torch.Tensor


def _check_tensor(name: str, tensor: Any) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {described(tensor)}: expected a torch.Tensor")
    check_dense(name, tensor)


def _check_slots(slot_mapping: Any) -> None:
    _check_tensor("slot_mapping", slot_mapping)
    if slot_mapping.dtype != torch.int64:
        raise TypeError(f"slot_mapping has dtype {slot_mapping.dtype}: expected torch.int64; use slot_mapping.long()")
    if slot_mapping.dim() != 1:
        raise ValueError(f"slot_mapping has shape {tuple(slot_mapping.shape)}: expected (num_tokens)")


def _check_all(first: _New, second: _New, slot_mapping: torch.Tensor) -> None:
    """Checks everything that the host can see without reading a slot."""
    named = {new.name: new.tensor for new in (first, second)} | {new.cache_name: new.cache for new in (first, second)}
    for name, tensor in named.items():
        _check_tensor(name, tensor)
    _check_slots(slot_mapping)
    device = first.tensor.device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{first.name} is on {device}: expected cpu or cuda")
    for name, tensor in {**named, "slot_mapping": slot_mapping}.items():
        if tensor.device != device:
            raise ValueError(f"{name} is on {tensor.device}: expected {device}, like {first.name}")
        check_none(name, tensor, "none passes through a cache; use torch.no_grad() and plain tensors")
    for new in (first, second):
        _check(new, slot_mapping.shape[0])
    if first.cache.shape[:2] != second.cache.shape[:2]:
        raise ValueError(
            f"{second.cache_name} has shape {tuple(second.cache.shape)}: expected the num_pages and page_size of "
            f"{first.cache_name}, {tuple(first.cache.shape[:2])}"
        )
    if torch.compiler.is_compiling():  # the op sees where tensors lie, and no graph sorts symbols
        return
    for name, tensor in {**named, "slot_mapping": slot_mapping}.items():
        check_plain(name, tensor)
        check_memory(name, tensor)
    read = [(first.name, first.tensor), (second.name, second.tensor), ("slot_mapping", slot_mapping)]
    for new in (first, second):
        check_apart(new.cache_name, new.cache)
        check_disjoint(new.cache_name, new.cache, read)
    check_disjoint(second.cache_name, second.cache, [(first.cache_name, first.cache)])  # they often interleave


def _check(new: _New, num_tokens: int) -> None:
    cache = new.cache
    if cache.dim() != 4 or (cache.shape[3] > 1 and cache.stride(3) != 1):
        shape, strides = tuple(cache.shape), cache.stride()
        raise ValueError(
            f"{new.cache_name} has shape {shape}, strides {strides}: expected 4 dimensions, the last contiguous: "
            "(num_pages, page_size, num_kv_heads, head_dim)"
        )
    if new.tensor.is_complex():
        raise TypeError(f"{new.name} has dtype {new.tensor.dtype}: expected real numbers")
    if cache.dtype not in KV_KINDS:
        raise TypeError(f"{new.cache_name} has dtype {cache.dtype}: expected one of {', '.join(map(str, KV_KINDS))}")
    if cache.dtype == torch.float8_e4m3fn and cache.is_cuda and not card_at(cache.device).has_e4m3:
        raise TypeError(f"{new.cache_name} has dtype {cache.dtype}: {E4M3_NEEDS}")
    shape = (num_tokens, *cache.shape[2:])
    if tuple(new.tensor.shape) != shape:
        expected = (
            f"{shape_text(('num_tokens', 'num_kv_heads', 'head_dim'), shape)}, by {new.cache_name} and slot_mapping"
        )
        raise ValueError(f"{new.name} has shape {tuple(new.tensor.shape)}: expected {expected}")


# `torch.compile` takes each into its graph as one op of torch, which checks everything again when it runs.
for _write, _arguments in (
    (write_kv, "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()"),
    (write_latent, "(Tensor latent, Tensor rope, Tensor(a!) cache, Tensor slot_mapping) -> ()"),
):
    _name = f"trunkattn::{_write.__name__}"
    library.define(_name, _arguments, tags=(torch.Tag.needs_exact_strides,))
    for _device in ("cpu", "cuda"):
        library.impl(_name, _device)(_write)
    library.register_fake(_name)(lambda *given: None)
