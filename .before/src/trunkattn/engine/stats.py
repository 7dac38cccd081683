"""What an engine has done so far, in tokens, pages and seconds."""

from dataclasses import dataclass

from trunkattn.cache.manager import CacheUsage


@dataclass
class EngineStats:
    """Counts since the engine started.

    Attributes:
        steps: steps that computed something.
        busy_seconds: time within those steps.
        computed_tokens: tokens that went through the model: prompts, recomputation and decode.
        generated_tokens: tokens sampled.
        kv_tokens_read: KV tokens that attention read, summed over the steps, mean over the layers.
        kv_tokens_per_query: what it would have read with one query at a time.
        preemptions: times that a sequence lost its pages.
        prefix_cache_queries, prefix_cache_hits: prompt tokens looked up in the prefix cache, and found.
        peak_usage: the cache at the step that held most pages; None before the first step.
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
