"""The GPU kernels under Triton's interpreter against the float64 oracle: every tiling, and all pairs of features."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.workloads import PagedBatch, parse_tree, tree_batch
from trunkattn import AttentionConfig
from trunkattn.gpu.arrays import GpuPlan
from trunkattn.gpu.portable import decode_arguments
from trunkattn.gpu.portable.spread import spread_stride
from trunkattn.planner.tiles.candidates import candidates
from trunkattn.planner.work_list import QUERY_END, QUERY_START

from ..attention.cases import random_step
from . import gpu_cases
from .feature_cases import TABLE, Features
from .gpu_cases import CACHES, POLICIES, TILINGS, Interpreted
from .kernel_cases import plan_with

WAYS = (*TILINGS, *POLICIES)
EXECUTIONS = ("streams", "serial")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:overflow encountered in exp2:RuntimeWarning"),
]  # exp2(+large) in a cap


def ragged_batch(page_size: int, several: bool) -> PagedBatch:
    """Five requests under two branches: a strict prefix, an equal row up to its last tokens, one without a query."""
    trunk, branch = (-(-tokens // page_size) * page_size for tokens in (32, 18))
    tree = parse_tree(f"1,2,5_{trunk},{branch},19")
    batch = tree_batch(tree, page_size, row_seed=3, page_seed=4)
    query_lens = np.array([3, 1, 0, 9, 1] if several else [1, 1, 0, 1, 1], np.int32)
    return replace(batch, seq_lens=batch.seq_lens - np.array([0, 3, 0, 18, 1], np.int32), query_lens=query_lens)


def columns(row: Features) -> tuple[object, ...]:
    """The values that are varied independently."""
    dims, dtypes = (row.head_dim, row.head_dim_v), (row.dtype, row.kv_dtype)
    switches = (row.several, row.window, row.soft_cap, row.sinks, row.return_lse)
    return (dims, row.group, row.page_size, *switches, dtypes, row.layout, row.scales)


def test_the_table_holds_every_pair() -> None:
    rows = [columns(row) for row in TABLE]
    for first, second in itertools.combinations(range(len(rows[0])), 2):
        wanted = itertools.product({row[first] for row in rows}, {row[second] for row in rows})
        assert {(row[first], row[second]) for row in rows} == set(wanted)


@pytest.mark.parametrize("number", range(len(TABLE)))
def test_each_pair_of_features_is_as_accurate_as_plain_pytorch(number: int) -> None:
    """The tilings and policies take turns, with the tiles of each kind of cache, whatever the caches are."""
    row, turns = TABLE[number], list(itertools.product(WAYS, CACHES.values()))
    candidate, cache = turns[number % len(turns)]
    step = row.step(ragged_batch(row.page_size, row.several))
    out, lse = Interpreted(step, 1 + number % 2, candidate, cache, EXECUTIONS[number // 2 % 2]).run(row.return_lse)
    if not row.return_lse:
        assert lse.isnan().all()
        lse = step.oracle()[1].float()
    step.assert_accurate(out, lse)


def test_the_ways_are_all_that_any_cache_has() -> None:
    config = AttentionConfig(4, 1, 16, 16, torch.float32)
    step = random_step(0, config, tree_batch(parse_tree("1,2_16,3"), 16, row_seed=0, page_seed=1))
    for cache in CACHES.values():
        assert len(candidates(Interpreted(step, 1, 0, cache).rule)) == len(TILINGS)


@pytest.mark.parametrize("candidate", WAYS)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("num_sms", [1, 8])
def test_every_tiling_is_as_accurate_as_plain_pytorch(candidate: int | str, cache: str, num_sms: int) -> None:
    """20 requests with the same trunk, so that there are tall tiles; 8 multiprocessors cut them, 1 does not."""
    config = AttentionConfig(4, 1, 16, 16, torch.float32)
    batch = tree_batch(parse_tree("1,2,18_64,32,9"), 16, row_seed=0, page_seed=1)
    case = Interpreted(random_step(0, config, batch), num_sms, candidate, CACHES[cache])
    case.step.assert_accurate(*case.run())


@pytest.mark.parametrize("candidate", [0, 1, "pat"])
@pytest.mark.parametrize("cache", [*CACHES.values(), (4, 128)])
def test_tiles_of_a_card_that_was_not_timed(candidate: int | str, cache: tuple[int, int]) -> None:
    config = AttentionConfig(4, 1, 16, 16, torch.float32)
    batch = tree_batch(parse_tree("1,2,18_64,32,9"), 16, row_seed=0, page_seed=1)
    case = Interpreted(random_step(0, config, batch), 1, candidate, cache, capability=80)
    case.step.assert_accurate(*case.run())


@pytest.mark.parametrize(("page_size", "head_dim"), [(528, 256), (544, 128), (784, 256)])
def test_pages_of_hybrid_models_are_read(page_size: int, head_dim: int) -> None:
    """As large as a layer's recurrent state: whole 16 tokens, and no power of two."""
    config = AttentionConfig(8, 1, head_dim, page_size, torch.float32)
    batch = tree_batch(parse_tree(f"1,2,6_{page_size},{page_size},37"), page_size, row_seed=0, page_seed=1)
    case = Interpreted(random_step(0, config, batch), 8, 0, (4, head_dim))
    assert case.rule.segment_size in (16, 32)
    case.step.assert_accurate(*case.run())


@pytest.mark.parametrize(("several", "window"), [(False, None), (True, None), (True, 21)])
@pytest.mark.parametrize("cache", CACHES)
def test_subtiles_may_have_very_different_lengths(cache: str, several: bool, window: int | None) -> None:
    """Of 20 requests after a trunk, fours have some 165 private tokens, 5, 40, none and 90."""
    config = AttentionConfig(4, 1, 16, 16, torch.float32)
    batch = tree_batch(parse_tree("1,20_64,170"), 16, row_seed=0, page_seed=1)
    own = np.maximum(np.repeat([165, 5, 40, 0, 90], 4) - np.arange(20) % 4, 0)
    query_lens = np.array([1, 4, 1, 2] * 5 if several else [1] * 20, np.int32)
    batch = replace(batch, seq_lens=(64 + own).astype(np.int32), query_lens=query_lens)
    case = Interpreted(replace(random_step(0, config, batch), window=window), 1, 2, CACHES[cache])
    subtiles = case.tiles[1].subtiles
    assert subtiles > 1
    if not several and subtiles == 4:
        _, full, end, _, queries = case.tile_list.items[0]
        each = case.tiles[1].private_n // case.rule.segment_size
        segments = case.tile_list.segments[full:end, 1].reshape(-1, 4, each)
        assert (np.count_nonzero(segments, axis=(0, 2)).tolist(), queries) == ([44, 4, 12, 0], 16)
    case.step.assert_accurate(*case.run())


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("group", [5, 7, 12, 16, 20, 32])
def test_any_group_fits_the_tallest_tile(group: int, cache: str) -> None:
    """Rows of a subtile beyond its whole groups are unused; groups over 16 heads have no subtiles and no low tile."""
    config = AttentionConfig(2 * group, 2, 16, 16, torch.float32)
    batch = tree_batch(parse_tree("1,2,9_64,32,19"), 16, row_seed=0, page_seed=1)
    batch = replace(batch, query_lens=np.array([1, 3, 0] * 3, np.int32))
    case = Interpreted(random_step(0, config, batch), 1, 2 if group <= 16 else 1, CACHES[cache], EXECUTIONS[group % 2])
    tallest = case.tiles[-1]
    assert (tallest.subtiles > 1) == (group <= 16)
    assert candidates(case.rule)[case.candidate].name(case.rule) == f"{tallest.block_m}x{tallest.block_n}"
    case.step.assert_accurate(*case.run())


def test_a_tile_may_be_full_of_queries() -> None:
    """64, of two requests that each see keys of their own."""
    config = AttentionConfig(1, 1, 16, 16, torch.float32)
    batch = tree_batch(parse_tree("1,2_32,40"), 16, row_seed=0, page_seed=1)
    batch = replace(batch, query_lens=np.array([40, 24], np.int32))
    case = Interpreted(random_step(0, config, batch), 1, "64x64")
    queries = {(packed & 255, packed >> 8 & 255) for packed in case.tile_list.segments[:, 1].tolist()}
    assert queries == {(0, 64), (0, 40), (40, 64), (0, 0)}
    case.step.assert_accurate(*case.run())


def many_pieces() -> Interpreted:
    """Two requests; the 72 segments of 16 tokens of their trunk are spread over a large device."""
    config = AttentionConfig(4, 2, 16, 16, torch.float32, sinks=True)
    batch = tree_batch(parse_tree("1,2_1152,5"), 16, row_seed=0, page_seed=1)
    return Interpreted(random_step(0, config, batch, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0])), 132, "16x64")


@pytest.mark.parametrize("return_lse", [True, False])
def test_the_merge_of_more_partials_than_one_block_holds(return_lse: bool) -> None:
    case = many_pieces()
    assert (np.diff(case.tile_list.merge_ranges) > 16).all()
    assert len(case.tile_list.merge_queries) == 2
    out, lse = case.run(return_lse)
    case.step.assert_accurate(out, lse if return_lse else case.step.oracle()[1].float())


@pytest.mark.parametrize("low", [False, True])
def test_an_item_merges_the_partials_of_a_taller_tile(low: bool) -> None:
    """36 requests under a trunk that tall tiles cut into parts; the leaves' items merge them. Some requests end within
    the trunk, so that rows of one item have different numbers of partials. low: of logits around -400, beside which an
    lse of 0 would be all there is."""
    config = AttentionConfig(4, 1, 16, 16, torch.float32, sinks=True)
    batch = tree_batch(parse_tree("1,36_128,9"), 16, row_seed=0, page_seed=1)
    batch = replace(batch, seq_lens=np.array([137, 137, 137, 137, 40, 137] * 6, np.int32))
    step = random_step(0, config, batch, sinks=torch.tensor([0.5, -1.0, 3.0, 0.0]) - 400 * low)
    if low:
        step.q.fill_(10)
        step.k_cache.copy_(0.1 * step.k_cache - 10)
    case = Interpreted(step, 3, "64x64+16x64")
    assert len(case.tile_list.merge_queries) == 0
    merged = np.diff(case.tile_list.merge_slots)[:, 0]
    items = [set(merged[item[QUERY_START] : item[QUERY_END]].tolist()) for item in case.tile_list.items]
    assert {1, 2} in items
    case.step.assert_accurate(*case.run())


def test_an_item_that_sees_nothing_for_a_row_adds_nothing() -> None:
    """Under a window of 5 the later of 30 queries see nothing of the first segments of their own tile."""
    config = AttentionConfig(1, 1, 16, 4, torch.float32)
    batch = tree_batch(parse_tree("1,2_32,40"), 4, row_seed=0, page_seed=1)
    batch = replace(batch, query_lens=np.array([30, 30], np.int32))
    step = replace(random_step(0, config, batch), window=5)
    for candidate in ("64x64", "16x64", "cascade"):
        step.assert_accurate(*Interpreted(step, 8, candidate).run())


def test_logits_far_apart_do_not_overflow() -> None:
    config = AttentionConfig(4, 1, 16, 16, torch.float32)
    batch = tree_batch(parse_tree("1,6_32,19"), 16, row_seed=0, page_seed=1)
    step = random_step(0, config, batch)
    case = Interpreted(replace(step, q=step.q * 100), 8, "64x64")
    out, lse = case.run()
    assert math.isfinite(float(lse.abs().max()))
    case.step.assert_accurate(out, lse)


def test_an_empty_step_launches_nothing() -> None:
    batch = tree_batch(parse_tree("1,2_16,3"), 16, row_seed=0, page_seed=1)
    config = AttentionConfig(4, 1, 16, 16, torch.float32)
    case = Interpreted(random_step(0, config, replace(batch, query_lens=np.zeros(2, np.int32))), 8, "16x64")
    out, lse = case.run()
    assert (out.shape, lse.shape) == ((0, 4, 16), (0, 4))


@pytest.mark.parametrize("programs", [1, 2, 3, 8, 132, 528])
@pytest.mark.parametrize("candidate", ["16x64", "64x64+16x64", "pat"])
def test_a_launch_that_spreads_its_tasks_computes_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, candidate: str, programs: int
) -> None:
    """By fewer CTAs than tasks, and by more. A stride that is no permutation would leave NaN."""
    config = AttentionConfig(4, 2, 16, 16, torch.float32)
    batch = tree_batch(parse_tree("1,2,18_64,32,9"), 16, row_seed=0, page_seed=1)
    case = Interpreted(random_step(0, config, batch), 8, candidate)
    expected, strides = case.run(), []

    def spread(*args: Any) -> GpuPlan:
        plan = plan_with(*args)
        launches = (each._replace(num_ctas=programs, spread=True) for each in plan.launches if each.buckets)
        return replace(plan, launches=(*launches, *(each for each in plan.launches if not each.buckets)))

    def seen(num_ctas: int) -> int:
        strides.append(spread_stride(num_ctas))
        return strides[-1]

    monkeypatch.setattr(gpu_cases, "plan_with", spread)
    monkeypatch.setattr(decode_arguments, "spread_stride", seen)
    out, lse = case.run()
    assert strides and set(strides) == {spread_stride(programs)}
    assert torch.equal(out, expected[0]) and torch.equal(lse, expected[1])


def most_behind(num_sms: int, ctas_per_sm: int, stride: int, round_robin: bool) -> int:
    """How many tasks the SM with most has over an even share, rounded up, for the number of tasks for which that is
    worst. round_robin: CTA c is on SM c % num_sms, and not the CTAs of an SM one after another."""
    ctas = np.arange(num_sms * ctas_per_sm)
    of_task = np.argsort(ctas * stride % len(ctas))
    tasks, worst = np.zeros(num_sms, np.int64), 0
    for number, sm in enumerate(of_task % num_sms if round_robin else of_task // ctas_per_sm):
        tasks[sm] += 1
        worst = max(worst, int(tasks[sm]) - (number // num_sms + 1))
    return worst


@pytest.mark.property
@given(st.integers(1, 3000))
def test_a_stride_permutes_the_ctas(num_programs: int) -> None:
    stride = spread_stride(num_programs)
    assert len(set((np.arange(num_programs) * stride % num_programs).tolist())) == num_programs


@pytest.mark.parametrize("round_robin", [True, False])
@pytest.mark.parametrize("ctas_per_sm", [1, 2, 4, 8])
@pytest.mark.parametrize("num_sms", [132, 108, 114, 144, 148])
def test_a_stride_spreads_any_number_of_tasks_over_the_sms(num_sms: int, ctas_per_sm: int, round_robin: bool) -> None:
    """However CTAs fall to SMs, no SM has more than one task over an even share on the cards whose times are known, and
    two on others. Without a stride an SM whose CTAs come one after another fills up first."""
    stride = spread_stride(num_sms * ctas_per_sm)
    assert most_behind(num_sms, ctas_per_sm, stride, round_robin) <= (0 if round_robin else 1 if num_sms == 132 else 2)
    assert most_behind(num_sms, ctas_per_sm, 1, False) == ctas_per_sm - 1
