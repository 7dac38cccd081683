"""The section on shapes of the performance page, from a result that is made up here."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.page import common, performance_page, shapes
from benchmarks.page.names import use_of
from benchmarks.workloads.shape_table import SHARED, UNSHARED, summary

LLAMA, PHI, FP8 = "llama3-8b 32/8x128", "phi4 40/10x128", "llama3-8b fp8 32/8x128"


def row(shape: str, batch: str, **us: float) -> dict[str, Any]:
    """sol_us is 10."""
    times = {way: {"us": time} for way, time in us.items()}
    return {"shape": shape, "batch": batch, "sol_us": 10.0, "commit": "1234567", **times}


def rows_of(shape: str, one_graph: float, **us: float) -> list[dict[str, Any]]:
    times = {"trunkattn": one_graph - 1, "trunkattn_one_graph": one_graph, "flash_attention_3": 26.0} | us
    return [row(shape, batch, **times) for batch in (*SHARED, *UNSHARED)]


@pytest.fixture
def save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Writes a result file; the page reads no other."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)

    def write(name: str, rows: list[dict[str, Any]]) -> None:
        origin = {"date": "a day", "commit": "1234567", "device": "a CPU", "card": "NVIDIA H100", "versions": {}}
        (tmp_path / f"{name}.json").write_text(json.dumps({**origin, "summary": summary(rows), "rows": rows}))

    return write


def section() -> common.Section:
    found = shapes.shapes()
    assert found
    return found


def test_without_a_result_there_is_no_section(save: Any) -> None:
    assert shapes.shapes() is None


def test_the_page_has_the_section_if_a_card_was_measured() -> None:
    made = common.Section("## Shapes\n", [common.Loss("decode, a shape", "a peer", 1.5)])
    topic = next(topic for topic in performance_page.topics() if topic.name == "shapes")
    assert topic.sections == (shapes.shapes,)
    text = performance_page.topic_page(topic._replace(sections=(lambda: made,)))
    assert made.text in text and "| decode, a shape | a peer | 1.50× |" in text
    assert "## Where it loses" not in performance_page.topic_page(topic._replace(sections=(lambda: None,)))


def test_goals_that_are_met_and_missed_are_shown_alike(save: Any) -> None:
    missed, met = rows_of("gemma3-12b 16/8x256", 13.6), rows_of(LLAMA, 14.0, flashinfer_decode=30.0)
    save("shapes-h100", [*met, *missed, *rows_of(PHI, 14.0)])
    text = section().text
    assert f"| H100 | {LLAMA} | 2.60 | 3.00 | 1.30 | 1.40 | 1.40 | met |" in text
    assert "| H100 | gemma3-12b 16/8x256 | 2.60 |  | 1.26 | 1.36 | 1.35 | **missed** |" in text
    assert f"| H100 | {PHI} | 2.60 |  | 1.30 | 1.40 |  |  |" in text
    assert "<summary>1 goals that are missed</summary>" in text
    assert "| H100 | gemma3-12b 16/8x256 | times SOL, one graph, mean of the shared batches | 1.35 | 1.36 |" in text


def test_a_goal_of_batches_that_were_not_measured_is_open(save: Any) -> None:
    save("shapes-h200", rows_of(LLAMA, 13.0)[1:])
    text = section().text
    assert f"| H200 | {LLAMA} |  |  |  |  | 1.40 | not measured |" in text and "No goal is missed." in text


def test_every_batch_is_compared_with_flash_attention_3(save: Any) -> None:
    rows = rows_of(PHI, 13.0)
    rows[4] |= {"trunkattn": {"us": 25.0}, "trunkattn_one_graph": {"us": 29.0}, "flashinfer_decode": {"us": 24.0}}
    rows[5] |= {"trunkattn": {"wrong": "error 3"}, "flash_attention_3": {"missing": "RuntimeError: pages | of 1"}}
    save("shapes-h100", rows)
    text, losses = section()
    assert f"| {PHI} | {'2.17 / 2.00 | ' * 4}1.04 / 0.90 | wrong / ? |" in text
    assert "Faster are\n5 of 5 with a plan of its own and 4 of 5 with one graph for any batch" in text
    assert "| H100 | plan of its own | 1 | wrong: error 3 |" in text
    assert "| H100 | FlashAttention-3 | 1 | missing: RuntimeError: pages / of 1 |" in text
    assert f"| H100 | {PHI} | 8 x (8192), plan of its own | a right output | wrong: error 3 |" in text
    where = f"decode, H100, {PHI}"
    worst = "1 of 5 batches, worst nothing shared, 64 requests"
    assert [(loss.where, loss.than, loss.by) for loss in losses] == [
        (f"{where}, plan of its own: {worst}", "FlashInfer", "1.04×"),
        (f"{where}, one graph for any batch: {worst}", "FlashInfer", "1.21×"),
    ]


def test_fp8_caches_are_compared_with_bf16_ones(save: Any) -> None:
    rows = rows_of(FP8, 13.0, trunkattn_bfloat16=24.0, trunkattn_one_graph_bfloat16=24.0)
    rows[1]["trunkattn_one_graph_bfloat16"]["us"] = 10.0
    save("shapes-h100", rows)
    text, losses = section()
    first, second = map(use_of, SHARED[:2])
    assert f"| H100 | {FP8} | plan of its own | 2.00 | 2.00: {first} | 2.00: {first} |" in text
    assert f"0.77: {second} | 1.85: {first} |" in text
    where = f"decode, H100, {FP8}, one graph for any batch: 1 of 6 batches, worst {second}"
    assert [(loss.where, loss.than, loss.by) for loss in losses] == [(where, "the same with a bf16 cache", "1.30×")]


def test_rows_of_several_commits_are_told(save: Any) -> None:
    rows = rows_of(PHI, 13.0)
    save("shapes-h100", rows)
    assert "by commit" not in section().text
    rows[0]["commit"] = "another"
    save("shapes-h100", rows)
    assert "rows by commit: 1 of another and 5 of 1234567" in section().text
