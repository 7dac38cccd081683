"""The back end for GPUs in a real engine, with the kernels of the CPU behind it: greedy tokens equal vLLM's own.

vLLM makes the batches: rows that decode first, prompts and chunks behind, drafts, windows, several groups.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.attention import selector

from trunkattn import write_kv
from trunkattn.integrations.vllm import backend, cuda, cuda_impl
from trunkattn.integrations.vllm.flash import FlashPrefill

from .engine import Run, equal, generate
from .fakes import DeviceAttention, FlashRecorder

EAGLE = {"method": "eagle", "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of each call of FlashAttention by an engine that selects CUSTOM."""

    def write(key: torch.Tensor, value: torch.Tensor, *rest: Any) -> None:
        k_cache, v_cache, slots = rest[:3]
        write_kv(key[: len(slots)], value[: len(slots)], k_cache, v_cache, slots)

    kernel = FlashRecorder()
    # vLLM remembers the class that a process got for a kind of layer: not here, and not for the tests that follow.
    monkeypatch.setattr(selector, "_cached_get_attn_backend", selector._cached_get_attn_backend.__wrapped__)
    monkeypatch.setattr(backend, "TrunkAttentionBackend", cuda.TrunkAttentionCudaBackend)
    monkeypatch.setattr(cuda, "BatchAttention", DeviceAttention)
    monkeypatch.setattr(cuda_impl, "gpu_refusals", lambda *arguments: [])
    monkeypatch.setattr(cuda_impl, "find_flash", lambda spec: (FlashPrefill(spec, 3, kernel), "FlashAttention 3"))
    monkeypatch.setattr(cuda_impl._custom_ops, "reshape_and_cache_flash", write)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return kernel.calls


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("gemma2", {"disable_hybrid_kv_cache_manager": True}),
        ("llama", {"speculative_config": DRAFTS}),
        ("llama", {"speculative_config": EAGLE}),
        ("qwen3", {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}),
    ],
    ids=["plain", "windows", "one-group", "drafts", "eagle", "chunks"],
)
def test_tokens(
    name: str,
    options: dict[str, Any],
    model: Callable[[str], Path],
    stock: Callable[..., Run],
    flash_calls: list[dict[str, Any]],
) -> None:
    if (drafts := options.get("speculative_config")) is EAGLE:
        options = {"speculative_config": {**drafts, "model": str(model("eagle"))}}
    run = generate(model(name), block_size=16, attention_backend="CUSTOM", rounds=1, **options)
    assert run.backends == {"TrunkAttentionCudaBackend"}
    assert run.impls == {"TrunkAttentionCudaImpl"}
    expected = stock(name).tokens[0]
    assert equal(run.tokens[0], expected) == len(expected)
    decode_query_len = 4 if "speculative_config" in options else 1
    lens = [call["cu_seqlens_q"].diff() for call in flash_calls]
    assert lens, "prompts ran in FlashAttention"
    assert all(int(rows.max()) > decode_query_len for rows in lens), "and steps that only decode did not"
    assert run.steps > 24
