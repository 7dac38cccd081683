"""Decode context parallelism without vLLM: ranks that hold parts of each request give together what one would."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trunkattn import AttentionConfig, BatchAttention, merge_states
from trunkattn.integrations.vllm.context_parallel import ContextRanks, check_merge
from trunkattn.reference import paged_attention

PAGE, HEADS, KV_HEADS, DIM = 16, 4, 1, 16


def ranks_of(size: int, interleave: int) -> list[ContextRanks]:
    return [ContextRanks(size, rank, interleave) for rank in range(size)]


@pytest.mark.parametrize(("size", "interleave"), [(2, 1), (2, 16), (3, 4), (8, 1)])
def test_the_ranks_hold_each_token_once(size: int, interleave: int) -> None:
    lens = torch.arange(300, dtype=torch.int32)
    owner = torch.arange(300) // interleave % size
    for ranks in ranks_of(size, interleave):
        expected = torch.tensor([int((owner[:n] == ranks.rank).sum()) for n in lens.tolist()], dtype=torch.int32)
        found = ranks.local_lens(lens)
        assert found.dtype == torch.int32, "as plans take them"
        assert torch.equal(found, expected)
        assert all(int(local) <= ranks.most_local(n) for n, local in enumerate(found))


def shard(
    whole: torch.Tensor, table: torch.Tensor, lens: torch.Tensor, ranks: ContextRanks, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's cache and block table: a block of it holds the tokens of `size` blocks that are this rank's."""
    num_local = int(table.max()) + 1
    local = torch.full((num_local, PAGE, KV_HEADS, DIM), float("nan"))
    local_table = table[:, :columns].clone()
    for row, length in enumerate(lens.tolist()):
        mine = [t for t in range(length) if t // ranks.interleave % ranks.size == ranks.rank]
        for at, token in enumerate(mine):
            local[local_table[row, at // PAGE], at % PAGE] = whole[row, token]
    return local, local_table


@pytest.mark.property
@given(
    seed=st.integers(0, 2**32 - 1),
    size=st.sampled_from([2, 3, 4]),
    interleave=st.sampled_from([1, 2, 16]),
    soft_cap=st.sampled_from([None, 5.0]),
)
def test_ranks_together_equal_one(seed: int, size: int, interleave: int, soft_cap: float | None) -> None:
    """Decodes of requests with a common beginning, some so short that a rank holds nothing of them."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    shared_blocks, requests = int(rng.integers(0, 4)), int(rng.integers(1, 6))
    shared = shared_blocks * PAGE * size  # tokens: whole blocks of every rank
    lens = torch.from_numpy((shared + rng.integers(1, 70, requests)).astype(np.int32))
    longest = int(lens.max())
    keys, values = torch.randn(2, requests, longest, KV_HEADS, DIM)
    keys[:, :shared], values[:, :shared] = keys[0, :shared].clone(), values[0, :shared].clone()
    columns = -(-longest // PAGE)
    table = torch.arange(requests * columns, dtype=torch.int32).view(requests, columns)
    table[:, :shared_blocks] = table[0, :shared_blocks].clone()
    query = torch.randn(requests, HEADS, DIM)

    config = AttentionConfig(HEADS, KV_HEADS, DIM, PAGE, torch.float32, logits_soft_cap=soft_cap)
    out, lse = torch.zeros(requests, HEADS, DIM), torch.full((requests, HEADS), -math.inf)
    for ranks in ranks_of(size, interleave):
        (k_cache, tables), (v_cache, _) = (shard(each, table, lens, ranks, columns) for each in (keys, values))
        first = tables[:, 0].long()
        local = ranks.local_lens(lens)
        for cache in (k_cache, v_cache):  # what a block holds before anything is written there
            cache[first[local == 0], 0] = 0.0
        attention = BatchAttention(config, "cpu")
        plan = attention.plan(tables, local.clamp(min=1))
        part, part_lse = attention.run(plan, query, k_cache, v_cache, return_lse=True)
        part_lse.masked_fill_((local == 0)[:, None], -math.inf)
        out, lse = merge_states(out, lse, part, part_lse)

    whole = torch.arange(requests * columns, dtype=torch.int32).view(requests, columns)
    caches = []
    for each in (keys, values):
        padded = torch.zeros(requests, columns * PAGE, KV_HEADS, DIM)
        padded[:, :longest] = each
        caches.append(padded.view(-1, PAGE, KV_HEADS, DIM))
    starts = torch.arange(requests + 1, dtype=torch.int32)
    expected, expected_lse = paged_attention(query, *caches, whole, lens, starts, logits_soft_cap=soft_cap)
    torch.testing.assert_close(out, expected.float(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(lse, expected_lse.float(), rtol=1e-4, atol=1e-5)


def test_ranks_that_vllm_does_not_merge_are_refused() -> None:
    """Its reduce-scatter returns memory that nobody wrote if its NCCL is not to be had."""
    without, with_it = (
        SimpleNamespace(device_communicator=SimpleNamespace(pynccl_comm=SimpleNamespace(disabled=disabled)))
        for disabled in (True, False)
    )
    with pytest.raises(ValueError, match="set dcp_comm_backend=a2a"):
        check_merge(without, all_to_all=False)
    check_merge(without, all_to_all=True)
    check_merge(with_it, all_to_all=False)
    check_merge(SimpleNamespace(), all_to_all=False)
