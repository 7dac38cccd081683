"""Latent attention in a real engine: greedy tokens equal those of vLLM's own back end.

The plug-in leaves latent attention on a CPU to vLLM, which has no prefix cache for it there. So the engine of this test
gets our classes under vLLM's name. Its builder, layers, prompts and cache are vLLM's.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trunkattn.integrations.vllm.mla import TrunkMlaBackend, TrunkMlaImpl

from .engine import NUM_PROMPTS, equal, generate

cpu_mla = pytest.importorskip("vllm.v1.attention.backends.mla.cpu_mla", reason="this vLLM has no MLA on a CPU")

from vllm.v1.attention import selector  # noqa: E402
from vllm.v1.attention.backends import registry  # noqa: E402


class OnCpuImpl(TrunkMlaImpl, cpu_mla.CPUMLAImpl):  # type: ignore[misc, name-defined]
    """Our layer, with what vLLM's class for CPUs writes to the cache."""

    def _device_refusals(self, vllm_config: Any) -> list[str]:
        return []


class OnCpuBackend(TrunkMlaBackend):
    """Our back end, with that layer."""

    @staticmethod
    def get_impl_cls() -> type[TrunkMlaImpl]:
        return OnCpuImpl


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Generates with our classes."""
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)  # vLLM's other back end takes no float32
    monkeypatch.setattr(selector, "_cached_get_attn_backend", selector._cached_get_attn_backend.__wrapped__)
    name = registry.AttentionBackendEnum.CPU_MLA

    def run(folder: Path, **options: Any) -> Any:
        with monkeypatch.context() as patched:
            patched.setitem(registry._ATTN_OVERRIDES, name, f"{__name__}.OnCpuBackend")
            return generate(folder, attention_backend="CPU_MLA", **options)

    return run


def test_tokens_equal(model: Callable[[str], Path], ours: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model("deepseek_v3")
    expected = generate(folder, attention_backend="CPU_MLA")
    assert expected.impls == {"CPUMLAImpl"}
    assert sum(len(set(tokens)) for tokens in expected.tokens[0]) > NUM_PROMPTS * 10, "they depend on the context"
    run = ours(folder)
    assert run.impls == {"OnCpuImpl"}
    assert run.specs == expected.specs == {"MLAAttentionSpec"}
    assert run.steps > 40
    assert [equal(*rounds) for rounds in zip(run.tokens, expected.tokens, strict=True)] == [NUM_PROMPTS] * 2

    def forget(self: Any, q: Any, *rest: Any) -> tuple[torch.Tensor, None]:
        return torch.zeros(*q[0].shape[:2], self.kv_lora_rank, dtype=q[0].dtype), None

    monkeypatch.setattr(OnCpuImpl, "forward_mqa", forget)
    broken = ours(folder, rounds=1)
    assert equal(broken.tokens[0], expected.tokens[0]) < NUM_PROMPTS // 2
