"""The choice of row tiles, replayed on a CPU over batches of which a card measured every tiling.

A wrong constant chooses slower tilings. Each constant of a card is spoilt in turn, and the replay must notice. It
cannot see two kinds of change, because no batch chooses another tiling for them:

- a smaller `arithmetic_percent`, a later `filled_ns` and a faster L2 cache: memory or the longest item decides instead;
- the times of the lowest tile in PAT's trees: it has so many items that memory hides them.
"""

import json
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks.kernels import calibrate, calibration_families
from benchmarks.lib.report import RESULTS
from trunkattn.gpu.cards import H100, H200, CardModel
from trunkattn.gpu.hopper.spec import tiles_of as hopper_tiles
from trunkattn.gpu.tiles import GpuTile
from trunkattn.planner.device import CardTimes

TILES = hopper_tiles(2, 128, 16)
CARDS = {"h100": H100, "h200": H200}
MEAN, WORST = 0.008, 0.10  # most regret that a choice may have


class FamilyBound(NamedTuple):
    """A shape of a family, the most regret that its choices may have, and the card that measured it."""

    shape: str
    mean: float
    worst: float
    card: str = "h200"


FAMILIES = {
    "16 bits, heads of 128": FamilyBound("llama3-8b 32/8x128", 0.009, 0.09),
    "16 bits, heads of 64": FamilyBound("llama3.2-1b 32/8x64", 0.009, 0.10),
    "16 bits, heads of 256": FamilyBound("gemma3-12b 16/8x256", 0.008, 0.07),
    "8 bits, heads of 128": FamilyBound("llama3-8b fp8 32/8x128", 0.008, 0.12),
    "8 bits, heads of 256": FamilyBound("gemma3-12b fp8 16/8x256", 0.004, 0.03),
    "small pages, heads of 128": FamilyBound("llama3-8b page 1 32/8x128", 0.003, 0.03),
    "small pages, heads of 64": FamilyBound("gpt-oss page 1 64/8x64 sinks", 0.008, 0.09),
    "latent": FamilyBound("latent 16/1x576", 0.003, 0.05),
    "latent, H100": FamilyBound("latent 16/1x576", 0.002, 0.10, "h100"),
}


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
    result = json.loads((RESULTS / f"calibration-{name}.json").read_text())
    card = calibrate.MeasuredCard.of_result(result["card"])
    return card, [calibrate.prepare(row, card) for row in result["rows"]]


def replay(name: str, times: CardTimes, tiles: tuple[GpuTile, ...] = TILES) -> Regret:
    """The regret of the choices that these times make."""
    card, rows = measured(name)
    rules = {heads: calibrate.rule_of(card, heads, tiles, times).priced for heads in {row.heads for row in rows}}
    losses = []
    for row in rows:
        predicted = calibrate.predicted(row, rules[row.heads])
        losses.append(row.ns[np.argmin(predicted)] / row.ns.min() - 1)
    return Regret(float(np.mean(losses)), float(max(losses)))


@pytest.mark.parametrize(("name", "card"), CARDS.items())
def test_the_choice_loses_little(name: str, card: CardModel) -> None:
    regret = replay(name, card.times)
    assert regret.mean < MEAN and regret.worst < WORST, regret


@pytest.mark.parametrize(
    ("name", "field", "spoilt"),
    [
        ("h100", "bytes_per_us", 1_562_500),
        ("h100", "bytes_per_us", 9_375_000),
        ("h200", "bytes_per_us", 2_000_000),  # a spoilt bandwidth nearer to it: see the shapes of models below
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


def test_an_h100s_bandwidth_is_found_on_an_h200() -> None:
    bound = FAMILIES["16 bits, heads of 128"]
    family = family_of(bound)
    assert not loses_little(replace(family, bytes_per_us=3_125_000), family.tiles, bound)


def test_a_spoilt_share_of_what_is_not_hidden_is_found() -> None:
    bound = FAMILIES["small pages, heads of 64"]
    family = family_of(bound)
    model = family.card.model
    card = replace(family.card, model=replace(model, times=model.times._replace(unhidden_part=3)))
    assert not loses_little(replace(family, card=card), family.tiles, bound)


@pytest.mark.parametrize(
    ("name", "tile", "spoilt"),
    [
        ("h100", 0, 100),
        ("h100", 1, 80),
        ("h100", 2, 96),
    ],
)
def test_a_spoilt_share_of_the_bandwidth_is_found(name: str, tile: int, spoilt: int) -> None:
    tiles = [replace(each, read_percent=spoilt) if number == tile else each for number, each in enumerate(TILES)]
    assert not replay(name, CARDS[name].times, tuple(tiles)).is_small


def times_of(tile: GpuTile, field: str, factors: tuple[float, float]) -> GpuTile:
    """The tile with other times of blocks, full and masked."""
    ns = (round(ns * factor) for ns, factor in zip(getattr(tile, field), factors, strict=True))
    return replace(tile, **{field: tuple(ns)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "tile", "field", "factors"),
    [
        ("h100", 1, "block_ns", (2, 1)),
        ("h100", 1, "block_ns", (1, 1.5)),
        ("h200", 1, "block_ns", (1, 0.5)),
        ("h100", 1, "chain_ns", (1.5, 1)),
        ("h200", 1, "chain_ns", (1, 1.5)),
        ("h200", 2, "block_ns", (2, 1)),
        ("h200", 2, "block_ns", (1, 0.67)),
        ("h100", 2, "chain_ns", (1.5, 1)),
        ("h200", 2, "chain_ns", (1, 1.5)),
    ],
)
def test_a_spoilt_time_of_a_tile_is_found(name: str, tile: int, field: str, factors: tuple[float, float]) -> None:
    tiles = list(TILES)
    tiles[tile] = times_of(tiles[tile], field, factors)
    assert not replay(name, CARDS[name].times, tuple(tiles)).is_small


def test_every_constant_is_spoilt() -> None:
    """A constant that is new must have a test here."""
    marks = [*test_a_spoilt_constant_of_a_card_is_found.pytestmark]  # type: ignore[attr-defined]
    spoilt = {field for mark in marks for _, field, _ in mark.args[1]}
    assert spoilt | {"unhidden_part"} == set(CardTimes._fields)


@cache
def families(card: str) -> list[calibration_families.Family]:
    """What a card measured of models' shapes and of latent attention."""
    result = json.loads((RESULTS / f"calibration-shapes-{card}.json").read_text())
    return calibration_families.families_of(result)


def loses_little(family: calibration_families.Family, tiles: tuple[GpuTile, ...], bound: FamilyBound) -> bool:
    """Of the choices that these tiles' times make."""
    regrets = family.regrets(tiles)
    return bool(regrets.mean() < bound.mean and regrets.max() < bound.worst)


def family_of(bound: FamilyBound) -> calibration_families.Family:
    (found,) = (family for family in families(bound.card) if any(row["shape"] == bound.shape for row in family.rows))
    return found


def test_every_family_is_replayed() -> None:
    measured = [family.name for card in CARDS for family in families(card)]
    assert sorted(measured) == sorted(family_of(bound).name for bound in FAMILIES.values())


@pytest.mark.parametrize("bound", FAMILIES.values(), ids=FAMILIES)
def test_the_choice_loses_little_on_models_shapes(bound: FamilyBound) -> None:
    """With the bandwidth that was measured in the same run, and with the card's in the table."""
    family = family_of(bound)
    for bytes_per_us in (family.bytes_per_us, family.card.model.times.bytes_per_us):
        replayed = replace(family, bytes_per_us=bytes_per_us)
        regrets = replayed.regrets(family.tiles)
        assert loses_little(replayed, family.tiles, bound), (bytes_per_us, regrets.mean(), regrets.max())


@pytest.mark.parametrize("bound", FAMILIES.values(), ids=FAMILIES)
def test_a_spoilt_time_of_the_tallest_tile_of_a_family_is_found(bound: FamilyBound) -> None:
    family = family_of(bound)
    *others, tall = family.tiles
    assert not loses_little(family, (*others, times_of(tall, "block_ns", (2, 1))), bound)
