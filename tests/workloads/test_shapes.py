"""benchmarks/kernels/shapes.py on a CPU: SOL, what outputs are compared with, rows, and processes that are lost."""

import inspect
import json
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.kernels import shape_cells, shapes
from benchmarks.kernels.decode_cases import (
    Shape,
    expected,
    make_case,
    num_copies,
    ours,
    relative_error,
    seen_by,
    sol_us,
)
from benchmarks.lib import report
from benchmarks.lib.subprocesses import Apart, Lost
from benchmarks.peers.gpu_kernels import Case, Features, flash_attention_3
from benchmarks.workloads import TreeLevels, tree_batch
from benchmarks.workloads.shape_table import (
    BATCHES,
    SHAPES,
    SHARED,
    batch_name,
    parse_batch,
    shapes_named,
)
from trunkattn.reference import paged_attention

from .scripts import refusal

SMALL = parse_batch("5 x (48 + 2 groups x 32 + 21)")
LIMITS = (3.0e6, 7.0e8)
FP8 = torch.float8_e4m3fn


@pytest.mark.parametrize("window", [None, 1, 20, 60, 90, 101, 200])
def test_a_window_counts_the_tokens_that_some_query_sees(window: int | None) -> None:
    batch = tree_batch(SMALL, 1)
    visible = [
        row[: int(length)][-(window or 1000) :] for row, length in zip(batch.block_table, batch.seq_lens, strict=True)
    ]
    seen = seen_by(SMALL, window)
    assert seen.tokens == len(np.unique(np.concatenate(visible)))
    assert seen.pairs == sum(map(len, visible))


def test_sol_is_what_the_bytes_take_or_the_arithmetic() -> None:
    (llama,) = shapes_named("llama3-8b 32/8")
    tree = parse_batch(SHARED[0])
    size = (8192 + 64 * 512) * 2 * 8 * 128 * 2 + 2 * 64 * 32 * 128 * 2
    assert sol_us(llama, tree, LIMITS) == pytest.approx(size / 3.0e6)
    assert sol_us(llama, tree, (1e12, 7.0e8)) == pytest.approx(4 * 128 * 32 * 64 * 8704 / 7.0e8)
    in_fp8 = llama._replace(kv_dtype=FP8)
    assert sol_us(in_fp8, tree, LIMITS) == pytest.approx((size + 2 * 64 * 32 * 128 * 2) / 2 / 3.0e6)
    (windowed,) = shapes_named("gpt-oss window")
    assert sol_us(windowed, tree, LIMITS) == pytest.approx((64 * 128 * 2 * 8 * 64 * 2 + 2 * 64 * 64 * 64 * 2) / 3.0e6)


def test_copies_of_a_cache_are_for_what_is_read_of_it() -> None:
    (llama,), (windowed,) = shapes_named("llama3-8b 32/8"), shapes_named("gpt-oss window")
    assert num_copies(llama, parse_batch("64 x (4096)"), 64 * 4096 * 4096) == 2
    assert num_copies(llama, parse_batch("1 x (2048)"), 2048 * 4096) == 48
    assert num_copies(windowed, parse_batch("8 x (8192)"), 8 * 8192 * 2048) == 191  # 128 of 8192 tokens are read
    assert num_copies(windowed, parse_batch("1 x (2048)"), 2048 * 2048) == 400
    assert num_copies(windowed, parse_batch("8 x (8192)"), 10**10) == 3


def small_shape(**options: Any) -> Shape:
    return Shape("small", 6, 2, 32, **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 20},
    "wide window": {"window": 90},
    "cap": {"soft_cap": 5.0},
    "sinks": {"sinks": True},
    "window, sinks, cap": {"window": 37, "sinks": True, "soft_cap": 5.0},
    "fp8": {"kv_dtype": FP8},
    "page 1": {"page_size": 1, "window": 50},
}


def exactly(case: Case) -> torch.Tensor:
    """By the library's oracle."""
    window, soft_cap, sinks = case.features
    out, _ = paged_attention(
        case.q, *case.kv[0], *case.device_batch, sliding_window=window, logits_soft_cap=soft_cap, sinks=sinks
    )
    return out


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_outputs_are_compared_with_the_oracles(options: dict[str, Any]) -> None:
    case = make_case(small_shape(**options), SMALL, "cpu", copies=1)
    torch.testing.assert_close(expected(case), exactly(case), rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(expected(case, [3, 1]), exactly(case)[[3, 1]], rtol=1e-9, atol=1e-12)


def test_an_error_is_in_root_mean_squares_of_the_output() -> None:
    truth = torch.tensor([[3.0, -4.0, 0.0, 0.0]], dtype=torch.float64)
    assert relative_error(truth + torch.tensor([0, 0, 0.5, 0]), truth) == pytest.approx(0.2)
    assert relative_error(truth * math.nan, truth) == math.inf
    with pytest.raises(ValueError, match=r"the output has shape \(4,\): expected \(1, 4\)"):
        relative_error(truth[0], truth)


@pytest.mark.slow
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("fixed", [False, True])
def test_ours_is_right_with_every_option(options: dict[str, Any], fixed: bool) -> None:
    case = make_case(small_shape(**options), SMALL, "cpu", copies=2)
    run, _ = ours(case, fixed)
    for copy in range(2):
        assert relative_error(run(copy), expected(case)) < shape_cells.TOLERANCE


@pytest.mark.parametrize("name", ["window", "cap", "sinks"])
def test_an_output_without_an_option_is_wrong(name: str) -> None:
    """Data on which an option changes little would hide that it is ignored."""
    shape = {"window": small_shape(window=60), "cap": small_shape(soft_cap=50.0), "sinks": small_shape(sinks=True)}[
        name
    ]
    case = make_case(shape, parse_batch("3 x (4096 + 64)"), "cpu", copies=1)
    plain = Case(case.batch, case.q, case.kv, case.levels, Features())
    assert relative_error(expected(plain), expected(case)) > 2 * shape_cells.TOLERANCE


# The parameters of FlashAttention-3's two functions, in order.
METADATA = """batch_size max_seqlen_q max_seqlen_k num_heads_q num_heads_kv headdim cache_seqlens qkv_dtype headdim_v
cu_seqlens_q cu_seqlens_k_new cache_leftpad page_size max_seqlen_k_new causal window_size has_softcap num_splits"""
ATTENTION = """q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k seqused_k q_v dropout_p softmax_scale causal
window_size softcap alibi_slopes deterministic return_attn_probs block_table return_softmax_lse out scheduler_metadata
q_descale k_descale v_descale num_splits fa_version s_aux"""


def bound(names: str, given: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """Arguments by name."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, kind, default=None) for name in names.split()]
    return inspect.Signature(parameters).bind(*given, **named).arguments


class FakeFa3:
    """Takes what FlashAttention-3 takes, and computes it by the oracle."""

    def get_scheduler_metadata(self, *given: Any, **named: Any) -> dict[str, Any]:
        return bound(METADATA, given, named)

    def flash_attn_varlen_func(self, *given: Any, **named: Any) -> torch.Tensor:
        arguments = bound(ATTENTION, given, named)
        q, k, lens, planned = arguments["q"], arguments["k"], arguments["seqused_k"], arguments["scheduler_metadata"]
        assert q.dtype == k.dtype == arguments["v"].dtype == planned["qkv_dtype"]
        assert arguments["max_seqlen_q"] == planned["max_seqlen_q"] == 1
        assert arguments["max_seqlen_k"] == planned["max_seqlen_k"] == int(lens.max())
        assert (planned["batch_size"], planned["page_size"]) == (len(lens), k.shape[1])
        heads = tuple(planned[name] for name in ("num_heads_q", "num_heads_kv", "headdim"))
        assert heads == (q.shape[1], k.shape[2], q.shape[2])
        assert arguments["causal"] and planned["causal"] and arguments["window_size"] == planned["window_size"]
        assert planned["has_softcap"] == (arguments["softcap"] > 0)
        for name in ("q_descale", "k_descale", "v_descale"):
            assert (name in arguments) == (q.dtype == FP8)
            assert name not in arguments or torch.equal(arguments[name], torch.ones(len(lens), k.shape[2]))
        left, right = arguments["window_size"]
        assert right == (-1 if left < 0 else 0)
        options: dict[str, Any] = {"sliding_window": None if left < 0 else left + 1, "sinks": arguments["s_aux"]}
        tables = arguments["block_table"], lens, arguments["cu_seqlens_q"]
        soft_cap = arguments["softcap"] or None
        out, _ = paged_attention(q.float(), k, arguments["v"], *tables, logits_soft_cap=soft_cap, **options)
        return out.bfloat16()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_flash_attention_3_is_told_of_every_option(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fa3", FakeFa3())
    case = make_case(small_shape(**options), SMALL, "cpu", copies=1)
    error = relative_error(flash_attention_3(case)(0), expected(case))
    assert error < shape_cells.tolerance_of(case, "flash_attention_3")
    assert (error > 0.02) == ("kv_dtype" in options)  # 8-bit queries


@pytest.mark.parametrize("name", ["window", "cap", "sinks", "fp8"])
def test_other_peers_refuse_what_they_are_not_told_of(name: str) -> None:
    make_case(small_shape(), SMALL, "cpu", copies=1).require_plain()
    with pytest.raises(ValueError, match="without window, soft cap and sinks alone"):
        make_case(small_shape(**OPTIONS[name]), SMALL, "cpu", copies=1).require_plain()


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is timed on a CPU; a case has two copies."""
    monkeypatch.setattr(shape_cells, "microseconds", lambda run, copies: 10.0 * copies)
    monkeypatch.setattr(shape_cells, "make_case", lambda shape, tree, device: make_case(shape, tree, device, copies=2))


@pytest.mark.slow
def test_a_row_has_every_way_and_says_why_one_is_missing(untimed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fa3", FakeFa3())
    shape = small_shape(kv_dtype=FP8)
    *partial, row = shape_cells.measured_row(shape, SMALL, LIMITS, device="cpu")
    ways = ["trunkattn", "trunkattn_one_graph", "flash_attention_3", "flashinfer_decode"]
    more = ["trunkattn_bfloat16", "trunkattn_one_graph_bfloat16"]
    assert [each["under_way"] for each in partial] == ["case", *ways, "case", *more]
    assert "under_way" not in row and row["sol_us"] > 0 and row["batch"] == batch_name(SMALL)
    assert all(row[way]["us"] == 20 for way in (*ways[:3], *more))
    assert row[ways[0]]["error"] < 0.02 < row[ways[2]]["error"] and row[ways[0]]["items"] > 0
    assert row["flashinfer_decode"] == {"missing": "ValueError: it is run here on heads of 128 alone"}


def test_a_wrong_output_has_no_time(untimed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(small_shape(), SMALL, "cpu", copies=2)
    truth = expected(case)
    right = truth.bfloat16()
    assert "error 0.1" in shape_cells.measure(case, truth, lambda copy: right + 0.1 * truth.std(), 0.05)["wrong"]
    outputs = iter([right.clone(), right.clone(), right * math.nan])
    found = shape_cells.measure(case, truth, lambda copy: next(outputs), 0.05)
    assert found == {"wrong": "error inf after the timing"}
    assert shape_cells.measure(case, truth, lambda copy: right.clone(), 0.05)["us"] == 20

    def stale(copy: int) -> torch.Tensor:  # writes nothing after its first run
        return right

    assert shape_cells.measure(case, truth, stale, 0.05) == {"wrong": "error inf after the timing"}


@pytest.mark.slow
def test_a_way_that_lost_its_processes_is_left_out(untimed: None) -> None:
    (row,) = [row for row in shape_cells.measured_row(
        small_shape(), SMALL, LIMITS, ["trunkattn", "flash_attention_3"], "cpu") if "under_way" not in row]  # fmt: skip
    assert {way for way, cell in row.items() if isinstance(cell, dict) and "missing" in cell} == {
        "trunkattn", "flash_attention_3", "flashinfer_decode",
    }  # fmt: skip
    assert "us" in row["trunkattn_one_graph"]


def test_each_kind_of_kernel_is_compiled_once() -> None:
    names = [(shape.name, shape.kv_dtype) for shape in shape_cells.kernels_of(shapes_named("fp8"))]
    assert len(names) == 6 and names[0] == ("llama3-8b fp8 32/8x128", FP8)
    every = shape_cells.kernels_of(SHAPES)
    assert [shape.name for shape in every] == [shape.name for shape in SHAPES]  # bf16 caches have shapes of their own


def test_what_is_compiled_is_every_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    ran = []

    def fake(case: Case, fixed: bool) -> tuple[Any, None]:
        return lambda copy: ran.append((batch_name(TreeLevels(*zip(*case.levels, strict=True))), fixed)), None

    monkeypatch.setattr(shape_cells, "ours", fake)
    trees = [SMALL, parse_batch("3 x (20)")]
    assert list(shape_cells.compiled(small_shape(), trees, "cpu")) == [*map(batch_name, trees)]
    assert ran == [(batch_name(tree), fixed) for tree in trees for fixed in (False, True)]


@pytest.mark.slow
def test_another_process_runs_cells() -> None:
    process = Apart()
    found = list(process.ask(shape_cells.compiled, small_shape(sinks=True), [SMALL], "cpu", patience=200))
    process.stop()
    assert found == [batch_name(SMALL)]


class FakeProcess:
    """Answers as `plan` says: for each cell rows, then perhaps the end of the process."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []

    def ask(self, function: Any, *arguments: Any, patience: float, until: float = math.inf) -> Iterator[Any]:
        self.asked.append((function.__name__, *arguments))
        if function is shape_cells.measured_limits:
            yield LIMITS
        elif function is shape_cells.compiled:
            if arguments[0].name.startswith("phi"):
                raise Lost("no answer in 150 s")
            yield from map(batch_name, arguments[1])
        else:
            shape, tree, limits, without = arguments
            row = shape_cells.empty_row(shape, tree, limits)
            yield row | {"under_way": "case"}
            yield row | {"under_way": "trunkattn"}
            row["trunkattn"] = {"us": 12.0}
            if shape.name.startswith("phi3") and "trunkattn_one_graph" not in without:
                yield row | {"under_way": "trunkattn_one_graph"}
                raise Lost("the process ended with exit code -11")
            yield row | {"trunkattn_one_graph": {"us": 13.0}}

    def stop(self) -> None: ...


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> shapes.Results:
    """In an empty folder; every process is a fake."""
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    monkeypatch.setattr(shapes, "Apart", FakeProcess)
    return shapes.Results("NVIDIA H100 80GB HBM3")


def saved(folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    rows = json.loads((folder / "shapes-h100.json").read_text())["rows"]
    return {(row["shape"], row["batch"]): row for row in rows}


def test_a_lost_process_costs_its_way_and_no_more(results: shapes.Results, tmp_path: Path) -> None:
    (phi,), (llama,) = shapes_named("phi3"), shapes_named("llama3-8b 32/8")
    trees = [parse_batch(text) for text in BATCHES[:4]]
    cells = [(shape, tree) for shape in (phi, llama) for tree in trees]
    rows = shapes.measure_all(cells, results, {phi.name}, math.inf)
    assert [row["shape"] for row in rows] == 4 * [llama.name] + 4 * [phi.name]  # what may hang comes last
    graphs = [saved(tmp_path)[phi.name, batch]["trunkattn_one_graph"] for batch in BATCHES[:4]]
    assert graphs[:2] == 2 * [{"missing": "the process ended with exit code -11"}] and "us" in graphs[2]
    assert all("under_way" not in row and row["trunkattn"]["us"] == 12 for row in saved(tmp_path).values())


def test_rows_stay_until_their_cell_is_measured_again(results: shapes.Results, tmp_path: Path) -> None:
    (llama,), (qwen,) = shapes_named("llama3-8b 32/8"), shapes_named("qwen3-next")
    tree = parse_batch(BATCHES[0])
    results.add({"shape": qwen.name, "batch": BATCHES[0], "sol_us": 1.0, "trunkattn": {"us": 7.0}}, LIMITS)
    later = shapes.Results(results.card)
    assert not later.lacks(qwen, tree) and later.lacks(llama, tree)
    shapes.measure_all([(llama, tree)], later, set(), math.inf)
    assert [row["shape"] for row in shapes.Results(results.card).rows] == [llama.name, qwen.name]
    assert saved(tmp_path)[qwen.name, BATCHES[0]]["trunkattn"]["us"] == 7
    shapes.measure_all([(qwen, tree)], later, set(), math.inf)
    assert saved(tmp_path)[qwen.name, BATCHES[0]]["trunkattn"]["us"] == 12
    older = saved(tmp_path)[llama.name, BATCHES[0]] | {"commit": "another"}
    later._rows[llama.name, BATCHES[0]] = older
    assert later.lacks(llama, tree)


def test_no_cell_is_begun_after_the_time(results: shapes.Results, capsys: pytest.CaptureFixture[str]) -> None:
    cells = [(SHAPES[0], parse_batch(BATCHES[0]))]
    assert shapes.measure_all(cells, results, set(), 0.0) == []
    assert "stopped after 0 of 1 cells" in capsys.readouterr().out


def test_shapes_that_were_not_compiled_are_named(results: shapes.Results, capsys: pytest.CaptureFixture[str]) -> None:
    trees = [parse_batch(text) for text in BATCHES]
    assert shapes.compile_ahead(SHAPES, trees, 3, math.inf) == {"phi4 40/10x128", "phi3 32/32x96"}
    assert "not compiled: phi3 32/32x96, torch.bfloat16: no answer in 150 s" in capsys.readouterr().out
    assert shapes.compile_ahead(SHAPES[:3], trees, 2, 0.0) == {shape.name for shape in SHAPES[:3]}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--shapes", "llama4"], "argument --shapes: no shape has 'llama4' in its name"),
        (["--batches", "64"], "argument --batches: batch '64': expected a batch such as"),
        (
            ["--batches", "4 x (40 + 5)"],
            "'4 x (40 + 5)': expected shared levels of whole pages, which are of 16 tokens",
        ),
        (["--seconds", "0"], "argument --seconds: expected an integer from 1 to 100000, got '0'"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], said: str) -> None:
    assert said in " ".join(refusal("benchmarks.kernels.shapes", arguments).split())
