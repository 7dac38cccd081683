"""`BatchAttention` on an NVIDIA GPU at real sizes: accuracy, determinism, graphs, invariance, bad input."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention, write_kv, write_latent
from trunkattn.analysis.batch import PagedBatch
from trunkattn.analysis.trees import parse_tree, tree_batch

from .layers import GOOD, assert_repeats, expected, make_layer, ragged

pytestmark = pytest.mark.gpu


def check(config: AttentionConfig, batch: PagedBatch, tolerance: float, window: int | None = None) -> None:
    layer = make_layer(config, batch)
    attention = BatchAttention(config)
    plan = attention.plan(*layer.step, sliding_window=window)
    plan.check()
    out = torch.full((len(layer.q), config.num_qo_heads, config.value_dim), math.nan, device="cuda", dtype=config.dtype)
    options: dict[str, Any] = {} if window is None else {"window": window}
    sinks = torch.randn(config.num_qo_heads, device="cuda") if config.sinks else None
    if sinks is not None:
        options["sinks"] = sinks
    attention.run(plan, layer.q, layer.k_cache, layer.v_cache, out=out, sinks=sinks)
    assert not out.isnan().any()
    rows = [int(row) for row in np.flatnonzero(batch.query_lens)]
    rows = rows[:: max(1, len(rows) // 12)]
    starts = batch.query_start_loc
    found = torch.cat([out[starts[row] : starts[row + 1]] for row in rows]).double()
    error = float((found - expected(layer, config, rows, **options)).abs().max())
    assert error < tolerance, f"error {error:.3g}"


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float16, 0.003), (torch.float32, 1e-5)])
@pytest.mark.parametrize("tree", ["1,8,64_512,128,100", "1,10_4096,416", "8_8192", "1,256_256,32", "1,300_2048,20"])
def test_decodes_of_trees_match_the_oracle(tree: str, dtype: torch.dtype, tolerance: float) -> None:
    check(replace(GOOD, dtype=dtype), tree_batch(parse_tree(tree), 16, row_seed=0, page_seed=0), tolerance)


@pytest.mark.parametrize(
    "head_dim, page_size", [(64, 16), (80, 16), (96, 32), (192, 16), (256, 16), (128, 1), (128, 5)]
)
def test_any_head_dim_and_page_size_match_the_oracle(head_dim: int, page_size: int) -> None:
    tree = "1,4,40_320,160,90"
    check(replace(GOOD, head_dim=head_dim, page_size=page_size), tree_batch(parse_tree(tree), page_size), 0.02)


@pytest.mark.parametrize(("head_dim", "page_size"), [(128, 528), (128, 784), (256, 528)])
def test_pages_of_hybrid_models(head_dim: int, page_size: int) -> None:
    """As large as a layer's recurrent state: whole 16 tokens, and no power of two."""
    tree = f"1,4,40_{page_size},{page_size},90"
    check(replace(GOOD, head_dim=head_dim, page_size=page_size), tree_batch(parse_tree(tree), page_size), 0.02)


@pytest.mark.parametrize("heads", [(32, 32), (16, 8), (64, 8), (10, 2), (14, 2), (24, 2), (16, 1)])
def test_any_group_of_heads_matches_the_oracle(heads: tuple[int, int]) -> None:
    check(replace(GOOD, num_qo_heads=heads[0], num_kv_heads=heads[1]), ragged("1,4,40_320,160,90", 16), 0.02)


@pytest.mark.parametrize("policy", ["per_query", "relay", "cascade", "fasttree", "pat", "optimal", "auto"])
@pytest.mark.parametrize("window", [None, 100])
def test_every_policy_matches_the_oracle(policy: str, window: int | None) -> None:
    check(replace(GOOD, policy=policy), ragged("1,4,40_320,160,90", 16), 0.02, window)


def test_soft_cap_sinks_and_a_narrower_value() -> None:
    check(replace(GOOD, logits_soft_cap=20.0, sinks=True, head_dim_v=64), ragged("1,4,40_320,160,90", 16), 0.02, 200)


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_caches_match_the_oracle(kv_dtype: torch.dtype) -> None:
    check(replace(GOOD, kv_dtype=kv_dtype), ragged("1,4,40_320,160,90", 16), 0.03)


def test_a_thousand_runs_are_bit_equal() -> None:
    assert_repeats(GOOD, tree_batch(parse_tree("1,8,64_512,128,100"), 16))


def test_a_graph_replays_on_new_values() -> None:
    layer = make_layer(GOOD, tree_batch(parse_tree("1,8,64_512,128,100"), 16))
    attention = BatchAttention(GOOD)
    plan = attention.plan(*layer.step)
    out = torch.empty_like(layer.q)
    attention.run(plan, layer.q, layer.k_cache, layer.v_cache, out=out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(plan, layer.q, layer.k_cache, layer.v_cache, out=out)
    for seed in range(3):
        fresh = make_layer(GOOD, layer.batch, seed)
        for target, source in zip((layer.q, layer.k_cache), (fresh.q, fresh.k_cache), strict=True):
            target.copy_(source)
        graph.replay()
        assert torch.equal(out, attention.run(plan, layer.q, layer.k_cache, layer.v_cache))


def test_any_strides_give_the_same_bits() -> None:
    layer = make_layer(GOOD, tree_batch(parse_tree("1,4,12_64,32,20"), 16))
    attention = BatchAttention(GOOD)
    plan = attention.plan(*layer.step)
    expected_out = attention.run(plan, layer.q, layer.k_cache, layer.v_cache)
    q = layer.q.transpose(0, 2).contiguous().transpose(0, 2)
    out = torch.full_like(q, math.nan)
    assert q.stride(2) != 1 and out.stride(2) != 1
    caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (layer.k_cache, layer.v_cache)]
    attention.run(plan, q, *caches, out=out)
    assert torch.equal(out, expected_out)


@pytest.mark.parametrize("window", [None, 1, 100, 300, 600])
def test_a_batch_invariant_output_does_not_depend_on_the_batch(window: int | None) -> None:
    """Requests of one item see a window from different blocks on."""
    config = replace(GOOD, batch_invariant=True)
    batch = tree_batch(parse_tree("1,4,24_512,256,90"), 16, row_seed=0)
    shorter = np.random.default_rng(0).integers(0, 80, len(batch.seq_lens)).astype(np.int32)
    layer = make_layer(config, replace(batch, seq_lens=batch.seq_lens - shorter))
    attention = BatchAttention(config)
    options = {"sliding_window": window}
    together = attention.run(attention.plan(*layer.step, **options), layer.q, layer.k_cache, layer.v_cache)
    for rows in ([3], [5, 9, 20], list(range(0, 24, 2))):
        table, lens = (array[rows] for array in layer.step[:2])
        some = attention.run(attention.plan(table, lens, **options), layer.q[rows], layer.k_cache, layer.v_cache)
        assert torch.equal(some, together[rows])


def test_write_kv_equals_the_cpu() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(50, 2, 80), torch.randn(50, 2, 64)
    slots = torch.randperm(7 * 16)[:50]
    slots[3] = -1
    caches = [torch.zeros(7, 2, 16, dim, dtype=torch.bfloat16).transpose(1, 2) for dim in (80, 64)]
    on_card = [cache.cuda() for cache in caches]
    write_kv(k, v, *caches, slots)
    write_kv(k.cuda(), v.cuda(), *on_card, slots.cuda())
    assert all(torch.equal(a, b.cpu()) for a, b in zip(caches, on_card, strict=True))


def test_write_latent_equals_the_cpu() -> None:
    torch.manual_seed(0)
    latent, rope, slots = torch.randn(50, 512), torch.randn(50, 64), torch.randperm(7 * 16)[:50]
    slots[3] = -1
    cache = torch.zeros(7, 16, 576, dtype=torch.bfloat16)
    on_card = cache.cuda()
    write_latent(latent, rope, cache, slots)
    write_latent(latent.cuda(), rope.cuda(), on_card, slots.cuda())
    assert torch.equal(cache, on_card.cpu())


def test_a_block_table_on_the_card_gives_the_same_plan() -> None:
    layer = make_layer(GOOD, ragged("1,4,40_320,160,90", 16))
    attention = BatchAttention(GOOD)
    host, card = attention.plan(*layer.step), attention.plan(*(array.cuda() for array in layer.step))
    assert np.array_equal(host.step.tiles.tile_list().items, card.step.tiles.tile_list().items)


def test_tensors_of_another_device_are_refused() -> None:
    layer = make_layer(GOOD, tree_batch(parse_tree("1,4_64,20"), 16))
    attention = BatchAttention(GOOD)
    plan = attention.plan(*layer.step)
    with pytest.raises(ValueError, match="q is on cpu: expected cuda"):
        attention.run(plan, layer.q.cpu(), layer.k_cache, layer.v_cache)
    with pytest.raises(ValueError, match="v_cache is on cpu: expected cuda"):
        attention.run(plan, layer.q, layer.k_cache, layer.v_cache.cpu())


def test_what_the_kernels_cannot_hold_is_refused() -> None:
    with pytest.raises(ValueError, match="head_dim 320: expected at most 256"):
        BatchAttention(replace(GOOD, head_dim=320))


def test_for_the_sanitizer() -> None:
    for window in (None, 50):
        check(GOOD, ragged("1,3,12_64,32,30", 16), 0.02, window)
    check(replace(GOOD, policy="pat", num_kv_heads=4), tree_batch(parse_tree("1,40_128,20"), 16), 0.02)
