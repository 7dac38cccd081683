"""What all Hopper attention kernels take, and how it is made.

The kernels take `(layer, k_desc, v_desc, work, ..., C)`. These are the tensors of one layer, the TMA descriptors of its
caches, the arrays of a plan, and constants. Only the first three change from layer to layer.

Two limits of Triton 3.6 to 3.9 shape these arguments. A TMA descriptor inside a tuple is not expanded, so `k_desc` and
`v_desc` are parameters of their own. `do_not_specialize` does not reach into a tuple, so what differs between launches
of one kernel is passed as separate numbers.
"""

from typing import Any, Final, NamedTuple, TypedDict

import torch
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from trunkattn.gpu.hopper.common import BOX_DIMS, BOX_TOKENS
from trunkattn.gpu.layer import Geometry, Tensors

_TMA_BOX: Final = (1, BOX_TOKENS.value, 1, BOX_DIMS.value)
_TMA_LAYOUT: Final = gl.NVMMASharedLayout(128, 16, 4)


class Layer(NamedTuple):
    """Tensors of one layer, and their strides.

    q and out are [T, Hq, D]. The other tensors are float32: lse [T, Hq], partial [slots, Hq, D], partial_lse
    [slots, Hq], logit_scale and v_scale [Hkv], and sinks [Hq]. logit_scale includes log2(e), unless logits are
    capped."""

    q: Any
    out: Any
    lse: Any
    partial: Any
    partial_lse: Any
    logit_scale: Any
    v_scale: Any
    sinks: Any
    q_token_stride: Any
    q_head_stride: Any
    out_token_stride: Any
    out_head_stride: Any
    k_page_stride: Any
    k_token_stride: Any
    k_head_stride: Any
    v_page_stride: Any
    v_token_stride: Any
    v_head_stride: Any


class AttentionConstants(TypedDict):
    """Constants that every kernel is compiled for. `head_dim` is that of a head in memory. `soft_cap` is the soft cap
    of logits, or 0 for none."""

    num_qo_heads: int
    num_kv_heads: int
    group_size: int
    head_dim: int
    page_size: int
    soft_cap: float
    sinks: bool
    return_lse: bool


def attention_constants(geometry: Geometry, return_lse: bool) -> AttentionConstants:
    """Returns these constants of an attention."""
    return AttentionConstants(
        num_qo_heads=geometry.num_qo_heads,
        num_kv_heads=geometry.num_kv_heads,
        group_size=geometry.group_size,
        head_dim=geometry.head_dim,
        page_size=geometry.page_size,
        soft_cap=geometry.soft_cap or 0.0,
        sinks=geometry.sinks,
        return_lse=return_lse,
    )


def layer_of(t: Tensors) -> Layer:
    """Returns the argument `layer` of the kernels."""
    return Layer(
        q=t.q,
        out=t.out,
        lse=t.lse,
        partial=t.partial,
        partial_lse=t.partial_lse,
        logit_scale=t.logit_scale,
        v_scale=t.v_scale,
        sinks=t.sinks,
        q_token_stride=t.q.stride(0),
        q_head_stride=t.q.stride(1),
        out_token_stride=t.out.stride(0),
        out_head_stride=t.out.stride(1),
        k_page_stride=t.k_cache.stride(0),
        k_token_stride=t.k_cache.stride(1),
        k_head_stride=t.k_cache.stride(2),
        v_page_stride=t.v_cache.stride(0),
        v_token_stride=t.v_cache.stride(1),
        v_head_stride=t.v_cache.stride(2),
    )


def tma_descriptors(t: Tensors) -> tuple[TensorDescriptor, TensorDescriptor]:
    """Returns the arguments `k_desc` and `v_desc` of the kernels. A TMA box holds 16 tokens of a page and 64 dims of a
    head. Beyond the last dim of a head TMA fills the box with zeros."""
    return _tma_descriptor(t.k_cache), _tma_descriptor(t.v_cache)


def _tma_descriptor(cache: torch.Tensor) -> TensorDescriptor:
    return TensorDescriptor(cache, list(cache.shape), list(cache.stride()), [*_TMA_BOX], _TMA_LAYOUT)


LAYER: Final = ("layer", "k_desc", "v_desc")  # the arguments of the kernels that differ from layer to layer


def of_layer(t: Tensors) -> tuple[Layer, TensorDescriptor, TensorDescriptor]:
    """Returns the arguments that `LAYER` names."""
    return layer_of(t), *tma_descriptors(t)
