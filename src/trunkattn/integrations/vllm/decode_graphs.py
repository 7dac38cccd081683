"""Decodes in vLLM's full CUDA graphs: what builders answer when vLLM asks about them, and the rows that are planned."""

from typing import Any, ClassVar, NamedTuple

import torch
from vllm.v1.attention.backend import AttentionCGSupport

from trunkattn.integrations.vllm import versions


class DecodeRows(NamedTuple):
    """The rows that decode; see `BatchAttention.plan`."""

    block_table: torch.Tensor
    seq_lens: torch.Tensor
    query_start_loc: torch.Tensor


class DecodeGraphs:
    """What a builder says of its full CUDA graphs, whose plans stay where they are."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Rows that verify drafts are in full graphs too, unless ranks share each request: then they are prompts."""
        if vllm_config.parallel_config.decode_context_parallel_size > 1:
            return AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
        return cls._cudagraph_support

    @classmethod
    def get_varlen_cudagraph_max_query_len(cls, vllm_config: Any, kv_cache_spec: Any) -> int:
        """Returns the most query tokens of a request in a full graph. Rows may have any number up to it, since plans
        tell kernels how many there are. vLLM from 0.33 on asks."""
        if cls.get_cudagraph_support(vllm_config, kv_cache_spec) is AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE:
            return 1
        return versions.decode_query_len(vllm_config)
