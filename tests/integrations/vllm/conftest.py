"""Models and stock outputs that the tests share, and what one process needs to start vLLM many times."""

from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import envs
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.plugins import load_general_plugins
from vllm.v1.attention import selector

from trunkattn import write_kv
from trunkattn.integrations import prompt_plans
from trunkattn.integrations.vllm import backend, cuda, cuda_impl, decode_builder, own_prompts, versions
from trunkattn.integrations.vllm.flash import FlashPrefill

from .device_attention import DeviceAttention, PlannerCompilations
from .engine import Run, generate
from .fakes import SEQUENCES, FlashRecorder
from .models import write_eagle, write_model


def pytest_configure() -> None:
    versions.hide_numba_from_look_ups()  # here Numba is imported before the first engine starts
    load_general_plugins()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a tiny model; "eagle" drafts for "llama"."""

    @cache
    def folder(name: str) -> Path:
        path = tmp_path_factory.mktemp(name)
        if name == "eagle":
            write_eagle(path)
        else:
            write_model(name, path)
        return path

    return folder


@pytest.fixture(scope="session")
def stock(model: Callable[[str], Path]) -> Callable[..., Run]:
    """What vLLM's own back end for CPUs generates, with blocks of 32 tokens: from 0.31 on it has no others."""

    @cache
    def run(name: str, **options: Any) -> Run:
        found = generate(model(name), block_size=32, **options)
        assert found.impls == {"CPUAttentionBackendImpl"}
        return found

    return run


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> PlannerCompilations:
    """No process compiles a planner."""
    planners = PlannerCompilations()
    for module in (cuda_impl, own_prompts):
        monkeypatch.setattr(module, "planner_compilation", planners)
    return planners


def set_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans and kernels are the CPU's."""
    for module in (decode_builder, own_prompts, prompt_plans):
        monkeypatch.setattr(module, "BatchAttention", DeviceAttention)


@pytest.fixture
def gpu_engine(monkeypatch: pytest.MonkeyPatch, compilations: PlannerCompilations) -> Iterator[VllmConfig]:
    """The configuration of an engine whose back end is that for GPUs, with plans and kernels of the CPU."""
    config = VllmConfig()
    config.scheduler_config.max_num_seqs = SEQUENCES
    set_attention(monkeypatch)
    monkeypatch.setattr("trunkattn.AttentionConfig.supports", lambda self, device: [])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with set_current_vllm_config(config):
        yield config


@pytest.fixture
def set_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[bool], None]]:
    """Sets VLLM_BATCH_INVARIANT for this test, which vLLM may have read before and kept. vLLM would then replace
    operators of torch, in this process for good, by Triton kernels, which need a GPU."""
    forget = getattr(envs, "disable_envs_cache", lambda: None)
    home = "determinism" if find_spec("vllm.model_executor.determinism") else "layers"  # newer and older versions
    monkeypatch.setattr(f"vllm.model_executor.{home}.batch_invariant.init_batch_invariance", lambda: None)
    monkeypatch.setattr(versions, "has_triton", lambda: True)

    def set_it(on: bool) -> None:
        forget()
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", str(int(on)))

    yield set_it
    forget()


@pytest.fixture
def flash_kernel(monkeypatch: pytest.MonkeyPatch) -> FlashRecorder:
    """vLLM's FlashAttention 3; its packages for CPUs have none."""
    kernel, module = FlashRecorder(), "vllm.v1.attention.backends.fa_utils"
    monkeypatch.setattr(f"{module}.flash_attn_varlen_func", kernel, raising=False)
    monkeypatch.setattr(f"{module}.get_flash_attn_version", lambda head_size: 3)
    return kernel


@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch, compilations: PlannerCompilations) -> list[dict[str, Any]]:
    """The arguments of each call of FlashAttention by an engine that selects CUSTOM."""

    def write(key: torch.Tensor, value: torch.Tensor, *rest: Any) -> None:
        k_cache, v_cache, slots = rest[:3]
        write_kv(key[: len(slots)], value[: len(slots)], k_cache, v_cache, slots)

    kernel = FlashRecorder()
    # vLLM remembers the class that a process got for a kind of layer: not here, and not for the tests that follow.
    monkeypatch.setattr(selector, "_cached_get_attn_backend", selector._cached_get_attn_backend.__wrapped__)
    monkeypatch.setattr(backend, "TrunkAttentionBackend", cuda.TrunkAttentionCudaBackend)
    set_attention(monkeypatch)
    monkeypatch.setattr(cuda_impl, "gpu_refusals", lambda *arguments: [])
    monkeypatch.setattr(cuda_impl, "find_flash", lambda spec: (FlashPrefill(spec, 3, kernel), "FlashAttention 3"))
    monkeypatch.setattr(cuda_impl._custom_ops, "reshape_and_cache_flash", write)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return kernel.calls
