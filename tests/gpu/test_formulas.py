"""One source for the formulas of both planners: under Triton's interpreter they give the integers that Numba's do."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from trunkattn.gpu.cards import H100, H200, Card
from trunkattn.gpu.device_planner.formulas import (
    item_ns,
    lead_of,
    listed_segments,
    load_ns,
    memory_tokens,
    pitch_of,
    portion_ns,
    splits_of,
    step_of,
    target_of,
    tile_blocks,
)
from trunkattn.planner.tiles import cost, layout
from trunkattn.planner.tiles.candidates import price
from trunkattn.planner.tiles.cost import StageLoad, TileTimes
from trunkattn.planner.tiles.layout import Stage

from ..planner.tile_cases import make_rule

CASES = 64


@triton.jit
def _load_kernel(loads, tiles, costs, out):
    case = tl.program_id(0)
    at, tile = loads + 7 * case, tiles + 8 * case
    items = tl.load(at).to(tl.int32)
    load = StageLoad(
        items, tl.load(at + 1), tl.load(at + 2), tl.load(at + 3), tl.load(at + 4), tl.load(at + 5), tl.load(at + 6)
    )
    times = TileTimes(
        tl.load(tile),
        tl.load(tile + 1),
        tl.load(tile + 2),
        tl.load(tile + 3),
        tl.load(tile + 4),
        tl.load(tile + 5),
        tl.load(tile + 6),
        tl.load(tile + 7),
    )
    for is_flat in tl.static_range(2):
        for is_last in tl.static_range(2):
            never = items < 0
            ns = load_ns(load, times, costs, never != (is_flat == 1), never != (is_last == 1))
            tl.store(out + 4 * case + 2 * is_flat + is_last, ns)


@triton.jit
def _scalar_kernel(numbers, out):
    case = tl.program_id(0)
    at, to = numbers + 5 * case, out + 7 * case
    a, b, c = tl.load(at).to(tl.int64), tl.load(at + 1), tl.load(at + 2)
    stage = Stage(64, 1, 1, c, b, tl.load(at + 3), tl.load(at + 4), 0)
    tl.store(to, target_of(a, tl.load(at + 4), b, c, 0))
    tl.store(to + 5, target_of(a, tl.load(at + 4), b, c, tl.load(at + 3)))
    tl.store(to + 6, portion_ns(a * a, b, c, tl.load(at + 3)))
    tl.store(to + 1, listed_segments(a, b, stage))
    full, masked = tile_blocks(a, a + b, stage)
    tl.store(to + 2, full)
    tl.store(to + 3, masked)
    tl.store(to + 4, memory_tokens(a, a // 2, a * b, c))


@triton.jit
def _vector_kernel(sizes, targets, out, N: tl.constexpr):
    lane = tl.arange(0, N)
    size, target = tl.load(sizes + lane), tl.load(targets + lane)
    step = step_of(size, target, 4, 0)
    tl.store(out + lane, step)
    tl.store(out + N + lane, item_ns(size.to(tl.int64), 3 * size.to(tl.int64), tl.cdiv(size, step), 4, 1340, 1850))
    for row in tl.static_range(2):  # equal items, and portions
        step = step_of(size, target, 4, 8 * row)
        lead = lead_of(step, 4 * lane, 8 * row)
        at = out + (2 + 3 * row) * N + lane
        tl.store(at, lead)
        tl.store(at + N, splits_of(size, lead, step))
        tl.store(at + 2 * N, pitch_of(size, 4, 8 * row))


@pytest.mark.parametrize("card", [H100, H200], ids=["h100", "h200"])
def test_the_time_of_a_launch_is_equal_in_both_compilers(card: Card) -> None:
    rng = np.random.default_rng(0)
    loads = rng.integers(0, 1 << rng.integers(1, 34, (CASES, 7)))
    loads[:, 0] = rng.integers(1, 2000, CASES)  # items
    loads[:4, 1:] = 0
    tiles = rng.integers(1, 3000, (CASES, 8))
    tiles[:, 4] = rng.choice([1, 16, 66, 264, 528], CASES)  # slots
    tiles[:, 5] = rng.integers(1, 5, CASES)  # CTAs of an SM
    tiles[:, 6] = rng.integers(1, 101, CASES)  # percent
    costs = price(replace(make_rule(4, 16, 132, num_kv_heads=8), card_times=card.times)).costs
    found = torch.zeros(CASES, 4, dtype=torch.int64)
    on_device = costs._replace(tiles=torch.from_numpy(costs.tiles))  # type: ignore[arg-type]
    _load_kernel[(CASES,)](torch.from_numpy(loads), torch.from_numpy(tiles), on_device, found)
    expected = [
        [
            cost.load_ns(StageLoad(*loads[case]), TileTimes(*tiles[case]), costs, is_flat, is_last)
            for is_flat in (False, True)
            for is_last in (False, True)
        ]
        for case in range(CASES)
    ]
    assert found.tolist() == expected
    assert len(np.unique(expected)) > CASES, "the numbers matter"


def test_formulas_of_scalars_are_equal_in_both_compilers() -> None:
    rng = np.random.default_rng(1)
    numbers = rng.integers(1, 200, (CASES, 5))
    numbers[:, 1] = rng.choice([0, 1, 7, 66], CASES)
    numbers[:, 3] = rng.choice([1, 4], CASES)
    found = torch.zeros(CASES, 7, dtype=torch.int64)
    _scalar_kernel[(CASES,)](torch.from_numpy(numbers), found)
    for (a, b, c, subtiles, private), row in zip(numbers, found.tolist(), strict=True):
        stage = Stage(np.int64(64), np.int64(1), np.int64(1), c, b, subtiles, private)
        blocks = cost.tile_blocks(a, a + b, stage)
        assert row == [
            layout.target_of(a, private, b, c, 0),
            cost.listed_segments(a, b, stage),
            *blocks,
            cost.memory_tokens(a, a // 2, a * b, c),
            layout.target_of(a, private, b, c, subtiles),
            cost.portion_ns(a * a, b, c, subtiles),
        ]


def test_formulas_of_vectors_are_equal_in_both_compilers() -> None:
    rng = np.random.default_rng(2)
    sizes, targets = rng.integers(0, 300, CASES), rng.integers(1, 60, CASES)
    found = torch.zeros(8, CASES, dtype=torch.int64)
    _vector_kernel[(1,)](torch.from_numpy(sizes), torch.from_numpy(targets), found, N=CASES)
    for lane, (size, target, step, ns, *cuts) in enumerate(zip(sizes, targets, *found.tolist(), strict=True)):
        assert step == layout.step_of(size, target, 4, 0)
        for own, cut in ((0, cuts[:3]), (8, cuts[3:])):
            step_there = layout.step_of(size, target, 4, own)
            lead = layout.lead_of(step_there, 4 * lane, own)
            assert cut == [lead, layout.splits_of(size, lead, step_there), layout.pitch_of(size, 4, own)]
        if size:
            assert ns == cost.item_ns(size, 3 * size, (size + step - 1) // step, 4, 1340, 1850)
