"""The prices of the latent tiles, beside what a card took with caches of 16 and of 8 bits."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.kernels.calibration_families import Family
from benchmarks.kernels.decode_cases import Shape
from benchmarks.kernels.mla import RAGGED, read_batch
from benchmarks.lib.report import RESULTS
from benchmarks.workloads.shape_table import parse_batch
from trunkattn.analysis.trees import tree_batch
from trunkattn.gpu.cards import card_named
from trunkattn.gpu.mla.spec import decode_tiles
from trunkattn.gpu.tiles import GpuTile
from trunkattn.planner.tiles.step import TiledStep

from ..planner.specs import as_batch, forest_of
from .kernel_cases import make_card
from .latent_cases import deepseek

CARD, PAGE_SIZE = make_card(), 64
H200_CARD = card_named("H200")
UNEVEN = (*RAGGED, "96 x (2048 + 8 groups x 512 + 128)", "48 x (6 groups x 3072 + 704)")
CACHES = {"bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
LEAST, MOST = 0.85, 0.95  # of the predicted time over the measured one, which the merge is a part of


def predicted_us(row: dict[str, Any], tile: GpuTile, kv_dtype: torch.dtype) -> float:
    """Of the fastest tiling of a measured batch."""
    heads = row["heads"]
    shape = Shape("latent", heads, 1, 576, kv_dtype=kv_dtype, page_size=PAGE_SIZE, latent_dim=512)
    family = Family((tile,), CARD, CARD.model.times.bytes_per_us, [])
    batch = as_batch(tree_batch(parse_batch(row["batch"]), PAGE_SIZE, page_seed=1))
    step = TiledStep(family.rule_of(shape, (tile,)), forest_of(batch, PAGE_SIZE), batch)
    return float(step.predict().min()) / 1e3


def taken(heads: int, text: str) -> tuple[str, float]:
    """The tiling that a plan on an H200 takes for a batch, and its predicted time in µs."""
    (tile,) = decode_tiles(deepseek(), H200_CARD)
    shape = Shape("latent", heads, 1, 576, kv_dtype=torch.bfloat16, page_size=PAGE_SIZE, latent_dim=512)
    rule = Family((tile,), H200_CARD, H200_CARD.model.times.bytes_per_us, []).rule_of(shape, (tile,))
    batch = as_batch(read_batch(text)[1])
    ns = TiledStep(rule, forest_of(batch, PAGE_SIZE), batch).predict()
    return rule.priced.tilings[int(ns.argmin())].name(rule), float(ns.min()) / 1e3


def mean_ratio(cache: str, slower: float = 1.0) -> float:
    """Predicted over measured, on average. slower: what the tile's times are multiplied by."""
    (tile,) = decode_tiles(deepseek(kv_dtype=CACHES[cache]), CARD)
    times = ([int(ns * slower) for ns in found] for found in (tile.block_ns, tile.chain_ns))
    block_ns, chain_ns = ((full, masked) for full, masked in times)
    tile = replace(tile, block_ns=block_ns, chain_ns=chain_ns)
    rows = json.loads((RESULTS / "mla-fp8-h200.json").read_text())["rows"]
    return float(np.mean([predicted_us(row, tile, CACHES[cache]) / row[cache]["us"] for row in rows]))


@pytest.mark.parametrize("cache", CACHES)
def test_a_tile_is_priced_as_it_was_measured(cache: str) -> None:
    assert LEAST < mean_ratio(cache) < MOST


@pytest.mark.parametrize("slower", [0.8, 1.25])
def test_a_spoilt_price_of_the_8_bit_tile_is_found(slower: float) -> None:
    assert not LEAST < mean_ratio("fp8", slower) < MOST


@pytest.mark.parametrize("text", UNEVEN)
def test_a_batch_of_unequal_lengths_takes_the_tiling_that_was_measured(text: str) -> None:
    """Each of them is faster than both peers, and takes 0.86 to 1.28 times as long as predicted. Many heads are cut
    into portions where items of equal size would keep some CTAs waiting."""
    rows = [row for row in json.loads((RESULTS / "mla-h200.json").read_text())["rows"] if row["batch"] == text]
    assert len(rows) == 8
    names = []
    for row in rows:
        name, us = taken(row["heads"], text)
        names.append(name)
        assert name == row["trunkattn"]["tiling"]
        assert row["trunkattn"]["us"] < min(row["flashmla"]["us"], row["fa3"]["us"])
        assert 0.86 < row["trunkattn"]["us"] / us < 1.28, (name, us, row)
    assert any(name.endswith(" even") for name in names)
