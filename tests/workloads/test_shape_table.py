"""The shapes and batches of benchmarks/kernels/shapes.py, how they are named, and what a result comes to."""

from typing import Any

import pytest
import torch

from benchmarks.kernels import shapes
from benchmarks.workloads import parse_tree
from benchmarks.workloads.shape_table import (
    BATCHES,
    FP8_GOALS,
    GOALS,
    SHAPES,
    SHARED,
    UNSHARED,
    batch_name,
    misses,
    parse_batch,
    shapes_named,
    summary,
)

FP8 = torch.float8_e4m3fn


def test_names_say_what_a_shape_is() -> None:
    assert len({shape.name for shape in SHAPES}) == len(SHAPES) == 21
    for shape in SHAPES:
        assert f" {shape.num_qo_heads}/{shape.num_kv_heads}x{shape.head_dim}" in shape.name
        words = {"fp8": shape.kv_dtype == FP8, "sinks": shape.sinks, "window": bool(shape.window)}
        words |= {"cap": bool(shape.soft_cap), "page 1": shape.page_size == 1}
        assert {word for word, has in words.items() if has} == {word for word in words if word in shape.name}
    assert set(GOALS) | set(FP8_GOALS) <= {shape.name for shape in SHAPES}


@pytest.mark.parametrize(
    ("text", "tree"),
    [
        ("64 x (1024 + 8 groups x 3072 + 256)", "1,8,64_1024,3072,256"),
        ("64 x (4 groups x 12000 + 64)", "4,64_12000,64"),
        ("256x(1024+128)", "1,256_1024,128"),
        ("1 x (2048)", "1_2048"),
    ],
)
def test_a_batch_is_read_as_a_tree(text: str, tree: str) -> None:
    assert parse_batch(text) == parse_tree(tree)


@pytest.mark.parametrize("text", BATCHES)
def test_a_batch_has_one_name(text: str) -> None:
    assert batch_name(parse_batch(text)) == text


@pytest.mark.parametrize(
    "text", ["64", "64 x 512", "64 x ()", "64 x (512 +)", "x (512)", "4 x (4 groups x 512)", "8 x (16 x 512 + 1)"]
)
def test_another_form_of_a_batch_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected a batch such as '64 x"):
        parse_batch(text)


@pytest.mark.parametrize("text", ["4 x (8 groups x 16 + 5)", "4 x (0 + 5)", "0 x (5)"])
def test_a_batch_that_is_no_tree_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="tree"):
        parse_batch(text)


def test_shapes_are_chosen_by_a_part_of_their_names() -> None:
    assert [shape.kv_dtype for shape in shapes_named("fp8")] == 3 * [FP8]
    assert [shape.page_size for shape in shapes_named("llama3-8b 32/8")] == [16]
    with pytest.raises(ValueError, match="no shape has 'llama4' in its name"):
        shapes_named("llama4")


def made_up_row(shape: str, batch: str, **us: float) -> dict[str, Any]:
    return {"shape": shape, "batch": batch, "sol_us": 10.0} | {way: {"us": time} for way, time in us.items()}


def made_up_rows(shape: str, one_graph: float) -> list[dict[str, Any]]:
    """All are 2 times as fast as FlashAttention-3 or better, but for one unshared batch."""
    times = dict.fromkeys((*SHARED, *UNSHARED), 40.0) | {UNSHARED[1]: one_graph / 1.05}
    return [made_up_row(shape, batch, trunkattn=one_graph / 1.1, trunkattn_one_graph=one_graph, flash_attention_3=us)
            for batch, us in times.items()]  # fmt: skip


def test_a_summary_has_means_speeds_and_what_is_missed() -> None:
    name = "llama3-8b 32/8x128"
    found = summary(made_up_rows(name, 14.1))[name]
    assert found["times_sol"] == {"trunkattn": 1.282, "trunkattn_one_graph": 1.41, "flash_attention_3": 4.0}
    assert (found["goal"], found["cells"]) == (1.4, 6) and "over_bfloat16" not in found
    assert found["over_flash_attention_3"]["trunkattn_one_graph"] == {
        "slowest": [UNSHARED[1], 0.952], "fastest": [SHARED[0], 2.837],
    }  # fmt: skip
    assert found["misses"] == [
        {"what": "times SOL, one graph, mean of the shared batches", "goal": 1.4, "measured": 1.41},
        {"what": f"{UNSHARED[1]}, one graph: speed over FlashAttention-3's", "goal": 0.98, "measured": 0.952},
    ]
    assert [each["goal"] for each in misses(name, made_up_rows(name, 13.9))] == [0.98]


def test_a_mean_needs_every_shared_batch() -> None:
    name = "llama3-8b 32/8x128"
    rows = [row for row in made_up_rows(name, 14.1) if row["batch"] != SHARED[2]]
    assert summary(rows)[name]["times_sol"] == {}
    assert all("mean" not in each["what"] for each in summary(rows)[name]["misses"])


def test_a_shared_batch_has_a_higher_goal_but_for_the_one_that_launches_bind() -> None:
    rows = [
        made_up_row("phi4 40/10x128", batch, trunkattn=10, trunkattn_one_graph=9, flash_attention_3=12)
        for batch in BATCHES
    ]
    found = [(each["what"], each["goal"], each["measured"]) for each in misses("phi4 40/10x128", rows)]
    assert found == [(f"{batch}, plan of its own: speed over FlashAttention-3's", 1.3, 1.2) for batch in SHARED[:3]]


def test_an_fp8_cache_is_compared_with_a_bf16_one() -> None:
    name = "llama3-8b fp8 32/8x128"
    rows = [
        made_up_row(name, batch, trunkattn=10, trunkattn_bfloat16=12 if batch in SHARED else 18) for batch in BATCHES
    ]
    rows[-1]["trunkattn_bfloat16"]["us"] = 9
    for row in rows:
        row["trunkattn_one_graph"] = {"us": 10.0}
    entry = summary(rows)[name]
    assert entry["over_bfloat16"] == {
        "trunkattn": {"shared_mean": 1.2, "slowest": [BATCHES[-1], 0.9], "fastest": [UNSHARED[0], 1.8]}
    }
    assert [(each["what"].split(",")[0], each["goal"]) for each in entry["misses"]] == [
        (BATCHES[-1], 1.0), ("mean of the shared batches", 1.3),
    ]  # fmt: skip
    assert [each["goal"] for each in misses("gemma3-12b fp8 16/8x256", rows)] == [1.0]


def test_an_output_that_is_wrong_or_missing_is_a_miss() -> None:
    row = made_up_row("phi4 40/10x128", SHARED[0], flash_attention_3=12)
    row |= {"trunkattn": {"wrong": "error 3"}, "trunkattn_one_graph": {"missing": "RuntimeError: no"}}
    found = list(misses("phi4 40/10x128", [row]))
    assert [each["measured"] for each in found] == ["wrong: error 3", "missing: RuntimeError: no"]
    lost = {"shape": row["shape"], "batch": SHARED[0], "sol_us": 1.0, "case": {"missing": "OutOfMemoryError: no"}}
    assert [each["measured"] for each in misses(row["shape"], [lost])] == 2 * ["missing: OutOfMemoryError: no"]
    assert "trunkattn wrong: error 3, trunkattn_one_graph missing: RuntimeError: no" in shapes.line_of(row)
