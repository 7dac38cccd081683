"""TrunkAttention: attention for LLM serving that reads every shared KV byte once."""

from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from trunkattn.lazy import lazy_names
from trunkattn.names import install_command

if TYPE_CHECKING:
    from trunkattn.attention import BatchAttention, Plan
    from trunkattn.config import AttentionConfig, Capacity
    from trunkattn.engine import LLM, SamplingParams, StructuredOutputsParams
    from trunkattn.ops.merge_states import merge_states
    from trunkattn.ops.write_kv import write_kv, write_latent
    from trunkattn.planner.work_list import PlanStats
    from trunkattn.step_inputs import PromptChunks
    from trunkattn.training.flash_attention import flash_attention
    from trunkattn.training.prefix_tree import PrefixTree

__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AttentionConfig",
    "BatchAttention",
    "Capacity",
    "Plan",
    "PlanStats",
    "PrefixTree",
    "PromptChunks",
    "SamplingParams",
    "StructuredOutputsParams",
    "flash_attention",
    "merge_states",
    "write_kv",
    "write_latent",
]

# Imported when they are asked for: the library by itself needs no transformers, and a plug-in that an engine only looks
# at needs no compiler. (vLLM 0.32 on a CPU cannot start a worker where Numba has been imported.)
_HOMES: Final = MappingProxyType(
    {
        "LLM": "trunkattn.engine",
        "AttentionConfig": "trunkattn.config",
        "BatchAttention": "trunkattn.attention",
        "Capacity": "trunkattn.config",
        "Plan": "trunkattn.attention",
        "PlanStats": "trunkattn.planner.work_list",
        "PrefixTree": "trunkattn.training.prefix_tree",
        "PromptChunks": "trunkattn.step_inputs",
        "SamplingParams": "trunkattn.engine",
        "StructuredOutputsParams": "trunkattn.engine",
        "flash_attention": "trunkattn.training.flash_attention",
        "merge_states": "trunkattn.ops.merge_states",
        "write_kv": "trunkattn.ops.write_kv",
        "write_latent": "trunkattn.ops.write_kv",
    }
)
_find, __dir__ = lazy_names(__name__, _HOMES)


def __getattr__(name: str) -> Any:
    try:
        return _find(name)
    except ModuleNotFoundError as error:
        if _HOMES[name] != "trunkattn.engine":
            raise
        package = str(error.name).partition(".")[0]
        raise ModuleNotFoundError(
            f"trunkattn.{name} needs the package {package}, which comes with the engine: {install_command('engine')}",
            name=error.name,
        ) from error
