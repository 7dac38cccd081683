"""The embedded engine: it serves a local Hugging Face or GGUF model on this machine with continuous batching.

`LLM` is the way in. Behind it an `Engine` computes one batch per step: a `Scheduler` chooses the batch, a `ModelRunner`
computes it, and a `CacheManager` (`trunkattn.kv_cache`) holds the pages.
"""

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
