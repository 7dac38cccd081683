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
OPTIONS = {"dtype": "bfloat16", "max_model_len": 1024, "rounds": 2}


def documents() -> list[list[int]]:
    """Eight questions about a text that fills a block, and two texts by themselves."""
    rng = random.Random(3)

    def text(length: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(length)]

    trunk = text(620)
    return [*(trunk + text(5 + 9 * i) for i in range(8)), text(30), text(700)]


@pytest.mark.parametrize(
    "choice",
    [{"attention_backend": "CUSTOM"}, {"attention_config": {"backend_per_kind": {"full_attention": "CUSTOM"}}}],
    ids=["all", "by-kind"],
)
def test_tokens(choice: dict[str, Any], model: Callable[[str], Path]) -> None:
    """In bfloat16, where rounding may turn a token over."""
    folder = model("qwen3_next")
    expected = generate(folder, block_size=32, asked=documents(), **OPTIONS)
    run = generate(folder, block_size=16, asked=documents(), **OPTIONS, **choice)
    assert run.backends - expected.backends == {"TrunkAttentionBackend"}
    assert run.impls == {"TrunkAttentionImpl", "QwenGatedDeltaNetAttention"}
    assert run.specs == expected.specs == {"FullAttentionSpec", "MambaSpec"}
    assert run.block_sizes == {528}
    assert run.kv_bytes_saved > 0
    for ours, theirs in zip(run.tokens, expected.tokens, strict=True):
        assert equal(ours, theirs) >= len(theirs) - 1
