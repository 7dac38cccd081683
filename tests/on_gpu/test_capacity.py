"""One captured CUDA graph serves every batch within its capacity."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from trunkattn import BatchAttention, Capacity
from trunkattn.analysis.trees import parse_tree, tree_batch
from trunkattn.integrations import captured_run
from trunkattn.integrations.captured_run import CapturedRun

from .layers import GOOD, captured, expected, make_layer, ragged, replay

pytestmark = pytest.mark.gpu
TREES = ("1,8,64_512,128,100", "1,10_4096,416", "8_8192", "1,256_256,32", "1,300_2048,20", "256_1024", "1_30000")


def test_layers_captured_one_by_one_run_any_plan() -> None:
    """q and out elsewhere, of another length and other strides in every step; layers with other caches and scales, and
    inside and outside of inference mode."""
    layers = [make_layer(GOOD, tree_batch(parse_tree(tree), 16, row_seed=0, page_seed=0)) for tree in TREES[:4]]
    pages = max(len(layer.k_cache) for layer in layers)
    attention = BatchAttention(GOOD, "cuda", Capacity(320, 320, 2048, pages, max_query_len=1))
    plan = attention.plan(*(table.cuda() for table in layers[0].step))
    run, scales = CapturedRun(attention), ({}, {"k_scale": 0.5}, {"v_scale": 0.5})
    caches = [torch.zeros(3, pages, *layers[0].k_cache.shape[1:], device="cuda", dtype=GOOD.dtype) for _ in "kv"]
    for number, layer in enumerate((*layers, *layers)):
        assert attention.plan(*(table.cuda() for table in layer.step), into=plan) is plan
        for place, options in enumerate(scales):
            for cache, source in zip(caches, (layer.k_cache, layer.v_cache), strict=True):
                cache[place, : len(source)] = source * (1 - place)
            with torch.inference_mode(number % 2 == 1):
                whole = torch.full(
                    (len(layer.q), 3 * GOOD.num_qo_heads, 128), math.nan, device="cuda", dtype=GOOD.dtype
                )
                q, out, _ = whole.chunk(3, 1)
                q.copy_(layer.q)
                run(plan, q, *(cache[place] for cache in caches), out, **options)
                wanted = attention.run(plan, layer.q, *(cache[place] for cache in caches), **options)
            assert torch.equal(out, wanted)
            assert not out.isnan().any()
    graphs = list(run._graphs._graphs.values())
    assert len(graphs) == 3
    assert all(graphs), "captured"
    given = (*(cache[0] for cache in caches), out)
    with pytest.raises(TypeError, match="q has dtype"):
        run(plan, q.float(), *given)
    with pytest.raises(ValueError, match="q has shape"):
        run(plan, torch.zeros(321, GOOD.num_qo_heads, 128, device="cuda", dtype=GOOD.dtype), *given)


def test_the_last_captured_layer_may_be_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captured_run, "_MOST_GRAPHS", 1)
    layer = make_layer(GOOD, tree_batch(parse_tree(TREES[0]), 16, row_seed=0, page_seed=0))
    attention = BatchAttention(GOOD, "cuda", Capacity(64, 64, 64, len(layer.k_cache), max_query_len=1))
    plan, run = attention.plan(*(table.cuda() for table in layer.step)), CapturedRun(attention)
    for v_scale in (0.5, 0.5, 2.0, 2.0, 0.5, 0.5):
        out = torch.empty_like(layer.q)
        run(plan, layer.q, layer.k_cache, layer.v_cache, out, v_scale=v_scale)
        assert torch.equal(out, attention.run(plan, layer.q, layer.k_cache, layer.v_cache, v_scale=v_scale))


@pytest.mark.parametrize("by_layer", [False, True], ids=["one graph", "a layer's own"])
def test_captured_scales_are_read_where_they_change(by_layer: bool) -> None:
    """As in the full graphs of engines, whose weights are loaded again with other scales of an 8-bit cache."""
    config = replace(GOOD, kv_dtype=torch.float8_e4m3fn)
    layer = make_layer(config, tree_batch(parse_tree(TREES[0]), 16, row_seed=0, page_seed=0))
    attention = BatchAttention(config, "cuda", Capacity(64, 64, 64, len(layer.k_cache), max_query_len=1))
    plan, caches = attention.plan(*(table.cuda() for table in layer.step)), (layer.k_cache, layer.v_cache)
    scales = {name: torch.ones((), device="cuda") for name in ("k_scale", "v_scale")}
    out, run, graph = torch.empty_like(layer.q), CapturedRun(attention), torch.cuda.CUDAGraph()
    for _ in range(2):
        run(plan, layer.q, *caches, out, **scales)
    with torch.cuda.graph(graph):
        attention.run(plan, layer.q, *caches, out=out, **scales)
    for k_scale, v_scale in ((0.5, 2.0), (0.25, 0.75)):
        scales["k_scale"].fill_(k_scale)
        scales["v_scale"].fill_(v_scale)
        out.fill_(math.nan)
        if by_layer:
            run(plan, layer.q, *caches, out, **scales)
        else:
            graph.replay()
        assert torch.equal(out, attention.run(plan, layer.q, *caches, k_scale=k_scale, v_scale=v_scale))
    assert len(run._graphs._graphs) == 1, "captured once"


WAYS = [("auto", "serial"), ("auto", "streams"), ("pat", "serial"), ("pat", "streams")]


@pytest.mark.parametrize("policy, execution", [*WAYS, ("per_query", "serial")])
def test_one_graph_for_decode_batches_of_any_shape(policy: str, execution: str) -> None:
    config = replace(GOOD, policy=policy, execution=execution)
    layers = [make_layer(config, tree_batch(parse_tree(tree), 16, row_seed=0, page_seed=0)) for tree in TREES]
    capacity = Capacity(320, 320, 2048, 1 << 20, max_query_len=1)
    attention, tensors, (graph, plan) = captured(config, capacity, layers)
    for layer in (*layers, layers[0]):
        found = replay(layer, attention, tensors, graph, plan)
        rows = [0, len(layer.q) // 2, len(layer.q) - 1]
        error = float((found[rows].double() - expected(layer, config, rows)).abs().max())
        assert error < 0.02
        assert not found.isnan().any()


def test_one_graph_for_several_query_tokens_and_padding_rows() -> None:
    config = replace(GOOD, logits_soft_cap=20.0)
    layers = [make_layer(config, ragged("1,4,40_320,160,90", 16, seed), seed) for seed in range(3)]
    attention, tensors, (graph, plan) = captured(config, Capacity(64, 2048, 64, 1 << 20), layers)
    for layer in layers:
        found = replay(layer, attention, tensors, graph, plan)
        rows = [int(row) for row in np.flatnonzero(layer.batch.query_lens)][::5]
        starts = layer.batch.query_start_loc
        some = torch.cat([found[starts[row] : starts[row + 1]] for row in rows]).double()
        assert float((some - expected(layer, config, rows)).abs().max()) < 0.02


@pytest.mark.parametrize("policy", ["auto", "cascade"])
def test_a_batch_invariant_graph_gives_the_bits_of_a_plan_of_its_own(policy: str) -> None:
    config = replace(GOOD, batch_invariant=True, policy=policy)
    layers = [make_layer(config, tree_batch(parse_tree(tree), 16)) for tree in TREES[:3]]
    attention, tensors, (graph, plan) = captured(config, Capacity(320, 320, 1024, 1 << 20), layers)
    own = BatchAttention(config)
    for layer in layers:
        found = replay(layer, attention, tensors, graph, plan)
        assert torch.equal(found, own.run(own.plan(*layer.step), layer.q, layer.k_cache, layer.v_cache))


@pytest.mark.parametrize("window", [None, 700])
def test_a_batch_invariant_plan_of_the_device_gives_the_same_bits(window: int | None) -> None:
    config = replace(GOOD, batch_invariant=True)
    own, options = BatchAttention(config), {"sliding_window": window}
    for tree in TREES[:3]:
        layer = make_layer(config, tree_batch(parse_tree(tree), 16))
        attention = BatchAttention(config, "cuda", Capacity(320, 320, 1024, len(layer.k_cache)))
        plan = attention.plan(*(table.cuda() for table in layer.step), **options)
        assert attention._backend.plans_on_device
        found = attention.run(plan, layer.q, layer.k_cache, layer.v_cache)
        wanted = own.run(own.plan(*layer.step, **options), layer.q, layer.k_cache, layer.v_cache)
        assert torch.equal(found, wanted)


def test_run_allocates_nothing_beyond_out() -> None:
    layer = make_layer(GOOD, tree_batch(parse_tree("1,8,64_512,128,100"), 16))
    attention = BatchAttention(GOOD, "cuda", Capacity(64, 64, 64, len(layer.k_cache)))
    plan, out = attention.plan(*layer.step), torch.empty_like(layer.q)
    attention.run(plan, layer.q, layer.k_cache, layer.v_cache, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(10):
        attention.run(plan, layer.q, layer.k_cache, layer.v_cache, out=out, k_scale=1.0)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
