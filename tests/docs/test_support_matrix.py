"""The support matrix says what the code says."""

from pathlib import Path

import pytest
import torch

from benchmarks.page import support_matrix as matrix
from trunkattn import AttentionConfig


@pytest.mark.parametrize("path", matrix.PAGES, ids=lambda path: path.name)
def test_pages_are_up_to_date(path: Path) -> None:
    text = path.read_text()
    assert matrix.fill(text) == text, f"{path.name} is stale: run `python -m benchmarks.page.support_matrix`"


def cells(name: str) -> list[str]:
    row = next(line for line in matrix.features().splitlines() if line.startswith(f"| {name} |"))
    return [cell.strip() for cell in row.strip("|").split("|")][1:]


def test_a_refusal_of_the_code_is_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cells("float32") == ["yes", "yes", "no"]
    supports = AttentionConfig.supports

    def refusing(config: AttentionConfig, device: str) -> list[str]:
        reasons = ["no float32 here"] if config.dtype == torch.float32 else []
        return [*supports(config, device), *reasons]

    monkeypatch.setattr(AttentionConfig, "supports", refusing)
    assert cells("float32") == ["no", "no", "no"]


def test_capabilities_are_told_apart() -> None:
    assert cells("fp8 cache, e4m3")[1] == "8.9 and later"
    assert cells('`execution="overlapped"`')[1] == "9.0 only"
    assert cells("head_dim over 256")[:2] == ["yes", "no"]


def test_a_row_that_is_half_fast_is_refused() -> None:
    both = [matrix.attention_of({"head_dim": dim}) for dim in (80, 128)]
    with pytest.raises(ValueError, match="split the row"):
        matrix.hopper_cell(both)


def test_the_pretended_card_is_gone_afterwards() -> None:
    before = torch.cuda.is_available()
    with matrix.card((8, 0)):
        assert torch.cuda.get_device_capability(0) == (8, 0)
    assert torch.cuda.is_available() == before


def test_the_summary_has_every_feature_once() -> None:
    names = [name for row in matrix.summary().splitlines()[2:] for name in row.split(" | ")[0][2:].split("; ")]
    assert sorted(names) == sorted(matrix.rows())


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no markers"):
        matrix.fill("# Nothing")
