"""`batch_invariant=True`: a request's bits depend on its own tokens and the options, not on what it is batched with."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.workloads import PagedBatch, parse_tree, random_forest, tree_batch
from trunkattn import AttentionConfig, BatchAttention
from trunkattn.config import POLICIES

from .cases import Result, Step, fraction, random_step

PAGE_SIZES = (1, 16, 64, 100, 128, 300, 528)


def make_config(policy: str, page_size: int, **options: object) -> AttentionConfig:
    return AttentionConfig(6, 2, 24, page_size, batch_invariant=True, policy=policy, **options)  # type: ignore[arg-type]


def make_batch(seed: int, page_size: int) -> PagedBatch:
    """Long rows: sharing is in units of 256 tokens or more."""
    rng = np.random.default_rng(seed)
    return random_forest(rng, page_size=page_size, max_requests=6, max_own_tokens=900, max_query_len=30)


def alone(step: Step, row: int, attention: BatchAttention, last_token: int | None = None) -> Result:
    """One row's outputs, planned without the others; with `last_token`, of the sequence that ends there, decoding."""
    table, lens, starts = step.tables
    begin, end = starts[row : row + 2].tolist()
    row_lens = lens[row : row + 1]
    if last_token is not None:
        begin, end, row_lens = last_token, last_token + 1, row_lens - (end - 1 - last_token)
    row_starts = torch.tensor([0, end - begin], dtype=torch.int32)
    plan = attention.plan(table[row : row + 1], row_lens, row_starts, step.window)
    result = attention.run(plan, step.q[begin:end], step.k_cache, step.v_cache, return_lse=True, **step.options)
    assert isinstance(result, tuple)
    return result


def assert_same_bits(found: Result, expected: Result, what: str) -> None:
    assert torch.equal(found[0], expected[0]), f"out of {what}"
    assert torch.equal(found[1], expected[1]), f"lse of {what}"


@pytest.mark.property
@settings(max_examples=fraction(2))
@given(
    seed=st.integers(0, 2**32 - 1),
    policies=st.tuples(st.sampled_from(POLICIES), st.sampled_from(POLICIES)),
    page_size=st.sampled_from(PAGE_SIZES),
    window=st.one_of(st.none(), st.integers(1, 700)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    logits_soft_cap=st.sampled_from([None, 20.0]),
)
def test_a_request_gives_the_same_bits_alone_and_in_any_batch(
    seed: int,
    policies: tuple[str, str],
    page_size: int,
    window: int | None,
    dtype: torch.dtype,
    logits_soft_cap: float | None,
) -> None:
    configs = [make_config(policy, page_size, dtype=dtype, logits_soft_cap=logits_soft_cap) for policy in policies]
    together, single = (BatchAttention(config, "cpu") for config in configs)
    step = random_step(seed, configs[0], make_batch(seed, page_size), window)
    out, lse = step.run(together)
    starts = step.batch.query_start_loc.tolist()
    for row in range(len(starts) - 1):
        begin, end = starts[row : row + 2]
        if begin < end:
            assert_same_bits((out[begin:end], lse[begin:end]), alone(step, row, single), f"row {row}")
            for token in {begin, end - 1}:  # the same in a decode step of the sequence that ends with it
                here = (out[token : token + 1], lse[token : token + 1])
                assert_same_bits(here, alone(step, row, single, last_token=token), f"row {row}, query token {token}")


def test_the_batches_above_share_and_cut() -> None:
    """So the property is about something."""
    shared = cut = 0
    for seed in range(30):
        page_size = PAGE_SIZES[seed % len(PAGE_SIZES)]
        step = random_step(seed, make_config("cascade", page_size, dtype=torch.float32), make_batch(seed, page_size))
        plan = step.plan(BatchAttention(step.config, "cpu"))
        plan.check()
        shared += plan.stats.kv_tokens_read < plan.stats.kv_tokens_per_query
        cut += plan.step.planned.work.num_slots > 0
    assert shared >= 10
    assert cut >= 10


def test_spans_that_begin_inside_a_block_of_keys_give_the_answer_of_the_oracle() -> None:
    """Pages of 100 tokens make spans of 300, and blocks of keys on a CPU begin at multiples of 64."""
    batch = tree_batch(parse_tree("1,2_600,150"), 100)
    step = random_step(0, make_config("cascade", 100, dtype=torch.float32), batch)
    step.assert_accurate(*step.run(BatchAttention(step.config, "cpu")))


def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    step = random_step(0, make_config("cascade", 16, dtype=torch.float32), make_batch(39, 16))
    expected = step.run(BatchAttention(step.config, "cpu"))
    assert int(step.batch.seq_lens.max()) > 1024, "more than four chunks"
    for threads in (1, 3):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        assert_same_bits(step.run(BatchAttention(step.config, "cpu")), expected, f"{threads} threads")


def test_without_batch_invariance_bits_do_depend_on_the_batch() -> None:
    """So the property can fail."""
    differing = 0
    for seed in range(10):
        config = AttentionConfig(6, 2, 24, 16, torch.float32, policy="cascade")
        together, single = BatchAttention(config, "cpu"), BatchAttention(config, "cpu")
        step = random_step(seed, config, make_batch(seed, 16))
        out, _ = step.run(together)
        starts = step.batch.query_start_loc.tolist()
        for row in range(len(starts) - 1):
            begin, end = starts[row : row + 2]
            differing += begin < end and not torch.equal(out[begin:end], alone(step, row, single)[0])
    assert differing > 0
