"""The arguments of `BatchAttention.run`: what the host can see of them is checked before anything is computed."""

import math
from numbers import Real
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from trunkattn.config import AttentionConfig
from trunkattn.derivatives import check_none
from trunkattn.numerics import GPU_OFFSET_END, MAX_INT32
from trunkattn.validate import (
    check_apart,
    check_dense,
    check_disjoint,
    check_memory,
    check_plain,
    described,
    shape_text,
    written,
)

Scale = float | torch.Tensor | None

_Q_AXES: Final = ("num_query_tokens", "num_qo_heads")
_CACHE_AXES: Final = ("num_pages", "page_size", "num_kv_heads")
_AXES: Final = MappingProxyType(
    {
        "q": (*_Q_AXES, "head_dim"),
        "q[0]": (*_Q_AXES, "latent_dim"),
        "q[1]": (*_Q_AXES, "head_dim - latent_dim"),
        "k_cache": (*_CACHE_AXES, "head_dim"),
        "v_cache": (*_CACHE_AXES, "head_dim_v"),
        "out": (*_Q_AXES, "head_dim_v"),
        "sinks": ("num_qo_heads",),
    }
)


class LayerInputs(NamedTuple):
    """The arguments of `BatchAttention.run`."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor | None = None
    q_scale: Scale = None
    k_scale: Scale = None
    v_scale: Scale = None
    sinks: torch.Tensor | None = None
    return_lse: bool = False
    q_rope: torch.Tensor | None = None


def of_layer(config: AttentionConfig, arguments: LayerInputs) -> LayerInputs:
    """The arguments of `run`, with keys and values as two tensors [pages, page_size, num_kv_heads, ...]. For a latent
    cache both are views of it, and if the caller gives a `v_cache`, it must be that view. arguments: not yet
    checked."""
    q: Any = arguments.q
    k_cache: Any = arguments.k_cache
    v_cache: Any = arguments.v_cache
    latent_dim = config.latent_dim
    if latent_dim is None:
        if isinstance(q, tuple):
            raise TypeError("q is a pair: expected one tensor, for the configuration has no latent_dim")
        if v_cache is None:
            raise ValueError("v_cache is missing: expected a tensor, or a configuration with latent_dim")
        return arguments
    q_rope = None
    if isinstance(q, (tuple, list)):
        if not isinstance(q, tuple) or len(q) != 2:
            raise TypeError(f"q is {described(q)} of {len(q)}: expected a tensor or a tuple of latent and rope columns")
        q, q_rope = q
    if not isinstance(k_cache, torch.Tensor):
        raise TypeError(f"k_cache is {described(k_cache)}: expected a torch.Tensor")
    check_dense("k_cache", k_cache)
    if k_cache.dim() != 3 or k_cache.shape[1:] != (config.page_size, config.head_dim):
        raise ValueError(
            f"k_cache has shape {tuple(k_cache.shape)}: expected (num_pages, page_size={config.page_size}, "
            f"head_dim={config.head_dim}), rows of a latent cache, the first latent_dim={latent_dim} columns of which "
            "are the values"
        )
    values = k_cache[..., :latent_dim]
    if v_cache is not None and not _is_same_view(v_cache, values):
        raise ValueError(
            f"v_cache is another tensor than the first {latent_dim} columns of k_cache: expected None, for a latent "
            "cache holds the values; a model without latent attention needs a configuration without latent_dim"
        )
    return arguments._replace(
        q=q,
        k_cache=k_cache.unsqueeze(2),
        v_cache=values.unsqueeze(2),
        v_scale=_of_rows(arguments.k_scale, arguments.v_scale),
        q_rope=q_rope,
    )


def _of_rows(k_scale: Scale, v_scale: Scale) -> Scale:
    """The scale of a latent cache's rows, which serve as keys and as values."""
    numbers = [scale for scale in (k_scale, v_scale) if isinstance(scale, Real)]
    if v_scale is None or v_scale is k_scale or (len(numbers) == 2 and numbers[0] == numbers[1]):
        return k_scale
    raise ValueError(
        f"v_scale={v_scale}: expected None or k_scale={k_scale}, for a row of a latent cache is a key and a value"
    )


def _is_same_view(tensor: Any, view: torch.Tensor) -> bool:
    return isinstance(tensor, torch.Tensor) and (tensor.data_ptr(), tensor.shape, tensor.stride()) == (
        view.data_ptr(),
        view.shape,
        view.stride(),
    )


def check_layer(config: AttentionConfig, device: torch.device, num_query_tokens: int, inputs: LayerInputs) -> None:
    """Checks everything that the host can see of the arguments of `run` without waiting for a device."""
    if not isinstance(inputs.return_lse, bool):
        raise TypeError(f"return_lse={inputs.return_lse!r}: expected a bool")
    k_cache, v_cache, out, sinks = inputs.k_cache, inputs.v_cache, inputs.out, inputs.sinks
    heads, dim, width = config.num_kv_heads, config.head_dim, config.value_dim
    q_shape = (num_query_tokens, config.num_qo_heads)
    if device.type == "cuda" and math.prod(q_shape) > MAX_INT32:
        expected = f"at most {MAX_INT32} rows on a GPU; compute fewer requests at a time"
        raise ValueError(f"q has {num_query_tokens} tokens of {config.num_qo_heads} heads: expected {expected}")
    if inputs.q_rope is None:
        _tensor("q", inputs.q, (*q_shape, dim), config.dtype, device)
    else:
        _tensor("q[0]", inputs.q, (*q_shape, width), config.dtype, device)
        _tensor("q[1]", inputs.q_rope, (*q_shape, dim - width), config.dtype, device)
    _tensor("k_cache", k_cache, (None, config.page_size, heads, dim), config.cache_dtype, device)
    _tensor("v_cache", v_cache, (k_cache.shape[0], config.page_size, heads, width), config.cache_dtype, device)
    for name, tensor in (("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.stride(3) != 1 and tensor.shape[3] > 1:
            raise ValueError(f"{name} has strides {tensor.stride()}: expected a contiguous last dimension")
        if device.type == "cuda" and config.page_size * tensor.stride(1) > GPU_OFFSET_END:
            expected = f"tokens of a page within {GPU_OFFSET_END} elements on a GPU; use {name}.contiguous()"
            raise ValueError(f"{name} has strides {tensor.stride()}: expected {expected}")
    if out is not None:
        _tensor("out", out, (num_query_tokens, config.num_qo_heads, width), config.dtype, device)
    if (sinks is not None) != config.sinks:
        raise ValueError(
            f"sinks is {'missing' if config.sinks else 'given'}: the configuration has sinks={config.sinks}, "
            f"so expected {'a tensor' if config.sinks else 'None'}"
        )
    if sinks is not None:
        _tensor("sinks", sinks, (config.num_qo_heads,), None, device)
        if sinks.itemsize < 2:  # not every card converts them
            raise TypeError(f"sinks has dtype {sinks.dtype}: expected a floating dtype of 16 bits or more")
    for name in ("q_scale", "k_scale", "v_scale"):
        _check_scale(name, getattr(inputs, name), heads, device)
    _check_product(config, inputs, device)
    if out is not None and not torch.compiler.is_compiling():  # the op sees where tensors lie
        check_apart("out", out)
        given = zip(inputs._fields, inputs, strict=True)
        read = [(name, each) for name, each in given if name != "out" and isinstance(each, torch.Tensor)]
        check_disjoint("out", out, read)


def _tensor(
    name: str, tensor: Any, shape: tuple[int | None, ...], dtype: torch.dtype | None, device: torch.device
) -> None:
    """Checks a tensor. shape: the first size may be None, which stands for any."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} is {described(tensor)}: expected a torch.Tensor")
    check_dense(name, tensor)
    if tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}: expected {device}, like the BatchAttention")
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{name} has dtype {tensor.dtype}: expected {dtype}, as in the AttentionConfig")
    if dtype is None and not tensor.is_floating_point():
        raise TypeError(f"{name} has dtype {tensor.dtype}: expected a floating dtype")
    check_none(name, tensor, "this attention has no derivatives; use torch.no_grad() and plain tensors")
    given, wanted_shape = (tensor.shape[1:], shape[1:]) if shape and shape[0] is None else (tensor.shape, shape)
    if tensor.dim() != len(shape) or given != wanted_shape:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}: expected {shape_text(_AXES[name], shape)}")
    if not torch.compiler.is_compiling():  # a traced tensor has no memory, and the op checks the real one
        check_plain(name, tensor)
        check_memory(name, tensor)


def _check_scale(name: str, value: Any, num_kv_heads: int, device: torch.device) -> None:
    if value is None:
        return
    if isinstance(value, torch.Tensor):
        if value.numel() not in (1, num_kv_heads):
            raise ValueError(f"{name} has {value.numel()} elements: expected 1 or num_kv_heads={num_kv_heads}")
        _tensor(name, value, tuple(value.shape), None, device)
        # a GPU would have to be waited for, and a traced graph has no values
        hidden = device.type != "cpu" or torch.compiler.is_compiling()
        finite = hidden or bool(value.float().isfinite().all())
    elif isinstance(value, Real) and not isinstance(value, bool):
        number: Any = value if isinstance(value, int) else float(value)  # an int may be too large for a float
        finite = bool(abs(number) <= torch.finfo(torch.float32).max)
    else:
        raise TypeError(f"{name} is {described(value)}: expected a number, a tensor or None")
    if not finite:
        given = written(value) if isinstance(value, int) else value
        raise ValueError(f"{name}={given}: expected finite numbers in the range of float32")


def _check_product(config: AttentionConfig, inputs: LayerInputs, device: torch.device) -> None:
    """Checks that the product of all factors of the logits is finite. Scales on a GPU are not checked. Those of a
    traced graph are checked when it runs."""
    if (inputs.q_scale is None and inputs.k_scale is None) or torch.compiler.is_compiling():
        return
    product: Any = config.logit_scale
    for value in (None, inputs.q_scale, inputs.k_scale):
        if isinstance(value, torch.Tensor):
            product = product * value.detach().double().reshape(-1).numpy() if device.type == "cpu" else product
        elif value is not None:
            product = product * float(value)
        if np.max(np.abs(product)) > torch.finfo(torch.float32).max:
            scales = f"q_scale={inputs.q_scale}, k_scale={inputs.k_scale}, sm_scale={config.sm_scale}"
            raise ValueError(f"{scales}: expected scales whose product is in the range of float32")


def scale_array(value: Scale, num_kv_heads: int) -> NDArray[np.float32]:
    """A checked scale on the CPU as [num_kv_heads] float32."""
    if isinstance(value, torch.Tensor):
        array = value.detach().to(torch.float32).reshape(-1).numpy()
    else:
        array = np.array([1.0 if value is None else value], np.float32)
    return np.broadcast_to(array, num_kv_heads).astype(np.float32)


def scale_tensor(value: float | torch.Tensor) -> float | torch.Tensor:
    """A checked scale as a factor of a [num_kv_heads] tensor: torch cannot multiply by a Fraction or a huge integer."""
    return value.detach().to(torch.float32).reshape(-1) if isinstance(value, torch.Tensor) else float(value)
