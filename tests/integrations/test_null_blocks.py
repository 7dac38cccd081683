"""Block tables as vLLM makes them for sliding windows: block 0 in place of history that no query sees any more.

Equal ids look like a shared prefix. Nothing may be read of it: here block 0 holds NaN, which no mask would hide.
"""

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention
from trunkattn.reference import paged_attention

PAGE, HEADS, KV_HEADS, DIM, PAGES = 16, 4, 2, 16, 200
UNUSED = 199  # what stale columns name, beyond a row's last block


def make_table(
    rng: np.random.Generator, seq_lens: np.ndarray, query_lens: np.ndarray, window: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(as vLLM gives it, with the history in place). Rows have no block in common, but the blocks that are gone."""
    columns = -(-int(seq_lens.max()) // PAGE) + 3
    full = rng.permutation(np.arange(1, UNUSED))[: len(seq_lens) * columns].reshape(len(seq_lens), columns)
    nulled = full.copy()
    for row, (length, queries) in enumerate(zip(seq_lens, query_lens, strict=True)):
        skipped = max(0, length - queries - window + 1)  # tokens before the first that the first query sees
        nulled[row, : skipped // PAGE] = 0
        nulled[row, -(-length // PAGE) :] = UNUSED
    return torch.from_numpy(nulled.astype(np.int32)), torch.from_numpy(full.astype(np.int32))


def make_caches() -> tuple[torch.Tensor, torch.Tensor]:
    caches = torch.randn(2, PAGES, PAGE, KV_HEADS, DIM)
    caches[:, [0, UNUSED]] = float("nan")
    return caches[0], caches[1]


CONFIG = AttentionConfig(HEADS, KV_HEADS, DIM, PAGE, torch.float32)


@pytest.mark.parametrize("policy", ["auto", "cascade", "relay", "pat"])
@pytest.mark.parametrize("window", [1, 7, 16, 33, 64])
@pytest.mark.parametrize("seed", range(4))
def test_nothing_is_read_of_null_blocks(seed: int, window: int, policy: str) -> None:
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    query_lens = rng.choice([0, 1, 1, 1, 4, 40], size=8).astype(np.int32)
    seq_lens = np.where(query_lens > 0, query_lens + rng.integers(0, 250, 8), 0).astype(np.int32)
    table, full = make_table(rng, seq_lens, query_lens, window)
    k_cache, v_cache = make_caches()
    starts = torch.from_numpy(np.append(0, np.cumsum(query_lens)).astype(np.int32))
    q = torch.randn(int(query_lens.sum()), HEADS, DIM)
    config = AttentionConfig(HEADS, KV_HEADS, DIM, PAGE, torch.float32, policy=policy)
    attention = BatchAttention(config, "cpu")
    lens = torch.from_numpy(seq_lens)
    plan = attention.plan(table, lens, starts, sliding_window=window)
    plan.check()
    out = attention.run(plan, q, k_cache, v_cache)
    expected, _ = paged_attention(q, k_cache, v_cache, full, lens, starts, sliding_window=window)
    torch.testing.assert_close(out, expected.to(torch.float32), atol=2e-5, rtol=2e-5)


def test_blocks_that_turn_null_while_a_batch_grows() -> None:
    """Decoding: every few steps the window leaves a block behind, and a plan must not remember it."""
    rng, window = np.random.default_rng(0), 40
    torch.manual_seed(0)
    seq_lens, ones = np.array([30, 95, 150, 41], np.int32), np.ones(4, np.int32)
    _, full = make_table(rng, seq_lens + 60, ones, window)
    k_cache, v_cache = make_caches()
    attention = BatchAttention(CONFIG, "cpu")
    nulls = set()
    for _ in range(60):
        table = full.clone()
        for row, length in enumerate(seq_lens):
            gone = max(0, length - window) // PAGE
            table[row, :gone] = 0
            table[row, -(-int(length) // PAGE) :] = UNUSED
        nulls.add(int((table == 0).sum()))
        q, lens = torch.randn(4, HEADS, DIM), torch.from_numpy(seq_lens)
        plan = attention.plan(table, lens, sliding_window=window)
        out = attention.run(plan, q, k_cache, v_cache)
        expected, _ = paged_attention(q, k_cache, v_cache, full, lens, sliding_window=window)
        torch.testing.assert_close(out, expected.to(torch.float32), atol=2e-5, rtol=2e-5)
        seq_lens = seq_lens + 1
    assert len(nulls) > 5


def test_padding_rows_of_zeros_are_no_requests() -> None:
    """vLLM pads a batch with rows of block 0, length 0 and no query token."""
    torch.manual_seed(0)
    k_cache, v_cache = make_caches()
    table = torch.tensor([[5, 6, 0], [0, 0, 0], [0, 0, 0]], dtype=torch.int32)
    lens = torch.tensor([20, 0, 0], dtype=torch.int32)
    starts = torch.tensor([0, 1, 1, 1], dtype=torch.int32)
    attention = BatchAttention(CONFIG, "cpu")
    plan = attention.plan(table, lens, starts)
    assert plan.num_query_tokens == 1
    assert plan.stats.kv_tokens_read == 20
    q = torch.randn(1, HEADS, DIM)
    expected, _ = paged_attention(q, k_cache, v_cache, table, lens, starts)
    torch.testing.assert_close(attention.run(plan, q, k_cache, v_cache), expected.to(torch.float32))
