"""`trunkattn generate`: answers, JSON, and what a bad value says."""

import io
import json
import math
import sys
from pathlib import Path
from typing import get_type_hints

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from trunkattn.cli.app import app
from trunkattn.cli.generate import _file_text, _standard_input, print_stream, run_generate, valid_json
from trunkattn.cli.options.engine import GenerateOptions
from trunkattn.cli.options.from_dataclass import fields_of
from trunkattn.cli.options.sampling import _read
from trunkattn.engine import LLM, EngineConfig, SamplingParams
from trunkattn.engine.config import SCHEDULER_POLICIES


def invoke(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, ["generate", *map(str, arguments)], input=stdin)


def test_the_answer_alone_goes_to_standard_output(tiny_folder: Path) -> None:
    result = invoke("--model", tiny_folder, "--prompt", "The capital of France is", "--no-chat", "--max-tokens", 8)
    assert result.exit_code == 0, result.output
    params = SamplingParams(temperature=0, max_tokens=8)
    assert (
        result.stdout.strip()
        == LLM(tiny_folder).generate("The capital of France is", params)[0].outputs[0].text.strip()
    )
    assert "Loading" in result.stderr


def test_json_holds_what_the_library_answers(tiny_folder: Path, tmp_path: Path) -> None:
    prompts = ["The shop opens at nine. When does it close?", "The shop opens at nine. Who runs it?"]
    files = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for file, prompt in zip(files, prompts, strict=True):
        file.write_text(prompt)
    arguments = ["--prompt-file", files[0], "--prompt-file", files[1], "--no-chat", "--max-tokens", 6, "-n", 2]
    sampling = ["--temperature", 0.8, "--top-p", 0.9, "--top-k", 50, "--seed", 3, "--logprobs", 2]
    result = invoke("--model", tiny_folder, *arguments, *sampling, "--page-size", 4, "--policy", "pat", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    params = SamplingParams(n=2, max_tokens=6, temperature=0.8, top_p=0.9, top_k=50, seed=3, logprobs=2)
    expected = LLM(tiny_folder, page_size=4, policy="pat").generate(prompts, params)
    assert [output["prompt"] for output in printed["outputs"]] == prompts
    for one, other in zip(printed["outputs"], expected, strict=True):
        assert [answer["token_ids"] for answer in one["answers"]] == [answer.token_ids for answer in other.outputs]
        assert [answer["text"] for answer in one["answers"]] == [answer.text for answer in other.outputs]
        assert all(len(answer["logprobs"]) == 6 for answer in one["answers"])
        first = one["answers"][0]["logprobs"][0]
        assert {entry["token_id"] for entry in first} == set(other.outputs[0].logprobs[0])  # type: ignore[index]
    assert 0 < printed["stats"]["kv_tokens_read"] <= printed["stats"]["kv_tokens_per_query"]


def test_scheduling_options_reach_the_engine(tiny_folder: Path) -> None:
    prompts = ["one two three four", "five six seven eight nine", "ten"]
    steps = []
    for options in ({}, {"max_num_seqs": 2}, {"max_num_seqs": 3, "max_num_batched_tokens": 3}):
        for policy in SCHEDULER_POLICIES:
            chosen = {**options, "scheduler_policy": policy}
            arguments = [str(part) for name, value in chosen.items() for part in (f"--{name.replace('_', '-')}", value)]
            arguments += [part for prompt in prompts for part in ("--prompt", prompt)]
            result = invoke(
                "--model", tiny_folder, "--no-chat", "--max-tokens", 4, "--ignore-eos", "--json", *arguments
            )
            llm = LLM(tiny_folder, **chosen)
            llm.generate(prompts, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))
            assert json.loads(result.stdout)["stats"]["steps"] == llm.stats.steps
            steps.append(llm.stats.steps)
    assert len(set(steps)) >= 4, "the options make a difference"


def test_sampling_options_reach_the_library(tiny_folder: Path, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": ["red", "blue"]}')
    numbers = ["--min-p", 0.1, "--repetition-penalty", 1.2, "--presence-penalty", 0.3, "--frequency-penalty", 0.4]
    counts = ["--min-tokens", 2, "--prompt-logprobs", 1, "--truncate-prompt-tokens", 3, "--allowed-token-ids", 5]
    texts = ["--bad-words", "x", "--logit-bias", "5=1.5", "--logit-bias", "6=-2", "--keep-special-tokens"]
    common = ["--model", tiny_folder, "--no-chat", "--json", "--prompt", "one two three four five"]
    result = invoke(*common, *numbers, *counts, *texts, "--max-tokens", 4)
    assert result.exit_code == 0, result.output
    (output,) = json.loads(result.stdout)["outputs"]
    assert output["answers"][0]["token_ids"] == [5, 5, 5, 5] and output["prompt_tokens"] == 3
    assert output["prompt_logprobs"][0] is None and len(output["prompt_logprobs"]) == 3
    for option, value, texts in (
        ("--json-schema", schema, ['"red"', '"blue"']),
        ("--regex", "a[bc]d", ["abd", "acd"]),
        ("--choice", "yes", ["yes"]),
    ):
        answer = json.loads(invoke(*common, option, value).stdout)["outputs"][0]["answers"][0]
        assert answer["text"] in texts and answer["finish_reason"] == "stop"


def test_options_are_the_librarys() -> None:
    options = GenerateOptions(Path("model"))
    given = fields_of(EngineConfig, options)
    assert given["scheduler_policy"] == EngineConfig().scheduler_policy and "model" not in given
    assert EngineConfig(**given) == EngineConfig(), "a default of the command is the engine's"
    described = " ".join(
        get_type_hints(GenerateOptions, include_extras=True)["scheduler_policy"].__metadata__[0].help.split()
    )
    assert all(policy in described for policy in SCHEDULER_POLICIES)
    chosen = GenerateOptions(Path("model"), stop=["a", "b"], top_k=3, seed=5)
    expected = SamplingParams(stop=("a", "b"), top_k=3, seed=5, temperature=0, max_tokens=128)
    assert chosen.sampling_params() == expected
    biased = GenerateOptions(Path("model"), logit_bias=["3=-1.5", "4=2"], keep_special_tokens=True).sampling_params()
    assert biased.logit_bias == {3: -1.5, 4: 2.0} and not biased.skip_special_tokens


def test_json_is_always_valid() -> None:
    printed = valid_json({"a": [-math.inf, math.nan, 1.5, 2], "b": ("x\udce9", None, True), "c\ud83d": "é"})
    assert printed == {"a": [None, None, 1.5, 2], "b": ["x?", None, True], "c?": "é"}
    json.dumps(printed, allow_nan=False).encode()


def test_a_missing_package_is_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    result = invoke("--model", tiny_folder, "--prompt", "Hello", "--regex", "a")
    check_usage_error(result, ["needs the package llguidance", ".[structured]"])


@pytest.mark.parametrize("arguments", [["--no-chat"], ["--chat"]])
def test_text_that_is_not_utf8_is_named(tiny_folder: Path, arguments: list[str]) -> None:
    result = invoke("--model", tiny_folder, "--prompt", "caf\udce9 is", *arguments)
    check_usage_error(result, ["--prompt", "expected UTF-8 text"])
    result = CliRunner().invoke(app, ["generate", "--model", str(tiny_folder), *arguments], input=b"caf\xe9 is")
    check_usage_error(result, ["standard input", "expected UTF-8 text"])


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "text"
    path.write_text("Hello", encoding="utf-8-sig")
    assert _file_text(path) == _read("json_schema", path) == "Hello"
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeffHello"))
    assert _standard_input() == "Hello"


def test_what_is_shown_of_a_prompt_is_no_markup(tiny_folder: Path) -> None:
    for prompt in (r"C:\[/bold] :smile:", "[red]a"):
        result = invoke(tiny_folder, "--prompt", prompt, "--prompt", "b", "--max-tokens", 1, "--no-chat")
        assert result.exit_code == 0, result.exception
        assert prompt in result.stdout


def test_text_names_each_prompt_and_shows_logprobs(tiny_folder: Path) -> None:
    prompts = ("--prompt", "First [question]", "--prompt", "Second question")
    result = invoke("--model", tiny_folder, *prompts, "--max-tokens", 3, "--logprobs", 1, "--ignore-eos")
    assert result.exit_code == 0, result.output
    assert "First [question]" in result.stdout and "Second question" in result.stdout
    assert "log-probability" in result.stdout


def test_a_chat_is_the_default_and_standard_input_is_a_prompt(tiny_folder: Path) -> None:
    plain, chat = (
        json.loads(invoke("--model", tiny_folder, "--max-tokens", 2, "--json", *flags, stdin="Hello there").stdout)
        for flags in (["--no-chat", "--prompt-file", "-"], [])
    )
    assert plain["outputs"][0]["prompt"] == chat["outputs"][0]["prompt"] == "Hello there"
    assert chat["outputs"][0]["prompt_tokens"] > plain["outputs"][0]["prompt_tokens"] + 4


def test_one_prompt_on_a_terminal_is_streamed(tiny_folder: Path) -> None:
    llm = LLM(tiny_folder)
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    console = Console(file=io.StringIO(), force_terminal=True, color_system=None, width=200)
    (streamed,) = print_stream(llm.stream("Hello", params), console)
    assert isinstance(console.file, io.StringIO)
    answer, cut, figures = console.file.getvalue().rstrip("\n").rsplit("\n", 2)
    (expected,) = llm.generate("Hello", params)
    assert answer == streamed.outputs[0].text == expected.outputs[0].text
    assert cut.startswith("… cut after 9 tokens")
    assert "9 answer tokens" in figures and figures.endswith("ended by length")


def test_stop_ends_an_answer(tiny_folder: Path) -> None:
    arguments = ("--model", tiny_folder, "--prompt", "Hello", "--no-chat", "--max-tokens", 12, "--ignore-eos", "--json")
    free = json.loads(invoke(*arguments).stdout)["outputs"][0]["answers"][0]["text"]
    word = free[len(free) // 2 :][:3]
    stopped = json.loads(invoke(*arguments, "--stop", word).stdout)["outputs"][0]["answers"][0]
    assert stopped["stop_reason"] == word and stopped["text"] == free[: free.index(word)]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--max-tokens", "0"], ["--max-tokens", "0", "an integer of at least 1"]),
        (["--max-tokens", "many"], ["--max-tokens", "'many'", "an integer"]),
        (["--temperature", "-1"], ["--temperature", "-1", ">= 0"]),
        (["--temperature", "hot"], ["--temperature", "'hot'", "a number"]),
        (["--top-p", "1.5"], ["--top-p", "1.5", "(0, 1]"]),
        (["--top-k", "-2"], ["--top-k", "-2", "an integer from -1 to"]),
        (["-n", "0"], ["--n", "0", "an integer from 1 to 16384"]),
        (["--seed", "-1"], ["--seed", "-1"]),
        (["--logprobs", "-1"], ["--logprobs", "-1"]),
        (["--logprobs", "99999999"], ["--logprobs", "99999999"]),
        (["--stop", "a", "--stop", ""], ["--stop: '': expected a text that is not empty"]),
        (["--min-p", "2"], ["--min-p", "2", "a number in [0, 1]"]),
        (["--repetition-penalty", "0"], ["--repetition-penalty", "a finite number above 0"]),
        (["--min-tokens", "500"], ["--min-tokens", "at most --max-tokens=128"]),
        (["--logit-bias", "7=1", "--logit-bias", "07=2"], ["--logit-bias", "'07=2'", "expected each token id once"]),
        (["--logit-bias", "a=b"], ["--logit-bias", "'a=b'", "expected ID=NUMBER"]),
        (["--allowed-token-ids", "x"], ["--allowed-token-ids", "expected an integer"]),
        (["--allowed-token-ids", "99999999"], ["--allowed-token-ids: token id=99999999"]),
        (["--json-schema", "nowhere.json"], ["--json-schema", "nowhere.json", "expected a UTF-8 text file"]),
        (["--regex", "(a"], ["--regex", "'(a': expected a valid regex"]),
        (["--regex", "a" * 9000], ["regex has 9000 characters: expected at most 8192"]),
        (["--json-schema", "pyproject.toml"], ["--json-schema", "expected a JSON schema"]),
        (["--grammar", "pyproject.toml"], ["--grammar", "expected a valid grammar"]),
        (["--regex", "a", "--choice", "b"], ["exactly one of"]),
        (["--page-size", "0"], ["--page-size", "0", "an integer of at least 1"]),
        (["--policy", "magic"], ["--policy", "magic", "per_query"]),
        (["--scheduler-policy", "fifo"], ["--scheduler-policy", "fifo", "chunked_prefill, prefill_first"]),
        (["--device", "abacus"], ["--device", "abacus", "auto, cpu, cuda"]),
        (["--device", "meta"], ["--device", "meta", "auto, cpu, cuda"]),
        (["--gpu-memory-utilization", "2"], ["--gpu-memory-utilization", "2", "a number in (0, 1]"]),
        (["--max-num-seqs", "0"], ["--max-num-seqs", "0", "an integer from 1 to 65536"]),
        (["--max-num-batched-tokens", "255"], ["--max-num-batched-tokens", "255", "at least --max-num-seqs=256"]),
        (["--prompt", " "], ["--prompt", "expected text"]),
        (["--prompt-file", "a.txt"], ["--prompt-file", "one of the two"]),
        (["--prompt", "word " * 600], ["expected 1 to 511"]),
        (["--kv-cache-bytes", "2 elephants"], ["--kv-cache-bytes", "'2 elephants'", "such as 2GiB"]),
        (["--kv-cache-memory-bytes", "0"], ["--kv-cache-bytes", "0", "an integer of at least 1"]),
        (["--dtype", "int8"], ["--dtype", "int8", "float32, bfloat16"]),
        (["--quantization", "int4"], ["--quantization", "'int4'", "int8"]),
        (["--threads", "0"], ["--threads", "0", "an integer from 1"]),
        (["--colour"], ["--colour"]),
    ],
)
def test_a_bad_value_is_named(tiny_folder: Path, arguments: list[str], expected: list[str]) -> None:
    result = invoke("--model", tiny_folder, "--prompt", "Hello", *arguments)
    check_usage_error(result, expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], ["--model"]),
        (["--model", "nowhere"], ["--model", "nowhere", "no such file"]),
        (["--model", __file__], ["--model", "GGUF"]),
        (["--model", str(Path(__file__).parent)], ["--model", "there is no config.json in this folder"]),
    ],
)
def test_a_bad_model_is_named(arguments: list[str], expected: list[str]) -> None:
    check_usage_error(invoke(*arguments, "--prompt", "Hello"), expected)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["-n", "0", "--prompt", "x"], ["--n", "an integer from 1"]),
        (["--prompt", " "], ["--prompt", "expected text"]),
        (["--prompt-file", "nowhere.txt"], ["--prompt-file", "UTF-8"]),
        (["--prompt-file", "-"], ["--model", "no such file"]),  # before standard input is waited for
    ],
)
def test_what_the_command_line_says_is_checked_first(arguments: list[str], expected: list[str]) -> None:
    check_usage_error(invoke("--model", "nowhere", *arguments, stdin=""), expected)


def test_bad_prompts_are_named(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_usage_error(invoke("--model", tiny_folder, stdin=""), ["standard input", "expected text"])
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    check_usage_error(invoke("--model", tiny_folder, "--prompt-file", empty), ["empty.txt", "expected text"])
    check_usage_error(
        invoke("--model", tiny_folder, "--prompt-file", "-", stdin=""), ["standard input", "expected text"]
    )
    monkeypatch.setattr(sys, "stdin", None)
    for options in (GenerateOptions(tiny_folder), GenerateOptions(tiny_folder, prompt_file=[Path("-")])):
        with pytest.raises(typer.BadParameter, match="expected"):
            run_generate(options)
    monkeypatch.undo()
    missing = tmp_path / "missing.txt"
    check_usage_error(invoke("--model", tiny_folder, "--prompt-file", missing), ["--prompt-file", "UTF-8"])


def check_usage_error(result: Result, expected: list[str]) -> None:
    """Exit code 2, the words somewhere in the message, and no traceback. A box wraps the message, within words too."""
    message = "".join(result.output.replace("│", " ").split())
    assert result.exit_code == 2, message
    assert isinstance(result.exception, SystemExit)
    for words in expected:
        assert "".join(words.split()) in message, message
