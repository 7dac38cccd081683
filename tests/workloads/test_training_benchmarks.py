"""The benchmarks of training on a CPU: their shapes and trees, what is compared with what, and a tiny run of each."""

import argparse
import json
import math
from itertools import count
from pathlib import Path

import pytest
import torch

from benchmarks.kernels import flash_training, training_block, training_checks, tree_attentions, trees
from benchmarks.kernels.training_cells import Inputs, both_passes, measure, random_inputs, relative_error
from benchmarks.kernels.training_peers import ATTENTIONS, Shape, parse_shape
from benchmarks.kernels.training_rows import of_one_process, to_add, with_added
from benchmarks.kernels.tree_attentions import paths, repeat, repeated
from benchmarks.lib import report
from benchmarks.lib.report import read_result, with_earlier, write_result
from benchmarks.workloads.training_trees import TREES, parse_training_tree
from tests.workloads.scripts import refusal
from trunkattn import flash_attention

TINY = Shape(True, 2, 32, 4, 2, 16)
TINY_TREES = ("16 + 3x8", "8 / 2x4 / 4x3-9", "2x8 / 4x4")


def inputs_of(name: str) -> Inputs:
    return random_inputs((parse_training_tree(name).num_tokens,), (4, 2), 16, "cpu", torch.float64)


def test_shapes_are_read_by_their_names() -> None:
    for shape in (*flash_training.SHAPES, *flash_training.GRID):
        assert parse_shape(shape.name) == shape
    assert len(flash_training.GRID) == len(set(flash_training.GRID)) == 48
    assert flash_training.SHAPES[1] in flash_training.GRID
    assert TINY.gigaflops * 1e9 == 4 * 2 * 32 * 32 / 2 * 4 * 16
    for text in ("causal 8x2048 32/8", "causal 8x2048 32/5 D 128", "half 8x2048 32/8 D 128"):
        with pytest.raises(ValueError, match="expected a batch such as 'causal 8x2048 32/8 D 128'"):
            parse_shape(text)


def test_trees_are_read_by_their_names() -> None:
    sizes = [(tree.num_tokens, tree.num_sequences) for tree in map(parse_training_tree, TREES)]
    assert sizes[:5] == [(18432, 16), (16384, 8), (33792, 8), (21504, 16), (20480, 64)]
    assert sizes[6:9] == [(4096 + 2048 + 4096 + 4096 + 8192, 16), (18432, 128), (19900, 64)]
    ragged = parse_training_tree(TREES[5])
    assert ragged.lengths[0] == 3000 and len(set(ragged.lengths)) > 20 and max(ragged.lengths[1:]) <= 2048
    assert ragged.lengths == parse_training_tree(TREES[5]).lengths
    assert parse_training_tree("3 / 2x4 / 4x5").parents == (-1, 0, 1, 1, 0, 4, 4)
    for text in ("", "3 / 2x4 / 3x5", "3 + 0x4", "a + 3x4"):
        with pytest.raises(ValueError, match="expected levels such as '3072 / 4x1024 / 16x896'"):
            parse_training_tree(text)


@pytest.mark.parametrize("name", TINY_TREES)
def test_work_is_that_of_the_pairs_that_are_seen(name: str) -> None:
    tree = parse_training_tree(name)
    query, key = torch.arange(tree.num_tokens)[:, None], torch.arange(tree.num_tokens)
    seen = int(((key <= query) & (query < tree.subtree_end)).sum())
    lengths = [len(index) for index in tree.sequence_indices()]
    assert trees.pairs_of(tree) == (seen, sum(length * (length + 1) // 2 for length in lengths))


@pytest.mark.parametrize("name", TINY_TREES)
def test_every_way_to_a_tree_gives_what_repeated_sequences_give(name: str) -> None:
    tree, inputs = parse_training_tree(name), inputs_of(name)
    expected = trees.by_repeated_sequences(tree, inputs)
    for make in (tree_attentions.default, tree_attentions.ours(True), lambda *given: paths(*given, varlen=own_varlen)):
        assert relative_error(both_passes(make(tree, inputs), inputs), expected) < 1e-6
    wrong = (expected[0], expected[1], expected[2], 2 * expected[3])
    assert relative_error(wrong, expected) == 1 and relative_error((expected[0] * math.nan,), expected) == math.inf
    q, k, v = (tensor.detach().float() for tensor in inputs.leaves)
    with torch.no_grad():
        found = tree_attentions.flex_attention(tree, inputs)(q, k, v)
        assert relative_error((found,), expected) < 1e-5
        copies = Inputs(*(repeat(tree, tensor) for tensor in inputs))
        found = repeated(tree, copies)(*copies.leaves)
    assert relative_error((found,), (repeat(tree, expected[0]),)) < 1e-6


def own_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ends_q: torch.Tensor, ends_k: torch.Tensor, longest: object
) -> torch.Tensor:
    out = flash_attention(q, k, v, True, cu_seqlens_q=ends_q, cu_seqlens_k=ends_k)
    assert isinstance(out, torch.Tensor)
    return out


@pytest.mark.parametrize("name", TINY_TREES)
def test_the_fewest_intervals_are_those_of_the_tree(name: str) -> None:
    tree = parse_training_tree(name)
    (ends,) = tree_attentions.tight_intervals(tree, torch.device("cpu"))
    key = torch.arange(tree.num_tokens)
    bounds = [torch.zeros(tree.num_tokens), *ends]
    pairs = zip(bounds[::2], bounds[1::2], strict=True)
    seen = sum((low[:, None] <= key) & (key < high[:, None]) for low, high in pairs)
    query = key[:, None]
    assert torch.equal(seen > 0, (key <= query) & (query < tree.subtree_end)) and int(torch.as_tensor(seen).max()) == 1
    assert len(ends) == (2 * tree.num_levels - 1 if tree.parents.count(-1) == 1 else 2 * tree.num_levels + 1)


def test_a_wrong_attention_and_one_that_is_not_installed_are_reported() -> None:
    inputs = random_inputs((TINY.batch, TINY.length), (4, 2), 16, "cpu")
    error_of = flash_training.error_by_plain(inputs, TINY)
    full = TINY._replace(causal=False)
    assert "wrong" in measure(lambda: ATTENTIONS["default"].make(full, "cpu"), inputs, error_of, 1.0)
    missing = measure(lambda: ATTENTIONS["flash_attention_4"].make(TINY, "cpu"), inputs, error_of, 1.0)
    assert missing == {"missing": "ModuleNotFoundError: No module named 'flash_attn'"}
    doubled = measure(lambda: lambda q, k, v: flash_attention(q, k, 2 * v.detach(), True), inputs, error_of, 1.0)
    assert "missing" in doubled  # no gradient reaches v


def test_a_tiny_run_of_batches() -> None:
    row = flash_training.row_of(TINY, list(ATTENTIONS), "cpu")
    assert row["shape"] == TINY.name and row["default"]["kernel"] == "CPU"
    for name in ("default", "own", "deterministic", "torch_flash"):
        assert row[name]["timed_by"] == "host" and row[name]["error"] < 0.02
        assert set(row[name]) >= {"forward", "backward", "both"}
    untimed = flash_training.row_of(TINY, ["default"], "cpu", timed=False)
    assert set(untimed["default"]) == {"error", "kernel"}


def test_cells_that_are_added_compare_with_those_of_their_process() -> None:
    row = flash_training.row_of(TINY, ["default", "own", "torch_cudnn"], "cpu") | {"date": "then", "commit": "a"}
    assert to_add(row, ["own", "torch_flash", "torch_cudnn"]) == ["default", "own", "torch_flash", "torch_cudnn"]
    later = flash_training.row_of(TINY, to_add(row, ["torch_flash", "deterministic"]), "cpu")
    both = json.loads(json.dumps(with_added(row, later)))  # what a result keeps
    assert {name: both[name] for name in row} == row and not to_add(both, ["own", "torch_flash", "deterministic"])
    beside = both["torch_flash"]["beside"]
    assert beside["own"] == later["own"] and beside["date"] != "then" and "torch_cudnn" not in beside
    assert of_one_process(both, "own", "default") == both == of_one_process(both, "deterministic", "torch_flash")
    for names in (("own", "torch_flash"), ("torch_flash", "own")):
        cells = of_one_process(both, *names)
        assert cells["own"] == later["own"] and cells["torch_flash"] == both["torch_flash"]
    assert "torch_cudnn" not in of_one_process(both, "torch_cudnn", "deterministic")
    assert with_added({}, later) == later


def test_a_run_adds_what_rows_lack_and_nothing_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    options = argparse.Namespace(device="cpu", untimed=False, attentions=["own", "flash_attention_4"], add=[])
    options.trees, options.heads, options.head_dim = TINY_TREES[:2], (4, 2), 16
    full = TINY._replace(causal=False)
    for benchmark, key, run in (
        ("flash-training-cpu", "shape", lambda: flash_training.rows_of((TINY, full), options)),
        ("trees-cpu", "tree", lambda: trees.rows_of(options)),
    ):
        options.add, options.attentions = [], ["own"]
        first = list(run())
        write_result(benchmark, {"rows": [row | {"date": "then", "commit": "a"} for row in first]})
        options.add = ["deterministic"]
        for row in run():  # one by one, as a run that is ended does
            write_result(benchmark, {"rows": with_earlier(benchmark, [row], (key,))})
            break
        kept = read_result(benchmark)["rows"]
        assert "deterministic" in kept[0] and "deterministic" not in kept[1]
        assert kept[0]["date"] == "then" and kept[0]["own"] == first[0]["own"]
        assert [row[key] for row in run()] == [first[1][key]]
    options.heads = (4, 4)
    with pytest.raises(SystemExit, match=r"row of 16 \+ 3x8 has heads of 4/2 × 16; add to it with these"):
        list(trees.rows_of(options))


@pytest.mark.parametrize("name", TINY_TREES[:2])
def test_a_tiny_run_of_trees(name: str) -> None:
    row = trees.row_of(name, (4, 2), 16, list(trees.NAMES), "cpu")
    assert row["tree"] == name and row["heads"] == "4/2" and row["work_ratio"] > 1
    assert all(row[way]["error"] < 0.02 for way in ("default", "own", "deterministic", "repeated"))
    assert set(row["plan"]) == {"tree", "tables", "flex_attention"}
    assert "missing" in row["cudnn_flex"] and "missing" in row["paths_flash_attention_4"]


@pytest.mark.parametrize("name", TINY_TREES[:2])
def test_a_step_on_a_tree_is_that_on_repeated_sequences(name: str) -> None:
    row = training_block.row_of(name, training_block.TINY, "cpu")
    assert row["tree_step"]["loss"] == pytest.approx(row["repeated_step"]["loss"], rel=1e-3)
    assert row["gradient_error"] < 0.03 and "wrong" not in row
    assert row["repeated_tokens"] == sum(map(len, parse_training_tree(name).sequence_indices()))


def test_errors_are_measured_against_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training_checks.ERROR_LENGTH, "cpu", 48)
    rows = training_checks.errors("cpu")
    assert [row["result"] for row in rows] == ["out", "dq", "dk", "dv"] * 2
    assert all(row["own_over_plain"] < 2 and row["deterministic_over_plain"] < 2 for row in rows[:4])


def test_runs_that_differ_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(training_checks.REPEATED, "cpu", (16, "8 + 2x4"))
    monkeypatch.setitem(training_checks.REPEATS, "cpu", 3)
    assert [row["different"] for row in training_checks.repeats("cpu")] == [0, 0]
    calls = count()
    attend = training_checks.ATTENTIONS["torch_math"]
    noisy = {"deterministic": lambda shape, device: lambda *leaves: attend(shape, device)(*leaves) + next(calls)}
    monkeypatch.setattr(training_checks, "ATTENTIONS", noisy)
    assert [row["different"] for row in training_checks.repeats("cpu")] == [3, 0]


@pytest.mark.parametrize(
    ("module", "arguments", "said"),
    [
        ("flash_training", ["--shapes", "causal 8"], "argument --shapes: shape 'causal 8': expected a batch such as"),
        ("flash_training", ["--attentions", "magic"], "argument --attentions: invalid choice: 'magic'"),
        ("trees", ["--trees", "3 / 2x4 / 3x5"], "argument --trees: tree '3 / 2x4 / 3x5': expected levels such as"),
        ("trees", ["--heads", "5/2"], "argument --heads: expected query heads / KV heads such as '32/8', got '5/2'"),
        ("training_block", ["--trees", "x"], "argument --trees: tree 'x': expected levels such as"),
    ],
)
def test_bad_arguments_are_refused(module: str, arguments: list[str], said: str) -> None:
    assert said in " ".join(refusal(f"benchmarks.kernels.{module}", arguments).split())
