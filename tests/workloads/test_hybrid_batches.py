"""benchmarks/kernels/hybrid.py on a CPU: its batches, what is compared and with what, and what the times come to."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.kernels import hybrid
from benchmarks.peers.gpu_hybrid import HybridRun, halves, one_after_other
from benchmarks.peers.gpu_kernels import Case
from benchmarks.workloads.hybrid_batches import (
    MODELS,
    SPLITS,
    TABLE,
    HybridBatch,
    chunk_batches,
    limits,
    summary,
    sweep_batches,
)
from trunkattn.reference import paged_attention

from .scripts import refusal

SMALL = HybridBatch((4, 2), 37, 100, 5, 51)


def test_the_sweep_is_always_the_same_and_a_short_one_is_its_beginning() -> None:
    batches = sweep_batches(330)
    assert batches == sweep_batches(330)
    assert batches[:30] == sweep_batches(30)
    assert len(set(batches)) == 330


def test_the_sweep_keeps_to_its_limits_in_equal_parts_for_the_models() -> None:
    batches = sweep_batches(330)
    for heads in MODELS.values():
        of_model = [batch for batch in batches if batch.heads == heads]
        assert len(of_model) == 110
        assert {batch.chunk for batch in of_model} == {512, 1024, 1536, 2048}
    for batch in batches:
        assert min(batch.context, batch.decode_context) >= 4096
        assert max(batch.context, batch.decode_context) <= 20480
        assert batch.elements < 2**31, "more than the offsets of some peers reach"
        assert 0.25 <= batch.expected_us[0] / sum(batch.expected_us) <= 0.75


@pytest.mark.parametrize("batch", [SMALL, TABLE[0], SPLITS[0]], ids=str)
def test_every_page_is_used_once_and_the_chunk_is_row_0(batch: HybridBatch) -> None:
    paged = batch.paged()
    used = -(-paged.seq_lens // paged.page_size)
    pages = paged.block_table[np.arange(paged.block_table.shape[1]) < used[:, None]]
    assert sorted(pages) == list(range(paged.num_pages)) and paged.num_pages == batch.pages
    assert paged.seq_lens.tolist() == [batch.context] + batch.decodes * [batch.decode_context]
    assert paged.query_lens.tolist() == [batch.chunk] + batch.decodes * [1]


def test_expected_times_are_of_the_visible_pairs_and_of_the_decodes_keys_and_values() -> None:
    prefill_us, decode_us = HybridBatch((32, 8), 1024, 8192, 64, 8192).expected_us
    assert prefill_us == pytest.approx(248, rel=0.01)  # 1.29e11 FLOP
    assert decode_us == pytest.approx(511, rel=0.01)  # 2.15 GB


def test_the_chunks_of_a_prompt_come_beside_two_waves_of_decodes_and_one_decode_more() -> None:
    batches = chunk_batches(132)
    assert [batch.context for batch in batches] == 2 * list(range(512, 16385, 512))
    assert [batch.decodes for batch in batches] == 32 * [66] + 32 * [67]


def small_case() -> Case:
    torch.manual_seed(0)
    return hybrid.make_case(SMALL, [torch.randn(2 * SMALL.elements) for _ in range(2)])


def exactly(case: Case) -> HybridRun:
    batch = case.batch
    arrays = (torch.from_numpy(each) for each in (batch.block_table, batch.seq_lens, batch.query_start_loc))
    out, _ = paged_attention(case.q, *case.kv[0], *arrays)
    return lambda copy: (out.float(),)


def test_copies_of_the_cache_are_parts_of_the_pool_that_do_not_overlap() -> None:
    case = small_case()
    (k, v), (other, _) = case.kv
    assert k.shape == v.shape == (SMALL.pages, 16, 2, 128)
    assert not torch.equal(k, other) and other.data_ptr() - k.data_ptr() == 4 * SMALL.elements
    with pytest.raises(ValueError, match="elements of keys: expected at most 5"):
        hybrid.make_case(SMALL, [torch.zeros(5), torch.zeros(5)])


def test_the_halves_of_a_batch_give_the_outputs_of_the_whole() -> None:
    case = small_case()
    chunk, decodes = halves(case)
    assert (chunk.batch.query_lens.tolist(), decodes.batch.query_lens.tolist()) == ([37], 5 * [1])
    parts = one_after_other(exactly(chunk), exactly(decodes))(0)
    assert torch.equal(torch.cat(parts), exactly(case)(0)[0])


def test_the_oracle_is_the_reference() -> None:
    case = small_case()
    tokens, expected = hybrid.oracle(case)
    assert tokens == [0, 18, 36, 37, 39, 41]
    torch.testing.assert_close(exactly(case)(0)[0].double()[tokens], expected, rtol=0, atol=1e-6)


def scaled(case: Case, factor: float) -> HybridRun:
    return lambda copy: tuple(factor * part for part in exactly(case)(copy))


def fails(case: Case) -> HybridRun:
    raise ValueError("not here")


MAKERS: dict[str, Callable[[Case], HybridRun]] = {
    "absent": fails,
    "fa3_serial": exactly,
    "fa3_prefill": lambda case: exactly(halves(case)[0]),
    "fa3_decode": lambda case: exactly(halves(case)[1]),
    "trunkattn": lambda case: scaled(case, 1.001),
    "trunkattn_serial": lambda case: scaled(case, 1.2),
    "trunkattn_decode": lambda case: scaled(halves(case)[1], math.nan),
}


@pytest.mark.parametrize("exact", [False, True])
def test_what_fails_or_is_wrong_is_not_timed_but_reported(exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(runs: dict[str, HybridRun], copies: int, budget_us: float) -> dict[str, float | str]:
        return {name: 10.0 * (number + 1) for number, name in enumerate(runs)}

    monkeypatch.setattr(hybrid, "time_together", timed)
    row = hybrid.measure(SMALL, small_case(), MAKERS, 1.0, exact)
    assert row["us"] == {"fa3_serial": 10, "fa3_prefill": 20, "fa3_decode": 30, "trunkattn": 40}
    assert list(row["missing"]) == ["absent", "trunkattn_serial", "trunkattn_decode"]
    assert row["missing"]["absent"] == "ValueError: not here"
    assert "wrong by 0.1" in row["missing"]["trunkattn_serial"] and "wrong by inf" in row["missing"]["trunkattn_decode"]
    assert row["reference"] == "fa3_serial" and 0 < row["difference"] < 0.002
    assert row["oracle_us"] == {"fa3": 30}


def test_a_reference_that_is_wrong_is_found_by_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hybrid, "time_together", lambda runs, *_: dict.fromkeys(runs, 1.0))
    makers: dict[str, Callable[[Case], HybridRun]] = {"fa3_serial": lambda case: scaled(case, 1.2)}
    assert "fa3_serial" in hybrid.measure(SMALL, small_case(), makers, 1.0, exact=True)["missing"]
    assert "fa3_serial" in hybrid.measure(SMALL, small_case(), makers, 1.0, exact=False)["us"]


def row_of(heads: str, **us: float) -> dict[str, Any]:
    return {"heads": heads, "us": us} | limits(us)


def test_a_batch_counts_if_both_halves_are_a_fifth_of_the_serial_time() -> None:
    assert limits({"fa3_serial": 100, "fa3_prefill": 19, "fa3_decode": 80})["counted"] is False
    found = limits({"fa3_serial": 100, "fa3_prefill": 80, "fa3_decode": 20, "trunkattn_prefill": 70})
    assert found == {"oracle_us": {"fa3": 80}, "shares": [0.8, 0.2], "counted": True}
    assert limits({"fa3_prefill": 80, "fa3_decode": 20})["counted"] is False


def test_the_summary_is_of_the_batches_that_count() -> None:
    halves_us = {"fa3_prefill": 50.0, "fa3_decode": 60.0, "trunkattn_prefill": 80.0, "trunkattn_decode": 30.0}
    rows = [
        row_of("32/8", fa3_serial=110, trunkattn=88, trunkattn_serial=110, flashinfer_pod=66, **halves_us),
        row_of("32/8", fa3_serial=110, trunkattn=55, trunkattn_serial=50, flashinfer_pod=110, **halves_us),
        row_of("32/4", fa3_serial=110, trunkattn=100, trunkattn_serial=100, **halves_us),
        row_of("32/4", fa3_serial=1000, trunkattn=1, trunkattn_serial=100, **halves_us),
    ]
    found = summary(rows)
    assert (found["batches"], found["counted"], found["32/8"]["batches"], found["32/4"]["batches"]) == (4, 3, 2, 1)
    assert found["all"]["trunkattn"] == {
        "cells": 3, "mean": 1.45, "median": 1.25, "best": 2.0, "worst": 1.1,
        "near_oracle_of_fa3": 0.333, "near_oracle_of_trunkattn": 0.667,
        "best_over_own_serial": 0.8, "worst_over_own_serial": 1.1,
    }  # fmt: skip
    assert found["all"]["over_flashinfer_pod"] == {"cells": 2, "mean": 1.375, "cells_pod_wins": 1}
    assert "flashinfer_pod" not in found["32/4"] and "trunkattn_overlapped" not in found["all"]


def test_a_summary_of_nothing_is_empty() -> None:
    assert summary([]) == {"batches": 0, "counted": 0, "all": {"batches": 0}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--batches", "0"], "argument --batches: expected an integer from 1 to 1000000, got '0'"),
        (["--part", "figures"], "argument --part: invalid choice: 'figures'"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], expected: str) -> None:
    assert expected in refusal("benchmarks.kernels.hybrid", arguments)
