"""`AttentionConfig` and `Capacity`: the shape and options of an attention, and upper bounds of a step."""

import math
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Final

import torch

from trunkattn.dtypes import (
    COMPUTE_DTYPES,
    EXECUTIONS,
    HOPPER_GROUPS,
    KV_KINDS,
    NO_E4M3,
    POLICIES,
    fits_hopper,
    has_e4m3,
)
from trunkattn.validate import check_int, check_positive

_WIDEST_ON_GPU: Final = 256
_NO_OVERLAP: Final = (
    "expected 'auto' or 'serial', for the kernel that computes prompt chunks and decodes at once takes queries and "
    "caches of one 16-bit dtype, heads of 128, pages of whole 16 tokens and 1, 2, 4, 8 or 16 query heads a KV head, "
    "with policy='auto' and without soft cap, sinks and batch_invariant, on compute capability 9.0"
)
_NARROW_ON_GPU: Final = 128
_LARGEST_GROUP_ON_GPU: Final = (64, 32)  # rows of the tallest tile: head_dim up to 128 and 16-bit caches, and others
_MOST_TOKENS: Final = torch.iinfo(torch.int32).max  # places in a cache are int32


@dataclass(frozen=True)
class Capacity:
    """Upper bounds of a step, each at least 1; plans raise ValueError beyond them.

    max_query_len: query tokens of one request, None for max_query_tokens; 1 for decoding alone, which a GPU does
    without causal masks; with few it does without a launch for prompt chunks. A policy other than `auto` may cut a
    batch within these bounds into more pieces than a plan of fixed size holds; then it raises too.
    """

    max_requests: int
    max_query_tokens: int
    max_pages_per_request: int
    num_pages: int
    max_query_len: int | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "max_query_len":
                continue
            check_int(field.name, value, at_least=1)


@dataclass(frozen=True)
class AttentionConfig:
    """One attention layer's shape and options; validated on construction.

    head_dim_v: None for head_dim. kv_dtype: dtype of the cache, None for `dtype`. sm_scale: None for
    1 / sqrt(head_dim). logits_soft_cap: c > 0 for logits c · tanh(x / c). sinks: `run` takes an extra logit per query
    head. policy: how shared prefixes are packed (`trunkattn.planner`). batch_invariant: a request's output bits depend
    on its own tokens and these options alone. execution: how a GPU launches a step: serial, overlapped (prompt chunks
    and some decodes at once, POD-Attention §4), streams (PAT §6), or auto.

    Raises:
        ValueError, TypeError: naming the field, its value and what was expected.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    head_dim_v: int | None = None
    kv_dtype: torch.dtype | None = None
    sm_scale: float | None = None
    logits_soft_cap: float | None = None
    sinks: bool = False
    policy: str = "auto"
    batch_invariant: bool = False
    execution: str = "auto"

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size"):
            check_int(name, getattr(self, name), at_least=1)
        if self.head_dim_v is not None:
            check_int("head_dim_v", self.head_dim_v, at_least=1)
        if self.page_size > _MOST_TOKENS:
            raise ValueError(f"page_size={self.page_size}: expected at most {_MOST_TOKENS}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads={self.num_qo_heads}: expected a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.dtype not in COMPUTE_DTYPES:
            raise ValueError(f"dtype={self.dtype}: expected one of {', '.join(map(str, COMPUTE_DTYPES))}")
        if self.kv_dtype is not None and self.kv_dtype not in tuple(KV_KINDS):
            raise ValueError(f"kv_dtype={self.kv_dtype}: expected None or one of {', '.join(map(str, KV_KINDS))}")
        for name in ("sm_scale", "logits_soft_cap"):
            check_positive(name, getattr(self, name))
        for name in ("sinks", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r}: expected a bool")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r}: expected one of {', '.join(POLICIES)}")
        if self.execution not in EXECUTIONS:
            raise ValueError(f"execution={self.execution!r}: expected one of {', '.join(EXECUTIONS)}")

    @property
    def value_dim(self) -> int:
        """Width of a value and of an output row."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

    @property
    def logit_scale(self) -> float:
        """What q · k is multiplied by before `exp2`: sm_scale · log2(e). A soft cap changes the base itself, after the
        cap, so log2(e) is left out then."""
        scale = 1 / math.sqrt(self.head_dim) if self.sm_scale is None else self.sm_scale
        return scale if self.logits_soft_cap else scale * math.log2(math.e)

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of the KV cache."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def tile_itemsize(self) -> int:
        """Bytes of an element of the keys that a GPU's tiles hold: the cache's, or of float32 queries, to which those
        are converted."""
        return max(self.cache_dtype.itemsize, self.dtype.itemsize if self.dtype.itemsize > 2 else 0)

    @property
    def on_hopper(self) -> bool:
        """Whether the kernels for an sm_90 compute this attention: decoding in row tiles, which `auto` plans; prompt
        chunks and decodes at once."""
        return (
            self.policy == "auto"
            and not self.batch_invariant
            and self.num_qo_heads // self.num_kv_heads in HOPPER_GROUPS
            and fits_hopper(
                (self.dtype, self.cache_dtype),
                (self.head_dim, self.value_dim),
                self.page_size,
                self.logits_soft_cap,
                self.sinks,
            )
        )

    def supports(self, device: torch.device | str) -> list[str]:
        """Reasons why this configuration cannot run on `device`; empty if it can.

        Raises:
            ValueError: if `device` is no device.
        """
        try:
            kind = torch.device(device).type
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device={device!r}: expected a torch.device or the name of one") from error
        if kind == "cpu":
            launches = self.execution == "auto"
            return [] if launches else [f"device cpu: execution={self.execution!r} is a way to launch kernels on a GPU"]
        if kind != "cuda":
            return [f"device {kind}: expected cpu or cuda"]
        reasons = [] if torch.cuda.is_available() else ["device cuda: torch finds no CUDA device"]
        if self.execution == "overlapped" and not (self.on_hopper and _is_hopper(device)):
            reasons.append(f"device cuda: execution='overlapped': {_NO_OVERLAP}")
        if self.cache_dtype == torch.float8_e4m3fn and not has_e4m3(device):
            reasons.append(f"device cuda: kv_dtype={self.cache_dtype}: expected {NO_E4M3}")
        if find_spec("triton") is None:
            reasons.append("device cuda: the kernels need the package triton, which is not installed")
        if max(self.head_dim, self.value_dim) > _WIDEST_ON_GPU:
            width = max(self.head_dim, self.value_dim)
            reasons.append(f"device cuda: head_dim {width} is over {_WIDEST_ON_GPU}, the widest the kernels hold")
        wide = max(self.head_dim, self.value_dim) > _NARROW_ON_GPU or self.tile_itemsize > 2
        largest, group = _LARGEST_GROUP_ON_GPU[wide], self.num_qo_heads // self.num_kv_heads
        if group > largest:
            reasons.append(
                f"device cuda: {group} query heads a KV head are over {largest}, the rows of the tallest tile for "
                f"head_dim {max(self.head_dim, self.value_dim)} and {self.cache_dtype} caches"
            )
        return reasons


def _is_hopper(device: torch.device | str) -> bool:
    """Whether a CUDA device, if there is one, is an sm_90."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) == (9, 0)
