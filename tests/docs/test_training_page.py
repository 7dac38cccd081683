"""The page of training, in both states: while only peers and our own kernels were measured, and once all is there."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.kernels.flash_training import GRID, SHAPES
from benchmarks.page import common, training

RUN = {"date": "2026-11-27", "commit": "abc1234"}
HEAD = {**RUN, "device": "a CPU", "card": "NVIDIA H100 80GB HBM3", "versions": {"torch": "2.11.0"}}


def cell(forward: float, backward: float) -> dict[str, Any]:
    """A cell of some milliseconds, of 100 GFLOP forward."""
    times = {"forward": forward, "backward": backward, "both": forward + backward}
    return {part: {"ms": ms, "tflops": 100 / ms} for part, ms in times.items()} | {"peak_mb": 1000 * forward}


def batch(name: str) -> dict[str, Any]:
    ways = {"default": cell(1, 3), "own": cell(2, 5), "torch_flash": cell(2, 6), "torch_cudnn": cell(1, 3.5)}
    ways |= {"flash_attention_4": cell(0.8, 4), "flex_attention": {"missing": "no compiler"}}
    return {"shape": name, **ways, "flash_attention_3": {"forward": cell(0.5, 1)["forward"]}, **RUN}


def tree(ways: dict[str, Any]) -> dict[str, Any]:
    return {
        "tree": "2048 + 16x1024",
        "heads": "32/8",
        "head_dim": 128,
        "work_ratio": 2.0,
        "token_ratio": 2.5,
        **ways,
        **RUN,
    }


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder of results."""
    monkeypatch.setattr(common, "RESULTS", tmp_path)
    yield tmp_path


def write(folder: Path, name: str, rows: list[dict[str, Any]]) -> None:
    (folder / f"{name}.json").write_text(json.dumps({**HEAD, "rows": rows}))


def losses(made: common.Section | None) -> dict[tuple[str, str], float]:
    assert made
    return {(loss.where, loss.than): round(loss.ratio, 3) for loss in made.losses}


def test_without_a_result_there_is_no_section(results: Path) -> None:
    assert [make() for make in training.SECTIONS] == [None] * 5


def test_batches_show_speeds_ratios_and_losses(results: Path) -> None:
    write(results, "flash-training-h100", [batch(SHAPES[0].name), batch("causal 1x64 2/2 D 64")])
    made = training.batches()
    assert made and "Measured 2026-11-27 at abc1234." in made.text
    line = next(line for line in made.text.splitlines() if line.startswith(f"| H100 | {SHAPES[0].name}"))
    cells = [part.strip() for part in line.strip("|").split("|")]
    assert cells[2:] == ["100 / 33", "50 / 20", "50 / 17", "100 / 29", "125 / 25", "200", "1.12", "0.40", "0.70"]
    assert "causal 1x64" not in made.text and "FlexAttention" not in made.text
    found = losses(made)
    assert found["training, what a user gets, H100: forward, backward or both", "FlashAttention-4"] == 1.25
    assert found["training in kernels of our own, H100: forward", "FlashAttention-3"] == 4
    assert ("training, what a user gets, H100: forward, backward or both", "PyTorch cuDNN") not in found
    assert "`flash_attention` by default 1.12 to 1.12 of the fastest peer's (both passes)." in training.in_words()


def test_the_faster_of_two_is_known_where_both_were_measured(results: Path) -> None:
    rows = [batch(shape.name) for shape in (*GRID[:6], SHAPES[1])]
    next(row for row in rows if row["shape"] == SHAPES[0].name)["flash_attention_4"] = {"missing": "no module"}
    write(results, "flash-training-h100", rows)
    found, made = training.batches(), training.lengths()
    assert found and made and "| 100 / 29 |  | 200 | 1.12 |  |  |" in found.text
    own = [line.split(" | ")[3:5] for line in made.text.splitlines() if "| own kernels |" in line]
    assert own == [["PyTorch flash", "6"], ["the faster of both", "5"]]


def test_lengths_are_means_of_at_least_four(results: Path) -> None:
    write(results, "flash-training-h100", [batch(shape.name) for shape in (*GRID[:6], *GRID[6:9])])
    made = training.lengths()
    assert made and "full 32/32" not in made.text
    line = next(line for line in made.text.splitlines() if "PyTorch cuDNN" in line and line.startswith("| H100"))
    expected = "| H100 | causal 32/32 D 128 | TrunkAttention | PyTorch cuDNN | 6 | 1.00 | 1.17 | 1.12 | 1.12 |"
    assert line == expected


def test_trees_before_and_after_they_are_measured(results: Path) -> None:
    before = tree({"flex_attention": cell(2, 6), "repeated": cell(4, 8)})
    write(results, "trees-h100", [before])
    made = training.trees()
    assert made and "| H100 | 2048 + 16x1024 | 2.00 + 6.00 | 4.00 + 8.00 |  | 2.00 |" in made.text
    where = "training on repeated sequences instead of a tree, H100"
    assert losses(made) == {(where, "FlexAttention on the tree"): 1.5}
    write(results, "flash-training-h100", [batch(SHAPES[0].name)])
    assert "1.50× the time of FlexAttention on their tree (`tree=` is not measured yet)" in training.in_words()
    after = before | {"default": cell(2, 4), "cudnn_flex": cell(1, 4), "plan": {"tree": 0.1, "tables": 0.05}}
    write(results, "trees-h100", [after])
    made = training.trees()
    assert made and "2.00 + 4.00 | 1.00 + 4.00 | 2.00 + 6.00 | 4.00 + 8.00 | 2.00× | 2.00 |" in made.text
    assert "| 2048 + 16x1024 | 2000 | 4000 | 0.10 | 0.05 |  |  |" in made.text
    assert losses(made) == {("a prefix tree by `tree=`, H100", "cuDNN flex on the tree"): 1.2}
    write(results, "trees-h100", [after | {"own": cell(2, 8)}])
    assert "Prefix trees take 2.00 to 2.00× cuDNN's time in our kernels." in training.in_words()


def test_trees_that_other_kernels_compute_than_were_measured_are_named() -> None:
    there = {"default": {"kernel": "cuDNN flex_attention"}}
    rows = [{"tree": name, **there} for name in ("700 + 64x300", "2048 + 16x1024")]
    assert training.now_own(rows).startswith(" For the trees 700 + 64x300 it is now our own kernels")
    rows[0] = {"tree": "700 + 64x300", "default": {"kernel": "Hopper forward"}}
    assert training.now_own(rows) == ""


def test_a_step_that_does_not_fit_is_out_of_memory(results: Path) -> None:
    steps = {"tree_step": {"ms": 10.0, "tokens_per_s": 5000, "peak_gb": 3.0, "loss": 2.0}}
    fits = tree(steps | {"repeated_step": {"ms": 25.0, "tokens_per_s": 2000, "peak_gb": 8.0, "loss": 2.0}})
    too_large = tree(steps | {"repeated_step": {"missing": "OutOfMemoryError"}})
    write(results, "training-block-h100", [fits, too_large])
    made = training.block()
    assert made and "| H100 | 2048 + 16x1024 | 5,000 | 2,000 | 3.0 | 8.0 | 2.50× | 2.50 | 2.00 |" in made.text
    assert "| 5,000 | out of memory | 3.0 | out of memory |  | 2.50 | 2.00 |" in made.text


def test_checks_count_the_runs_that_differ(results: Path) -> None:
    errors = [{"dtype": "float16", "result": "dq", "own_over_plain": 0.577, "deterministic_over_plain": 0.5}]
    memory = [{"length": 16384, "own": 338e6, "torch_flash": 337e6, "torch_math": 34729e6}]
    repeats = [{"of": "causal 1x2048", "runs": 1000, "different": 0}, {"of": "8 + 2x4", "runs": 1000, "different": 3}]
    write(results, "flash-training-h100", [batch(SHAPES[0].name)])
    assert training.checks() is None
    path = results / "flash-training-h100.json"
    checks = RUN | {"errors": errors, "memory": memory, "repeats": repeats}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"checks": checks}))
    made = training.checks()
    assert made and "0 of 1,000 over `causal 1x2048` and 3 of 1,000 over `8 + 2x4`" in made.text
    assert "16,384 tokens take 338 MB" in made.text.replace("\n", " ")
    assert "| float16 | dq | 0.58 | 0.50 |" in made.text


def test_cells_that_were_added_are_compared_with_what_was_measured_beside_them(results: Path) -> None:
    beside = {"own": cell(1, 2), "default": cell(0.5, 1), "date": "2026-12-01", "commit": "def5678"}
    added = {"flex_attention": cell(2, 4) | {"beside": beside}, "deterministic": cell(1, 5) | {"beside": beside}}
    write(results, "flash-training-h100", [batch(shape.name) | added for shape in GRID[:6]])
    made, found = training.batches(), training.lengths()
    assert made and found and "Measured 2026-11-27 at abc1234 and 2026-12-01 at def5678." in made.text
    ratios = {tuple(line.split(" | ")[2:4]): line.split(" | ")[4:8] for line in found.text.splitlines()}
    assert ratios["own kernels", "FlexAttention"] == ["6", "2.00", "2.00", "2.00"]
    assert ratios["own kernels, deterministic", "own kernels"] == ["6", "1.00", "0.40", "0.50"]
    assert ratios["own kernels", "PyTorch flash"] == ["6", "1.00", "1.20", "1.14"]
    assert ("own kernels, deterministic", "PyTorch flash") not in ratios
    assert not any("own kernels" in than for _, than in losses(found))
