"""What plan and run promise besides the numbers: outputs given, several plans, repeated runs, memory left alone."""

import copy
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from benchmarks.workloads import PagedBatch, parse_tree, random_forest, tree_batch
from trunkattn import AttentionConfig, BatchAttention, Capacity
from trunkattn.config import POLICIES
from trunkattn.layer_inputs import LayerInputs, check_layer
from trunkattn.planner.planner import Planner

from .cases import Step, random_step

TREE = tree_batch(parse_tree("1,3,8_64,64,40"), 16, row_seed=1, page_seed=2)


def make_config(**changes: object) -> AttentionConfig:
    defaults = AttentionConfig(num_qo_heads=4, num_kv_heads=2, head_dim=32, page_size=16, dtype=torch.float32)
    return replace(defaults, **changes)  # type: ignore[arg-type]


def make_attention(**changes: object) -> BatchAttention:
    return BatchAttention(make_config(**changes), "cpu")


def one_step(seed: int = 0, batch: PagedBatch = TREE, window: int | None = None) -> Step:
    return random_step(seed, make_config(), batch, window)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_the_answer_of_the_oracle(policy: str) -> None:
    attention, step = make_attention(policy=policy), one_step()
    plan = step.plan(attention)
    plan.check()
    assert plan.stats.policy == ("optimal" if policy == "auto" else policy)
    step.assert_accurate(*step.run(attention, plan))


def test_without_return_lse_the_output_alone_is_returned() -> None:
    attention, step = make_attention(), one_step()
    out = attention.run(step.plan(attention), step.q, step.k_cache, step.v_cache)
    assert isinstance(out, torch.Tensor)
    assert torch.equal(out, step.run(attention)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "heads_first", "sliced"])
def test_the_output_is_written_into_out(dtype: torch.dtype, layout: str) -> None:
    attention = make_attention(dtype=dtype)
    step = random_step(0, attention.config, TREE)
    expected = step.run(attention)
    storage = torch.full((9, 5, 40), math.nan, dtype=dtype)
    out = {
        "contiguous": torch.full((8, 4, 32), math.nan, dtype=dtype),
        "heads_first": torch.full((4, 8, 32), math.nan, dtype=dtype).transpose(0, 1),
        "sliced": storage[1:, :4, 3:35],
    }[layout]
    found = step.run(attention, out=out)
    assert found[0] is out
    assert torch.equal(out, expected[0])
    assert torch.equal(found[1], expected[1])
    assert layout != "sliced" or int(storage.isnan().sum()) == storage.numel() - out.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=str)
def test_an_output_of_inference_mode_is_written_outside_of_it(dtype: torch.dtype, order: tuple[int, ...]) -> None:
    attention = make_attention(dtype=dtype)
    step = random_step(0, attention.config, TREE)
    with torch.inference_mode():
        out = torch.empty([(8, 4, 32)[dim] for dim in order], dtype=dtype).permute(order)
    assert torch.equal(step.run(attention, out=out)[0], step.run(attention)[0])


def test_the_inputs_may_have_any_strides_and_are_left_alone() -> None:
    attention, step = make_attention(), one_step()
    expected = step.run(attention)
    table, lens, starts = (torch.stack([tensor, tensor], dim=-1)[..., 0] for tensor in step.tables)
    step = replace(step, q=torch.cat([step.q, step.q], dim=-1)[..., :32])
    inputs = (table, lens, starts, step.q, step.k_cache, step.v_cache)
    before = [tensor.clone() for tensor in inputs]
    found = step.run(attention, attention.plan(table, lens, starts))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(inputs, before, strict=True))


def test_no_query_starts_means_one_query_each() -> None:
    attention, step = make_attention(), one_step()
    table, lens, _ = step.tables
    plan = attention.plan(table, lens)
    assert plan.num_query_tokens == 8
    assert torch.equal(step.run(attention, plan)[0], step.run(attention)[0])


@pytest.mark.parametrize("num_rows", [0, 3])
@pytest.mark.parametrize("num_pages", [0, 4])
def test_a_batch_without_queries_gives_empty_outputs(num_rows: int, num_pages: int) -> None:
    attention = make_attention()
    table, lens = torch.full((num_rows, 2), -1, dtype=torch.int32), torch.full((num_rows,), 999, dtype=torch.int32)
    plan = attention.plan(table, lens, torch.zeros(num_rows + 1, dtype=torch.int32))
    plan.check()
    cache = torch.full((num_pages, 16, 2, 32), math.nan)
    out, lse = attention.run(plan, torch.empty(0, 4, 32), cache, cache, return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 32), (0, 4))
    assert (plan.stats.kv_tokens_read, plan.stats.kv_tokens_per_query, plan.stats.num_work_items) == (0, 0, 0)


def test_the_first_token_of_a_sequence_returns_its_value() -> None:
    attention = make_attention()
    cache = torch.randn(1, 16, 2, 32)
    plan = attention.plan(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32))
    out, lse = attention.run(plan, torch.randn(1, 4, 32), cache, cache, return_lse=True)
    assert torch.equal(out, cache[:1, 0].repeat_interleave(2, 1))
    assert lse.isfinite().all()


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda object_: pickle.loads(pickle.dumps(object_))])
def test_a_copy_reads_no_array_of_what_was_copied(copied: Callable[[object], object]) -> None:
    """Kernels know where arrays lie: those of a copy would be the arrays of the first, which may be gone."""
    attention, step = make_attention(), one_step()
    plan = step.plan(attention)
    expected = step.run(attention, plan)
    with pytest.raises(TypeError, match=r"a Plan is copied or pickled: expected one made by BatchAttention\.plan"):
        copied(plan)
    other = copied(attention)
    assert isinstance(other, BatchAttention) and other.config == attention.config
    with pytest.raises(ValueError, match="plan belongs to another BatchAttention"):
        step.run(other, plan)
    del attention, plan
    assert all(torch.equal(a, b) for a, b in zip(step.run(other), expected, strict=True))


def test_several_plans_live_at_once() -> None:
    attention = make_attention()
    rng = np.random.default_rng(0)
    forests = [random_forest(rng, page_size=16, max_requests=n, max_query_len=9) for n in (12, 3, 8)]
    steps = [one_step(seed, batch, window) for seed, batch in enumerate(forests) for window in (None, 50)]
    expected = [step.run(make_attention()) for step in steps]
    plans = [step.plan(attention) for step in steps]
    for i in (3, 0, 5, 5, 1, 4, 2, 0):
        out, lse = steps[i].run(attention, plans[i])
        assert torch.equal(out, expected[i][0])
        assert torch.equal(lse, expected[i][1])


def test_a_small_plan_leaves_room_for_a_large_one() -> None:
    attention, small = make_attention(), one_step()
    table, lens, count = np.arange(20, dtype=np.int32)[None], np.array([312], np.int32), np.array([300], np.int32)
    large = one_step(batch=PagedBatch(table, lens, count, 16, 20))
    plan, _ = large.plan(attention), small.plan(attention)
    assert all(map(torch.equal, large.run(attention, plan), large.run(make_attention())))


def test_a_plan_outlives_the_growth_of_its_batch() -> None:
    attention = make_attention()
    batch = tree_batch(parse_tree("1,4_64,40"), 16)
    table = np.pad(batch.block_table, ((0, 0), (0, 2)))
    table[:, 7:] = batch.num_pages + np.arange(8, dtype=np.int32).reshape(4, 2)
    batch = replace(batch, block_table=table, num_pages=batch.num_pages + 8)
    steps = [random_step(1, make_config(), replace(batch, seq_lens=batch.seq_lens + grown)) for grown in (0, 1, 9, 33)]
    plans = [step.plan(attention) for step in steps]
    assert len({id(plan.step.planned.batch.block_table) for plan in plans}) == 1, "patched, not rebuilt"
    for step, plan in zip(steps, plans, strict=True):
        step.assert_accurate(*step.run(attention, plan))


def test_the_tables_may_change_after_planning() -> None:
    attention, step = make_attention(), one_step()
    expected = step.run(attention)
    table, lens, starts = (tensor.clone() for tensor in step.tables)
    plan = attention.plan(table, lens, starts)
    for tensor in (table, lens, starts):
        tensor.fill_(-7)
    assert torch.equal(step.run(attention, plan)[0], expected[0])


@pytest.mark.parametrize("policy", ["cascade", "auto"])
def test_runs_are_repeatable_to_the_bit(policy: str) -> None:
    attention = make_attention(policy=policy)
    batch = random_forest(np.random.default_rng(5), page_size=16, max_own_tokens=400, max_query_len=20)
    step = one_step(5, batch)
    plan = step.plan(attention)
    assert plan.stats.num_work_items > 4
    assert plan.step.planned.work.num_slots > 0
    first = step.run(attention, plan)
    for _ in range(49):
        again = step.run(attention, plan)
        assert torch.equal(again[0], first[0])
        assert torch.equal(again[1], first[1])


def test_the_number_of_threads_changes_rounding_only(monkeypatch: pytest.MonkeyPatch) -> None:
    step = one_step(5, random_forest(np.random.default_rng(5), page_size=16, max_own_tokens=400))
    for threads in (1, 2, 5):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        step.assert_accurate(*step.run(make_attention()))


def test_learned_sinks_are_taken_where_gradients_are_off() -> None:
    attention = make_attention(sinks=True)
    sinks = torch.nn.Parameter(torch.randn(4))
    step = random_step(0, attention.config, TREE, sinks=sinks)
    with torch.no_grad():
        found = step.run(attention)
        step.assert_accurate(*found)
    detached = random_step(0, attention.config, TREE, sinks=sinks.detach())
    assert torch.equal(detached.run(attention)[0], found[0])


def test_a_batch_within_its_capacity_is_planned() -> None:
    step = one_step()
    capacity = Capacity(max_requests=8, max_query_tokens=8, max_pages_per_request=11, num_pages=TREE.num_pages)
    attention = BatchAttention(make_config(), "cpu", capacity)
    assert torch.equal(step.run(attention)[0], step.run(make_attention())[0])


@pytest.mark.parametrize("window", [104 + 64, 2**31 - 1, 2**70])
def test_a_window_wider_than_any_sequence_changes_nothing(window: int) -> None:
    attention, step = make_attention(), one_step()
    plan = attention.plan(*step.tables, window)
    assert torch.equal(step.run(attention, plan)[0], step.run(attention)[0])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_with_those_that_see_it(policy: str, value: float) -> None:
    """A request's q, a key or a value that one request alone sees: the others have the bits that they have without."""
    attention, step = make_attention(policy=policy), one_step()
    table, lens, starts = step.tables
    plan = step.plan(attention)
    clean, clean_lse = step.run(attention, plan)
    row = 5
    page, place = int(table[row, (int(lens[row]) - 1) // 16]), (int(lens[row]) - 1) % 16
    own = torch.zeros(len(clean), dtype=torch.bool)
    own[int(starts[row]) : int(starts[row + 1])] = True
    for name, tensor, where in (
        ("q", step.q, (int(starts[row + 1]) - 1, 2, 3)),
        ("k", step.k_cache, (page, place, 1, 3)),
        ("v", step.v_cache, (page, place, 1, 3)),
    ):
        before = tensor[where].clone()
        tensor[where] = value
        out, lse = step.run(attention, plan)
        tensor[where] = before
        assert torch.equal(out[~own], clean[~own]) and torch.equal(lse[~own], clean_lse[~own]), name
        # a key of -inf may be one that nobody wants
        assert not out[own].isfinite().all() or (name == "k" and math.isinf(value)), name


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("token", "shorter"), [(5, 0), (12, 1)])
def test_what_is_not_finite_stays_with_those_whose_window_reaches_it(
    token: int, shorter: int, dtype: torch.dtype, value: float
) -> None:
    """Two requests read a trunk together. The shorter one sees tokens from 3 on, the longer one from 13 on."""
    config = AttentionConfig(2, 1, 16, 4, torch.float32, kv_dtype=dtype, policy="cascade")
    attention, generator = BatchAttention(config, "cpu"), torch.Generator().manual_seed(0)
    table = torch.tensor([[0, 1, 2, 3, 4, 0, 0], [0, 1, 2, 3, 5, 6, 7]], dtype=torch.int32)
    lens, longer = torch.tensor([17, 27], dtype=torch.int32), 1 - shorter
    plan = attention.plan(table[[shorter, longer]], lens[[shorter, longer]], None, 14)
    q = torch.randn(2, 2, 16, generator=generator)
    k_cache, v_cache = (torch.randn(8, 4, 1, 16, generator=generator).to(dtype) for _ in range(2))
    clean = attention.run(plan, q, k_cache, v_cache)
    for cache in (k_cache, v_cache):
        before = cache.clone()
        cache[token // 4, token % 4, 0, 3] = value
        out = attention.run(plan, q, k_cache, v_cache)
        assert torch.equal(out[longer], clean[longer])  # type: ignore[arg-type]
        assert not out[shorter].isfinite().all() or cache is k_cache  # a key of -inf may be one that nobody wants
        cache.copy_(before)


@pytest.mark.parametrize("num_queries", [2, 3, 66])
def test_what_one_query_sees_and_another_does_not_at_the_edges_of_blocks(num_queries: int) -> None:
    """Of two queries, the second no longer sees the first key of the first block, nor the first one the last key of the
    last block, which is full."""
    table, count = np.arange(20, dtype=np.int32)[None], np.array([num_queries], np.int32)
    step = one_step(batch=PagedBatch(table, np.array([312], np.int32), count, 16, 20), window=151)
    step.assert_accurate(*step.run(make_attention()))


def test_pages_may_lie_more_than_2_to_the_31_elements_apart() -> None:
    """Most of the memory between them is never touched, so that it costs nothing."""
    attention = make_attention(dtype=torch.float16)
    near, q = torch.randn(3, 16, 2, 32).half(), torch.randn(1, 4, 32).half()
    apart = torch.empty(2**31 + 1024, dtype=torch.float16).as_strided(near.shape, (2**30, 64, 32, 1)).copy_(near)
    plan = attention.plan(torch.arange(3, dtype=torch.int32)[None], torch.tensor([40], dtype=torch.int32))
    expected = attention.run(plan, q, near, near)
    for caches in ((apart, near), (near, apart)):
        assert torch.equal(attention.run(plan, q, *caches), expected)  # type: ignore[arg-type]


def test_an_interrupt_waits_for_the_end_of_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled functions that return arrays crash in one of some thousand interrupts."""
    attention, step, planned = make_attention(), one_step(), list[Any]()
    expected = step.run(attention, step.plan(attention))[0]
    plan = Planner.plan

    def interrupted(*arguments: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        planned.append(plan(*arguments))
        return planned[-1]

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Planner, "plan", interrupted)
            step.plan(attention)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(planned) == 1
    assert torch.equal(step.run(attention, step.plan(attention))[0], expected)


def test_threads_of_torch_stay_as_they_are() -> None:
    """The kernels compute on torch's threads, which start with the first run."""
    code = (
        "import torch, trunkattn\n"
        "torch.set_num_threads(1)\n"
        "attention = trunkattn.BatchAttention(trunkattn.AttentionConfig(2, 1, 16, 4, torch.float32), 'cpu:0')\n"
        "cache = torch.zeros(1, 4, 1, 16)\n"
        "tables = torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)\n"
        "attention.run(attention.plan(*tables), torch.zeros(1, 2, 16), cache, cache)\n"
        "print(torch.get_num_threads())\n"
    )
    environment = {name: value for name, value in os.environ.items() if not name.endswith("_NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "1\n"


@pytest.mark.parametrize("policy", ["cascade", "per_query"])
@pytest.mark.parametrize("window", [None, 50])
def test_logits_may_lie_near_the_end_of_float32(policy: str, window: int | None) -> None:
    """A row's first maximum must not be above its logits: the sum of its weights would be 0."""
    attention, step = make_attention(policy=policy), one_step(window=window)
    slots = torch.arange(step.k_cache[..., 0, 0].numel()).view(step.k_cache.shape[:2])
    step.q[:], step.q[..., 0] = 0.0, 1e17
    step.k_cache.mul_(0)[..., 0] += -1e15 * (1 + slots[..., None])
    out, lse = step.run(attention)
    expected, expected_lse = step.oracle()
    assert bool((expected_lse < -1e31).all()), "all of a request's logits are far below those of other tests"
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=0)


@pytest.mark.parametrize("policy", ["cascade", "per_query"])
def test_a_part_that_nobody_wants_leaves_the_weight_to_the_others(policy: str) -> None:
    """All logits of the trunk are -inf, which is no reason for NaN as long as other logits are finite."""
    attention, step = make_attention(policy=policy), one_step()
    step.q[:], step.q[..., 0] = 0.0, 1.0
    trunk = step.batch.block_table[0, :4]
    step.k_cache.mul_(0)
    step.k_cache[torch.from_numpy(trunk).long(), :, :, 0] = -math.inf
    plan = step.plan(attention)
    assert plan.step.planned.work.num_slots > 0 or policy == "per_query"
    out, lse = step.run(attention, plan)
    own = step.oracle()
    torch.testing.assert_close(out.double(), own[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), own[1], rtol=0, atol=1e-5)


def test_scales_of_heads_and_sinks_apply_to_what_is_merged() -> None:
    attention = make_attention(policy="cascade", sinks=True)
    scales = {name: torch.tensor([0.5, 3.0]) for name in ("q_scale", "k_scale", "v_scale")}
    step = random_step(0, attention.config, TREE, sinks=torch.randn(4), **scales)
    plan = step.plan(attention)
    assert plan.step.planned.work.num_slots > 0
    step.assert_accurate(*step.run(attention, plan))


def test_partial_results_that_no_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attention, step = make_attention(policy="cascade"), one_step()
    expected = step.run(attention)[0]

    def no_memory(*arguments: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("trunkattn.cpu.parallel.Workspace", no_memory)
        larger = random_forest(np.random.default_rng(5), page_size=16, max_requests=30, max_own_tokens=400)
        with pytest.raises(
            ValueError, match=r"policy='cascade' makes \d+ partial results of 4 heads × 32 numbers, for"
        ):
            one_step(5, larger).plan(attention)
    assert torch.equal(step.run(attention)[0], expected)


def test_heads_that_no_memory_holds_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's error of a CPU is a plain RuntimeError, and Numba's says no number of bytes."""
    made, attention, step = torch.empty, make_attention(policy="per_query"), one_step()
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *shape, **options: made(1 << 60, dtype=torch.uint8))
        message = "head_dim=32 and head_dim_v=32: expected heads of which memory holds a tile, not 1152921504606846976"
        with pytest.raises(ValueError, match=message):
            make_attention()
        message = r"policy='per_query' makes \d+ items of 4 heads × 32 numbers, for which there is no memory: expected"
        with pytest.raises(ValueError, match=message):
            step.plan(attention)
        patch.setattr("trunkattn.cpu.parallel.prepare", Mock(side_effect=MemoryError))
        with pytest.raises(ValueError, match=message):
            step.plan(attention)
    step.run(attention)


def test_rows_that_a_gpu_does_not_count_are_refused() -> None:
    """No tensor is looked at before."""
    unread: Any = None
    inputs = LayerInputs(unread, unread, unread, return_lse=True)
    config = AttentionConfig(128, 128, 16, 16, torch.float16)
    with pytest.raises(ValueError, match="q has 16777216 tokens of 128 heads: expected at most 2147483647 rows"):
        check_layer(config, torch.device("cuda"), 2**24, inputs)
