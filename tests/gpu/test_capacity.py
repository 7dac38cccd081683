"""A plan that is refilled: `plan(..., into=plan)` on a CPU, and on a GPU's back end under the interpreter."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from benchmarks.workloads import PagedBatch, parse_tree, tree_batch
from trunkattn import BatchAttention, Capacity
from trunkattn.attention import Plan
from trunkattn.gpu.attention import GpuBackend
from trunkattn.planner.planner import StepTables
from trunkattn.planner.work_list import UNLIMITED

from .backend_cases import CONFIG, caches, expected, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("pretended_gpu")]

CAPACITY = Capacity(max_requests=24, max_query_tokens=24, max_pages_per_request=16, num_pages=400)
TREES = ("1,2,9_48,32,21", "20_70", "1,24_128,5", "1_200", "2,4,8,16_16,16,16,16")


def as_tensors(batch: PagedBatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(torch.from_numpy(array) for array in (batch.block_table, batch.seq_lens, batch.query_start_loc))


@pytest.mark.parametrize("execution", ["serial", "streams"])
@pytest.mark.parametrize("policy", ["auto", "pat"])
def test_one_gpu_plan_serves_batches_of_any_shape_from_the_same_memory(policy: str, execution: str) -> None:
    backend = GpuBackend(replace(CONFIG, policy=policy, execution=execution), torch.device("cpu"), CAPACITY)
    step, places = None, set()
    for tree in TREES:
        batch = tree_batch(parse_tree(tree), 16, row_seed=0, page_seed=1)
        step = backend.plan(StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED), step)
        step.check()
        places.add((step.gpu_plan.flat.data_ptr(), step.gpu_plan.launches, backend._workspace.partial.data_ptr()))
        q, kv = torch.randn(len(batch.seq_lens), 4, 32), caches(batch, CONFIG)
        out, lse = run(backend, step, q, kv)
        want, want_lse = expected(batch, q, kv)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
        torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)
    assert len(places) == 1


def test_a_capacity_for_several_query_tokens_masks_them() -> None:
    """As many query tokens as requests may still be several of one request, unless max_query_len says otherwise."""
    batch = tree_batch(parse_tree("1,4_48,32"), 16, row_seed=0, page_seed=1)
    batch = replace(batch, query_lens=np.full(4, 4, np.int32))
    arrays = StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED)
    backend = GpuBackend(CONFIG, torch.device("cpu"), CAPACITY)
    q, kv = torch.randn(16, 4, 32), caches(batch, CONFIG)
    out, _ = run(backend, backend.plan(arrays), q, kv)
    torch.testing.assert_close(out.double(), expected(batch, q, kv)[0], rtol=0, atol=1e-5)
    decoding = BatchAttention(CONFIG, "cpu", replace(CAPACITY, max_query_len=1))
    with pytest.raises(ValueError, match="query tokens of a request in query_start_loc: 4 is over the capacity, max_q"):
        decoding.plan(*as_tensors(batch))


@pytest.mark.parametrize("tree", ["24_250", "1,24_128,60", "1,4,24_64,64,100"])
def test_a_batch_invariant_plan_holds_every_batch_of_its_capacity(tree: str) -> None:
    config = replace(CONFIG, batch_invariant=True)
    batch = tree_batch(parse_tree(tree), 16, row_seed=0, page_seed=1)
    requests, pages = batch.block_table.shape
    backend = GpuBackend(config, torch.device("cpu"), Capacity(requests, requests, pages, batch.num_pages))
    backend.plan(StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED)).check()


def test_a_refused_batch_leaves_no_trace() -> None:
    """The batch before it, and its own next step, have the plans of a back end that has not seen it."""
    config = replace(CONFIG, policy="cascade")
    backend = GpuBackend(config, torch.device("cpu"), CAPACITY)
    batch = tree_batch(parse_tree("1,4_48,32"), 16)
    arrays = StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED)
    other = replace(arrays, block_table=arrays.block_table + 100)
    for after in (arrays, replace(other, seq_lens=other.seq_lens - 1)):
        backend.plan(arrays)
        limits, backend._planner.limits = backend._planner.limits, replace(backend._planner.limits, items=1)
        with pytest.raises(ValueError, match="of 1 that a plan"):
            backend.plan(replace(other, seq_lens=other.seq_lens - 2))
        backend._planner.limits = limits
        found, expected = (
            it.plan(after).tiles.tile_list() for it in (backend, GpuBackend(config, torch.device("cpu"), CAPACITY))
        )
        assert np.array_equal(found.segments, expected.segments) and np.array_equal(found.items, expected.items)


def test_rows_beyond_the_plan_stay_in_an_output_of_any_strides() -> None:
    backend = GpuBackend(CONFIG, torch.device("cpu"), CAPACITY)
    batch = tree_batch(parse_tree("1,4_48,32"), 16)
    step = backend.plan(StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED))
    out = torch.full((32, 4, 10), 7.0).transpose(0, 2)
    run(backend, step, torch.randn(10, 4, 32), caches(batch, CONFIG), out=out)
    assert (out[4:] == 7).all() and not (out[:4] == 7).any()


def test_a_plan_of_no_request_computes_nothing() -> None:
    backend = GpuBackend(CONFIG, torch.device("cpu"), CAPACITY)
    empty = StepTables(np.zeros((0, 1), np.int32), np.zeros(0, np.int32), np.zeros(1, np.int32), UNLIMITED)
    out, _ = run(
        backend, backend.plan(empty), torch.randn(5, 4, 32), caches(tree_batch(parse_tree("1_20"), 16), CONFIG)
    )
    assert out.isnan().all()


def test_what_no_plan_of_the_capacity_holds_is_refused() -> None:
    backend = GpuBackend(replace(CONFIG, policy="cascade"), torch.device("cpu"), CAPACITY)
    backend._planner.limits = replace(backend._planner.limits, items=2)
    batch = tree_batch(parse_tree(TREES[0]), 16)
    with pytest.raises(
        ValueError, match=r"policy='cascade' makes .* items of 2 that a plan of this capacity holds: expected"
    ):
        backend.plan(StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED))


def test_a_tiling_that_does_not_fit_is_passed_over() -> None:
    """No partial may be written, so nothing may be cut."""
    backend = GpuBackend(CONFIG, torch.device("cpu"), CAPACITY)
    batch = tree_batch(parse_tree("1_200"), 16)
    arrays = StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED)
    backend._planner.limits = replace(backend._planner.limits, slots=0)
    step = backend.plan(arrays)
    step.check()
    assert step.tiles.tile_list().num_slots == 0


def test_a_plan_on_a_cpu_may_be_refilled() -> None:
    attention = BatchAttention(CONFIG, "cpu", CAPACITY)
    plan = None
    for tree in TREES:
        batch = tree_batch(parse_tree(tree), 16, row_seed=0, page_seed=1)
        kv = caches(batch, CONFIG)
        q, tokens = torch.randn(24, 4, 32), len(batch.seq_lens)
        made = attention.plan(*as_tensors(batch), into=plan)
        assert plan is None or made is plan
        plan = made
        out = torch.full((24, 4, 32), 7.0)
        attention.run(plan, q, *kv, out=out)
        torch.testing.assert_close(out[:tokens].double(), expected(batch, q[:tokens], kv)[0], rtol=0, atol=1e-5)
        assert (out[tokens:] == 7).all()


def test_bad_ways_to_refill_are_refused() -> None:
    batch = as_tensors(tree_batch(parse_tree(TREES[0]), 16))
    fixed, other, free = (BatchAttention(CONFIG, "cpu", each) for each in (CAPACITY, CAPACITY, None))
    plan = fixed.plan(*batch)
    with pytest.raises(ValueError, match="into belongs to another BatchAttention"):
        other.plan(*batch, into=plan)
    with pytest.raises(ValueError, match="into is a plan of `only`"):
        fixed.plan(*batch, into=Plan(plan.step, fixed, plan.last_page, plan.window, refills=False))
    with pytest.raises(TypeError, match="into is a SimpleNamespace: expected a Plan"):
        fixed.plan(*batch, into=SimpleNamespace())
    with pytest.raises(ValueError, match="into is given: expected a BatchAttention with a capacity"):
        free.plan(*batch, into=free.plan(*batch))
    with pytest.raises(ValueError, match="sliding_window=5: expected None, the window"):
        fixed.plan(*batch, sliding_window=5, into=plan)
    rows = torch.randn(25, 4, 32)
    kv = caches(tree_batch(parse_tree(TREES[0]), 16), CONFIG)
    with pytest.raises(ValueError, match=r"q has shape \(25, 4, 32\): expected \(num_query_tokens=24, "):
        fixed.run(plan, rows, *kv)
    with pytest.raises(ValueError, match=r"q has shape \(8, 4, 32\): expected \(num_query_tokens=9, "):
        fixed.run(plan, rows[:8], *kv)
    too_many = as_tensors(tree_batch(parse_tree("25_20"), 16))
    with pytest.raises(ValueError, match="block_table rows: 25 is over the capacity, max_requests=24"):
        fixed.plan(*too_many, into=plan)
    assert plan.num_query_tokens == 9, "the plan is as it was"
