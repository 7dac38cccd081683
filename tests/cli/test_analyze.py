"""`trunkattn analyze` from the command line: small logs, what it writes, and what is wrong with a log or an option."""

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from trunkattn.cli.analyze import shown_progress
from trunkattn.cli.app import app

SMALL = ("--concurrency", "2", "--num-pages", "4000", "--page-size", "16")


def run(*arguments: str, code: int = 0) -> str:
    done = CliRunner().invoke(app, ["analyze", *arguments])
    assert done.exit_code == code, done.output
    return " ".join(done.output.replace("│", " ").split())


def refused(*arguments: str) -> str:
    """The message with all white space left out, since it is broken into lines."""
    return run(*arguments, code=2).replace(" ", "")


def mooncake(number: int) -> dict[str, Any]:
    """A request that shares two blocks of 512 tokens with all others."""
    return {"timestamp": 100 * number, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 10 + number]}


def chat(number: int) -> dict[str, Any]:
    system = "You are a careful assistant of a shop. " * 40
    question = f"Where is my order number {number * 7919}?"
    messages = [{"role": "system", "content": system}, {"role": "user", "content": question}]
    return {"messages": messages, "timestamp": 1_790_000_000 + number}


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


@pytest.fixture
def trace(tmp_path: Path) -> str:
    return written(tmp_path / "trace.jsonl", [mooncake(number) for number in range(12)])


def test_a_trace_gives_tables_json_and_a_page(trace: str, tmp_path: Path) -> None:
    files = {kind: tmp_path / f"report.{kind}" for kind in ("json", "html")}
    text = run(trace, *SMALL, "--json", str(files["json"]), "--html", str(files["html"]))
    assert "12 requests of 12 lines" in text and "as logged" in text and "2 at a time" in text
    analysis = json.loads(files["json"].read_text())
    assert [replay["name"] for replay in analysis["replays"]] == ["as logged", "2 at a time"]
    assert analysis["replays"][0]["num_requests"] == 12 and analysis["verdict"] in " ".join(text.split())
    assert 0 < analysis["replays"][0]["hit_rate"] < 1024 / 1100
    page = files["html"].read_text()
    assert page.startswith("<!doctype html>") and analysis["verdict"] in page.replace("\u00a0", " ")


def test_json_to_standard_output_is_all_that_is_printed(trace: str) -> None:
    done = CliRunner().invoke(app, ["analyze", trace, *SMALL, "--json", "-"])
    assert done.exit_code == 0 and json.loads(done.stdout)["log"]["num_requests"] == 12


@pytest.mark.parametrize("show_text", [False, True])
def test_text_stays_out_unless_it_is_asked_for(tmp_path: Path, show_text: bool) -> None:
    log = written(tmp_path / "chats.jsonl", [chat(number) for number in range(8)])
    page = tmp_path / "report.html"
    shown = ("--show-text",) if show_text else ()
    text = run(log, *SMALL, "--html", str(page), "--json", str(tmp_path / "a.json"), *shown)
    for output in (text, (tmp_path / "a.json").read_text()):
        assert "careful assistant" not in output
    assert ("careful assistant" in page.read_text()) is show_text


def test_a_compressed_log_is_recognised(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(gzip.compress("".join(json.dumps(mooncake(number)) + "\n" for number in range(5)).encode()))
    assert "5 requests of 5 lines" in run(str(path), *SMALL)


def test_a_wrong_line_is_told_or_ends_all(trace: str) -> None:
    with Path(trace).open("a") as file:
        file.write("{ no JSON\n" + json.dumps({**mooncake(3), "input_length": -1}) + "\n")
    text = run(trace, *SMALL)
    assert "12 requests of 14 lines, 2 skipped" in text
    assert "line 13 skipped" in text and "line 14 skipped" in text and "input_length" in text
    assert "line13" in refused(trace, "--strict", *SMALL)


def test_the_bar_shows_the_name_of_any_log() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with shown_progress(console) as progress:
        progress("reading [/red]", 0.5)
    assert "reading [/red]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_field_of_a_log_is_not_called_by_the_option_of_its_name(tmp_path: Path) -> None:
    wrong = written(tmp_path / "chats.jsonl", [chat(0) | {"output_tokens": "many"}])
    assert "LOG:chats.jsonl:nothingtaken;line1:output_tokens=atext" in refused(wrong, *SMALL)


def test_an_empty_name_is_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path / "chats.jsonl", [chat(0)])
    monkeypatch.chdir(tmp_path)
    assert "'':expectedafile,afolder,or-forstandardinput" in refused("")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "abacus"], "--gpu: 'abacus': expected a card whose engines were measured: NVIDIA H100, NVIDIA H200"),
        (["--model", "abacus"], "--model: 'abacus': expected one of"),
        (["--tokenizer", "nowhere"], "nowhere"),
        (["--format", "abacus"], "--format: 'abacus': expected auto"),
        (["--tp", "3"], "--tp: 3: expected a number of cards"),
        (["--kv-cache-dtype", "int4"], "--kv-cache-dtype: 'int4': expected one of"),
        (["--concurrency", "0"], "--concurrency: 0: expected an integer of at least 1"),
        (["--concurrency", "two"], "--concurrency': 'two': expected an integer"),
        (["--rate", "-1"], "--rate: -1.0: expected a finite number of requests per second above 0"),
        (["--page-size", "0"], "--page-size: 0: expected"),
        (["--num-pages", "0"], "--num-pages: 0: expected"),
        (["--max-num-batched-tokens", "8"], "--max-num-batched-tokens: 8: expected at least --max-num-seqs"),
        (["--kv-cache-bytes", "1KiB"], "--kv-cache-bytes: 1024: expected at least the 2097152 bytes of a page"),
        (["--num-pages", "4", "--kv-memory", "1GiB"], "--num-pages: 4: expected it without --kv-cache-bytes"),
        (["--model", "llama-3-70b"], "llama-3-70b has"),
        (["--scheduler-policy", "magic"], "--scheduler-policy: 'magic': expected one of"),
        (["--route", "magic"], "--route: 'magic': expected one of random"),
        (["--replicas", "0"], "--replicas: 0: expected"),
        (
            ["--html", "no/such/folder/a.html"],
            "--html: 'no/such/folder/a.html': expected a file in a folder that exists",
        ),
        (["--json", "."], "--json: '.': expected a file, and this is a folder"),
    ],
)
def test_a_bad_option_is_named(trace: str, arguments: list[str], message: str) -> None:
    found = refused(trace, *arguments)
    assert message.replace(" ", "").replace("_", "-") in found.replace("_", "-"), found


def test_what_is_no_log_is_refused(tmp_path: Path) -> None:
    assert "LOG" in refused(str(tmp_path / "nowhere.jsonl"))
    for content in ("", "\n\n", "not JSON\n", '{"weather": "fine"}\n', "[]", "\x00\xff\xfe"):
        path = tmp_path / "log.jsonl"
        path.write_text(content, encoding="latin-1")
        assert "log.jsonl" in refused(str(path)), content
    (tmp_path / "empty").mkdir()
    assert "empty" in refused(str(tmp_path / "empty"))


def test_a_log_without_times_is_replayed_at_chosen_loads(tmp_path: Path) -> None:
    rows = [{name: value for name, value in chat(number).items() if name != "timestamp"} for number in range(6)]
    log = written(tmp_path / "chats.jsonl", rows)
    text = run(log, *SMALL, "--rate", "0.5,4")
    assert "0.5 requests/s" in text and "4 requests/s" in text and "as logged" not in text


def test_a_fleet_has_a_row_for_each_route(trace: str) -> None:
    text = run(trace, *SMALL, "--replicas", "2")
    assert "in a fleet of 2 engines" in text and all(route in text for route in ("random", "round-robin", "sharers"))
    assert "round-robin" not in run(trace, *SMALL, "--replicas", "2", "--route", "prefix")
