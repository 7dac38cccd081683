"""Hybrid models: full attention is ours, linear attention vLLM's own, in blocks as large as the latter's state."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from .engine import equal, generate
from .models import VOCABULARY

pytestmark = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM's linear attention on a CPU needs AVX-512 for bfloat16"
)
OPTIONS = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32", "max_model_len": 1024, "rounds": 2}


def documents() -> list[list[int]]:
    """Eight questions about a text that fills a block, and two texts by themselves."""
    rng = random.Random(3)

    def text(length: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(length)]

    trunk = text(620)
    return [*(trunk + text(5 + 9 * i) for i in range(8)), text(30), text(700)]


@pytest.mark.parametrize(
    ("choice", "block_size", "expected_size", "caching"),
    [
        ({"attention_backend": "CUSTOM"}, 32, 544, True),
        ({"attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}}}, 16, 528, False),
    ],
    ids=["all", "by-kind"],
)
def test_tokens(
    choice: dict[str, Any], block_size: int, expected_size: int, caching: bool, model: Callable[[str], Path]
) -> None:
    """In bfloat16, whose rounding decides between tokens that are nearly as likely: two answers of ten may part. By the
    prefix cache, which decides where a prompt is cut, vLLM's own part from themselves."""
    folder, options = model("qwen3_next"), {**OPTIONS, "enable_prefix_caching": caching, "asked": documents()}
    expected = generate(folder, block_size=32, **options)
    run = generate(folder, block_size=block_size, **options, **choice)
    assert run.backends - expected.backends == {"TrunkAttentionBackend"}
    assert run.impls == {"TrunkAttentionImpl", "QwenGatedDeltaNetAttention"}
    assert run.specs == expected.specs == {"FullAttentionSpec", "MambaSpec"}
    assert expected_size in run.block_sizes
    assert (run.kv_bytes_saved > 0) == caching
    for ours, theirs in zip(run.tokens, expected.tokens, strict=True):
        assert equal(ours, theirs) >= len(theirs) - 2


def test_the_back_end_for_gpus(model: Callable[[str], Path], flash_calls: list[dict[str, Any]]) -> None:
    """With the kernels of the CPU behind it."""
    options = {**OPTIONS, "asked": documents(), "enable_prefix_caching": False}
    run = generate(model("qwen3_next"), block_size=16, attention_backend="CUSTOM", **options)
    assert run.impls == {"TrunkAttentionCudaImpl", "QwenGatedDeltaNetAttention"}
    assert 528 in run.block_sizes
    assert {call["k"].shape[1] for call in flash_calls} == {528}
    expected = generate(model("qwen3_next"), block_size=32, **options)
    assert sum(equal(*rounds) for rounds in zip(run.tokens, expected.tokens, strict=True)) >= 2 * 10 - 2
