"""The support matrix says what the code says."""

from pathlib import Path

import pytest
import torch

from benchmarks.page import support_matrix as matrix
from trunkattn import AttentionConfig
from trunkattn.gpu.kernel import KERNELS, choose


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
    """But for those that one Hopper card alone has."""
    names = [name for row in matrix.summary().splitlines()[2:] for name in row.split(" | ")[0][2:].split("; ")]
    assert sorted([*names, "head_dim 96"]) == sorted(matrix.rows())


def test_training_asks_the_table_of_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Hopper kernel for one pass is not enough."""
    name = "training (`flash_attention`), head_dim 64, 96, 128, 192, 256"
    assert cells(name) == cells("training on prefix trees") == ["yes", "yes", "yes"]
    assert cells("training, another head_dim to 256")[2] == "no", "TMA reads rows in whole 16 bytes"
    assert cells("training with a sliding window or a soft cap") == ["yes", "yes", "yes"]
    without = tuple(kernel for kernel in KERNELS if kernel.name != "Hopper backward")
    monkeypatch.setattr(matrix, "choose", lambda *of, kernels=without: choose(*of[:3], kernels))
    assert cells(name) == ["yes", "yes", "no"]


def test_a_page_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no markers"):
        matrix.fill("# Nothing")
