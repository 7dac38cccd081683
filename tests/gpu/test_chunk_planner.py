"""`GpuBackend` with prompt chunks under Triton's interpreter: mixed batches, plans of fixed size, what is refused."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.workloads import PagedBatch, parse_tree, tree_batch
from trunkattn.config import Capacity
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.chunk_planner import ChunkPlanner
from trunkattn.gpu.device_planner.step import DeviceTiles
from trunkattn.gpu.kernel import Work
from trunkattn.gpu.portable.spec import PREFILL_TILE
from trunkattn.planner.planner import StepTables
from trunkattn.planner.work_list import UNLIMITED

from .backend_cases import CONFIG, caches, expected, plan, run

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("pretended_gpu")]

CPU = torch.device("cpu")
CAPACITY = Capacity(max_requests=9, max_query_tokens=260, max_pages_per_request=14, num_pages=200)
DECODES = tree_batch(parse_tree("1,2,9_32,16,61"), 16, row_seed=0, page_seed=1)
# above 32 query tokens, the group being 2, a request is a chunk
MIXED = replace(DECODES, query_lens=np.array([1, 70, 1, 0, 32, 1, 40, 2, 33], np.int32))


def assert_right(backend: GpuBackend, step: Any, batch: PagedBatch, window: int | None = None) -> None:
    q, kv, sinks = torch.randn(step.num_query_tokens, 4, 32), caches(batch, CONFIG), torch.randn(4)
    out, lse = run(backend, step, q, kv, sinks=sinks)
    want, want_lse = expected(batch, q, kv, sliding_window=window, sinks=sinks)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=1e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=1e-5)


def into(backend: GpuBackend, batch: PagedBatch, step: Any) -> Any:
    return backend.plan(StepTables(batch.block_table, batch.seq_lens, batch.query_start_loc, UNLIMITED), step)


@pytest.mark.parametrize("policy, execution", [("auto", "serial"), ("cascade", "streams"), ("per_query", "serial")])
@pytest.mark.parametrize("window", [None, 30])
def test_a_batch_of_decodes_and_chunks_equals_the_oracle(policy: str, execution: str, window: int | None) -> None:
    backend = GpuBackend(replace(CONFIG, policy=policy, execution=execution, sinks=True), CPU)
    step = plan(backend, MIXED, window=UNLIMITED if window is None else window)
    step.check()
    assert step.chunks.division.chunk_tokens.tolist() == [*range(1, 71), *range(105, 145), *range(147, 180)]
    assert_right(backend, step, MIXED, window)


def test_only_chunks_are_one_launch() -> None:
    backend = GpuBackend(replace(CONFIG, sinks=True), CPU)
    batch = replace(DECODES, query_lens=np.array([0, 50, 0, 40, 0, 0, 0, 0, 0], np.int32))
    step = plan(backend, batch)
    step.check()
    assert [launch.work for launch in step.gpu_plan.launches] == [Work.PREFILL] and step.num_query_tokens == 90
    assert step.stats().policy == f"prefill {step.chunks.planned.policy}"
    assert_right(backend, step, batch)


def test_decodes_next_to_chunks_need_no_mask() -> None:
    backend = GpuBackend(CONFIG, CPU)
    batch = replace(DECODES, query_lens=np.array([1, 50, 1, 1, 0, 1, 1, 1, 1], np.int32))
    assert not plan(backend, batch).gpu_plan.geometry.masked
    assert plan(backend, MIXED).gpu_plan.geometry.masked


def test_stats_count_both_halves() -> None:
    backend = GpuBackend(CONFIG, CPU)
    stats, decodes = plan(backend, MIXED).stats(), plan(backend, DECODES).stats()
    assert stats.tiles["64x32 prefill"] > 0 and "64x32 prefill" not in decodes.tiles
    assert sum(stats.tiles.values()) == stats.num_work_items
    # a chunk of 70 tokens is 3 tiles, of up to 32 tokens, that read 109 - 70 + 32, ... tokens; 32 rows hold 16 tokens
    alone = sum(109 - length + min(first + 32, length) for length in (70, 40, 33) for first in range(0, length, 32))
    assert stats.kv_tokens_per_query == alone + 4 * 109 + (109 - 16) + 109
    assert ", prefill " in stats.policy and "; prefill: " in stats.reason


@pytest.mark.parametrize("policy, execution", [("auto", "serial"), ("pat", "streams")])
def test_one_plan_serves_decodes_and_chunks_from_the_same_memory(policy: str, execution: str) -> None:
    backend = GpuBackend(replace(CONFIG, policy=policy, execution=execution, sinks=True), CPU, CAPACITY)
    step, places = None, set()
    chunks = replace(DECODES, query_lens=np.array([0, 109, 0, 0, 0, 0, 50, 0, 0], np.int32))
    for batch in (MIXED, DECODES, chunks, MIXED):
        step = into(backend, batch, step)
        step.check()
        gpu_plan = step.gpu_plan
        places.add((gpu_plan.flat.data_ptr(), gpu_plan.chunks.flat.data_ptr(), gpu_plan.chunks.num_ctas))
        assert gpu_plan.arrays["chunk_count"][0] == (len(step.chunks.planned.work.items) if step.chunks else 0)
        assert (step.chunks is None) == (batch is DECODES)
        assert_right(backend, step, batch)
    assert len(places) == 1


@pytest.mark.parametrize("longest", [1, 32])
def test_a_capacity_without_chunks_has_no_launch_for_them(longest: int) -> None:
    backend = GpuBackend(CONFIG, CPU, replace(CAPACITY, max_query_len=longest))
    batch = DECODES if longest == 1 else replace(MIXED, query_lens=np.minimum(MIXED.query_lens, 32))
    step = plan(backend, batch)
    assert (step.chunks, step.gpu_plan.chunks) == (None, None)


def test_no_partial_slot_is_left() -> None:
    """`auto` then reads chunks alone and whole; another policy is refused, and the plan is as it was."""
    batch = replace(DECODES, query_lens=np.array([33] * 7 + [1, 1], np.int32))
    for policy in ("auto", "cascade"):
        backend = GpuBackend(replace(CONFIG, policy=policy, sinks=True), CPU, CAPACITY)
        step = plan(backend, MIXED)
        before = step.gpu_plan.chunks.flat.clone()
        backend._planner.limits = replace(backend._planner.limits, slots=40)
        if policy == "auto":
            step = into(backend, replace(batch, query_lens=np.minimum(batch.query_lens, 33)), step)
            assert step.chunks.planned.work.num_slots <= 40
            assert_right(backend, step, batch)
            continue
        with pytest.raises(
            ValueError, match=r"policy='cascade' makes .* prefill slots of .* that a plan of this capacity"
        ):
            into(backend, batch, step)
        assert torch.equal(step.gpu_plan.chunks.flat, before)


def test_a_cheapest_packing_that_does_not_fit_is_passed_over() -> None:
    """A single short chunk behind a long context would be cut."""
    backend = GpuBackend(replace(CONFIG, sinks=True), CPU, replace(CAPACITY, max_pages_per_request=130))
    backend._chunks._planner.spec = replace(
        backend._chunks._planner.spec, rule=backend._chunks._planner.spec.rule._replace(num_workers=132)
    )
    batch = replace(tree_batch(parse_tree("1_2000"), 16), query_lens=np.array([40], np.int32))
    cut = plan(backend, batch)
    assert cut.chunks.planned.work.num_slots > 0
    backend._planner.limits = replace(backend._planner.limits, slots=cut.chunks.planned.work.num_slots - 1)
    whole = plan(backend, batch)
    whole.check()
    assert whole.chunks.planned.work.num_slots == 0
    assert "that a plan of this capacity holds" in whole.stats().reason
    assert_right(backend, whole, batch)


@pytest.mark.parametrize("requests, policy", [(8, "per_query"), (64, "optimal")])
def test_sharing_that_leaves_the_card_idle_is_passed_over(requests: int, policy: str) -> None:
    """Chunks of 40 tokens fill 1.25 tiles. 16 tiles of 8 chunks, times 8 heads, are one round of 132 multiprocessors,
    and the 10 that share would be no less than one."""
    config = replace(CONFIG, num_qo_heads=32, num_kv_heads=8, head_dim=128, dtype=torch.bfloat16)
    chunks = ChunkPlanner(config, PREFILL_TILE, num_sms=132)
    batch = tree_batch(parse_tree(f"1,{requests}_2048,40"), 16)
    starts = np.arange(requests + 1, dtype=np.int32) * 40
    division = chunks.divide(StepTables(batch.block_table, batch.seq_lens, starts, UNLIMITED))
    planned = chunks.plan(division, None).planned
    assert planned.policy == policy, planned.reason
    assert ("too few items to share" in planned.reason) == (policy == "per_query")


def test_plans_made_on_the_device_have_no_chunks() -> None:
    backend = GpuBackend(CONFIG, CPU, Capacity(2, 40, 4, 10))
    batch = replace(tree_batch(parse_tree("1,2_16,35"), 16), query_lens=np.array([35, 1], np.int32))
    host = plan(backend, batch)
    assert host.gpu_plan.arrays["chunk_count"][0] > 0
    tables = tuple(torch.from_numpy(each) for each in (batch.block_table, batch.seq_lens, batch.query_start_loc))
    filled = backend.plan_on_device(tables, UNLIMITED, host)
    assert isinstance(filled.tiles, DeviceTiles) and filled.gpu_plan is host.gpu_plan
    assert filled.gpu_plan.arrays["chunk_count"][0] == 0
    filled.check()
    own = backend.plan_on_device(tables, UNLIMITED)
    assert own.gpu_plan.chunks is None
    rows = into(backend, batch, own)  # a launch for chunks cannot be added to it
    rows.check()
    assert (rows.chunks, rows.num_query_tokens) == (None, 36)


TWO = tree_batch(parse_tree("1,2_16,35"), 16)


def two(*query_lens: int) -> tuple[PagedBatch, tuple[torch.Tensor, ...]]:
    batch = replace(TWO, query_lens=np.array(query_lens, np.int32))
    return batch, tuple(map(torch.from_numpy, (batch.block_table, batch.seq_lens, batch.query_start_loc)))


def test_a_refused_plan_on_the_device_leaves_the_chunks_as_they_were() -> None:
    backend = GpuBackend(replace(CONFIG, sinks=True), CPU, Capacity(2, 40, 4, 10))
    batch, tables = two(35, 1)
    host = plan(backend, batch)
    with pytest.raises(ValueError, match="seq_lens"):
        backend.plan_on_device((tables[0], tables[1][:1], tables[2]), UNLIMITED, host)
    assert_right(backend, host, batch)


def test_a_plan_captured_on_the_device_has_no_chunks_whatever_the_host_put_there_since() -> None:
    """A replay repeats what `plan_on_device` launched, not what it looked at."""
    backend = GpuBackend(CONFIG, CPU, Capacity(2, 40, 4, 10))
    decodes, tables = two(1, 1)
    zeroed: list[torch.Tensor] = []
    step = backend.plan_on_device(tables, UNLIMITED, plan(backend, decodes))
    counts = step.gpu_plan.arrays["chunk_count"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "zero_", lambda tensor: zeroed.append(tensor) or tensor)
        backend.plan_on_device(tables, UNLIMITED, step)
    assert any(tensor.data_ptr() == counts.data_ptr() for tensor in zeroed)


def test_a_batch_invariant_plan_has_no_chunks() -> None:
    backend = GpuBackend(replace(CONFIG, batch_invariant=True), CPU)
    assert plan(backend, MIXED).chunks is None


def test_a_chunk_planned_after_others_is_planned_afresh() -> None:
    """The sub-batch may have the same shape and other pages."""
    backend = GpuBackend(replace(CONFIG, sinks=True), CPU)
    for rows in ([1, 3, 4], [6, 7, 8], [1, 3, 4]):
        some = PagedBatch(DECODES.block_table[rows], DECODES.seq_lens[rows], np.array([35, 1, 40], np.int32), 16, 200)
        step = plan(backend, some)
        step.check()
        assert np.array_equal(step.chunks.planned.batch.block_table[0, :4], some.block_table[0, :4])
