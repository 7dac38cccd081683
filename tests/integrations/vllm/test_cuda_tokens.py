"""The back end for GPUs in a real engine, with the kernels of the CPU behind it: greedy tokens equal vLLM's own.

vLLM makes the batches: rows that decode first, prompts and chunks behind, drafts, windows, several groups.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .engine import Run, equal, generate

EAGLE = {"method": "eagle", "num_speculative_tokens": 3, "attention_backend": "CUSTOM"}
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2, "prompt_lookup_min": 1}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("gemma2", {}),
        ("gemma2", {"disable_hybrid_kv_cache_manager": True}),
        ("llama", {"speculative_config": DRAFTS}),
        ("llama", {"speculative_config": EAGLE}),
        ("llama4", {"speculative_config": DRAFTS}),
        ("gemma4", {}),
        ("gemma4", {"kv_sharing_fast_prefill": True}),
        ("qwen3", {"max_num_batched_tokens": 256, "enable_chunked_prefill": True}),
    ],
    ids=[
        "plain",
        "windows",
        "one-group",
        "drafts",
        "eagle",
        "within-chunks",
        "shared-caches",
        "fast-prefill",
        "chunks",
    ],
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
    names = {backend.split("_")[-1].removeprefix("FastPrefill") for backend in run.backends}
    assert names == {"TrunkAttentionCudaBackend"}
    assert options.get("kv_sharing_fast_prefill", False) == any("FastPrefill" in name for name in run.backends)
    assert run.impls == {"TrunkAttentionCudaImpl"}
    expected = stock(name).tokens[0]
    assert equal(run.tokens[0], expected) == len(expected)
    decode_query_len = 4 if "speculative_config" in options else 1
    lens = [call["cu_seqlens_q"].diff() for call in flash_calls]
    assert lens, "prompts ran in FlashAttention"
    assert all(int(rows.max()) > decode_query_len for rows in lens), "and steps that only decode did not"
    assert run.steps > 24
