"""What an engine has done so far, in tokens, pages and seconds, and which pages its sequences hold."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trunkattn.kv_cache.manager import CacheUsage


@dataclass(frozen=True)
class BlockTables:
    """The pages of the running sequences between two steps.

    Attributes:
        request_ids: the request of each row. A request with n > 1 has a row per answer.
        block_table: [rows, most pages of a row] int32; columns after a row's pages are 0.
        seq_lens: [rows] int32, tokens whose KV is in the pages.
    """

    request_ids: list[str]
    block_table: NDArray[np.int32]
    seq_lens: NDArray[np.int32]


@dataclass
class EngineStats:
    """Counts since the engine started.

    Attributes:
        steps: steps that computed a batch.
        busy_seconds: time within those steps.
        computed_tokens: tokens that went through the model: prompts, recomputation and decode.
        generated_tokens: sampled tokens.
        kv_tokens_read: KV tokens that attention read, summed over the steps, averaged over the layers.
        kv_tokens_per_query: KV tokens that it would have read with one query at a time.
        preemptions: times that a sequence lost its pages.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up in the prefix cache, and found there.
        peak_usage: the cache's usage after the step that held the most pages; None before the first step.
    """

    steps: int = 0
    busy_seconds: float = 0.0
    computed_tokens: int = 0
    generated_tokens: int = 0
    kv_tokens_read: float = 0.0
    kv_tokens_per_query: float = 0.0
    preemptions: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    peak_usage: CacheUsage | None = None

    @property
    def generated_tokens_per_second(self) -> float:
        """Sampled tokens per busy second; 0 before the first step."""
        return self.generated_tokens / self.busy_seconds if self.busy_seconds else 0.0
