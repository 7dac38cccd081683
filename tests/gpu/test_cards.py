"""A card's record is found by CUDA's whole name and the number of SMs; every other card gets cautious values."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from trunkattn import AttentionConfig
from trunkattn.gpu.cards import H100, H200, Card, card_of
from trunkattn.gpu.tuning.choice import choose_chunk_tile, choose_tiles
from trunkattn.gpu.tuning.decode import INVARIANT_TILE


@pytest.mark.parametrize(
    ("name", "card"), [("NVIDIA H100 80GB HBM3", H100), ("NVIDIA H100", H100), ("NVIDIA H200", H200)]
)
def test_a_measured_card_has_a_record(name: str, card: Card) -> None:
    assert card_of(name, 132) is card
    assert card.hopper_tiles and card.overlap is not None
    assert card.description in name


@pytest.mark.parametrize(
    ("name", "num_sms"),
    [
        ("NVIDIA H100 PCIe", 114),
        ("NVIDIA H100 PCIe", 132),
        ("NVIDIA H100 NVL", 132),
        ("NVIDIA H200 NVL", 132),
        ("NVIDIA GH200 480GB", 132),
        ("NVIDIA H20", 78),
        ("NVIDIA H800", 132),
        ("NVIDIA H100 80GB HBM3", 114),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 60),
        ("NVIDIA H200", 66),
        ("nvidia h200", 132),
        ("NVIDIA A100-SXM4-80GB", 108),
        ("NVIDIA B200", 148),
        ("", 132),
    ],
)
def test_another_card_gets_cautious_values_and_says_so(name: str, num_sms: int) -> None:
    card = card_of(name, num_sms)
    assert not card.hopper_tiles and card.overlap is None
    assert card.times.bytes_per_us < min(H100.times.bytes_per_us, H200.times.bytes_per_us)
    assert card.description == f"{name} with {num_sms} SMs, which was not measured (2 TB/s assumed)"


COMMON = {"num_qo_heads": 32, "num_kv_heads": 8, "head_dim": 128, "page_size": 16, "dtype": torch.bfloat16}
UNTIMED = [
    {"head_dim": 64},
    {"head_dim": 256},
    {"num_qo_heads": 56},
    {"sinks": True},
    {"logits_soft_cap": 30.0},
]


@pytest.mark.parametrize(
    "options",
    [*UNTIMED, {"page_size": 1}, {"kv_dtype": torch.float8_e4m3fn}],
)
def test_the_hopper_kernel_decodes_other_attentions_only_where_they_were_timed(options: dict[str, Any]) -> None:
    plain, config = AttentionConfig(**COMMON), AttentionConfig(**(COMMON | options))
    for family in (False, True):
        card = replace(H100, hopper_family=family)
        assert any(tile.hopper for tile in choose_tiles(plain, card, 90))
        assert any(tile.hopper for tile in choose_tiles(config, card, 90)) is family
    assert not any(
        tile.hopper for tile in choose_tiles(config, replace(H100, hopper_tiles=False, hopper_family=True), 90)
    )


def test_padded_heads_are_decoded_by_the_hopper_kernel_where_that_is_faster() -> None:
    config = AttentionConfig(**(COMMON | {"head_dim": 96}))
    for card in (H100, H200):
        faster = card is H200
        assert [tile.hopper for tile in choose_tiles(config, card, 90)] == ([True] * 3 if faster else [False] * 2)
        for other in ({"page_size": 8}, {"kv_dtype": torch.float8_e4m3fn}, {"head_dim": 80}, {"head_dim_v": 128}):
            assert not any(tile.hopper for tile in choose_tiles(replace(config, **other), card, 90))
        assert not choose_chunk_tile(config, card, 90).hopper and not config.overlaps_on_hopper
    assert not any(tile.hopper for tile in choose_tiles(config, replace(H200, hopper_family=False), 90))


def test_a_batch_invariant_attention_is_not_decoded_by_the_hopper_kernel() -> None:
    """A row's keys would lie in a block as other requests have them."""
    config = AttentionConfig(**COMMON, batch_invariant=True)
    assert config.decode_misfits and not config.overlaps_on_hopper
    for card in (H100, H200):
        (tile,) = choose_tiles(config, card, 90)
        assert not tile.hopper and tile.block_m == 32 and tile.subtiles == 1
    for other in ({"num_qo_heads": 512}, {"head_dim": 256}, {"dtype": torch.float32}, {"kv_dtype": torch.float8_e5m2}):
        (tile,) = choose_tiles(replace(config, **other), H100, 90)
        assert not tile.hopper and tile is not INVARIANT_TILE and tile.subtiles == 1


@pytest.mark.parametrize("options", UNTIMED)
def test_the_hopper_kernel_computes_other_prompts_only_where_they_were_timed(options: dict[str, Any]) -> None:
    config = AttentionConfig(**(COMMON | options))
    for family in (False, True):
        tile = choose_chunk_tile(config, replace(H100, hopper_family=family), 90)
        assert tile.hopper is family
        assert tile.block_m == 128 or not family
    assert not choose_chunk_tile(config, replace(H100, hopper_family=True), 100).hopper


@pytest.mark.parametrize("options", [{}, {"num_qo_heads": 8}, {"num_qo_heads": 256}, {"policy": "pat"}])
def test_every_card_of_capability_9_0_has_the_hopper_kernel_for_plain_prompts(options: dict[str, Any]) -> None:
    config = AttentionConfig(**(COMMON | options))
    assert choose_chunk_tile(config, card_of("NVIDIA H100 PCIe", 114), 90).hopper
    assert not choose_chunk_tile(config, card_of("NVIDIA B200", 148), 100).hopper


@pytest.mark.parametrize(
    "options",
    [
        {"head_dim": 96},
        {"head_dim_v": 64},
        {"page_size": 8},
        {"dtype": torch.float32},
        {"kv_dtype": torch.float8_e4m3fn},
    ],
)
def test_what_the_hopper_kernel_for_prompts_does_not_compute(options: dict[str, Any]) -> None:
    config = AttentionConfig(**(COMMON | options))
    assert not choose_chunk_tile(config, replace(H100, hopper_family=True), 90).hopper
