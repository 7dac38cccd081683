"""What the portable attention kernels take, by name: the tensors of a layer, their strides, and constants.

A launch passes NamedTuples: the kernel reads fields by name, and Triton's Python side is faster than with a parameter
for each number. A NamedTuple of constants is one `tl.constexpr` parameter. To use such a constant as a dimension, a
kernel first gives it a name of its own (`BLOCK_M: tl.constexpr = TILE.block_m`): Triton 3.6 reads a plain number from
the NamedTuple, which shapes do not take.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

import torch

from trunkattn.gpu.launch_order import LaunchOptions
from trunkattn.gpu.layer import Geometry, Tensors
from trunkattn.numerics import padded_head_dim


class Operands(NamedTuple):
    """The tensors of a layer, as `gpu.layer.Tensors` describes them."""

    q: Any
    k_cache: Any
    v_cache: Any
    out: Any
    lse: Any
    partial: Any
    partial_lse: Any


class Modifiers(NamedTuple):
    """Scales and options that change logits and outputs. `logit_scale` and `v_scale` have one number for each KV head,
    and `sinks` one for each query head. A query sees the last `window` tokens up to itself."""

    logit_scale: Any
    v_scale: Any
    sinks: Any
    soft_cap: Any
    window: Any


class Strides(NamedTuple):
    """Strides of a layer's tensors, in elements. The head dimension is contiguous."""

    q_token: Any
    q_head: Any
    out_token: Any
    out_head: Any
    k_page: Any
    k_token: Any
    k_head: Any
    v_page: Any
    v_token: Any
    v_head: Any


class Shape(NamedTuple):
    """Constants of an attention. `padded_dim` and `padded_dim_v` are the widths of the tiles that hold `head_dim` and
    `head_dim_v`."""

    num_qo_heads: int
    num_kv_heads: int
    group_size: int
    page_size: int
    head_dim: int
    head_dim_v: int
    padded_dim: int
    padded_dim_v: int


class Features(NamedTuple):
    """Constants that turn code on. `masked` says that queries of a sequence see different tokens. `precision` is that
    of matrix products of float32."""

    masked: bool
    soft_cap: bool
    sinks: bool
    return_lse: bool
    precision: str


def operands(t: Tensors) -> Operands:
    """Returns the kernels' operands, the tensors of a layer."""
    return Operands(
        q=t.q, k_cache=t.k_cache, v_cache=t.v_cache, out=t.out, lse=t.lse, partial=t.partial, partial_lse=t.partial_lse
    )


def modifiers(t: Tensors, geometry: Geometry) -> Modifiers:
    """Returns the modifiers of a layer."""
    return Modifiers(t.logit_scale, t.v_scale, t.sinks, geometry.soft_cap or 0.0, geometry.window)


# The arguments of the decode and prefill kernels that differ from layer to layer.
LAYER: Final = ("operands", "modifiers")


def of_layer(geometry: Geometry) -> Callable[[Tensors], tuple[Operands, Modifiers]]:
    """Returns a function that makes the arguments `LAYER` of a layer."""
    return lambda t: (operands(t), modifiers(t, geometry))


def pdl(options: LaunchOptions) -> dict[str, Any]:
    """Returns the argument PDL of a kernel, and how it is launched."""
    return {"PDL": options.pdl} | ({"launch_pdl": True} if options.pdl.wait else {})


def strides(t: Tensors) -> Strides:
    """Returns the strides of a layer's tensors, in elements."""
    return Strides(*t.q.stride()[:2], *t.out.stride()[:2], *t.k_cache.stride()[:3], *t.v_cache.stride()[:3])


def shape(geometry: Geometry) -> Shape:
    """Returns the constants of an attention."""
    return Shape(
        num_qo_heads=geometry.num_qo_heads,
        num_kv_heads=geometry.num_kv_heads,
        group_size=geometry.group_size,
        page_size=geometry.page_size,
        head_dim=geometry.head_dim,
        head_dim_v=geometry.head_dim_v,
        padded_dim=padded_head_dim(geometry.head_dim),
        padded_dim_v=padded_head_dim(geometry.head_dim_v),
    )


def features(geometry: Geometry, dtype: torch.dtype, return_lse: bool) -> Features:
    """Returns the features of an attention whose queries have this dtype."""
    precision = "ieee" if dtype == torch.float32 else "tf32"
    return Features(geometry.masked, geometry.soft_cap is not None, geometry.sinks, return_lse, precision)
