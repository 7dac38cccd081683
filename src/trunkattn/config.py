"""`AttentionConfig` and `Capacity`: the shape and options of an attention, and upper bounds of a step."""

import math
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Final

import torch

from trunkattn.dtypes import (
    COMPUTE_DTYPES,
    E4M3_NEEDS,
    EXECUTIONS,
    HOPPER_GROUPS,
    HOPPER_HEAD_DIM,
    HOPPER_PREFILL_ROWS,
    KV_KINDS,
    POLICIES,
    has_e4m3,
    hopper_decode_misfits,
    hopper_prefill_misfits,
)
from trunkattn.numerics import LOG2_E
from trunkattn.validate import check_int, check_positive

_MAX_HEAD_DIM_ON_GPU: Final = 256
_MAX_GROUP_SIZE_ON_GPU: Final = 64  # rows of the tallest tile, for head_dim up to 128 and 16-bit caches
_MAX_GROUP_SIZE_OF_LARGE_TILES: Final = 32  # for larger heads or elements
_SMALL_TILE_HEAD_DIM: Final = 128
_MAX_INT32: Final = torch.iinfo(torch.int32).max  # kernels count the tokens of a cache in int32
_OVERLAP_NEEDS: Final = (
    "expected queries and caches of one 16-bit dtype, head_dim 128, a page_size that is a multiple of 16, "
    "1, 2, 4, 8 or 16 query heads per KV head, policy='auto', no soft cap, no sinks, batch_invariant=False and "
    "compute capability 9.0; use execution='auto' or 'serial'"
)


@dataclass(frozen=True)
class Capacity:
    """Upper bounds of a step. `BatchAttention.plan` raises ValueError beyond them.

    On a GPU a plan then has arrays of fixed sizes, so that one captured CUDA graph serves every batch within the
    bounds. A `policy` other than "auto" may cut a batch into more work items than such a plan holds; it raises too.

    Attributes:
        max_requests: rows of block_table, at least 1.
        max_query_tokens: query tokens of all requests together, at least 1.
        max_pages_per_request: columns of block_table, at least 1.
        num_pages: pages of the caches, at least 1.
        max_query_len: query tokens of one request; None for max_query_tokens. With 1, for decoding alone, a GPU uses
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
            check_int(field.name, value, at_least=0 if field.name == "max_chunk_tokens" else 1)


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
        kv_dtype: torch dtype of the cache: float32, bfloat16, float16, float8_e4m3fn or float8_e5m2; None for dtype.
        sm_scale: what logits are multiplied by; None for 1 / sqrt(head_dim).
        logits_soft_cap: c > 0 turns a logit x into c · tanh(x / c); None for no cap.
        sinks: whether `run` takes an extra logit per query head, which has no value.
        policy: how shared prefixes are packed. "per_query" (FlashAttention), "relay" (RelayAttention), "cascade",
            "fasttree", "pat" (PAT's Algorithm 1), "optimal" (dynamic programming), or "auto", the cheapest of them by
            predicted cost.
        batch_invariant: whether a request's output has the same bits alone and in any batch.
        latent_dim: of a latent cache (MLA, DeepSeek-V2 §2.1), each row of which is the key of all heads in its head_dim
            numbers and the value of all heads in its first latent_dim; None: keys and values are cached apart. With it
            num_kv_heads is 1 and sm_scale is given: queries are absorbed, so head_dim does not tell it.
        execution: how a GPU launches a step. "serial", "overlapped" (prompt chunks and some decodes at once,
            POD-Attention §4), "streams" (PAT §6), or "auto". A CPU accepts "auto" alone.

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
        for name in ("num_qo_heads", "num_kv_heads", "head_dim", "page_size"):
            check_int(name, getattr(self, name), at_least=1)
        if self.head_dim_v is not None:
            check_int("head_dim_v", self.head_dim_v, at_least=1)
        if self.page_size > _MAX_INT32:
            raise ValueError(f"page_size={self.page_size}: expected at most {_MAX_INT32} tokens")
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
        if self.latent_dim is not None:
            self._check_latent(self.latent_dim)

    def _check_latent(self, latent_dim: int) -> None:
        check_int("latent_dim", latent_dim, at_least=1)
        if latent_dim > self.head_dim:
            raise ValueError(
                f"latent_dim={latent_dim}: expected at most head_dim={self.head_dim}, the numbers of a cached row"
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
    def tile_itemsize(self) -> int:
        """Bytes of an element of the keys in a GPU's tile: float32 queries convert the cache's elements to float32."""
        return max(self.cache_dtype.itemsize, self.dtype.itemsize if self.dtype.itemsize > 2 else 0)

    @property
    def decode_misfits(self) -> list[str]:
        """Why the Hopper kernel for decoding, for sm_90, does not compute this attention; empty: it does."""
        misfits = hopper_decode_misfits(*self._shape)
        if self.policy != "auto":
            misfits.append(f"policy={self.policy!r}: expected 'auto'")
        if self.batch_invariant:  # where a tile's tokens end decides where the last ones lie in a block
            misfits.append("batch_invariant=True: expected False")
        return misfits

    @property
    def prompt_misfits(self) -> list[str]:
        """Why the Hopper kernel for prompts, for sm_90, does not compute the prompt chunks of this attention."""
        return hopper_prefill_misfits(*self._shape)

    @property
    def _shape(self) -> tuple[tuple[torch.dtype, ...], tuple[int, int], int, int]:
        """What decides whether a Hopper kernel computes it."""
        dtypes, head_dims = (self.dtype, self.cache_dtype), (self.head_dim, self.value_dim)
        return dtypes, head_dims, self.page_size, self.num_qo_heads // self.num_kv_heads

    @property
    def overlaps_on_hopper(self) -> bool:
        """Whether the Hopper kernel for prompts and decodes together computes this attention."""
        fits = not self.decode_misfits and not self.prompt_misfits
        group_size = self.num_qo_heads // self.num_kv_heads
        return fits and self.head_dim == HOPPER_HEAD_DIM and group_size in HOPPER_GROUPS

    @property
    def is_plain(self) -> bool:
        """Whether it is of the heads and groups that the Hopper kernels were timed with: no other head_dim than 128,
        no groups that leave rows of an item unused, no soft cap and no sinks."""
        whole = HOPPER_PREFILL_ROWS % (self.num_qo_heads // self.num_kv_heads) == 0
        return self.head_dim == HOPPER_HEAD_DIM and whole and self.logits_soft_cap is None and not self.sinks

    @property
    def on_hopper(self) -> bool:
        """Whether all Hopper kernels compute this attention, and were timed with its like."""
        return self.overlaps_on_hopper and self.is_plain

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
            if self.execution == "auto":
                return []
            return [f"device cpu: execution={self.execution!r}: expected 'auto', for a CPU launches no GPU kernels"]
        if kind != "cuda":
            return [f"device {kind}: expected cpu or cuda"]
        reasons = [] if torch.cuda.is_available() else ["device cuda: torch finds no CUDA device"]
        if self.execution == "overlapped" and not (self.on_hopper and _is_hopper(device)):
            reasons.append(f"device cuda: execution='overlapped': {_OVERLAP_NEEDS}")
        if self.cache_dtype == torch.float8_e4m3fn and not has_e4m3(device):
            reasons.append(f"device cuda: kv_dtype={self.cache_dtype}: {E4M3_NEEDS}")
        if find_spec("triton") is None:
            reasons.append("device cuda: the package triton is not installed; use pip install triton")
        widest, group = max(self.head_dim, self.value_dim), self.num_qo_heads // self.num_kv_heads
        if widest > _MAX_HEAD_DIM_ON_GPU:
            reasons.append(f"device cuda: head_dim {widest}: expected at most {_MAX_HEAD_DIM_ON_GPU}; use the CPU")
        small = widest <= _SMALL_TILE_HEAD_DIM and self.tile_itemsize <= 2
        most = _MAX_GROUP_SIZE_ON_GPU if small else _MAX_GROUP_SIZE_OF_LARGE_TILES
        if group > most:
            reasons.append(
                f"device cuda: {group} query heads per KV head: expected at most {most} with head_dim {widest}, "
                f"{self.dtype} queries and {self.cache_dtype} caches; use the CPU"
            )
        return reasons


def _is_hopper(device: torch.device | str) -> bool:
    """Whether a CUDA device, if there is one, is an sm_90."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability(device) == (9, 0)
