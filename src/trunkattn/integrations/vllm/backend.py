"""The back end as vLLM sees it: the options that it supports, and the classes that do the work."""

from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, MultipleOf

from trunkattn.integrations.vllm import versions
from trunkattn.integrations.vllm.impl import TrunkAttentionImpl
from trunkattn.integrations.vllm.metadata import TrunkAttentionBuilder


class TrunkAttentionBackend(AttentionBackend):
    """Decoder self-attention over vLLM's paged KV cache. Each step reads shared prefixes once.

    `customize_spec` is vLLM's own, because our kernels read a cache as vLLM lays it out. `supports_dcp` and
    `supports_pcp` are what the layer's class says.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float32, torch.bfloat16, torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(versions.KV_DTYPES)
    forward_includes_kv_cache_update = False

    @staticmethod
    def get_name() -> str:
        """The name in vLLM's AttentionBackendEnum."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TrunkAttentionImpl]:
        """The class of a layer's attention."""
        return TrunkAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[TrunkAttentionBuilder]:
        """The class that plans a step."""
        return TrunkAttentionBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        """Tokens per block. vLLM passes the argument from 0.31 on."""
        return [MultipleOf(16)]

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """The shape of a layer's cache; vLLM up to 0.28 asks for it."""
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
    def supports_batch_invariance(cls) -> bool:
        """Returns True: with VLLM_BATCH_INVARIANT=1 our kernels compute every token, so neither the batch it is in, nor
        where its prompt is cut, nor what is in the prefix cache changes a bit."""
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        """Returns False: tokens of an image would see each other in both directions, and plans are causal."""
        return False

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        """Returns False: on a CPU the host always knows the query lengths, as nothing trims drafts later."""
        return False
