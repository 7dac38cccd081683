"""`AttentionConfig` and `Capacity`: the shape and options of an attention, and upper bounds of a step."""

import math
from dataclasses import dataclass, fields
from importlib import import_module
from types import MappingProxyType
from typing import Final, NamedTuple

import torch

from trunkattn.dtypes import COMPUTE_DTYPES, KV_KINDS
from trunkattn.names import EXECUTIONS, POLICIES
from trunkattn.numerics import LOG2_E, MAX_INT32
from trunkattn.validate import check_positive, keep_int, written


class BackendModules(NamedTuple):
    """The modules of a back end, imported when they are first needed, so that no device needs the compiler of another.

    spec: has `unsupported(config, device)`, why the back end does not run an attention, and imports no compiler.
    source: has `make(config, device, capacity)`, which makes the `backend.Backend`.
    """

    spec: str
    source: str


BACKENDS: Final = MappingProxyType(
    {
        "cpu": BackendModules("trunkattn.cpu.tuning", "trunkattn.cpu.backend"),
        "cuda": BackendModules("trunkattn.gpu.kernel", "trunkattn.gpu.attention"),
    }
)


@dataclass(frozen=True)
class Capacity:
    """Upper bounds of a step. `BatchAttention.plan` raises ValueError beyond them.

    On a GPU a plan then has arrays of fixed sizes, so that one captured CUDA graph serves every batch within the
    bounds. A `policy` other than "auto" may cut a batch into more work items than such a plan holds; it raises too.

    Attributes, each of them below 2^31:
        max_requests: rows of block_table, at least 1.
        max_query_tokens: query tokens of all requests together, at least 1.
        max_pages_per_request: columns of block_table, at least 1.
        num_pages: pages of the caches, at least 1.
        max_query_len: query tokens of one request; None for max_query_tokens. With 1, for only decoding, a GPU uses
            no causal mask; with few tokens it launches no kernel for prompt chunks.
        max_chunk_tokens: query tokens of the prompt chunks that a plan made on the device may have besides
            (`PromptChunks`), which no other bound counts. They are of max_requests requests at most.

    Raises:
        ValueError, TypeError: naming the field, its value and what is accepted.

    Example:
        >>> decoding = Capacity(64, 64, max_pages_per_request=128, num_pages=4096, max_query_len=1)
        >>> decoding.max_query_tokens, decoding.max_chunk_tokens
        (64, 0)
    """

    max_requests: int
    max_query_tokens: int
    max_pages_per_request: int
    num_pages: int
    max_query_len: int | None = None
    max_chunk_tokens: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is None and field.name == "max_query_len":
                continue
            keep_int(self, field.name, 0 if field.name == "max_chunk_tokens" else 1, MAX_INT32)


@dataclass(frozen=True)
class AttentionConfig:
    """One attention layer's shape and options, validated on construction.

    Attributes:
        num_qo_heads: query heads, a multiple of num_kv_heads.
        num_kv_heads: key and value heads, at least 1.
        head_dim: elements of a query and a key of one head.
        page_size: tokens of a page of the cache.
        dtype: torch dtype of queries and outputs: float32, bfloat16 or float16.
        head_dim_v: elements of a value of one head; None for head_dim.
        kv_dtype: torch dtype of the cache: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2; None for dtype. A
            GPU rounds keys and values to dtype before it multiplies, which loses digits or range if that has fewer.
        sm_scale: what logits are multiplied by; None for 1 / sqrt(head_dim).
        logits_soft_cap: c > 0 turns a logit x into c · tanh(x / c); at most 1,024 on a GPU. None for no cap.
        sinks: whether `run` takes an extra logit per query head, which has no value.
        policy: how shared prefixes are packed. "per_query" (FlashAttention), "relay" (RelayAttention), "cascade",
            "fasttree", "pat" (PAT's Algorithm 1), "optimal" (dynamic programming), or "auto": by predicted cost, on a
            CPU the cheapest of them, "fasttree" left out, and on a GPU the fastest row tiles.
        batch_invariant: whether a request's output has the same bits by itself and in any batch.
        latent_dim: for a latent cache (MLA, DeepSeek-V2 §2.1). A row of it has head_dim numbers, which are the key of
            all heads, and the first latent_dim of them are also the value of all heads. num_kv_heads is then 1, and
            sm_scale must be given, because queries are absorbed and head_dim does not tell it. None: keys and values
            are cached apart.
        execution: how a GPU launches a step. "serial", "overlapped" (prompt chunks and some decodes at once,
            POD-Attention §4), "streams" (PAT §6), or "auto". A CPU accepts only "auto".

    Raises:
        ValueError, TypeError: naming the field, its value and what is accepted.

    Example:
        >>> config = AttentionConfig(num_qo_heads=32, num_kv_heads=8, head_dim=128, page_size=16, dtype=torch.bfloat16)
        >>> config.supports("cpu")
        []
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
    latent_dim: int | None = None

    def __post_init__(self) -> None:
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size", "head_dim_v"):
            if name == "head_dim_v" and self.head_dim_v is None:
                continue
            keep_int(self, name, at_least=1)
            if getattr(self, name) > MAX_INT32:
                raise ValueError(f"{name}={written(getattr(self, name))}: expected at most {MAX_INT32}")
        if self.num_qo_heads % self.num_kv_heads:
            raise ValueError(
                f"num_qo_heads={self.num_qo_heads}: expected a multiple of num_kv_heads={self.num_kv_heads}"
            )
        if self.dtype not in COMPUTE_DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: expected one of {', '.join(map(str, COMPUTE_DTYPES))}")
        if self.kv_dtype is not None and self.kv_dtype not in tuple(KV_KINDS):
            raise ValueError(f"kv_dtype={self.kv_dtype!r}: expected None or one of {', '.join(map(str, KV_KINDS))}")
        for name in ("sm_scale", "logits_soft_cap"):
            value = getattr(self, name)
            check_positive(name, value)
            object.__setattr__(self, name, None if value is None else float(value))
        for name in ("sinks", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={getattr(self, name)!r}: expected a bool")
        if self.policy not in POLICIES:
            raise ValueError(f"policy={self.policy!r}: expected one of {', '.join(POLICIES)}")
        if self.execution not in EXECUTIONS:
            raise ValueError(f"execution={self.execution!r}: expected one of {', '.join(EXECUTIONS)}")
        if self.latent_dim is not None:
            keep_int(self, "latent_dim", at_least=1)
            self._check_latent(self.latent_dim)

    def _check_latent(self, latent_dim: int) -> None:
        if latent_dim >= self.head_dim:
            raise ValueError(
                f"latent_dim={latent_dim}: expected less than head_dim={self.head_dim}, the numbers of a cached row, "
                "of which the others are rotated"
            )
        if self.num_kv_heads != 1:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads}: expected 1 with latent_dim, for all heads share a cached row"
            )
        if self.head_dim_v not in (None, latent_dim):
            raise ValueError(
                f"head_dim_v={self.head_dim_v}: expected None or latent_dim={latent_dim}, the columns of a cached row "
                "that are the values"
            )
        if self.sm_scale is None:
            raise ValueError(
                "sm_scale=None: expected a number with latent_dim, 1 / sqrt(width of a head's keys before they are "
                "absorbed), such as 192 ** -0.5 for DeepSeek-V3"
            )

    @property
    def value_dim(self) -> int:
        """Width of a value and of an output row."""
        widths = (self.latent_dim, self.head_dim_v, self.head_dim)
        return next(width for width in widths if width is not None)

    @property
    def cached_numbers(self) -> int:
        """Numbers that a KV head caches for a token."""
        return self.head_dim + (0 if self.latent_dim is not None else self.value_dim)

    @property
    def logit_scale(self) -> float:
        """What q · k is multiplied by before `exp2`: sm_scale · log2(e). A soft cap changes the base itself, after the
        cap, so log2(e) is left out then."""
        scale = 1 / math.sqrt(self.head_dim) if self.sm_scale is None else self.sm_scale
        return scale if self.logits_soft_cap else scale * LOG2_E

    @property
    def cache_dtype(self) -> torch.dtype:
        """Dtype of the KV cache."""
        return self.dtype if self.kv_dtype is None else self.kv_dtype

    @property
    def group_size(self) -> int:
        """Query heads of a KV head."""
        return self.num_qo_heads // self.num_kv_heads

    def supports(self, device: torch.device | str) -> list[str]:
        """Reasons why this configuration cannot run on `device`; empty if it can.

        Raises:
            ValueError: if `device` is no device.
        """
        try:
            found = torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device={device!r}: expected a torch.device or the name of one") from error
        if found.type not in BACKENDS:
            return [f"device {found.type}: expected {' or '.join(BACKENDS)}"]
        reasons = import_module(BACKENDS[found.type].spec).unsupported(self, found)
        return [f"device {found.type}: {reason}" for reason in reasons]
