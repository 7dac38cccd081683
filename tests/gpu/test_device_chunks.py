"""Prompt chunks that the host lists for plans made on the device, under Triton's interpreter: right outputs with and
without decodes that overlap them, plans of one memory, and what is refused."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import PagedBatch, parse_tree, tree_batch
from trunkattn import BatchAttention, PromptChunks
from trunkattn.config import Capacity
from trunkattn.gpu.attention import GpuBackend
from trunkattn.gpu.kernel import Work
from trunkattn.planner.work_list import UNLIMITED
from trunkattn.step_inputs import StepInputs, check_chunks

from .backend_cases import CONFIG, caches, expected, run
from .kernel_cases import CPU, overlap_always

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("pretended_gpu")]

CAPACITY = Capacity(9, 16, 7, 200, max_query_len=2, max_chunk_tokens=200)
TREE = tree_batch(parse_tree("1,2,9_32,16,61"), 16, row_seed=0, page_seed=1)  # 9 requests of 109 tokens


def batch_of(*query_lens: int) -> PagedBatch:
    return replace(TREE, query_lens=np.array(query_lens, np.int32))


def planned(backend: GpuBackend, batch: PagedBatch, num_chunks: int, step: Any = None, window: int = UNLIMITED) -> Any:
    tables = tuple(torch.from_numpy(each) for each in (batch.block_table, batch.seq_lens, batch.query_start_loc))
    first = len(batch.seq_lens) - num_chunks
    chunks = PromptChunks(int(batch.query_start_loc[first]), *(torch.from_numpy(np.ascontiguousarray(each[first:]))
                          for each in (batch.query_lens, batch.seq_lens)))  # fmt: skip
    return backend.plan_on_device(tables, window, step, chunks if num_chunks else None)


def assert_right(backend: GpuBackend, step: Any, batch: PagedBatch, window: int | None = None) -> None:
    step.check()
    backend.check()
    num_tokens = int(batch.query_start_loc[-1])
    config = backend.config
    q, kv = torch.randn(num_tokens, config.num_qo_heads, config.head_dim), caches(batch, config)
    out, lse = run(backend, step, q, kv)
    want, want_lse = expected(batch, q, kv, sliding_window=window)
    torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-5)
    torch.testing.assert_close(lse.double(), want_lse, rtol=0, atol=2e-5)


@pytest.fixture(params=[False, True], ids=["serial", "overlapped"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> GpuBackend:
    """One that overlaps decodes and chunks, by the portable kernels, or one that does not."""
    if not request.param:
        return GpuBackend(CONFIG, CPU, CAPACITY)
    made = GpuBackend(CONFIG, CPU, CAPACITY)
    overlap_always(made)
    return made


@pytest.mark.parametrize(
    ("query_lens", "num_chunks", "window"),
    [
        ((1, 1, 1, 1, 1, 1, 1, 70, 40), 2, None),
        ((1, 2, 0, 2, 1, 1, 1, 3, 109), 2, 30),  # a short chunk, drafts, and a row of padding
        ((1, 1, 1, 1, 1, 1, 1, 1, 1), 1, 30),  # a chunk of one token
        ((0, 0, 0, 0, 0, 0, 0, 0, 100), 1, None),  # nothing decodes
        ((20, 20, 20, 20, 20, 20, 20, 20, 20), 9, 30),  # all are chunks
    ],
)
def test_decodes_and_chunks_equal_the_oracle(
    backend: GpuBackend, query_lens: tuple[int, ...], num_chunks: int, window: int | None
) -> None:
    batch = batch_of(*query_lens)
    step = planned(backend, batch, num_chunks, window=UNLIMITED if window is None else window)
    assert (step.num_chunks > 0, step.num_query_tokens) == (True, sum(query_lens))
    assert_right(backend, step, batch, window)


def test_one_plan_serves_steps_with_and_without_chunks(backend: GpuBackend) -> None:
    step, places = None, set()
    for query_lens, num_chunks in (
        ((1,) * 9, 0),
        ((1,) * 7 + (40, 3), 2),
        ((20,) * 9, 9),
        ((1,) * 7 + (40, 3), 2),
        ((1,) * 9, 0),
    ):
        batch = batch_of(*query_lens)
        step = planned(backend, batch, num_chunks, step)
        places.add((step.gpu_plan.flat.data_ptr(), step.gpu_plan.chunks.flat.data_ptr()))
        assert step.num_chunks == num_chunks
        begin, end = step.gpu_plan.arrays["overlapped"][:2].tolist()
        assert begin == end or num_chunks, "items are computed twice"
        alone = step.only("chunks")
        assert (alone is None) == (num_chunks < 9), "decodes have launches of their own"
        assert alone is None or alone.gpu_plan.launches == step.gpu_plan.launches[:1], (
            "whichever kernel computes chunks"
        )
        assert bool(step.counters.kv_tokens.any()) == (num_chunks < 9), "chunks are not counted there"
        stats, of_chunks = step.stats(), step.counters.chunks
        in_chunks = of_chunks.kv_tokens_read if of_chunks else 0
        assert in_chunks + int(step.counters.kv_tokens[0]) == stats.kv_tokens_read
        assert (of_chunks is None) == (num_chunks == 0) and (num_chunks < 9 or in_chunks >= int(batch.seq_lens.sum()))
        assert_right(backend, step, batch)
    assert len(places) == 1


@pytest.mark.parametrize("window", [None, 30])
def test_a_plan_may_be_for_prompts_only(window: int | None) -> None:
    """It has room for one query token of decodes, which no step has."""
    made = GpuBackend(replace(CONFIG, execution="serial"), CPU, Capacity(9, 1, 7, 200, 1, max_chunk_tokens=200))
    step = None
    for query_lens in ((20,) * 9, (100,), (1, 64, 3), (1,)):
        batch = PagedBatch(TREE.block_table[: len(query_lens)], TREE.seq_lens[: len(query_lens)],
                           np.array(query_lens, np.int32), 16, 200)  # fmt: skip
        step = planned(made, batch, len(query_lens), step, UNLIMITED if window is None else window)
        assert step.num_query_tokens == sum(query_lens)
        assert_right(made, step, batch, window)
        alone = step.only("chunks")
        assert [launch.work for launch in alone.gpu_plan.launches] == [Work.PREFILL]
        assert alone.gpu_plan is step.only("chunks").gpu_plan
        assert_right(made, alone, batch, window)


def test_overlapping_takes_the_items_of_the_lowest_tile() -> None:
    made = GpuBackend(CONFIG, CPU, CAPACITY)
    batch = batch_of(*(1,) * 7, 60, 60)
    alone = planned(made, batch, 2)
    assert alone.gpu_plan.arrays["overlapped"][:2].diff() == 0
    overlap_always(made)
    both = planned(made, batch, 2)
    begin, end, most = both.gpu_plan.arrays["overlapped"][:3].tolist()
    items = both.gpu_plan.arrays["items"].view(-1)[5 * begin : 5 * end].view(-1, 5)
    assert (begin, end > begin) == (0, True)
    assert most == int((items[:, 4] - items[:, 3]).max())
    assert both.gpu_plan.arrays["counts"][0] == end  # no launch of its own computes them
    assert "overlapped" in both.stats().policy and "overlapped" not in alone.stats().policy
    heights = len(made._planner.rule.tiles)
    counts = both.gpu_plan.arrays["counts"][: heights + 1].tolist()
    assert counts == [end] * (heights + 1), "all items that merge nothing are of the lowest tile"


@settings(max_examples=5)
@given(st.data())
def test_any_step_equals_the_oracle(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 9), label="rows")
    num_chunks = data.draw(st.integers(1, rows), label="chunks")
    decodes = data.draw(st.lists(st.integers(0, 2), min_size=rows - num_chunks, max_size=rows - num_chunks))
    chunks = data.draw(st.lists(st.integers(1, 22), min_size=num_chunks, max_size=num_chunks))
    made = GpuBackend(CONFIG, CPU, CAPACITY)
    if data.draw(st.booleans(), label="overlapped"):
        overlap_always(made)
    some = PagedBatch(TREE.block_table[:rows], TREE.seq_lens[:rows], np.array([*decodes, *chunks], np.int32), 16, 200)
    window = data.draw(st.none() | st.integers(1, 120), label="window")
    step = planned(made, some, num_chunks, window=UNLIMITED if window is None else window)
    assert_right(made, step, some, window)


def test_pages_of_chunks_are_clamped() -> None:
    made = GpuBackend(CONFIG, CPU, CAPACITY)
    batch = batch_of(*(1,) * 8, 40)
    wrong = replace(batch, block_table=batch.block_table.copy())
    wrong.block_table[8, 2:4] = (-7, 10**6)
    step = planned(made, wrong, 1)
    table = step.gpu_plan.chunks.arrays["block_table"][:7].tolist()
    assert table[2:4] == [0, CAPACITY.num_pages - 1]
    assert table[:2] == batch.block_table[8, :2].tolist()


INTS = {
    "no chunk": (PromptChunks(0, torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)),
                 "chunks.query_lens has 0 requests: expected 1 to 9"),
    "more than rows": (PromptChunks(0, *[torch.ones(10, dtype=torch.int32)] * 2), "10 requests: expected 1 to 9"),
    "float": (PromptChunks(0, torch.ones(1), torch.ones(1, dtype=torch.int32)), "query_lens has dtype torch.float32"),
    "lengths": (PromptChunks(0, torch.ones(2, dtype=torch.int32), torch.ones(1, dtype=torch.int32)),
                r"chunks.seq_lens has shape \(1,\): expected \(chunks=2\)"),
    "first": (PromptChunks(17, torch.ones(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)),
              "chunks.first_token=17: expected an integer from 0 to 16"),
    "empty": (PromptChunks(0, torch.zeros(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)),
              r"chunks.query_lens\[0\]=0: expected 1 to its chunks.seq_lens, 1"),
    "long": (PromptChunks(0, torch.ones(1, dtype=torch.int32), torch.full((1,), 10_000, dtype=torch.int32)),
             r"chunks.seq_lens\[0\]=10000: expected at most 112"),
    "many": (PromptChunks(0, torch.full((9,), 50, dtype=torch.int32), torch.full((9,), 60, dtype=torch.int32)),
             "chunks.query_lens: 450 query tokens are over the capacity, max_chunk_tokens=200"),
    "tuple": ((0, 1, 2), "chunks is a tuple: expected PromptChunks or None"),
}  # fmt: skip


@pytest.mark.parametrize("name", INTS)
def test_what_is_refused(name: str) -> None:
    chunks, message = INTS[name]
    table = torch.from_numpy(TREE.block_table)
    inputs = StepInputs(table, torch.from_numpy(TREE.seq_lens), None, None, None)
    with pytest.raises((ValueError, TypeError), match=message):
        check_chunks(chunks, inputs, 16, CAPACITY)  # type: ignore[arg-type]


def test_a_plan_of_the_host_finds_chunks_itself() -> None:
    attention = BatchAttention(CONFIG, "cpu")
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="chunks is given: expected tables on a GPU"):
        attention.plan(torch.zeros(1, 1, dtype=torch.int32), one, chunks=PromptChunks(0, one, one))


def test_a_batch_invariant_plan_takes_no_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it is made on the device."""
    attention = BatchAttention(replace(CONFIG, batch_invariant=True), "cpu")
    monkeypatch.setattr("trunkattn.attention.all_on_gpu", lambda inputs: True)
    monkeypatch.setattr(attention, "capacity", CAPACITY)
    monkeypatch.setattr(attention, "_backend", SimpleNamespace(plans_on_device=True))
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match="policy='auto' without batch_invariant"):
        attention.plan(torch.zeros(1, 1, dtype=torch.int32), one, chunks=PromptChunks(0, one, one))


def test_the_result_holds_no_row_of_another_token(backend: GpuBackend) -> None:
    """Rows of q beyond the step's tokens are left as they are."""
    batch = batch_of(*(1,) * 8, 30)
    step = planned(backend, batch, 1)
    q, kv = torch.randn(60, 4, 32), caches(batch, backend.config)
    out = torch.full((60, 4, 32), math.nan)
    run(backend, step, q, kv, out=out)
    assert out[:38].isfinite().all() and out[38:].isnan().all()


def test_a_block_table_that_is_none_is_refused() -> None:
    one = torch.ones(1, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"block_table has shape \(1,\): expected \(num_requests, max_pages\)"):
        check_chunks(PromptChunks(0, one, one), StepInputs(one, one, None, None, None), 16, CAPACITY)
