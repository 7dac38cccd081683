"""Prompt chunks on an NVIDIA GPU at real sizes: accuracy, determinism, graphs; NaN in every slot that is not read."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity, Plan
from trunkattn.analysis.batch import PagedBatch
from trunkattn.gpu.cards import card_at

from .layers import GOOD, Layer, assert_repeats, captured, chunks, expected, is_hopper, make_layer, poisoned, replay
from .watching import count_launches

pytestmark = pytest.mark.gpu


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every launch of the kernel for Hopper."""
    from trunkattn.gpu.hopper import prefill as hopper_prefill

    return count_launches(monkeypatch, hopper_prefill)


def check(config: AttentionConfig, batch: PagedBatch, tolerance: float = 0.02, window: int | None = None) -> None:
    layer = poisoned(config, batch)
    attention = BatchAttention(config)
    plan = attention.plan(*layer.step, sliding_window=window)
    plan.check()
    assert any(count for tile, count in plan.stats.tiles.items() if "prefill" in tile)
    sinks = torch.randn(config.num_qo_heads, device="cuda") if config.sinks else None
    options = {} if window is None else {"window": window}
    if sinks is not None:
        options["sinks"] = sinks
    out = torch.full((len(layer.q), config.num_qo_heads, config.value_dim), math.nan, device="cuda", dtype=config.dtype)
    attention.run(plan, layer.q, layer.k_cache, layer.v_cache, out=out, sinks=sinks)
    assert not out.isnan().any()
    rows = [int(row) for row in np.flatnonzero(batch.query_lens)]
    rows = rows[:: max(1, len(rows) // 6)]
    starts = batch.query_start_loc
    for row in rows:
        error = float(
            (out[starts[row] : starts[row + 1]].double() - expected(layer, config, [row], **options)).abs().max()
        )
        assert error < tolerance, f"row {row}: error {error:.3g}"


@pytest.mark.parametrize("dtype, tolerance", [(torch.bfloat16, 0.02), (torch.float16, 0.003), (torch.float32, 1e-5)])
@pytest.mark.parametrize("cached", [0, 2048, 8192])
def test_a_chunk_of_512_tokens_matches_the_oracle(cached: int, dtype: torch.dtype, tolerance: float) -> None:
    check(replace(GOOD, dtype=dtype), chunks(f"1_{cached + 507}", [507]), tolerance)


def test_chunks_decodes_and_padding_rows() -> None:
    check(GOOD, chunks("1,4,40_1024,512,333", [1, 0, 300, 1, 17, 64]))


@pytest.mark.parametrize("tokens", [24, 40, 100])
def test_short_chunks_behind_one_prefix(tokens: int) -> None:
    check(GOOD, chunks(f"1,32_4096,{tokens}", [tokens]))


@pytest.mark.parametrize(
    "head_dim, page_size",
    [(64, 16), (80, 16), (96, 32), (192, 16), (256, 16), (128, 1), (128, 5), (128, 128), (128, 48)],
)
def test_any_head_dim_and_page_size_match_the_oracle(head_dim: int, page_size: int) -> None:
    config = replace(GOOD, head_dim=head_dim, page_size=page_size)
    check(config, chunks(f"1,4_{page_size * (600 // page_size)},250", [250, 90, 1], page_size))


@pytest.mark.parametrize("heads", [(32, 32), (16, 8), (64, 8), (10, 2), (14, 2), (24, 2), (16, 1)])
def test_any_group_of_heads_matches_the_oracle(heads: tuple[int, int]) -> None:
    check(replace(GOOD, num_qo_heads=heads[0], num_kv_heads=heads[1]), chunks("1,4_320,250", [250, 90, 1]))


@pytest.mark.parametrize("window", [1, 100, 3000])
@pytest.mark.parametrize("policy", ["auto", "cascade"])
def test_windows_soft_cap_and_sinks(policy: str, window: int) -> None:
    config = replace(GOOD, policy=policy, logits_soft_cap=20.0, sinks=True, head_dim_v=64)
    check(config, chunks("1,4_2048,450", [450, 90, 1]), window=window)


@pytest.mark.parametrize("window", [1, 100, 300, 3000])
def test_windows_match_the_oracle(window: int) -> None:
    check(GOOD, chunks("1,4_2048,500", [500, 90, 1, 333]), window=window)


@pytest.mark.parametrize("q_scale", [-1.0, 0.0, 0.5])
def test_scales_match_queries_that_are_scaled(q_scale: float) -> None:
    layer = make_layer(GOOD, chunks("1,4_1024,300", [300, 90, 1]))
    attention, starts = BatchAttention(GOOD), layer.batch.query_start_loc
    plan = attention.plan(*layer.step)
    k_scale = torch.linspace(0.5, 2, GOOD.num_kv_heads, device="cuda")
    scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": 3.0}
    out, lse = attention.run(plan, layer.q, layer.k_cache, layer.v_cache, return_lse=True, **scales)
    group = GOOD.num_qo_heads // GOOD.num_kv_heads
    scaled = replace(layer, q=layer.q.double() * q_scale * k_scale.repeat_interleave(group)[:, None].double())
    for row in range(4):
        want = 3 * expected(scaled, GOOD, [row])
        assert float((out[starts[row] : starts[row + 1]].double() - want).abs().max()) < 0.06
    if q_scale == 0:
        seen = torch.cat([torch.arange(1325 - count, 1325) for count in np.diff(starts).tolist()])
        want_lse = seen.double().log()[:, None].expand(-1, GOOD.num_qo_heads)
        assert float((lse.cpu().double() - want_lse).abs().max()) < 1e-4


@pytest.mark.parametrize("layout", ["head-major", "one row", "odd"])
def test_layouts_of_the_cache(layout: str) -> None:
    """TMA reads the first two; it cannot read rows that begin at odd addresses."""
    layer = make_layer(GOOD, chunks("1,4_1024,300", [300, 90, 1]))
    attention = BatchAttention(GOOD)
    plan = attention.plan(*layer.step)
    want = attention.run(plan, layer.q, layer.k_cache, layer.v_cache)
    if layout == "head-major":
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in (layer.k_cache, layer.v_cache)]
    elif layout == "one row":
        caches = list(torch.cat([layer.k_cache, layer.v_cache], -1).split(128, -1))
    else:
        caches = [torch.nn.functional.pad(cache, (1, 0))[..., 1:] for cache in (layer.k_cache, layer.v_cache)]
    out = torch.zeros(len(layer.q), GOOD.num_qo_heads, 256, device="cuda", dtype=GOOD.dtype)[..., :128]
    attention.run(plan, layer.q, *caches, out=out)
    assert torch.equal(out, want) if layout != "odd" else float((out - want).abs().max()) < 0.02


def test_run_allocates_nothing_with_chunks() -> None:
    layer = make_layer(GOOD, chunks("1,4_1024,300", [300, 90, 1]))
    attention = BatchAttention(GOOD)
    plan, out = attention.plan(*layer.step), torch.empty_like(layer.q)
    attention.run(plan, layer.q, layer.k_cache, layer.v_cache, out=out)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    attention.run(plan, layer.q, layer.k_cache, layer.v_cache, out=out)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_an_sm_90_and_no_other_card_gets_its_own_kernel(launched: list[int]) -> None:
    check(GOOD, chunks("1,4_1024,300", [300, 90]))
    assert bool(launched) == is_hopper()


FAMILY = (
    replace(GOOD, head_dim=64, num_qo_heads=64, sinks=True),
    replace(GOOD, head_dim=64),
    replace(GOOD, head_dim=64, num_qo_heads=56, dtype=torch.float16, page_size=32, logits_soft_cap=20.0),
    replace(GOOD, head_dim=256, num_qo_heads=16),
    replace(GOOD, head_dim=256, num_qo_heads=16, num_kv_heads=2, logits_soft_cap=20.0, sinks=True, page_size=32),
    replace(GOOD, head_dim=256, num_qo_heads=28, num_kv_heads=4, dtype=torch.float16),
    replace(GOOD, num_qo_heads=28, num_kv_heads=4),
    replace(GOOD, num_qo_heads=96, page_size=64),
    replace(GOOD, num_qo_heads=33, num_kv_heads=1, sinks=True),
    replace(GOOD, logits_soft_cap=20.0),
    replace(GOOD, logits_soft_cap=2.0, sinks=True, dtype=torch.float16),
)


def as_if_timed(monkeypatch: pytest.MonkeyPatch, family: bool = True) -> None:
    """Lets the kernels for decoding and for prompts on Hopper compute all that they can, whatever was timed. family:
    False: only what is plain."""
    card = card_at("cuda")
    timed = replace(card, model=replace(card.model, runs_hopper_kernels=family, overlap=None))
    monkeypatch.setattr("trunkattn.gpu.attention.card_of", lambda facts: timed)


@pytest.mark.parametrize("config", FAMILY, ids=str)
@pytest.mark.parametrize("window", [None, 1, 100, 300])
@pytest.mark.parametrize(
    "tree, query_lens",
    [("1_8800", [507]), ("1,4,40_1024,512,333", [1, 0, 300, 1, 17, 64]), ("1,32_4096,100", [100]), ("1_700", [700])],
)
def test_every_configuration_of_the_hopper_kernel_matches_the_oracle(
    monkeypatch: pytest.MonkeyPatch,
    launched: list[int],
    config: AttentionConfig,
    window: int | None,
    tree: str,
    query_lens: list[int],
) -> None:
    """A chunk behind a long context, chunks beside decodes, short chunks behind a trunk, and a whole prompt."""
    as_if_timed(monkeypatch)
    tolerance = 0.02 if config.dtype == torch.bfloat16 else 0.003
    check(config, chunks(tree, query_lens, config.page_size), tolerance, window)
    assert bool(launched) == is_hopper()


@pytest.mark.parametrize("config", FAMILY, ids=str)
@pytest.mark.parametrize("policy", ["cascade", "per_query"])
def test_the_family_with_lse_in_parts_and_whole(
    monkeypatch: pytest.MonkeyPatch, launched: list[int], config: AttentionConfig, policy: str
) -> None:
    """Outputs and log-sum-exps are those of the portable kernel, with scales of either sign. Sinks of any size are in
    the outputs alone."""
    config = replace(config, policy=policy)
    layer = make_layer(config, chunks("1,4_1024,300", [300, 90, 1], config.page_size))
    options = {"sinks": torch.linspace(-5, 9, config.num_qo_heads, device="cuda")} if config.sinks else {}
    inputs, results = (layer.q, layer.k_cache, layer.v_cache), []
    for family in (False, True):
        as_if_timed(monkeypatch, family)
        attention = BatchAttention(config)
        plan = attention.plan(*layer.step)
        scaled = {"q_scale": -0.5, "k_scale": torch.linspace(0.5, 2, config.num_kv_heads, device="cuda")}
        for scales in ({}, scaled | {"v_scale": 3.0}):
            results.append(attention.run(plan, *inputs, return_lse=True, **options, **scales))
        assert bool(launched) == (family and is_hopper())
    for (out, lse), (want, want_lse) in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("config", [FAMILY[0], FAMILY[3], FAMILY[6]], ids=str)
def test_a_cache_of_the_family_that_the_copy_engine_cannot_read(
    monkeypatch: pytest.MonkeyPatch, launched: list[int], config: AttentionConfig
) -> None:
    """The portable kernel computes the items of the kernel for Hopper."""
    as_if_timed(monkeypatch)
    config = replace(config, sinks=False)
    layer = make_layer(config, chunks("1,4_1024,300", [300, 90, 1]))
    odd = [torch.nn.functional.pad(cache, (1, 0))[..., 1:] for cache in (layer.k_cache, layer.v_cache)]
    attention = BatchAttention(config)
    plan = attention.plan(*layer.step)
    out = attention.run(plan, layer.q, *odd)
    assert not launched
    assert float((out - attention.run(plan, layer.q, layer.k_cache, layer.v_cache)).abs().max()) < 0.02
    assert bool(launched) == is_hopper()


def assert_replays(
    config: AttentionConfig,
    layers: list[Layer],
    attention: BatchAttention,
    tensors: list[torch.Tensor],
    graph: torch.cuda.CUDAGraph,
    plan: Plan,
) -> None:
    """Each layer, and the first again, is right in the captured graph."""
    for layer in (*layers, layers[0]):
        found = replay(layer, attention, tensors, graph, plan)
        assert not found.isnan().any()
        row = int(np.flatnonzero(layer.batch.query_lens)[-1])
        first, last = layer.batch.query_start_loc[row : row + 2]
        assert float((found[first:last].double() - expected(layer, config, [row])).abs().max()) < 0.02


@pytest.mark.parametrize("config", [FAMILY[0], FAMILY[4]], ids=str)
def test_one_graph_of_the_family(monkeypatch: pytest.MonkeyPatch, launched: list[int], config: AttentionConfig) -> None:
    """A program then computes several items, one after the other."""
    as_if_timed(monkeypatch)
    config = replace(config, sinks=False)
    trees = (("1_8704", [512]), ("1,4,40_1024,512,333", [1, 0, 300, 1, 17, 64]), ("1_2048", [2048]))
    layers = [make_layer(config, chunks(tree, lens, config.page_size), seed) for seed, (tree, lens) in enumerate(trees)]
    attention, tensors, (graph, plan) = captured(config, Capacity(64, 4096, 640, 1 << 16), layers)
    assert bool(launched) == is_hopper()
    assert_replays(config, layers, attention, tensors, graph, plan)


@pytest.mark.parametrize("config", [FAMILY[0], FAMILY[4]], ids=str)
def test_a_thousand_runs_of_the_family_are_bit_equal(
    monkeypatch: pytest.MonkeyPatch, launched: list[int], config: AttentionConfig
) -> None:
    as_if_timed(monkeypatch)
    assert_repeats(replace(config, sinks=False), chunks("1,4,40_1024,512,333", [1, 300, 1, 64], config.page_size))
    assert bool(launched) == is_hopper()


@pytest.mark.parametrize("kv_dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_caches_match_the_oracle(kv_dtype: torch.dtype) -> None:
    check(replace(GOOD, kv_dtype=kv_dtype), chunks("1,4_2048,450", [450, 90, 1]), 0.03)


@pytest.mark.parametrize("execution", ["serial", "streams"])
def test_a_thousand_runs_are_bit_equal(execution: str) -> None:
    assert_repeats(replace(GOOD, execution=execution), chunks("1,4,40_1024,512,333", [1, 300, 1, 64]))


@pytest.mark.parametrize("policy, execution", [("auto", "serial"), ("auto", "streams"), ("pat", "serial")])
def test_one_graph_for_decodes_and_chunks(policy: str, execution: str) -> None:
    config = replace(GOOD, policy=policy, execution=execution)
    batches = [
        chunks("1_8704", [512]), chunks("1,4,40_1024,512,333", [1, 0, 300, 1, 17, 64]),
        chunks("1,8,64_512,128,100", [1]), chunks("1_2048", [2048]), chunks("1,32_4096,40", [40]),
    ]  # fmt: skip
    layers = [make_layer(config, batch, seed) for seed, batch in enumerate(batches)]
    attention, tensors, (graph, plan) = captured(config, Capacity(64, 4096, 640, 1 << 20), layers)
    assert_replays(config, layers, attention, tensors, graph, plan)


def test_tables_on_the_card_replace_a_plan_with_chunks() -> None:
    """Planned there, chunks are rows of tiles; the captured launch for chunks then has none."""
    layer = make_layer(GOOD, chunks("1,4_1024,300", [300, 1]))
    attention, tensors, (graph, plan) = captured(GOOD, Capacity(8, 1024, 128, 1 << 20), [layer])
    host = replay(layer, attention, tensors, graph, plan).clone()
    attention.plan(*(table.cuda() for table in layer.step), into=plan)
    tensors[3].fill_(math.nan)
    graph.replay()
    assert float((tensors[3][: len(host)] - host).abs().max()) < 0.02


def test_of_warp_specialization_for_the_sanitizer(monkeypatch: pytest.MonkeyPatch) -> None:
    for window in (None, 50):
        check(GOOD, chunks("1,3,6_64,32,130", [130, 1, 40]), window=window)
    as_if_timed(monkeypatch)
    for config, window in ((FAMILY[0], 50), (FAMILY[0], 300), (FAMILY[4], 50), (FAMILY[6], 50)):
        check(config, chunks("1,3,6_64,32,130", [130, 1, 40], config.page_size), window=window)


def test_for_the_sanitizer() -> None:
    """The portable kernel, which has soft caps."""
    check(replace(GOOD, logits_soft_cap=20.0), chunks("1,3,6_64,32,130", [130, 1, 40]), window=50)
