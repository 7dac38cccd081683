"""Every example runs here, or compiles where it needs a GPU or an engine (tests/on_gpu runs those for a GPU)."""

import re
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
ELSEWHERE = ("cuda_graph.py", "vllm_offline.py", "sglang_offline.py")  # a GPU, engines


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs an example as a script and returns what it prints."""

    def run_it(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_it


def number(pattern: str, text: str) -> float:
    found = re.search(pattern, text)
    assert found, text
    return float(found[1])


def test_every_example_is_tested() -> None:
    tested = {"library_cpu.py", "mixed_step.py", "training.py", "train_tree.py", "plan_stats.py", "nano.py", *ELSEWHERE}
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_it_answers_help_and_refuses_what_it_does_not_know(
    run: Callable[..., str], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Also without a GPU and without the engine that it is for."""
    for argument, code in (("--help", 0), ("--nonsense", 2)):
        with pytest.raises(SystemExit) as ended:
            run(name, argument)
        assert ended.value.code == code
    said = capsys.readouterr()
    assert f"examples/{name}" in said.out and f"usage: {name}" in said.err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("name", ["mixed_step.py", "training.py"])
def test_a_device_that_is_not_there_is_refused(
    run: Callable[..., str], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    with pytest.raises(SystemExit):
        run(name, "--device", "cuda")
    assert "error: --device cuda: torch finds no GPU; expected cpu" in capsys.readouterr().err


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_example_that_cannot_run_here_compiles(name: str) -> None:
    compile((EXAMPLES / name).read_text(), name, "exec")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_example_for_one_ends_in_a_sentence(run: Callable[..., str]) -> None:
    with pytest.raises(SystemExit, match="needs an NVIDIA GPU"):
        run("cuda_graph.py")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_without_its_engine_an_example_ends_in_a_sentence(
    run: Callable[..., str], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, engine, None)
    with pytest.raises(SystemExit, match="is not installed: pip install -e"):
        run(f"{engine}_offline.py", "model")


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize(("option", "value", "least"), [("questions", 0, 1), ("repeat", -1, 1), ("max-tokens", 1, 2)])
def test_a_count_that_measures_nothing_is_refused(
    run: Callable[..., str],
    engine: str,
    option: str,
    value: int,
    least: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, engine, SimpleNamespace(LLM=None, SamplingParams=None))
    with pytest.raises(SystemExit):
        run(f"{engine}_offline.py", "model", f"--{option}={value}")
    assert f"--{option} {value}: expected {least} or more" in capsys.readouterr().err


def test_the_example_of_the_library_reads_a_shared_prefix_once(run: Callable[..., str]) -> None:
    text = run("library_cpu.py")
    assert "736 KV tokens read instead of 16608" in text  # 512 shared once, 7 for each of 32
    assert number(r"float64: (\S+)", text) < 1e-5


def test_the_example_of_a_mixed_step_reads_little_and_errs_little(run: Callable[..., str]) -> None:
    text = run("mixed_step.py")
    assert number(r"(\d+) KV tokens read", text) < 800
    assert number(r"error: (\S+) of out", text) < 1e-5


def test_the_example_of_training_learns(run: Callable[..., str]) -> None:
    text = run("training.py", "--steps", "40")
    assert number(r"step 40: loss (\S+)", text) < 0.1 * number(r"step 1: loss (\S+)", text)


def test_the_example_of_a_tree_trains_as_its_sequences_do(run: Callable[..., str], small_model: str) -> None:
    text = run("train_tree.py", small_model, "--steps", "1")
    as_tree, as_sequences = number(r"loss (\S+) as a tree", text), number(r", (\S+) as sequences", text)
    assert abs(as_tree - as_sequences) < 1e-4
    assert number(r"a gradient: (\S+)", text) < 1e-3


def test_the_example_of_statistics_orders_policies_by_what_they_read(run: Callable[..., str]) -> None:
    rows = {line.split()[0]: line.split() for line in run("plan_stats.py").splitlines()[1:6]}
    tokens = {policy: int(row[1]) for policy, row in rows.items()}
    assert tokens["per_query"] > tokens["relay"] > tokens["pat"]
    assert tokens["cascade"] == 16 * (64 + 2 * 16 + 4 * 128 + 32 * 4)


def test_nano_reads_shared_tokens_once(run: Callable[..., str]) -> None:
    assert "56 KV tokens read instead of 204" in run("nano.py")
