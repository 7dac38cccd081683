"""`AttentionConfig`: the shape and options of an attention, validated on construction."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, Final

import torch

from trunkattn.kernels.cpu_math import KV_KINDS
from trunkattn.kernels.tile_table import HYBRID_GROUPS, HYBRID_PAGE, HYBRID_WIDTH
from trunkattn.kernels.write_kv import NO_E4M3, has_e4m3
from trunkattn.planner.build import POLICIES

_WIDEST_ON_GPU: Final = 256
EXECUTIONS: Final = ("auto", "serial", "overlapped", "streams", "persistent")
_NO_OVERLAP: Final = (
    "expected 'auto' or 'serial', for the kernel that computes prompt chunks and decodes at once takes queries and "
    "caches of one 16-bit dtype, heads of 128, pages of whole 16 tokens and 1, 2, 4, 8 or 16 query heads a KV head, "
    "with policy='auto' and without soft cap, sinks and batch_invariant, on compute capability 9.0"
)
_NARROW_ON_GPU: Final = 128
_LARGEST_GROUP_ON_GPU: Final = (64, 32)  # rows of the tallest tile: head_dim up to 128 and 16-bit caches, and others
_MOST_TOKENS: Final = torch.iinfo(torch.int32).max  # places in a cache are int32
_FLOAT32: Final = torch.finfo(torch.float32)
_COMPUTE_DTYPES: Final = (torch.float32, torch.bfloat16, torch.float16)


def integer(name: str, value: Any, at_least: int) -> None:
    """Raises unless value is an int (not a bool) of at least `at_least`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}={value!r}: expected an int")
    if value < at_least:
        raise ValueError(f"{name}={value}: expected at least {at_least}")


def positive(name: str, value: Any) -> None:
    """Raises unless value is None or a number (not a bool) among float32's normal ones above 0."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: expected None or a number")
    if not _FLOAT32.tiny <= value <= _FLOAT32.max:
        wanted = f"{_FLOAT32.tiny:.3g} to {_FLOAT32.max:.3g}, the range of float32"
        raise ValueError(f"{name}={value}: expected None or a finite number above 0, from {wanted}")


@dataclass(frozen=True)
class AttentionConfig:
    """One attention layer's shape and options; validated on construction.

    head_dim_v: None for head_dim. kv_dtype: dtype of the cache, None for `dtype`. sm_scale: None for
    1 / sqrt(head_dim). logits_soft_cap: c > 0 for logits c · tanh(x / c). sinks: `run` takes an extra logit per query
    head. policy: how shared prefixes are packed (`trunkattn.planner`). batch_invariant: a request's output bits depend
    on its own tokens and these options alone. execution: how a GPU launches a step: serial, overlapped (prompt chunks
    and some decodes at once, POD-Attention §4), streams (PAT §6), persistent, or auto.

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
    causal: bool = True
    logits_soft_cap: float | None = None
    sinks: bool = False
    policy: str = "auto"
    batch_invariant: bool = False
    execution: str = "auto"

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size"):
            integer(name, getattr(self, name), at_least=1)
        if self.head_dim_v is not None:
            integer("head_dim_v", self.head_dim_v, at_least=1)
        if self.page_size > _MOST_TOKENS:
            raise ValueError(f"page_size={self.page_size}: expected at most {_MOST_TOKENS}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads={self.num_qo_heads}: expected a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.dtype not in _COMPUTE_DTYPES:
            raise ValueError(f"dtype={self.dtype}: expected one of {', '.join(map(str, _COMPUTE_DTYPES))}")
        if self.kv_dtype is not None and self.kv_dtype not in tuple(KV_KINDS):
            raise ValueError(f"kv_dtype={self.kv_dtype}: expected None or one of {', '.join(map(str, KV_KINDS))}")
        for name in ("sm_scale", "logits_soft_cap"):
            positive(name, getattr(self, name))
        for name in ("causal", "sinks", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r}: expected a bool")
        if not self.causal:
            raise ValueError("causal=False: expected True, query tokens are the last tokens of their sequence")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r}: expected one of {', '.join(POLICIES)}")
        if self.execution not in EXECUTIONS:
            raise ValueError(f"execution={self.execution!r}: expected one of {', '.join(EXECUTIONS)}")

    @property
    def value_dim(self) -> int:
        """Width of a value and of an output row."""
        return self.head_dim if self.head_dim_v is None else self.head_dim_v

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
        plain = self.logits_soft_cap is None and not self.sinks and not self.batch_invariant and self.policy == "auto"
        return (
            plain
            and self.head_dim == self.value_dim == HYBRID_WIDTH
            and self.dtype == self.cache_dtype
            and self.dtype.itemsize == 2
            and self.page_size % HYBRID_PAGE == 0
            and self.num_qo_heads // self.num_kv_heads in HYBRID_GROUPS
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
