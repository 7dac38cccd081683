"""TrunkAttention: attention for LLM serving that reads every shared KV byte once."""

from typing import TYPE_CHECKING, Any

from trunkattn.attention import BatchAttention, Plan
from trunkattn.attention_config import AttentionConfig
from trunkattn.kernels.merge import merge_states
from trunkattn.kernels.write_kv import write_kv
from trunkattn.plan_format import Capacity, PlanStats

if TYPE_CHECKING:
    from trunkattn.engine import LLM, SamplingParams

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AttentionConfig",
    "BatchAttention",
    "Capacity",
    "Plan",
    "PlanStats",
    "SamplingParams",
    "merge_states",
    "write_kv",
]


def __getattr__(name: str) -> Any:
    """The engine, imported when it is asked for: the library alone needs no transformers."""
    if name in ("LLM", "SamplingParams"):
        from trunkattn import engine

        return getattr(engine, name)
    raise AttributeError(f"module 'trunkattn' has no attribute {name!r}")
