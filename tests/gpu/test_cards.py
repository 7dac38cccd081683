"""A card's record is found by CUDA's whole name and the number of SMs; every other card gets cautious values."""

import pytest

from trunkattn.gpu.cards import H100, H200, CardModel, GpuFacts, card_of


@pytest.mark.parametrize(
    ("name", "model"), [("NVIDIA H100 80GB HBM3", H100), ("NVIDIA H100", H100), ("NVIDIA H200", H200)]
)
def test_a_measured_card_has_a_record(name: str, model: CardModel) -> None:
    found = card_of(GpuFacts(name, 132, 90, 50 << 20))
    assert found.model is model and found.facts.name == name
    assert model.runs_hopper_kernels and model.overlap is not None
    assert found.description in name


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
    card = card_of(GpuFacts(name, num_sms, 90, 50 << 20))
    assert not card.model.runs_hopper_kernels and card.model.overlap is None
    assert card.model.times.bytes_per_us < min(H100.times.bytes_per_us, H200.times.bytes_per_us)
    assert card.description == f"{name} with {num_sms} SMs, which was not measured (2 TB/s assumed)"
