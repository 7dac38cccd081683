"""Whether decodes overlap prompt chunks: of a plan made on the device, and in which of the tilings that fit."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from trunkattn import AttentionConfig, Capacity
from trunkattn.gpu.cards import Card
from trunkattn.gpu.kernel import kernels_of
from trunkattn.gpu.overlap import Overlap
from trunkattn.gpu.step_choice import choose_step
from trunkattn.gpu.step_planners import make_step_planner
from trunkattn.planner.planner import StepTables
from trunkattn.planner.tiles.candidates import Tiling
from trunkattn.planner.work_list import UNLIMITED

from .kernel_cases import CPU, make_card

CHUNK_US = 239  # of 1024 tokens behind 7168, as an H100 took for 32 heads of 128


def overlap_of(execution: str = "auto") -> Overlap:
    config, card = AttentionConfig(32, 8, 128, 16, torch.bfloat16, execution=execution), make_card()
    found = make_step_planner(config, kernels_of(config, card), card, CPU, None).overlap
    assert found is not None
    return found


def tables(tokens: int, context: int) -> StepTables:
    table, starts = np.zeros((1, 1024), np.int32), np.array([0, tokens], np.int32)
    return StepTables(table, np.array([context], np.int32), starts, UNLIMITED)


def test_chunks_overlap_decodes_of_a_quarter_of_their_time() -> None:
    """8 heads of 512 bytes a token. Shorter decodes gain nothing, and nor do any behind short chunks."""
    overlap, chunks = overlap_of(), tables(1024, 8192)
    chunks_ns = overlap.chunk_times(overlap.work_of(chunks)).without_decodes_ns
    assert chunks_ns == pytest.approx(CHUNK_US * 1000, rel=0.1)
    quarter = chunks_ns // 4 * overlap.rule.bytes_per_us // (4096 * 1000)
    assert overlap.is_worth_for(chunks, quarter * 101 // 100) and not overlap.is_worth_for(chunks, quarter * 99 // 100)
    assert overlap.is_worth_for(chunks, None), "nobody knows how long the decodes take"
    short = tables(64, 1024)
    assert overlap.chunk_times(overlap.work_of(short)).without_decodes_ns < 20_000
    for decodes in (10**9, None):
        assert not overlap.is_worth_for(short, decodes)


def test_whoever_asks_for_it_overlaps_always() -> None:
    for decodes in (0, 10**9, None):
        assert overlap_of("overlapped").is_worth_for(tables(1, 1), decodes)


LOW, FINE, TALL = Tiling(0, waves=1), Tiling(0, waves=4), Tiling(1)


def chosen(fits: tuple[bool, ...], num_queries: int = 4) -> tuple[Any, list[int]]:
    """The choice between a low tiling that is cut, a low one, and a tall one; and what may overlap."""
    asked: list[int] = []
    rule = SimpleNamespace(priced=SimpleNamespace(tilings=(FINE, LOW, TALL)), group_size=16)
    step: Any = SimpleNamespace(
        rule=rule,
        num_queries=num_queries,
        predict=lambda: np.array([10, 30, 20]),
        fits=lambda: np.array(fits),
        overlap=lambda numbers, chunks, costs, leftover: (
            asked.extend(numbers) or (numbers[0], SimpleNamespace(total_ns=5, items=3))
        ),
    )
    overlap: Any = SimpleNamespace(
        work_of=lambda chunks: None,
        chunk_times=lambda work: SimpleNamespace(without_decodes_ns=100),
        costs=None,
        leftover=None,
        is_worth=lambda overlapped_ns, serial_ns: overlapped_ns < serial_ns,
        fills=lambda work, ns: False,
    )
    return choose_step(step, "a card", overlap, tables(1, 1)), asked


def test_only_what_fits_the_capacity_overlaps() -> None:
    choice, asked = chosen((True, True, True))
    assert asked == [0] and (choice.tiling, choice.num_overlapped, choice.serial_ns) == (FINE, 3, 110)
    choice, asked = chosen((False, True, True))
    assert asked == [1] and (choice.tiling, choice.num_fit) == (LOW, 2)
    assert (choice.num_overlapped, choice.serial_ns, choice.overlapped_ns) == (3, 120, 5)


def test_without_decodes_nothing_is_asked() -> None:
    choice, asked = chosen((True, True, True), num_queries=0)
    assert not asked and (choice.tiling, choice.num_overlapped, choice.serial_ns) == (FINE, 0, None)


A100 = make_card(capability=80)
CAPACITY = Capacity(8, 8, 64, 600)


@pytest.mark.parametrize(
    ("options", "card", "capacity", "fuses"),
    [
        ({}, A100, None, True),
        ({}, A100, CAPACITY, True),
        ({}, make_card(), None, False),  # tiles of the Hopper kernel merge nothing
        ({"kv_dtype": torch.float8_e4m3fn}, make_card(), None, True),  # its low tile is a portable one
        ({"batch_invariant": True}, A100, None, False),
        ({"execution": "streams"}, A100, None, True),
        ({"execution": "streams"}, A100, CAPACITY, False),
        ({"policy": "pat"}, A100, None, True),
        ({"policy": "pat"}, A100, CAPACITY, False),
    ],
)
def test_items_merge_partials_where_what_they_merge_has_ended(
    options: dict[str, Any], card: Card, capacity: Capacity | None, fuses: bool
) -> None:
    config = AttentionConfig(32, 8, 128, 16, torch.bfloat16, **options)
    rule = make_step_planner(config, kernels_of(config, card), card, CPU, capacity).rule
    assert (rule.fuse_up_to > 0) is fuses
