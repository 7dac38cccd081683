"""The command line: its options, how soon a bad one is refused, and what is imported for that."""

import gc
import os
import re
import subprocess
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
from typer.testing import CliRunner

import trunkattn
from trunkattn.attention import AttentionConfig
from trunkattn.cli.app import app
from trunkattn.cli.models import name_of
from trunkattn.cli.options.analysis import AnalyzeOptions, ExplainOptions
from trunkattn.cli.options.engine import STEP_SECONDS, DemoOptions, GenerateOptions, ServeOptions
from trunkattn.cli.options.from_dataclass import _option_name, command, reported_by_option
from trunkattn.cli.options.kinds import size
from trunkattn.cli.serve import _load as load_to_serve
from trunkattn.engine import LLM, EngineConfig
from trunkattn.engine.model.inspection import inspect_model

from .forked import Ended, run_all

# Runs a command and then prints which large packages it has imported.
IMPORTED = """
import sys
from trunkattn.cli import main
sys.argv = ["trunkattn", *sys.argv[1:]]
try:
    main()
except SystemExit as ended:
    heavy = [name for name in ("torch", "numpy", "numba", "transformers", "fastapi") if name in sys.modules]
    print("ended", ended.code, *heavy)
"""


def last_line(script: str, *arguments: str) -> str:
    done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


ENDED: dict[str, int] = {
    "--version": 0,
    "--help": 0,
    "generate --help": 0,
    "serve --help": 0,
    "analyze --help": 0,
    "explain --help": 0,
    "generate nowhere --prompt a": 2,
    "generate owner/model --prompt a": 2,
    "generate . --prompt a --n 0": 2,
    "generate . --prompt a --temperature -1": 2,
    "generate . --prompt a --policy magic": 2,
    "generate . --prompt a --device abacus": 2,
    "generate . --prompt a --dtype int8": 2,
    "generate . --prompt-file nowhere.txt": 2,
    "generate . --prompt a --kv-cache-bytes many": 2,
    "generate . --prompt a --regex (a": 2,
    "generate . --prompt a --regex " + "a" * 9000: 2,
    "generate . --prompt a --json-schema nowhere.json": 2,
    "generate . --prompt a --json-schema pyproject.toml": 2,
    "generate . --prompt a --grammar pyproject.toml": 2,
    "generate . --prompt a --choice a --regex a": 2,
    "generate . --prompt a --logit-bias a=b": 2,
    "serve nowhere": 2,
    "serve . --port 99999": 2,
    "serve . --max-num-seqs 0": 2,
    "serve . --tool-call-parser magic": 2,
    "analyze nowhere.jsonl": 2,
    "analyze . --concurrency 4,none": 2,
    "analyze . --rate 0": 2,
    "analyze . --route magic": 2,
    "analyze . --page-size 0": 2,
    "analyze . --model nowhere": 2,
    "analyze . --html nowhere/report.html": 2,
    "explain 1,4_16,16 --tp none": 2,
    "generate ~nobody-has-this-name/model --prompt a": 2,
    "analyze ~nobody-has-this-name/log": 2,
    "generate " + "a" * 300 + " --prompt a": 2,
    "serve " + "a" * 300: 2,
    "analyze " + "a" * 300: 2,
    "analyze . --json " + "a" * 300: 2,
}


@pytest.fixture(scope="module")
def ended() -> dict[str, Ended]:
    return dict(zip(ENDED, run_all([(Path.cwd(), arguments.split()) for arguments in ENDED]), strict=True))


@pytest.mark.parametrize("arguments", ENDED)
def test_it_ends_before_a_large_package_is_imported(ended: dict[str, Ended], arguments: str) -> None:
    one = ended[arguments]
    assert (one.code, one.imported) == (ENDED[arguments], []), one


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("2147483648", 2**31),
        ("2GiB", 2**31),
        ("2 gib", 2**31),
        ("1.5MiB", 3 << 19),
        ("512KiB", 1 << 19),
        ("3GB", 3 * 10**9),
        ("7B", 7),
    ],
)
def test_a_size_may_have_a_unit(text: str, expected: int) -> None:
    assert size(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "2Gi", "2 elephants", "1e9", "nan"])
def test_a_bad_size_is_named(text: str) -> None:
    with pytest.raises(typer.BadParameter, match="such as 2GiB"):
        size(text)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/Qwen2.5-0.5B-Instruct", "Qwen2.5-0.5B-Instruct"),
        ("/models/Qwen2.5-0.5B-Instruct/", "Qwen2.5-0.5B-Instruct"),
        ("/models/smollm2-135m.Q8_0.gguf", "smollm2-135m.Q8_0"),
        ("/models/one/../two", "two"),
        (".", Path.cwd().name),
        ("..", Path.cwd().parent.name),
    ],
)
def test_a_model_has_the_name_of_its_folder_or_file(path: str, name: str) -> None:
    assert name_of(Path(path)) == name


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(app, ["--version"]).stdout == f"trunkattn {trunkattn.__version__}\n"


def test_a_model_is_given_once(tiny_folder: Path) -> None:
    arguments = ["--prompt", "Hello", "--max-tokens", "2", "--no-chat"]
    by_name, by_place = (
        CliRunner().invoke(app, ["generate", *model, *arguments])
        for model in (["--model", str(tiny_folder)], [str(tiny_folder)])
    )
    assert by_name.exit_code == by_place.exit_code == 0, by_place.output
    assert by_name.stdout == by_place.stdout
    twice = CliRunner().invoke(app, ["generate", str(tiny_folder), "--model", str(tiny_folder), *arguments])
    assert twice.exit_code == 2 and "expected one" in " ".join(twice.output.split())
    none = CliRunner().invoke(app, ["serve"])
    assert none.exit_code == 2 and "no model given" in none.output and ".gguf" in none.output


def test_a_name_on_hugging_face_is_told_how_to_become_a_folder() -> None:
    with pytest.raises(ValueError, match=r"not downloaded.* run hf download owner/model --local-dir model"):
        LLM("owner/model")
    with pytest.raises(ValueError, match=r"no such file or folder; expected a local"):
        LLM("folder/model.gguf")


def test_a_server_bounds_the_time_of_its_steps(tiny_folder: Path) -> None:
    assert ServeOptions(tiny_folder).max_step_seconds == STEP_SECONDS
    assert ServeOptions(tiny_folder, scheduler_policy="hybrid").max_step_seconds == STEP_SECONDS
    assert ServeOptions(tiny_folder, max_step_seconds=2).max_step_seconds == 2
    assert ServeOptions(tiny_folder, scheduler_policy="prefill_first").max_step_seconds is None
    with pytest.raises(ValueError, match=r"max_step_seconds=0.5: expected None with scheduler_policy='prefill_first'"):
        ServeOptions(tiny_folder, scheduler_policy="prefill_first", max_step_seconds=0.5)


def test_auto_takes_a_gpu_that_computes_attention(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert EngineConfig().device == ServeOptions(tiny_folder).device == "auto"
    assert inspect_model(tiny_folder).device.type == "cpu", "these tests see no GPU"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(AttentionConfig, "supports", lambda *_: [])
    assert inspect_model(tiny_folder).device.type == "cuda"
    assert inspect_model(tiny_folder, device="cpu").device.type == "cpu"
    monkeypatch.setattr(AttentionConfig, "supports", lambda *_: ["the card is too old"])
    assert inspect_model(tiny_folder).device.type == "cpu"


def test_options_reach_the_engine(tiny_folder: Path) -> None:
    asked = [str(tiny_folder), "--prompt", "Hello", "--max-tokens", "3", "--json", "--no-enable-prefix-caching"]
    before = torch.get_num_threads()
    try:
        result = CliRunner().invoke(app, ["generate", *asked, "--dtype", "bfloat16", "--threads", "1"])
        assert result.exit_code == 0 and torch.get_num_threads() == 1, result.output
    finally:
        torch.set_num_threads(before)
    assert '"device": "cpu"' in result.stdout and '"dtype": "bfloat16"' in result.stdout
    assert "runs on the CPU in bfloat16" in " ".join(result.stderr.split())


def test_a_server_does_not_look_for_garbage_among_what_it_has_loaded(tiny_folder: Path) -> None:
    try:
        llm = load_to_serve(ServeOptions(tiny_folder), EngineConfig())
        frozen = gc.get_freeze_count()
        assert frozen and not any(one is llm.engine for one in gc.get_objects())
    finally:
        gc.unfreeze()


def test_an_answer_that_was_cut_is_marked_beside_the_text(tiny_folder: Path) -> None:
    asked = [str(tiny_folder), "--prompt", "One", "--prompt", "Two", "--max-tokens", "3", "--ignore-eos"]
    result = CliRunner().invoke(app, ["generate", *asked])
    assert result.exit_code == 0, result.output
    assert result.stderr.count("cut after 3 tokens") == 2 and "cut after" not in result.stdout
    assert "6 tokens" in result.stderr and "tokens/s" in result.stderr and "first token after" in result.stderr


def test_one_prompt_has_one_time_to_its_first_token(tiny_folder: Path) -> None:
    result = CliRunner().invoke(app, ["generate", str(tiny_folder), "--prompt", "One", "--max-tokens", "2"])
    assert re.search(r"first token after \d+\.\d\d s", result.stderr), result.stderr


def test_a_page_without_tokens_is_refused_before_the_demo_loads_anything() -> None:
    with pytest.raises(ValueError, match="page_size=0: expected an integer of at least 1"):
        DemoOptions(page_size=0)


def without(*packages: str) -> str:
    """Python that hides packages, as where the library alone is installed."""
    return f"import sys; sys.modules.update(dict.fromkeys({packages!r})); "


def test_the_library_alone_says_what_brings_the_engine() -> None:
    script = (
        without("transformers") + "\ntry:\n    from trunkattn import LLM\nexcept ImportError as error: print(error)"
    )
    assert last_line(script) == (
        'trunkattn.LLM needs the package transformers, which comes with the engine: pip install -e ".[engine]"'
    )


def test_doctor_runs_where_the_library_alone_is_installed() -> None:
    hidden = ("typer", "rich")
    script = f"""{without(*hidden)}
import trunkattn.cli as cli
cli.find_spec = lambda name: None
sys.argv = ["trunkattn", "doctor", *sys.argv[1:]]
cli.main()"""
    assert last_line(script) == "The library and the engine work here."
    reader, writer = os.pipe()
    os.close(reader)  # as `| head` does when it has read enough
    done = subprocess.run([sys.executable, "-c", script], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")
    for arguments, code, said in ((["--help"], 0, "usage: trunkattn doctor"), (["--jsno"], 2, "error: unrecognized")):
        done = subprocess.run([sys.executable, "-c", script, *arguments], capture_output=True, text=True)
        assert done.returncode == code and said in done.stdout + done.stderr and "engine work" not in done.stdout


@dataclass(frozen=True)
class NamedOptions:
    """Options whose names on the command line differ from their fields."""

    place: Annotated[str, typer.Argument(metavar="PLACE")]
    card: Annotated[str, typer.Option("--gpu")] = ""
    num_cards: Annotated[int, typer.Option(metavar="INTEGER")] = 1


@pytest.mark.parametrize(
    ("message", "hint"),
    [
        ("place='x': expected y", "PLACE"),
        ("card='x': expected y", "--gpu"),
        ("gpu='x': expected y", "--gpu"),
        ("num_cards='x': expected y", "--num-cards"),
        ("head_dim='x': expected y", None),
        ("nothing is there", None),
    ],
)
def test_a_bad_value_is_reported_by_the_name_on_the_command_line(message: str, hint: str | None) -> None:
    with pytest.raises(typer.BadParameter) as caught, reported_by_option(NamedOptions):
        raise ValueError(message)
    assert caught.value.param_hint == hint
    assert caught.value.message == (message if hint is None else "'x': expected y")


def test_a_message_names_other_options_as_the_command_line_does() -> None:
    with pytest.raises(typer.BadParameter) as caught, reported_by_option(NamedOptions):
        raise ValueError("card='x': expected a card, or num_cards=2; raise head_dim, --num_cards or lower num_cards")
    assert caught.value.message == (
        "'x': expected a card, or --num-cards=2; raise head_dim, --num_cards or lower --num-cards"
    )


PATHS = {
    DemoOptions: ("--out",),
    GenerateOptions: ("--model", "--json-schema", "--grammar", "--prompt-file"),
    ServeOptions: ("--model",),
    AnalyzeOptions: ("LOG", "--tokenizer", "--json", "--html"),
    ExplainOptions: ("--svg",),
}


@pytest.mark.parametrize("options", PATHS)
def test_every_path_may_begin_at_home(options: type[Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    seen: list[Any] = []
    program = typer.Typer()
    program.command()(command(options)(seen.append))
    paths = {field.name: _option_name(field) for field in fields(options) if "Path" in str(field.type)}
    assert tuple(paths.values()) == PATHS[options]
    given = {name: "~/a" if option == "LOG" else f"{option}=~/a" for name, option in paths.items()}
    if options is ExplainOptions:
        given["batch"] = "1,4_16,16"
    result = CliRunner().invoke(program, [*given.values()])
    assert result.exit_code == 0, result.output
    for name in paths:
        assert getattr(seen[0], name) in (tmp_path / "a", [tmp_path / "a"])
