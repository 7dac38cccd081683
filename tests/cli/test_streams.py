"""What commands read and write: standard input, pipes, files that cannot be written, and what is refused at once."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from trunkattn.cli import streams
from trunkattn.cli.app import app
from trunkattn.cli.streams import as_file, check_writable, print_json, write

from .forked import Ended, run_all

ROW = {"timestamp": 0, "input_length": 40, "output_length": 5, "hash_ids": [1]}


def command(*arguments: str, input: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    program = "import sys, trunkattn.cli as cli; cli.main()"
    return subprocess.run([sys.executable, "-c", program, *arguments], input=input, capture_output=True, timeout=300)


@pytest.mark.parametrize("log", ["-", "/dev/stdin"])
def test_a_log_may_come_through_a_pipe(log: str) -> None:
    done = command("analyze", log, "--concurrency", "2", "--json", "-", input=json.dumps(ROW).encode())
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["log"]
    assert (found["num_requests"], found["source"]) == (1, "standard input" if log == "-" else "stdin")


WRONG: list[list[str]] = [
    *(["analyze", "LOG", "--gpu", "A100"], ["analyze", "LOG", "--tp", "3"], ["analyze", "LOG", "--format", "x"]),
    *(["analyze", "LOG", "--tokenizer", "nowhere"], ["analyze", "LOG", "--tokenizer", "FOLDER"]),
    *(["analyze", "LOG", "--kv-cache-bytes", "1"], ["analyze", "LOG", "--model", "llama-3-70b"]),
    *(["analyze", "LOG", "--json", "LOG"], ["analyze", "FOLDER", "--html", "LOG"]),
    *(["analyze", "LOG", "--json", "-", "--html", "-"], ["analyze", "LOG", "--json", "a", "--html", "./a"]),
    *(["analyze", "LOG", "--concurrency", "", "--no-as-logged"], ["analyze", "LOG", "--concurrency", "1,,4"]),
    *(["analyze", "LOG", "--rate", ","], ["analyze", "LOG", "--max-requests", "-1"]),
    *(["explain", "1,4_16,16", "--gpu", "A100"], ["explain", "1,4_16,16", "--tp", "3"], ["explain", "0_1"]),
    *(["explain", "99999999_1"], ["explain", "1_999999999999"], ["explain", "LOG", "--svg", "LOG"]),
]


@pytest.fixture(scope="module")
def refused(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Ended]]:
    """What each wrong command said, and its log."""
    commands = []
    for number, arguments in enumerate(WRONG):
        folder = tmp_path_factory.mktemp(f"wrong-{number}")
        log = folder / "log.jsonl"
        log.write_text(json.dumps(ROW), encoding="utf-8")
        commands.append((folder, [{"LOG": str(log), "FOLDER": str(folder)}.get(word, word) for word in arguments]))
    logs = [folder / "log.jsonl" for folder, _ in commands]
    return dict(zip(map(" ".join, WRONG), zip(logs, run_all(commands), strict=True), strict=True))


@pytest.mark.parametrize("arguments", [" ".join(words) for words in WRONG])
def test_what_is_wrong_is_refused_before_torch_is_loaded(
    refused: dict[str, tuple[Path, Ended]], arguments: str
) -> None:
    log, ended = refused[arguments]
    assert (ended.code, ended.out) == (2, "") and "torch" not in ended.imported, ended
    assert "expected" in ended.err and "Traceback" not in ended.err
    assert log.read_text(encoding="utf-8") == json.dumps(ROW)


COMMANDS = ("--version", "--help", "demo", "generate MODEL --prompt x", "analyze LOG", "explain 1,4_16,16", "doctor")


@pytest.mark.parametrize("arguments", [*COMMANDS, "doctor --json", "serve --help"])
@pytest.mark.parametrize("redirection", [">&-", "1</dev/null"])
def test_a_command_does_no_work_for_a_result_that_nobody_can_read(arguments: str, redirection: str) -> None:
    line = f"exec '{sys.executable}' -X importtime -m trunkattn {arguments} {redirection}"
    done = subprocess.run(line, shell=True, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, timeout=300)
    told = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 1 and len(told) == 1
    assert "standard output is closed or cannot be written" in told[0] and "| torch" not in done.stderr


def test_without_the_libraries_doctor_tells_the_same() -> None:
    program = "import trunkattn.cli as cli; cli.LIBRARIES = ('no_such_library',); cli.main()"
    line = f"'{sys.executable}' -c \"{program}\" doctor"
    for redirection, expected in ((">&-", "standard output is closed"), (">/dev/full", "is full")):
        done = subprocess.run(f"{line} {redirection}", shell=True, stderr=subprocess.PIPE, text=True, timeout=300)
        assert (done.returncode, "Traceback" in done.stderr) == (1, False) and expected in done.stderr


def test_a_server_needs_no_standard_output(tmp_path: Path) -> None:
    """Its answers go elsewhere, so it goes on to look for the model."""
    line = f"'{sys.executable}' -m trunkattn serve nowhere >&-"
    done = subprocess.run(line, shell=True, stderr=subprocess.PIPE, text=True, timeout=300, cwd=tmp_path)
    assert done.returncode == 2 and "nowhere" in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_file_that_may_not_grow_is_told_in_a_line(tmp_path: Path, unbuffered: str) -> None:
    line = f"ulimit -f 1; '{sys.executable}' -m trunkattn analyze --help > {tmp_path / 'help'}"
    given = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    done = subprocess.run(line, shell=True, stderr=subprocess.PIPE, text=True, timeout=300, env=given)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "File too large" in done.stderr


def test_no_room_for_temporary_files_is_told_in_a_line() -> None:
    program = (
        "import tempfile, trunkattn.cli as cli; cli._run = tempfile.gettempdir; "
        "tempfile._candidate_tempdir_list = lambda: ['/proc/nowhere']; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.count("\n")) == (
        1,
        1,
    ) and "set TMPDIR to a folder that has room" in done.stderr


def test_a_current_folder_that_is_gone_is_told_in_a_line(tmp_path: Path) -> None:
    program = (
        f"import os, trunkattn.cli as cli; os.chdir({str(tmp_path)!r}); os.rmdir({str(tmp_path)!r}); "
        "cli._run = os.getcwd; cli.main()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "current folder no longer exists" in done.stderr


@pytest.mark.parametrize("arguments", [["generate", "", "--prompt", "x"], ["serve", "--model", ""]])
def test_an_empty_model_is_not_the_current_folder(arguments: list[str]) -> None:
    found = CliRunner().invoke(app, arguments)
    assert found.exit_code == 2 and "'': expected a local" in found.output.replace("\n", "")


def test_a_full_disk_is_told_in_a_line() -> None:
    program = "import sys, trunkattn.cli as cli; cli.main()"
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program, "--version"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "is full" in done.stderr


@pytest.mark.parametrize("redirection", ["2>/dev/full", "2>&-"])
def test_an_answer_needs_no_standard_error(tiny_folder: Path, redirection: str) -> None:
    program = f"'{sys.executable}' -m trunkattn generate '{tiny_folder}' --prompt x --max-tokens 2 --json {redirection}"
    done = subprocess.run(program, shell=True, stdout=subprocess.PIPE, timeout=300)
    assert done.returncode == 0
    assert len(json.loads(done.stdout)["outputs"][0]["answers"][0]["token_ids"]) == 2


@pytest.mark.parametrize("closed", [[1], [2], [0, 2], [0, 1, 2]])
def test_a_closed_stream_is_no_files_place(closed: list[int]) -> None:
    """A library that writes to standard error by its number writes into no file that a command opens."""
    program = (
        "import os, trunkattn.cli.streams as streams; streams.prepare_standard_streams(); "
        f"os._exit(any(os.readlink(f'/proc/self/fd/{{number}}') != os.devnull for number in {closed}))"
    )
    closing = " ".join(f"{number}>&-" for number in closed)
    assert subprocess.run(f"'{sys.executable}' -c \"{program}\" {closing}", shell=True).returncode == 0


def test_a_closed_standard_input_is_no_log() -> None:
    line = f"'{sys.executable}' -m trunkattn analyze - <&-"
    done = subprocess.run(line, shell=True, capture_output=True, text=True, timeout=300)
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "anditisclosed" in "".join(done.stderr.replace("│", " ").split())  # a box wraps the message


@pytest.mark.parametrize("name", ["-", "report.html"])
def test_a_report_is_utf8_whatever_a_terminal_or_a_name_has(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, "latin-1", errors="backslashreplace"))
    place = Path(name) if name == "-" else tmp_path / name
    write(place, os.fsdecode("1 × “\U0001f600” ".encode() + b"\xff"))
    assert (raw.getvalue() if name == "-" else place.read_bytes()) == "1 × “\U0001f600” ?".encode()


def test_a_terminal_without_unicode_gets_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "ascii")
    done = command("explain", "1,2_16,16")
    assert done.returncode == 0 and b"\\u2588" in done.stdout, done.stderr


@pytest.mark.parametrize(("encoding", "written"), [("ascii", b"\\ud83d\\ude00"), ("utf-8", "\U0001f600".encode())])
def test_json_is_json_in_every_encoding(monkeypatch: pytest.MonkeyPatch, encoding: str, written: bytes) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding, errors="backslashreplace"))
    print_json(["\U0001f600"])
    assert written in raw.getvalue() and json.loads(raw.getvalue()) == ["\U0001f600"]


def test_a_folder_that_takes_no_file_is_refused() -> None:
    if not Path("/sys").is_dir():
        pytest.skip("needs a folder of the kernel")
    with pytest.raises(ValueError, match=r"html_file='/sys/report.html': it cannot be written: "):
        check_writable("html_file", Path("/sys/report.html"), {})


def test_a_check_leaves_everything_as_it_is(tmp_path: Path) -> None:
    old = tmp_path / "old.json"
    old.write_text("kept", encoding="utf-8")
    check_writable("json_file", old, {})
    check_writable("json_file", tmp_path / "new.json", {old: "LOG"})
    assert [(path.name, path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()] == [("old.json", "kept")]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_file_that_is_not_written_whole_stays_as_it_was(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        raise error

    old = tmp_path / "old.json"
    old.write_text("kept", encoding="utf-8")
    monkeypatch.setattr(streams.os, "replace", fail)
    with pytest.raises((typer.Exit, KeyboardInterrupt)):
        write(old, "new")
    assert [(path.name, path.read_text(encoding="utf-8")) for path in tmp_path.iterdir()] == [("old.json", "kept")]


def test_a_link_stays_a_link_and_a_pipe_a_pipe(tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "target", tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(target)
    write(link, "text")
    assert link.is_symlink() and target.read_text(encoding="utf-8") == "text"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    write(pipe, "text")
    assert os.read(reader, 10) == b"text" and pipe.is_fifo()
    os.close(reader)
    with as_file(target) as place:
        assert place == target
