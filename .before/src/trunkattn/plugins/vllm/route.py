"""Who serves an attention back end: vLLM looks the names of this module up whenever a layer selects one.

On a CPU vLLM ignores the user's choice and asks for a back end of its own (`CpuPlatform.get_attn_backend_cls`).
`register` sends those names here too, so that each selection gets what the user chose: ours for CUSTOM, else vLLM's.
"""

import os
import sys
from importlib import import_module
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from trunkattn.plugins.vllm import OUR_PATH, taken, versions

logger = init_logger("vllm.trunkattn")


def __getattr__(name: str) -> Any:
    if name == "CUSTOM":
        return _ours()
    if name in versions.CPU_BACKENDS:
        return _ours_or_stock(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _ours() -> Any:
    """Our back end, or the reason why not."""
    version = versions.installed()
    refusal = versions.refusal(version)
    if refusal:
        raise ValueError(refusal)
    if not (current_platform.is_cpu() or current_platform.is_cuda()):
        raise ValueError(
            "attention_backend=CUSTOM: TrunkAttention runs on NVIDIA GPUs and on CPUs, and this platform is neither; "
            "leave attention_backend out"
        )
    caution = versions.caution(version)
    if caution:
        logger.warning_once(caution)
    if current_platform.is_cuda():
        from trunkattn.plugins.vllm.cuda import TrunkAttentionCudaBackend

        return TrunkAttentionCudaBackend
    if "numba" not in sys.modules:
        # It would count the cores that this thread may use, one after vLLM has bound its threads, and take torch, with
        # which it shares OpenMP, down to as many.
        os.environ.setdefault("NUMBA_NUM_THREADS", str(torch.get_num_threads()))
    from trunkattn.plugins.vllm.backend import TrunkAttentionBackend

    return TrunkAttentionBackend


def _ours_or_stock(name: str) -> Any:
    """What the engine's configuration chose, on a CPU."""
    options = get_current_vllm_config().attention_config
    custom = AttentionBackendEnum.CUSTOM
    if custom in options.backend_per_kind.values():
        raise ValueError(
            "attention_config.backend_per_kind names CUSTOM: on a CPU TrunkAttention serves all layers or none; "
            "choose attention_backend=CUSTOM instead"
        )
    if options.backend is not custom:
        module, _, attribute = AttentionBackendEnum[name].value.rpartition(".")
        return getattr(import_module(module), attribute)
    if custom.get_path() != OUR_PATH:
        raise ValueError(f"attention_backend=CUSTOM: {taken('CUSTOM', custom.get_path())}")
    if name != "CPU_ATTN":
        raise ValueError(
            "attention_backend=CUSTOM: TrunkAttention does not support multi-head latent attention (MLA), which this "
            "model has; leave attention_backend out"
        )
    logger.info_once("CUSTOM is used on this CPU: it is TrunkAttention, which goes in for vLLM's own CPU_ATTN.")
    return _ours()
