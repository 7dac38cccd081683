"""The demo on a tiny model and a few customers; its figures, tables and picture."""

import io
import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from trunkattn.cli.app import app
from trunkattn.cli.demo.command import run_demo, serve_command
from trunkattn.cli.demo.measure import BatchRun, Step, measurement
from trunkattn.cli.demo.report import DemoResult
from trunkattn.cli.demo.workload import DemoWorkload
from trunkattn.cli.options.engine import DemoOptions

PAGE = 4
GUIDE = "The shop opens at nine and closes at six. Tea costs two euros, coffee costs three euros. " * 6
NOTES = {
    "Garden": "You know all about flowers, trees and lawns. " * 3,
    "Kitchen": "You know all about pots and pans. " * 3,
}
CUSTOMERS = (("Ada", "Garden"), ("Ben", "Kitchen"), ("Cleo", "Garden"), ("Dan", "Kitchen"), ("Eve", "Garden"))


def small_workload() -> DemoWorkload:
    return DemoWorkload(
        chats=tuple(
            [
                {"role": "system", "content": GUIDE + NOTES[department]},
                {"role": "user", "content": f"My name is {name}. What do you know?"},
            ]
            for name, department in CUSTOMERS
        ),
        customers=tuple(name for name, _ in CUSTOMERS),
        departments=tuple(department for _, department in CUSTOMERS),
    )


@pytest.fixture(scope="module")
def shown(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[DemoResult, str]:
    """A whole demo, and what it printed."""
    console = Console(file=io.StringIO(), width=100)
    options = DemoOptions(max_tokens=10, page_size=PAGE, out=tmp_path_factory.mktemp("demo") / "new[" / "b]out")
    result = run_demo(options, tiny_folder, small_workload(), console)
    assert isinstance(console.file, io.StringIO)
    return result, console.file.getvalue()


def test_policies_differ_in_what_they_read_alone(shown: tuple[DemoResult, str]) -> None:
    alone, auto = (shown[0].policies[policy] for policy in ("per_query", "auto"))
    assert shown[0].identical_answers == len(CUSTOMERS)
    assert auto.output_tokens == alone.output_tokens == 10 * len(CUSTOMERS)
    assert auto.kv_tokens_read < 0.5 * alone.kv_tokens_read
    assert auto.kv_bytes_read == auto.kv_tokens_read * 2 * 2 * 2 * 8 * 4, "K and V, layers, heads, head_dim, float32"
    assert auto.kv_bytes_held == alone.kv_bytes_held < 0.5 * auto.kv_bytes_unshared
    for measured in (alone, auto):
        assert 8 <= measured.decode_steps <= 9 + 2
        assert 0 < measured.time_to_first_token < measured.seconds
        assert measured.tokens_per_second == measured.output_tokens / measured.seconds
        assert measured.decode_tokens_per_second > 0


def test_it_ends_with_the_line_that_starts_a_server(shown: tuple[DemoResult, str], tiny_folder: Path) -> None:
    last = shown[1].splitlines()[-1]
    assert last.startswith("Serve this model: ")
    assert last.endswith(f"trunkattn serve --model {tiny_folder}")


def test_the_server_finds_the_kernels_that_the_demo_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["/venv/bin/trunkattn", "demo"])
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/kept here")
    assert serve_command(Path("m")) == "NUMBA_CACHE_DIR='/kept here' /venv/bin/trunkattn serve --model m"
    monkeypatch.delenv("NUMBA_CACHE_DIR")
    assert serve_command(Path("m")) == "/venv/bin/trunkattn serve --model m"


def test_the_decode_rate_leaves_out_the_steps_that_compute_prompts() -> None:
    metrics = SimpleNamespace(time_to_first_token=4.0)
    answer = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * 3)], metrics=metrics, time_per_output_token=1.0)
    steps = [
        Step(4.0, 100, 1, 0.0, 0.0),
        Step(0.5, 1, 1, 30.0, 60.0),
        Step(1.5, 1, 1, 40.0, 80.0),
    ]
    peak = SimpleNamespace(pages_held=7, unshared_pages=9)
    llm = SimpleNamespace(config=SimpleNamespace(page_size=16), kv_cache=SimpleNamespace(bytes_per_token=10))
    found = measurement("auto", BatchRun([answer], steps, 6.0, peak), llm)
    assert (found.decode_steps, found.decode_tokens_per_second, found.tokens_per_second) == (2, 2 / 2.0, 3 / 6.0)
    assert (found.kv_tokens_read, found.kv_bytes_read) == (35.0, 350.0)
    assert (found.kv_bytes_held, found.kv_bytes_unshared) == (7 * 160, 9 * 160)


def test_the_cache_figures_add_up(shown: tuple[DemoResult, str]) -> None:
    paged, contiguous = shown[0].cache["paged"], shown[0].cache["contiguous"]
    for figures in (paged, contiguous):
        assert figures.held == figures.tokens + figures.reserved + figures.internal
        assert figures.utilisation == figures.tokens / figures.held
    assert paged.held % PAGE == 0 and paged.external == 0
    assert contiguous.held == 512 * len(CUSTOMERS)
    assert 0 <= contiguous.reserved <= 10 * len(CUSTOMERS)
    assert contiguous.utilisation < paged.utilisation


def test_customers_figures_and_the_picture_are_printed(shown: tuple[DemoResult, str]) -> None:
    result, text = shown
    words = " ".join(text.split())
    for expected in ("Ada, garden", "Dan, kitchen", "… and 1 more answers", "median time", "utilisation", "5 of 5"):
        assert expected in words
    assert str(result.picture) in text.replace("\n", "")  # whose folders' names look like rich's marks


def test_the_result_is_json(shown: tuple[DemoResult, str]) -> None:
    printed = json.loads(json.dumps(asdict(shown[0])))
    assert [answer["customer"] for answer in printed["answers"]] == [name for name, _ in CUSTOMERS]
    assert printed["settings"]["page_size"] == PAGE and printed["settings"]["requests"] == len(CUSTOMERS)


def test_the_picture_has_the_colours_of_the_forest(shown: tuple[DemoResult, str]) -> None:
    assert shown[0].picture is not None
    pixels = matplotlib.image.imread(shown[0].picture)[..., :3]
    assert pixels.shape[0] > 400 and pixels.shape[1] > 1000
    colours, counts = np.unique((pixels * 255).round().astype(np.uint8).reshape(-1, 3), axis=0, return_counts=True)
    large = {tuple(colour.tolist()) for colour, count in zip(colours, counts, strict=True) if count > 5000}
    assert len(large) >= 5, "white, the trunk, the departments, private tokens, one query at a time"


def test_json_mode_prints_nothing_of_its_own(tiny_folder: Path, tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), width=100)
    workload = small_workload()
    two = replace(
        workload, chats=workload.chats[:2], customers=workload.customers[:2], departments=workload.departments[:2]
    )
    result = run_demo(DemoOptions(max_tokens=8, page_size=16, out=tmp_path, as_json=True), tiny_folder, two, console)
    assert isinstance(console.file, io.StringIO) and "utilisation" not in console.file.getvalue()
    assert result.identical_answers == 2 and result.settings["page_size"] == 16


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--max-tokens", "7"], ["--max-tokens", "7", "an integer of at least 8"]),
        (["--page-size", "0"], ["--page-size", "0", "an integer of at least 1"]),
        (["--out", __file__], ["--out", "expected a folder"]),
        (["--out", "/sys"], ["--out", "/sys/demo-forest.png", "cannot be written"]),
    ],
)
def test_a_bad_value_is_named(arguments: list[str], expected: list[str]) -> None:
    result = CliRunner().invoke(app, ["demo", *arguments])
    message = "".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2, message
    for words in expected:
        assert "".join(words.split()) in message, message
