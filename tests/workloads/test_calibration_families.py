"""What calibrate_shapes.py makes of its measurements: families of shapes, and the fit of their tiles' times."""

import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.kernels import calibrate, calibration_families
from benchmarks.workloads.shape_table import BATCHES, shapes_named
from trunkattn.gpu.cards import H200, Card, GpuFacts
from trunkattn.gpu.hopper.spec import tiles_of as hopper_tiles
from trunkattn.gpu.tiles import GpuTile

LLAMA, MISTRAL = "llama3-8b 32/8x128", "mistral-large 96/8x128"
CARD = {"name": "NVIDIA H200", "num_sms": 132, "capability": 90, "l2_bytes": 60 << 20}
STEPS = 300


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look at it takes a second."""
    ticks = itertools.count()
    monkeypatch.setattr(calibrate, "time", SimpleNamespace(perf_counter=lambda: float(next(ticks))))


def figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"card": CARD, "bytes_per_us": 4_540_000, "rows": rows}


def names_of(shape_name: str) -> list[str]:
    """Of its tilings."""
    (family,) = calibration_families.families_of(figures([{"shape": shape_name, "batch": BATCHES[0], "us": {}}]))
    (shape,) = shapes_named(shape_name)
    rule = family.rule_of(shape, family.tiles)
    return [tiling.name(rule) for tiling in rule.priced.tilings]


def taken(shape_names: tuple[str, ...], slower: int) -> tuple[calibration_families.Family, tuple[GpuTile, ...]]:
    """A family of which a card took exactly as long as the prediction says, were blocks of its tall tile so many times
    as slow as in the table; and those tiles."""
    batches = list(itertools.product(shape_names, BATCHES))
    unknown = [{"shape": shape, "batch": batch, "us": dict.fromkeys(names_of(shape), 1.0)} for shape, batch in batches]
    (family,) = calibration_families.families_of(figures(unknown))
    *others, tall = family.tiles
    tiles = (*others, replace(tall, block_ns=tuple(slower * ns for ns in tall.block_ns)))
    rows = [
        row | {"us": dict(zip(row["us"], (times / 1e3).tolist(), strict=True))}
        for row, times in zip(unknown, family.predict(tiles), strict=True)
    ]
    (measured,) = calibration_families.families_of(json.loads(json.dumps(figures(rows))))
    return measured, tiles


def test_random_steps_go_down(clock: None) -> None:
    """To times that are known. For the last one error and loss of the choice want different times; the loss counts
    twice, and so outweighs an error that is half as large again."""
    known, other, seen = np.array([500.0, 2000.0, 100.0]), 1000.0, []

    def losses_of(times: np.ndarray) -> tuple[float, float]:
        first, second, third = np.abs(np.log(times / known))
        error, loss = first + second + 1.5 * abs(math.log(times[2] / other)), third
        seen.append(error + 2 * loss)
        return float(error), float(loss)

    start = np.array([1000.0, 1000.0, 300.0])
    best = calibrate.random_steps(start, losses_of, STEPS)
    losses_of(best)
    assert seen[-1] == min(seen) and len(seen) == STEPS + 1
    assert (np.abs(np.log(best / known)) < 0.3).all() and start.tolist() == [1000, 1000, 300]


def test_nothing_better_leaves_the_start(clock: None) -> None:
    start = np.array([7.0, 9.0])
    assert calibrate.random_steps(start, lambda times: (float(np.abs(times - start).sum()), 0.0), STEPS) is start


def test_the_times_that_a_card_took_lose_nothing() -> None:
    family, tiles = taken((LLAMA,), 2)
    error, loss = family.losses(tiles)
    assert error < 1e-3 and loss == 0 and (family.regrets(tiles) == 0).all()
    assert family.losses(family.tiles)[0] > 0.02 and family.regrets(family.tiles).max() > 0.1


def test_a_fit_finds_better_times(clock: None) -> None:
    family, _ = taken((LLAMA, MISTRAL), 2)
    today, best = family.losses(family.tiles), family.fit(STEPS)
    found = family.losses(best)
    assert found[0] + 2 * found[1] < 0.7 * (today[0] + 2 * today[1])
    assert family.regrets(best).mean() < family.regrets(family.tiles).mean()
    timed = ("block_ns", "chain_ns")
    for tile, fitted in zip(family.tiles, best, strict=True):
        assert replace(fitted, **{name: getattr(tile, name) for name in timed}) == tile, "nothing but times is fitted"
        assert all(isinstance(ns, int) and ns % 10 == 0 for name in timed for ns in getattr(fitted, name))


def test_the_text_tells_what_still_loses(clock: None) -> None:
    family, tiles = taken((LLAMA,), 2)
    lines = calibration_families.fitted_text(replace(family, tiles=tiles), STEPS).split("\n")
    assert lines[0] == LLAMA and [line.split(":")[0] for line in lines[1:3]] == ["  today", "  fitted"]
    assert "loss of the choice 0.0000, regret 0.0000 on average and 0.000 at worst" in lines[1]
    assert len(lines) == 3 + len(tiles), "no batch loses"
    spoilt = calibration_families.fitted_text(family, 1).split("\n")
    assert any(f"{LLAMA}, {batch}: " in line and "times as long as" in line for batch in BATCHES for line in spoilt)


def test_tilings_that_were_not_measured_are_left_out() -> None:
    """A wrong one is not in a result."""
    family, tiles = taken((LLAMA,), 2)
    fastest = min(family.rows[0]["us"], key=family.rows[0]["us"].get)
    fewer = {name: us for name, us in family.rows[0]["us"].items() if name != fastest}
    (measured,) = calibration_families.families_of(figures([{**family.rows[0], "us": fewer}]))
    (times,), (batch,) = measured.predict(tiles), measured.batches
    assert len(times) == len(batch.ns) == len(fewer) and batch.ns.min() == 1e3 * min(fewer.values())
    assert measured.regrets(tiles).tolist() == [0.0]


def test_shapes_of_the_same_tiles_are_a_family() -> None:
    """Whatever their groups; 8-bit caches and small pages have tiles of their own."""
    names = (LLAMA, MISTRAL, "gemma3-12b 16/8x256", "llama3-8b fp8 32/8x128", "llama3-8b page 1 32/8x128", LLAMA)
    rows = [{"shape": name, "batch": BATCHES[0], "us": {}} for name in names]
    found = calibration_families.families_of(figures(rows))
    assert [family.name for family in found] == [f"{LLAMA}, {MISTRAL}", *names[2:5]]
    assert [len(family.rows) for family in found] == [3, 1, 1, 1]
    caches = ((2, 128, 16), (2, 256, 16), (1, 128, 16), (2, 128, 1))
    assert [family.tiles for family in found] == [hopper_tiles(*cache) for cache in caches]
    assert {family.card for family in found} == {Card(GpuFacts(**CARD), H200)}


def test_a_rule_is_that_of_the_backend_on_the_card_that_measured() -> None:
    family, tiles = taken((MISTRAL,), 2)
    (shape,) = shapes_named(MISTRAL)
    rule = family.rule_of(shape, tiles)
    assert rule.card_times == H200.times._replace(bytes_per_us=4_540_000)
    assert [tile.rows for tile in rule.tiles] == [16, 32, 64] and rule.tiles[-1].block_ns == tiles[-1].block_ns
    assert rule.group_size == 12
