"""The embedded engine: it serves a local Hugging Face or GGUF model on this machine with continuous batching.

`LLM` is the way in. Behind it an `Engine` computes one batch per step: a `Scheduler` chooses the batch, a `ModelRunner`
computes it, and a `CacheManager` (`trunkattn.kv_cache`) holds the pages.
"""

from typing import TYPE_CHECKING

from trunkattn.lazy import lazy_names

if TYPE_CHECKING:
    from trunkattn.engine.config import EngineConfig
    from trunkattn.engine.engine import Engine
    from trunkattn.engine.llm import LLM
    from trunkattn.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from trunkattn.engine.sampling_params import SamplingParams, StructuredOutputsParams
    from trunkattn.engine.stats import BlockTables, EngineStats
    from trunkattn.engine.token_rules import ModelLimits

__all__ = [
    "LLM",
    "BlockTables",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Logprob",
    "ModelLimits",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

# Imported when they are asked for: options check themselves before torch and transformers are loaded.
__getattr__, __dir__ = lazy_names(
    __name__,
    {
        "BlockTables": "trunkattn.engine.stats",
        "CompletionOutput": "trunkattn.engine.outputs",
        "Engine": "trunkattn.engine.engine",
        "EngineConfig": "trunkattn.engine.config",
        "EngineStats": "trunkattn.engine.stats",
        "LLM": "trunkattn.engine.llm",
        "Logprob": "trunkattn.engine.outputs",
        "ModelLimits": "trunkattn.engine.token_rules",
        "RequestMetrics": "trunkattn.engine.outputs",
        "RequestOutput": "trunkattn.engine.outputs",
        "SamplingParams": "trunkattn.engine.sampling_params",
        "StructuredOutputsParams": "trunkattn.engine.sampling_params",
    },
)
