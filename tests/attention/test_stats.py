"""`plan.stats`: exact numbers on trees that can be counted by hand."""

import pytest
import torch

from benchmarks.workloads import PAT_TREES, parse_tree, tree_batch
from trunkattn import AttentionConfig, BatchAttention, PlanStats
from trunkattn.config import POLICIES


def stats(tree: str, policy: str, query_len: int = 1, window: int | None = None, **options: object) -> PlanStats:
    """Stats of a batch with 16-token pages. 32 query heads over 8 KV heads: 128 query tokens to a tile."""
    config = AttentionConfig(32, 8, 128, 16, torch.bfloat16, policy=policy, **options)  # type: ignore[arg-type]
    batch = tree_batch(parse_tree(tree), 16, row_seed=0, page_seed=0)
    starts = torch.arange(len(batch.seq_lens) + 1, dtype=torch.int32) * query_len
    tables = torch.from_numpy(batch.block_table), torch.from_numpy(batch.seq_lens)
    return BatchAttention(config, "cpu").plan(*tables, starts, window).stats


# tokens read, packs
BY_HAND = {
    "per_query": (4 * 96, 4),
    "relay": (64 + 4 * 32, 5),
    "cascade": (64 + 4 * 32, 5),
    "pat": (64 + 4 * 32, 5),  # 4 · 1 < 64
    "fasttree": (64 + 4 * 32, 5),
}


@pytest.mark.parametrize("policy", BY_HAND)
def test_one_trunk_with_four_leaves(policy: str) -> None:
    tokens, packs = BY_HAND[policy]
    assert stats("1,4_64,32", policy) == PlanStats(
        kv_tokens_read=tokens,
        kv_tokens_per_query=4 * 96,
        num_packs=packs,
        num_work_items=packs,
        tiles={"cpu": packs},
        policy=policy,
        reason="as configured",
    )


def test_pat_merges_a_short_trunk_into_a_child_with_many_queries() -> None:
    # two groups of 16 requests: 4 · 16 >= 64, so both groups read the trunk themselves; 4 · 1 < 96 for the leaves
    found = stats("1,2,32_64,32,16", "pat")
    assert (found.kv_tokens_read, found.num_packs) == (2 * 96 + 32 * 16, 34)
    assert stats("1,2,32_80,32,16", "pat").kv_tokens_read == 80 + 2 * 32 + 32 * 16


def test_a_trunk_with_more_queries_than_a_tile_is_read_once_per_tile() -> None:
    # 4 requests of 64 query tokens: two tiles of 128. A leaf's tile ends with its last token
    found = stats("1,4_128,96", "cascade", query_len=64)
    assert (found.kv_tokens_read, found.num_packs, found.num_work_items) == (2 * 128 + 4 * 96, 5, 6)
    assert found.kv_tokens_per_query == 4 * 224


def test_a_window_leaves_out_what_no_query_sees() -> None:
    found = stats("1,4_64,32", "cascade", window=40)
    assert (found.kv_tokens_read, found.kv_tokens_per_query) == (8 + 4 * 32, 4 * 40)
    hidden = stats("1,4_64,32", "cascade", window=32)
    assert (hidden.kv_tokens_read, hidden.num_packs) == (4 * 32, 4)
    chunk = stats("1,4_64,32", "per_query", query_len=10, window=40)
    assert chunk.kv_tokens_read == chunk.kv_tokens_per_query == 4 * 49


def test_batch_invariant_shares_and_cuts_in_chunks_of_256_tokens() -> None:
    found = stats("1,4_320,32", "cascade", batch_invariant=True)
    assert (found.kv_tokens_read, found.num_packs) == (256 + 4 * 96, 5)
    alone = stats("1,4_320,32", "per_query", batch_invariant=True)
    assert (alone.kv_tokens_read, alone.num_packs, alone.num_work_items) == (4 * 352, 4, 8)


def test_auto_says_why() -> None:
    shared, alone = stats("1,64_1024,16", "auto"), stats("8_128", "auto")
    assert (shared.policy, shared.kv_tokens_read) == ("optimal", 1024 + 64 * 16)
    assert shared.reason.startswith("least predicted cost: optimal")
    assert (alone.policy, alone.reason) == ("per_query", "no two requests share a full page")


@pytest.mark.parametrize("tree", PAT_TREES)
def test_on_the_trees_of_pat_no_policy_reads_too_much_or_too_little(tree: str) -> None:
    found = {policy: stats(tree, policy) for policy in POLICIES}
    shape = parse_tree(tree)
    assert {s.kv_tokens_per_query for s in found.values()} == {shape.num_requests * shape.seq_len}
    assert found["per_query"].kv_tokens_read == shape.num_requests * shape.seq_len
    # a node is read once per 128 of its requests
    tiles = [-(-shape.num_requests // nodes // 128) for nodes in shape.nodes]
    by_node = sum(n * t * k for n, t, k in zip(shape.nodes, tiles, shape.tokens, strict=True))
    assert found["cascade"].kv_tokens_read == by_node
    for s in found.values():
        assert shape.unique_tokens <= s.kv_tokens_read <= shape.num_requests * shape.seq_len
        assert sum(s.tiles.values()) == s.num_work_items >= s.num_packs
