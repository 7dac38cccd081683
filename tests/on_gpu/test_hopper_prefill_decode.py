"""Prompt chunks and decodes in one launch on an NVIDIA GPU; NaN in every slot that is not read. Only an sm_90 has the
kernel: on another card the tests find that `overlapped` is refused."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig, BatchAttention, Capacity
from trunkattn.analysis.batch import PagedBatch
from trunkattn.gpu.cards import Card, GpuFacts, OverlapTimes, Speeds, card_of
from trunkattn.gpu.hopper.spec import BOTH_NARROW_ROWS

from .layers import GOOD, assert_repeats, assert_right, captured, chunks, is_hopper, mixed, poisoned, replay
from .watching import count_launches

pytestmark = pytest.mark.gpu
CONFIG = replace(GOOD, execution="overlapped")


EMPTY = PagedBatch(np.zeros((0, 1), np.int32), np.zeros(0, np.int32), np.zeros(0, np.int32), 16, 0)


def only(batch: PagedBatch, of_chunks: bool) -> PagedBatch:
    """The chunks, or the decodes; the other rows are padding."""
    return replace(
        batch, query_lens=np.where((batch.query_lens > 3) == of_chunks, batch.query_lens, 0).astype(np.int32)
    )


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A 1 for each launch of the kernel."""
    from trunkattn.gpu.hopper import prefill_decode

    return count_launches(monkeypatch, prefill_decode)


def refused(config: AttentionConfig) -> bool:
    """Whether the card has no kernel for an overlapped execution; the constructor then says so."""
    if is_hopper():
        return False
    with pytest.raises(ValueError, match=r"execution='overlapped'.* and compute capability 9\.0"):
        BatchAttention(config)
    return True


def num_overlapped(plan: Any) -> int:
    first, last = plan.step.gpu_plan.arrays["overlapped"].tolist()[:2]
    assert first == 0
    return last


def check(config: AttentionConfig, batch: PagedBatch, tolerance: float = 0.01, window: int | None = None) -> Any:
    """The plan, whose outputs are right."""
    layer = poisoned(config, batch)
    attention = BatchAttention(config)
    plan = attention.plan(*layer.step, sliding_window=window)
    plan.check()
    out = torch.full_like(layer.q, math.nan)
    sinks = torch.randn(config.num_qo_heads, device="cuda") * 3 if config.sinks else None
    _, lse = attention.run(plan, layer.q, layer.k_cache, layer.v_cache, out=out, return_lse=True, sinks=sinks)
    options = {"sliding_window": window, "logits_soft_cap": config.logits_soft_cap, "sinks": sinks}
    assert_right(layer, out, lse, tolerance, **options)
    return plan


def set_times(monkeypatch: pytest.MonkeyPatch, times: OverlapTimes, family: bool = False) -> None:
    """Lets this card overlap in those times; family: also with sinks and soft caps."""

    def card(facts: GpuFacts) -> Card:
        model = card_of(facts).model
        return Card(facts, replace(model, overlap=times, runs_hopper_kernels=family or model.runs_hopper_kernels))

    monkeypatch.setattr("trunkattn.gpu.attention.card_of", card)


@pytest.fixture
def all_overlapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """All decodes overlap the chunks, as if those took so long."""
    times = OverlapTimes(1000, Speeds(80, 50), Speeds(80, 50), 1000, 0, 0, 0)
    set_times(monkeypatch, times)


@pytest.mark.parametrize("heads", [(32, 8), (16, 16)])
@pytest.mark.parametrize("single", [True, False])
@pytest.mark.parametrize("growth", [0.05, -0.05, 1.0])
@pytest.mark.usefixtures("all_overlapped")
def test_logits_that_grow_from_block_to_block(
    heads: tuple[int, int], single: bool, growth: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decodes scale their sums anew when a maximum is much higher than the one before. single: items of one query, in
    tiles of 8 rows; of as many as share a trunk, in tiles of 16."""
    config = replace(CONFIG, num_qo_heads=heads[0], num_kv_heads=heads[1])
    if refused(config):
        return
    monkeypatch.setattr(
        "trunkattn.gpu.step_choice.overlap_candidates",
        lambda tilings, numbers, *_: [
            i for i in numbers if (tilings[i].low, tilings[i].tall, tilings[i].per_query) == (0, None, single)
        ],
    )
    layer = poisoned(config, mixed())
    keys = layer.k_cache.clone()
    for row, length in enumerate(layer.batch.seq_lens.tolist()):
        pages = torch.from_numpy(layer.batch.block_table[row, : -(-length // 16)]).cuda().long()
        places = torch.arange(len(pages) * 16, device="cuda").view(-1, 16, 1, 1)
        layer.k_cache[pages] = (keys[pages] * (1 + growth * places)).to(keys.dtype)
    attention = BatchAttention(config)
    plan = attention.plan(*layer.step)
    most = int(plan.step.gpu_plan.arrays["overlapped"][2])
    assert num_overlapped(plan) and (most * heads[0] // heads[1] <= BOTH_NARROW_ROWS) == single
    out = torch.full_like(layer.q, math.nan)
    attention.run(plan, layer.q, layer.k_cache, layer.v_cache, out=out)
    assert_right(layer, out, tolerance=0.02)


@pytest.mark.parametrize(
    "heads, page_size, dtype, several, window",
    [
        ((32, 8), 16, torch.bfloat16, False, None),
        ((32, 8), 16, torch.bfloat16, True, 100),
        ((32, 4), 32, torch.bfloat16, True, None),
        ((16, 16), 32, torch.float16, False, None),
        ((16, 16), 64, torch.bfloat16, True, 40),
        ((16, 1), 64, torch.bfloat16, True, None),
    ],
)
@pytest.mark.usefixtures("all_overlapped")
def test_chunks_and_decodes_at_once_match_the_oracle(
    heads: tuple[int, int], page_size: int, dtype: torch.dtype, several: bool, window: int | None, launched: list[int]
) -> None:
    config = replace(CONFIG, num_qo_heads=heads[0], num_kv_heads=heads[1], page_size=page_size, dtype=dtype)
    if refused(config):
        return
    plan = check(config, mixed(page_size, several), 0.01 if dtype == torch.bfloat16 else 0.0015, window)
    assert launched == [1] and num_overlapped(plan) == len(plan.step.tiles.tile_list().items)
    num_programs = torch.cuda.get_device_properties().multi_processor_count
    assert num_overlapped(plan) * heads[1] > num_programs, "some program has several tasks"


def test_decodes_that_are_cut_into_parts(launched: list[int]) -> None:
    if refused(CONFIG):
        return
    plan = check(CONFIG, chunks("1,4_2048,3000", [1, 80, 1, 1]))
    assert launched == [1] and num_overlapped(plan) > 0
    assert plan.step.tiles.tile_list().num_slots > 0


def test_every_row_is_as_in_serial(launched: list[int]) -> None:
    if refused(CONFIG):
        return
    layer, results = poisoned(CONFIG, mixed()), []
    for execution in ("overlapped", "serial"):
        attention = BatchAttention(replace(CONFIG, execution=execution))
        plan = attention.plan(*layer.step)
        k_scale = torch.linspace(0.5, 2, CONFIG.num_kv_heads, device="cuda")
        for scales in ({}, {"q_scale": -0.5, "k_scale": k_scale, "v_scale": 3.0}):
            results.append(attention.run(plan, layer.q, layer.k_cache, layer.v_cache, return_lse=True, **scales))
    assert launched == [1, 1]
    for (out, lse), (want, want_lse) in zip(results[:2], results[2:], strict=True):
        torch.testing.assert_close(out, want, rtol=0.02, atol=0.02)
        torch.testing.assert_close(lse, want_lse, rtol=0, atol=1e-3)


@pytest.mark.parametrize("gains", [True, False])
def test_auto_overlaps_where_the_card_gains(launched: list[int], monkeypatch: pytest.MonkeyPatch, gains: bool) -> None:
    percent = 100 if gains else 50
    times = OverlapTimes(600_000, Speeds(percent, percent), Speeds(percent, percent), 1000, 0, 0, 0)
    set_times(monkeypatch, times)
    plan = check(GOOD, mixed())
    assert bool(launched) == (num_overlapped(plan) > 0) == (gains and is_hopper())


@pytest.mark.parametrize("heads, window", [((32, 8), None), ((16, 1), None), ((16, 1), 100), ((16, 16), 100)])
@pytest.mark.parametrize(
    "options", [{"sinks": True}, {"logits_soft_cap": 20.0}, {"sinks": True, "logits_soft_cap": 2.0}]
)
def test_sinks_and_soft_caps(
    launched: list[int],
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    heads: tuple[int, int],
    window: int | None,
) -> None:
    times = OverlapTimes(600_000, Speeds(100, 100), Speeds(100, 100), 1000, 0, 0, 0)
    set_times(monkeypatch, times, family=True)
    config = replace(GOOD, num_qo_heads=heads[0], num_kv_heads=heads[1], **options)
    plan = check(config, mixed(several=window is not None), window=window)
    assert bool(launched) == (num_overlapped(plan) > 0) == is_hopper()


@pytest.mark.parametrize("execution", ["overlapped", "auto"])
def test_one_graph_for_chunks_decodes_both_and_neither(launched: list[int], execution: str) -> None:
    config = replace(GOOD, execution=execution)
    if execution == "overlapped" and refused(config):
        return
    batches = [mixed(), only(mixed(), True), only(mixed(), False), EMPTY, mixed(several=True)]
    layers = [poisoned(config, batch) for batch in batches]
    attention, tensors, (graph, plan) = captured(config, Capacity(256, 2048, 128, 1 << 20), layers)
    assert launched == [1, 1] * is_hopper()
    for layer in (*layers, layers[0]):
        found = replay(layer, attention, tensors, graph, plan)
        lens = layer.batch.query_lens
        if execution == "overlapped":
            assert (num_overlapped(plan) > 0) == bool(((lens > 0) & (lens <= 3)).any() and (lens > 3).any())
        if len(found):
            assert_right(layer, found)
    attention.plan(*(table.cuda() for table in layers[0].step), into=plan)  # all rows are tiles then
    tensors[3].fill_(math.nan)
    graph.replay()
    assert_right(layers[0], tensors[3][: len(layers[0].q)])


def test_a_thousand_runs_are_bit_equal(launched: list[int]) -> None:
    if refused(CONFIG):
        return
    assert_repeats(CONFIG, chunks("1,4,40_512,128,333", [1, 300, 1, 1, 1]))
    assert len(launched) == 1001


@pytest.mark.parametrize("layout", ["head-major", "one row", "odd"])
def test_layouts_of_the_cache(launched: list[int], layout: str) -> None:
    """TMA reads the first two; it cannot read rows that begin at odd addresses."""
    if refused(CONFIG):
        return
    layer = poisoned(CONFIG, mixed())
    caches = [layer.k_cache, layer.v_cache]
    if layout == "head-major":
        caches = [cache.transpose(1, 2).contiguous().transpose(1, 2) for cache in caches]
    elif layout == "one row":
        caches = list(torch.cat(caches, -1).split(128, -1))
    else:
        caches = [torch.nn.functional.pad(cache, (1, 0))[..., 1:] for cache in caches]
    attention = BatchAttention(CONFIG)
    plan = attention.plan(*layer.step)
    out = torch.full((len(layer.q), 32, 256), math.nan, device="cuda", dtype=CONFIG.dtype)[..., :128]
    _, lse = attention.run(plan, layer.q, *caches, out=out, return_lse=True)
    assert num_overlapped(plan) > 0 and launched == [1] * (layout != "odd")
    assert_right(layer, out, lse)


def test_for_the_sanitizer() -> None:
    if not refused(CONFIG):
        for window in (None, 50):
            check(CONFIG, chunks("1,3,6_64,32,130", [130, 1, 40, 1, 1]), window=window)
