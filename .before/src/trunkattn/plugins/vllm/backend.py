"""The back end as vLLM sees it: what it supports, and the classes that do the work."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from trunkattn.plugins.vllm import versions
from trunkattn.plugins.vllm.impl import TrunkAttentionImpl
from trunkattn.plugins.vllm.metadata import TrunkAttentionBuilder


class TrunkAttentionBackend(AttentionBackend):
    """Decoder self-attention over vLLM's paged KV cache; prefixes that requests share are read once a step."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(versions.KV_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's AttentionBackendEnum."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TrunkAttentionImpl]:
        """What a layer runs."""
        return TrunkAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TrunkAttentionBuilder]:
        """What a step plans with."""
        return TrunkAttentionBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tokens per block; the argument came with 0.31."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Asked for up to 0.28."""
        return versions.kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)

    @classmethod
    def supports_sink(cls) -> bool:
        """An extra logit per query head."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        """Layers of one group may have different windows, or none."""
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Plans follow the query lengths that the host sees."""
        return False
