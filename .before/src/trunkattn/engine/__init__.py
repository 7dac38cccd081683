"""Floor 5: the embedded engine. It serves a local Hugging Face or GGUF model with continuous batching."""

from trunkattn.engine.config import EngineConfig, SamplingParams
from trunkattn.engine.engine import Engine, ModelLimits
from trunkattn.engine.llm import LLM
from trunkattn.engine.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from trunkattn.engine.stats import EngineStats

__all__ = [
    "LLM",
    "CompletionOutput",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Logprob",
    "ModelLimits",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
]
