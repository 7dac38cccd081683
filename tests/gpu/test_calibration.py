"""The choice of row tiles, replayed on a CPU over batches of which a card measured every tiling.

A wrong constant chooses slower tilings. Each constant of a card is spoilt in turn, and the replay must notice. It
cannot see three kinds of change, because no batch chooses another tiling for them:

- a smaller `arithmetic_percent`, a later `filled_ns` and a faster L2 cache: memory or the longest item decides instead;
- `unhidden_part` within the bounds: it decides between tilings of equal bytes, which differ by a few percent, so the
  test asks only that the regret rises;
- the chains of the lowest tile: it has so many items that memory hides them.
"""

import json
import sys
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from trunkattn.gpu.tuning.cards import H100, H200, Card
from trunkattn.gpu.tuning.decode import GpuTile, hopper_tiles
from trunkattn.planner.row_tiles.cost import CardTimes, tilings_ns

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import calibrate  # noqa: E402

TILES = hopper_tiles(2, 128, 16)
CARDS = {"h100": H100, "h200": H200}
MEAN, WORST = 0.008, 0.10  # most regret that a choice may have


@dataclass(frozen=True)
class Regret:
    """Time lost against the fastest tiling that was measured, as a share of its time."""

    mean: float
    worst: float

    @property
    def is_small(self) -> bool:
        return self.mean < MEAN and self.worst < WORST


@cache
def measured(name: str) -> tuple[calibrate.MeasuredCard, list[calibrate.Measured]]:
    """What a card measured, and what the prediction needs of each batch."""
    result = json.loads((BENCHMARKS / "results" / f"calibration-{name}.json").read_text())
    card = calibrate.MeasuredCard.of_result(result["card"])
    return card, [calibrate.prepare(row, card) for row in result["rows"]]


def replay(name: str, times: CardTimes, tiles: tuple[GpuTile, ...] = TILES) -> Regret:
    """The regret of the choices that these times make."""
    card, rows = measured(name)
    rules = {heads: calibrate.rule_of(card, heads, tiles, times).priced for heads in {row.heads for row in rows}}
    losses = []
    for row in rows:
        rule = rules[row.heads]
        predicted = tilings_ns(row.loads, rule.stages, rule.uses, rule.costs)
        losses.append(row.ns[np.argmin(predicted)] / row.ns.min() - 1)
    return Regret(float(np.mean(losses)), float(max(losses)))


@pytest.mark.parametrize(("name", "card"), CARDS.items())
def test_the_choice_loses_little(name: str, card: Card) -> None:
    regret = replay(name, card.times)
    assert regret.mean < MEAN and regret.worst < WORST, regret


@pytest.mark.parametrize(
    ("name", "field", "spoilt"),
    [
        ("h100", "bytes_per_us", 1_562_500),
        ("h100", "bytes_per_us", 9_375_000),
        ("h200", "bytes_per_us", 3_125_000),
        ("h200", "bytes_per_us", 9_330_000),
        ("h100", "launch_ns", 2_000),
        ("h100", "launch_ns", 21_200),
        ("h200", "launch_ns", 3_500),
        ("h100", "l2_bytes_per_us", 3_000_000),
        ("h200", "l2_bytes_per_us", 4_000_000),
        ("h100", "filled_ns", 2_000),
        ("h200", "filled_ns", 10_000),
        ("h100", "arithmetic_percent", 150),
        ("h200", "arithmetic_percent", 112),
        ("h100", "idle_percent", 0),
        ("h100", "idle_percent", 80),
        ("h200", "idle_percent", 80),
    ],
)
def test_a_spoilt_constant_of_a_card_is_found(name: str, field: str, spoilt: int) -> None:
    assert not replay(name, CARDS[name].times._replace(**{field: spoilt})).is_small


def test_a_spoilt_share_of_what_is_not_hidden_raises_the_regret() -> None:
    assert replay("h200", H200.times._replace(unhidden_part=3)).mean > replay("h200", H200.times).mean + 0.001


@pytest.mark.parametrize(
    ("name", "tile", "field", "spoilt"),
    [
        ("h100", 0, "read_percent", 100),
        ("h200", 0, "block_ns", (2130, 1735)),
        ("h100", 1, "read_percent", 90),
        ("h100", 1, "block_ns", (2680, 1850)),
        ("h100", 1, "block_ns", (1340, 2775)),
        ("h200", 1, "block_ns", (1340, 925)),
        ("h100", 1, "chain_ns", (1088, 720)),
        ("h200", 1, "chain_ns", (870, 1080)),
        ("h100", 2, "read_percent", 96),
        ("h200", 2, "block_ns", (1168, 1820)),
        ("h200", 2, "block_ns", (1460, 1456)),
        ("h100", 2, "chain_ns", (1250, 800)),
        ("h200", 2, "chain_ns", (1000, 1000)),
    ],
)
def test_a_spoilt_time_of_a_tile_is_found(name: str, tile: int, field: str, spoilt: object) -> None:
    tiles = list(TILES)
    tiles[tile] = replace(tiles[tile], **{field: spoilt})  # type: ignore[arg-type]
    assert not replay(name, CARDS[name].times, tuple(tiles)).is_small


def test_every_constant_is_spoilt() -> None:
    """A constant that is new must have a test here."""
    marks = [*test_a_spoilt_constant_of_a_card_is_found.pytestmark]  # type: ignore[attr-defined]
    spoilt = {field for mark in marks for _, field, _ in mark.args[1]}
    assert spoilt | {"unhidden_part"} == set(CardTimes._fields)
