"""The performance page and the figures in the README say what the result files say."""

import json
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
import performance_page  # noqa: E402
from page import common  # noqa: E402


@pytest.mark.parametrize("path", [performance_page.PAGE, performance_page.README], ids=lambda path: path.name)
def test_page_is_what_the_results_say(path: Path) -> None:
    assert path.read_text() == performance_page.expected()[path], (
        f"{path.name} is stale: run `python benchmarks/performance_page.py`"
    )


def test_a_changed_result_changes_both_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    before = performance_page.page(), performance_page.readme()
    read = common.read

    def changed(path: Path) -> str:
        if path.stem != "vllm-tpot-h100":
            return read(path)
        result = json.loads(read(path))
        result["rows"][0]["CUSTOM"]["tpot_ms"] = 3.21
        return json.dumps(result)

    monkeypatch.setattr(common, "read", changed)
    after = performance_page.page(), performance_page.readme()
    assert all("| 3.2 |" in text or "**3.2**" in text for text in after)
    assert before[0] != after[0] and before[1] != after[1]


def test_every_loss_in_the_results_is_on_the_page() -> None:
    """The row of vLLM on two cards where nothing is shared, and training against cuDNN, are losses today."""
    pair = common.load("vllm-tpot-h200-tp2")["rows"][-1]
    assert pair["CUSTOM"]["tpot_ms"] > pair["FLASH_ATTN"]["tpot_ms"]
    losses = performance_page.page().split("## Where it loses")[1]
    assert "vLLM, two H200s: nothing shared" in losses
    assert "PyTorch's cuDNN back end" in losses


def test_every_source_is_a_result_with_its_origin() -> None:
    for path in common.RESULTS.glob("*.json"):
        result = json.loads(path.read_text())
        assert {"date", "commit", "device", "versions"} <= set(result), path.name


def test_a_readme_without_markers_is_refused() -> None:
    with pytest.raises(ValueError, match="no pair of markers"):
        performance_page.between("# No markers", "figures")
