"""`hopper_decode_kernel` through `BatchAttention` at real sizes, in every tiling that takes it.

On a card that does not run it the same batches are computed by the tiles that it has.
"""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity
from trunkattn.analysis.batch import PagedBatch
from trunkattn.analysis.trees import parse_tree, tree_batch
from trunkattn.gpu.cards import card_at
from trunkattn.gpu.hopper import decode as hopper_decode
from trunkattn.gpu.hopper.spec import tiles_of as hopper_tiles
from trunkattn.gpu.kernel import kernels_of
from trunkattn.planner.tiles.candidates import candidates
from trunkattn.planner.tiles.step import TiledStep

from .layers import GOOD, Layer, expected, make_layer
from .watching import count_launches

pytestmark = pytest.mark.gpu
TALLER = ("16x64 per query", "16x64", "32x64", "32x64 fine", "32x64 uncut", "64x64", "64x64 fine", "64x64 uncut")


def runs_it() -> bool:
    return card_at("cuda").model.runs_hopper_kernels


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows with every launch of the kernel."""
    return count_launches(monkeypatch, hopper_decode)


def only(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Makes `auto` choose one tiling, if the card has it."""
    predict = TiledStep.predict

    def chosen(step: TiledStep) -> np.ndarray:
        names = [tiling.name(step.rule) for tiling in candidates(step.rule)]
        assert name in names or step.rule.tiles[-1].paired  # other cards and executions have other tiles
        return predict(step) + 10**12 * (np.array(names) != name)

    monkeypatch.setattr(TiledStep, "predict", chosen)


def poisoned(config: AttentionConfig, batch: PagedBatch) -> Layer:
    """NaN behind the end of every page that one request alone has."""
    layer = make_layer(config, batch)
    pages, owners = np.unique(batch.block_table, return_counts=True)
    private = set(pages[owners == 1].tolist())
    for row, length in enumerate(batch.seq_lens.tolist()):
        page, offset = batch.block_table[row, (length - 1) // config.page_size], length % config.page_size
        if offset and int(page) in private:
            layer.k_cache[int(page), offset:] = math.nan
            layer.v_cache[int(page), offset:] = math.nan
    return layer


def uneven(tree: str, page_size: int, query_lens: tuple[int, ...] = (1,)) -> PagedBatch:
    """A tree with uneven ends."""
    batch = tree_batch(parse_tree(tree), page_size, row_seed=0, page_seed=1)
    rng = np.random.default_rng(0)
    cut = rng.integers(0, min(16, parse_tree(tree).tokens[-1]), len(batch.seq_lens))
    lens = rng.choice(query_lens, len(batch.seq_lens))
    return replace(batch, seq_lens=(batch.seq_lens - cut).astype(np.int32), query_lens=lens.astype(np.int32))


def check(config: AttentionConfig, layer: Layer, tolerance: float, **plan_options: Any) -> None:
    """Some requests against float64, all of them against the portable tiles, which other executions have."""
    inputs, results = (layer.q, layer.k_cache, layer.v_cache), []
    sinks = torch.randn(config.num_qo_heads, device="cuda") * 3 if config.sinks else None
    for each in (config, replace(config, execution="streams")):
        attention = BatchAttention(each, "cuda")
        plan, out = attention.plan(*layer.step, **plan_options), torch.full_like(layer.q, math.nan)
        results.append(attention.run(plan, *inputs, out=out, return_lse=True, sinks=sinks))
    (out, lse), others = results
    assert (out.double() - others[0].double()).abs().max() < 2 * tolerance
    assert (lse - others[1]).abs().max() < 0.01
    rows = sorted({0, len(layer.batch.seq_lens) // 2, len(layer.batch.seq_lens) - 1})
    options: dict[str, Any] = {} if sinks is None else {"sinks": sinks}
    options |= {"window": plan_options["sliding_window"]} if "sliding_window" in plan_options else {}
    starts = layer.batch.query_start_loc
    taken = torch.cat([out[starts[row] : starts[row + 1]] for row in rows]).double()
    assert (taken - expected(layer, config, rows, **options)).abs().max() < tolerance


@pytest.mark.parametrize("tiling", TALLER)
@pytest.mark.parametrize("tree", ["1,8,64_512,128,100", "1,10_4096,416", "1,300_2048,20", "40_500"])
def test_every_tiling_matches_the_oracle(
    monkeypatch: pytest.MonkeyPatch, launched: list[int], tiling: str, tree: str
) -> None:
    only(monkeypatch, tiling)
    check(GOOD, poisoned(GOOD, uneven(tree, 16)), 0.02)
    assert bool(launched) == runs_it()


@pytest.mark.parametrize("heads", [(32, 32), (16, 8), (64, 8), (32, 2)])
@pytest.mark.parametrize("page_size", [16, 24, 32, 64, 48])
def test_any_group_and_page_size_match_the_oracle(
    monkeypatch: pytest.MonkeyPatch, launched: list[int], heads: tuple[int, int], page_size: int
) -> None:
    only(monkeypatch, "64x64")
    config = replace(GOOD, num_qo_heads=heads[0], num_kv_heads=heads[1], page_size=page_size, dtype=torch.float16)
    check(config, poisoned(config, uneven("1,8,64_960,192,96", page_size)), 0.003)
    assert bool(launched) == runs_it()


@pytest.mark.parametrize("window", [None, 1, 77, 300])
@pytest.mark.parametrize("tiling", ["32x64", "64x64 uncut"])
def test_several_query_tokens_and_windows(
    monkeypatch: pytest.MonkeyPatch, launched: list[int], tiling: str, window: int | None
) -> None:
    only(monkeypatch, tiling)
    options = {} if window is None else {"sliding_window": window}
    check(GOOD, poisoned(GOOD, uneven("1,8,64_512,128,100", 16, (0, 1, 2, 5))), 0.02, **options)
    assert bool(launched) == runs_it()


@pytest.mark.parametrize(
    "config",
    [
        replace(GOOD, num_qo_heads=28, num_kv_heads=4),
        replace(GOOD, num_qo_heads=96, num_kv_heads=8),
        replace(GOOD, num_qo_heads=16, num_kv_heads=1, logits_soft_cap=30.0),
        replace(GOOD, sinks=True),
        replace(GOOD, head_dim=64, num_qo_heads=64, sinks=True),
        replace(GOOD, head_dim=64, page_size=32, dtype=torch.float16),
        replace(GOOD, head_dim=96, num_kv_heads=32),
        replace(GOOD, head_dim=96, num_qo_heads=28, num_kv_heads=4, sinks=True, dtype=torch.float16),
        replace(GOOD, head_dim=96, page_size=48, logits_soft_cap=30.0),
        *(replace(GOOD, page_size=page_size) for page_size in (1, 2, 8)),
        replace(GOOD, kv_dtype=torch.float8_e4m3fn, page_size=8, num_qo_heads=12, num_kv_heads=1),
        replace(GOOD, kv_dtype=torch.float8_e4m3fn),
        replace(GOOD, kv_dtype=torch.float8_e5m2, num_kv_heads=4, dtype=torch.float16),
        replace(GOOD, kv_dtype=torch.float8_e4m3fn, page_size=1, num_qo_heads=28, num_kv_heads=4),
        replace(GOOD, kv_dtype=torch.float8_e4m3fn, head_dim=64, num_qo_heads=64, sinks=True, dtype=torch.float16),
        replace(GOOD, kv_dtype=torch.float8_e4m3fn, head_dim=256, num_qo_heads=16, logits_soft_cap=30.0),
        replace(GOOD, kv_dtype=torch.float8_e5m2, head_dim=256, num_qo_heads=16, num_kv_heads=2),
        replace(GOOD, kv_dtype=torch.float8_e4m3fn, head_dim=256, num_qo_heads=16, page_size=4),
        replace(GOOD, head_dim=256, num_qo_heads=16),
        replace(GOOD, head_dim=256, num_qo_heads=16, num_kv_heads=2, logits_soft_cap=5.0, sinks=True),
        replace(GOOD, head_dim=256, num_qo_heads=28, num_kv_heads=4, page_size=64, dtype=torch.float16),
    ],
    ids=str,
)
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("window", [None, 130])
def test_head_dims_groups_sinks_and_soft_caps(
    monkeypatch: pytest.MonkeyPatch, launched: list[int], config: AttentionConfig, rows: int, window: int | None
) -> None:
    card = card_at("cuda")
    timed = replace(card, model=replace(card.model, runs_hopper_kernels=True, pads_heads=True))
    monkeypatch.setattr("trunkattn.gpu.attention.card_of", lambda facts: timed)
    tall = hopper_tiles(config.cache_dtype.itemsize, config.head_dim, config.page_size)[-1]
    low = kernels_of(config, timed).tiles[0]
    tile = low if rows == low.block_m else tall
    only(monkeypatch, f"{rows}x{tile.block_n}")
    options = {} if window is None else {"sliding_window": window}
    queries = (1,) if window is None else (0, 1, 2)
    tree = "1,8,64_528,144,100" if config.page_size == 48 else "1,8,64_512,128,100"  # shared levels of whole pages
    check(config, poisoned(config, uneven(tree, config.page_size, queries)), 0.02, **options)
    assert bool(launched) == (runs_it() and tile.one_launch)


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("several", [False, True])
def test_batch_invariant_bits(launched: list[int], kv_dtype: torch.dtype | None, several: bool) -> None:
    """Alone, in part of the batch, and in all of it; and without the tokens of its request that came with it."""
    config = replace(GOOD, batch_invariant=True, kv_dtype=kv_dtype)
    layer = poisoned(config, uneven("1,8,96_512,256,300", 16, (1, 3) if several else (1,)))
    attention, starts = BatchAttention(config, "cuda"), layer.batch.query_start_loc
    caches = layer.k_cache, layer.v_cache
    together = attention.run(attention.plan(*layer.step), layer.q, *caches)
    table, lens, _ = layer.step
    for rows in ([3], [50], [5, 9, 20], list(range(0, 96, 2)), list(range(95, -1, -1))):
        tokens = np.concatenate([np.arange(starts[row], starts[row + 1]) for row in rows])
        counts = torch.tensor([0, *np.diff(starts)[rows]]).cumsum(0).to(torch.int32)
        plan = attention.plan(table[rows].contiguous(), lens[rows], counts)
        some = attention.run(plan, layer.q[tokens], *caches)
        assert torch.equal(some, together[tokens])
    last = torch.from_numpy(starts[1:] - 1).cuda().long()
    assert torch.equal(attention.run(attention.plan(table, lens), layer.q[last], *caches), together[last])
    assert not launched, "the Hopper kernel would move the last tokens of a request by what comes with them"
    chosen = sorted({0, 47, 95})
    taken = torch.cat([together[starts[row] : starts[row + 1]] for row in chosen]).double()
    assert (taken - expected(layer, config, chosen)).abs().max() < 0.02


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("scale", [1e-3, 3.0])
def test_scales_of_either_sign_match_the_oracle(
    monkeypatch: pytest.MonkeyPatch, launched: list[int], scale: float, kv_dtype: torch.dtype | None
) -> None:
    only(monkeypatch, "64x64")
    config = replace(GOOD, sm_scale=scale, kv_dtype=kv_dtype)
    layer = poisoned(config, uneven("1,8,64_512,128,100", 16))
    check(config, layer, 0.04)
    attention = BatchAttention(config, "cuda")
    plan = attention.plan(*layer.step)
    given = (plan, layer.q, layer.k_cache, layer.v_cache)
    turned = attention.run(given[0], -layer.q, *given[2:], q_scale=-1.0)
    assert torch.equal(turned, attention.run(*given)), "a scale may be negative"


def test_caches_in_one_tensor(monkeypatch: pytest.MonkeyPatch, launched: list[int]) -> None:
    """As vLLM lays them out: keys and values of a token side by side, any order of the rest."""
    only(monkeypatch, "64x64")
    layer = make_layer(GOOD, uneven("1,8,64_512,128,100", 16))
    both = torch.cat([layer.k_cache, layer.v_cache], -1).transpose(1, 2).contiguous().transpose(1, 2)
    attention = BatchAttention(GOOD, "cuda")
    plan = attention.plan(*layer.step)
    out = attention.run(plan, layer.q, *both.split(128, -1))
    assert torch.equal(out, attention.run(plan, layer.q, layer.k_cache, layer.v_cache))
    assert bool(launched) == runs_it()


def test_a_cache_that_the_copy_engine_cannot_read(monkeypatch: pytest.MonkeyPatch, launched: list[int]) -> None:
    """Rows that begin at odd places: the portable kernel computes the same tiles."""
    only(monkeypatch, "64x64")
    layer = make_layer(GOOD, uneven("1,8,64_512,128,100", 16))
    shape = layer.k_cache.shape
    odd = torch.empty(*shape[:3], shape[3] + 2, device="cuda", dtype=torch.bfloat16)[..., 1:-1].copy_(layer.k_cache)
    check(GOOD, replace(layer, k_cache=odd), 0.02)
    assert not launched


def test_a_thousand_runs_are_bit_equal(monkeypatch: pytest.MonkeyPatch, launched: list[int]) -> None:
    only(monkeypatch, "64x64")
    layer = poisoned(GOOD, uneven("1,8,300_512,128,100", 16))
    attention = BatchAttention(GOOD, "cuda")
    plan = attention.plan(*layer.step)
    first = attention.run(plan, layer.q, layer.k_cache, layer.v_cache).clone()
    for _ in range(1000):
        assert torch.equal(attention.run(plan, layer.q, layer.k_cache, layer.v_cache), first)
    assert bool(launched) == runs_it()


def test_one_graph_serves_batches_of_all_heights(launched: list[int]) -> None:
    """Planned on the host and on the device, into one plan of fixed size."""
    batches = [uneven(tree, 16) for tree in ("1,8,64_512,128,100", "1,16,256_512,64,32", "3_700", "1,64_256,32")]
    pages = max(batch.num_pages for batch in batches)
    capacity = Capacity(300, 300, 64, pages, 1)
    attention = BatchAttention(GOOD, "cuda", capacity)
    layers = [make_layer(GOOD, batch) for batch in batches]
    k_cache, v_cache = (torch.zeros(pages, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q, out = torch.zeros(300, 32, 128, device="cuda", dtype=torch.bfloat16), torch.empty(0)
    plan = attention.plan(*layers[0].step)
    out = attention.run(plan, q, k_cache, v_cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        attention.run(plan, q, k_cache, v_cache, out=out)
    heights: set[str] = set()
    for layer in layers * 2:
        for device in ("cpu", "cuda"):
            table, lens, starts = (array.to(device) for array in layer.step)
            attention.plan(table, lens, starts, into=plan)
            rows = len(layer.q)
            q[:rows] = layer.q
            for cache, source in ((k_cache, layer.k_cache), (v_cache, layer.v_cache)):
                count = layer.batch.num_pages
                cache[:count] = source[:count]
            out.zero_()
            graph.replay()
            chosen = [0, rows // 2, rows - 1]
            assert (out[chosen].double() - expected(layer, GOOD, chosen)).abs().max() < 0.02
            heights |= {name for name, items in plan.stats.tiles.items() if items}
    assert len(launched) == 2 * runs_it()
    assert heights >= {"16x64", "32x64", "64x64"} or not runs_it()


@pytest.mark.parametrize(
    "options",
    [{}, {"kv_dtype": torch.float8_e4m3fn}, {"page_size": 1}, {"kv_dtype": torch.float8_e4m3fn, "page_size": 4}],
    ids=["loaded", "widened", "copied", "gathered"],
)
@pytest.mark.parametrize("tiling", ["32x64", "64x64 uncut"])
def test_for_the_sanitizer(
    monkeypatch: pytest.MonkeyPatch, launched: list[int], tiling: str, options: dict[str, Any]
) -> None:
    only(monkeypatch, tiling)
    config = replace(GOOD, **options)
    check(config, poisoned(config, uneven("1,4,20_96,48,40", config.page_size)), 0.02)
    assert bool(launched) == runs_it()


def test_low_tiles_for_the_sanitizer(monkeypatch: pytest.MonkeyPatch, launched: list[int]) -> None:
    only(monkeypatch, "16x64 per query")
    check(GOOD, poisoned(GOOD, uneven("1,4,20_96,48,40", 16)), 0.02)
    assert bool(launched) == runs_it()
