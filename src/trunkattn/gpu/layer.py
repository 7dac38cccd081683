"""The arguments of launches: the geometry of an attention, and the tensors of one layer."""

from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import torch

_TMA_BYTES: Final = 16  # an address or a stride in a TMA descriptor is a multiple of this


@dataclass(frozen=True)
class Geometry:
    """The sizes and options of an attention and a step that launches depend on."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    page_size: int
    segment_size: int  # tokens
    window: int
    masked: bool  # queries of one sequence may see different tokens, so positions are compared
    soft_cap: float | None
    sinks: bool

    @property
    def group_size(self) -> int:
        """Query heads of a KV head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class Tensors:
    """One layer. q, out [T, Hq, D / Dv]; caches [pages, page_size, Hkv, D / Dv]; the rest float32.

    lse [T, Hq]; partial [slots, Hq, Dv], partial_lse [slots, Hq]; logit_scale [Hkv], log2(e) included unless there is a
    soft cap; v_scale [Hkv]; sinks [Hq] of any floating dtype. Of a latent cache q has Dv columns and q_rope the others,
    v_cache is a view of k_cache, and scales are for groups of heads.
    """

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    partial: torch.Tensor
    partial_lse: torch.Tensor
    logit_scale: torch.Tensor
    v_scale: torch.Tensor
    sinks: torch.Tensor
    q_rope: torch.Tensor | None = None


class Pdl(NamedTuple):
    """Programmatic dependent launch. trigger: this kernel lets the next one start early. wait: this kernel may start
    before the one ahead has ended, and waits for it before it first reads a result, at the latest before it ends."""

    trigger: Any
    wait: Any


def why_not_by_tma(name: str, cache: torch.Tensor, dims: int) -> list[str]:
    """Why TMA, which reads 16 bytes at a time, cannot read a cache; empty: it can. Rows must be contiguous, and the
    address and the strides of the first `dims` dimensions multiples of 16 bytes."""
    reasons = []
    if cache.data_ptr() % _TMA_BYTES:
        reasons.append(f"{name} begins at an address that is no multiple of {_TMA_BYTES} bytes")
    strides = [stride * cache.itemsize for stride in cache.stride()[:dims]]
    if cache.stride(-1) != 1 or any(stride % _TMA_BYTES for stride in strides):
        reasons.append(f"{name} has strides {cache.stride()}: expected multiples of {_TMA_BYTES} bytes, and 1")
    return reasons
