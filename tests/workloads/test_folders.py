"""The folders of benchmarks/, and the commands that start its scripts."""

import argparse
import ast
import re
import sys
from pathlib import Path

import pytest
import torch

from benchmarks.lib.options import accepted_by, existing, no_options, parsed_by, usable_device
from benchmarks.workloads.shape_table import parse_batch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
README = (BENCHMARKS / "README.md").read_text()
SCRIPTS = [path for path in BENCHMARKS.rglob("*.py") if '__name__ == "__main__"' in path.read_text()]


def test_only_what_is_about_all_of_it_lies_at_the_top() -> None:
    assert {path.name for path in BENCHMARKS.iterdir() if path.is_file()} == {"README.md", "__init__.py", "mypy.ini"}


def test_the_readme_lists_every_folder() -> None:
    folders = {path.name for path in BENCHMARKS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert set(re.findall(r"^\| \[(\w+)\]", README, re.MULTILINE)) == folders


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_a_script_says_its_own_command(path: Path) -> None:
    module = ".".join(path.relative_to(BENCHMARKS.parent).with_suffix("").parts).removesuffix(".__main__")
    said = re.findall(r"python -m (benchmarks[\w.]+)", ast.get_docstring(ast.parse(path.read_text())) or "")
    assert said and set(said) == {module}


def options_of(module: str) -> set[str]:
    """The options of a script, those that scripts share among them."""
    path = BENCHMARKS.parent.joinpath(*module.split("."))
    path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    files = (path, BENCHMARKS / "engines" / "adapters.py", BENCHMARKS / "lib" / "turn_lock.py")
    return {"--help"} | {name for each in files for name in re.findall(r"\"(--[a-z0-9-]+)\"", each.read_text())}


def test_commands_that_pages_and_scripts_name_have_their_options() -> None:
    docs = (path for path in (BENCHMARKS.parent / "docs").rglob("*.md") if "lab" not in path.parts)
    texts = {path: path.read_text() for path in (*docs, *BENCHMARKS.rglob("*.md"), *SCRIPTS)}
    commands = [
        (path.name, module, name)
        for path, text in texts.items()
        for module, rest in re.findall(r"python -m (benchmarks\.[a-z_.0-9]*[a-z_0-9])([^`#\n]*)", text)
        for name in ("--help", *re.findall(r"--[a-z][a-z0-9-]*", rest))
    ]
    assert len(commands) > 100
    assert not [command for command in commands if command[2] not in options_of(command[1])]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_a_script_reads_its_command_line(path: Path) -> None:
    """One that did not would begin to measure, and to write results, where it is asked for help."""
    called = {node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)}
    names = {func.attr if isinstance(func, ast.Attribute) else getattr(func, "id", "") for func in called}
    assert names & {"ArgumentParser", "no_options"}


def test_every_option_is_explained() -> None:
    for path in (*BENCHMARKS.rglob("*.py"), *(BENCHMARKS.parent / "examples").glob("*.py")):
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        options = [call for call in calls if getattr(call.func, "attr", "") == "add_argument"]
        bare = [call.lineno for call in options if "help" not in {keyword.arg for keyword in call.keywords}]
        assert not bare, f"{path}: an option without help in lines {bare}"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    assert usable_device("cpu") == "cpu"
    with pytest.raises(argparse.ArgumentTypeError, match="torch finds no CUDA device: expected cpu, or an NVIDIA GPU"):
        usable_device("cuda")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_a_script_that_offers_cuda_looks_for_a_gpu(path: Path) -> None:
    text = path.read_text()
    assert 'add_argument("--device"' not in text or "type=usable_device" in text


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(BENCHMARKS)))
def test_a_script_bounds_its_numbers(path: Path) -> None:
    """One that did not would fail after hours, or measure nothing."""
    assert not re.findall(r"type=(?:int|float)\b", path.read_text()), "see `integer` and `positive`"


def test_values_are_refused_with_a_reason(tmp_path: Path) -> None:
    assert existing(str(tmp_path)) == tmp_path
    assert accepted_by(parse_batch)("4 x (8)") == "4 x (8)" and parsed_by(parse_batch)("4 x (8)").tokens == (8,)
    for check, text, reason in (
        (existing, str(tmp_path / "none"), "none: expected a file or a folder that is there"),
        (accepted_by(parse_batch), "4", "batch '4': expected a batch such as"),
        (parsed_by(parse_batch), "4", "batch '4': expected a batch such as"),
    ):
        with pytest.raises(argparse.ArgumentTypeError, match=reason):
            check(text)


def test_a_script_without_options_answers_help_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patched:
        for argument, code in (("--help", 0), ("--rounds", 2)):
            patched.setattr(sys, "argv", ["planner.py", argument])
            with pytest.raises(SystemExit) as ended:
                no_options("What it measures.")
            assert ended.value.code == code
    assert "What it measures." in capsys.readouterr().out
