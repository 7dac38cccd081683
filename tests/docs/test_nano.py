"""examples/nano.py computes what the library computes, and reads as many KV tokens."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads.forests import random_forest
from trunkattn import AttentionConfig, BatchAttention

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))
import nano  # noqa: E402

HEAD_DIM = 8


@pytest.mark.property
@settings(deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    policy=st.sampled_from(("cascade", "pat")),
    heads=st.sampled_from(((4, 2), (3, 3), (8, 1))),
    page_size=st.sampled_from((1, 4, 16)),
)
def test_nano_is_the_library(seed: int, policy: str, heads: tuple[int, int], page_size: int) -> None:
    rng = np.random.default_rng(seed)
    batch = random_forest(rng, page_size=page_size, max_own_tokens=60, max_query_len=9)
    num_qo_heads, num_kv_heads = heads
    q = rng.standard_normal((int(batch.query_lens.sum()), num_qo_heads, HEAD_DIM)).astype(np.float32)
    caches = rng.standard_normal((2, batch.num_pages, page_size, num_kv_heads, HEAD_DIM)).astype(np.float32)

    config = AttentionConfig(num_qo_heads, num_kv_heads, HEAD_DIM, page_size, torch.float32, policy=policy)
    attention = BatchAttention(config, device="cpu")
    starts = np.concatenate([[0], np.cumsum(batch.query_lens)]).astype(np.int32)
    tables = (torch.from_numpy(array) for array in (batch.block_table, batch.seq_lens, starts))
    plan = attention.plan(*tables)
    expected, expected_lse = attention.run(plan, *map(torch.from_numpy, (q, *caches)), return_lse=True)

    out, lse, read = nano.nano_attention(q, *caches, batch.block_table, batch.seq_lens, batch.query_lens, policy)
    assert read == plan.stats.kv_tokens_read
    np.testing.assert_allclose(out, expected.numpy(), atol=2e-5)
    np.testing.assert_allclose(lse, expected_lse.numpy(), atol=2e-5)


def test_a_shared_prompt_is_read_once() -> None:
    table = np.array([[0, 1, 2], [0, 1, 3], [0, 1, 4]])
    q, k, v = np.ones((3, 1, 4)), np.ones((5, 4, 1, 4)), np.ones((5, 4, 1, 4))
    *_, read = nano.nano_attention(q, k, v, table, np.array([9, 10, 11]), np.ones(3, int), "cascade")
    assert read == 8 + 1 + 2 + 3


def test_it_stays_small() -> None:
    lines = (ROOT / "examples" / "nano.py").read_text().splitlines()
    assert len(lines) <= 250
