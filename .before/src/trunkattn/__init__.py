"""TrunkAttention: attention for LLM serving that reads every shared KV byte once."""

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from trunkattn.attention import BatchAttention, Plan
    from trunkattn.attention_config import AttentionConfig
    from trunkattn.attention_training import flash_attention
    from trunkattn.engine import LLM, SamplingParams
    from trunkattn.kernels.merge import merge_states
    from trunkattn.kernels.write_kv import write_kv
    from trunkattn.plan_format import Capacity, PlanStats

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AttentionConfig",
    "BatchAttention",
    "Capacity",
    "Plan",
    "PlanStats",
    "SamplingParams",
    "flash_attention",
    "merge_states",
    "write_kv",
]

# Imported when they are asked for: the library alone needs no transformers, and a plug-in that is only looked at by an
# engine needs no compiler. (vLLM 0.32 on a CPU cannot start a worker where Numba has been imported.)
_HOMES: Final = MappingProxyType(
    {
        "LLM": "trunkattn.engine",
        "AttentionConfig": "trunkattn.attention_config",
        "BatchAttention": "trunkattn.attention",
        "Capacity": "trunkattn.plan_format",
        "Plan": "trunkattn.attention",
        "PlanStats": "trunkattn.plan_format",
        "SamplingParams": "trunkattn.engine",
        "flash_attention": "trunkattn.attention_training",
        "merge_states": "trunkattn.kernels.merge",
        "write_kv": "trunkattn.kernels.write_kv",
    }
)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trunkattn' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
