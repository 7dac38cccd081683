"""The choice of the back end for a model runner, or the refusal."""

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from trunkattn.integrations.sglang import versions
from trunkattn.integrations.sglang.layers import check_supported
from trunkattn.integrations.sglang.name import NAME, logger


def choose(runner: Any) -> AttentionBackend:
    """Our back end for a CPU or an NVIDIA GPU. Raises ValueError with one line if it cannot serve the model."""
    version = versions.installed()
    lacks = versions.missing(AttentionBackend, runner)
    if lacks:
        raise ValueError(versions.refusal(version, lacks))
    caution = versions.TESTED.caution(version)
    if caution:
        logger.warning(caution)
    if runner.device == "cuda" and torch.version.cuda is not None:
        from trunkattn.integrations.sglang.cuda import TrunkCudaBackend

        return TrunkCudaBackend(runner)
    if runner.device != "cpu":
        check_supported([f"the device {runner.device}, only NVIDIA GPUs and CPUs"])
    if versions.needs_triton(NAME):
        check_supported([f"SGLang {version} on a CPU, because that version prepares steps with Triton"])
    from trunkattn.integrations.sglang.backend import TrunkBackend

    return TrunkBackend(runner)
